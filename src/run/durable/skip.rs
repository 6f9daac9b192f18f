//! Steps over events by hand in a run: it comes to rest, stores the position behind them with the audit entry, and goes
//! on from there.

use tokio::time::Instant;
use tracing::warn;

use super::{Goal, LAST_SAVE, Reply, Run, no_answer};
use crate::audit::Note;
use crate::checkpoint::Checkpoint;
use crate::error::{SourceError, SubscriptionError};
use crate::ids::Epoch;
use crate::model::SubscriptionModel;
use crate::reason::Reason;
use crate::run::core::Turn;
use crate::run::deliver::is_beyond;
use crate::run::desk::Jump;
use crate::run::open::Opening;
use crate::run::parking::Parked;
use crate::run::skip::{Skip, Unfit};
use crate::run::skip_letters::{KEPT_WITHIN, Keeping};
use crate::status::{Phase, State};
use crate::storage::CheckpointStorage;

impl<M: SubscriptionModel, S: CheckpointStorage> Run<M, S> {
    /// Answers whether the run has ended by it.
    pub(super) async fn skip(&mut self, skip: Skip, reply: Reply<()>) -> bool {
        let state = self.core.board.snapshot().state;
        let rests = matches!(state, State::Paused | State::Stalled(_));
        if let Err(unfit) = self.may_skip(&skip).await {
            let error = self.unfit(unfit);
            return self.answer(None, reply, Err(error));
        }
        let grace_ends = Instant::now() + self.grace;
        self.renewal.at = None;
        let goal = self.stop_delivering(Goal::Pause, grace_ends).await;
        let goal = self.wind_up(goal, grace_ends).await;
        if goal != Goal::Pause {
            return self.ends_instead(goal, reply).await;
        }
        // The event in hand may have been settled meanwhile.
        if let Err(unfit) = skip.is_ahead_of(self.stands_at().as_ref()) {
            let error = self.unfit(unfit);
            return self.goes_on(!rests, reply, Err(error)).await;
        }
        if let Err(unfit) = self.keep(&skip).await {
            let error = self.unfit(unfit);
            return self.goes_on(!rests, reply, Err(error)).await;
        }
        let seq = self.jump(&skip, &state);
        self.core.saver.thaw();
        let deadline = Instant::now() + LAST_SAVE;
        while self.core.saver.stored().is_none_or(|stored| stored.seq < seq) {
            match self.step_until(Some(deadline)).await {
                None => {
                    self.core.board.set(|conditions| conditions.phase = Phase::Paused);
                    let last = self.core.saver.last_error().cloned().unwrap_or_else(|| no_answer().reason());
                    let (id, position) = (self.id.clone(), skip.through);
                    return self.answer(None, reply, Err(SubscriptionError::NotSaved { id, position, last }));
                }
                Some(Turn::Lost(lost)) => {
                    let goal = self.lost(lost, None);
                    return self.ends_instead(goal, reply).await;
                }
                Some(Turn::Nothing | Turn::Delivered(_)) => {}
            }
        }
        self.goes_on(state != State::Paused, reply, Ok(())).await
    }

    /// The furthest position that may be stored without a skip.
    fn stands_at(&self) -> Option<Checkpoint> {
        let view = self.core.desk.view();
        view.storable.or(view.safe).map(|mark| mark.position)
    }

    async fn may_skip(&mut self, skip: &Skip) -> Result<(), Unfit> {
        skip.is_ahead_of(self.stands_at().as_ref())?;
        let was = self.core.at_rest.as_ref().map(|deliver| deliver.source.clone());
        let asked = tokio::time::timeout(LAST_SAVE, skip.is_of(&self.model, was.as_ref())).await;
        let message = || format!("no answer within {} s", LAST_SAVE.as_secs());
        asked.unwrap_or_else(|_| Err(SourceError::Unavailable { message: message() }.into()))
    }

    /// With a dead letter storage, keeps what can be kept of the events that are skipped.
    async fn keep(&mut self, skip: &Skip) -> Result<(), Unfit> {
        let from = self.stands_at();
        let epochs = i64::from(self.core.desk.epoch());
        let Some((deliver, from)) = self.core.at_rest.as_mut().zip(from) else { return Ok(()) };
        let Some(storage) = deliver.settings.dead_letters.clone() else { return Ok(()) };
        let (id, epoch) = (deliver.id.clone(), Epoch(deliver.epoch.0 + epochs));
        let Opening { model, plan, .. } = deliver.opening.clone();
        // The documents that have dead letters now are asked for anew.
        deliver.trouble.parked = Parked::default();
        let keeping = Keeping { model, plan, storage, id, epoch };
        let kept = keeping.keep(&from, skip);
        let late =
            |_| Err(SourceError::Unavailable { message: "what is skipped could not be kept in time".into() }.into());
        tokio::time::timeout(KEPT_WITHIN, kept).await.unwrap_or_else(late)
    }

    /// Moves to the position, and counts what is known to be stepped over. Answers the number of the position.
    fn jump(&mut self, skip: &Skip, state: &State) -> u64 {
        let (id, through, reason) = (&self.id, &skip.through, &skip.reason);
        let from = self.stands_at();
        let desk = &self.core.desk;
        let left = desk.left_unsettled(through);
        let unsent = match state {
            State::Stalled(Reason::EventTooLarge { position } | Reason::ImageMissing { position, .. }) => {
                !position.is_beyond(through)
            }
            _ => false,
        };
        warn!(
            subscription = %id, %through, reason,
            "subscription {id} skips everything up to {through}, {} event(s) that are known of: {reason}",
            left.len() + usize::from(unsent)
        );
        let mut source = None;
        if let Some(deliver) = &mut self.core.at_rest {
            let handed_out = deliver.handed_out.as_ref();
            let (read, unsent) = (left.len() as u64, u64::from(unsent));
            let new = left.iter().filter(|position| is_beyond(position, handed_out)).count() as u64;
            self.core.board.count(|status| {
                status.events += unsent;
                status.delivered += new + unsent;
                status.settled += read + unsent;
                status.skipped += read + unsent;
            });
            // What was handled and held back behind the position comes again.
            if let Some(safe) = desk.safe().filter(|safe| safe.is_beyond(through)) {
                deliver.maybe_seen.give_up(safe);
            }
            deliver.source = skip.source_behind(&deliver.source);
            source = Some(deliver.source.clone());
        }
        let note = Note::Skipped(skip.audit(from, self.ownership.owner.clone()));
        let seq = desk.jump(through.clone(), Jump { kind: skip.kind(), new_epoch: false, note, source });
        self.core.board.count(|status| status.position = Some(through.clone()));
        seq
    }

    /// Opens behind the last settled position, unless it is to rest, and answers.
    async fn goes_on(&mut self, works: bool, reply: Reply<()>, answer: Result<(), SubscriptionError>) -> bool {
        if !works {
            return self.answer(None, reply, answer);
        }
        self.core.board.set(|conditions| conditions.phase = Phase::Starting);
        let goal = self.set_off().await;
        let ended = match goal {
            Some(goal) => self.reach(goal).await,
            None => None,
        };
        self.answer(ended.as_ref(), reply, answer)
    }

    /// Something graver happened meanwhile.
    async fn ends_instead(&mut self, goal: Goal, reply: Reply<()>) -> bool {
        let ended = self.reach(goal).await;
        let answer = self.verdict(ended.as_ref()).map(|_| ());
        self.answer(ended.as_ref(), reply, answer)
    }

    fn unfit(&self, unfit: Unfit) -> SubscriptionError {
        let id = self.id.clone();
        match unfit {
            Unfit::Asked(field, message) => SubscriptionError::Refused { id, message: format!("{field}: {message}") },
            Unfit::Source(source) => SubscriptionError::Source { id, source },
        }
    }
}
