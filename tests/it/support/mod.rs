//! What the tests without a server share: a storage that fails on demand, a handler that writes down what it got.

mod faulty;
mod faulty_letters;
mod hold;
mod logs;
mod recorder;
mod steps;

use std::time::Duration;

use mongosub::bson::DateTime;
use mongosub::memory::{MemoryCheckpointStorage, MemoryModel};
use mongosub::{
    Checkpoint, CheckpointStorage, DurableSubscriptions, Epoch, Fence, Fingerprint, Kind, Namespace, Owner, Ownership,
    Plan, Record, Scope, Source, State, Status, Subscribe, Subscription, SubscriptionId, SubscriptionModel,
};
use tokio::time::Instant;

pub use faulty::{Fault, FaultyStorage, Saved, unavailable};
pub use faulty_letters::FaultyLetters;
pub use hold::{Hold, Log};
pub use logs::Logs;
pub use recorder::Recorder;
pub use steps::{Cut, Stepped};

pub const ID: &str = "orders_v1";

pub fn id() -> SubscriptionId {
    SubscriptionId::new(ID).unwrap()
}

/// A model, a storage that can fail, and the wrapper around both.
pub struct World {
    pub model: MemoryModel,
    pub storage: FaultyStorage,
    pub subscriptions: DurableSubscriptions<MemoryModel, FaultyStorage>,
    pub seen: Recorder,
}

impl World {
    pub fn new() -> Self {
        Self::over(MemoryModel::new(), MemoryCheckpointStorage::new())
    }

    /// The next process over the same feed and the same records.
    pub fn restarted(&self) -> Self {
        Self::over(self.model.clone(), self.storage.inner().clone())
    }

    pub fn over(model: MemoryModel, store: MemoryCheckpointStorage) -> Self {
        let storage = FaultyStorage::new(store);
        let subscriptions = DurableSubscriptions::new(model.clone(), storage.clone());
        Self { model, storage, subscriptions, seen: Recorder::default() }
    }

    /// Subscribes with every default and a handler that only writes down.
    pub async fn subscribe(&self) -> Subscription {
        self.action().await.unwrap()
    }

    /// That subscription before it is awaited: settings can be made.
    pub fn action(&self) -> Subscribe<MemoryModel, FaultyStorage> {
        self.subscriptions.subscribe(ID, self.seen.handler())
    }

    /// Subscribes with every default and a handler that writes down and then waits to be let go.
    pub async fn subscribe_held(&self) -> (Subscription, Hold) {
        let hold = Hold::default();
        (self.held(&hold).await.unwrap(), hold)
    }

    /// That subscription before it is awaited: settings can be made.
    pub fn held(&self, hold: &Hold) -> Subscribe<MemoryModel, FaultyStorage> {
        let hold = hold.clone();
        let handler = self.seen.then(move |_| {
            let hold = hold.clone();
            async move {
                hold.wait().await;
                Ok(())
            }
        });
        self.subscriptions.subscribe(ID, handler)
    }

    /// Pushes an insert under each of these keys.
    pub fn inserts(&self, keys: std::ops::RangeInclusive<i32>) -> Vec<Checkpoint> {
        keys.map(|key| self.insert(key)).collect()
    }

    /// Pushes an insert under this key.
    pub fn insert(&self, key: i32) -> Checkpoint {
        self.model.push(mongosub::memory::insert(key, mongosub::bson::doc! {}))
    }

    pub async fn record(&self) -> Option<Record> {
        self.storage.inner().read(&id()).await.unwrap()
    }

    pub async fn stored(&self) -> Option<Checkpoint> {
        self.record().await.and_then(|record| record.position)
    }
}

/// Waits, in virtual time, until a status is as wanted; an hour at most.
pub async fn until(subscription: &Subscription, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
    let mut published = subscription.watch();
    let end = Instant::now() + Duration::from_secs(3600);
    while Instant::now() < end {
        // What can happen without time passing happens first, so that no moment is lost.
        for _ in 0..50 {
            let status = subscription.status();
            if wanted(&status) {
                return status;
            }
            tokio::task::yield_now().await;
        }
        let _ = tokio::time::timeout_at(end, published.changed()).await;
    }
    panic!("never {what}: {:?}", subscription.status())
}

/// Waits until a reason's name shows in a state.
pub async fn until_reason(subscription: &Subscription, state: &str, reason: &str) -> Status {
    until(subscription, &format!("{state}({reason})"), |status| {
        status.state.name() == state && status.state.reason().is_some_and(|is| is.name() == reason)
    })
    .await
}

pub async fn until_settled(subscription: &Subscription, events: u64) -> Status {
    until(subscription, &format!("{events} settled"), |status| status.settled >= events).await
}

pub async fn until_saved(subscription: &Subscription, position: &Checkpoint) -> Status {
    until(subscription, &format!("saved {position}"), |status| status.saved.as_ref() == Some(position)).await
}

/// Waits until the handler has been called so often.
pub async fn until_seen(world: &World, deliveries: usize) {
    for _ in 0..3_600_000 {
        if world.seen.all().len() >= deliveries {
            return;
        }
        millis(1).await;
    }
    panic!("never {deliveries} deliveries: {:?}", world.seen.all());
}

pub fn is_running(state: &State) -> bool {
    matches!(state, State::CatchingUp | State::CaughtUp)
}

pub async fn seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

pub async fn millis(millis: u64) {
    tokio::time::sleep(Duration::from_millis(millis)).await;
}

/// What the memory model's clock of storages shows first.
const BEGINNING: i64 = 1_767_225_600_000;

/// The UUID of the memory model's collection.
pub const UUID: &str = "5EED5EED5EED4EED8EED5EED5EED5EED";

/// The fingerprint of the filter that passes everything.
pub fn fingerprint() -> Fingerprint {
    MemoryModel::new().check(&Plan::default()).unwrap()
}

/// What the memory model is, as a record names it.
pub fn source() -> Source {
    Source::new(Scope::Collection(Namespace::new("test", "events")), Some(UUID.into()), Some("memory".into()))
}

/// The record of a run that ended cleanly at an event's position an hour ago: fence 7, epoch 5.
pub fn left_at(position: &Checkpoint) -> Record {
    let mut record = Record::empty(id());
    let hour_ago = DateTime::from_millis(BEGINNING - 3_600_000);
    record.position = Some(position.clone());
    record.kind = Some(Kind::Event);
    record.epoch = Some(Epoch(5));
    record.cluster_time = position.cluster_time();
    record.ownership = Some(Ownership { fence: Fence(7), owner: Owner::new("host:1:before") });
    record.claimed_at = Some(hour_ago);
    record.saved_at = Some(hour_ago);
    record.pipeline = Some(fingerprint());
    record.source = Some(source());
    record.clean = true;
    record
}
