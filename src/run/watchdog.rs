//! What a run looks after by the clock, whatever its handler does: the head, whether the id is still its own, and an
//! event that is in hand too long. One question of each kind is under way at a time.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::warn;

use crate::checkpoint::Checkpoint;
use crate::error::{SourceError, StorageError};
use crate::ids::{Ownership, SubscriptionId};
use crate::model::SubscriptionModel;
use crate::reason::Reason;
use crate::run::desk::{HeldBack, InHand, View};
use crate::storage::{CheckpointStorage, Record};

const HEAD_EVERY: Duration = Duration::from_secs(10);
/// An owner without an answered save for so long asks whether it still is the owner.
const OWNERSHIP_EVERY: Duration = Duration::from_secs(10);
const IN_HAND_WARNED: Duration = Duration::from_secs(60);
const HELD_WARNED: Duration = Duration::from_secs(60);

pub(crate) struct Watchdog<M, S> {
    id: SubscriptionId,
    ownership: Ownership,
    model: M,
    storage: S,
    head_at: Instant,
    head: Option<JoinHandle<Result<Checkpoint, SourceError>>>,
    asked_at: Instant,
    owner: Option<JoinHandle<Result<Option<Record>, StorageError>>>,
    in_hand_warned: Option<Instant>,
    /// The hold that was warned about, by its beginning.
    held_warned: Option<Instant>,
}

/// What the watchdog found out.
pub(crate) enum Found {
    Head(Checkpoint),
    /// The record is no longer the run's own.
    Lost(Reason),
    Nothing,
}

impl<M: SubscriptionModel, S: CheckpointStorage> Watchdog<M, S> {
    pub(crate) fn new(id: SubscriptionId, ownership: Ownership, model: M, storage: S) -> Self {
        let now = Instant::now();
        Self {
            id,
            ownership,
            model,
            storage,
            head_at: now,
            head: None,
            asked_at: now,
            owner: None,
            in_hand_warned: None,
            held_warned: None,
        }
    }

    /// The run has another fence from now on.
    pub(crate) fn begin_anew(&mut self, ownership: Ownership) {
        self.owner = None;
        self.asked_at = Instant::now();
        self.ownership = ownership;
    }

    /// Asks what is due. `answered` is when a save was last answered; `watching` whether ownership matters now.
    /// Answers when to look again.
    pub(crate) fn look(&mut self, answered: Instant, watching: bool, view: &View) -> Instant {
        let now = Instant::now();
        let mut wake = self.head_at.max(now);
        if self.head.is_none() && now >= self.head_at {
            let model = self.model.clone();
            self.head = Some(tokio::spawn(async move { model.head().await }));
            self.head_at = now + HEAD_EVERY;
            wake = self.head_at;
        }
        if self.head.is_some() {
            wake = now + HEAD_EVERY;
        }
        let owner_at = answered.max(self.asked_at) + OWNERSHIP_EVERY;
        if watching && self.owner.is_none() {
            if now >= owner_at {
                let (storage, id) = (self.storage.clone(), self.id.clone());
                self.owner = Some(tokio::spawn(async move { storage.read(&id).await }));
                self.asked_at = now;
            } else {
                wake = wake.min(owner_at);
            }
        }
        let warn_at = [self.warn_in_hand(view.in_hand.as_ref()), self.warn_held(view.held.as_ref())];
        warn_at.into_iter().flatten().fold(wake, Instant::min)
    }

    /// Warns once of a hold that lasts: a position that stands still for too long leaves the oplog.
    fn warn_held(&mut self, held: Option<&HeldBack>) -> Option<Instant> {
        let HeldBack { since, durable } = held?;
        if self.held_warned == Some(*since) {
            return None;
        }
        let (now, at) = (Instant::now(), *since + HELD_WARNED);
        if now < at {
            return Some(at);
        }
        self.held_warned = Some(*since);
        let (id, seconds) = (&self.id, (now - *since).as_secs());
        let position = durable.as_ref().map_or_else(|| "the beginning".to_owned(), ToString::to_string);
        warn!(
            subscription = %id, position, seconds,
            "subscription {id} has been held at {position} for {seconds} s: nothing behind it is stored until it is declared durable"
        );
        None
    }

    fn warn_in_hand(&mut self, in_hand: Option<&InHand>) -> Option<Instant> {
        let Some(InHand { position, since, .. }) = in_hand else {
            self.in_hand_warned = None;
            return None;
        };
        let now = Instant::now();
        let at = self.in_hand_warned.filter(|at| at > since).unwrap_or(*since) + IN_HAND_WARNED;
        if now < at {
            return Some(at);
        }
        self.in_hand_warned = Some(now);
        let (id, seconds) = (&self.id, (now - *since).as_secs());
        warn!(subscription = %id, %position, seconds, "the handler of subscription {id} has had the event at {position} for {seconds} s");
        Some(now + IN_HAND_WARNED)
    }

    /// Waits for the next answer; without a question, for ever.
    ///
    /// # Cancel safety
    /// The questions go on, and their answers are there at the next call.
    pub(crate) async fn found(&mut self) -> Found {
        let head = async {
            match &mut self.head {
                Some(task) => task.await,
                None => std::future::pending().await,
            }
        };
        let owner = async {
            match &mut self.owner {
                Some(task) => task.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            head = head => {
                self.head = None;
                // One that failed is asked again in ten seconds; the reader shows what ails the source.
                head.ok().and_then(Result::ok).map_or(Found::Nothing, Found::Head)
            }
            owner = owner => {
                self.owner = None;
                match owner {
                    Ok(Ok(record)) => still_own(record.as_ref(), &self.ownership).map_or(Found::Nothing, Found::Lost),
                    _ => Found::Nothing,
                }
            }
        }
    }
}

/// Why the record is not this owner's, if it is not.
pub(crate) fn still_own(record: Option<&Record>, ownership: &Ownership) -> Option<Reason> {
    match record {
        None => Some(Reason::Deleted),
        Some(record) if record.ownership.as_ref() == Some(ownership) => None,
        Some(record) => Some(Reason::Superseded {
            owner: record.ownership.as_ref().map(|ownership| ownership.owner.clone()),
            since: record.claimed_at,
        }),
    }
}
