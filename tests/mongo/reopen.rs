//! Streams that break: the cursor is opened again from the last position read, and nothing is lost or comes twice.

use libtest_mimic::Trial;
use mongosub::{
    Subscription,
    bson::{Bson, Document, doc},
    mongodb::Database,
};

use crate::{
    seen::{PATIENCE, Seen, insert, subscriptions, things},
    support::{FailMode, Fixture, Kind, Options, Server, test, wait_for, wait_until},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test(
            "a connection closed at a reply and again at each of two openings loses and repeats nothing",
            |ctx| async move { connection_closed(ctx.shared(Kind::Faulty).await).await },
        ),
        test("every code that heals by itself is read across", |ctx| async move {
            codes_that_heal(ctx.shared(Kind::Faulty).await).await
        }),
        test("a killed cursor is opened again, loses nothing and repeats nothing", |ctx| async move {
            cursor_killed(ctx.plain().await).await
        }),
        test(
            "a start that is far behind is opened once more without a limit, and loses and repeats nothing",
            |ctx| async move { far_behind(ctx.shared(Kind::Faulty).await).await },
        ),
        test("a killed server comes back, and nothing is lost or repeated", |_| async { server_killed().await }),
        test("a new primary takes over, and nothing is lost or repeated", |_| async { primary_killed().await }),
    ]
}

/// Its stream and its checkpoints belong to a client that fail points can hit, and what is written comes by another one.
async fn named(fixture: &Fixture, name: &str) -> Database {
    fixture.server.client_named(name).await.database(fixture.database.name())
}

async fn reconnected(subscription: &Subscription, times: u64) {
    wait_until("the stream is open again", PATIENCE, || async { subscription.status().reconnects >= times }).await;
}

async fn connection_closed(fixture: Fixture) -> anyhow::Result<()> {
    let written = things(&fixture.database);
    let seen = Seen::default();
    let subscriptions = subscriptions(&named(&fixture, "closed").await);
    let subscription = subscriptions.subscribe("closed", seen.handler()).await?;
    insert(&written, 0..5).await?;
    seen.sees(4).await;
    let close = doc! { "failCommands": ["getMore", "aggregate"], "closeConnection": true };
    let point = fixture.server.fail_command("closed", FailMode::Times(3), close).await;
    // While there is no cursor, and after it.
    insert(&written, 5..10).await?;
    point.entered(3).await;
    insert(&written, 10..15).await?;
    seen.sees(14).await;
    assert_eq!(seen.ids(), (0..15).collect::<Vec<_>>());
    reconnected(&subscription, 1).await;
    Ok(())
}

async fn codes_that_heal(fixture: Fixture) -> anyhow::Result<()> {
    let written = things(&fixture.database);
    let seen = Seen::default();
    let subscriptions = subscriptions(&named(&fixture, "healing").await);
    let subscription = subscriptions.subscribe("healing", seen.handler()).await?;
    let fail = |code: i32| doc! { "failCommands": ["getMore"], "errorCode": code };
    let codes = [43, 237, 91, 189, 10107, 11600, 11602, 13435, 13436, 6, 7, 89, 9001, 63, 133, 150, 234, 262, 136];
    let mut point = None;
    for (round, code) in (0..).zip(codes) {
        match &mut point {
            None => point = Some(fixture.server.fail_command("healing", FailMode::Times(1), fail(code)).await),
            Some(point) => {
                let mut data = fail(code);
                data.insert("appName", "healing");
                point.again(FailMode::Times(1), data).await;
            }
        }
        insert(&written, [2 * round]).await?;
        if let Some(point) = &point {
            point.entered(1).await;
        }
        insert(&written, [2 * round + 1]).await?;
        seen.sees(2 * round + 1).await;
        reconnected(&subscription, u64::try_from(round)? + 1).await;
    }
    let all = i32::try_from(codes.len())? * 2;
    assert_eq!(seen.ids(), (0..all).collect::<Vec<_>>());
    Ok(())
}

async fn cursor_killed(fixture: Fixture) -> anyhow::Result<()> {
    let written = things(&fixture.database);
    let seen = Seen::default();
    let subscription = subscriptions(&fixture.database).subscribe("cursor", seen.handler()).await?;
    for round in 0..3 {
        insert(&written, 10 * round..10 * round + 5).await?;
        let killed = wait_for("the stream's cursor is found", PATIENCE, || cursors(&fixture)).await;
        fixture.database.run_command(doc! { "killCursors": "things", "cursors": killed }).await?;
        insert(&written, 10 * round + 5..10 * round + 10).await?;
        seen.sees(10 * round + 9).await;
        reconnected(&subscription, u64::try_from(round)? + 1).await;
    }
    assert_eq!(seen.ids(), (0..30).collect::<Vec<_>>());
    Ok(())
}

/// The cursors of streams on the test's collection; none is `None`.
async fn cursors(fixture: &Fixture) -> Option<Vec<i64>> {
    let namespace = format!("{}.things", fixture.database.name());
    let pipeline = [
        doc! { "$currentOp": { "idleCursors": true, "localOps": true } },
        doc! { "$match": { "ns": namespace, "cursor.cursorId": { "$exists": true } } },
    ];
    let command = doc! { "aggregate": 1, "pipeline": pipeline.to_vec(), "cursor": {} };
    let reply = fixture.server.admin_command(command).await.expect("what the server does");
    let found = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch")).expect("a batch");
    let id = |operation: &Document| operation.get_document("cursor").and_then(|cursor| cursor.get_i64("cursorId"));
    let ids: Vec<i64> = found.iter().filter_map(Bson::as_document).filter_map(|operation| id(operation).ok()).collect();
    (!ids.is_empty()).then_some(ids)
}

async fn server_killed() -> anyhow::Result<()> {
    let server = Server::own(Options::default()).await;
    let database = server.fresh_database().await;
    let written = things(&database);
    let seen = Seen::default();
    let subscription = subscriptions(&database).subscribe("server", seen.handler()).await?;
    insert(&written, 0..5).await?;
    seen.sees(4).await;
    server.kill().await;
    server.start().await;
    insert(&written, 5..10).await?;
    seen.sees(9).await;
    assert_eq!(seen.ids(), (0..10).collect::<Vec<_>>());
    let stored = subscription.drained().await?;
    assert!(seen.is_covered_by(stored.as_ref()), "{stored:?}");
    Ok(())
}

async fn primary_killed() -> anyhow::Result<()> {
    let server = Server::own(Options::default().nodes(3)).await;
    let database = server.fresh_database().await;
    let written = things(&database);
    let seen = Seen::default();
    let subscription = subscriptions(&database).subscribe("primary", seen.handler()).await?;
    let first = server.primary().await;
    let mut acknowledged = Vec::new();
    for id in 0..200 {
        if id == 100 {
            server.kill_node(first).await;
        }
        // What is not acknowledged may have been written.
        if written.insert_one(doc! { "_id": id }).await.is_ok() {
            acknowledged.push(id);
        }
    }
    let last = *acknowledged.last().expect("an acknowledged write");
    assert!(last > 100, "there is a new primary");
    seen.sees(last).await;
    subscription.drained().await?;
    let ids = seen.ids();
    assert!(ids.is_sorted_by(|one, next| one < next), "out of order, or twice: {ids:?}");
    let missing: Vec<_> = acknowledged.iter().filter(|id| !ids.contains(id)).collect();
    assert!(missing.is_empty(), "lost: {missing:?}");
    Ok(())
}

async fn far_behind(fixture: Fixture) -> anyhow::Result<()> {
    let written = things(&fixture.database);
    let subscriptions = subscriptions(&named(&fixture, "behind").await);
    let seen = Seen::default();
    let subscription = subscriptions.subscribe("behind", seen.handler()).await?;
    insert(&written, 0..3).await?;
    seen.sees(2).await;
    subscription.shutdown().await?;
    insert(&written, 3..6).await?;
    // What a server says that does not get to the head within the limit of the opening.
    let limit = doc! { "failCommands": ["aggregate"], "errorCode": 50 };
    let point = fixture.server.fail_command("behind", FailMode::Times(1), limit).await;
    let subscription = subscriptions.subscribe("behind", seen.handler()).await?;
    point.entered(1).await;
    subscription.caught_up().await?;
    assert_eq!(seen.ids(), (0..6).collect::<Vec<_>>(), "what was there when it was asked is caught up with");
    insert(&written, [6]).await?;
    seen.sees(6).await;
    assert_eq!(seen.ids(), (0..7).collect::<Vec<_>>());
    assert_eq!(subscription.status().reconnects, 0);
    Ok(())
}
