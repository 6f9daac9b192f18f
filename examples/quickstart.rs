//! A durable subscription to a collection, from `subscribe` to a clean end.
//!
//! `MONGODB_URI=mongodb://localhost/?replicaSet=rs0 cargo run --example quickstart`
//!
//! It writes three orders to `mongosub_quickstart.orders`, handles their changes until Ctrl-C, and keeps its checkpoint
//! in `mongosub_quickstart.checkpoints`. Write orders of your own meanwhile, or while it does not run: the next run
//! goes on where this one stopped.

use mongosub::bson::{Document, doc};
use mongosub::mongodb::{Client, Collection};
use mongosub::{ChangeStreamModel, Delivery, DurableSubscriptions, Failure, FullDocument, MongoCheckpointStorage};
use serde::Deserialize;

#[derive(Debug, Deserialize)]
struct Order {
    status: String,
}

/// What an event does. It is at least once: an event can come again after a crash, so this should bear that.
async fn handle(delivery: Delivery) -> Result<(), Failure> {
    let operation = delivery.event.operation()?;
    let id: Option<Document> = delivery.event.document_key()?;
    let order: Option<Order> = delivery.event.full_document()?;
    let again = if delivery.may_be_repeat { " (may be a repeat)" } else { "" };
    println!("{operation} {} {order:?}{again}", id.unwrap_or_default());
    if let Some(Order { status }) = order {
        println!("  its status is {status}");
    }
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_env_filter("mongosub=info").with_writer(std::io::stderr).init();
    let Ok(uri) = std::env::var("MONGODB_URI") else {
        eprintln!("set MONGODB_URI to the replica set to run this example on");
        std::process::exit(2);
    };
    let client = Client::with_uri_str(uri).await?;
    let db = client.database("mongosub_quickstart");
    let orders: Collection<Document> = db.collection("orders");

    let model = ChangeStreamModel::collection(&orders).full_document(FullDocument::UpdateLookup);
    let storage = MongoCheckpointStorage::new(&db.collection::<Document>("checkpoints"));
    let subscriptions = DurableSubscriptions::new(model, storage);

    // The cursor is open and the start recorded when this returns: what is written from here on is delivered.
    let subscription = subscriptions.subscribe("quickstart_v1", handle).await?;
    let new = orders.insert_many((1..=3).map(|_| doc! { "status": "new" })).await?;
    orders.update_many(doc! { "_id": new.inserted_ids[&0].clone() }, doc! { "$set": { "status": "paid" } }).await?;

    subscription.caught_up().await?;
    println!("caught up; write more orders, or end it with Ctrl-C");
    tokio::select! {
        asked = tokio::signal::ctrl_c() => asked?,
        // What can heal is retried for ever; this is what needs a person, or another process with the same id.
        reason = subscription.stopped() => anyhow::bail!("it has stopped: {reason}"),
    }
    let stored = subscription.shutdown().await?;
    // Waits until the cursors are closed at the server too; without it the driver can panic as the runtime ends.
    client.shutdown().await;
    println!("stored: {}", stored.map_or_else(|| "nothing".into(), |position| position.to_string()));
    Ok(())
}
