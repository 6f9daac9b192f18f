//! What many subscriptions, a far way behind and large events cost: connections, time and memory stay within bounds.

mod child;

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, DurableSubscriptions, State,
    bson::{Document, doc},
    mongodb::{
        Client, Collection, Database,
        event::{EventHandler, command::CommandEvent},
    },
};

pub use self::child::play;
use self::child::{Task, Word};
use crate::{
    seen::{PATIENCE, Seen, insert, storage, subscriptions, things},
    support::{Child, Options, Server, test, wait_until},
};

const MEGABYTE: u64 = 1 << 20;

pub fn tests() -> Vec<Trial> {
    vec![
        test("two hundred subscriptions on one client with a suitable pool get every event in order", |_| many()),
        test("a pool that is too small is warned about once at each crossing, with both numbers", |ctx| async move {
            let fixture = ctx.plain().await;
            too_small(&fixture.server, &fixture.database).await
        }),
        test("a start far behind returns within a second, says that it catches up, and delivers", |_| far_behind()),
        test("three events of 15 MB and a blocked handler stay under 64 MB", |_| blocked()),
        test("the size of a reply follows the size of the events", |_| reply_sizes()),
    ]
}

/// A server of its own: what is done to it would hold up other tests.
async fn own(oplog_megabytes: u32) -> (Server, Database) {
    let server = Server::own(Options { oplog_megabytes, ..Options::default() }).await;
    let database = server.fresh_database().await;
    (server, database)
}

async fn many() -> anyhow::Result<()> {
    const SUBSCRIPTIONS: usize = 200;
    const COLLECTIONS: usize = 4;
    const EVENTS: i32 = 100;
    let (server, database) = own(64).await;
    let task = Task::Many { subscriptions: SUBSCRIPTIONS, collections: COLLECTIONS, events: EVENTS };
    let uri = format!("{}&maxPoolSize={}", server.uri(), SUBSCRIPTIONS + 16);
    let mut child = start(&uri, &database, task);
    let (opened, started) = (word(&mut child).await, Instant::now());
    let Word::Opened { millis, start, memory: before } = opened else { panic!("{opened:?}") };
    for first in (0..EVENTS).step_by(20) {
        for number in 0..COLLECTIONS {
            let documents = (first..first + 20).map(|id| doc! { "_id": id });
            database.collection::<Document>(&format!("things{number}")).insert_many(documents).await?;
        }
    }
    let written = started.elapsed();
    let done = word(&mut child).await;
    let Word::Done { memory, wrong, log } = done else { panic!("{done:?}") };
    eprintln!(
        "{SUBSCRIPTIONS} subscriptions: opened in {millis} ms; {EVENTS} events each, written in {} ms, handled after {} \
         ms; resident {} MB before the first was opened, {} MB with all open, {} MB after the events, {} MB at most",
        written.as_millis(),
        started.elapsed().as_millis(),
        start.resident / MEGABYTE,
        before.resident / MEGABYTE,
        memory.resident / MEGABYTE,
        memory.peak / MEGABYTE,
    );
    assert_eq!(wrong, Vec::<String>::new());
    // A busy server may keep a save waiting; of the pool there is nothing to say.
    assert!(!log.iter().any(|line| line.contains("max_pool_size")), "{log:?}");
    assert!(child.wait().await.success());
    Ok(())
}

async fn too_small(server: &Server, database: &Database) -> anyhow::Result<()> {
    let mut child = start(&server.uri(), database, Task::TooSmall);
    let mut logs = Vec::new();
    for _ in 0..5 {
        let word = word(&mut child).await;
        let Word::Logged { log } = word else { panic!("{word:?}") };
        logs.push(log);
    }
    assert!(child.wait().await.success());
    // Of a pool of 8: four streams, three more, one that ended and came again, all below the line and up to it again;
    // and, told nothing, seven streams of another model.
    let lines: Vec<usize> = logs.iter().map(Vec::len).collect();
    assert_eq!(lines, [0, 1, 0, 1, 1], "{logs:?}");
    let told = ["WARN", "5 change streams", "max_pool_size is 8:", "max_pool_size of 21 or more"];
    let untold = ["WARN", "7 change streams", "max_pool_size is 10, as far as the model was told:", "23 or more"];
    for (line, parts) in [(&logs[1][0], told), (&logs[3][0], told), (&logs[4][0], untold)] {
        for part in parts {
            assert!(line.contains(part), "{part:?} is missing: {line}");
        }
    }
    Ok(())
}

async fn far_behind() -> anyhow::Result<()> {
    let (server, database) = own(1024).await;
    let (things, subscriptions) = (things(&database), subscriptions(&database));
    let seen = Seen::default();
    let subscription = subscriptions.subscribe("behind", seen.handler()).await?;
    insert(&things, [1]).await?;
    seen.sees(1).await;
    let stored = subscription.shutdown().await?.expect("a stored checkpoint");
    let time = stored.cluster_time().expect("the time of a token");
    // Until the server does not get through within the time that an open takes at most.
    let open = doc! {
        "aggregate": "things",
        "pipeline": [{ "$changeStream": { "startAtOperationTime": time } }, { "$match": { "operationType": "none" } }],
        "cursor": {},
        "maxTimeMS": 200,
    };
    let (mut entries, began) = (0, Instant::now());
    let writing = loop {
        write_elsewhere(&database, 300_000).await?;
        entries += 300_000;
        let writing = began.elapsed();
        match database.run_command(open.clone()).await {
            Err(error) if crate::support::server::code(&error) == Some(50) => break writing,
            answer => assert!(answer.is_ok() && entries < 3_000_000, "{answer:?}"),
        }
    };
    insert(&things, [2]).await?;
    let started = Instant::now();
    let subscription = subscriptions.subscribe("behind", seen.handler()).await?;
    let took = started.elapsed();
    assert_eq!(seen.ids(), [1], "it cannot be there yet");
    let mut status = subscription.watch();
    status.wait_for(|status| !matches!(status.state, State::Starting)).await?;
    assert_eq!(subscription.status().state, State::CatchingUp);
    seen.sees(2).await;
    eprintln!(
        "{entries} entries behind (written in {} ms): subscribed in {} ms, delivered after {} ms",
        writing.as_millis(),
        took.as_millis(),
        started.elapsed().as_millis()
    );
    assert!(took < Duration::from_secs(1), "it took {took:?}");
    subscription.caught_up().await?;
    status.wait_for(|status| status.state == State::CaughtUp).await?;
    assert_eq!(seen.ids(), [1, 2]);
    drop(server);
    Ok(())
}

/// That many entries in the oplog, of a collection that nobody reads: by the server alone, which is fastest.
async fn write_elsewhere(database: &Database, entries: i32) -> anyhow::Result<()> {
    let seed = database.collection::<Document>("seed");
    seed.update_one(doc! { "_id": 0 }, doc! { "$set": { "a": 1 } }).upsert(true).await?;
    let noise = [
        doc! { "$project": { "_id": { "$range": [0, entries] } } },
        doc! { "$unwind": "$_id" },
        doc! { "$out": "noise" },
    ];
    seed.aggregate(noise).await?;
    Ok(())
}

async fn blocked() -> anyhow::Result<()> {
    const EVENT: usize = 15_000_000;
    let (server, database) = own(256).await;
    let mut child = start(&server.uri(), &database, Task::Blocked { events: 3 });
    let opened = word(&mut child).await;
    let Word::Opened { start, .. } = opened else { panic!("{opened:?}") };
    for id in 0..3 {
        things(&database).insert_one(doc! { "_id": id, "filler": "x".repeat(EVENT) }).await?;
    }
    // Nothing is asked for any more, so not everything has been read: one is with the handler, one waits.
    let admin = server.client().await.database("admin");
    wait_until("the reader stops reading", PATIENCE, || rests(&admin)).await;
    database.collection::<Document>("gate").insert_one(doc! { "_id": "open" }).await?;
    let (held, done) = (word(&mut child).await, word(&mut child).await);
    let Word::Blocked { memory: held } = held else { panic!("{held:?}") };
    let Word::Done { memory: after, wrong, .. } = done else { panic!("{done:?}") };
    let over = |memory: u64| memory.saturating_sub(start.resident) / MEGABYTE;
    eprintln!(
        "three events of 15 MB, over the start: {} MB at most and {} MB now while blocked, {} MB at most in all",
        over(held.peak),
        over(held.resident),
        over(after.peak)
    );
    assert_eq!(wrong, Vec::<String>::new());
    assert!(over(held.peak) < 64, "{start:?} {held:?} {after:?}");
    assert!(child.wait().await.success());
    Ok(())
}

/// Whether the one change stream of `things` has not been asked for two seconds; one that is read is asked every second.
async fn rests(admin: &Database) -> bool {
    let streams = [
        doc! { "$currentOp": { "idleCursors": true } },
        doc! { "$match": { "cursor.originatingCommand.aggregate": "things" } },
        doc! { "$set": { "idle": { "$subtract": ["$$NOW", "$cursor.lastAccessDate"] } } },
    ];
    let mut cursors = admin.aggregate(streams).await.expect("the server's cursors");
    let mut all = Vec::new();
    while cursors.advance().await.expect("a cursor") {
        let cursor: Document = cursors.deserialize_current().expect("a document");
        let is_idle = cursor.get_str("type").is_ok_and(|kind| kind == "idleCursor");
        all.push(is_idle && cursor.get_i64("idle").is_ok_and(|millis| millis > 2000));
    }
    all == [true]
}

async fn reply_sizes() -> anyhow::Result<()> {
    const SMALL: i32 = 4000;
    const LARGE: i32 = 16;
    let (server, database) = own(256).await;
    let sizes = Sizes::default();
    let mut options = server.client_options().await;
    options.command_event_handler = Some(sizes.handler());
    let client = Client::with_options(options)?;
    let model = ChangeStreamModel::collection(&client.database(database.name()).collection::<Document>("things"));
    let (subscriptions, seen) = (DurableSubscriptions::new(model, storage(&database)), Seen::default());
    let subscription = subscriptions.subscribe("sizes", seen.handler()).await?;
    let written = things(&database);
    // Paused, so that it finds them all at once.
    subscription.pause().await?;
    sizes.take();
    written.insert_many((0..SMALL).map(|id| doc! { "_id": id, "filler": "x".repeat(200) })).await?;
    subscription.resume().await?;
    seen.sees(SMALL - 1).await;
    let small = sizes.take();
    assert_eq!(small[..2], [100, 1000], "a sample comes first: {small:?}");
    let grown = small[small.len() - 1];
    assert!((2001..=4000).contains(&grown), "{small:?}");
    // In one transaction, so that they come at once to a stream that is open.
    transaction(&database, &written, SMALL..SMALL + LARGE, 1_000_000).await?;
    seen.sees(SMALL + LARGE - 1).await;
    wait_until("the size has followed", PATIENCE, || async { sizes.last() == Some(16) }).await;
    let large: BTreeSet<i64> = sizes.take().into_iter().collect();
    assert!(large.is_subset(&BTreeSet::from([grown, 100, 16])), "{large:?}");
    // That another size is no outage is `step.rs`'s to test: here a busy server can be one.
    let reconnects = subscription.status().reconnects;
    eprintln!("sizes of the replies asked for: {small:?}, then {large:?}; {reconnects} reconnects");
    assert_eq!(seen.ids(), (0..SMALL + LARGE).collect::<Vec<_>>());
    Ok(())
}

/// Inserts all of them at one cluster time.
async fn transaction(
    database: &Database,
    written: &Collection<Document>,
    ids: std::ops::Range<i32>,
    bytes: usize,
) -> anyhow::Result<()> {
    let mut session = database.client().start_session().await?;
    session.start_transaction().await?;
    for id in ids {
        written.insert_one(doc! { "_id": id, "filler": "x".repeat(bytes) }).session(&mut session).await?;
    }
    session.commit_transaction().await?;
    Ok(())
}

/// How many events a client's streams ask for, reply by reply.
#[derive(Clone, Default)]
struct Sizes(Arc<Mutex<Vec<i64>>>);

impl Sizes {
    fn handler(&self) -> EventHandler<CommandEvent> {
        let sizes = self.clone();
        EventHandler::callback(move |event| {
            let CommandEvent::Started(started) = event else { return };
            let size = match &*started.command_name {
                "aggregate" => started.command.get_document("cursor").ok().and_then(|cursor| cursor.get("batchSize")),
                "getMore" => started.command.get("batchSize"),
                _ => None,
            };
            let size = size.and_then(|size| size.as_i64().or_else(|| size.as_i32().map(i64::from)));
            // One alone is what the question asks for how far the oplog reaches back.
            sizes.lock().extend(size.filter(|size| *size > 1));
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<i64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn last(&self) -> Option<i64> {
        self.lock().last().copied()
    }

    fn take(&self) -> Vec<i64> {
        std::mem::take(&mut *self.lock())
    }
}

fn start(uri: &str, database: &Database, task: Task) -> Child {
    Child::start("bounds", &child::Input { uri: uri.into(), database: database.name().into(), task })
}

async fn word(child: &mut Child) -> Word {
    child.json().await
}
