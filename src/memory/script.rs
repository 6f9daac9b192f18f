//! What a test sets and sees of a scripted model, shared by its clones and readers.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bson::Timestamp;
use tokio::sync::watch;

use crate::checkpoint::Checkpoint;
use crate::error::SourceError;
use crate::ids::Namespace;
use crate::memory::events::MemoryEvent;
use crate::memory::feed::{Entry, Feed, UUID, quiet_token};
use crate::model::{Deployment, Identity, Scope, SourceState};
use crate::reason::Reason;

#[derive(Debug)]
pub(super) struct Shared {
    script: Mutex<Script>,
    pub(super) changed: watch::Sender<()>,
}

/// Everything a test can set and see.
#[allow(clippy::struct_excessive_bools, reason = "they are independent switches")]
#[derive(Debug)]
pub(super) struct Script {
    pub(super) feed: Feed,
    pub(super) reopening: Option<Reason>,
    pub(super) readers: HashMap<u64, watch::Sender<SourceState>>,
    pub(super) reads: u64,
    pub(super) last_reader: u64,
    pub(super) opened_from: Vec<Option<Checkpoint>>,
    pub(super) hanging: bool,
    pub(super) failures: HashMap<Call, VecDeque<SourceError>>,
    pub(super) head: Option<Timestamp>,
    pub(super) tells_global_checkpoint: bool,
    pub(super) tells_time: bool,
    pub(super) full_document: bool,
    pub(super) identity: Identity,
    /// What the tokens of events carry.
    pub(super) uuid: String,
    /// The UUIDs of collections whose end the history shows.
    pub(super) ended: HashSet<String>,
    /// The positions of events that the history has no more.
    pub(super) undone: Vec<Checkpoint>,
}

/// What can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Call {
    Open,
    GlobalCheckpoint,
    Head,
    Earliest,
    Identity,
    EndedSince,
    Outline,
}

impl Default for Shared {
    fn default() -> Self {
        let mut identity = Identity::new(Scope::Collection(Namespace::new("test", "events")));
        (identity.collection_uuid, identity.shows_collection) = (Some(UUID.into()), true);
        identity.deployment = Some(Deployment { set_name: "memory".into(), hosts: vec!["memory:27017".into()] });
        let script = Script {
            feed: Feed::new(),
            reopening: None,
            readers: HashMap::new(),
            reads: 0,
            last_reader: 0,
            opened_from: Vec::new(),
            hanging: false,
            failures: HashMap::new(),
            head: None,
            tells_global_checkpoint: true,
            tells_time: true,
            full_document: false,
            identity,
            uuid: UUID.into(),
            ended: HashSet::new(),
            undone: Vec::new(),
        };
        Self { script: Mutex::new(script), changed: watch::Sender::new(()) }
    }
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Script {
    pub(super) fn append(&mut self, event: MemoryEvent, index: u32) -> Checkpoint {
        let position = self.feed.token_now(index, &self.uuid);
        self.feed.push(Entry::Event { event: event.at(&position), position: position.clone() });
        Checkpoint::Token(position)
    }

    pub(super) fn append_quiet(&mut self, time: Timestamp) -> Checkpoint {
        self.feed.advance_to(time);
        let token = quiet_token(time);
        self.feed.push(Entry::Quiet(token.clone()));
        Checkpoint::Token(token)
    }

    pub(super) fn head(&self) -> Timestamp {
        self.head.unwrap_or(self.feed.time)
    }
}
