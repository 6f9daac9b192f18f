//! What a subscription may not do: what it does without, and what it names.

use std::time::Duration;

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, DurableSubscriptions, GlobalCheckpointSource, Kind as Stored, Reason, State, SubscribeError,
    Subscription,
    bson::{Document, doc},
    mongodb::{Client, Database},
};
use serde::{Deserialize, Serialize};

use crate::{
    seen::{PATIENCE, Seen, Subscriptions, insert, record, storage, stored, subscriptions, things},
    support::{Child, Fixture, Kind, User, WRITER, child, test, wait_until},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("where hostInfo is refused hello serves", |ctx| async move {
            hello_serves(ctx.shared(Kind::Auth).await).await
        }),
        test(
            "where only hostInfo may tell and is refused the subscription is refused, and nothing is left of it",
            |ctx| async move { only_host_info(ctx.shared(Kind::Auth).await).await },
        ),
        test(
            "a subscription that starts unrecorded all the same has its start stored before anything is delivered",
            |ctx| async move { unrecorded(ctx.shared(Kind::Auth).await).await },
        ),
        test("a missing right to read the stream is named", |ctx| async move {
            source_named(ctx.shared(Kind::Auth).await).await
        }),
        test("a missing right to write checkpoints is named", |ctx| async move {
            storage_named(ctx.shared(Kind::Auth).await).await
        }),
        test(
            "the right to read the stream, taken away and given back, is waited for, and nothing is lost",
            |ctx| async move { source_revoked(ctx.shared(Kind::Auth).await).await },
        ),
        test("the right to store, taken away and given back, is waited for, and nothing is lost", |ctx| async move {
            storage_revoked(ctx.shared(Kind::Auth).await).await
        }),
        test("a password is in no error, no status and no line of the log", |ctx| async move {
            no_password(ctx.shared(Kind::Auth).await).await
        }),
    ]
}

/// The fixture's database, as somebody sees it.
async fn as_user(fixture: &Fixture, user: User) -> Database {
    fixture.server.client_as(user).await.database(fixture.database.name())
}

async fn hello_serves(fixture: Fixture) -> anyhow::Result<()> {
    let database = as_user(&fixture, WRITER).await;
    let seen = Seen::default();
    insert(&things(&database), [0]).await?;
    let _running = subscriptions(&database).subscribe("hello", seen.handler()).await?;
    let start = record(&database, "hello").await?.expect("a record");
    assert_eq!(start.kind, Some(Stored::Start));
    insert(&things(&database), [1]).await?;
    seen.sees(1).await;
    assert_eq!(seen.ids(), [1]);
    Ok(())
}

/// The present is asked of `hostInfo` alone, by a user to whom it is refused.
fn told_by_host_info(database: &Database) -> Subscriptions {
    let model = ChangeStreamModel::collection(&things(database));
    let model = model.global_checkpoint_source(GlobalCheckpointSource::HostInfoOnly);
    DurableSubscriptions::new(model, storage(database))
}

async fn only_host_info(fixture: Fixture) -> anyhow::Result<()> {
    let database = as_user(&fixture, WRITER).await;
    let subscriptions = told_by_host_info(&database);
    let seen = Seen::default();
    let refused = subscriptions.subscribe("told", seen.handler()).await.err();
    let expected = matches!(&refused, Some(SubscribeError::Refused { reason: Reason::NoStartPosition, .. }));
    assert!(expected, "{refused:?}");
    assert!(subscriptions.get("told").is_none());
    assert_eq!(record(&database, "told").await?, None);
    // The id is free.
    subscriptions.subscribe("told", seen.handler()).start_when_no_start_position_can_be_recorded(true).await?;
    insert(&things(&database), [1]).await?;
    seen.sees(1).await;
    Ok(())
}

async fn unrecorded(fixture: Fixture) -> anyhow::Result<()> {
    let database = as_user(&fixture, WRITER).await;
    insert(&things(&database), [0]).await?;
    let seen = Seen::default();
    let first = told_by_host_info(&database).start_when_no_start_position_can_be_recorded(true);
    first.subscribe("unrecorded", seen.handler()).await?;
    let start = record(&database, "unrecorded").await?.expect("a record");
    assert_eq!((start.kind, start.position.is_some()), (Some(Stored::Start), true));
    // It ends before it has seen anything, and what was written meanwhile is not lost.
    drop(first);
    insert(&things(&database), [1, 2]).await?;
    let again = Seen::default();
    let _running = told_by_host_info(&database).subscribe("unrecorded", again.handler()).await?;
    again.sees(2).await;
    assert_eq!(again.ids(), [1, 2]);
    Ok(())
}

/// Makes a user with these privileges, on collections of the fixture's database.
async fn user(fixture: &Fixture, user: User, privileges: &[(&str, &[&str])]) {
    let privilege = |(collection, actions): &(&str, &[&str])| {
        doc! {
            "resource": { "db": fixture.database.name(), "collection": *collection },
            "actions": actions.to_vec(),
        }
    };
    let privileges: Vec<Document> = privileges.iter().map(privilege).collect();
    let role = doc! { "createRole": user.name, "privileges": privileges, "roles": [] };
    fixture.server.admin_command(role).await.expect("a new role");
    fixture.server.add_user(user, vec![doc! { "role": user.name, "db": "admin" }]).await;
}

const CHECKPOINTS: (&str, &[&str]) = ("checkpoints", &["find", "insert", "update", "remove"]);
const STREAM: (&str, &[&str]) = ("things", &["find", "changeStream"]);

async fn source_named(fixture: Fixture) -> anyhow::Result<()> {
    const BLIND: User = User { name: "blind", password: "blind" };
    user(&fixture, BLIND, &[CHECKPOINTS, ("things", &["find"])]).await;
    let database = as_user(&fixture, BLIND).await;
    let subscriptions = subscriptions(&database);
    let refused = subscriptions.subscribe("blind", Seen::default().handler()).await.err();
    let resource = format!("collection {}.things", database.name());
    assert_refused(refused.as_ref(), "find, changeStream", &resource);
    assert!(subscriptions.running().is_empty());
    assert_eq!(record(&database, "blind").await?, None);
    Ok(())
}

async fn storage_named(fixture: Fixture) -> anyhow::Result<()> {
    const MUTE: User = User { name: "mute", password: "mute" };
    const READER: User = User { name: "reader", password: "reader" };
    const ENOUGH: User = User { name: "enough", password: "enough" };
    user(&fixture, MUTE, &[STREAM]).await;
    user(&fixture, READER, &[STREAM, ("checkpoints", &["find"])]).await;
    let resource = format!("{}.checkpoints", fixture.database.name());
    for (who, action) in [(MUTE, "find"), (READER, "find, insert, update")] {
        let subscriptions = subscriptions(&as_user(&fixture, who).await);
        let refused = subscriptions.subscribe("mute", Seen::default().handler()).await.err();
        assert_refused(refused.as_ref(), action, &resource);
        assert!(subscriptions.running().is_empty());
    }
    assert_eq!(record(&fixture.database, "mute").await?, None);
    // With both it starts, though it cannot list collections.
    user(&fixture, ENOUGH, &[STREAM, CHECKPOINTS]).await;
    let seen = Seen::default();
    let subscriptions = subscriptions(&as_user(&fixture, ENOUGH).await);
    subscriptions.subscribe("mute", seen.handler()).await?;
    insert(&things(&fixture.database), [1]).await?;
    seen.sees(1).await;
    Ok(())
}

fn assert_refused(error: Option<&SubscribeError>, wanted: &str, on: &str) {
    let Some(SubscribeError::Refused { reason: Reason::Unauthorized { action, resource }, .. }) = error else {
        panic!("{error:?}")
    };
    assert_eq!((action.as_str(), resource.as_str()), (wanted, on));
}

/// Takes a privilege from the role of a user's own, or gives it back.
async fn change_right(fixture: &Fixture, command: &str, who: User, collection: &str, actions: &[&str]) {
    let resource = doc! { "db": fixture.database.name(), "collection": collection };
    let privileges = vec![doc! { "resource": resource, "actions": actions.to_vec() }];
    fixture.server.admin_command(doc! { command: who.name, "privileges": privileges }).await.expect("another right");
}

/// Waits until the missing right is what the subscription retries for.
async fn misses(subscription: &Subscription, wanted: &str, on: &str) {
    let missing = Reason::Unauthorized { action: wanted.into(), resource: on.into() };
    let what = format!("{missing}; {:?}", subscription.status());
    let state = State::Retrying(missing);
    wait_until(&what, PATIENCE, || async { subscription.status().state == state }).await;
}

async fn source_revoked(fixture: Fixture) -> anyhow::Result<()> {
    const PASSING: User = User { name: "passing", password: "passing" };
    user(&fixture, PASSING, &[STREAM, CHECKPOINTS]).await;
    let database = as_user(&fixture, PASSING).await;
    let (written, seen) = (things(&fixture.database), Seen::default());
    let subscriptions = subscriptions(&database);
    let subscription = subscriptions.subscribe("passing", seen.handler()).await?;
    insert(&written, 0..5).await?;
    seen.sees(4).await;
    change_right(&fixture, "revokePrivilegesFromRole", PASSING, "things", &["changeStream"]).await;
    insert(&written, 5..10).await?;
    misses(&subscription, "find, changeStream", &format!("collection {}.things", database.name())).await;
    insert(&written, 10..15).await?;
    change_right(&fixture, "grantPrivilegesToRole", PASSING, "things", &["changeStream"]).await;
    insert(&written, 15..20).await?;
    seen.sees(19).await;
    assert_eq!(seen.ids(), (0..20).collect::<Vec<_>>());
    wait_until("the state says so", PATIENCE, || async { !matches!(subscription.status().state, State::Retrying(_)) })
        .await;
    assert!(seen.is_covered_by(subscription.shutdown().await?.as_ref()));
    println!("faults: the right to read a stream taken away and given back: 20 writes, none lost, none twice");
    Ok(())
}

async fn storage_revoked(fixture: Fixture) -> anyhow::Result<()> {
    const FORGETFUL: User = User { name: "forgetful", password: "forgetful" };
    user(&fixture, FORGETFUL, &[STREAM, CHECKPOINTS]).await;
    let database = as_user(&fixture, FORGETFUL).await;
    let (written, seen) = (things(&fixture.database), Seen::default());
    let subscriptions = subscriptions(&database);
    let subscription = subscriptions.subscribe("forgetful", seen.handler()).await?;
    insert(&written, 0..5).await?;
    seen.sees(4).await;
    let before = subscription.drained().await?;
    change_right(&fixture, "revokePrivilegesFromRole", FORGETFUL, "checkpoints", &["update"]).await;
    insert(&written, 5..10).await?;
    misses(&subscription, "find, insert, update", &format!("{}.checkpoints", database.name())).await;
    insert(&written, 10..15).await?;
    // What it cannot store it hands out all the same, for half a minute.
    seen.sees(14).await;
    let kept = record(&fixture.database, "forgetful").await?.and_then(|record| record.position);
    assert!(kept == before, "{kept:?} is stored, and was {before:?}");
    change_right(&fixture, "grantPrivilegesToRole", FORGETFUL, "checkpoints", &["update"]).await;
    let stored = subscription.drained().await?;
    assert!(seen.is_covered_by(stored.as_ref()), "{stored:?}");
    wait_until("the state says so", PATIENCE, || async { !matches!(subscription.status().state, State::Retrying(_)) })
        .await;
    insert(&written, 15..20).await?;
    seen.sees(19).await;
    // It has stayed the owner, and the next start repeats nothing.
    subscription.shutdown().await?;
    insert(&written, [20]).await?;
    subscriptions.subscribe("forgetful", seen.handler()).await?;
    seen.sees(20).await;
    assert_eq!(seen.ids(), (0..21).collect::<Vec<_>>());
    println!("faults: the right to store taken away and given back: 21 writes, none lost, none twice");
    Ok(())
}

/// What the child is told.
#[derive(Serialize, Deserialize)]
struct Talk {
    uri: String,
    wrong: String,
    nowhere: String,
    database: String,
}

async fn no_password(fixture: Fixture) -> anyhow::Result<()> {
    const SECRET: User = User { name: "secret", password: "Unutterable-7" };
    let written = doc! { "role": "readWrite", "db": fixture.database.name() };
    fixture.server.add_user(SECRET, vec![written]).await;
    let uri = fixture.server.uri_as(SECRET);
    let address = &fixture.server.addresses()[0];
    let talk = Talk {
        wrong: uri.replace(SECRET.password, "Unspeakable-8"),
        nowhere: uri
            .replace(address, "127.0.0.1:1")
            .replace("serverSelectionTimeoutMS=10000", "serverSelectionTimeoutMS=500"),
        uri,
        database: fixture.database.name().into(),
    };
    let mut child = Child::start("talk", &talk);
    let mut said = Vec::new();
    while let Some(line) = child.line().await {
        said.push(line);
    }
    let said = said.join("\n");
    assert!(child.wait().await.success(), "{said}");
    for expected in ["starts at", "handled 1", "\"state\":\"stopped\"", "could not start", "DurableSubscriptions"] {
        assert!(said.contains(expected), "not everything was said, {expected:?} is missing:\n{said}");
    }
    for secret in ["Unutterable", "Unspeakable"] {
        let line = said.lines().find(|line| line.contains(secret));
        assert_eq!(line, None);
    }
    Ok(())
}

/// The role of a child that says everything it can: each line of the log, each error, each status.
pub fn talk(input: serde_json::Value) -> anyhow::Result<()> {
    let talk: Talk = serde_json::from_value(input)?;
    let everything = tracing_subscriber::fmt().with_max_level(tracing_subscriber::filter::LevelFilter::TRACE);
    everything.with_writer(std::io::stdout).init();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let database = Client::with_uri_str(&talk.uri).await?.database(&talk.database);
        let subscriptions = subscriptions(&database);
        let seen = Seen::default();
        println!("{subscriptions:?} {:?} {:?}", subscriptions.model(), subscriptions.storage());
        let action = subscriptions.subscribe("talk", seen.handler());
        println!("{action:?}");
        let subscription = action.await?;
        insert(&things(&database), [1]).await?;
        seen.sees(1).await;
        child::say(&"handled 1")?;
        stored(&database, "talk", "the event is stored", |record| (record.kind == Some(Stored::Event)).then_some(()))
            .await;
        println!("{subscription:?} {:?} {:?}", subscription.status(), record(&database, "talk").await?);
        subscription.shutdown().await?;
        child::say(&subscription.status())?;
        for uri in [&talk.wrong, &talk.nowhere] {
            let database = Client::with_uri_str(uri).await?.database(&talk.database);
            let action = self::subscriptions(&database).subscribe("talk", seen.handler());
            let error = action.start_timeout(Duration::from_secs(3)).await.expect_err("nobody is let in");
            println!("{error} {error:?}");
        }
        anyhow::Ok(())
    })?;
    // Past the runtime's own end, at which tasks of the driver can panic.
    std::process::exit(0)
}
