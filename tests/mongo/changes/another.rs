//! Another source under the same name: refused, and nothing of it delivered.

use std::time::Duration;

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, DurableSubscriptions, Kind, Reason, SubscribeError,
    bson::{Document, Timestamp, doc},
    mongodb::Database,
};

use crate::{
    seen::{Seen, insert, record, storage, things},
    support::{Context, Fixture, Options, Server, test},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("a collection of the same name in a second replica set is another source", |ctx: Context| async move {
            second_set(&ctx.plain().await).await
        }),
        test(
            "an older copy of the data restored is another source, also at a quiet position",
            |ctx: Context| async move { older_copy(&ctx.plain().await.database).await },
        ),
        test("a position ahead of the deployment's present is of another source", |ctx: Context| async move {
            ahead(&ctx.plain().await.database).await
        }),
        test("a quiet position of another deployment is not resumed at", |ctx: Context| async move {
            quiet_position(&ctx.plain().await).await
        }),
    ]
}

fn changed(reason: Option<&Reason>) -> (String, String) {
    match reason {
        Some(Reason::SourceChanged { was, is }) => (was.clone(), is.clone()),
        other => panic!("{other:?}"),
    }
}

fn refused(error: Option<&SubscribeError>) -> Reason {
    error.and_then(SubscribeError::reason).cloned().expect("a reason")
}

/// The same database in another set, with its checkpoints where they were.
async fn second_set(Fixture { database, .. }: &Fixture) -> anyhow::Result<()> {
    let second = Server::own(Options::default()).await;
    let there = second.client().await.database(database.name());
    let here = DurableSubscriptions::new(ChangeStreamModel::collection(&things(database)), storage(database));
    let seen = Seen::default();
    let subscription = here.subscribe("moved", seen.handler()).await?;
    insert(&things(database), [0]).await?;
    seen.sees(0).await;
    subscription.shutdown().await?;
    let hello = second.admin_command(doc! { "hello": 1 }).await?;
    let records = database.collection::<Document>("checkpoints");
    let moved = DurableSubscriptions::new(ChangeStreamModel::collection(&things(&there)), storage(database));
    // Another name of the set tells; where that is the same, the collection does, whether it exists there or not.
    for (same_name, exists) in [(false, false), (true, false), (true, true)] {
        if same_name {
            let named = doc! { "$set": { "mongosub.source.setName": hello.get_str("setName")? } };
            records.update_one(doc! { "_id": "moved" }, named).await?;
        }
        if exists {
            insert(&things(&there), [1]).await?;
        }
        let before = record(database, "moved").await?;
        let reason = refused(moved.subscribe("moved", seen.handler()).await.err().as_ref());
        let (was, is) = changed(Some(&reason));
        println!("changes: a second replica set: it was {was}, it is {is}");
        assert_eq!((was.contains("UUID"), is.contains("no collection")), (same_name, same_name && !exists));
        assert_eq!(record(database, "moved").await?, before);
    }
    assert_eq!(seen.ids(), [0]);
    Ok(())
}

/// The files of a server as they were, put back behind its changes, with the checkpoints elsewhere. By the time it takes
/// writes again its present lies behind the position: only its history tells.
async fn older_copy(database: &Database) -> anyhow::Result<()> {
    let server = Server::own(Options::default()).await;
    let there = server.client().await.database("shop");
    let to = |there: &Database, kind: Kind| {
        let model = ChangeStreamModel::collection(&things(there));
        let subscriptions = DurableSubscriptions::new(model, storage(database));
        match kind {
            Kind::Quiet => subscriptions.save_quiet_position_every(Duration::from_secs(1)),
            _ => subscriptions.never_save_quiet_position(),
        }
    };
    let kinds = [Kind::Event, Kind::Quiet];
    let seen = kinds.map(|_| Seen::default());
    insert(&things(&there), [0]).await?;
    let older = server.copy_files().await;
    let mut running = Vec::new();
    for (kind, seen) in kinds.into_iter().zip(&seen) {
        running.push(to(&there, kind).subscribe(kind.as_str(), seen.handler()).await?);
    }
    insert(&things(&there), [1, 2]).await?;
    for ((kind, seen), subscription) in kinds.into_iter().zip(&seen).zip(running) {
        seen.sees(2).await;
        while record(database, kind.as_str()).await?.and_then(|record| record.kind) != Some(kind) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        subscription.shutdown().await?;
    }
    // The same server, stopped and started: nothing has changed.
    server.restart().await;
    let there = server.client().await.database("shop");
    for (kind, seen) in kinds.into_iter().zip(&seen) {
        to(&there, kind).subscribe(kind.as_str(), seen.handler()).await?.shutdown().await?;
        assert_eq!(record(database, kind.as_str()).await?.and_then(|record| record.kind), Some(kind));
    }

    // A run that goes on meanwhile meets it when it reconnects.
    let goes_on = Seen::default();
    let running = to(&there, Kind::Event).subscribe("goes_on", goes_on.handler()).await?;
    insert(&things(&there), [3]).await?;
    goes_on.sees(3).await;
    let server = server.put_back(older).await;
    // By then it has been elected more often than what it takes the place of, or the driver would have nothing of it.
    server.restart().await;
    server.restart().await;
    let there = server.client().await.database("shop");
    let ids: Vec<_> = things(&there).distinct("_id", doc! {}).await?;
    assert_eq!(ids, [0.into()], "it is as it was");
    insert(&things(&there), [4]).await?;
    let status = running.watch().wait_for(|status| status.state.name() == "stalled").await?.clone();
    println!("changes: an older copy, in a run that goes on: {:?}", changed(status.state.reason()));
    assert_eq!(goes_on.ids(), [3]);
    running.shutdown().await?;
    for (kind, seen) in kinds.into_iter().zip(&seen) {
        let before = record(database, kind.as_str()).await?.expect("a record");
        let event = match kind {
            Kind::Quiet => before.source.clone().and_then(|source| source.last_event),
            _ => before.position.clone(),
        };
        let reason = refused(to(&there, kind).subscribe(kind.as_str(), seen.handler()).await.err().as_ref());
        let (was, is) = changed(Some(&reason));
        println!("changes: an older copy, at {}: it was {was}, it is {is}", kind.as_str());
        assert!(was.contains(&event.expect("an event").to_string()) && is.contains("older state"), "{was}; {is}");
        assert_eq!(record(database, kind.as_str()).await?, Some(before));
        assert_eq!(seen.ids(), [1, 2], "nothing of it is delivered");
    }
    Ok(())
}

/// As a start finds it: the same set and the same collection, whose present lies before the stored position.
async fn ahead(database: &Database) -> anyhow::Result<()> {
    let subscriptions = DurableSubscriptions::new(ChangeStreamModel::collection(&things(database)), storage(database));
    let seen = Seen::default();
    let subscription = subscriptions.subscribe("older", seen.handler()).await?;
    insert(&things(database), [0]).await?;
    seen.sees(0).await;
    let stored = subscription.shutdown().await?.and_then(|stored| stored.cluster_time()).expect("a time");
    let ahead = Timestamp { time: stored.time + 3600, increment: 1 };
    let records = database.collection::<Document>("checkpoints");
    let change = doc! { "$set": { "operationTime": ahead }, "$unset": { "resumeToken": 1 } };
    records.update_one(doc! { "_id": "older" }, change).await?;
    let began = std::time::Instant::now();
    let reason = refused(subscriptions.subscribe("older", seen.handler()).await.err().as_ref());
    let (was, is) = changed(Some(&reason));
    assert!(was.contains(&format!("{}.1", ahead.time)) && is.contains("present"), "{was}; {is}");
    assert!(began.elapsed().as_secs() >= 29, "a member may lag: it is asked for 30 s");
    assert_eq!(seen.ids(), [0]);
    Ok(())
}

/// Of a scope without a UUID: the name of the set tells, and where that is the same, the time.
async fn quiet_position(Fixture { database, .. }: &Fixture) -> anyhow::Result<()> {
    let second = Server::own(Options::default().parameter("writePeriodicNoops", "false")).await;
    let there = second.client().await.database("elsewhere");
    let here = DurableSubscriptions::new(ChangeStreamModel::database(database), storage(database));
    let seen = Seen::default();
    let subscription = here.subscribe("quiet", seen.handler()).await?;
    insert(&things(database), [0]).await?;
    seen.sees(0).await;
    subscription.pause().await?;
    subscription.shutdown().await?;
    let moved = DurableSubscriptions::new(ChangeStreamModel::database(&there), storage(database));
    let reason = refused(moved.subscribe("quiet", seen.handler()).await.err().as_ref());
    changed(Some(&reason));
    // By hand nothing is skipped there either.
    let stored = record(database, "quiet").await?.and_then(|record| record.position).expect("a position");
    let next = Timestamp { time: stored.cluster_time().expect("a time").time + 1, increment: 1 };
    let skipped = moved.skip("quiet", next.into(), "a test").await;
    assert!(matches!(skipped, Err(SubscribeError::Config { .. } | SubscribeError::Refused { .. })), "{skipped:?}");
    assert_eq!(seen.ids(), [0]);
    Ok(())
}
