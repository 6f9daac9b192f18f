//! The fixture's own tests: servers start, are shared, broken and removed.

use std::time::Duration;

use libtest_mimic::Trial;
use mongodb::{
    Database,
    bson::{Document, Timestamp, doc},
};
use serde::{Deserialize, Serialize};

use crate::support::{
    Child, FailMode, Fixture, Kind, Options, Server, WRITER, background, child, choice, guard, run, server::code, test,
    wait_until,
};

pub fn tests() -> Vec<Trial> {
    [shared(), own(), left_behind()].into_iter().flatten().collect()
}

fn shared() -> Vec<Trial> {
    vec![
        test("a shared server takes a majority write and gives it back", |ctx| async move {
            let Fixture { database, .. } = ctx.plain().await;
            let things = database.collection::<Document>("things");
            things.insert_one(doc! { "_id": 1, "name": "one" }).await?;
            let found = things.find_one(doc! { "_id": 1 }).await?;
            assert_eq!(found, Some(doc! { "_id": 1, "name": "one" }));
            Ok(())
        }),
        test("two tests share a server and not a database", |ctx| async move {
            let (one, other) = (ctx.plain().await, ctx.plain().await);
            assert_eq!(one.server.uri(), other.server.uri());
            assert_ne!(one.database.name(), other.database.name());
        }),
        test("a position that the oplog has rolled past is lost", |ctx| async move {
            let Fixture { server, database, .. } = ctx.shared(Kind::SmallOplog).await;
            let written = database.run_command(doc! { "insert": "things", "documents": [{ "_id": 1 }] }).await?;
            let time = written.get_timestamp("operationTime")?;
            open_at(&database, time).await?;
            server.roll_oplog_past(time).await;
            let error = open_at(&database, time).await.expect_err("a lost position");
            assert_eq!(code(&error), Some(286), "{error}");
            Ok(())
        }),
        test("a user who may only read and write is refused hostInfo", |ctx| async move {
            let Fixture { server, database, .. } = ctx.shared(Kind::Auth).await;
            let client = server.client_as(WRITER).await;
            let things = client.database(database.name()).collection::<Document>("things");
            things.insert_one(doc! { "_id": 1 }).await?;
            let error = client.database("admin").run_command(doc! { "hostInfo": 1 }).await.expect_err("refused");
            assert_eq!(code(&error), Some(13), "{error}");
            Ok(())
        }),
        test("a fail point hits the client it names and is off when dropped", |ctx| async move {
            let Fixture { server, database, .. } = ctx.shared(Kind::Faulty).await;
            let victim = server.client_named("victim").await.database(database.name());
            let ping = || doc! { "ping": 1 };
            let data = doc! { "failCommands": ["ping"], "errorCode": 91 };
            let point = server.fail_command("victim", FailMode::Always, data).await;
            assert_eq!(code(&victim.run_command(ping()).await.expect_err("it fails")), Some(91));
            point.entered(1).await;
            database.run_command(ping()).await?;
            drop(point);
            victim.run_command(ping()).await?;
            Ok(())
        }),
    ]
}

/// Opens a change stream of the database at that time.
async fn open_at(database: &Database, time: Timestamp) -> mongodb::error::Result<Document> {
    let stream = doc! { "$changeStream": { "startAtOperationTime": time } };
    database.run_command(doc! { "aggregate": 1, "pipeline": [stream], "cursor": {} }).await
}

fn own() -> Vec<Trial> {
    vec![
        test("a standalone server answers and has no change streams", |_| async {
            let server = Server::own(Options::standalone()).await;
            let things = server.fresh_database().await.collection::<Document>("things");
            things.insert_one(doc! { "_id": 1 }).await?;
            let error = things.watch().await.expect_err("no change streams");
            assert_eq!(code(&error), Some(40573), "{error}");
            Ok(())
        }),
        test("a server of one's own keeps its data and its address through a kill and a restart", |_| async {
            let server = Server::own(Options::default()).await;
            let things = server.fresh_database().await.collection::<Document>("things");
            let addresses = server.addresses();
            things.insert_one(doc! { "_id": 1 }).await?;
            server.kill().await;
            server.start().await;
            things.insert_one(doc! { "_id": 2 }).await?;
            server.restart().await;
            things.insert_one(doc! { "_id": 3 }).await?;
            assert_eq!(server.addresses(), addresses);
            assert_eq!(things.count_documents(doc! {}).await?, 3);
            Ok(())
        }),
        test("a paused server answers nobody until it goes on", |_| async {
            let server = Server::own(Options::default()).await;
            let database = server.fresh_database().await;
            database.run_command(doc! { "ping": 1 }).await?;
            server.pause().await;
            let mut ping = tokio::spawn(async move { database.run_command(doc! { "ping": 1 }).await });
            let silence = tokio::time::timeout(Duration::from_millis(300), &mut ping).await;
            assert!(silence.is_err(), "a frozen server answered: {silence:?}");
            server.unpause().await;
            // Answered or given up: the server is judged by the next one.
            let _ = ping.await?;
            server.ready().await;
            // Left frozen, for that has to be removed as well.
            server.pause().await;
            Ok(())
        }),
        test(
            "a client that is cut off hears nothing until its link is healed, and no other client notices",
            |_| async {
                let server = Server::own(Options::default().linked()).await;
                let database = server.client_named("cut off").await.database("admin");
                let ping = || doc! { "ping": 1 };
                database.run_command(ping()).await?;
                server.cut_client("cut off", 0);
                let mut silent = tokio::spawn({
                    let database = database.clone();
                    async move { database.run_command(ping()).await }
                });
                let silence = tokio::time::timeout(Duration::from_millis(300), &mut silent).await;
                assert!(silence.is_err(), "an answer over a cut link: {silence:?}");
                server.client_named("another").await.database("admin").run_command(ping()).await?;
                server.heal();
                // Answered or given up; the next one is answered.
                let _ = silent.await?;
                database.run_command(ping()).await?;
                Ok(())
            },
        ),
        test("of three nodes another one takes over from a killed primary", |_| async {
            let server = Server::own(Options::default().nodes(3)).await;
            let things = server.fresh_database().await.collection::<Document>("things");
            things.insert_one(doc! { "_id": 1 }).await?;
            let first = server.primary().await;
            server.kill_node(first).await;
            things.insert_one(doc! { "_id": 2 }).await?;
            assert_ne!(server.primary().await, first);
            Ok(())
        }),
    ]
}

/// When the test run that is watched ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum End {
    /// By itself.
    Orderly,
    /// By SIGKILL, when its server is up.
    Killed,
    /// By SIGKILL, as soon as something of its server is to be seen.
    KilledEarly,
}

fn left_behind() -> Vec<Trial> {
    let mut tests = Vec::new();
    let mut add = |name: &str, launcher, end| tests.push(test(name, move |_| nothing_is_left_behind(launcher, end)));
    // Without an engine there are no containers.
    if choice::choice().launcher == choice::Launcher::Container {
        add("SIGKILL of a test run leaves none of its containers behind", "container", End::Killed);
        add("SIGKILL of a test run leaves no container behind that was starting", "container", End::KilledEarly);
        add("the end of a test run leaves none of its containers behind", "container", End::Orderly);
    }
    // As a process mongod is to be had for one platform only.
    if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        add("SIGKILL of a test run leaves none of its processes behind", "process", End::Killed);
        add("SIGKILL of a test run leaves no process behind that was starting", "process", End::KilledEarly);
        add("the end of a test run leaves none of its processes behind", "process", End::Orderly);
    }
    tests
}

#[derive(Serialize, Deserialize)]
struct Began {
    run: String,
    guard: u32,
}

/// The role of a child: a test run that starts a server, says so, and ends only if told to.
pub fn test_run(input: serde_json::Value) -> anyhow::Result<()> {
    let end: End = serde_json::from_value(input)?;
    let run = run::begin();
    child::say(&Began { run: run.id().into(), guard: run.guard_pid() })?;
    background::block_on(async {
        let server = Server::own(Options::default()).await;
        child::say(&server.ids())?;
        if end != End::Orderly {
            std::future::pending::<()>().await;
        }
        // As the shared servers are: nobody drops them.
        std::mem::forget(server);
        anyhow::Ok(())
    })?;
    run.end();
    Ok(())
}

async fn nothing_is_left_behind(launcher: &'static str, end: End) -> anyhow::Result<()> {
    let mut child = Child::start_with("test-run", &end, |command| {
        command.env("MONGOSUB_TEST_SERVER", launcher);
    });
    let Began { run, guard } = child.json().await;
    let limit = Duration::from_secs(60);
    if end == End::KilledEarly {
        wait_until("something of the server is to be seen", limit, || async { !left_of(&run).is_empty() }).await;
    } else {
        let ids: Vec<String> = child.json().await;
        // Orderly, it may be over by now.
        let left = left_of(&run);
        let seen =
            ids.iter().all(|id| left.contains(id)) && run::directory_of(&run).exists() == (launcher == "process");
        assert!(end == End::Orderly || seen, "{ids:?} and the directory are not found by the label: {left:?}");
    }
    if end == End::Orderly {
        let status = child.wait().await;
        assert!(status.success(), "{status}");
    } else {
        child.kill().await;
        let command_line = format!("/proc/{guard}/cmdline");
        wait_until("the guard has done its work", limit, || async {
            !std::fs::read_to_string(&command_line).is_ok_and(|line| line.contains(&run))
        })
        .await;
    }
    assert_eq!(left_of(&run), Vec::<String>::new());
    assert!(!run::directory_of(&run).exists(), "the directory is left behind");
    Ok(())
}

/// The ids of processes, containers and networks that carry the run's label.
fn left_of(run: &str) -> Vec<String> {
    let processes = guard::processes(run).into_iter().map(|pid| pid.to_string());
    processes.chain(guard::containers(run)).chain(guard::networks(run)).collect()
}
