//! Positions that are stored in the deliver task, because the handler's work stores them itself: those behind events it did
//! not settle, quiet ones above all. So no write is ever made beside an open transaction. Called by `barrier`.

use std::time::Duration;

use tracing::warn;

use crate::backoff::Backoff;
use crate::checkpoint::{Checkpoint, Kind};
use crate::ids::Epoch;
use crate::model::SubscriptionModel;
use crate::reason::Reason;
use crate::run::deliver::{Deliver, Ended};
use crate::run::progress::Mark;
use crate::run::repeats::Repeats;
use crate::storage::{Hand, Save, SaveOutcome};

impl<M: SubscriptionModel> Deliver<M> {
    /// What goes with every position of this run.
    pub(crate) fn template(&self) -> Save {
        let nowhere = Checkpoint::Text("".into());
        Save {
            pipeline: Some(self.pipeline.clone()),
            source: Some(self.source.clone()),
            ..Save::new(self.id.clone(), self.ownership.clone(), self.epoch, nowhere)
        }
    }

    /// Stores a position, however often that takes.
    pub(crate) async fn store(&mut self, mark: &Mark) -> Result<(), Ended> {
        if mark.events == 0 && !self.recorded {
            // A start that is not to be recorded: nothing is stored before an event is.
            return Ok(());
        }
        let mut save = Save { position: mark.position.clone(), kind: mark.kind, ..self.template() };
        save.epoch = Epoch(self.epoch.0 + i64::from(mark.epoch));
        save.keep_event(self.desk.last_event());
        if self.careful.is_some() && self.desk.view().in_hand.is_none() {
            // What is noted as in hand was settled without a transaction.
            save.hand = Hand::Empty;
        }
        if mark.kind == Kind::Invalidate
            && let Some(source) = &mut save.source
        {
            source.collection_uuid = None;
        }
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
        let mut repeats = Repeats::default();
        loop {
            let answer = tokio::select! {
                biased;
                answer = self.work.store(save.clone()) => answer,
                () = self.signals.abandon.cancelled() => return Err(Ended::Asked),
            };
            let error = match answer {
                Ok(SaveOutcome::Saved { at }) => {
                    self.desk.stored_by_work(mark.clone(), at);
                    return Ok(());
                }
                Ok(SaveOutcome::NotAhead) => {
                    self.desk.stored_by_work(mark.clone(), None);
                    return Ok(());
                }
                Ok(SaveOutcome::Superseded { owner, since }) => {
                    return Err(Ended::Stopped(Reason::Superseded { owner, since }));
                }
                Ok(SaveOutcome::Gone) => return Err(Ended::Stopped(Reason::Deleted)),
                Err(error) if error.is_retryable() => error,
                Err(error) => return Err(Ended::Stalled(error.reason())),
            };
            if repeats.is_due() {
                let (id, position, failures) = (&self.id, &mark.position, repeats.count());
                warn!(subscription = %id, %position, failures, "subscription {id} could not store {position}: {error}");
            }
            tokio::select! {
                biased;
                () = self.signals.stop.cancelled() => return Err(Ended::Asked),
                () = tokio::time::sleep(backoff.next_wait()) => {}
            }
        }
    }
}
