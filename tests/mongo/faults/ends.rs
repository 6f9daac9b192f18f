//! The end of a feed, for a subscription that is to stop there: an `invalidate` is delivered, stored and named, and the
//! next start goes on behind it.

use std::sync::Arc;

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Checkpoint, DurableSubscriptions, Filter, Kind, OnInvalidate, Operation, Reason, State,
    Subscription,
    bson::{Document, doc},
    mongodb::{Collection, Database},
};
use tokio::sync::Semaphore;

use super::held;
use crate::{
    seen::{Seen, Subscriptions, insert, record, storage, subscriptions, things},
    support::{Context, Fixture, test},
};

pub fn tests() -> Vec<Trial> {
    vec![
        plain(
            "a dropped collection ends the feed behind everything written, and the next start begins with the first \
             insert of the new one",
            dropped,
        ),
        plain("a collection renamed away, or over, ends the feed behind everything written", renamed),
        plain("a dropped database ends the feed of the database", database_dropped),
        plain("the end of a feed gets through every filter that does not mention it", unmentioned),
    ]
}

/// A test on the shared server, in a database of its own.
fn plain<Fut>(name: &str, body: fn(Fixture) -> Fut) -> Trial
where
    Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    test(name, move |ctx: Context| async move { body(ctx.plain().await).await })
}

/// With `OnInvalidate::Stop`. (What goes on by itself is in `changes/ends.rs`.)
fn stopping(subscriptions: Subscriptions) -> Subscriptions {
    subscriptions.on_invalidate(OnInvalidate::Stop)
}

/// It has stopped at the last event it delivered, says so, and that is stored.
async fn ended(subscription: &Subscription, seen: &Seen, database: &Database) -> anyhow::Result<Checkpoint> {
    let reason = subscription.stopped().await;
    let position = seen.positions().pop().expect("the end is delivered");
    assert_eq!(seen.operations().pop(), Some(Operation::Invalidate));
    assert_eq!(reason, Reason::Invalidated { position: position.clone() });
    let said = reason.to_string();
    assert!(said.contains(&position.to_string()) && said.contains("dropped or renamed"), "{said}");
    assert_eq!(subscription.status().state, State::Stopped(reason));
    let stored = record(database, subscription.id().as_str()).await?.expect("a record");
    assert_eq!((stored.position.as_ref(), stored.kind, stored.clean), (Some(&position), Some(Kind::Invalidate), true));
    Ok(position)
}

const EACH: i32 = 50;

async fn dropped(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    let written = things(&database);
    let (subscriptions, seen, turns) =
        (stopping(subscriptions(&database)), Seen::default(), Arc::new(Semaphore::new(0)));
    let mut ids = Vec::new();
    for round in 0..3 {
        let subscription = subscriptions.subscribe("dropped", held(&seen, &turns)).await?;
        let from = EACH * round;
        insert(&written, from + i32::from(round > 0)..from + EACH).await?;
        written.drop().await?;
        // However early: before the end is read, and before the next start.
        insert(&written, [from + EACH]).await?;
        ids.extend((from..from + EACH).chain([-1, -1]));
        turns.add_permits(usize::try_from(EACH)? + 2);
        ended(&subscription, &seen, &database).await?;
        assert_eq!(seen.ids(), ids);
        assert_eq!(seen.operations()[ids.len() - 2..], [Operation::Drop, Operation::Invalidate]);
        assert!(subscriptions.get("dropped").is_none());
    }
    let subscription = subscriptions.subscribe("dropped", seen.handler()).await?;
    insert(&written, [EACH * 3 + 1]).await?;
    seen.sees(EACH * 3 + 1).await;
    ids.extend([EACH * 3, EACH * 3 + 1]);
    assert_eq!(seen.ids(), ids);
    // Behind an invalidate a new position counts, however it compares.
    let stored = subscription.shutdown().await?;
    assert!(seen.is_covered_by(stored.as_ref()), "{stored:?}");
    assert_eq!(record(&database, "dropped").await?.and_then(|record| record.position), stored);
    println!("faults: a collection dropped and made again 3 times: {} events, none lost, none twice", ids.len());
    Ok(())
}

async fn rename(from: &Collection<Document>, to: &Collection<Document>, over: bool) -> anyhow::Result<()> {
    let client = from.client();
    let (from, to) = (from.namespace().to_string(), to.namespace().to_string());
    let rename = doc! { "renameCollection": from, "to": to, "dropTarget": over };
    client.database("admin").run_command(rename).await?;
    Ok(())
}

async fn database_dropped(Fixture { database, client, .. }: Fixture) -> anyhow::Result<()> {
    let gone = client.database(&format!("{}_gone", database.name()));
    let subscriptions = stopping(DurableSubscriptions::new(ChangeStreamModel::database(&gone), storage(&database)));
    let seen = Seen::default();
    let subscription = subscriptions.subscribe("gone", seen.handler()).await?;
    insert(&things(&gone), [1]).await?;
    seen.sees(1).await;
    gone.drop().await?;
    ended(&subscription, &seen, &database).await?;
    let last = [Operation::Insert, Operation::Drop, Operation::DropDatabase, Operation::Invalidate];
    assert_eq!(seen.operations(), last);
    insert(&gone.collection::<Document>("others"), [2]).await?;
    subscriptions.subscribe("gone", seen.handler()).await?;
    seen.sees(2).await;
    gone.drop().await?;
    Ok(())
}

async fn renamed(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    let (written, others) = (things(&database), database.collection::<Document>("others"));
    let (subscriptions, seen, turns) =
        (stopping(subscriptions(&database)), Seen::default(), Arc::new(Semaphore::new(0)));
    let mut ids = Vec::new();
    for (round, over) in (0..).zip([false, true, false]) {
        let subscription = subscriptions.subscribe("renamed", held(&seen, &turns)).await?;
        let from = EACH * round;
        insert(&written, from..from + EACH - 1).await?;
        if over {
            rename(&others, &written, true).await?;
        } else {
            others.drop().await?;
            rename(&written, &others, false).await?;
        }
        insert(&written, [from + EACH - 1]).await?;
        // What has come by the rename is in no event.
        ids.extend((from..from + EACH - 1).chain([-1, -1]));
        turns.add_permits(usize::try_from(EACH)? + 1);
        ended(&subscription, &seen, &database).await?;
        let last = seen.operations()[ids.len() - 2..].to_vec();
        assert_eq!((seen.ids(), last), (ids.clone(), vec![Operation::Rename, Operation::Invalidate]));
        // The first behind the end.
        turns.add_permits(1);
        let subscription = subscriptions.subscribe("renamed", held(&seen, &turns)).await?;
        seen.sees(from + EACH - 1).await;
        ids.push(from + EACH - 1);
        assert_eq!(seen.ids(), ids);
        subscription.shutdown().await?;
    }
    println!("faults: a collection renamed away, over and away: {} events, none lost, none twice", ids.len());
    Ok(())
}

async fn unmentioned(Fixture { database, server, .. }: Fixture) -> anyhow::Result<()> {
    let inserts = || doc! { "$match": { "operationType": "insert" } };
    let filters = [
        ("operations", Filter::operations([Operation::Insert])),
        ("field", Filter::operations([Operation::Insert]).and(Filter::field("_id").gte(0))),
        ("pipeline", Filter::pipeline([inserts()])),
        ("pipelines", Filter::pipeline([inserts(), doc! { "$match": { "documentKey._id": { "$gte": 0 } } }])),
        ("changed", Filter::pipeline([doc! { "$set": { "seen": true } }, inserts()])),
        // Nothing but its token tells the end.
        (
            "bare",
            Filter::pipeline([
                doc! { "$unset": "operationType" },
                doc! { "$match": { "documentKey._id": { "$gte": 0 } } },
            ]),
        ),
        ("nothing", Filter::pipeline([doc! { "$match": { "operationType": "nothing" } }])),
    ];
    let count = filters.len();
    for (name, filter) in filters {
        let written = database.collection::<Document>(name);
        let subscriptions =
            stopping(DurableSubscriptions::new(ChangeStreamModel::collection(&written), storage(&database)));
        let seen = Seen::default();
        let subscribe = || subscriptions.subscribe(name, seen.handler()).filter(filter.clone());
        let subscription = subscribe().await?;
        insert(&written, [0, 1]).await?;
        written.drop().await?;
        insert(&written, [2]).await?;
        let reason = subscription.stopped().await;
        let position = seen.positions().pop().expect("the end is delivered");
        assert_eq!(reason, Reason::Invalidated { position: position.clone() }, "{name}");
        assert!(position.is_invalidate(), "{name}: {position}");
        assert_eq!(record(&database, name).await?.and_then(|record| record.position), Some(position), "{name}");
        let again = subscribe().await?;
        insert(&written, [3]).await?;
        again.caught_up().await?;
        let expected: &[i32] = if name == "nothing" { &[-1] } else { &[0, 1, -1, 2, 3] };
        assert_eq!(seen.ids(), expected, "{name}");
    }
    let version = server.admin_command(doc! { "buildInfo": 1 }).await?;
    println!("faults: {count} filters that do not mention the end let it through, on {}", version.get_str("version")?);
    Ok(())
}
