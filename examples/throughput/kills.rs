//! What only a process of its own shows: its peak memory, and what comes again after SIGKILL.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use mongosub::bson::{Document, Timestamp};
use mongosub::mongodb::Client;
use mongosub::{
    ChangeStreamModel, Delivery, DurableSubscriptions, Failure, MongoCheckpointStorage, Start, StartAt, Subscription,
};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::feed::Feed;
use crate::figures::Figures;
use crate::latency::millis;
use crate::support::{Server, child, child::Child, wait_for};
use crate::ways;

/// What the children of this program can be told to do.
pub const ROLES: &[child::Role] = &[("peak", peak_child), ("killed", killed_child)];

#[derive(Serialize, Deserialize)]
struct Input {
    uri: String,
    database: String,
    start: (u32, u32),
    events: u64,
    notes: PathBuf,
}

impl Input {
    fn of(server: &Server, feed: &Feed, notes: &Path) -> Self {
        Self {
            uri: server.uri(),
            database: feed.database.name().to_owned(),
            start: (feed.start.time, feed.start.increment),
            events: feed.events,
            notes: notes.to_owned(),
        }
    }

    async fn feed(&self) -> anyhow::Result<Feed> {
        let database = Client::with_uri_str(&self.uri).await?.database(&self.database);
        let (time, increment) = self.start;
        let orders = database.collection::<Document>("orders");
        Ok(Feed { name: "child", database, orders, start: Timestamp { time, increment }, events: self.events })
    }
}

/// The peak resident memory of a process that does nothing but replay the feed with a durable subscription.
pub async fn peak(server: &Server, feed: &Feed, figures: &mut Figures) -> anyhow::Result<()> {
    let mut child = Child::start("peak", &Input::of(server, feed, Path::new("")));
    let (before, peak): (f64, f64) = child.json().await;
    child.wait().await;
    figures.take(format!("peak_rss_{}", feed.name), peak, "MB");
    figures.take(format!("rss_before_{}", feed.name), before, "MB");
    Ok(())
}

fn peak_child(input: serde_json::Value) -> anyhow::Result<()> {
    let input: Input = serde_json::from_value(input)?;
    tokio::runtime::Runtime::new()?.block_on(async {
        let feed = input.feed().await?;
        let before = resident("VmRSS:")?;
        ways::durable(&feed, mongosub::SaveMode::WriteBehind, ways::one_field).await?;
        child::say(&(before, resident("VmHWM:")?))
    })
}

/// A figure of this process's memory, in MB.
fn resident(name: &str) -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)).context("the kernel does not say")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? / 1024.0)
}

/// One kill in full flight: how much of the work done comes again, as events and as the time it took to do.
pub async fn kill(server: &Server, feed: &Feed, after: u64, figures: &mut Figures) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let notes = folder.path().join("handled");
    let mut child = Child::start("killed", &Input::of(server, feed, &notes));
    let so_far = || Notes::read(&notes).map(|notes| notes.times.len() as u64).unwrap_or_default();
    wait_for("enough is handled", Duration::from_secs(60), || async { (so_far() >= after).then_some(()) }).await;
    child.kill().await;
    let notes = Notes::read(&notes)?;

    let first: Arc<Mutex<Option<i64>>> = Arc::default();
    let (seen, came) = (first.clone(), Arc::new(Notify::new()));
    let told = came.clone();
    let handler = move |delivery: Delivery| {
        let key = delivery.event.document_id::<i64>();
        let mut first = seen.lock().unwrap();
        *first = first.or(key.ok().flatten());
        told.notify_one();
        async { Ok(()) }
    };
    let subscription = subscribe(feed, handler).await?;
    came.notified().await;
    subscription.cancel().await?;
    let first = usize::try_from(first.lock().unwrap().context("nothing came")?)?;
    let again = notes.times.get(first..).unwrap_or_default();
    let work = again.last().zip(again.first()).map_or(0, |(last, first)| last - first);
    figures.take("repeat_events", again.len() as f64, "events");
    figures.take("repeat_ms", millis(Duration::from_nanos(work)), "ms");
    Ok(())
}

/// When each event was handled, in nanoseconds, by key. It lies in a file that outlives SIGKILL.
struct Notes {
    times: Vec<u64>,
}

impl Notes {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = std::fs::read(path)?;
        let times = bytes.chunks_exact(8).map(|time| u64::from_le_bytes(time.try_into().unwrap_or_default()));
        Ok(Self { times: times.collect() })
    }
}

fn killed_child(input: serde_json::Value) -> anyhow::Result<()> {
    let input: Input = serde_json::from_value(input)?;
    tokio::runtime::Runtime::new()?.block_on(async {
        let feed = input.feed().await?;
        let (file, begun) = (File::create(&input.notes)?, Instant::now());
        let handler = move |delivery: Delivery| {
            let noted = (|| {
                let key = delivery.event.document_id::<i64>()?.ok_or("no key")?;
                let time = u64::try_from(begun.elapsed().as_nanos())?.to_le_bytes();
                file.write_all_at(&time, u64::try_from(key)? * 8)?;
                Ok::<(), Failure>(())
            })();
            async move { noted }
        };
        let subscription = subscribe(&feed, handler).await?;
        anyhow::bail!("stopped: {}", subscription.stopped().await)
    })
}

async fn subscribe(feed: &Feed, handler: impl mongosub::Handler + 'static) -> anyhow::Result<Subscription> {
    let storage = MongoCheckpointStorage::new(&feed.database.collection::<Document>("checkpoints"));
    let subscriptions = DurableSubscriptions::new(ChangeStreamModel::collection(&feed.orders), storage);
    let action = subscriptions.subscribe("killed", handler).start_at(StartAt::StoredOr(Start::Time(feed.start)));
    Ok(action.await?)
}
