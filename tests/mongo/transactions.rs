//! Positions committed in one transaction with the handler's writes, on real servers: what is lost on the way, who is first,
//! what a server has to say.

mod killed;

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};
use std::time::Duration;

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Delivery, DurableSubscriptions, MongoCheckpointStorage, OnFailure, Reason, Subscribe,
    SubscribeError, Subscription, Then, Transaction,
    bson::{Document, doc},
    conformance,
    mongodb::{ClientSession, Database},
};
use tokio::sync::Notify;

pub use self::killed::play;
use crate::seen::{PATIENCE, Seen, insert, record, storage, stored, subscriptions, things};
use crate::support::{FailMode, Fixture, Kind, Options, Server, WRITER, on_any_server, test, wait_until};

pub fn tests() -> Vec<Trial> {
    let any = vec![
        test("the storage in MongoDB passes the suite of transactions", |ctx| async move {
            let Fixture { database, .. } = ctx.plain().await;
            database.create_collection("written").await?;
            let effects = Written(database.clone());
            conformance::transactional_storage(&storage(&database), &effects).await.assert_passed();
            anyhow::Ok(())
        }),
        test("a user who may only read and write passes the suite of transactions", |ctx| async move {
            let Fixture { server, database, .. } = ctx.shared(Kind::Auth).await;
            database.create_collection("written").await?;
            let own = server.client_as(WRITER).await.database(database.name());
            conformance::transactional_storage(&storage(&own), &Written(own.clone())).await.assert_passed();
            anyhow::Ok(())
        }),
        test("writes and position are committed together, several events to a transaction", |ctx| async move {
            together(ctx.plain().await.database).await
        }),
        test("a handler that fails in the middle of a transaction leaves nothing of its event", |ctx| async move {
            fails_in_the_middle(ctx.plain().await.database).await
        }),
        test("a superseded owner's writes are rolled back, and its successor does not wait", |ctx| async move {
            superseded(ctx.plain().await.database).await
        }),
        test("a handler that commits, aborts or keeps its transaction has failed", |ctx| async move {
            misused(ctx.plain().await.database).await
        }),
        test("a collection that is made in a transaction comes into being once", |ctx| async move {
            made_inside(ctx.plain().await).await
        }),
        test("quiet positions are stored between transactions", |ctx| async move {
            quiet(ctx.plain().await.database).await
        }),
    ];
    let faulty = vec![
        test("a commit whose connection is lost is made again", |ctx| async move {
            let lost = doc! { "failCommands": ["commitTransaction"], "closeConnection": true };
            faulty(ctx.shared(Kind::Faulty).await, lost, 3, 1).await
        }),
        test("a commit whose outcome the server does not know is made again", |ctx| async move {
            let unknown = doc! {
                "failCommands": ["commitTransaction"], "errorCode": 91,
                "errorLabels": ["UnknownTransactionCommitResult"],
            };
            faulty(ctx.shared(Kind::Faulty).await, unknown, 5, 1).await
        }),
        test("a commit that a majority confirms too late is made again", |ctx| async move {
            let late = doc! {
                "failCommands": ["commitTransaction"],
                "writeConcernError": { "code": 64, "errmsg": "waiting for replication timed out" },
            };
            faulty(ctx.shared(Kind::Faulty).await, late, 4, 1).await
        }),
        test("a transaction that is rolled back by the server runs again as a whole", |ctx| async move {
            let transient = doc! {
                "failCommands": ["commitTransaction"], "errorCode": 112,
                "errorLabels": ["TransientTransactionError"],
            };
            faulty(ctx.shared(Kind::Faulty).await, transient, 2, 3).await
        }),
        test("a write of the handler that meets another writer runs again as a whole", |ctx| async move {
            let transient = doc! {
                "failCommands": ["update"], "errorCode": 112, "errorLabels": ["TransientTransactionError"],
            };
            faulty(ctx.shared(Kind::Faulty).await, transient, 2, 3).await
        }),
        test("a storage that answers no transaction is no failure of the handler", |ctx| async move {
            unavailable(ctx.shared(Kind::Faulty).await).await
        }),
        test("another deployment is refused", |ctx| async move { elsewhere(ctx.plain().await.database).await }),
    ];
    [on_any_server(any), faulty, on_any_server(killed::tests())].into_iter().flatten().collect()
}

const ID: &str = "totals_v1";

type Action = Subscribe<ChangeStreamModel, MongoCheckpointStorage>;

/// The suite's writes.
struct Written(Database);

impl conformance::Effects<MongoCheckpointStorage> for Written {
    async fn write(&self, _: &MongoCheckpointStorage, transaction: &mut Transaction, key: &str) {
        let written = self.0.collection::<Document>("written");
        written.insert_one(doc! { "_id": key }).session(transaction).await.expect("a write");
    }

    async fn is_written(&self, _: &MongoCheckpointStorage, key: &str) -> bool {
        let written = self.0.collection::<Document>("written");
        written.find_one(doc! { "_id": key }).await.expect("a read").is_some()
    }
}

/// Counts the event in `totals`: under its key, and all.
async fn count(session: &mut ClientSession, database: &Database, delivery: &Delivery) -> mongodb::error::Result<()> {
    let totals = database.collection::<Document>("totals");
    let key = delivery.event.document_id::<i32>().expect("an event").unwrap_or(-1);
    for name in [key.to_string(), "all".into()] {
        let one = doc! { "$inc": { "count": 1 } };
        totals.update_one(doc! { "_id": name }, one).upsert(true).session(&mut *session).await?;
    }
    Ok(())
}

fn counting(database: &Database, seen: &Seen) -> Action {
    counting_with(&subscriptions(database), database, seen)
}

fn counting_with(
    subscriptions: &DurableSubscriptions<ChangeStreamModel, MongoCheckpointStorage>,
    database: &Database,
    seen: &Seen,
) -> Action {
    let (database, seen) = (database.clone(), seen.clone());
    subscriptions.subscribe_in_transaction(ID, move |mut transaction: Transaction, delivery: Delivery| {
        seen.note(delivery.clone());
        let database = database.clone();
        async move { Ok(count(&mut transaction, &database, &delivery).await?) }
    })
}

/// How often an event was counted, or all were.
async fn counted(database: &Database, name: &str) -> i32 {
    let total = database.collection::<Document>("totals").find_one(doc! { "_id": name }).await.expect("a read");
    total.map_or(0, |total| total.get_i32("count").expect("a count"))
}

async fn counted_each(database: &Database, keys: std::ops::RangeInclusive<i32>) -> Vec<i32> {
    let mut counts = Vec::new();
    for key in keys {
        counts.push(counted(database, &key.to_string()).await);
    }
    counts
}

async fn prepared(database: &Database) -> anyhow::Result<()> {
    for name in ["totals", "things"] {
        database.create_collection(name).await?;
    }
    Ok(())
}

async fn together(database: Database) -> anyhow::Result<()> {
    prepared(&database).await?;
    let seen = Seen::default();
    let subscription = counting(&database, &seen).save_every(10).await?;
    let ids = (1..=50).map(|id| doc! { "_id": id });
    things(&database).insert_many(ids).await?;
    subscription.caught_up().await?;
    let status = subscription.status();
    assert_eq!((status.settled, status.handled), (50, 50));
    assert!(status.saves < 50, "{} transactions", status.saves);
    assert_eq!((counted(&database, "all").await, counted_each(&database, 1..=50).await), (50, vec![1; 50]));
    assert_eq!(seen.ids(), (1..=50).collect::<Vec<_>>());
    let stored = record(&database, ID).await?.expect("a record");
    assert_eq!(stored.position.as_ref(), seen.positions().last());
    let source = stored.source.expect("a source");
    assert!(source.collection_uuid.is_some() && source.set_name.is_some(), "{source:?}");
    assert!(stored.pipeline.is_some());
    subscription.shutdown().await?;
    let stored = record(&database, ID).await?.expect("a record");
    assert!(stored.clean);
    Ok(())
}

async fn fails_in_the_middle(database: Database) -> anyhow::Result<()> {
    prepared(&database).await?;
    let (inner, failing) = (database.clone(), Arc::new(AtomicU32::new(0)));
    let (first, gate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (entered, go, fails) = (first.clone(), gate.clone(), failing.clone());
    let subscription = subscriptions(&database)
        .subscribe_in_transaction(ID, move |mut transaction: Transaction, delivery: Delivery| {
            let (database, entered, go, fails) = (inner.clone(), entered.clone(), go.clone(), fails.clone());
            async move {
                let key = delivery.event.document_id::<i32>()?.ok_or("no key")?;
                count(&mut transaction, &database, &delivery).await?;
                if key == 1 {
                    entered.notify_one();
                    go.notified().await;
                }
                if key == 4 {
                    fails.fetch_add(1, Ordering::Relaxed);
                    return Err("it is not to be counted".into());
                }
                Ok(())
            }
        })
        .save_every(10)
        .on_failure(OnFailure::retry(1).then(Then::Skip))
        .await?;
    insert(&things(&database), [1]).await?;
    first.notified().await;
    insert(&things(&database), 2..=6).await?;
    gate.notify_one();
    subscription.caught_up().await?;
    let status = subscription.status();
    assert_eq!((status.handled, status.skipped, failing.load(Ordering::Relaxed)), (5, 1, 2));
    assert_eq!(counted_each(&database, 1..=6).await, [1, 1, 1, 0, 1, 1]);
    assert_eq!(counted(&database, "all").await, 5);
    assert!(subscription.shutdown().await?.is_some());
    Ok(())
}

async fn superseded(database: Database) -> anyhow::Result<()> {
    prepared(&database).await?;
    let (entered, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (inner, told, gate) = (database.clone(), entered.clone(), go.clone());
    let first = subscriptions(&database)
        .subscribe_in_transaction(ID, move |mut transaction: Transaction, delivery: Delivery| {
            let (database, told, gate) = (inner.clone(), told.clone(), gate.clone());
            async move {
                // What only the first of them writes.
                let totals = database.collection::<Document>("totals");
                totals.insert_one(doc! { "_id": "of the first" }).session(&mut *transaction).await?;
                drop(delivery);
                told.notify_one();
                gate.notified().await;
                Ok(())
            }
        })
        .await?;
    insert(&things(&database), [1]).await?;
    entered.notified().await;
    let seen = Seen::default();
    let begun = std::time::Instant::now();
    let second = counting(&database, &seen).await?;
    second.caught_up().await?;
    assert!(begun.elapsed() < Duration::from_secs(10), "the second waited {:?}", begun.elapsed());
    go.notify_one();
    let reason = tokio::time::timeout(PATIENCE, first.stopped()).await?;
    assert!(matches!(reason, Reason::Superseded { owner: Some(_), .. }), "{reason}");
    assert_eq!(counted_each(&database, 1..=1).await, [1]);
    let left = database.collection::<Document>("totals").find_one(doc! { "_id": "of the first" }).await?;
    assert_eq!(left, None, "a write of the superseded owner");
    insert(&things(&database), [2]).await?;
    second.caught_up().await?;
    assert_eq!(seen.ids(), [1, 2]);
    second.shutdown().await?;
    Ok(())
}

async fn misused(database: Database) -> anyhow::Result<()> {
    prepared(&database).await?;
    let kept = Arc::new(std::sync::Mutex::new(None));
    let (inner, keep, calls) = (database.clone(), kept.clone(), Arc::new(AtomicU32::new(0)));
    let subscription = subscriptions(&database)
        .subscribe_in_transaction(ID, move |mut transaction: Transaction, delivery: Delivery| {
            let (database, keep, call) = (inner.clone(), keep.clone(), calls.fetch_add(1, Ordering::Relaxed));
            async move {
                match call {
                    0 => {
                        count(&mut transaction, &database, &delivery).await?;
                        transaction.abort_transaction().await?;
                    }
                    1 => {
                        let totals = database.collection::<Document>("totals");
                        totals.insert_one(doc! { "_id": "own commit" }).session(&mut *transaction).await?;
                        transaction.commit_transaction().await?;
                    }
                    2 => {
                        count(&mut transaction, &database, &delivery).await?;
                        *keep.lock().unwrap() = Some(transaction);
                    }
                    3 => {
                        // Long enough to see why it is the fourth.
                        drop(keep.lock().unwrap().take());
                        count(&mut transaction, &database, &delivery).await?;
                        return Err("seen".into());
                    }
                    _ => count(&mut transaction, &database, &delivery).await?,
                }
                Ok(())
            }
        })
        .on_failure(OnFailure::retry_forever().backoff(Duration::from_millis(300), Duration::from_millis(300)))
        .await?;
    let reasons = collected(&subscription);
    insert(&things(&database), [1]).await?;
    subscription.caught_up().await?;
    assert_eq!(counted_each(&database, 1..=1).await, [1]);
    let status = subscription.status();
    assert_eq!((status.handled, status.settled), (1, 1));
    subscription.shutdown().await?;
    let reasons = reasons.await?;
    let said = |text: &str| reasons.iter().any(|reason| reason.contains(text));
    assert!(said("committed or aborted its transaction itself"), "{reasons:?}");
    assert!(said("kept its transaction beyond its return"), "{reasons:?}");
    Ok(())
}

/// Every reason that shows until the end.
fn collected(subscription: &Subscription) -> tokio::task::JoinHandle<Vec<String>> {
    let mut status = subscription.watch();
    tokio::spawn(async move {
        let mut reasons = Vec::new();
        while status.changed().await.is_ok() {
            let reason = status.borrow_and_update().state.reason().map(ToString::to_string);
            reasons.extend(reason.filter(|reason| reasons.last() != Some(reason)));
        }
        reasons
    })
}

async fn made_inside(Fixture { database, client, .. }: Fixture) -> anyhow::Result<()> {
    database.create_collection("things").await?;
    let seen = Seen::default();
    let subscription = counting(&database, &seen).await?;
    insert(&things(&database), [1, 2]).await?;
    subscription.caught_up().await?;
    assert_eq!((counted(&database, "all").await, counted_each(&database, 1..=2).await), (2, vec![1, 1]));
    subscription.shutdown().await?;
    drop(client);
    Ok(())
}

async fn quiet(database: Database) -> anyhow::Result<()> {
    prepared(&database).await?;
    let seen = Seen::default();
    let action = counting(&database, &seen).save_quiet_position_every(Duration::from_millis(200));
    let subscription = action.await?;
    let elsewhere = database.collection::<Document>("elsewhere");
    for id in 1..=10 {
        insert(&things(&database), [id]).await?;
        insert(&elsewhere, [id]).await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    subscription.caught_up().await?;
    stored(&database, ID, "a quiet position is stored", |record| {
        (record.kind == Some(mongosub::Kind::Quiet)).then_some(())
    })
    .await;
    // No transaction has met a save: each was handled once.
    assert_eq!(seen.ids(), (1..=10).collect::<Vec<_>>());
    assert!(seen.all().iter().all(|delivery| delivery.attempt == 1));
    assert_eq!(counted_each(&database, 1..=10).await, [1; 10]);
    subscription.shutdown().await?;
    Ok(())
}

/// Commands of the subscription fail so often, and each event is counted once all the same, handled `calls` times.
async fn faulty(fixture: Fixture, data: Document, times: i32, calls: usize) -> anyhow::Result<()> {
    let Fixture { server, database, .. } = fixture;
    prepared(&database).await?;
    let app = format!("transactions {}", database.name());
    let own = server.client_named(&app).await.database(database.name());
    let seen = Seen::default();
    let policy = OnFailure::retry(0).then(Then::Stop);
    let subscription = counting(&own, &seen).on_failure(policy).await?;
    insert(&things(&database), [1]).await?;
    subscription.caught_up().await?;
    let point = server.fail_command(app.as_str(), FailMode::Times(times), data).await;
    insert(&things(&database), [2]).await?;
    subscription.caught_up().await?;
    point.entered(i64::from(times)).await;
    point.off().await;
    insert(&things(&database), [3]).await?;
    subscription.caught_up().await?;
    assert_eq!(counted_each(&database, 1..=3).await, [1; 3]);
    assert_eq!(counted(&database, "all").await, 3);
    let of_the_second = seen.ids().into_iter().filter(|id| *id == 2).count();
    assert_eq!(of_the_second, calls, "{seen:?}");
    let last = seen.all().into_iter().rfind(|delivery| delivery.event.document_id().ok() == Some(Some(2)));
    let last = last.expect("the second");
    assert_eq!((last.attempt, last.may_be_repeat), (u32::try_from(calls)?, calls > 1));
    assert!(seen.is_covered_by(subscription.shutdown().await?.as_ref()));
    Ok(())
}

async fn unavailable(fixture: Fixture) -> anyhow::Result<()> {
    let Fixture { server, database, .. } = fixture;
    prepared(&database).await?;
    let app = format!("transactions {}", database.name());
    let own = server.client_named(&app).await.database(database.name());
    let seen = Seen::default();
    let policy = OnFailure::retry(0).then(Then::Stop);
    let subscription = counting(&own, &seen).on_failure(policy).await?;
    let failing = doc! { "failCommands": ["find"], "errorCode": 11600 };
    let point = server.fail_command(app.as_str(), FailMode::Always, failing).await;
    insert(&things(&database), [1]).await?;
    wait_until("it shows", PATIENCE, || async {
        subscription.status().state.reason().is_some_and(|reason| reason.name() == "storage_unavailable")
    })
    .await;
    assert_eq!(seen.ids(), [0; 0]);
    point.off().await;
    subscription.caught_up().await?;
    assert_eq!((seen.ids(), counted_each(&database, 1..=1).await), (vec![1], vec![1]));
    wait_until("it runs", PATIENCE, || async { subscription.status().state.reason().is_none() }).await;
    subscription.shutdown().await?;
    Ok(())
}

async fn elsewhere(database: Database) -> anyhow::Result<()> {
    let server = Server::own(Options::default()).await;
    let other = server.fresh_database().await;
    let model = ChangeStreamModel::collection(&things(&database));
    let subscriptions = DurableSubscriptions::new(model, storage(&other));
    match counting_with(&subscriptions, &other, &Seen::default()).await {
        Err(SubscribeError::Config { field: "storage", message }) => {
            assert!(message.contains("a transaction needs both in one"), "{message}");
        }
        answer => panic!("{answer:?}"),
    }
    assert_eq!(record(&other, ID).await?, None, "nothing is claimed");
    Ok(())
}
