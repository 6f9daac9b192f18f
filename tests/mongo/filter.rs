//! Filters on a server: the table of cases, and the evaluation in memory held against the server on every event of it.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use libtest_mimic::Trial;
use mongosub::{
    ChangeEvent, ChangeStreamModel, Checkpoint, Filter, FullDocument, Operation, Plan, Read, Reader, SubscriptionModel,
    bson::{Document, doc},
    mongodb::{Collection, Database},
};

use self::cases::{COLLECTION, Case, Change, DB};
use crate::support::{Options, Server, test};

#[path = "../support/filter_cases.rs"]
mod cases;

pub fn tests() -> Vec<Trial> {
    vec![test("a server passes what the table says, and the evaluation in memory agrees on every event", |_| async {
        // The names of database and collection stand in the table: not on a server that others use.
        let server = Server::own(Options::default()).await;
        table(server.client().await.database(DB)).await
    })]
}

async fn table(database: Database) -> anyhow::Result<()> {
    let collection = database.collection::<Document>(COLLECTION);
    database.create_collection(COLLECTION).await?;
    let model = ChangeStreamModel::collection(&collection).max_await_time(Duration::from_millis(50));
    let start = model.global_checkpoint().await?.expect("a present");
    let cases = cases::cases();
    for (id, case) in (0..).zip(&cases) {
        happen(&collection, id, &case.change).await?;
    }
    collection.insert_one(doc! { "_id": "last" }).await?;
    // Positions move on with what happens elsewhere.
    database.collection("elsewhere").insert_one(doc! {}).await?;
    let end = model.head().await?;
    let looked_up = model.clone().full_document(FullDocument::UpdateLookup);
    let models = [&model, &looked_up];
    let all = [
        read(&model, &start, &end, Filter::default()).await?,
        read(&looked_up, &start, &end, Filter::default()).await?,
    ];

    let wrong: Vec<String> = stream::iter((0..).zip(&cases))
        .map(|(id, case)| {
            let look = usize::from(matches!(case.change, Change::LookedUp(_)));
            let (model, all, start, end) = (models[look], &all[look], &start, &end);
            async move { anyhow::Ok(wrong(id, case, &read(model, start, end, case.filter.clone()).await?, all)) }
        })
        .buffered(4)
        .try_fold(Vec::new(), |mut wrong, more| async {
            wrong.extend(more);
            Ok(wrong)
        })
        .await?;
    assert!(cases.len() > 300, "{} cases", cases.len());
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    Ok(())
}

/// Makes the change of a case happen to the document with this `_id`.
async fn happen(collection: &Collection<Document>, id: i32, change: &Change) -> anyhow::Result<()> {
    let with_id = |document: &Document| {
        let mut whole = doc! { "_id": id };
        whole.extend(document.clone());
        whole
    };
    let old = doc! { "_id": id, "old": 1 };
    match change {
        Change::Insert(document) => drop(collection.insert_one(with_id(document)).await?),
        Change::Replace(document) => {
            collection.insert_one(old).await?;
            collection.replace_one(doc! { "_id": id }, document).await?;
        }
        Change::LookedUp(document) | Change::Update(document) => {
            collection.insert_one(old).await?;
            collection.update_one(doc! { "_id": id }, doc! { "$set": document.clone() }).await?;
        }
        Change::Delete(document) => {
            collection.insert_one(with_id(document)).await?;
            collection.delete_one(doc! { "_id": id }).await?;
        }
    }
    Ok(())
}

/// Everything from `start` to `end` that the server passes.
async fn read(
    model: &ChangeStreamModel,
    start: &Checkpoint,
    end: &Checkpoint,
    filter: Filter,
) -> anyhow::Result<Vec<ChangeEvent>> {
    let mut reader = model.open(Some(start), &Plan::new(filter)).await?;
    let mut events = Vec::new();
    while let Some(read) = reader.next().await {
        let read = read?;
        let over = read.position().cluster_time() >= end.cluster_time();
        if let Read::Event { event, .. } = read {
            events.push(event);
        }
        if over {
            break;
        }
    }
    Ok(events)
}

fn operation(change: &Change) -> Operation {
    match change {
        Change::Insert(_) => Operation::Insert,
        Change::Replace(_) => Operation::Replace,
        Change::LookedUp(_) | Change::Update(_) => Operation::Update,
        Change::Delete(_) => Operation::Delete,
    }
}

/// What is not as it should be: the server about the case, and the memory about any event.
fn wrong(id: i32, case: &Case, passed: &[ChangeEvent], all: &[ChangeEvent]) -> Vec<String> {
    let is_the_case = |event: &&ChangeEvent| {
        event.operation().is_ok_and(|it| it == operation(&case.change))
            && event.document_id::<i32>().is_ok_and(|it| it == Some(id))
    };
    let name = case.name;
    let mut wrong = Vec::new();
    let found = passed.iter().any(|event| is_the_case(&event));
    if found != case.expected {
        wrong.push(format!("{name}: {:?} passes: {found}, filter {:?}", case.change, case.filter));
    }
    let tokens: Vec<_> = passed.iter().map(ChangeEvent::token).collect();
    for event in all {
        let (by_server, here) = (tokens.contains(&event.token()), case.filter.matches(event));
        if here != Ok(by_server) {
            wrong.push(format!("{name}: {:?} passes the server: {by_server}, here: {here:?}", event.raw()));
        }
    }
    wrong
}
