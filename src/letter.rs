//! Dead letters: events that were taken out of the way, and those parked behind them, in sequences of one document each.
//! Values, no I/O.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bson::{Bson, DateTime, Document, RawDocument, doc};
use bytes::Bytes;

use crate::checkpoint::Checkpoint;
use crate::event::{ChangeEvent, is_nested_deeper};
use crate::ids::{Epoch, Namespace, Owner, SubscriptionId};

/// The most sequences that a subscription may have: documents with dead letters.
pub const MAX_SEQUENCES: usize = 1024;
/// The most letters of one sequence.
pub const MAX_LETTERS: usize = 1024;

/// Which sequence an event belongs to: its document, by namespace and `documentKey`. Events of no single document (a drop,
/// a rename, an `invalidate`) have a sequence for each namespace; nothing is parked behind those.
///
/// Keys are the same when their bytes are: `{ _id: 1 }` and `{ _id: 1.0 }` are two here, and one document to a server.
///
/// ```
/// use mongosub::{ChangeEvent, DocumentKey, Namespace, bson::doc, memory};
///
/// let event: ChangeEvent = memory::insert(7, doc! { "status": "paid" }).into();
/// let key = DocumentKey::new(Namespace::new("test", "events"), 7);
/// assert_eq!(DocumentKey::of(&event), key);
/// assert_eq!(key.to_string(), r#"test.events { "_id": 7 }"#);
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DocumentKey {
    namespace: Option<Namespace>,
    /// The BSON of the key.
    key: Option<Arc<[u8]>>,
}

impl DocumentKey {
    /// The document with this `_id`.
    pub fn new(namespace: Namespace, id: impl Into<Bson>) -> Self {
        Self::with_key(namespace, &doc! { "_id": id.into() })
    }

    /// The document with this key: of a sharded collection the shard key and the `_id`, in the order of the event.
    pub fn with_key(namespace: Namespace, key: &Document) -> Self {
        // A document that BSON cannot hold is the key of no event.
        let key = key.to_vec().unwrap_or_default();
        Self { namespace: Some(namespace), key: Some(key.into()) }
    }

    /// The events of no single document.
    pub fn without_document(namespace: Option<Namespace>) -> Self {
        Self { namespace, key: None }
    }

    /// The key of an event's document. An event whose key cannot be read counts as one of no single document.
    pub fn of(event: &ChangeEvent) -> Self {
        let key = match event.get("documentKey") {
            Ok(Some(bson::RawBsonRef::Document(key))) => Some(key.as_bytes().into()),
            _ => None,
        };
        Self { namespace: event.namespace().ok().flatten(), key }
    }

    pub(crate) fn from_parts(namespace: Option<Namespace>, key: Option<&[u8]>) -> Self {
        Self { namespace, key: key.map(Into::into) }
    }

    /// The collection; none for an `invalidate` and a dropped database.
    pub fn namespace(&self) -> Option<&Namespace> {
        self.namespace.as_ref()
    }

    /// The document's key; none for events of no single document.
    pub fn key(&self) -> Option<&RawDocument> {
        self.key.as_deref().and_then(|key| RawDocument::from_bytes(key).ok())
    }

    /// Whether later events are parked behind a letter of it.
    pub fn parks(&self) -> bool {
        self.key.is_some()
    }
}

/// What is formatted recursively.
const DEEPEST_SHOWN: usize = 32;

impl fmt::Display for DocumentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{namespace} ")?,
            None => f.write_str("(no collection) ")?,
        }
        match self.key() {
            None => f.write_str("(no document)"),
            Some(key) if is_nested_deeper(key, DEEPEST_SHOWN) => f.write_str("(a deeply nested key)"),
            Some(key) => match Document::try_from(key) {
                Ok(key) => write!(f, "{key}"),
                Err(_) => f.write_str("(an unreadable key)"),
            },
        }
    }
}

impl fmt::Debug for DocumentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DocumentKey({self})")
    }
}

/// Why an event is a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LetterKind {
    /// The handler failed for it.
    Failed,
    /// It waits behind an earlier letter of its document; no handler has had it.
    Parked,
    /// It was stepped over by hand. It is kept to be looked at: a retry leaves it where it is.
    Skipped,
}

impl LetterKind {
    /// The kind as it is stored.
    pub fn name(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Parked => "parked",
            Self::Skipped => "skipped",
        }
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        [Self::Failed, Self::Parked, Self::Skipped].into_iter().find(|kind| kind.name() == name)
    }
}

/// A letter that is to be stored.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct NewLetter {
    /// The subscription it was for.
    pub subscription: SubscriptionId,
    /// Its sequence.
    pub key: DocumentKey,
    /// The event's position.
    pub position: Checkpoint,
    /// The epoch of the position.
    pub epoch: Epoch,
    /// Why it is one.
    pub kind: LetterKind,
    /// The BSON of the whole event.
    pub event: Bytes,
    /// What went wrong at the last attempt: the error and the causes behind it.
    pub error: Vec<String>,
    /// How many attempts have failed.
    pub attempts: u32,
    /// How long ago the first of them failed.
    pub first_failed: Option<Duration>,
    /// How long ago the last of them failed.
    pub last_failed: Option<Duration>,
    /// A fresh name, by which the storage tells this letter from every other one. Storing it again keeps it.
    pub reference: String,
}

impl NewLetter {
    /// A letter of an event that no handler has had.
    pub fn parked(
        subscription: SubscriptionId,
        key: DocumentKey,
        epoch: Epoch,
        position: Checkpoint,
        event: Bytes,
    ) -> Self {
        Self {
            subscription,
            key,
            position,
            epoch,
            kind: LetterKind::Parked,
            event,
            error: Vec::new(),
            attempts: 0,
            first_failed: None,
            last_failed: None,
            reference: format!("{:016x}", fastrand::u64(..)),
        }
    }

    /// It failed: so often, this was the last error, and the first and the last attempt failed so long ago.
    pub fn failed(mut self, attempts: u32, error: Vec<String>, first: Duration, last: Duration) -> Self {
        (self.kind, self.attempts, self.error) = (LetterKind::Failed, attempts, error);
        (self.first_failed, self.last_failed) = (Some(first), Some(last));
        self
    }
}

/// A stored letter, without its event.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Letter {
    /// The subscription it was for.
    pub subscription: SubscriptionId,
    /// Its sequence.
    pub key: DocumentKey,
    /// The event's position.
    pub position: Checkpoint,
    /// The epoch of the position.
    pub epoch: Epoch,
    /// Why it is one.
    pub kind: LetterKind,
    /// What went wrong at the last attempt, retries included: the error and the causes behind it.
    pub error: Vec<String>,
    /// How many attempts have failed, retries included.
    pub attempts: u32,
    /// When the first one failed, on the storage's clock: its time at the storing, less what had passed by the clock of
    /// the process that stored it.
    pub first_failed_at: Option<DateTime>,
    /// When the last one failed, by the same clock.
    pub last_failed_at: Option<DateTime>,
    /// When it was stored, on the storage's clock.
    pub stored_at: DateTime,
    /// The size of its event.
    pub bytes: u64,
    /// How the storage names it.
    pub reference: String,
}

impl Letter {
    /// A letter as it was just stored, at this time of the storage's clock.
    pub fn stored(letter: &NewLetter, at: DateTime) -> Self {
        let ago = |ago: Duration| {
            let ago = i64::try_from(ago.as_millis()).unwrap_or(i64::MAX);
            DateTime::from_millis(at.timestamp_millis().saturating_sub(ago))
        };
        Self {
            subscription: letter.subscription.clone(),
            key: letter.key.clone(),
            position: letter.position.clone(),
            epoch: letter.epoch,
            kind: letter.kind,
            error: letter.error.clone(),
            attempts: letter.attempts,
            first_failed_at: letter.first_failed.map(ago),
            last_failed_at: letter.last_failed.map(ago),
            stored_at: at,
            bytes: letter.event.len() as u64,
            reference: letter.reference.clone(),
        }
    }
}

/// The letters of one document, in feed order: what a retry hands out and an eviction deletes.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Sequence {
    /// Whose letters they are.
    pub key: DocumentKey,
    /// How many there are.
    pub letters: usize,
    /// Who is retrying it, and until when at least (the storage's clock).
    pub held: Option<(Owner, DateTime)>,
}

impl Sequence {
    /// A sequence by its parts.
    pub fn new(key: DocumentKey, letters: usize, held: Option<(Owner, DateTime)>) -> Self {
        Self { key, letters, held }
    }
}

/// What became of a letter that was to be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PutOutcome {
    /// It is stored, at the end of its sequence.
    Stored,
    /// The sequence has had this position before; nothing was changed.
    AlreadyStored,
    /// There is no sequence to append it to; nothing was changed.
    NoSequence,
    /// There is no room; nothing was changed.
    Full(ParkingLimit),
}

/// What there is no room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParkingLimit {
    /// Another document: the subscription has [`MAX_SEQUENCES`](crate::MAX_SEQUENCES) sequences.
    Documents,
    /// Another event of this document: its sequence has [`MAX_LETTERS`](crate::MAX_LETTERS) letters.
    Events,
}

/// What became of taking a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HoldOutcome {
    /// It is the owner's.
    Held,
    /// It is somebody else's.
    HeldBy {
        /// Whose.
        owner: Owner,
        /// Until when at least, on the storage's clock.
        until: DateTime,
    },
    /// There is no such sequence.
    NoSequence,
}

/// What became of a letter that was to be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RemoveOutcome {
    /// It is removed; others are left.
    Removed,
    /// It was the last one, and its sequence has ended.
    Ended,
    /// There is no such sequence.
    NoSequence,
    /// The sequence is not the owner's; nothing was changed.
    NotHeld,
}

/// What became of a sequence that was to be deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EvictOutcome {
    /// It is deleted; so many letters were in it.
    Evicted(usize),
    /// Somebody is retrying it; nothing was changed.
    HeldBy {
        /// Who.
        owner: Owner,
        /// Until when at least, on the storage's clock.
        until: DateTime,
    },
    /// There is no such sequence.
    NoSequence,
}

/// Whether a sequence whose newest letter has this place has had an event already: positions of one epoch are in order,
/// and a later epoch comes behind every earlier one. Text has no order: only the same one is the same.
pub(crate) fn covers(newest: &(Epoch, Checkpoint), epoch: Epoch, position: &Checkpoint) -> bool {
    match newest.0.cmp(&epoch) {
        std::cmp::Ordering::Less => false,
        std::cmp::Ordering::Greater => true,
        std::cmp::Ordering::Equal => {
            newest.1 == *position || newest.1.position_cmp(position).is_some_and(std::cmp::Ordering::is_ge)
        }
    }
}
