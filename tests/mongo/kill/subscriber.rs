//! The subscriber that is killed: a process of its own with one trap in it. Whoever steps on the trap tells the parent and
//! goes no further, so that SIGKILL meets it exactly there, while everything else in the process goes on.

use std::sync::{
    Arc,
    atomic::{AtomicI32, AtomicU32, Ordering},
};

use mongosub::{
    ChangeEvent, ChangeStreamModel, ChangeStreamReader, Checkpoint, CheckpointStorage, Claim, ClaimOutcome, Delivery,
    Deployment, DurableSubscriptions, Failure, Fingerprint, Identity, MongoCheckpointStorage, Namespace, Ownership,
    Plan, Read, Reader, Record, Save, SaveOutcome, SourceError, SourceState, StorageError, SubscribeError,
    SubscriptionId, SubscriptionModel, bson::Document, mongodb::Client,
};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::support::child;

/// Where a subscriber can be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Point {
    /// The record has been read, and nothing done about it yet.
    RecordRead,
    /// The source has told what it is.
    Identified,
    /// The present is known, and not stored yet.
    Pinned,
    /// The cursor is open, nothing is claimed.
    Opened,
    /// The claim is on its way to the server.
    Claiming,
    /// The server has answered the claim, the run does not know it.
    Claimed,
    /// The head has been asked for.
    HeadAsked,
    /// Something has been read and not been handed out yet.
    Read,
    /// The handler has the event and has done nothing.
    Handling,
    /// The handler has done its work and has not returned.
    Handled,
    /// A save is on its way to the server.
    Saving,
    /// The server has answered the save, the run does not know it.
    Saved,
    /// No trap: killed at any moment by the parent.
    Between,
}

/// What the subscriber is told.
#[derive(Debug, Serialize, Deserialize)]
pub struct Life {
    pub uri: String,
    pub database: String,
    pub point: Point,
    /// At the how-manieth time.
    pub nth: u32,
}

/// What the subscriber says.
#[derive(Debug, Serialize, Deserialize)]
pub enum Word {
    /// The start is stored.
    Claimed,
    /// The handler has done its work for this event; microseconds since 1970.
    Handled { id: i32, at: u64 },
    /// A save was answered; so many events had been handled in this life when it was sent.
    Saved { handled: i32 },
    /// It stands on the trap.
    Trapped,
    /// It ends by itself, which it should not.
    Ended(String),
}

pub const ID: &str = "killed_v1";

struct Trap {
    point: Point,
    left: AtomicU32,
    handled: AtomicI32,
}

impl Trap {
    async fn step(&self, point: Point) {
        if self.is_sprung(point) {
            self.hold().await;
        }
    }

    fn is_sprung(&self, point: Point) -> bool {
        point == self.point && self.left.fetch_sub(1, Ordering::Relaxed) == 1
    }

    async fn hold(&self) {
        say(&Word::Trapped);
        std::future::pending::<()>().await;
    }
}

/// Without a parent there is nothing left to do.
fn say(word: &Word) {
    if child::say(word).is_err() {
        std::process::exit(1);
    }
}

fn micros() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

/// The role. One thread: between the decision to save and `Storage::save` then lies at most one turn of the handler, which
/// makes the count of handled events in `Saved` exact to one.
pub fn play(input: serde_json::Value) -> anyhow::Result<()> {
    let life: Life = serde_json::from_value(input)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(live(life))
}

async fn live(life: Life) -> anyhow::Result<()> {
    let trap = Arc::new(Trap { point: life.point, left: AtomicU32::new(life.nth), handled: AtomicI32::new(0) });
    let database = Client::with_uri_str(&life.uri).await?.database(&life.database);
    let feed = database.collection::<Document>("feed");
    let model = Model { inner: ChangeStreamModel::collection(&feed), trap: trap.clone() };
    let storage = MongoCheckpointStorage::new(&database.collection::<Document>("checkpoints"));
    let storage = Storage { inner: storage, trap: trap.clone() };
    let handler = move |delivery: Delivery| handle(delivery, trap.clone());
    let subscription = DurableSubscriptions::new(model, storage).subscribe(ID, handler).await;
    let reason = match subscription {
        Ok(subscription) => subscription.stopped().await.to_string(),
        Err(error) => error.to_string(),
    };
    say(&Word::Ended(reason));
    Ok(())
}

async fn handle(delivery: Delivery, trap: Arc<Trap>) -> Result<(), Failure> {
    let id = delivery.event.document_id::<i32>()?.ok_or("no document")?;
    trap.step(Point::Handling).await;
    // One event in one turn of the task, never several.
    tokio::task::yield_now().await;
    trap.handled.fetch_add(1, Ordering::Relaxed);
    say(&Word::Handled { id, at: micros() });
    trap.step(Point::Handled).await;
    Ok(())
}

#[derive(Clone)]
struct Model {
    inner: ChangeStreamModel,
    trap: Arc<Trap>,
}

impl SubscriptionModel for Model {
    type Reader = TrappedReader;

    async fn open(&self, from: Option<&Checkpoint>, plan: &Plan) -> Result<TrappedReader, SourceError> {
        let inner = self.inner.open(from, plan).await?;
        self.trap.step(Point::Opened).await;
        Ok(TrappedReader { inner, trap: self.trap.clone() })
    }

    fn check(&self, plan: &Plan) -> Result<Fingerprint, SubscribeError> {
        self.inner.check(plan)
    }

    async fn global_checkpoint(&self) -> Result<Option<Checkpoint>, SourceError> {
        let pinned = self.inner.global_checkpoint().await;
        self.trap.step(Point::Pinned).await;
        pinned
    }

    async fn head(&self) -> Result<Checkpoint, SourceError> {
        self.trap.step(Point::HeadAsked).await;
        self.inner.head().await
    }

    async fn is_readable(&self, position: &Checkpoint) -> Result<bool, SourceError> {
        self.inner.is_readable(position).await
    }

    async fn earliest(&self) -> Result<Checkpoint, SourceError> {
        self.inner.earliest().await
    }

    async fn identity(&self) -> Result<Identity, SourceError> {
        let identity = self.inner.identity().await;
        self.trap.step(Point::Identified).await;
        identity
    }

    async fn outline(&self, position: &Checkpoint) -> Result<Option<ChangeEvent>, SourceError> {
        self.inner.outline(position).await
    }

    async fn has_event(&self, position: &Checkpoint) -> Result<bool, SourceError> {
        self.inner.has_event(position).await
    }

    async fn ended_since(&self, from: &Checkpoint, collection_uuid: &str) -> Result<bool, SourceError> {
        self.inner.ended_since(from, collection_uuid).await
    }
}

struct TrappedReader {
    inner: ChangeStreamReader,
    trap: Arc<Trap>,
}

impl Reader for TrappedReader {
    async fn next(&mut self) -> Option<Result<Read, SourceError>> {
        let read = self.inner.next().await;
        if matches!(read, Some(Ok(Read::Event { .. }))) {
            self.trap.step(Point::Read).await;
        }
        read
    }

    fn opened_at(&self) -> Option<Checkpoint> {
        self.inner.opened_at()
    }

    fn state(&self) -> watch::Receiver<SourceState> {
        self.inner.state()
    }
}

#[derive(Clone)]
struct Storage {
    inner: MongoCheckpointStorage,
    trap: Arc<Trap>,
}

impl CheckpointStorage for Storage {
    async fn read(&self, id: &SubscriptionId) -> Result<Option<Record>, StorageError> {
        let record = self.inner.read(id).await;
        self.trap.step(Point::RecordRead).await;
        record
    }

    async fn claim(&self, claim: &Claim) -> Result<ClaimOutcome, StorageError> {
        if self.trap.is_sprung(Point::Claiming) {
            let (storage, claim) = (self.inner.clone(), claim.clone());
            tokio::spawn(async move { storage.claim(&claim).await });
            // On its way: the spawned task has had its turn.
            tokio::task::yield_now().await;
            self.trap.hold().await;
        }
        let claimed = self.inner.claim(claim).await;
        if matches!(claimed, Ok(ClaimOutcome::Claimed(_))) {
            say(&Word::Claimed);
        }
        self.trap.step(Point::Claimed).await;
        claimed
    }

    async fn save(&self, save: &Save) -> Result<SaveOutcome, StorageError> {
        let handled = self.trap.handled.load(Ordering::Relaxed);
        if self.trap.is_sprung(Point::Saving) {
            let (storage, save) = (self.inner.clone(), save.clone());
            tokio::spawn(async move { storage.save(&save).await });
            tokio::task::yield_now().await;
            self.trap.hold().await;
        }
        let saved = self.inner.save(save).await;
        self.trap.step(Point::Saved).await;
        if matches!(saved, Ok(SaveOutcome::Saved { .. } | SaveOutcome::NotAhead)) {
            say(&Word::Saved { handled });
        }
        saved
    }

    async fn delete(&self, id: &SubscriptionId, owner: Option<&Ownership>) -> Result<bool, StorageError> {
        self.inner.delete(id, owner).await
    }

    async fn list(&self) -> Result<Vec<String>, StorageError> {
        self.inner.list().await
    }

    async fn not_dead(&self, id: &SubscriptionId, superseded: &Ownership) -> Result<(), StorageError> {
        self.inner.not_dead(id, superseded).await
    }

    fn namespaces(&self) -> Vec<Namespace> {
        self.inner.namespaces()
    }

    async fn deployment(&self) -> Result<Option<Deployment>, StorageError> {
        self.inner.deployment().await
    }
}
