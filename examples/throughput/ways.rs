//! The ways to read the same events, each until `events` of them have come.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use futures::StreamExt;
use mongosub::bson::{Document, doc};
use mongosub::{
    ChangeStreamModel, Checkpoint, DecodeError, Delivery, DurableSubscriptions, MongoCheckpointStorage, Plan, Read,
    Reader, SaveMode, Start, StartAt, SubscriptionModel,
};
use tokio::sync::Notify;

use crate::feed::Feed;

/// (a) Our reader, nothing decoded.
pub async fn reader(feed: &Feed) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let model = ChangeStreamModel::collection(&feed.orders);
    let mut reader = model.open(Some(&Checkpoint::Time(feed.start)), &Plan::default()).await?;
    let mut left = feed.events;
    while left > 0 {
        if let Read::Event { event, .. } = reader.next().await.context("the feed ended")?? {
            black_box(event);
            left -= 1;
        }
    }
    Ok(begun.elapsed())
}

/// What the handler of a durable subscription does with an event.
pub type Look = fn(&Delivery) -> Result<usize, DecodeError>;

/// Reads one field.
pub fn one_field(delivery: &Delivery) -> Result<usize, DecodeError> {
    let document = delivery.event.raw_full_document()?;
    Ok(document.and_then(|document| document.get_str("status").ok()).map_or(0, str::len))
}

/// Decodes the whole document.
pub fn document(delivery: &Delivery) -> Result<usize, DecodeError> {
    Ok(delivery.event.full_document::<Document>()?.map_or(0, |document| document.len()))
}

/// (b), (c), (f) A durable subscription with majority checkpoints that saves every event. What it takes to end is not
/// part of what is measured.
pub async fn durable(feed: &Feed, mode: SaveMode, look: Look) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let checkpoints = feed.database.collection::<Document>("checkpoints");
    let subscriptions = DurableSubscriptions::new(
        ChangeStreamModel::collection(&feed.orders),
        MongoCheckpointStorage::new(&checkpoints),
    );
    let (left, done) = (Arc::new(AtomicU64::new(feed.events)), Arc::new(Notify::new()));
    let (remaining, last) = (left, done.clone());
    let handler = move |delivery: Delivery| {
        let seen = look(&delivery);
        if remaining.fetch_sub(1, Ordering::Relaxed) == 1 {
            last.notify_one();
        }
        async move {
            black_box(seen?);
            Ok(())
        }
    };
    let start = StartAt::Always(Start::Time(feed.start));
    let subscription = subscriptions.subscribe("throughput", handler).start_at(start).save_mode(mode).await?;
    tokio::select! {
        () = done.notified() => {}
        reason = subscription.stopped() => bail!("stopped: {reason}"),
    }
    let took = begun.elapsed();
    subscription.cancel().await?;
    Ok(took)
}

/// (d) A bare loop over the driver's raw batches.
pub async fn raw(feed: &Feed) -> anyhow::Result<Duration> {
    let begun = Instant::now();
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
            black_box(slice?);
            left = left.saturating_sub(1);
        }
    }
    Ok(begun.elapsed())
}

/// (e) The driver's typed change stream, without any durability.
pub async fn driver(feed: &Feed) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let mut stream = feed.orders.watch().start_at_operation_time(feed.start).batch_size(1000).await?;
    for _ in 0..feed.events {
        black_box(stream.next().await.context("the stream ended")??);
    }
    Ok(begun.elapsed())
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
