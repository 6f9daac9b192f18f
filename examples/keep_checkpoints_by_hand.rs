//! A model read directly and a storage used by hand, without the durable wrapper: for a loop of one's own, which decides
//! itself when an event is done. What the wrapper does for you, this does not: retries, quiet intervals, identity
//! checks, ownership checks between saves, status.
//!
//! `MONGODB_URI=mongodb://localhost/?replicaSet=rs0 cargo run --example keep_checkpoints_by_hand`

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use mongosub::bson::{Document, doc};
use mongosub::mongodb::{Client, Collection};
use mongosub::{
    ChangeStreamModel, CheckpointStorage, Claim, ClaimOutcome, Epoch, Filter, Kind, MongoCheckpointStorage,
    Operation::Insert, Plan, Read, Reader, Save, SaveOutcome, StartPosition, SubscriptionId, SubscriptionModel,
};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let Ok(uri) = std::env::var("MONGODB_URI") else {
        eprintln!("set MONGODB_URI to the replica set to run this example on");
        std::process::exit(2);
    };
    let client = Client::with_uri_str(uri).await?;
    let db = client.database("mongosub_by_hand");
    let orders: Collection<Document> = db.collection("orders");
    let model = ChangeStreamModel::collection(&orders);
    let storage = MongoCheckpointStorage::new(&db.collection::<Document>("checkpoints"));
    let id = SubscriptionId::new("by_hand_v1")?;
    let plan = Plan::new(Filter::operations([Insert]));
    model.check(&plan)?;

    // A start for the first run: the present, pinned before the cursor opens. It is stored only if nothing is.
    let mut claim = Claim::new(id.clone());
    claim.start = model.global_checkpoint().await?.map(StartPosition::new);
    let ClaimOutcome::Claimed(record) = storage.claim(&claim).await? else { bail!("the id cannot be claimed") };
    let ownership = record.ownership.context("a claim gives a fence and an owner")?;
    let from = record.position.context("the source tells no position to start from")?;
    // Another program's record has no epoch; ours go on in the one that is stored.
    let epoch = record.epoch.unwrap_or(Epoch(ownership.fence.0));
    println!("fence {}, from {from}", ownership.fence);

    // Errors here are the verdict on position, filter and rights: lost history, for instance.
    let mut reader = model.open(Some(&from), &plan).await?;
    orders.insert_many((1..=3).map(|_| doc! { "status": "new" })).await?;

    let (mut handled, mut saved_at) = (0, Instant::now());
    while handled < 3 {
        let Some(read) = reader.next().await else { bail!("the feed has ended") };
        let (position, kind) = match read? {
            Read::Event { event, position } => {
                handled += 1;
                println!("{} {}", event.operation()?, event.document_key::<Document>()?.unwrap_or_default());
                let kind = if position.is_invalidate() { Kind::Invalidate } else { Kind::Event };
                (position, kind)
            }
            // No event, but the scan got this far: stored now and then, it keeps the place of a quiet subscription.
            // Not each time: the write itself moves the oplog, and the next quiet position would follow at once.
            Read::Quiet(_) if saved_at.elapsed() < Duration::from_secs(60) => continue,
            Read::Quiet(position) => (position, Kind::Quiet),
        };
        let mut save = Save::new(id.clone(), ownership.clone(), epoch, position);
        save.kind = kind;
        match storage.save(&save).await? {
            SaveOutcome::Saved { .. } | SaveOutcome::NotAhead => saved_at = Instant::now(),
            // Somebody else has the id now, or the record is gone: whatever goes on here must not go on.
            SaveOutcome::Superseded { owner, .. } => bail!("taken over by {owner:?}"),
            SaveOutcome::Gone => bail!("the record was deleted"),
            other => bail!("{other:?}"),
        }
    }
    drop(reader);
    if let Some(stored) = storage.read(&id).await?.and_then(|record| record.position) {
        println!("stored {stored}; the next run goes on behind it");
    }
    client.shutdown().await;
    Ok(())
}
