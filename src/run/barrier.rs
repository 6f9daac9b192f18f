//! What a handler that keeps effects back is asked beside deliveries: to be told where the run stands, to flush before a
//! save, to let go at the end. Called by `deliver` and `hand_out`, in the deliver task, never while an event is handled.

use std::sync::Arc;
use std::time::Duration;

use bson::DateTime;
use tracing::warn;

use crate::checkpoint::{Checkpoint, Kind};
use crate::hold::Hold;
use crate::model::SubscriptionModel;
use crate::reason::Reason;
use crate::run::deliver::{Deliver, Ended};
use crate::run::desk::Unflushed;
use crate::run::progress::Mark;
use crate::run::work::Work;

/// After this a flush shows in the status.
const FLUSH_SHOWN: Duration = Duration::from_secs(30);

/// What was handled and not made safe is lost with its handler: the run begins anew at its stored checkpoint.
#[derive(Debug)]
pub(crate) struct Anew {
    /// What could not be made safe.
    pub(crate) position: Checkpoint,
    pub(crate) error: String,
    /// Another handler is there to begin with.
    pub(crate) has_handler: bool,
}

/// Why a handler is asked once more.
#[derive(Debug)]
pub(crate) enum WindUp {
    /// The run rests, and may go on with it.
    Rests,
    /// The run ends, with this stored.
    Ends { stored: Option<Mark> },
}

/// Tells a run's first handler where it stands. A refusal is that of the start.
pub(crate) async fn tell_first(work: &mut dyn Work, from: Option<Checkpoint>, hold: Hold) -> Result<(), Reason> {
    let position = from.clone().unwrap_or_else(|| Checkpoint::Text("".into()));
    let told = work.claimed(from, hold).await;
    told.map_err(|error| Reason::HandlerFailed { position, attempts: 1, error })
}

impl<M: SubscriptionModel> Deliver<M> {
    pub(crate) fn hold(&self) -> Hold {
        Hold { positions: self.desk.clone() }
    }

    /// Tells a handler, before its first delivery, where the run stands.
    pub(crate) async fn tell_handler(&mut self) -> Result<(), Ended> {
        if self.told {
            return Ok(());
        }
        let (from, stop) = (self.desk.safe(), self.signals.stop.clone());
        let hold = self.hold();
        let told = tokio::select! {
            biased;
            () = stop.cancelled() => return Err(Ended::Asked),
            told = self.board.handover.before(self.work.claimed(from.clone(), hold)) => told,
        };
        self.told = true;
        told.map_err(|error| self.lose_handler(from, format!("it refused to begin: {error}")))
    }

    /// A fresh handler has taken the place of one that failed. It goes on where that one stood, unless that one had kept
    /// something back.
    pub(crate) async fn begin_fresh(&mut self, at: Checkpoint, error: &str) -> Result<(), Ended> {
        self.told = false;
        if self.desk.keeps_something_unsafe() {
            return Err(self.lose_what_was_kept(at, error.to_owned(), true));
        }
        self.tell_handler().await
    }

    /// The call in hand was dropped, since its grace is over.
    pub(crate) fn abandon_call(&mut self) -> Ended {
        if self.work.renew() {
            self.told = false;
            if self.desk.keeps_something_unsafe() {
                let position = self.desk.safe().unwrap_or_else(|| Checkpoint::Text("".into()));
                let error = "its call was dropped".to_owned();
                self.lose_what_was_kept(position, error, true);
            }
        }
        Ended::Asked
    }

    fn lose_what_was_kept(&mut self, position: Checkpoint, error: String, has_handler: bool) -> Ended {
        self.desk.lose_unflushed();
        self.anew = Some(Anew { position, error, has_handler });
        Ended::Anew
    }

    fn lose_handler(&mut self, at: Option<Checkpoint>, error: String) -> Ended {
        let has_handler = self.work.renew();
        self.told = false;
        self.lose_what_was_kept(at.unwrap_or_else(|| Checkpoint::Text("".into())), error, has_handler)
    }

    /// Has the handler flush what may be stored, if it has not.
    pub(crate) async fn flush(&mut self) -> Result<(), Ended> {
        let Some(unflushed) = self.desk.unflushed() else { return Ok(()) };
        if self.work.stores() {
            return self.store(&unflushed.through).await;
        }
        self.ask_flush(&unflushed).await?;
        self.desk.flushed(&unflushed.through);
        Ok(())
    }

    async fn ask_flush(&mut self, unflushed: &Unflushed) -> Result<(), Ended> {
        let Unflushed { through, delivered } = unflushed;
        let answer = self.call_flush(through.position.clone()).await?;
        let covered = answer.and_then(|answer| {
            if through.position.is_beyond(&answer) {
                Err(format!("its flush answered {answer}, which does not cover {}", through.position))
            } else if answer.is_beyond(delivered) {
                Err(format!("its flush answered {answer}, which lies beyond the last delivery, {delivered}"))
            } else {
                Ok(())
            }
        });
        covered.map_err(|error| {
            let (id, position) = (&self.id, &through.position);
            warn!(
                subscription = %id, %position,
                "the handler of subscription {id} could not flush up to {position}: {error}; nothing is stored, and what lies behind the stored checkpoint comes again"
            );
            self.lose_handler(Some(through.position.clone()), error)
        })
    }

    /// Waits for the flush however long it takes, unless the grace of a pause or shutdown is over.
    async fn call_flush(&mut self, through: Checkpoint) -> Result<Result<Checkpoint, String>, Ended> {
        let (board, abandon, since) = (Arc::clone(&self.board), self.signals.abandon.clone(), DateTime::now());
        let answer = {
            let call = board.handover.before(self.work.flush(through));
            tokio::pin!(call);
            let mut shown = false;
            loop {
                tokio::select! {
                    biased;
                    answer = &mut call => break Some(answer),
                    () = abandon.cancelled() => break None,
                    () = tokio::time::sleep(FLUSH_SHOWN), if !shown => {
                        shown = true;
                        board.set(|conditions| conditions.flushing = Some(Reason::Flushing { since }));
                    }
                }
            }
        };
        board.set(|conditions| conditions.flushing = None);
        answer.ok_or_else(|| self.abandon_call())
    }

    /// Has the handler flush once more, and let go when the run ends. What it lets go of lies between
    /// what is stored and what may be.
    pub(crate) async fn wind_up(mut self, why: WindUp) -> (Self, Ended) {
        if self.anew.is_some() {
            return (self, Ended::Asked);
        }
        if self.work.stores() {
            // Its transactions have ended: what is left is the saver's to store.
            if let Some(unflushed) = self.desk.unflushed() {
                self.desk.flushed(&unflushed.through);
            }
            return (self, Ended::Asked);
        }
        let WindUp::Ends { stored } = why else {
            let ended = self.flush().await.err().unwrap_or(Ended::Asked);
            return (self, ended);
        };
        if let Some(unflushed) = self.desk.unflushed()
            && let Err(ended) = self.ask_flush(&unflushed).await
        {
            return (self, ended);
        }
        if let Some(mark) = self.desk.storable() {
            let abandon = self.signals.abandon.clone();
            let answer = tokio::select! {
                biased;
                answer = self.board.handover.before(self.work.released(mark.position.clone())) => answer,
                () = abandon.cancelled() => Err("it took too long".to_owned()),
            };
            match answer {
                Ok(answer) => self.desk.released(Some(&let_go_of(mark, answer, stored.as_ref()))),
                Err(error) => {
                    let (id, position) = (&self.id, &mark.position);
                    warn!(subscription = %id, %position, "the handler of subscription {id} failed to let go at {position}, which is not stored: {error}");
                    self.desk.released(stored.as_ref());
                }
            }
        }
        (self, Ended::Asked)
    }
}

/// The position to store at the end: the answer, clamped to what is stored and what may be.
fn let_go_of(through: Mark, answer: Checkpoint, stored: Option<&Mark>) -> Mark {
    let is_less = through.position.position_cmp(&answer).is_some_and(std::cmp::Ordering::is_gt);
    if !is_less {
        return through;
    }
    if let Some(stored) = stored.filter(|stored| !answer.is_beyond(&stored.position)) {
        return stored.clone();
    }
    let kind = match &answer {
        Checkpoint::Time(_) => Kind::Start,
        position if position.is_invalidate() => Kind::Invalidate,
        position if position.token().is_some_and(|token| token.collection_uuid().is_none()) => Kind::Quiet,
        _ => Kind::Event,
    };
    // Fewer events than were settled, so that the end does not pass for a clean one.
    Mark { position: answer, kind, events: through.events.saturating_sub(1), ..through }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bson::Timestamp;

    fn at(increment: u32) -> Checkpoint {
        Timestamp { time: 7, increment }.into()
    }

    #[test]
    fn what_a_handler_lets_go_of_lies_between_what_is_stored_and_what_may_be() {
        let through = Mark { seq: 9, events: 4, epoch: 0, position: at(9), kind: Kind::Event };
        for (answer, stored, expected) in
            [(9, Some(5), 9), (12, Some(5), 9), (7, Some(5), 7), (3, Some(5), 5), (3, None, 3)]
        {
            let stored = stored.map(|stored| Mark { seq: 5, events: 2, position: at(stored), ..through.clone() });
            let mark = let_go_of(through.clone(), at(answer), stored.as_ref());
            assert_eq!(mark.position, at(expected), "{answer}");
            assert_eq!(mark.events == through.events, expected == 9);
        }
    }
}
