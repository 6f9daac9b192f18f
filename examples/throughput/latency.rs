//! From the sending of a majority write until a handler has its event, one write at a time. The acknowledgement itself
//! is no clock to start: an event often comes before it.

use std::time::{Duration, Instant};

use anyhow::Context;
use futures::StreamExt;
use mongosub::bson::Document;
use mongosub::mongodb::{Client, Collection};
use mongosub::{ChangeStreamModel, Delivery, DurableSubscriptions, MongoCheckpointStorage};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::feed::order;
use crate::figures::{Figures, quantile};

const WRITES: i64 = 400;
/// The first ones warm connections up.
const UNCOUNTED: i64 = 20;

/// One round of each.
pub async fn round(client: &Client, figures: &mut Figures) -> anyhow::Result<()> {
    let database = client.database("throughput_latency");
    let orders = database.collection::<Document>("orders");
    orders.delete_many(Document::new()).await?;

    let (came, comes) = unbounded_channel();
    let model = ChangeStreamModel::collection(&orders);
    let storage = MongoCheckpointStorage::new(&database.collection::<Document>("checkpoints"));
    let handler = move |_: Delivery| {
        // Nobody listens once the round is over.
        let _ = came.send(Instant::now());
        async { Ok(()) }
    };
    let subscription = DurableSubscriptions::new(model, storage).subscribe("latency", handler).await?;
    take(&orders, 0, comes, "ours", figures).await?;
    subscription.cancel().await?;

    let (came, comes) = unbounded_channel();
    let mut stream = orders.watch().await?;
    let reading = tokio::spawn(async move {
        while let Some(Ok(_)) = stream.next().await {
            if came.send(Instant::now()).is_err() {
                return;
            }
        }
    });
    take(&orders, WRITES, comes, "driver", figures).await?;
    // One more event ends the reading, so that no driver future is dropped half-way.
    orders.insert_one(order(2 * WRITES, 1000)).await?;
    reading.await?;
    Ok(())
}

async fn take(
    orders: &Collection<Document>,
    from: i64,
    mut comes: UnboundedReceiver<Instant>,
    whose: &str,
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
    }
    figures.take(format!("latency_p50_{whose}"), quantile(&latencies, 0.5), "ms");
    figures.take(format!("latency_p99_{whose}"), quantile(&latencies, 0.99), "ms");
    Ok(())
}

pub fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
