//! The parking of events behind the dead letters of their document, and the asking of the dead letter storage until it
//! answers. Called by `hand_out` and `failing`; it never calls the handler.

use std::collections::HashSet;
use std::time::Duration;

use tracing::{debug, warn};

use crate::backoff::Backoff;
use crate::delivery::Delivery;
use crate::error::StorageError;
use crate::letter::{DocumentKey, MAX_LETTERS, MAX_SEQUENCES, NewLetter, ParkingLimit, PutOutcome};
use crate::model::SubscriptionModel;
use crate::reason::Reason;
use crate::run::deliver::{Deliver, Ended};
use crate::run::failing::Patience;
use crate::run::hand_out::{Batch, How};
use crate::run::repeats::Repeats;
use crate::storage::BoxFuture;

/// How often a missing privilege is asked for again.
const UNAUTHORIZED_AGAIN: Duration = Duration::from_secs(10);

/// The documents that may have dead letters, as far as the run knows: those that had some when it began, and those it gave
/// some itself. None else gives any. A document that is not here has none; of one that is here the storage knows.
#[derive(Debug, Default)]
pub(crate) struct Parked(Option<HashSet<DocumentKey>>);

impl Parked {
    /// A document is given dead letters.
    pub(crate) fn note(&mut self, key: &DocumentKey) {
        if let Some(known) = self.0.as_mut().filter(|_| key.parks()) {
            known.insert(key.clone());
        }
    }

    fn holds(&self, delivery: &Delivery) -> bool {
        let known = self.0.as_ref().filter(|known| !known.is_empty());
        known.is_some_and(|known| known.contains(&DocumentKey::of(&delivery.event)))
    }
}

impl<M: SubscriptionModel> Deliver<M> {
    /// How many events from the front the next call gets. None is parked, as far as is known here.
    pub(crate) fn deliverable(&self, batch: &[Delivery], patience: &Patience) -> usize {
        if patience.alone {
            return batch.len().min(1);
        }
        batch.iter().take_while(|delivery| !self.trouble.parked.holds(delivery)).count()
    }

    /// Whether any event may have to be parked.
    pub(crate) fn may_park(&self) -> bool {
        self.trouble.parked.0.as_ref().is_some_and(|known| !known.is_empty())
    }

    pub(crate) fn has_to_ask_for_parked(&self) -> bool {
        self.trouble.parked.0.is_none() && self.settings.park_later_events && self.settings.dead_letters.is_some()
    }

    /// Asks, once, which documents have dead letters.
    pub(crate) async fn know_parked(&mut self) -> Result<(), Ended> {
        let Some(storage) = self.settings.dead_letters.clone() else { return Ok(()) };
        let id = self.id.clone();
        let sequences = self.insist(|| storage.dyn_sequences(&id)).await?;
        let known = sequences.into_iter().map(|sequence| sequence.key).filter(DocumentKey::parks);
        self.trouble.parked.0 = Some(known.collect());
        Ok(())
    }

    /// Parks the events at the front whose documents have dead letters, up to the first that is to be delivered.
    pub(crate) async fn park(&mut self, batch: &mut Batch) -> Result<(), Ended> {
        while let Some(first) = batch.first().filter(|first| self.trouble.parked.holds(first)).cloned() {
            let Some(storage) = self.settings.dead_letters.clone() else { return Ok(()) };
            let letter = self.letter(&first);
            match self.insist(|| storage.dyn_append(&letter)).await? {
                PutOutcome::Stored | PutOutcome::AlreadyStored => {
                    let (id, position, key) = (&self.id, &first.position, &letter.key);
                    debug!(subscription = %id, %position, %key, "parked behind the dead letters of its document");
                    self.settle_first(batch, How::Parked).await?;
                }
                PutOutcome::NoSequence => {
                    self.trouble.parked.0.as_mut().map(|known| known.remove(&letter.key));
                }
                PutOutcome::Full(limit) => return Err(full(&letter, limit)),
            }
        }
        Ok(())
    }

    pub(crate) fn letter(&self, delivery: &Delivery) -> NewLetter {
        let key = DocumentKey::of(&delivery.event);
        let (position, event) = (delivery.position.clone(), delivery.event.bytes().clone());
        NewLetter::parked(self.id.clone(), key, delivery.epoch(), position, event)
    }

    /// Asks the dead letter storage until it answers. What it refuses for good needs a person.
    pub(crate) async fn insist<'a, T>(
        &mut self,
        ask: impl Fn() -> BoxFuture<'a, Result<T, StorageError>>,
    ) -> Result<T, Ended> {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
        let mut repeats = Repeats::default();
        loop {
            let answer = tokio::select! {
                biased;
                answer = ask() => answer,
                () = self.signals.abandon.cancelled() => return Err(Ended::Asked),
            };
            let error = match answer {
                Ok(answer) => {
                    if repeats.count() > 0 {
                        self.board.set(|conditions| conditions.letters = None);
                    }
                    return Ok(answer);
                }
                Err(error) => error,
            };
            let wait = match &error {
                StorageError::Unavailable { .. } => backoff.next_wait(),
                StorageError::Unauthorized { .. } => UNAUTHORIZED_AGAIN,
                refused => return Err(Ended::Stalled(refused.reason())),
            };
            if repeats.is_due() {
                let (id, failures) = (&self.id, repeats.count());
                warn!(subscription = %id, failures, "the dead letter storage of subscription {id} fails: {error}");
            }
            let reason = match error.reason() {
                Reason::StorageUnavailable { message } => {
                    Reason::StorageUnavailable { message: format!("dead letters: {message}") }
                }
                reason => reason,
            };
            self.board.set(|conditions| conditions.letters = Some(reason));
            self.rest(wait).await?;
        }
    }
}

pub(crate) fn full(letter: &NewLetter, limit: ParkingLimit) -> Ended {
    let limit = match limit {
        ParkingLimit::Documents => format!("{MAX_SEQUENCES} documents have dead letters"),
        ParkingLimit::Events => format!("the document has {MAX_LETTERS} dead letters"),
    };
    Ended::Stalled(Reason::ParkingFull { position: letter.position.clone(), document: letter.key.to_string(), limit })
}
