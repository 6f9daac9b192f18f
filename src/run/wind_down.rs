//! How a run comes to rest: the event in hand, the handler's last flush, the last save. Part of `durable`'s `Run`.

use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use crate::model::SubscriptionModel;
use crate::run::barrier::WindUp;
use crate::run::core::Turn;
use crate::run::deliver::Ended;
use crate::run::durable::{Goal, LAST_SAVE, Run};
use crate::run::progress::Mark;
use crate::storage::CheckpointStorage;

/// A handler that blocks its thread cannot be dropped: its task is left behind when it has not ended after this.
const LEFT_BEHIND: Duration = Duration::from_secs(1);

impl<M: SubscriptionModel, S: CheckpointStorage> Run<M, S> {
    /// Asks the delivering to stop, waits for the event in hand, abandons it when the grace is over.
    pub(crate) async fn stop_delivering(&mut self, goal: Goal, grace_ends: Instant) -> Goal {
        self.core.signals.stop.cancel();
        self.await_delivering(goal, grace_ends).await
    }

    /// Has the handler flush once more and, when the run ends and the id is still its own, let go.
    pub(crate) async fn wind_up(&mut self, goal: Goal, grace_ends: Instant) -> Goal {
        let has_barrier = self.core.at_rest.as_ref().is_some_and(|deliver| deliver.barrier && deliver.told);
        if !has_barrier || self.core.saver.is_frozen() || goal == Goal::Cancel {
            return goal;
        }
        let ends = matches!(goal, Goal::Stop(_));
        if ends {
            // What is stored stands still meanwhile: no less than that can be let go of.
            self.core.saver.freeze();
            while self.core.saver.is_writing() {
                match self.step_until(Some(grace_ends.max(Instant::now() + LEFT_BEHIND))).await {
                    Some(Turn::Lost(lost)) => return self.lost(lost, Some(goal)),
                    Some(_) => {}
                    None => break,
                }
            }
        }
        let stored = self.core.saver.stored().cloned();
        self.core.wind_up(if ends { WindUp::Ends { stored } } else { WindUp::Rests });
        let reached = self.await_delivering(goal.clone(), grace_ends).await;
        // Not for a run that has lost its record meanwhile.
        if ends && reached == goal {
            self.core.saver.thaw();
        }
        reached
    }

    /// Waits until the delivering rests, and abandons its call when the grace is over.
    async fn await_delivering(&mut self, mut goal: Goal, grace_ends: Instant) -> Goal {
        let mut deadline = Some(grace_ends);
        while self.core.delivering.is_some() {
            let Some(turn) = self.step_until(deadline).await else {
                if !self.core.signals.abandon.is_cancelled() {
                    self.warn_abandoned();
                    self.core.signals.abandon.cancel();
                    // A run that can be resumed needs its handler back, so it waits for one that blocks its thread.
                    let resumable = matches!(goal, Goal::Pause | Goal::Stall(_));
                    deadline = (!resumable).then(|| Instant::now() + LEFT_BEHIND);
                } else if let Some(task) = self.core.delivering.take() {
                    task.abort();
                }
                continue;
            };
            match turn {
                // A feed that has ended cannot be paused.
                Turn::Delivered(Ended::Stopped(reason)) if goal == Goal::Pause => goal = self.stopped(reason),
                Turn::Nothing | Turn::Delivered(_) => {}
                Turn::Lost(lost) => goal = self.lost(lost, Some(goal)),
            }
        }
        goal
    }

    /// Stores everything storable, with what is left of the grace and at least ten seconds.
    pub(crate) async fn last_save(&mut self, goal: Goal, grace_ends: Instant) -> Goal {
        let deadline = grace_ends.max(Instant::now() + LAST_SAVE);
        if goal == Goal::Cancel {
            // The write in flight is awaited to its end, and nothing is written behind it.
            self.core.saver.freeze();
        } else {
            let view = self.core.desk.view();
            if let Some(wanted) = self.core.saver.outstanding(&view).map(|mark| mark.seq) {
                self.core.saver.hurry(wanted);
            }
            self.core.saver.empty_hand();
            if let Goal::Stop(_) = goal {
                self.mark_clean();
            }
        }
        loop {
            let view = self.core.desk.view();
            if self.core.saver.is_done(&view) {
                return goal;
            }
            let deadline = (goal != Goal::Cancel).then_some(deadline);
            match self.step_until(deadline).await {
                None => return goal,
                Some(Turn::Lost(_)) if goal == Goal::Cancel => return goal,
                Some(Turn::Lost(lost)) => return self.lost(lost, Some(goal)),
                Some(Turn::Nothing | Turn::Delivered(_)) => {}
            }
        }
    }

    /// The record may say that nothing is to be repeated: everything handed out is settled and storable, and everything
    /// that an earlier run may have handed out has come again.
    fn mark_clean(&mut self) {
        let view = self.core.desk.view();
        let events = |mark: &Option<Mark>| mark.as_ref().map_or(0, |mark| mark.events);
        let unsettled = view.in_hand.is_some() || self.core.desk.given_up().is_some();
        let safe = view.safe.as_ref().map(|mark| &mark.position);
        let repeats_nothing = self.core.has_passed_what_may_repeat(safe);
        if !unsettled && repeats_nothing && events(&view.storable) == events(&view.safe) {
            self.core.saver.mark_clean();
        }
    }

    pub(crate) async fn step_until(&mut self, deadline: Option<Instant>) -> Option<Turn> {
        match deadline {
            Some(deadline) => tokio::time::timeout_at(deadline, self.core.step()).await.ok(),
            None => Some(self.core.step().await),
        }
    }

    fn warn_abandoned(&self) {
        let position = self.core.desk.view().in_hand.map(|hand| hand.position.to_string()).unwrap_or_default();
        let (id, seconds) = (&self.id, self.grace.as_secs());
        warn!(
            subscription = %id, position, seconds,
            "the handler of subscription {id} did not finish the event at {position} within {seconds} s: it is dropped, and the event comes again"
        );
    }
}
