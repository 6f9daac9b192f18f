//! What a subscription's handler has seen, for tests to wait for and compare; and the few things most of these tests do.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::future::{Ready, ready};
use mongosub::{
    ChangeStreamModel, Checkpoint, CheckpointStorage, Delivery, DurableSubscriptions, Failure, MongoCheckpointStorage,
    Operation, Record, SubscriptionId,
    bson::{Bson, Document, doc},
    mongodb::{Collection, Database},
};

use crate::support::wait_for;

pub const PATIENCE: Duration = Duration::from_secs(30);

/// A cheap clone. It notes deliveries in the order in which they came.
#[derive(Clone, Default)]
pub struct Seen(Arc<Mutex<Vec<Delivery>>>);

impl Seen {
    pub fn note(&self, delivery: Delivery) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(delivery);
    }

    /// A handler that notes and is done.
    pub fn handler(&self) -> impl FnMut(Delivery) -> Ready<Result<(), Failure>> + Send + use<> {
        let seen = self.clone();
        move |delivery| {
            seen.note(delivery);
            ready(Ok(()))
        }
    }

    pub fn all(&self) -> Vec<Delivery> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The `_id`s of the changed documents, -1 where there is none.
    pub fn ids(&self) -> Vec<i32> {
        self.all().iter().map(id_of).collect()
    }

    pub fn operations(&self) -> Vec<Operation> {
        self.all().iter().map(|delivery| delivery.event.operation().expect("an operation")).collect()
    }

    pub fn positions(&self) -> Vec<Checkpoint> {
        self.all().into_iter().map(|delivery| delivery.position).collect()
    }

    /// Whether everything that came is behind a stored position.
    pub fn is_covered_by(&self, stored: Option<&Checkpoint>) -> bool {
        let last = self.positions().pop();
        last.zip(stored).is_some_and(|(last, stored)| *stored == last || stored.is_beyond(&last))
    }

    /// Waits until the change of this document has come.
    pub async fn sees(&self, id: i32) {
        let what = format!("the change of document {id} is delivered; so far: {self:?}");
        let seen = || async { self.ids().contains(&id).then_some(()) };
        wait_for(&what, PATIENCE, seen).await;
    }

    /// Waits until that many have come.
    pub async fn counts(&self, number: usize) {
        wait_for(&format!("{number} deliveries"), PATIENCE, || async { (self.all().len() >= number).then_some(()) })
            .await;
    }
}

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ids().fmt(f)
    }
}

/// The `_id` of the changed document, -1 when it has none that is a small number.
pub fn id_of(delivery: &Delivery) -> i32 {
    match delivery.event.document_id::<Bson>() {
        Ok(Some(Bson::Int32(id))) => id,
        _ => -1,
    }
}

pub type Subscriptions<M = ChangeStreamModel> = DurableSubscriptions<M, MongoCheckpointStorage>;

/// The collection that most tests write to.
pub fn things(database: &Database) -> Collection<Document> {
    database.collection("things")
}

/// The storage that most tests keep their checkpoints in.
pub fn storage(database: &Database) -> MongoCheckpointStorage {
    MongoCheckpointStorage::new(&database.collection::<Document>("checkpoints"))
}

/// Subscriptions to `things`, with their checkpoints beside them.
pub fn subscriptions(database: &Database) -> Subscriptions {
    DurableSubscriptions::new(ChangeStreamModel::collection(&things(database)), storage(database))
}

pub async fn insert(collection: &Collection<Document>, ids: impl IntoIterator<Item = i32>) -> anyhow::Result<()> {
    for id in ids {
        collection.insert_one(doc! { "_id": id }).await?;
    }
    Ok(())
}

/// The stored record of a subscription.
pub async fn record(database: &Database, id: &str) -> anyhow::Result<Option<Record>> {
    Ok(storage(database).read(&SubscriptionId::new(id)?).await?)
}

/// Waits until the stored record is one that answers.
pub async fn stored<T>(database: &Database, id: &str, what: &str, mut is: impl FnMut(Record) -> Option<T>) -> T {
    let is = std::cell::RefCell::new(&mut is);
    wait_for(what, PATIENCE, || async {
        record(database, id).await.expect("a readable record").and_then(|record| is.borrow_mut()(record))
    })
    .await
}
