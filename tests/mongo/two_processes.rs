//! Two processes with one id: the second takes over, the first stops and names it.

use std::time::Duration;

use libtest_mimic::Trial;
use mongosub::{
    Delivery,
    mongodb::{Client, Database},
};
use serde::{Deserialize, Serialize};

use crate::{
    seen::{id_of, insert, record, subscriptions, things},
    support::{Child, Fixture, child, test},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test(
            "of two processes with one id the second takes over, and the first stops and names it",
            |ctx| async move { taken_over(ctx.plain().await).await },
        ),
        test("a process that has nothing to save finds out within seconds that it was taken over", |ctx| async move {
            taken_over_in_silence(ctx.plain().await).await
        }),
    ]
}

const ID: &str = "two_processes_v1";

#[derive(Serialize, Deserialize)]
struct Task {
    uri: String,
    database: String,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Word {
    Started { fence: i64 },
    Handled { id: i32, fence: i64 },
    Stopped(serde_json::Value),
}

/// The role of either: says what it handles, and why it stops.
pub fn play(input: serde_json::Value) -> anyhow::Result<()> {
    let task: Task = serde_json::from_value(input)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let database = Client::with_uri_str(&task.uri).await?.database(&task.database);
        let subscriptions = subscriptions(&database);
        let handler = |delivery: Delivery| async move {
            child::say(&Word::Handled { id: id_of(&delivery), fence: delivery.fence().0 })?;
            Ok(())
        };
        let subscription = subscriptions.subscribe(ID, handler).await?;
        child::say(&Word::Started { fence: subscription.status().fence.0 })?;
        let reason = subscription.stopped().await;
        child::say(&Word::Stopped(serde_json::to_value(reason)?))
    })?;
    // Past the runtime's own end, at which tasks of the driver can panic.
    std::process::exit(0)
}

/// Starts one, and gives its fence.
async fn start(fixture: &Fixture) -> (Child, i64) {
    let task = Task { uri: fixture.server.uri(), database: fixture.database.name().into() };
    let mut child = Child::start("one-of-two", &task);
    let Word::Started { fence } = child.json().await else { panic!("it has not started") };
    (child, fence)
}

/// What it says until it stops, and why it stops.
async fn stops(child: &mut Child, within: Duration) -> (Vec<i32>, serde_json::Value) {
    let mut handled = Vec::new();
    let stops = async {
        loop {
            match child.json().await {
                Word::Handled { id, .. } => handled.push(id),
                Word::Stopped(reason) => break reason,
                Word::Started { .. } => panic!("it starts again"),
            }
        }
    };
    let reason = tokio::time::timeout(within, stops).await;
    (handled, reason.unwrap_or_else(|_| panic!("it has not stopped within {within:?}")))
}

/// The reason names the second's owner, and since when.
async fn assert_superseded(reason: &serde_json::Value, database: &Database) -> anyhow::Result<()> {
    let record = record(database, ID).await?.expect("a record");
    let owner = record.ownership.expect("an owner").owner;
    assert_eq!(reason["reason"], "superseded", "{reason}");
    assert_eq!(reason["owner"], owner.as_str());
    assert_eq!(reason["since"], record.claimed_at.expect("a time").to_string());
    Ok(())
}

async fn taken_over(fixture: Fixture) -> anyhow::Result<()> {
    let written = things(&fixture.database);
    let (mut first, fence) = start(&fixture).await;
    insert(&written, 0..5).await?;
    for id in 0..5 {
        assert_eq!(first.json::<Word>().await, Word::Handled { id, fence });
    }
    let (mut second, later) = start(&fixture).await;
    assert!(later > fence, "{later} after {fence}");
    insert(&written, 5..10).await?;
    let mut next = None;
    while next != Some(10) {
        let Word::Handled { id, fence } = second.json().await else { panic!("the second does not go on") };
        assert_eq!(fence, later);
        // What the first had not stored may come again.
        assert!(next.map_or(id <= 5, |next| next == id), "{id} after {next:?}");
        next = Some(id + 1);
    }
    let (handled, reason) = stops(&mut first, Duration::from_secs(15)).await;
    assert_superseded(&reason, &fixture.database).await?;
    // Side by side it has handled in order, and no more than there was.
    assert!(handled.len() <= 5 && (5..).zip(&handled).all(|(id, handled)| id == *handled), "{handled:?}");
    assert!(first.wait().await.success());
    insert(&written, 10..12).await?;
    for id in 10..12 {
        assert_eq!(second.json::<Word>().await, Word::Handled { id, fence: later });
    }
    Ok(())
}

async fn taken_over_in_silence(fixture: Fixture) -> anyhow::Result<()> {
    let (mut first, _) = start(&fixture).await;
    let (mut second, fence) = start(&fixture).await;
    let (handled, reason) = stops(&mut first, Duration::from_secs(15)).await;
    assert_eq!(handled, [0; 0]);
    assert_superseded(&reason, &fixture.database).await?;
    insert(&things(&fixture.database), [1]).await?;
    assert_eq!(second.json::<Word>().await, Word::Handled { id: 1, fence });
    Ok(())
}
