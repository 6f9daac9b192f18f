//! A subscription on a server that tells less than others: a shared tier of Atlas, or a user with few rights.
//!
//! `MONGODB_URI=mongodb+srv://.. cargo run --example atlas_shared_tier`
//!
//! Where `hostInfo` is refused, as shared tiers do, `hello` tells where the deployment is now, so the start is recorded
//! all the same and nothing needs to be set. The option below is for a server that tells neither.

use std::time::Duration;

use mongosub::bson::{Document, doc};
use mongosub::mongodb::{Client, Collection, options::ClientOptions};
use mongosub::{ChangeStreamModel, Delivery, DurableSubscriptions, MongoCheckpointStorage, SubscriptionModel};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_env_filter("mongosub=info").with_writer(std::io::stderr).init();
    let Ok(uri) = std::env::var("MONGODB_URI") else {
        eprintln!("set MONGODB_URI to the replica set to run this example on");
        std::process::exit(2);
    };
    let mut options = ClientOptions::parse(uri).await?;
    // A stream keeps one connection busy while it waits; shared tiers also allow few streams and connections.
    options.max_pool_size.get_or_insert(20);
    let client = Client::with_options(options)?;
    let db = client.database("mongosub_shared_tier");
    let orders: Collection<Document> = db.collection("orders");
    let model = ChangeStreamModel::collection(&orders);

    match model.global_checkpoint().await? {
        Some(position) => println!("the server tells its present: {position}"),
        None => println!("the server tells no present"),
    }
    let storage = MongoCheckpointStorage::new(&db.collection::<Document>("checkpoints"));
    let subscriptions = DurableSubscriptions::new(model, storage)
        // Without it a server that tells no present is refused, with `NoStartPosition`. With it the start is taken from
        // the reply that opens the cursor. From a server that sends no time there either, nothing is stored until the
        // first event is settled; a run that pauses or ends before that has lost what changed since.
        .start_when_no_start_position_can_be_recorded(true)
        // A small oplog loses a quiet subscription's place sooner.
        .save_quiet_position_every(Duration::from_secs(30));

    let subscription = subscriptions
        .subscribe("shared_tier_v1", |delivery: Delivery| async move {
            println!("{} at {}", delivery.event.operation()?, delivery.position);
            Ok(())
        })
        .await?;
    orders.insert_one(doc! { "status": "new" }).await?;
    subscription.caught_up().await?;
    let status = subscription.status();
    let stored = subscription.shutdown().await?;
    client.shutdown().await;
    println!("{} settled, stored: {}", status.settled, stored.map_or_else(|| "nothing".into(), |at| at.to_string()));
    Ok(())
}
