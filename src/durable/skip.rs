//! Steps over events of a subscription that does not run here: the record is claimed, what can be kept is kept, the
//! record is moved, and let go.

use std::fmt;
use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

use super::{DurableSubscriptions, Inner};
use crate::audit::Note;
use crate::checkpoint::Checkpoint;
use crate::dead_letter::{DeadLetterStorage, DynDeadLetterStorage};
use crate::error::{SourceError, StorageError, SubscribeError};
use crate::filter::Filter;
use crate::ids::{Epoch, Ownership, SubscriptionId};
use crate::model::{Plan, SubscriptionModel};
use crate::reason::Reason;
use crate::run::announce::warn_of_takeover;
use crate::run::own_namespaces::own_namespaces;
use crate::run::skip::{Skip, Unfit};
use crate::run::skip_letters::{KEPT_WITHIN, Keeping};
use crate::storage::{BoxFuture, CheckpointStorage, Claim, ClaimOutcome, Hand, Record, Save, SaveOutcome};

/// How long each of the source and the storage is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

impl<M: SubscriptionModel, S: CheckpointStorage> DurableSubscriptions<M, S> {
    /// Steps over exactly the events of a subscription up to and with the one at `through`, while nothing runs under its
    /// id here; `.await` does it. The stored position becomes `through`, and the next `subscribe` reads on behind it. For
    /// a running one there is [`Subscription::skip`](crate::Subscription::skip).
    ///
    /// With a dead letter storage, what can be kept of the events is put away there first: [`SkipEvents`]. Without one
    /// they are lost to the subscription. The record keeps who did it, when, from where, and the reason.
    /// The id is claimed for it: a run in another process is superseded, and stops.
    ///
    /// ```
    /// # use mongosub::memory::{self, MemoryCheckpointStorage, MemoryDeadLetterStorage, MemoryModel};
    /// # use mongosub::{CheckpointStorage, Delivery, DurableSubscriptions, SubscriptionId, bson::doc};
    /// use mongosub::{Filter, Operation::Insert};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let model = MemoryModel::new();
    /// let subscriptions = DurableSubscriptions::new(model.clone(), MemoryCheckpointStorage::new())
    ///     .dead_letters(MemoryDeadLetterStorage::new());
    /// let inserts = Filter::operations([Insert]);
    /// # let action = subscriptions.subscribe("search_index_v3", |_: Delivery| async { Ok(()) });
    /// # action.filter(inserts.clone()).await?.shutdown().await?;
    /// # let bad = model.push(memory::insert(1, doc! { "status": 7 }));
    /// subscriptions.skip("search_index_v3", bad.clone(), "INC-7: a broken import").filter(inserts).await?;
    ///
    /// let record = subscriptions.storage().read(&SubscriptionId::new("search_index_v3")?).await?.expect("a record");
    /// assert_eq!(record.position, Some(bad));
    /// assert_eq!(record.skips[0].reason, "INC-7: a broken import");
    /// assert_eq!(subscriptions.dead_letter_sequences("search_index_v3").await?.len(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn skip(&self, id: impl Into<String>, through: Checkpoint, reason: impl Into<String>) -> SkipEvents<M, S> {
        SkipEvents {
            inner: self.inner.clone(),
            id: id.into(),
            skip: Skip { through, reason: reason.into() },
            filter: Filter::default(),
            letters: self.options.dead_letters.clone(),
        }
    }
}

/// A skip by hand to be: setters, then `.await`.
///
/// With a dead letter storage (the wrapper's, or one of its own) the events that the subscription's
/// [filter](Self::filter) passes are read once more and put away, each with the reason, within a minute; of one that the
/// source cannot send its outline is kept, of history that it no longer has nothing.
///
/// # Errors
/// [`SubscribeError::Config`] naming `id` (nothing is stored under it), `reason` (there is none), `through` (not beyond
/// the stored position, not comparable with it, ahead of the source's present, no event of it; an event that could not be
/// kept), or `filter` (events are to be kept, and it is not the one that the stored position was read with);
/// [`SubscribeError::AlreadyRunning`] when it runs here; [`SubscribeError::Refused`] when the source or the storage does
/// not answer or refuses. Nothing is skipped then, but for a storage that stores and does not answer: asked for again it
/// says that nothing is left to skip. Some events may have been kept, and each is kept once when it is asked for again.
///
/// # Cancel safety
/// Dropped, it is done or not; asked for again it is harmless.
#[must_use = "it skips when it is awaited"]
pub struct SkipEvents<M, S> {
    inner: Arc<Inner<M, S>>,
    id: String,
    skip: Skip,
    filter: Filter,
    letters: Option<Arc<dyn DynDeadLetterStorage>>,
}

impl<M, S> SkipEvents<M, S> {
    /// The subscription's filter: what it leaves out is no dead letter. Default: every event. It is compared with what
    /// the record says of it, and used for dead letters alone.
    pub fn filter(mut self, filter: Filter) -> Self {
        self.filter = filter;
        self
    }

    /// Where what is skipped is kept. Default: the wrapper's dead letter storage; without one, nowhere.
    pub fn dead_letters(mut self, storage: impl DeadLetterStorage + 'static) -> Self {
        self.letters = Some(Arc::new(storage));
        self
    }

    /// Keeps nothing of what is skipped: it is lost to the subscription.
    pub fn without_dead_letters(mut self) -> Self {
        self.letters = None;
        self
    }
}

impl<M, S> fmt::Debug for SkipEvents<M, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SkipEvents").field("id", &self.id).field("skip", &self.skip).finish_non_exhaustive()
    }
}

impl<M: SubscriptionModel, S: CheckpointStorage> IntoFuture for SkipEvents<M, S> {
    type Output = Result<(), SubscribeError>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

impl<M: SubscriptionModel, S: CheckpointStorage> SkipEvents<M, S> {
    async fn run(self) -> Result<(), SubscribeError> {
        let id = SubscriptionId::new(self.id.clone()).map_err(|error| config("id", &error.to_string()))?;
        let _reserved = self.inner.registry.reserve(&id)?;
        self.of(&id).await.map_err(|failed| match failed {
            Failed::Unfit(Unfit::Asked(field, message)) => SubscribeError::Config { field, message },
            Failed::Unfit(Unfit::Source(error)) => SubscribeError::Refused { id, reason: error.reason() },
            Failed::Storage(error) => SubscribeError::Refused { id, reason: error.reason() },
            Failed::Lost(reason) => SubscribeError::Refused { id, reason },
        })
    }

    async fn of(&self, id: &SubscriptionId) -> Result<(), Failed> {
        let asked = |field, message: &str| Err(Unfit::Asked(field, message.into()).into());
        let Self { skip, inner, .. } = self;
        let Some(before) = answered(inner.storage.read(id)).await? else {
            return asked("id", "nothing is stored under it");
        };
        let Some(from) = before.position.clone() else {
            return asked("id", "no position is stored under it that could be moved");
        };
        skip.is_ahead_of(Some(&from))?;
        self.is_its_filter(&before)?;
        in_time(PATIENCE, skip.is_of(&inner.model, before.source.as_ref())).await?;

        let record = match answered(inner.storage.claim(&Claim::new(id.clone()))).await? {
            ClaimOutcome::Claimed(record) => record,
            ClaimOutcome::Superseded { owner, since } => return Err(Reason::Superseded { owner, since }.into()),
            ClaimOutcome::Gone => return Err(Reason::Deleted.into()),
        };
        warn_of_takeover(id, &before, &record);
        let moved = self.move_claimed(&before, record).await;
        if let (Err(_), Some(last)) = (&moved, &before.ownership) {
            // The claim has counted a death that was none. It is of no use to insist.
            let _ = answered(inner.storage.not_dead(id, last)).await;
        }
        moved
    }

    /// Keeps what lies between, and moves the record.
    async fn move_claimed(&self, before: &Record, record: Record) -> Result<(), Failed> {
        let Self { skip, inner, .. } = self;
        // Another run may have come further meanwhile.
        skip.is_ahead_of(record.position.as_ref())?;
        let (Some(from), Some(ownership)) = (record.position.clone(), record.ownership.clone()) else {
            return Err(Reason::Deleted.into());
        };
        let epoch = match record.epoch {
            Some(epoch) if record.is_behind_invalidate() => Epoch(epoch.0 + 1),
            Some(epoch) => epoch,
            None => Epoch(record.claimed_at.map_or(1, bson::DateTime::timestamp_millis)),
        };
        in_time(KEPT_WITHIN, self.keep(&record.id, epoch, &from)).await?;
        let id = record.id.clone();
        let save = Self::moving(skip, before, record, ownership, epoch);
        match answered(inner.storage.save(&save)).await? {
            SaveOutcome::Saved { .. } => {
                let Skip { through, reason } = skip;
                warn!(subscription = %id, %from, %through, reason, "subscription {id} was moved from {from} to {through} by hand, and what lies between is skipped: {reason}");
                Ok(())
            }
            SaveOutcome::NotAhead => {
                Err(Unfit::Asked("through", "does not lie beyond the stored position any more".into()).into())
            }
            SaveOutcome::Superseded { owner, since } => Err(Reason::Superseded { owner, since }.into()),
            SaveOutcome::Gone => Err(Reason::Deleted.into()),
        }
    }

    /// Whether what is kept would be what the subscription would have been given.
    fn is_its_filter(&self, record: &Record) -> Result<(), Failed> {
        if self.letters.is_none() {
            return Ok(());
        }
        let refuse = |message: String| Err(Unfit::Asked("filter", message).into());
        match (self.inner.model.check(&Plan::new(self.filter.clone())), &record.pipeline) {
            (Ok(given), Some(stored)) if given != *stored => refuse(
                "is not the one that the stored position was read with, so what is skipped cannot be told from what it \
                 leaves out: give the subscription's filter, or .without_dead_letters() to keep nothing"
                    .into(),
            ),
            (Ok(_), _) => Ok(()),
            (Err(SubscribeError::Config { field, message }), _) => Err(Unfit::Asked(field, message).into()),
            (Err(error), _) => refuse(error.to_string()),
        }
    }

    /// With a dead letter storage, keeps what can be kept of the events that are skipped.
    async fn keep(&self, id: &SubscriptionId, epoch: Epoch, from: &Checkpoint) -> Result<(), Failed> {
        let Some(letters) = &self.letters else { return Ok(()) };
        let (model, mut plan) = (self.inner.model.clone(), Plan::new(self.filter.clone()));
        let identity = model.identity().await.map_err(Unfit::from)?;
        plan.leave_out.extend(own_namespaces(&self.inner.storage, Some(&**letters), &identity).await?);
        let keeping = Keeping { model, plan, storage: letters.clone(), id: id.clone(), epoch };
        Ok(keeping.keep(from, &self.skip).await?)
    }

    /// The save that moves a record, which is clean as it was.
    fn moving(skip: &Skip, before: &Record, record: Record, ownership: Ownership, epoch: Epoch) -> Save {
        let audit = skip.audit(record.position.clone(), ownership.owner.clone());
        let unmoved = (&before.position, before.saved_at) == (&record.position, record.saved_at);
        let mut save = Save::new(record.id, ownership, epoch, skip.through.clone());
        save.kind = skip.kind();
        save.pipeline = record.pipeline;
        save.source = record.source.map(|source| skip.source_behind(&source));
        save.keep_event(record.position.filter(Checkpoint::names_event));
        save.clean = before.clean && unmoved;
        save.note = Some(Note::Skipped(audit));
        // The claim has counted a death that was none: an event that was in hand is judged anew.
        save.hand = Hand::Empty;
        save
    }
}

/// Why nothing is skipped.
enum Failed {
    Unfit(Unfit),
    Storage(StorageError),
    /// The record is no longer, or not, this claim's.
    Lost(Reason),
}

impl From<Unfit> for Failed {
    fn from(unfit: Unfit) -> Self {
        Self::Unfit(unfit)
    }
}

impl From<StorageError> for Failed {
    fn from(error: StorageError) -> Self {
        Self::Storage(error)
    }
}

impl From<Reason> for Failed {
    fn from(reason: Reason) -> Self {
        Self::Lost(reason)
    }
}

fn config(field: &'static str, message: &str) -> SubscribeError {
    SubscribeError::Config { field, message: message.into() }
}

/// What the source was asked, within the time.
async fn in_time<T, E: Into<Failed>>(limit: Duration, call: impl Future<Output = Result<T, E>>) -> Result<T, Failed> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map_err(Into::into),
        Err(_) => Err(Unfit::from(SourceError::Unavailable { message: no_answer(limit) }).into()),
    }
}

async fn answered<T>(call: impl Future<Output = Result<T, StorageError>>) -> Result<T, StorageError> {
    let answer = tokio::time::timeout(PATIENCE, call).await;
    answer.unwrap_or_else(|_| Err(StorageError::Unavailable { message: no_answer(PATIENCE) }))
}

fn no_answer(limit: Duration) -> String {
    format!("no answer within {} s", limit.as_secs())
}
