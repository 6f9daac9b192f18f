//! The seam to a source: a model reads one scope as a sequence of reads and knows nothing of storage.

use std::fmt;

use bson::Document;
use serde::Serialize;
use tokio::sync::watch;

use crate::checkpoint::Checkpoint;
use crate::error::{SourceError, SubscribeError};
use crate::event::ChangeEvent;
use crate::filter::Filter;
use crate::ids::Namespace;
use crate::reason::Reason;

/// Reads one scope as a sequence of [`Read`]s. Clones share their state.
///
/// A model can be read without a storage: then whoever reads keeps the positions, or loses its place with the process.
///
/// ```
/// use mongosub::memory::{self, MemoryModel};
/// use mongosub::{Plan, Read, Reader, SubscriptionModel, bson::doc};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), mongosub::SourceError> {
/// let model = MemoryModel::new();
/// let first = model.push(memory::insert(1, doc! {}));
/// let second = model.push(memory::insert(2, doc! {}));
/// let mut reader = model.open(Some(&first), &Plan::default()).await?;
/// let Some(Ok(Read::Event { position, .. })) = reader.next().await else { panic!("an event was pushed") };
/// assert_eq!(position, second);
/// # Ok(())
/// # }
/// ```
pub trait SubscriptionModel: Clone + Send + Sync + 'static {
    /// What an open gives.
    type Reader: Reader;

    /// Opens at a position, or at the source's own now. It returns when the source has judged position, plan and
    /// rights; one attempt, the caller retries. Nothing at or before `from` is read again.
    ///
    /// # Errors
    /// [`SourceError`]: what cannot heal is `Refused` or `Unauthorized`.
    ///
    /// # Cancel safety
    /// Dropped, nothing has been read, and what was opened is closed.
    fn open(
        &self,
        from: Option<&Checkpoint>,
        plan: &Plan,
    ) -> impl Future<Output = Result<Self::Reader, SourceError>> + Send;

    /// Judges a plan without I/O, and gives its fingerprint.
    ///
    /// # Errors
    /// [`SubscribeError`] when this model can never serve the plan.
    fn check(&self, plan: &Plan) -> Result<Fingerprint, SubscribeError>;

    /// Where the deployment is now, asked without reading the stream: a start that misses nothing which is not yet
    /// majority-committed. `None` when the source refuses to tell.
    ///
    /// # Errors
    /// [`SourceError`] when it could not be asked.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn global_checkpoint(&self) -> impl Future<Output = Result<Option<Checkpoint>, SourceError>> + Send;

    /// The majority time of the primary: everything up to and with it can be read.
    ///
    /// # Errors
    /// [`SourceError`] when it could not be asked.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn head(&self) -> impl Future<Output = Result<Checkpoint, SourceError>> + Send;

    /// The oldest position that can be opened.
    ///
    /// # Errors
    /// [`SourceError`] when it could not be asked.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn earliest(&self) -> impl Future<Output = Result<Checkpoint, SourceError>> + Send;

    /// Whether a position can still be opened, asked as cheaply as can be. A source that has never dropped anything
    /// can read from any time on.
    ///
    /// # Errors
    /// [`SourceError`] when it could not be asked.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn is_readable(&self, position: &Checkpoint) -> impl Future<Output = Result<bool, SourceError>> + Send;

    /// What can be known of the source: what the rights do not show is `None`.
    ///
    /// # Errors
    /// [`SourceError`] when it could not be asked.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn identity(&self) -> impl Future<Output = Result<Identity, SourceError>> + Send;

    /// What can be had of the one event at a position, when the whole cannot be sent: its operation, its times, its
    /// namespace and its key, without its documents and without what it changed. `None` when there is no event there, and
    /// by default.
    ///
    /// # Errors
    /// [`SourceError`] when the source could not be asked, or no longer has it.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn outline(&self, position: &Checkpoint) -> impl Future<Output = Result<Option<ChangeEvent>, SourceError>> + Send {
        let _ = position;
        std::future::ready(Ok(None))
    }

    /// Whether the event at a position is in the source's own history. It is not in that of a deployment whose older state
    /// was put back, nor in that of a copy. Default: `true`, nothing is checked.
    ///
    /// # Errors
    /// [`SourceError`] when the history could not be read, or is no longer there.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn has_event(&self, position: &Checkpoint) -> impl Future<Output = Result<bool, SourceError>> + Send {
        let _ = position;
        std::future::ready(Ok(true))
    }

    /// Whether the source's own history from a position to the head as it is now shows the end of the collection with
    /// this UUID (32 hex digits): that it was dropped, renamed, or replaced by another one that was renamed over it. It
    /// explains why a collection has another UUID than before. Default: `false`, nothing is explained.
    ///
    /// # Errors
    /// [`SourceError`] when the history could not be read, or is no longer there.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn ended_since(
        &self,
        from: &Checkpoint,
        collection_uuid: &str,
    ) -> impl Future<Output = Result<bool, SourceError>> + Send {
        let _ = (from, collection_uuid);
        std::future::ready(Ok(false))
    }
}

/// Hands out what was read, in feed order. Its reading goes on in a task of the model's own.
pub trait Reader: Send + 'static {
    /// The next read; an error is the last item and cannot be cured by the reader; `None` is the end of a finite feed.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn next(&mut self) -> impl Future<Output = Option<Result<Read, SourceError>>> + Send;

    /// For a reader opened at the source's own now: a start that misses nothing sent since. `None` when the source
    /// sent no time.
    fn opened_at(&self) -> Option<Checkpoint>;

    /// What must be known at once and not behind a full channel.
    fn state(&self) -> watch::Receiver<SourceState>;
}

/// What a model yields.
#[derive(Debug, Clone)]
pub enum Read {
    /// A change, and its position.
    Event {
        /// The change.
        event: ChangeEvent,
        /// Its position.
        position: Checkpoint,
    },
    /// No change, but the scan got this far.
    Quiet(Checkpoint),
}

impl Read {
    /// The position of either.
    pub fn position(&self) -> &Checkpoint {
        match self {
            Self::Event { position, .. } | Self::Quiet(position) => position,
        }
    }
}

/// How a reader fares, beside what it has read.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct SourceState {
    /// Set while the reader reopens.
    pub reopening: Option<Reopening>,
    /// How often it has reopened.
    pub reconnects: u64,
    /// The position read when a reply last ended at the end of the oplog: nothing older was outstanding then.
    pub end_at: Option<Checkpoint>,
    /// Whether the last reply ended at the end of the oplog.
    pub at_end: bool,
    /// How many events were read and dropped because the position that was opened at covers them.
    pub dropped: u64,
}

/// Why a reader has no cursor at the moment.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Reopening {
    /// When the cursor was lost.
    pub since: tokio::time::Instant,
    /// Why it is not open again.
    pub reason: Reason,
}

impl Reopening {
    /// A cursor lost now, for this reason.
    pub fn now(reason: Reason) -> Self {
        Self { since: tokio::time::Instant::now(), reason }
    }
}

/// What a subscription asks of a model.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Plan {
    /// Which events to read.
    pub filter: Filter,
    /// Collections to leave out in any case: the storage's own.
    pub leave_out: Vec<Namespace>,
}

impl Plan {
    /// A plan that reads what the filter passes and leaves nothing else out.
    pub fn new(filter: Filter) -> Self {
        Self { filter, leave_out: Vec::new() }
    }
}

/// SHA-256 of the canonical BSON of the user's stages, as hex.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fingerprint(pub String);

impl Fingerprint {
    /// The fingerprint of these stages, as a user gave them.
    pub fn of(stages: &[Document]) -> Self {
        use sha2::{Digest, Sha256};
        let mut hasher = Sha256::new();
        for stage in stages {
            // What cannot be written as BSON cannot be sent to a server either.
            hasher.update(stage.to_vec().unwrap_or_default());
        }
        let digit = |half: u8| char::from_digit(half.into(), 16).unwrap_or_default();
        Self(hasher.finalize().iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a model reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "scope", rename_all = "snake_case")]
pub enum Scope {
    /// One collection.
    Collection(Namespace),
    /// Every collection of one database.
    Database {
        /// The database.
        db: String,
    },
    /// Every database but the server's own.
    Deployment,
}

impl Scope {
    /// Whether a collection lies in the scope.
    pub fn contains(&self, namespace: &Namespace) -> bool {
        match self {
            Self::Collection(own) => own == namespace,
            Self::Database { db } => *db == namespace.db,
            Self::Deployment => true,
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Collection(namespace) => write!(f, "collection {namespace}"),
            Self::Database { db } => write!(f, "database {db}"),
            Self::Deployment => f.write_str("the deployment"),
        }
    }
}

/// A replica set, as far as it shows itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Deployment {
    /// The replica set's name.
    pub set_name: String,
    /// Its members, `host:port`.
    pub hosts: Vec<String>,
}

impl Deployment {
    /// Whether both are the same deployment: the same set name and a common host.
    pub fn is_same_as(&self, other: &Self) -> bool {
        self.set_name == other.set_name && self.hosts.iter().any(|host| other.hosts.contains(host))
    }
}

/// What identifies a source; what the user's rights do not show is `None` and not checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Identity {
    /// What is read.
    pub scope: Scope,
    /// The collection's UUID, as 32 hex digits; of a collection scope only, none while it does not exist.
    pub collection_uuid: Option<String>,
    /// Whether the rights show which collection there is: if so, no UUID says that it does not exist.
    pub shows_collection: bool,
    /// Where it is read.
    pub deployment: Option<Deployment>,
}

impl Identity {
    /// An identity that shows the scope alone.
    pub fn new(scope: Scope) -> Self {
        Self { scope, collection_uuid: None, shows_collection: false, deployment: None }
    }
}
