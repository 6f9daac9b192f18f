//! Images of documents that a stream requires and the server does not have.

use std::time::Duration;

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Checkpoint, Filter, FullDocument, FullDocumentBeforeChange, Operation, Plan, Read, Reader,
    Reason, SourceError, SubscriptionModel,
    bson::{Document, doc},
    mongodb::{Collection, Database},
};

use super::{stalls, to};
use crate::{
    seen::{Seen, insert, things},
    support::{Context, test},
};

pub fn tests() -> Vec<Trial> {
    let image = |name: &str, image: Image, filter: Filter| {
        test(name, move |ctx: Context| async move { missing(ctx.plain().await.database, image, filter).await })
    };
    vec![
        image(
            "an event without an image that is required is named, and can be stepped over, also inside a transaction",
            Image::Before,
            Filter::default(),
        ),
        image(
            "an event without the document after the change is named, and can be stepped over",
            Image::After,
            Filter::default(),
        ),
        image(
            "an event without an image is named behind others without one that the filter keeps out",
            Image::Before,
            Filter::operations([Operation::Insert, Operation::Replace]),
        ),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Image {
    Before,
    After,
}

impl Image {
    fn model(self, things: &Collection<Document>) -> ChangeStreamModel {
        let model = ChangeStreamModel::collection(things).max_await_time(Duration::from_millis(100));
        match self {
            Self::Before => model.full_document_before_change(FullDocumentBeforeChange::Required),
            Self::After => model.full_document(FullDocument::Required),
        }
    }

    fn field(self) -> &'static str {
        match self {
            Self::Before => "fullDocumentBeforeChange",
            Self::After => "fullDocument",
        }
    }
}

/// The last document.
const END: i32 = 100;

/// What is read behind a position, and why no further.
async fn read(
    model: &ChangeStreamModel,
    from: &Checkpoint,
    filter: &Filter,
) -> anyhow::Result<(Vec<(Operation, i32, Checkpoint)>, Option<Checkpoint>)> {
    let named = |reason| match reason {
        Reason::ImageMissing { position, .. } => Some(position),
        reason => panic!("{reason:?}"),
    };
    let mut reader = match model.open(Some(from), &Plan::new(filter.clone())).await {
        Ok(reader) => reader,
        Err(SourceError::Refused(reason)) => return Ok((Vec::new(), named(reason))),
        Err(error) => return Err(error.into()),
    };
    let mut all = Vec::new();
    loop {
        match reader.next().await {
            Some(Ok(Read::Event { event, position })) => {
                let id = event.document_id::<i32>()?.expect("a number");
                if id == END {
                    return Ok((all, None));
                }
                all.push((event.operation()?, id, position));
            }
            Some(Ok(Read::Quiet(_))) => {}
            Some(Err(SourceError::Refused(reason))) => return Ok((all, named(reason))),
            other => panic!("{other:?}"),
        }
    }
}

async fn missing(database: Database, image: Image, filter: Filter) -> anyhow::Result<()> {
    let things = things(&database);
    let model = image.model(&things);
    insert(&things, [0, 1]).await?;
    let start = model.global_checkpoint().await?.expect("a present");
    // None of these is kept.
    insert(&things, [2]).await?;
    let set = |n: i32| doc! { "$set": { "n": n } };
    things.update_one(doc! { "_id": 0 }, set(1)).await?;
    things.replace_one(doc! { "_id": 1 }, doc! { "n": 1 }).await?;
    insert(&things, [3]).await?;
    let mut session = database.client().start_session().await?;
    session.start_transaction().await?;
    things.insert_one(doc! { "_id": 4 }).session(&mut session).await?;
    things.update_one(doc! { "_id": 0 }, set(2)).session(&mut session).await?;
    things.insert_one(doc! { "_id": 5 }).session(&mut session).await?;
    things.replace_one(doc! { "_id": 1 }, doc! { "n": 2 }).session(&mut session).await?;
    things.insert_one(doc! { "_id": 6 }).session(&mut session).await?;
    session.commit_transaction().await?;
    // From here on they are.
    let images = doc! { "collMod": "things", "changeStreamPreAndPostImages": { "enabled": true } };
    database.run_command(images).await?;
    things.update_one(doc! { "_id": 0 }, set(3)).await?;
    insert(&things, [END]).await?;

    // What there is, and which of it cannot be had so.
    let usual = ChangeStreamModel::collection(&things).max_await_time(Duration::from_millis(100));
    let (all, none) = read(&usual, &start, &filter).await?;
    assert_eq!(none, None);
    let lacks = |operation: &Operation| match image {
        Image::Before => matches!(operation, Operation::Update | Operation::Replace),
        Image::After => *operation == Operation::Update,
    };
    // The last update is the one whose images are kept.
    let last_update = all.iter().rposition(|(operation, ..)| *operation == Operation::Update);
    let lacking: Vec<bool> =
        all.iter().enumerate().map(|(at, (operation, ..))| lacks(operation) && Some(at) != last_update).collect();
    assert!(lacking.iter().filter(|lacks| **lacks).count() >= 2, "{all:?}");

    // Behind every position, the start too: everything up to the next one that lacks it, and that is named.
    let mut from = vec![start.clone()];
    from.extend(all.iter().map(|(_, _, position)| position.clone()));
    for (at, position) in from.iter().enumerate() {
        let next = (at..all.len()).find(|next| lacking[*next]);
        let (came, named) = read(&model, position, &filter).await?;
        assert_eq!(came, all[at..next.unwrap_or(all.len())], "{image:?} behind {at}: {position}, {all:?}");
        assert_eq!(named, next.map(|next| all[next].2.clone()), "{image:?} behind {at}");
    }
    let first = lacking.iter().position(|lacks| *lacks).expect("one that lacks it");
    let outline = model.outline(&all[first].2).await?.expect("the event");
    assert_eq!((outline.operation()?, outline.document_id()?), (all[first].0.clone(), Some(all[first].1)));

    // As a subscription meets it.
    let (subscriptions, seen) = (to(model, &database), Seen::default());
    let subscription = subscriptions
        .subscribe("images", seen.handler())
        .filter(filter)
        .start_at(mongosub::StartAt::StoredOr(mongosub::Start::After(start)))
        .await?;
    let reason = stalls(&subscription).await;
    assert_eq!(reason, Reason::ImageMissing { position: all[first].2.clone(), image: image.field().to_owned() });
    assert_eq!(seen.positions(), all[..first].iter().map(|(_, _, position)| position.clone()).collect::<Vec<_>>());
    Ok(())
}
