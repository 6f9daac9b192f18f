//! The collection, or the database, ends under a subscription that goes on: every end, while it runs and while it does
//! not, with the first insert behind the end made before the subscription is there again.

use std::{sync::Arc, time::Duration};

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, DurableSubscriptions, Epoch, Kind, Operation, Subscription,
    bson::{Document, doc},
    mongodb::{Collection, Database},
};
use tokio::sync::Semaphore;

use crate::{
    faults::held,
    seen::{PATIENCE, Seen, Subscriptions, insert, record, storage, things},
    support::{Context, test, wait_until},
};

/// What happens to the collection.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    Dropped,
    DroppedTwice,
    RenamedAway,
    RenamedOver,
    DatabaseDropped,
}

pub fn tests() -> Vec<Trial> {
    let collections = [
        (
            "a collection that is dropped while a subscription runs ends its epoch, and the next insert is delivered",
            End::Dropped,
            true,
        ),
        (
            "a collection that is dropped while nothing runs ends its epoch, and the next insert is delivered",
            End::Dropped,
            false,
        ),
        (
            "a collection that is dropped twice in a row while a subscription runs ends its epoch, and the next insert is delivered",
            End::DroppedTwice,
            true,
        ),
        (
            "a collection that is dropped twice in a row while nothing runs ends its epoch, and the next insert is delivered",
            End::DroppedTwice,
            false,
        ),
        (
            "a collection that is renamed away while a subscription runs ends its epoch, and the next insert is delivered",
            End::RenamedAway,
            true,
        ),
        (
            "a collection that is renamed away while nothing runs ends its epoch, and the next insert is delivered",
            End::RenamedAway,
            false,
        ),
        (
            "a collection that is renamed over while a subscription runs ends its epoch, and the next insert is delivered",
            End::RenamedOver,
            true,
        ),
        (
            "a collection that is renamed over while nothing runs ends its epoch, and the next insert is delivered",
            End::RenamedOver,
            false,
        ),
        (
            "a collection that is dropped with its database while a subscription runs ends its epoch, and the next insert is delivered",
            End::DatabaseDropped,
            true,
        ),
        (
            "a collection that is dropped with its database while nothing runs ends its epoch, and the next insert is delivered",
            End::DatabaseDropped,
            false,
        ),
    ];
    let databases = [
        ("a database that is dropped while a subscription runs ends its epoch, and the next insert is delivered", true),
        ("a database that is dropped while nothing runs ends its epoch, and the next insert is delivered", false),
    ];
    let of_collection = |(name, end, runs)| {
        test(name, move |ctx: Context| async move { collection(&ctx.plain().await.database, end, runs).await })
    };
    let of_database =
        |(name, runs)| test(name, move |ctx: Context| async move { database(&ctx.plain().await.database, runs).await });
    let mut tests: Vec<Trial> = collections.into_iter().map(of_collection).collect();
    tests.extend(databases.into_iter().map(of_database));
    tests.push(test(
        "the token of an invalidate is resumed at after the collection was dropped and made anew again",
        |ctx: Context| async move { invalidate_resumed(&ctx.plain().await.database).await },
    ));
    tests
}

async fn rename(from: &Collection<Document>, to: &Collection<Document>) -> anyhow::Result<()> {
    let client = from.client();
    let rename = doc! {
        "renameCollection": from.namespace().to_string(), "to": to.namespace().to_string(), "dropTarget": true
    };
    client.database("admin").run_command(rename).await?;
    Ok(())
}

/// Ends the collection, with document 2 written to what comes behind it. Answers what a subscription sees of all that.
async fn ends(
    end: End,
    written: &Collection<Document>,
    others: &Collection<Document>,
) -> anyhow::Result<(Vec<i32>, usize)> {
    insert(others, [100]).await?;
    let mut seen = vec![-1, -1];
    let mut epochs = 1;
    match end {
        End::Dropped => written.drop().await?,
        End::DroppedTwice => {
            written.drop().await?;
            insert(written, [7]).await?;
            written.drop().await?;
            seen.extend([7, -1, -1]);
            epochs = 2;
        }
        End::RenamedAway => rename(written, others).await?,
        // What comes by it is in no event.
        End::RenamedOver => rename(others, written).await?,
        End::DatabaseDropped => written.client().database(&written.namespace().db).drop().await?,
    }
    insert(written, [2]).await?;
    seen.push(2);
    Ok((seen, epochs))
}

async fn start(subscriptions: &Subscriptions, seen: &Seen, turns: &Arc<Semaphore>) -> anyhow::Result<Subscription> {
    Ok(subscriptions.subscribe("ends", held(seen, turns)).await?)
}

async fn collection(database: &Database, end: End, runs: bool) -> anyhow::Result<()> {
    let own = database.client().database(&format!("{}_own", database.name()));
    let (written, others) = (things(&own), own.collection::<Document>("others"));
    let subscriptions = DurableSubscriptions::new(ChangeStreamModel::collection(&written), storage(database));
    let (seen, turns) = (Seen::default(), Arc::new(Semaphore::new(1)));
    let mut subscription = start(&subscriptions, &seen, &turns).await?;
    insert(&written, [0]).await?;
    seen.sees(0).await;
    subscription.drained().await?;
    let before = record(database, "ends").await?.expect("a record");
    if !runs {
        subscription.shutdown().await?;
    }
    // The second is in hand, or unread, while all of it happens.
    insert(&written, [1]).await?;
    let (behind, epochs) = ends(end, &written, &others).await?;
    if !runs {
        subscription = start(&subscriptions, &seen, &turns).await?;
    }
    turns.add_permits(100);
    seen.sees(2).await;
    let expected: Vec<i32> = [0, 1].into_iter().chain(behind).collect();
    assert_eq!(seen.ids(), expected, "{:?}", seen.operations());
    assert_eq!(seen.operations().iter().filter(|operation| **operation == Operation::Invalidate).count(), epochs);
    let stored = subscription.drained().await?;
    assert!(seen.is_covered_by(stored.as_ref()), "{stored:?}");
    let after = record(database, "ends").await?.expect("a record");
    let epoch = before.epoch.map(|epoch| Epoch(epoch.0 + i64::try_from(epochs).unwrap()));
    assert_eq!(after.epoch, epoch);
    let uuid = |record: &mongosub::Record| record.source.as_ref().and_then(|source| source.collection_uuid.clone());
    assert!(uuid(&after).is_some() && uuid(&after) != uuid(&before), "{:?} {:?}", uuid(&before), uuid(&after));

    // And goes on as ever, also in the next process.
    subscription.shutdown().await?;
    let again = subscriptions.subscribe("ends", seen.handler()).await?;
    insert(&written, [3]).await?;
    seen.sees(3).await;
    assert_eq!(seen.ids(), expected.into_iter().chain([3]).collect::<Vec<_>>());
    again.shutdown().await?;
    own.drop().await?;
    Ok(())
}

async fn database(keeper: &Database, runs: bool) -> anyhow::Result<()> {
    let own = keeper.client().database(&format!("{}_own", keeper.name()));
    let subscriptions = DurableSubscriptions::new(ChangeStreamModel::database(&own), storage(keeper));
    let (seen, turns) = (Seen::default(), Arc::new(Semaphore::new(1)));
    let mut subscription = start(&subscriptions, &seen, &turns).await?;
    insert(&things(&own), [0]).await?;
    seen.sees(0).await;
    subscription.drained().await?;
    if !runs {
        subscription.shutdown().await?;
    }
    insert(&things(&own), [1]).await?;
    own.drop().await?;
    insert(&things(&own), [2]).await?;
    if !runs {
        subscription = start(&subscriptions, &seen, &turns).await?;
    }
    turns.add_permits(100);
    seen.sees(2).await;
    assert_eq!(seen.ids(), [0, 1, -1, -1, -1, 2]);
    let last = [Operation::Drop, Operation::DropDatabase, Operation::Invalidate, Operation::Insert];
    assert_eq!(seen.operations()[2..], last);
    subscription.shutdown().await?;
    own.drop().await?;
    Ok(())
}

async fn invalidate_resumed(database: &Database) -> anyhow::Result<()> {
    let own = database.client().database(&format!("{}_own", database.name()));
    let written = things(&own);
    let subscriptions = DurableSubscriptions::new(ChangeStreamModel::collection(&written), storage(database));
    let (seen, turns) = (Seen::default(), Arc::new(Semaphore::new(3)));
    // Behind the `invalidate` there may be a quiet position before the next event.
    let action = subscriptions.subscribe("ends", held(&seen, &turns)).never_save_quiet_position();
    let subscription = action.shutdown_grace(Duration::from_secs(1)).await?;
    insert(&written, [0]).await?;
    written.drop().await?;
    insert(&written, [1]).await?;
    // The next event is in hand, and given up: the `invalidate` is what is stored.
    seen.counts(3).await;
    wait_until("the next is in hand", PATIENCE, || async { subscription.status().in_hand_since.is_some() }).await;
    subscription.shutdown().await?;
    let stored = record(database, "ends").await?.expect("a record");
    assert_eq!(
        (stored.kind, stored.position.as_ref().map(mongosub::Checkpoint::is_invalidate)),
        (Some(Kind::Invalidate), Some(true))
    );
    written.drop().await?;
    insert(&written, [2]).await?;
    turns.add_permits(100);
    let seen = Seen::default();
    let again = start(&subscriptions, &seen, &turns).await?;
    seen.sees(2).await;
    assert_eq!(seen.ids(), [1, -1, -1, 2]);
    again.shutdown().await?;
    own.drop().await?;
    Ok(())
}
