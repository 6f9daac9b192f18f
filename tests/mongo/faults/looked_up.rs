//! A filter on looked-up documents whose last delivered document passes it no longer. The server looks the document up
//! once more when it is asked for what comes behind that event, does not find the event, and refuses its token.

use futures::StreamExt;
use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Checkpoint, DurableSubscriptions, Filter, FullDocument, Operation, Start, StartAt, Token,
    bson::{Bson, Document, doc},
    mongodb::{self, Collection, Database},
};

use crate::{
    seen::{Seen, insert, storage, things},
    support::{Fixture, Server, server::code, test},
};

pub fn tests() -> Vec<Trial> {
    [
        ("a document that has left the filter does not keep a subscription from going on", Gone::Left),
        ("a document that was deleted does not keep a subscription with a filter from going on", Gone::Deleted),
    ]
    .map(|(name, how)| test(name, move |ctx| async move { gone(ctx.plain().await, how).await }))
    .into()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Gone {
    Left,
    Deleted,
}

async fn set_status(collection: &Collection<Document>, id: i32, status: &str) -> anyhow::Result<()> {
    collection.update_one(doc! { "_id": id }, doc! { "$set": { "status": status } }).await?;
    Ok(())
}

async fn gone(Fixture { database, server, .. }: Fixture, how: Gone) -> anyhow::Result<()> {
    let written = things(&database);
    let model = ChangeStreamModel::collection(&written).full_document(FullDocument::UpdateLookup);
    let subscriptions = DurableSubscriptions::new(model, storage(&database));
    let paid = || Filter::operations([Operation::Update]).and(Filter::field("status").eq("paid"));
    insert(&written, 0..4).await?;
    let seen = Seen::default();
    let subscription = subscriptions.subscribe("paid", seen.handler()).filter(paid()).await?;
    set_status(&written, 0, "paid").await?;
    set_status(&written, 1, "paid").await?;
    seen.sees(1).await;
    let stored = subscription.shutdown().await?;
    let position = seen.positions()[1].clone();
    match how {
        Gone::Left => set_status(&written, 1, "open").await?,
        Gone::Deleted => {
            written.delete_one(doc! { "_id": 1 }).await?;
        }
    }
    set_status(&written, 2, "paid").await?;
    // What a stream does that is opened by the token.
    let behind = behind_the_token(&database, position.token().expect("an event's token")).await;
    let major = major_version(&server).await?;
    match &behind {
        Err(error) if major >= 6 => assert_eq!(code(error), Some(280), "{error}"),
        Ok(ids) if major < 6 => assert_eq!(ids, &[2]),
        behind => panic!("mongod {major}: {behind:?}"),
    }

    let subscription = subscriptions.subscribe("paid", seen.handler()).filter(paid()).await?;
    set_status(&written, 3, "paid").await?;
    seen.sees(3).await;
    assert_eq!(seen.ids(), [0, 1, 2, 3], "from {stored:?}");
    subscription.shutdown().await?;
    // A quiet position may have been stored behind the event. From the event's own token, stored as a start:
    let again = Seen::default();
    let start = StartAt::StoredOr(Start::After(position.clone()));
    let from_token = subscriptions.subscribe("token", again.handler()).filter(paid()).start_at(start).await?;
    assert!(from_token.status().saved.is_some_and(|saved: Checkpoint| saved == position || saved.is_beyond(&position)));
    again.sees(3).await;
    assert_eq!(again.ids(), [2, 3]);
    println!(
        "faults: the last delivered document gone ({how:?}), mongod {major}: by its token {}, here 4 of 4, none twice",
        if behind.is_ok() { "it goes on" } else { "280" }
    );
    Ok(())
}

/// The documents in the first events behind a token, by a stream with the same condition that is opened by the token.
async fn behind_the_token(database: &Database, token: &Token) -> mongodb::error::Result<Vec<i32>> {
    let stage = doc! { "startAfter": { "_data": token.as_str() }, "fullDocument": "updateLookup" };
    let paid = doc! { "operationType": "update", "fullDocument.status": "paid" };
    let pipeline = vec![doc! { "$changeStream": stage }, doc! { "$match": paid }];
    let open = doc! { "aggregate": "things", "pipeline": pipeline, "cursor": {} };
    let mut replies = database.run_cursor_command(open).batch().await?;
    while let Some(reply) = replies.next().await {
        let mut ids = Vec::new();
        for event in reply?.doc_slices()? {
            let event = Document::try_from(event?.as_document().expect("an event"))?;
            ids.push(event.get_document("documentKey").and_then(|key| key.get_i32("_id")).expect("an id"));
        }
        if !ids.is_empty() {
            return Ok(ids);
        }
    }
    Ok(Vec::new())
}

async fn major_version(server: &Server) -> anyhow::Result<i32> {
    let info = server.admin_command(doc! { "buildInfo": 1 }).await?;
    Ok(info.get_array("versionArray")?.first().and_then(Bson::as_i32).expect("a version"))
}
