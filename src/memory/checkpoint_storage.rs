//! Checkpoints in memory: the rules of a storage without a server, for tests and for subscriptions that need not
//! outlive their process. It does no I/O and never fails.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bson::DateTime;

use super::clock::Clock;
use super::transaction::Values;
use crate::checkpoint::Kind;
use crate::error::StorageError;
use crate::ids::{Epoch, Fence, Ownership, SubscriptionId};
use crate::model::Deployment;
use crate::storage::{CheckpointStorage, Claim, ClaimOutcome, Hand, Record, Save, SaveOutcome};

/// Keeps checkpoints in memory. Clones share one store; it ends with the last of them, and every subscription in it
/// then starts as if it were new.
///
/// Its clock begins at a fixed date and goes with tokio's, so that a test with a paused clock sees the same times, fences
/// and epochs in every run.
///
/// ```
/// use mongosub::memory::MemoryCheckpointStorage;
/// use mongosub::{CheckpointStorage, Claim, SubscriptionId};
///
/// # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
/// let storage = MemoryCheckpointStorage::new();
/// storage.claim(&Claim::new(SubscriptionId::new("search_index_v3")?)).await?;
/// assert_eq!(storage.list().await?, ["search_index_v3"]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct MemoryCheckpointStorage {
    clock: Clock,
    records: Arc<Mutex<Records>>,
}

#[derive(Debug, Default)]
pub(super) struct Records {
    pub(super) by_id: BTreeMap<SubscriptionId, Record>,
    /// The last fence given for an id. It outlives the record, since a paused clock cannot tell two claims apart.
    fences: BTreeMap<SubscriptionId, Fence>,
    /// Whose end the last claim has counted.
    accused: BTreeMap<SubscriptionId, Option<Fence>>,
    /// What transactions have stored.
    pub(super) values: Values,
    /// How many of them there were.
    pub(super) commits: u64,
}

impl MemoryCheckpointStorage {
    /// A storage with nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts a record there as it is, whatever is there already: as an earlier run or another program left it.
    pub fn put(&self, record: Record) {
        self.records().by_id.insert(record.id.clone(), record);
    }

    pub(super) fn now(&self) -> i64 {
        self.clock.now()
    }

    pub(super) fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CheckpointStorage for MemoryCheckpointStorage {
    async fn read(&self, id: &SubscriptionId) -> Result<Option<Record>, StorageError> {
        Ok(self.records().by_id.get(id).cloned())
    }

    async fn claim(&self, claim: &Claim) -> Result<ClaimOutcome, StorageError> {
        let now = self.now();
        let Records { by_id, fences, accused, .. } = &mut *self.records();
        if let Some(expected) = &claim.expect {
            let Some(record) = by_id.get(&claim.id) else { return Ok(ClaimOutcome::Gone) };
            if record.ownership.as_ref() != Some(expected) {
                let owner = record.ownership.as_ref().map(|ownership| ownership.owner.clone());
                return Ok(if owner.as_ref() == Some(&claim.owner) {
                    // This very claim was made before, and its answer was lost.
                    ClaimOutcome::Claimed(record.clone())
                } else {
                    ClaimOutcome::Superseded { owner, since: record.claimed_at }
                });
            }
        }
        let record = by_id.entry(claim.id.clone()).or_insert_with(|| Record::empty(claim.id.clone()));
        let is_own = record.ownership.as_ref().is_some_and(|ownership| ownership.owner == claim.owner);
        if claim.expect.is_none() && !is_own {
            let over = count_end(record);
            accused.insert(claim.id.clone(), over);
        }
        let stored = record.ownership.as_ref().map(|ownership| ownership.fence);
        let last = fences.get(&claim.id).copied().max(stored);
        let fence = Fence(last.map_or(now, |last| now.max(last.0 + 1)));
        fences.insert(claim.id.clone(), fence);
        record.ownership = Some(Ownership { fence, owner: claim.owner.clone() });
        record.claimed_at = Some(DateTime::from_millis(now));
        record.clean = false;
        if let (None, Some(start)) = (&record.position, &claim.start) {
            record.position = Some(start.position.clone());
            record.kind = Some(Kind::Start);
            record.epoch = Some(Epoch(record.epoch.map_or(now, |last| now.max(last.0 + 1))));
            record.cluster_time = start.position.cluster_time();
            record.saved_at = record.claimed_at;
            record.pipeline.clone_from(&start.pipeline);
            record.source.clone_from(&start.source);
        }
        Ok(ClaimOutcome::Claimed(record.clone()))
    }

    async fn save(&self, save: &Save) -> Result<SaveOutcome, StorageError> {
        let now = self.now();
        Ok(save_into(&mut self.records().by_id, save, now))
    }

    async fn delete(&self, id: &SubscriptionId, owner: Option<&Ownership>) -> Result<bool, StorageError> {
        let by_id = &mut self.records().by_id;
        let may = by_id.get(id).is_some_and(|record| owner.is_none() || record.ownership.as_ref() == owner);
        Ok(may && by_id.remove(id).is_some())
    }

    async fn not_dead(&self, id: &SubscriptionId, superseded: &Ownership) -> Result<(), StorageError> {
        let Records { by_id, accused, .. } = &mut *self.records();
        if let Some(record) = by_id.get_mut(id)
            && accused.get_mut(id).is_some_and(|fence| fence.take_if(|fence| *fence == superseded.fence).is_some())
        {
            record.unclean_ends = record.unclean_ends.saturating_sub(1);
            if let Some(in_hand) = &mut record.in_hand {
                in_hand.deaths = in_hand.deaths.saturating_sub(1);
            }
        }
        Ok(())
    }

    async fn list(&self) -> Result<Vec<String>, StorageError> {
        Ok(self.records().by_id.keys().map(ToString::to_string).collect())
    }

    /// The one that a [`MemoryModel`](super::MemoryModel) reads, unless that is told otherwise.
    async fn deployment(&self) -> Result<Option<Deployment>, StorageError> {
        Ok(Some(Deployment { set_name: "memory".into(), hosts: vec!["memory:27017".into()] }))
    }
}

/// Stores a position, or says why not.
pub(super) fn save_into(by_id: &mut BTreeMap<SubscriptionId, Record>, save: &Save, now: i64) -> SaveOutcome {
    let now = DateTime::from_millis(now);
    let Some(record) = by_id.get_mut(&save.id) else { return SaveOutcome::Gone };
    if record.ownership.as_ref() != Some(&save.ownership) {
        let owner = record.ownership.as_ref().map(|ownership| ownership.owner.clone());
        return SaveOutcome::Superseded { owner, since: record.claimed_at };
    }
    if record.is_beyond(save) {
        return SaveOutcome::NotAhead;
    }
    match &save.hand {
        Hand::Unsaid => {}
        Hand::Empty => record.in_hand = None,
        Hand::Holds(in_hand) => {
            record.in_hand = Some(in_hand.clone());
            return SaveOutcome::Saved { at: record.saved_at };
        }
    }
    record.position = Some(save.position.clone());
    record.kind = Some(save.kind);
    record.epoch = Some(save.epoch);
    record.cluster_time = save.position.cluster_time();
    record.saved_at = Some(now);
    record.pipeline.clone_from(&save.pipeline);
    record.source.clone_from(&save.source);
    record.clean = save.clean;
    if let Some(note) = &save.note {
        record.note(note, now);
    }
    SaveOutcome::Saved { at: Some(now) }
}

/// Counts how the owner of the record ended, before another one takes it. Answers whose end it was, if it may be taken back.
fn count_end(record: &mut Record) -> Option<Fence> {
    let Some(before) = record.ownership.as_ref().filter(|_| !record.clean) else {
        record.unclean_ends = 0;
        return None;
    };
    let has_stored = record.saved_at > record.claimed_at;
    record.unclean_ends = if has_stored { 0 } else { record.unclean_ends.saturating_add(1) };
    if let Some(in_hand) = &mut record.in_hand {
        in_hand.deaths = in_hand.deaths.saturating_add(1);
    }
    Some(before.fence)
}
