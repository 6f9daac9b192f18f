//! From the sending of a majority write until a handler has its event. The acknowledgement itself is no clock to start:
//! an event often comes before it.
//!
//! Twice: with a write every few milliseconds, as a server that is not busy has them, and back to back, where the next
//! write and the save of the position meet in the server's journal.

use std::time::{Duration, Instant};

use anyhow::Context;
use futures::StreamExt;
use mongosub::bson::Document;
use mongosub::mongodb::{Client, Collection};
use mongosub::{ChangeStreamModel, Delivery, DurableSubscriptions, MongoCheckpointStorage};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::feed::order;
use crate::figures::{Figures, quantile};

const WRITES: i64 = 320;
/// The first ones warm connections up.
const UNCOUNTED: i64 = 20;
const PACE: Duration = Duration::from_millis(5);

/// One round of each.
pub async fn round(client: &Client, figures: &mut Figures) -> anyhow::Result<()> {
    for (name, pace) in [("latency", PACE), ("latency_back_to_back", Duration::ZERO)] {
        let orders = client.database("throughput_latency").collection::<Document>("orders");
        orders.delete_many(Document::new()).await?;
        ours(&orders, pace, &format!("{name}_ours"), figures).await?;
        drivers(&orders, pace, &format!("{name}_driver"), figures).await?;
    }
    Ok(())
}

async fn ours(orders: &Collection<Document>, pace: Duration, name: &str, figures: &mut Figures) -> anyhow::Result<()> {
    let (came, comes) = unbounded_channel();
    let database = orders.client().database(&orders.namespace().db);
    let storage = MongoCheckpointStorage::new(&database.collection::<Document>("checkpoints"));
    let handler = move |_: Delivery| {
        // Nobody listens once the round is over.
        let _ = came.send(Instant::now());
        async { Ok(()) }
    };
    let subscriptions = DurableSubscriptions::new(ChangeStreamModel::collection(orders), storage);
    let subscription = subscriptions.subscribe("latency", handler).await?;
    take(orders, 0, pace, comes, name, figures).await?;
    Ok(subscription.cancel().await?)
}

async fn drivers(
    orders: &Collection<Document>,
    pace: Duration,
    name: &str,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let (came, comes) = unbounded_channel();
    let mut stream = orders.watch().await?;
    let reading = tokio::spawn(async move {
        while let Some(Ok(_)) = stream.next().await {
            if came.send(Instant::now()).is_err() {
                return;
            }
        }
    });
    take(orders, WRITES, pace, comes, name, figures).await?;
    // One more event ends the reading, so that no driver future is dropped half-way.
    orders.insert_one(order(2 * WRITES, 1000)).await?;
    Ok(reading.await?)
}

async fn take(
    orders: &Collection<Document>,
    from: i64,
    pace: Duration,
    mut comes: UnboundedReceiver<Instant>,
    name: &str,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let mut latencies = Vec::new();
    for key in from..from + WRITES {
        let order = order(key, 1000);
        let sent = Instant::now();
        orders.insert_one(order).await?;
        let came = comes.recv().await.context("the stream ended")?;
        if key >= from + UNCOUNTED {
            latencies.push(millis(came - sent));
        }
        tokio::time::sleep_until((sent + pace).into()).await;
    }
    figures.take(format!("{name}_p50"), quantile(&latencies, 0.5), "ms");
    figures.take(format!("{name}_p99"), quantile(&latencies, 0.99), "ms");
    Ok(())
}

pub fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
