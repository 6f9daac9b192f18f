//! Events that are large, and one that is too large for any reply.

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Filter, FullDocument, FullDocumentBeforeChange, Operation, Reason,
    bson::{Document, doc},
    mongodb::Database,
};

use super::{stalls, to};
use crate::{
    seen::{Seen, Subscriptions, insert, subscriptions, things},
    support::{Options, Server, test},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("large events among small ones come in order while the size of the replies follows them", |_| sizes()),
        test("an event that is too large stalls the subscription behind the good ones before it", |_| too_large()),
        test("a pipeline that leaves the documents out takes a subscription past an event that is too large", |_| {
            past()
        }),
    ]
}

/// Much is written: not to an oplog that others use.
async fn roomy() -> (Server, Database) {
    let server = Server::own(Options { oplog_megabytes: 128, ..Options::default() }).await;
    let database = server.fresh_database().await;
    (server, database)
}

async fn sizes() -> anyhow::Result<()> {
    let (_server, database) = roomy().await;
    let written = things(&database);
    let (subscriptions, seen) = (subscriptions(&database), Seen::default());
    let subscription = subscriptions.subscribe("sizes", seen.handler()).await?;
    // Paused, so that it finds them all at once.
    subscription.pause().await?;
    let mut last = 0;
    for (count, bytes) in [(1500, 10), (60, 200_000), (1500, 10), (5, 3_000_000), (500, 10)] {
        let filler = "x".repeat(bytes);
        let documents = (last..last + count).map(|id| doc! { "_id": id, "filler": &filler });
        written.insert_many(documents).await?;
        last += count;
    }
    subscription.resume().await?;
    seen.sees(last - 1).await;
    assert_eq!(seen.ids(), (0..last).collect::<Vec<_>>());
    Ok(())
}

async fn too_large() -> anyhow::Result<()> {
    let (_server, database) = roomy().await;
    stalled(&database).await?;
    // It holds its place: with a model that asks for less it goes on.
    let (small, rest) = (to(ChangeStreamModel::collection(&things(&database)), &database), Seen::default());
    small.subscribe("large", rest.handler()).await?;
    rest.sees(14).await;
    assert_eq!(rest.ids(), [10, 13, 14]);
    assert_eq!(rest.operations()[0], Operation::Update);
    Ok(())
}

/// As the runbook says.
async fn past() -> anyhow::Result<()> {
    let (_server, database) = roomy().await;
    let large = stalled(&database).await?;
    let seen = Seen::default();
    let without = Filter::pipeline([doc! { "$unset": ["fullDocument", "fullDocumentBeforeChange"] }]);
    let subscription = large.subscribe("large", seen.handler()).filter(without).await?;
    seen.sees(14).await;
    assert_eq!(seen.ids(), [10, 13, 14]);
    // And then as before.
    subscription.shutdown().await?;
    large.subscribe("large", seen.handler()).await?;
    insert(&things(&database), [15]).await?;
    seen.sees(15).await;
    assert_eq!(seen.ids(), [10, 13, 14, 15]);
    assert!(seen.all()[3].event.full_document::<Document>()?.is_some());
    Ok(())
}

/// Subscriptions to events with everything in them, of which one, `large`, has stalled behind the thirteenth.
async fn stalled(database: &Database) -> anyhow::Result<Subscriptions> {
    let images = doc! { "enabled": true };
    database.run_command(doc! { "create": "things", "changeStreamPreAndPostImages": images }).await?;
    let written = things(database);
    let model = ChangeStreamModel::collection(&written)
        .full_document(FullDocument::Required)
        .full_document_before_change(FullDocumentBeforeChange::Required);
    let (large, seen) = (to(model, database), Seen::default());
    let subscription = large.subscribe("large", seen.handler()).await?;
    subscription.pause().await?;
    insert(&written, 0..10).await?;
    written.insert_one(doc! { "_id": 10, "filler": "x".repeat(9_000_000) }).await?;
    insert(&written, 11..13).await?;
    // With the document before and after it.
    written.update_one(doc! { "_id": 10 }, doc! { "$set": { "n": 1 } }).await?;
    insert(&written, 13..15).await?;
    subscription.resume().await?;
    let reason = stalls(&subscription).await;
    assert_eq!(seen.ids(), (0..13).collect::<Vec<_>>());
    let last = seen.positions().pop().expect("the last good one");
    let is_behind_it =
        matches!(&reason, Reason::EventTooLarge { position } if *position == last || position.is_beyond(&last));
    assert!(is_behind_it, "{reason:?} behind {last}");
    subscription.shutdown().await?;
    Ok(large)
}
