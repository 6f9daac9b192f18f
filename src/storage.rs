//! The seam to where checkpoints are stored: one record per subscription id, claimed by one owner at a time.

mod boxed;
mod hand;
mod order;

use bson::{DateTime, Timestamp};

pub use self::boxed::{BoxFuture, DynCheckpointStorage};
pub use self::hand::{Hand, InHand};
use crate::audit::{Gap, Note, Skipped, append};
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::StorageError;
use crate::ids::{Epoch, Fence, Namespace, Owner, Ownership, SubscriptionId};
use crate::model::{Deployment, Fingerprint, Identity, Scope};

/// Stores one record per subscription id. Clones share their state.
///
/// A save is accepted only from the owner of the newest claim and only forward; nothing but a claim makes a record.
/// Whoever writes one runs the suite in `mongosub::conformance` (feature `conformance`) against it.
///
/// ```
/// use mongosub::memory::MemoryCheckpointStorage;
/// use mongosub::{CheckpointStorage, Claim, ClaimOutcome, SubscriptionId};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (storage, id) = (MemoryCheckpointStorage::new(), SubscriptionId::new("search_index_v3")?);
/// let ClaimOutcome::Claimed(record) = storage.claim(&Claim::new(id.clone())).await? else { panic!("nobody has it") };
/// assert!(record.ownership.is_some() && record.position.is_none());
///
/// // By hand, whoever owns it: the subscription is then a new one.
/// assert!(storage.delete(&id, None).await?);
/// assert_eq!(storage.read(&id).await?, None);
/// # Ok(())
/// # }
/// ```
pub trait CheckpointStorage: Clone + Send + Sync + 'static {
    /// The record as it is stored now; `None` when there is none.
    ///
    /// # Errors
    /// [`StorageError::Unreadable`] for a record that cannot be understood; it is left untouched.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn read(&self, id: &SubscriptionId) -> impl Future<Output = Result<Option<Record>, StorageError>> + Send;

    /// Takes ownership of an id: a new fence and owner, in one write. Makes a missing record, stores the claim's
    /// start if no position is stored, clears `clean`, leaves a stored position as it is.
    ///
    /// A claim that expects nobody counts how the owner before it ended: unless that was `clean`, or it had stored something
    /// behind its claim, [`Record::unclean_ends`] is one more, else none; and the event it left in hand has one death more,
    /// unless it ended clean. The same claim made again counts nothing.
    ///
    /// # Errors
    /// [`StorageError`]; after `Unavailable` the outcome is unknown, and claiming again is harmless.
    ///
    /// # Cancel safety
    /// Dropped, the outcome is unknown, and claiming again is harmless.
    fn claim(&self, claim: &Claim) -> impl Future<Output = Result<ClaimOutcome, StorageError>> + Send;

    /// Stores a position, if the record is still the owner's and the position is not behind. Never makes a record.
    /// A note is appended by the same write, unless it is the last of its kind already; the newest
    /// [`AUDITED`](crate::AUDITED) of each kind are kept, by later saves and claims too.
    ///
    /// # Errors
    /// [`StorageError`]; after `Unavailable` the outcome is unknown, and saving the same again is harmless.
    ///
    /// # Cancel safety
    /// Dropped, the outcome is unknown, and saving the same again is harmless.
    fn save(&self, save: &Save) -> impl Future<Output = Result<SaveOutcome, StorageError>> + Send;

    /// Deletes the record: with an ownership only if it is still that owner's. Answers whether one was deleted.
    ///
    /// # Errors
    /// [`StorageError`]; after `Unavailable` the outcome is unknown.
    ///
    /// # Cancel safety
    /// Dropped, the outcome is unknown.
    fn delete(
        &self,
        id: &SubscriptionId,
        owner: Option<&Ownership>,
    ) -> impl Future<Output = Result<bool, StorageError>> + Send;

    /// The ids of all records, sorted.
    ///
    /// # Errors
    /// [`StorageError`] when it could not be asked.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn list(&self) -> impl Future<Output = Result<Vec<String>, StorageError>> + Send;

    /// Takes back, once, what the last claim has counted against this owner, who lives and says so. Whoever's end was not
    /// the one counted, and a record that is gone, are left alone.
    ///
    /// # Errors
    /// [`StorageError`] when it could not be written; nobody insists on it.
    ///
    /// # Cancel safety
    /// Dropped, the outcome is unknown.
    fn not_dead(
        &self,
        id: &SubscriptionId,
        superseded: &Ownership,
    ) -> impl Future<Output = Result<(), StorageError>> + Send;

    /// The collections this storage writes to, so that a scope around them can leave them out.
    fn namespaces(&self) -> Vec<Namespace> {
        Vec::new()
    }

    /// The deployment it writes to, as far as it shows itself. Default: none.
    ///
    /// # Errors
    /// [`StorageError`] when it could not be asked.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn deployment(&self) -> impl Future<Output = Result<Option<Deployment>, StorageError>> + Send {
        async { Ok(None) }
    }
}

/// What is stored for one subscription id.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Record {
    /// The subscription id.
    pub id: SubscriptionId,
    /// The stored position; none means "nothing stored yet".
    pub position: Option<Checkpoint>,
    /// What it is the position of; none in a record of another program.
    pub kind: Option<Kind>,
    /// The epoch of the position; none in a record of another program, or with no position.
    pub epoch: Option<Epoch>,
    /// The cluster time of the position, as stored beside it.
    pub cluster_time: Option<Timestamp>,
    /// The newest claim's fence and owner; none in a record of another program.
    pub ownership: Option<Ownership>,
    /// When that claim was made, on the storage's clock.
    pub claimed_at: Option<DateTime>,
    /// When the position was stored, on the storage's clock.
    pub saved_at: Option<DateTime>,
    /// The fingerprint of the pipeline that produced the position.
    pub pipeline: Option<Fingerprint>,
    /// Where the position comes from.
    pub source: Option<Source>,
    /// Whether the last run ended cleanly, with everything it had delivered stored.
    pub clean: bool,
    /// The newest gaps in its history, oldest first.
    pub gaps: Vec<Gap>,
    /// The newest skips by hand, oldest first.
    pub skips: Vec<Skipped>,
    /// How many runs in a row ended without a word and without having stored anything.
    pub unclean_ends: u32,
    /// The event that was in hand when a careful run last ended without a word, or is now.
    pub in_hand: Option<InHand>,
}

impl Record {
    /// A record with nothing in it but its id.
    pub fn empty(id: SubscriptionId) -> Self {
        Self {
            id,
            position: None,
            kind: None,
            epoch: None,
            cluster_time: None,
            ownership: None,
            claimed_at: None,
            saved_at: None,
            pipeline: None,
            source: None,
            clean: false,
            gaps: Vec::new(),
            skips: Vec::new(),
            unclean_ends: 0,
            in_hand: None,
        }
    }

    /// Takes a note in, as a save that brings it does at this time: unless it is the last of its kind, and the newest
    /// [`AUDITED`](crate::AUDITED) are kept.
    pub fn note(&mut self, note: &Note, at: DateTime) {
        match note.clone() {
            Note::Gap(gap) => {
                let gap = Gap { at: Some(at), ..gap };
                append(&mut self.gaps, gap, |a, b| (&a.from, &a.to) == (&b.from, &b.to));
            }
            Note::Skipped(skipped) => {
                let skipped = Skipped { at: Some(at), ..skipped };
                append(&mut self.skips, skipped, |a, b| (&a.from, &a.through) == (&b.from, &b.through));
            }
        }
    }

    /// Whether the position is where reading began again behind lost history, and nothing behind it was stored.
    pub(crate) fn is_at_gap(&self) -> bool {
        let to = self.gaps.last().map(|gap| &gap.to);
        self.kind == Some(Kind::Start) && to.is_some() && self.position.as_ref() == to
    }

    /// Whether the position is that of an `invalidate`: the collection behind it is another one.
    pub(crate) fn is_behind_invalidate(&self) -> bool {
        self.kind == Some(Kind::Invalidate) || self.position.as_ref().is_some_and(Checkpoint::is_invalidate)
    }
}

/// Where a stored position comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Source {
    /// What is read.
    pub scope: Scope,
    /// The collection's UUID, when it was seen.
    pub collection_uuid: Option<String>,
    /// The replica set's name, when it was seen.
    pub set_name: Option<String>,
    /// The last event that was handed out, when the position is not an event's own: only a history that has it is that of
    /// this source. [`new`](Self::new) sets none.
    pub last_event: Option<Checkpoint>,
}

impl Source {
    /// A source by its parts.
    pub fn new(scope: Scope, collection_uuid: Option<String>, set_name: Option<String>) -> Self {
        Self { scope, collection_uuid, set_name, last_event: None }
    }

    /// Takes in what a position of the source shows: the UUID of a collection that did not exist before.
    pub(crate) fn see(&mut self, position: &Checkpoint) {
        if let (None, Scope::Collection(_)) = (&self.collection_uuid, &self.scope) {
            self.collection_uuid = position.token().and_then(|token| token.collection_uuid()).map(ToString::to_string);
        }
    }
}

impl From<&Identity> for Source {
    fn from(identity: &Identity) -> Self {
        Self {
            scope: identity.scope.clone(),
            collection_uuid: identity.collection_uuid.clone(),
            set_name: identity.deployment.as_ref().map(|deployment| deployment.set_name.clone()),
            last_event: None,
        }
    }
}

/// A claim to an id.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Claim {
    /// The id claimed.
    pub id: SubscriptionId,
    /// Who claims it; fresh for every claim.
    pub owner: Owner,
    /// Claim only if the record is still this owner's: for a run that restarts itself. Default: whatever is there.
    pub expect: Option<Ownership>,
    /// A start to store if no position is stored; a new epoch then begins.
    pub start: Option<StartPosition>,
}

impl Claim {
    /// A claim of whatever is there, by a fresh owner, with no start to store.
    pub fn new(id: SubscriptionId) -> Self {
        Self { id, owner: Owner::fresh(), expect: None, start: None }
    }
}

/// The start of a new subscription.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StartPosition {
    /// Where it starts.
    pub position: Checkpoint,
    /// The pipeline's fingerprint.
    pub pipeline: Option<Fingerprint>,
    /// Where the position comes from.
    pub source: Option<Source>,
}

impl StartPosition {
    /// A start at a position, with nothing known beside it.
    pub fn new(position: Checkpoint) -> Self {
        Self { position, pipeline: None, source: None }
    }
}

/// What became of a claim.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant, reason = "there is one for each start of a subscription")]
pub enum ClaimOutcome {
    /// The id is the claim's own now; the record as it is after the claim.
    Claimed(Record),
    /// The record is no longer the expected owner's.
    Superseded {
        /// Who holds it; none when another program rewrote the record.
        owner: Option<Owner>,
        /// Since when, on the storage's clock.
        since: Option<DateTime>,
    },
    /// An owner was expected, and there is no record any more.
    Gone,
}

/// A position to store.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Save {
    /// The record's id.
    pub id: SubscriptionId,
    /// Who saves.
    pub ownership: Ownership,
    /// The epoch of the position.
    pub epoch: Epoch,
    /// The position.
    pub position: Checkpoint,
    /// What it is the position of.
    pub kind: Kind,
    /// The fingerprint of the pipeline that produced it.
    pub pipeline: Option<Fingerprint>,
    /// Where it comes from.
    pub source: Option<Source>,
    /// Whether the run ends here with everything it has delivered stored.
    pub clean: bool,
    /// What is to be kept of the events before the position that were not delivered. Default: nothing.
    pub note: Option<Note>,
    /// What it says of the event in hand. Default: nothing.
    pub hand: Hand,
}

impl Save {
    /// An event's position, with nothing known beside it.
    pub fn new(id: SubscriptionId, ownership: Ownership, epoch: Epoch, position: Checkpoint) -> Self {
        Self {
            id,
            ownership,
            epoch,
            position,
            kind: Kind::Event,
            pipeline: None,
            source: None,
            clean: false,
            note: None,
            hand: Hand::Unsaid,
        }
    }

    /// Keeps the last event beside the position, unless that is its own.
    pub(crate) fn keep_event(&mut self, last: Option<Checkpoint>) {
        if let Some(source) = &mut self.source {
            let last = last.or_else(|| source.last_event.take());
            source.last_event = last.filter(|_| !self.position.names_event());
        }
    }

    /// The fence it is saved under.
    pub fn fence(&self) -> Fence {
        self.ownership.fence
    }
}

/// What became of a save. The last two end the run and are never retried.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum SaveOutcome {
    /// Stored, or exactly this was stored already.
    Saved {
        /// When, on the storage's clock.
        at: Option<DateTime>,
    },
    /// What is stored covers it: fine, counted.
    NotAhead,
    /// The record is another owner's.
    Superseded {
        /// Who holds it; none when another program rewrote the record.
        owner: Option<Owner>,
        /// Since when, on the storage's clock.
        since: Option<DateTime>,
    },
    /// There is no record any more.
    Gone,
}
