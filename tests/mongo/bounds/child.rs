//! A child whose memory and log are its own: it subscribes, handles, and says what that cost.

use std::{
    fs, io, iter,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::future::{Ready, ready, try_join_all};
use mongosub::{
    ChangeStreamModel, Checkpoint, ConnectionPool, Delivery, DurableSubscriptions, Failure, Subscription,
    bson::{Document, doc},
    mongodb::{Client, Database},
};
use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::LevelFilter;

use crate::{
    seen::{Subscriptions, id_of, storage, things},
    support::{child::say, wait_for},
};

/// Nobody waits longer for a child.
const PATIENCE: Duration = Duration::from_secs(150);

/// What the child is told.
#[derive(Serialize, Deserialize)]
pub struct Input {
    pub uri: String,
    pub database: String,
    pub task: Task,
}

#[derive(Serialize, Deserialize)]
pub enum Task {
    /// That many subscriptions to a few collections by one client, until each has handled all events.
    Many { subscriptions: usize, collections: usize, events: i32 },
    /// Streams up to the edge of a pool and beyond.
    TooSmall,
    /// A handler that is blocked until there is a document in `gate`.
    Blocked { events: i32 },
}

/// What the child says.
#[derive(Debug, Serialize, Deserialize)]
pub enum Word {
    Opened { millis: u64, start: Memory, memory: Memory },
    Blocked { memory: Memory },
    Done { memory: Memory, wrong: Vec<String>, log: Vec<String> },
    Logged { log: Vec<String> },
}

/// What the process has in memory, in bytes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Memory {
    pub resident: u64,
    pub peak: u64,
}

impl Memory {
    fn now() -> anyhow::Result<Self> {
        let status = fs::read_to_string("/proc/self/status")?;
        let of = |field: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
            let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
            kilobytes.map(|kilobytes| kilobytes * 1024).ok_or_else(|| anyhow::anyhow!("no {field}"))
        };
        Ok(Self { resident: of("VmRSS")?, peak: of("VmHWM")? })
    }
}

/// Which documents' changes have come, and the last position. Nothing is kept of the events: that would count as memory.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<(Vec<i32>, Option<Checkpoint>)>>);

impl Notes {
    fn lock(&self) -> MutexGuard<'_, (Vec<i32>, Option<Checkpoint>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, delivery: &Delivery) {
        let mut notes = self.lock();
        notes.0.push(id_of(delivery));
        notes.1 = Some(delivery.position.clone());
    }

    fn ids(&self) -> Vec<i32> {
        self.lock().0.clone()
    }

    fn handler(&self) -> impl FnMut(Delivery) -> Ready<Result<(), Failure>> + Send + use<> {
        let notes = self.clone();
        move |delivery| {
            notes.note(&delivery);
            ready(Ok(()))
        }
    }
}

/// The lines of the log since they were last asked for.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn capture() -> Self {
        let log = Self::default();
        let writer = log.clone();
        let warnings = tracing_subscriber::fmt().with_max_level(LevelFilter::WARN).with_ansi(false);
        warnings.with_writer(move || writer.clone()).init();
        log
    }

    fn take(&self) -> Vec<String> {
        let text = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        String::from_utf8_lossy(&text).lines().map(Into::into).collect()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The role of the child.
pub fn play(input: serde_json::Value) -> anyhow::Result<()> {
    let Input { uri, database, task } = serde_json::from_value(input)?;
    let log = Log::capture();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let database = Client::with_uri_str(&uri).await?.database(&database);
        match task {
            Task::Many { subscriptions, collections, events } => {
                many(&database, &log, subscriptions, collections, events).await
            }
            Task::TooSmall => too_small(&database, &log).await,
            Task::Blocked { events } => blocked(&database, &log, events).await,
        }
    })?;
    // Past the runtime's own end, at which tasks of the driver can panic.
    std::process::exit(0)
}

fn to(database: &Database, collection: &str, pool: impl Into<ConnectionPool>) -> Subscriptions {
    let model = ChangeStreamModel::collection(&database.collection::<Document>(collection)).connection_pool(pool);
    DurableSubscriptions::new(model, storage(database))
}

async fn many(
    database: &Database,
    log: &Log,
    subscriptions: usize,
    collections: usize,
    events: i32,
) -> anyhow::Result<()> {
    let pool = ConnectionPool::of_size(u32::try_from(subscriptions + 16)?);
    let to: Vec<_> = (0..collections).map(|number| to(database, &format!("things{number}"), pool.clone())).collect();
    let notes: Vec<_> = iter::repeat_with(Notes::default).take(subscriptions).collect();
    let start = Memory::now()?;
    let began = Instant::now();
    let starts = notes.iter().enumerate().map(|(number, notes)| {
        let action = to[number % collections].subscribe(format!("many_{number}"), notes.handler());
        async move { action.await }
    });
    let running: Vec<Subscription> = try_join_all(starts).await?;
    anyhow::ensure!(pool.streams() as usize == subscriptions, "{} streams are counted", pool.streams());
    let opened = u64::try_from(began.elapsed().as_millis())?;
    say(&Word::Opened { millis: opened, start, memory: Memory::now()? })?;
    for notes in &notes {
        wait_for("every event", PATIENCE, || async {
            (notes.ids().len() >= usize::try_from(events).ok()?).then_some(())
        })
        .await;
    }
    let mut wrong = Vec::new();
    for (notes, subscription) in notes.iter().zip(&running) {
        let stored = subscription.shutdown().await?;
        let ids = notes.ids();
        let last = notes.lock().1.clone();
        let is_covered = last.zip(stored).is_some_and(|(last, stored)| stored == last || stored.is_beyond(&last));
        if ids != (0..events).collect::<Vec<_>>() || !is_covered {
            wrong.push(format!("{}: {ids:?}, covered: {is_covered}", subscription.id()));
        }
    }
    say(&Word::Done { memory: Memory::now()?, wrong, log: log.take() })
}

async fn too_small(database: &Database, log: &Log) -> anyhow::Result<()> {
    let pool = ConnectionPool::of_size(8);
    let (one, two) = (to(database, "one", pool.clone()), to(database, "two", pool.clone()));
    let subscribe = async |to: &Subscriptions, ids: std::ops::Range<u32>| {
        let mut running = Vec::new();
        for id in ids {
            running.push(to.subscribe(format!("small_{id}"), |_: Delivery| async { Ok(()) }).await?);
        }
        say(&Word::Logged { log: log.take() })?;
        anyhow::Ok(running)
    };
    let mut running = subscribe(&one, 0..4).await?;
    running.extend(subscribe(&two, 4..7).await?);
    running.pop().expect("one").shutdown().await?;
    counts(&pool, 6).await;
    running.extend(subscribe(&two, 7..8).await?);
    for subscription in running.drain(3..) {
        subscription.shutdown().await?;
    }
    counts(&pool, 3).await;
    subscribe(&one, 8..11).await?;
    let untold = DurableSubscriptions::new(ChangeStreamModel::collection(&things(database)), storage(database));
    subscribe(&untold, 20..28).await?;
    Ok(())
}

/// A reader that is closed ends in a task of its own.
async fn counts(pool: &ConnectionPool, streams: u32) {
    wait_for("closed streams are no longer counted", PATIENCE, || async { (pool.streams() == streams).then_some(()) })
        .await;
}

async fn blocked(database: &Database, log: &Log, events: i32) -> anyhow::Result<()> {
    let (notes, gate) = (Notes::default(), Arc::new(tokio::sync::Semaphore::new(0)));
    let (into, waiting) = (notes.clone(), gate.clone());
    let handler = move |delivery: Delivery| {
        let (notes, gate) = (into.clone(), waiting.clone());
        async move {
            gate.acquire().await?.forget();
            notes.note(&delivery);
            Ok(())
        }
    };
    let subscription = crate::seen::subscriptions(database).subscribe("blocked", handler).await?;
    subscription.caught_up().await?;
    let start = Memory::now()?;
    say(&Word::Opened { millis: 0, start, memory: start })?;
    let gates = database.collection::<Document>("gate");
    wait_for("the gate is opened", PATIENCE, || async { gates.find_one(doc! {}).await.expect("the gate") }).await;
    say(&Word::Blocked { memory: Memory::now()? })?;
    gate.add_permits(usize::try_from(events)?);
    wait_for("every event", PATIENCE, || async {
        (subscription.status().settled >= u64::try_from(events).ok()?).then_some(())
    })
    .await;
    subscription.shutdown().await?;
    let ids = notes.ids();
    let wrong = if ids == (0..events).collect::<Vec<_>>() { vec![] } else { vec![format!("{ids:?}")] };
    say(&Word::Done { memory: Memory::now()?, wrong, log: log.take() })
}
