//! The change stream model on a real server: what it reads, what its options bring, and where it starts and ends.

mod large;
mod starts;

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, DurableSubscriptions, FullDocument, FullDocumentBeforeChange, Namespace, Operation, Reason,
    State, Subscription,
    bson::{Bson, Document, doc},
    mongodb::{Database, options::ReadPreference},
};

use crate::{
    seen::{PATIENCE, Seen, Subscriptions, insert, storage, things},
    support::{Context, Fixture, Options, Server, on_any_server, test, wait_for, wait_until},
};

pub fn tests() -> Vec<Trial> {
    let here = on_any_server(vec![
        plain("a scope reads what lies in it and nothing else", scopes),
        plain("the server shows the comment beside the stream", comment),
        test("a stream is read from a secondary, and its positions come from the primary", |_| from_a_secondary()),
    ]);
    let from_6_0 = vec![
        plain("an update carries the document that was asked for", full_documents),
        plain("an event carries the document as it was before", documents_before),
        plain("a document that must be there and is not stalls the subscription", required_document),
        plain("expanded events are read when asked for", expanded_events),
    ];
    let starts = on_any_server(starts::tests());
    [here, from_6_0, starts, large::tests()].into_iter().flatten().collect()
}

/// A test on the shared server, in a database of its own.
fn plain<Fut>(name: &str, body: fn(Fixture) -> Fut) -> Trial
where
    Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    test(name, move |ctx: Context| async move { body(ctx.plain().await).await })
}

/// Subscriptions to what a model reads, with their checkpoints in the database.
fn to(model: ChangeStreamModel, database: &Database) -> Subscriptions {
    DurableSubscriptions::new(model, storage(database))
}

async fn stalls(subscription: &Subscription) -> Reason {
    wait_for("it stalls", PATIENCE, || async {
        match subscription.status().state {
            State::Stalled(reason) => Some(reason),
            _ => None,
        }
    })
    .await
}

async fn scopes(Fixture { database, client, .. }: Fixture) -> anyhow::Result<()> {
    let elsewhere = client.database(&format!("{}_b", database.name())).collection::<Document>("things");
    let (one, all, everything) = (Seen::default(), Seen::default(), Seen::default());
    let collection = to(ChangeStreamModel::collection(&things(&database)), &database);
    let whole = to(ChangeStreamModel::database(&database), &database);
    let deployment = to(ChangeStreamModel::deployment(&client), &database);
    collection.subscribe("collection", one.handler()).await?;
    whole.subscribe("database", all.handler()).await?;
    let mine: Vec<_> = [database.name(), elsewhere.namespace().db.as_str()].map(str::to_owned).into();
    let noted = everything.clone();
    let handler = move |delivery: mongosub::Delivery| {
        // Others write here, too.
        if delivery.event.database().is_ok_and(|db| db.is_some_and(|db| mine.iter().any(|mine| mine == db))) {
            noted.note(delivery);
        }
        async { Ok(()) }
    };
    deployment.subscribe("deployment", handler).await?;
    insert(&things(&database), [1]).await?;
    insert(&database.collection("others"), [2]).await?;
    insert(&elsewhere, [3]).await?;
    insert(&things(&database), [4]).await?;
    one.sees(4).await;
    all.sees(4).await;
    everything.sees(4).await;
    assert_eq!((one.ids(), all.ids(), everything.ids()), (vec![1, 4], vec![1, 2, 4], vec![1, 2, 3, 4]));
    assert_eq!(everything.all()[2].event.namespace()?, Some(Namespace::new(&elsewhere.namespace().db, "things")));
    Ok(())
}

/// A collection that keeps the documents before and after a change.
async fn with_images(database: &Database) -> anyhow::Result<()> {
    let images = doc! { "enabled": true };
    database.run_command(doc! { "create": "things", "changeStreamPreAndPostImages": images }).await?;
    Ok(())
}

/// `n` of a document that an event may carry.
fn n(document: Option<Document>) -> Option<i32> {
    document.map(|document| document.get_i32("n").expect("n"))
}

async fn full_documents(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    with_images(&database).await?;
    let written = things(&database);
    let mut all = Vec::new();
    for (mode, expected) in [
        (FullDocument::Default, [Some(1), None, None]),
        // As it is when it is read: later than both updates.
        (FullDocument::UpdateLookup, [Some(1), Some(3), Some(3)]),
        (FullDocument::WhenAvailable, [Some(1), Some(2), Some(3)]),
        (FullDocument::Required, [Some(1), Some(2), Some(3)]),
    ] {
        let subscriptions = to(ChangeStreamModel::collection(&written).full_document(mode), &database);
        let (seen, id) = (Seen::default(), format!("{mode:?}"));
        // Paused, so that everything has happened when it is read.
        let subscription = subscriptions.subscribe(id, seen.handler()).await?;
        subscription.pause().await?;
        all.push((subscription, seen, expected, subscriptions));
    }
    written.insert_one(doc! { "_id": 1, "n": 1 }).await?;
    written.update_one(doc! { "_id": 1 }, doc! { "$set": { "n": 2 } }).await?;
    written.update_one(doc! { "_id": 1 }, doc! { "$set": { "n": 3 } }).await?;
    for (subscription, seen, expected, _running) in all {
        subscription.resume().await?;
        seen.counts(3).await;
        let carried: Vec<_> =
            seen.all().iter().map(|delivery| delivery.event.full_document()).collect::<Result<_, _>>()?;
        assert_eq!(carried.into_iter().map(n).collect::<Vec<_>>(), expected, "{}", subscription.id());
        assert_eq!(seen.operations(), [Operation::Insert, Operation::Update, Operation::Update]);
    }
    Ok(())
}

async fn documents_before(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    with_images(&database).await?;
    let written = things(&database);
    let model = ChangeStreamModel::collection(&written).full_document_before_change(FullDocumentBeforeChange::Required);
    let (subscriptions, seen) = (to(model, &database), Seen::default());
    subscriptions.subscribe("before", seen.handler()).await?;
    written.insert_one(doc! { "_id": 1, "n": 1 }).await?;
    written.update_one(doc! { "_id": 1 }, doc! { "$set": { "n": 2 } }).await?;
    written.replace_one(doc! { "_id": 1 }, doc! { "n": 3 }).await?;
    written.delete_one(doc! { "_id": 1 }).await?;
    seen.counts(4).await;
    let all = seen.all();
    let before = all.iter().map(|delivery| delivery.event.full_document_before_change());
    let before: Vec<_> = before.collect::<Result<_, _>>()?;
    assert_eq!(before.into_iter().map(n).collect::<Vec<_>>(), [None, Some(1), Some(2), Some(3)]);
    Ok(())
}

async fn required_document(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    let written = things(&database);
    let model = ChangeStreamModel::collection(&written).full_document_before_change(FullDocumentBeforeChange::Required);
    let (subscriptions, seen) = (to(model, &database), Seen::default());
    let subscription = subscriptions.subscribe("required", seen.handler()).await?;
    insert(&written, [1]).await?;
    seen.sees(1).await;
    written.delete_one(doc! { "_id": 1 }).await?;
    let reason = stalls(&subscription).await;
    assert!(matches!(&reason, Reason::ImageMissing { image, .. } if image == "fullDocumentBeforeChange"), "{reason:?}");
    // It holds its place: with a model that does not ask for it the change is delivered.
    subscription.shutdown().await?;
    let (again, seen) = (to(ChangeStreamModel::collection(&written), &database), Seen::default());
    again.subscribe("required", seen.handler()).await?;
    seen.counts(1).await;
    assert_eq!(seen.operations(), [Operation::Delete]);
    Ok(())
}

async fn expanded_events(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    let written = things(&database);
    let model = ChangeStreamModel::collection(&written);
    let (expanded, all) = (to(model.clone().show_expanded_events(true), &database), Seen::default());
    let (usual, some) = (to(model, &database), Seen::default());
    expanded.subscribe("expanded", all.handler()).await?;
    usual.subscribe("usual", some.handler()).await?;
    database.create_collection("things").await?;
    let index = doc! { "key": { "n": 1 }, "name": "n" };
    database.run_command(doc! { "createIndexes": "things", "indexes": [index] }).await?;
    insert(&written, [1]).await?;
    all.sees(1).await;
    some.sees(1).await;
    assert_eq!(all.operations(), [Operation::Create, Operation::CreateIndexes, Operation::Insert]);
    assert_eq!(some.operations(), [Operation::Insert]);
    let events = all.all();
    let uuid = events[2].event.collection_uuid()?.expect("the collection's UUID");
    let hex = uuid.to_string().replace('-', "").to_uppercase();
    assert_eq!(events[2].event.token()?.collection_uuid(), Some(hex.as_str()));
    assert!(events[1].event.operation_description()?.is_some());
    Ok(())
}

async fn comment(Fixture { database, server, .. }: Fixture) -> anyhow::Result<()> {
    let comment = format!("the stream of {}", database.name());
    let model = ChangeStreamModel::collection(&things(&database)).comment(comment.clone());
    let (subscriptions, seen) = (to(model, &database), Seen::default());
    subscriptions.subscribe("comment", seen.handler()).await?;
    wait_until("the server shows the comment", PATIENCE, || async {
        let shown = doc! { "$match": { "$or": [{ "command.comment": &comment }, { "cursor.originatingCommand.comment": &comment }] } };
        let pipeline = vec![doc! { "$currentOp": { "idleCursors": true, "localOps": true } }, shown];
        let command = doc! { "aggregate": 1, "pipeline": pipeline, "cursor": {} };
        let reply = server.admin_command(command).await.expect("what the server does");
        let found = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch")).expect("a batch");
        found.iter().any(|found| matches!(found, Bson::Document(_)))
    })
    .await;
    insert(&things(&database), [1]).await?;
    seen.sees(1).await;
    Ok(())
}

async fn from_a_secondary() -> anyhow::Result<()> {
    let server = Server::own(Options::default().nodes(3)).await;
    let database = server.fresh_database().await;
    let written = things(&database);
    let secondary = ReadPreference::Secondary { options: None };
    let subscriptions = to(ChangeStreamModel::collection(&written).read_preference(secondary), &database);
    let seen = Seen::default();
    let subscription = subscriptions.subscribe("secondary", seen.handler()).await?;
    insert(&written, 0..10).await?;
    subscription.caught_up().await?;
    assert_eq!(seen.ids(), (0..10).collect::<Vec<_>>(), "caught up is what the primary has");
    subscription.shutdown().await?;
    insert(&written, 10..20).await?;
    let subscription = subscriptions.subscribe("secondary", seen.handler()).await?;
    subscription.caught_up().await?;
    assert_eq!(seen.ids(), (0..20).collect::<Vec<_>>());
    Ok(())
}
