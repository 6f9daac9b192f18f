//! Streams that are opened far behind, or on another server than before: nothing is lost or comes twice. What else breaks
//! them is in `faults`.

use libtest_mimic::Trial;
use mongosub::{bson::doc, mongodb::Database};

use crate::{
    seen::{Seen, insert, subscriptions, things},
    support::{FailMode, Fixture, Kind, Options, Server, test},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test(
            "a start that is far behind is opened once more without a limit, and loses and repeats nothing",
            |ctx| async move { far_behind(ctx.shared(Kind::Faulty).await).await },
        ),
        test("a new primary takes over, and nothing is lost or repeated", |_| async { primary_killed().await }),
    ]
}

/// Its stream and its checkpoints belong to a client that fail points can hit, and what is written comes by another one.
async fn named(fixture: &Fixture, name: &str) -> Database {
    fixture.server.client_named(name).await.database(fixture.database.name())
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
