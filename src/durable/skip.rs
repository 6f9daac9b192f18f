//! Steps over events of a subscription that does not run here: the record is claimed, moved, and let go.

use std::time::Duration;

use tracing::warn;

use super::DurableSubscriptions;
use crate::audit::Note;
use crate::checkpoint::Checkpoint;
use crate::error::{SourceError, StorageError, SubscribeError};
use crate::ids::{Epoch, SubscriptionId};
use crate::model::SubscriptionModel;
use crate::reason::Reason;
use crate::run::announce::warn_of_takeover;
use crate::run::skip::{Skip, Unfit};
use crate::storage::{CheckpointStorage, Claim, ClaimOutcome, Record, Save, SaveOutcome};

/// How long each of the source and the storage is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

impl<M: SubscriptionModel, S: CheckpointStorage> DurableSubscriptions<M, S> {
    /// Steps over exactly the events of a subscription up to and with the one at `through`, while nothing runs under its
    /// id here: the stored position becomes `through`, and the next `subscribe` reads on behind it. For a running one
    /// there is [`Subscription::skip`](crate::Subscription::skip).
    ///
    /// What is stepped over is lost to the subscription, and nothing of it becomes a dead letter: which events its filter
    /// passes is not known here. The record keeps who did it, when, from where, and the reason.
    /// The id is claimed for it: a run in another process is superseded, and stops.
    ///
    /// ```
    /// # use mongosub::memory::{self, MemoryCheckpointStorage, MemoryModel};
    /// # use mongosub::{CheckpointStorage, Delivery, DurableSubscriptions, SubscriptionId, bson::doc};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let model = MemoryModel::new();
    /// # let subscriptions = DurableSubscriptions::new(model.clone(), MemoryCheckpointStorage::new());
    /// # subscriptions.subscribe("search_index_v3", |_: Delivery| async { Ok(()) }).await?.shutdown().await?;
    /// let bad = model.push(memory::insert(1, doc! { "status": 7 }));
    /// subscriptions.skip("search_index_v3", bad.clone(), "INC-7: written by a broken import").await?;
    ///
    /// let record = subscriptions.storage().read(&SubscriptionId::new("search_index_v3")?).await?.expect("a record");
    /// assert_eq!(record.position, Some(bad));
    /// assert_eq!(record.skips[0].reason, "INC-7: written by a broken import");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`SubscribeError::Config`] naming `id` (nothing is stored under it), `reason` (there is none), or `through` (not
    /// beyond the stored position, not comparable with it, ahead of the source's present);
    /// [`SubscribeError::AlreadyRunning`] when it runs here; [`SubscribeError::Refused`] when the source or the storage
    /// does not answer or refuses. Nothing is skipped then, but for a storage that stores and does not answer: asked for
    /// again it says that nothing is left to skip.
    ///
    /// # Cancel safety
    /// Dropped, it is done or not; asked for again it is harmless.
    pub async fn skip(
        &self,
        id: impl Into<String>,
        through: Checkpoint,
        reason: impl Into<String>,
    ) -> Result<(), SubscribeError> {
        let id = SubscriptionId::new(id.into())
            .map_err(|error| SubscribeError::Config { field: "id", message: error.to_string() })?;
        let _reserved = self.inner.registry.reserve(&id)?;
        let skip = Skip { through, reason: reason.into() };
        let refused = |reason| SubscribeError::Refused { id: id.clone(), reason };
        let config = |field, message: &str| SubscribeError::Config { field, message: message.into() };
        let unfit = |unfit| match unfit {
            Unfit::Asked(field, message) => SubscribeError::Config { field, message },
            Unfit::Source(error) => refused(error.reason()),
        };
        let storage = &self.inner.storage;
        let Some(before) = answered(storage.read(&id)).await.map_err(|error| refused(error.reason()))? else {
            return Err(config("id", "nothing is stored under it"));
        };
        let Some(from) = before.position.clone() else {
            return Err(config("id", "no position is stored under it that could be moved"));
        };
        skip.is_ahead_of(Some(&from)).map_err(unfit)?;
        let asked = tokio::time::timeout(PATIENCE, skip.is_of(&self.inner.model, before.source.as_ref())).await;
        let no_answer = |_| Err(SourceError::Unavailable { message: no_answer() }.into());
        asked.unwrap_or_else(no_answer).map_err(unfit)?;

        let claimed = answered(storage.claim(&Claim::new(id.clone()))).await;
        let record = match claimed.map_err(|error| refused(error.reason()))? {
            ClaimOutcome::Claimed(record) => record,
            ClaimOutcome::Superseded { owner, since } => return Err(refused(Reason::Superseded { owner, since })),
            ClaimOutcome::Gone => return Err(refused(Reason::Deleted)),
        };
        warn_of_takeover(&id, &before, &record);
        // Another run may have come further meanwhile.
        skip.is_ahead_of(record.position.as_ref()).map_err(unfit)?;
        let Some(save) = Self::moving(&skip, &before, record) else { return Err(refused(Reason::Deleted)) };
        match answered(storage.save(&save)).await.map_err(|error| refused(error.reason()))? {
            SaveOutcome::Saved { .. } => {
                let (through, reason) = (&skip.through, &skip.reason);
                warn!(subscription = %id, %from, %through, reason, "subscription {id} was moved from {from} to {through} by hand, and what lies between is skipped: {reason}");
                Ok(())
            }
            SaveOutcome::NotAhead => Err(config("through", "does not lie beyond the stored position any more")),
            SaveOutcome::Superseded { owner, since } => Err(refused(Reason::Superseded { owner, since })),
            SaveOutcome::Gone => Err(refused(Reason::Deleted)),
        }
    }

    /// The save that moves a record, which is clean as it was; none without an owner.
    fn moving(skip: &Skip, before: &Record, record: Record) -> Option<Save> {
        let ownership = record.ownership.clone()?;
        let epoch = match record.epoch {
            Some(epoch) if record.is_behind_invalidate() => Epoch(epoch.0 + 1),
            Some(epoch) => epoch,
            None => Epoch(record.claimed_at.map_or(1, bson::DateTime::timestamp_millis)),
        };
        let audit = skip.audit(record.position.clone(), ownership.owner.clone());
        let unmoved = (&before.position, before.saved_at) == (&record.position, record.saved_at);
        let mut save = Save::new(record.id, ownership, epoch, skip.through.clone());
        save.kind = skip.kind();
        save.pipeline = record.pipeline;
        save.source = record.source.map(|source| skip.source_behind(&source));
        save.clean = before.clean && unmoved;
        save.note = Some(Note::Skipped(audit));
        Some(save)
    }
}

async fn answered<T>(call: impl Future<Output = Result<T, StorageError>>) -> Result<T, StorageError> {
    let answer = tokio::time::timeout(PATIENCE, call).await;
    answer.unwrap_or_else(|_| Err(StorageError::Unavailable { message: no_answer() }))
}

fn no_answer() -> String {
    format!("no answer within {} s", PATIENCE.as_secs())
}
