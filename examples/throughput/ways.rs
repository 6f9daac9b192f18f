//! The ways to read the same events, each until `events` of them have come.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use futures::StreamExt;
use mongosub::bson::{Document, Timestamp, doc};
use mongosub::mongodb::{Collection, Database};
use mongosub::{
    ChangeStreamModel, Checkpoint, Delivery, DurableSubscriptions, MongoCheckpointStorage, Plan, Read, Reader,
    SaveMode, Start, StartAt, SubscriptionModel,
};
use tokio::sync::Notify;

/// What is read: where it lies, from when on, how many events.
#[derive(Clone)]
pub struct Feed {
    pub database: Database,
    pub orders: Collection<Document>,
    pub start: Timestamp,
    pub events: u64,
}

/// (a) Our reader, nothing decoded.
pub async fn reader(feed: &Feed) -> anyhow::Result<()> {
    let model = ChangeStreamModel::collection(&feed.orders);
    let mut reader = model.open(Some(&Checkpoint::Time(feed.start)), &Plan::default()).await?;
    let mut left = feed.events;
    while left > 0 {
        if let Read::Event { .. } = reader.next().await.context("the feed ended")?? {
            left -= 1;
        }
    }
    Ok(())
}

/// (b), (c), (f) A durable subscription that stores every event.
pub async fn durable(feed: &Feed, mode: SaveMode, decode: bool) -> anyhow::Result<()> {
    let checkpoints = feed.database.collection::<Document>("checkpoints");
    let subscriptions = DurableSubscriptions::new(
        ChangeStreamModel::collection(&feed.orders),
        MongoCheckpointStorage::new(&checkpoints),
    );
    let (left, done) = (Arc::new(AtomicU64::new(feed.events)), Arc::new(Notify::new()));
    let (remaining, last) = (left, done.clone());
    let handler = move |delivery: Delivery| {
        let decoded = if decode {
            delivery.event.full_document::<Document>().map(|document| document.map_or(0, |document| document.len()))
        } else {
            delivery.event.cluster_time().map(|time| time.increment as usize)
        };
        if remaining.fetch_sub(1, Ordering::Relaxed) == 1 {
            last.notify_one();
        }
        async move {
            std::hint::black_box(decoded?);
            Ok(())
        }
    };
    let start = StartAt::Always(Start::Time(feed.start));
    let subscription = subscriptions.subscribe("throughput", handler).start_at(start).save_mode(mode).await?;
    tokio::select! {
        () = done.notified() => {}
        reason = subscription.stopped() => bail!("stopped: {reason}"),
    }
    let read = Instant::now();
    subscription.cancel().await?;
    // The end is not part of what is measured.
    ENDING.store(u64::try_from(read.elapsed().as_nanos())?, Ordering::Relaxed);
    Ok(())
}

/// How long the last `durable` took to end, in nanoseconds.
pub static ENDING: AtomicU64 = AtomicU64::new(0);

/// (d) A bare loop over the driver's raw batches.
pub async fn raw(feed: &Feed) -> anyhow::Result<()> {
    let command = doc! {
        "aggregate": feed.orders.name(),
        "pipeline": [{ "$changeStream": { "startAtOperationTime": feed.start } }],
        "cursor": { "batchSize": 0 },
        "readConcern": { "level": "majority" },
    };
    let open = feed.database.run_cursor_command(command).batch_size(1000).max_time(Duration::from_secs(1));
    let mut cursor = open.batch().await?;
    let mut left = feed.events;
    while left > 0 {
        let batch = cursor.next().await.context("the cursor ended")??;
        let slices = batch.doc_slices()?;
        for slice in slices {
            std::hint::black_box(slice?);
            left = left.saturating_sub(1);
        }
    }
    Ok(())
}

/// (e) The driver's typed change stream, without any durability.
pub async fn driver(feed: &Feed) -> anyhow::Result<()> {
    let mut stream = feed.orders.watch().start_at_operation_time(feed.start).batch_size(1000).await?;
    for _ in 0..feed.events {
        std::hint::black_box(stream.next().await.context("the stream ended")??);
    }
    Ok(())
}

/// Process CPU time of all threads that are there now and stay.
pub fn cpu() -> Duration {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return Duration::ZERO };
    let nanos = threads.flatten().filter_map(|thread| {
        let schedule = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        schedule.split_whitespace().next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanos.sum())
}
