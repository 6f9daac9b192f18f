//! Transactions in memory: values that are stored together with a position, or not at all. For tests of handlers and of
//! runs; it does no I/O.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;

use bson::Bson;
use tokio::sync::oneshot;

use super::checkpoint_storage::{MemoryCheckpointStorage, Records, save_into};
use crate::handler::Failure;
use crate::storage::{Record, Save, SaveOutcome};
use crate::transactional_storage::{Begun, Committed, TransactionError, TransactionalStorage};

/// Values by key, each with the number of the commit that wrote it.
pub(super) type Values = BTreeMap<String, (u64, Bson)>;

/// The transaction that a delivery is handled in, with a [`MemoryCheckpointStorage`]: it reads and writes values by key,
/// which are stored with the event's position, or not at all. [`MemoryCheckpointStorage::value`] shows what is stored.
///
/// ```
/// use mongosub::bson::doc;
/// use mongosub::memory::{self, MemoryCheckpointStorage, MemoryModel, MemoryTransaction};
/// use mongosub::{Delivery, DurableSubscriptions};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (model, storage) = (MemoryModel::new(), MemoryCheckpointStorage::new());
/// let subscription = DurableSubscriptions::new(model.clone(), storage.clone())
///     .subscribe_in_transaction("totals_v1", |mut transaction: MemoryTransaction, _: Delivery| async move {
///         let events = transaction.get("events").and_then(|events| events.as_i32()).unwrap_or(0);
///         transaction.set("events", events + 1);
///         Ok(())
///     })
///     .await?;
/// model.push(memory::insert(1, doc! {}));
/// subscription.caught_up().await?;
/// assert_eq!(storage.value("events"), Some(1.into()));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MemoryTransaction {
    staged: Option<Staged>,
    back: Option<oneshot::Sender<Staged>>,
}

impl MemoryTransaction {
    /// A value: as it was when the transaction began, or as it was set in it since.
    pub fn get(&self, key: &str) -> Option<Bson> {
        let staged = self.staged.as_ref()?;
        staged.writes.get(key).or_else(|| staged.before.get(key).map(|(_, value)| value)).cloned()
    }

    /// Sets a value.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Bson>) {
        if let Some(staged) = &mut self.staged {
            staged.writes.insert(key.into(), value.into());
        }
    }
}

impl Drop for MemoryTransaction {
    fn drop(&mut self) {
        if let (Some(staged), Some(back)) = (self.staged.take(), self.back.take()) {
            // Who lent it may have gone, and nothing of it is stored then.
            let _ = back.send(staged);
        }
    }
}

#[derive(Debug)]
struct Staged {
    before: Values,
    writes: BTreeMap<String, Bson>,
}

/// What a run makes its [`MemoryTransaction`]s with.
#[derive(Debug, Default)]
pub struct MemorySession {
    /// As it was when the open one began.
    record: Option<Record>,
    staged: Option<Staged>,
    lent: Option<oneshot::Receiver<Staged>>,
}

/// What a handler fails with when its transaction is to be run again, as after a conflict with another writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conflict;

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("another writer was there first")
    }
}

impl Error for Conflict {}

impl MemoryCheckpointStorage {
    /// A value that a transaction has stored.
    pub fn value(&self, key: &str) -> Option<Bson> {
        self.records().values.get(key).map(|(_, value)| value.clone())
    }

    /// Stores a value, as another writer does: transactions that write it and have begun fail, and run again.
    pub fn set_value(&self, key: impl Into<String>, value: impl Into<Bson>) {
        let Records { values, commits, .. } = &mut *self.records();
        *commits += 1;
        values.insert(key.into(), (*commits, value.into()));
    }
}

impl TransactionalStorage for MemoryCheckpointStorage {
    type Transaction = MemoryTransaction;
    type Session = MemorySession;

    async fn begin(&self, session: &mut MemorySession, save: &Save) -> Result<Begun, TransactionError> {
        let records = self.records();
        let Some(record) = records.by_id.get(&save.id).cloned() else { return Ok(Begun::Gone) };
        let is_later = record.epoch.is_some_and(|epoch| epoch > save.epoch);
        if record.ownership.as_ref() != Some(&save.ownership) || is_later {
            let (owner, since) = (record.ownership.map(|now| now.owner), record.claimed_at);
            return Ok(Begun::Superseded { owner, since });
        }
        let stored = record.position.clone().filter(|_| record.epoch == Some(save.epoch));
        let staged = Staged { before: records.values.clone(), writes: BTreeMap::new() };
        *session = MemorySession { record: Some(record), staged: Some(staged), lent: None };
        Ok(Begun::Open { stored })
    }

    fn lend(&self, open: &mut MemorySession) -> MemoryTransaction {
        let (back, lent) = oneshot::channel();
        open.lent = Some(lent);
        MemoryTransaction { staged: open.staged.take(), back: Some(back) }
    }

    async fn take_back(&self, open: &mut MemorySession) -> Result<(), String> {
        open.staged = open.lent.take().and_then(|mut lent| lent.try_recv().ok());
        let kept = || "the handler has kept its transaction beyond its return".to_owned();
        open.staged.is_some().then_some(()).ok_or_else(kept)
    }

    fn is_transient(&self, failure: &Failure) -> bool {
        failure.cause().is::<Conflict>()
    }

    async fn commit(&self, open: &mut MemorySession, save: &Save) -> Result<Committed, TransactionError> {
        let now = self.now();
        let Records { by_id, values, commits, .. } = &mut *self.records();
        let conflict = || TransactionError::Transient { message: Conflict.to_string() };
        let Some(Staged { before, writes }) = open.staged.take() else { return Err(conflict()) };
        let number = |values: &Values, key: &String| values.get(key).map(|(number, _)| *number);
        let is_moved = writes.keys().any(|key| number(values, key) != number(&before, key));
        if is_moved || by_id.get(&save.id) != open.record.as_ref() {
            return Err(conflict());
        }
        Ok(match save_into(by_id, save, now) {
            SaveOutcome::Saved { at } => {
                *commits += 1;
                values.extend(writes.into_iter().map(|(key, value)| (key, (*commits, value))));
                Committed::Stored { at }
            }
            SaveOutcome::NotAhead => Committed::NotAhead,
            SaveOutcome::Superseded { owner, since } => Committed::Superseded { owner, since },
            SaveOutcome::Gone => Committed::Gone,
        })
    }

    async fn abort(&self, open: &mut MemorySession) {
        *open = MemorySession::default();
    }
}
