//! A subscriber is killed with SIGKILL while it puts letters away: on the way to the server, and between the answer and the
//! settling. Nothing is lost, nothing is there twice, and nothing overtakes.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU32, Ordering},
};
use std::time::Duration;

use libtest_mimic::Trial;
use mongodb::{
    Client, Database,
    bson::{Document, doc},
};
use mongosub::{
    DeadLetterStorage, Delivery, Deployment, DocumentKey, EvictOutcome, HoldOutcome, Letter, MongoDeadLetterStorage,
    Namespace, NewLetter, OnFailure, Owner, PutOutcome, RemoveOutcome, Sequence, StorageError, SubscriptionId, Then,
    bytes::Bytes,
};
use serde::{Deserialize, Serialize};

use super::{key, letters};
use crate::{
    seen::{PATIENCE, subscriptions, things},
    support::{Child, Fixture, child, wait_for},
};

/// Where a subscriber is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Point {
    /// A letter is on its way to the server.
    Storing,
    /// The server has answered, the run does not know it, and nothing is settled.
    Stored,
}

#[derive(Debug, Serialize, Deserialize)]
struct Life {
    uri: String,
    database: String,
    point: Point,
    /// At the how-manieth letter.
    nth: u32,
}

#[derive(Debug, Serialize, Deserialize)]
enum Word {
    Subscribed,
    Handled(i32),
    Trapped,
}

const ID: &str = "letters_v1";

pub fn test() -> Trial {
    crate::support::test(
        "dead letters survive a kill between parking and settling, none twice and none overtaken",
        |ctx| async move { killed(ctx.plain().await).await },
    )
}

/// The role.
pub fn play(input: serde_json::Value) -> anyhow::Result<()> {
    let life: Life = serde_json::from_value(input)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let database = Client::with_uri_str(&life.uri).await?.database(&life.database);
        let storage = Trapped { inner: letters(&database), point: life.point, left: Arc::new(life.nth.into()) };
        let wrapper = subscriptions(&database).dead_letters(storage).on_failure(policy());
        let handler = |delivery: Delivery| async move {
            let of = delivery.event.document_id::<i32>()?.ok_or("no document")?;
            if of == 1 {
                return Err("poisoned".into());
            }
            child::say(&Word::Handled(of)).map_err(|error| error.to_string())?;
            Ok(())
        };
        let subscription = wrapper.subscribe(ID, handler).await?;
        child::say(&Word::Subscribed)?;
        anyhow::bail!("it ended by itself: {}", subscription.stopped().await)
    })
}

fn policy() -> OnFailure {
    OnFailure::retry(1).then(Then::DeadLetter).backoff(Duration::from_millis(1), Duration::from_millis(1))
}

async fn killed(fixture: Fixture) -> anyhow::Result<()> {
    let Fixture { server, database, .. } = fixture;
    let feed = things(&database);
    let (mut changes, mut handled, mut lives) = (0, Vec::new(), 0);
    // So that its start is stored.
    subscriptions(&database).subscribe(ID, |_: Delivery| async { Ok(()) }).await?.shutdown().await?;
    for nth in 1..=3 {
        for point in [Point::Storing, Point::Stored] {
            lives += 1;
            let life = Life { uri: server.uri(), database: database.name().into(), point, nth };
            let mut child = Child::start("killed-with-letters", &life);
            assert!(matches!(child.json().await, Word::Subscribed));
            for _ in 0..4 {
                // One document that fails every time, and another one for each change of it.
                changes += 1;
                let change = doc! { "$set": { "n": changes } };
                feed.update_one(doc! { "_id": 1 }, change).upsert(true).await?;
                feed.insert_one(doc! { "_id": 1000 + changes }).await?;
            }
            loop {
                match child.json().await {
                    Word::Handled(id) => handled.push(id),
                    Word::Trapped => break,
                    Word::Subscribed => panic!("twice"),
                }
            }
            // At any moment after.
            tokio::time::sleep(Duration::from_micros(fastrand::u64(..5_000))).await;
            child.kill().await;
        }
    }
    assert_eq!(lives, 6);
    // The last life, in peace.
    let notes = Arc::new(Mutex::new(Vec::new()));
    let noting = notes.clone();
    let subscriber = move |delivery: Delivery| {
        noting.lock().unwrap().push(crate::seen::id_of(&delivery));
        async move { if crate::seen::id_of(&delivery) == 1 { Err("poisoned".into()) } else { Ok(()) } }
    };
    let wrapper = subscriptions(&database).dead_letters(letters(&database)).on_failure(policy());
    let subscription = wrapper.subscribe(ID, subscriber).await?;
    wait_for("the last change", PATIENCE, || async { notes.lock().unwrap().contains(&(1000 + changes)).then_some(()) })
        .await;
    subscription.drained().await?;
    assert!(!notes.lock().unwrap().contains(&1), "delivered past its letters");
    handled.extend(notes.lock().unwrap().iter().copied());
    let mut firsts = handled.clone();
    firsts.sort_unstable();
    firsts.dedup();
    assert_eq!(firsts, (1001..=1000 + changes).collect::<Vec<_>>(), "every other document, and it alone");
    all_are_there(&database, changes).await
}

/// A retry hands out every change of the failing document, each once, in the order they were made.
async fn all_are_there(database: &Database, changes: i32) -> anyhow::Result<()> {
    let wrapper = subscriptions(database).dead_letters(letters(database));
    let positions: Vec<_> = wrapper.dead_letters_of(ID, &key(database, 1)).await?;
    assert!(positions.windows(2).all(|pair| pair[1].position.is_beyond(&pair[0].position)));
    let got = Arc::new(Mutex::new(Vec::new()));
    let notes = got.clone();
    let handler = move |delivery: Delivery| {
        let notes = notes.clone();
        async move {
            let full = delivery.event.full_document::<Document>()?;
            let n = match full {
                Some(full) => full.get_i32("n")?,
                None => {
                    let update = delivery.event.update_description()?.ok_or("no update")?;
                    update.updated_fields.get_i32("n")?
                }
            };
            notes.lock().unwrap().push(n);
            Ok(())
        }
    };
    let retried = wrapper.retry(ID, &key(database, 1), handler).await?;
    assert_eq!(retried.failed, None);
    assert_eq!(*got.lock().unwrap(), (1..=changes).collect::<Vec<_>>());
    Ok(())
}

/// Stands still at one letter and says so.
#[derive(Clone)]
struct Trapped {
    inner: MongoDeadLetterStorage,
    point: Point,
    left: Arc<AtomicU32>,
}

impl Trapped {
    async fn store(&self, letter: &NewLetter, begin: bool) -> Result<PutOutcome, StorageError> {
        let sprung = self.left.fetch_sub(1, Ordering::Relaxed) == 1;
        let (storage, letter) = (self.inner.clone(), letter.clone());
        let store = async move { if begin { storage.put(&letter).await } else { storage.append(&letter).await } };
        if sprung && self.point == Point::Storing {
            tokio::spawn(store);
            tokio::task::yield_now().await;
            return self.stand_still().await;
        }
        let outcome = store.await;
        if sprung {
            return self.stand_still().await;
        }
        outcome
    }

    async fn stand_still<T>(&self) -> T {
        // Without a parent there is nothing left to do.
        if child::say(&Word::Trapped).is_err() {
            std::process::exit(1);
        }
        std::future::pending().await
    }
}

impl DeadLetterStorage for Trapped {
    async fn put(&self, letter: &NewLetter) -> Result<PutOutcome, StorageError> {
        self.store(letter, true).await
    }

    async fn append(&self, letter: &NewLetter) -> Result<PutOutcome, StorageError> {
        self.store(letter, false).await
    }

    async fn sequences(&self, id: &SubscriptionId) -> Result<Vec<Sequence>, StorageError> {
        self.inner.sequences(id).await
    }

    async fn letters(&self, id: &SubscriptionId, key: &DocumentKey) -> Result<Vec<Letter>, StorageError> {
        self.inner.letters(id, key).await
    }

    async fn event(&self, letter: &Letter) -> Result<Option<Bytes>, StorageError> {
        self.inner.event(letter).await
    }

    async fn hold(
        &self,
        id: &SubscriptionId,
        key: &DocumentKey,
        owner: &Owner,
        lease: Duration,
    ) -> Result<HoldOutcome, StorageError> {
        self.inner.hold(id, key, owner, lease).await
    }

    async fn release(&self, id: &SubscriptionId, key: &DocumentKey, owner: &Owner) -> Result<(), StorageError> {
        self.inner.release(id, key, owner).await
    }

    async fn note_failure(&self, letter: &Letter, owner: &Owner, error: &[String]) -> Result<bool, StorageError> {
        self.inner.note_failure(letter, owner, error).await
    }

    async fn remove(&self, letter: &Letter, owner: &Owner) -> Result<RemoveOutcome, StorageError> {
        self.inner.remove(letter, owner).await
    }

    async fn evict(&self, id: &SubscriptionId, key: &DocumentKey) -> Result<EvictOutcome, StorageError> {
        self.inner.evict(id, key).await
    }

    fn namespaces(&self) -> Vec<Namespace> {
        self.inner.namespaces()
    }

    async fn deployment(&self) -> Result<Option<Deployment>, StorageError> {
        self.inner.deployment().await
    }
}
