//! A document that changes or goes between its change and the look-up.

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, DurableSubscriptions, FullDocument, Operation,
    bson::{Document, doc},
    mongodb::Database,
};

use crate::{
    seen::{Seen, Subscriptions, storage, things},
    support::{Context, test},
};

pub fn tests() -> Vec<Trial> {
    vec![test(
        "an update whose document is gone when it is looked up is delivered and says so",
        |ctx: Context| async move { gone(ctx.plain().await.database).await },
    )]
}

async fn gone(database: Database) -> anyhow::Result<()> {
    let things = things(&database);
    let model = ChangeStreamModel::collection(&things).full_document(FullDocument::UpdateLookup);
    let subscriptions: Subscriptions = DurableSubscriptions::new(model, storage(&database));
    let seen = Seen::default();
    let subscription = subscriptions.subscribe("gone", seen.handler()).await?;
    // Paused, so that nothing is looked up before the end.
    subscription.pause().await?;
    things.insert_many((0..2).map(|id| doc! { "_id": id })).await?;
    things.update_many(doc! {}, doc! { "$set": { "n": 1 } }).await?;
    things.delete_one(doc! { "_id": 0 }).await?;
    subscription.resume().await?;
    seen.counts(5).await;
    let found = seen.all().into_iter().map(|delivery| {
        let event = &delivery.event;
        let document = event.full_document::<Document>()?.is_some();
        anyhow::Ok((event.operation()?, document, event.lookup_missing()?))
    });
    let expected = [
        (Operation::Insert, true, false),
        (Operation::Insert, true, false),
        (Operation::Update, false, true),
        (Operation::Update, true, false),
        (Operation::Delete, false, false),
    ];
    assert_eq!(found.collect::<Result<Vec<_>, _>>()?, expected);
    Ok(())
}
