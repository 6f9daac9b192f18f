//! Dead letters in memory: the rules of their storage without a server. It does no I/O and never fails.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bson::DateTime;
use bytes::Bytes;

use super::clock::Clock;
use crate::checkpoint::Checkpoint;
use crate::dead_letter::DeadLetterStorage;
use crate::error::StorageError;
use crate::ids::{Epoch, Owner, SubscriptionId};
use crate::letter::{
    DocumentKey, EvictOutcome, HoldOutcome, Letter, MAX_LETTERS, MAX_SEQUENCES, NewLetter, ParkingLimit, PutOutcome,
    RemoveOutcome, Sequence, covers,
};

/// Keeps dead letters in memory. Clones share one store, and what is in it is lost with the last of them.
///
/// Its clock begins at a fixed date and goes with tokio's.
///
/// ```
/// use mongosub::memory::{self, MemoryCheckpointStorage, MemoryDeadLetterStorage, MemoryModel};
/// use mongosub::{Delivery, DocumentKey, DurableSubscriptions, Failure, Namespace, bson::doc};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = MemoryModel::new();
/// let subscriptions = DurableSubscriptions::new(model.clone(), MemoryCheckpointStorage::new())
///     .dead_letters(MemoryDeadLetterStorage::new());
/// let subscription = subscriptions
///     .subscribe("search_index_v3", |_: Delivery| async { Err(Failure::dead_letter("no such index")) })
///     .await?;
/// model.push(memory::insert(7, doc! {}));
/// model.push(memory::delete(7));
/// subscription.caught_up().await?;
///
/// let sequences = subscriptions.dead_letter_sequences("search_index_v3").await?;
/// assert_eq!(sequences[0].key, DocumentKey::new(Namespace::new("test", "events"), 7));
/// assert_eq!(sequences[0].letters, 2); // the second is parked behind the first
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct MemoryDeadLetterStorage {
    clock: Clock,
    sequences: Arc<Mutex<Sequences>>,
}

type Sequences = BTreeMap<(SubscriptionId, DocumentKey), Stored>;

#[derive(Debug)]
struct Stored {
    letters: Vec<(Letter, Bytes)>,
    /// The place of the newest letter it ever had.
    newest: (Epoch, Checkpoint),
    held: Option<(Owner, DateTime)>,
}

impl Stored {
    fn has_had(&self, letter: &NewLetter) -> bool {
        let is_here =
            |(stored, _): &(Letter, Bytes)| stored.epoch == letter.epoch && stored.position == letter.position;
        covers(&self.newest, letter.epoch, &letter.position) || self.letters.iter().any(is_here)
    }

    fn held(&self, now: DateTime) -> Option<(Owner, DateTime)> {
        self.held.clone().filter(|(_, until)| *until > now)
    }

    fn is_held_by(&self, owner: &Owner) -> bool {
        self.held.as_ref().is_some_and(|(holder, _)| holder == owner)
    }
}

impl MemoryDeadLetterStorage {
    /// A storage with nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    fn now(&self) -> DateTime {
        DateTime::from_millis(self.clock.now())
    }

    fn sequences(&self) -> MutexGuard<'_, Sequences> {
        self.sequences.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn store(&self, letter: &NewLetter, begin: bool) -> PutOutcome {
        let mut sequences = self.sequences();
        let id = &letter.subscription;
        let stored = (Letter::stored(letter, self.now()), letter.event.clone());
        let newest = (letter.epoch, letter.position.clone());
        let place = (id.clone(), letter.key.clone());
        let Some(sequence) = sequences.get_mut(&place) else {
            if !begin {
                return PutOutcome::NoSequence;
            }
            if sequences.keys().filter(|(of, _)| of == id).count() >= MAX_SEQUENCES {
                return PutOutcome::Full(ParkingLimit::Documents);
            }
            sequences.insert(place, Stored { letters: vec![stored], newest, held: None });
            return PutOutcome::Stored;
        };
        if sequence.has_had(letter) {
            return PutOutcome::AlreadyStored;
        }
        if sequence.letters.len() >= MAX_LETTERS {
            return PutOutcome::Full(ParkingLimit::Events);
        }
        sequence.letters.push(stored);
        sequence.newest = newest;
        PutOutcome::Stored
    }
}

fn place(id: &SubscriptionId, key: &DocumentKey) -> (SubscriptionId, DocumentKey) {
    (id.clone(), key.clone())
}

impl DeadLetterStorage for MemoryDeadLetterStorage {
    async fn put(&self, letter: &NewLetter) -> Result<PutOutcome, StorageError> {
        Ok(self.store(letter, true))
    }

    async fn append(&self, letter: &NewLetter) -> Result<PutOutcome, StorageError> {
        Ok(self.store(letter, false))
    }

    async fn sequences(&self, id: &SubscriptionId) -> Result<Vec<Sequence>, StorageError> {
        let (sequences, now) = (self.sequences(), self.now());
        let own = sequences.iter().filter(|((of, _), _)| of == id);
        Ok(own.map(|((_, key), stored)| Sequence::new(key.clone(), stored.letters.len(), stored.held(now))).collect())
    }

    async fn letters(&self, id: &SubscriptionId, key: &DocumentKey) -> Result<Vec<Letter>, StorageError> {
        let sequences = self.sequences();
        let letters = sequences.get(&place(id, key)).map(|stored| &stored.letters);
        Ok(letters.into_iter().flatten().map(|(letter, _)| letter.clone()).collect())
    }

    async fn event(&self, letter: &Letter) -> Result<Option<Bytes>, StorageError> {
        let sequences = self.sequences();
        let stored = sequences.get(&place(&letter.subscription, &letter.key)).map(|stored| &stored.letters);
        let found = stored.into_iter().flatten().find(|(stored, _)| stored.reference == letter.reference);
        Ok(found.map(|(_, event)| event.clone()))
    }

    async fn hold(
        &self,
        id: &SubscriptionId,
        key: &DocumentKey,
        owner: &Owner,
        lease: Duration,
    ) -> Result<HoldOutcome, StorageError> {
        let now = self.now();
        let mut sequences = self.sequences();
        let Some(stored) = sequences.get_mut(&place(id, key)) else { return Ok(HoldOutcome::NoSequence) };
        if let Some((holder, until)) = stored.held(now)
            && holder != *owner
        {
            return Ok(HoldOutcome::HeldBy { owner: holder, until });
        }
        let lease = i64::try_from(lease.as_millis()).unwrap_or(i64::MAX);
        let until = DateTime::from_millis(now.timestamp_millis().saturating_add(lease));
        stored.held = Some((owner.clone(), until));
        Ok(HoldOutcome::Held)
    }

    async fn release(&self, id: &SubscriptionId, key: &DocumentKey, owner: &Owner) -> Result<(), StorageError> {
        if let Some(stored) = self.sequences().get_mut(&place(id, key)) {
            stored.held.take_if(|(holder, _)| holder == owner);
        }
        Ok(())
    }

    async fn note_failure(&self, letter: &Letter, owner: &Owner, error: &[String]) -> Result<bool, StorageError> {
        let now = self.now();
        let mut sequences = self.sequences();
        let stored = sequences.get_mut(&place(&letter.subscription, &letter.key));
        let Some(stored) = stored.filter(|stored| stored.is_held_by(owner)) else { return Ok(false) };
        let found = stored.letters.iter_mut().find(|(stored, _)| stored.reference == letter.reference);
        if let Some((found, _)) = found {
            found.attempts = found.attempts.saturating_add(1);
            found.error = error.to_vec();
            found.last_failed_at = Some(now);
            found.first_failed_at.get_or_insert(now);
        }
        Ok(true)
    }

    async fn remove(&self, letter: &Letter, owner: &Owner) -> Result<RemoveOutcome, StorageError> {
        let place = place(&letter.subscription, &letter.key);
        let mut sequences = self.sequences();
        let Some(stored) = sequences.get_mut(&place) else { return Ok(RemoveOutcome::NoSequence) };
        if !stored.is_held_by(owner) {
            return Ok(RemoveOutcome::NotHeld);
        }
        stored.letters.retain(|(stored, _)| stored.reference != letter.reference);
        if !stored.letters.is_empty() {
            return Ok(RemoveOutcome::Removed);
        }
        sequences.remove(&place);
        Ok(RemoveOutcome::Ended)
    }

    async fn evict(&self, id: &SubscriptionId, key: &DocumentKey) -> Result<EvictOutcome, StorageError> {
        let (place, now) = (place(id, key), self.now());
        let mut sequences = self.sequences();
        let Some(stored) = sequences.get(&place) else { return Ok(EvictOutcome::NoSequence) };
        if let Some((owner, until)) = stored.held(now) {
            return Ok(EvictOutcome::HeldBy { owner, until });
        }
        Ok(EvictOutcome::Evicted(sequences.remove(&place).map_or(0, |stored| stored.letters.len())))
    }
}
