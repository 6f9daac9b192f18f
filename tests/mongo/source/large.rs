//! Events that are larger than a reply: put together again where the server can split them; otherwise named by their own
//! position, and to be stepped over there.

use std::time::Duration;

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Checkpoint, Filter, FullDocument, Operation, Plan, Read, Reader, Reason, SourceError, Start,
    StartAt, SubscriptionModel,
    bson::{Document, doc},
    mongodb::{Collection, Database},
};

use super::{roomy, stalls, to};
use crate::{
    seen::{PATIENCE, Seen, Subscriptions, insert, record, things},
    support::{FailMode, Server, server::code, test, wait_until},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test(
            "an event over 16 MB comes whole where the server splits it, and elsewhere is named by its position",
            |_| whole(),
        ),
        test("a reopen at any position around an event over 16 MB loses nothing and repeats nothing", |_| around()),
        test("a stream that breaks between the fragments of an event loses nothing and repeats nothing", |_| broken()),
        test("a subscription goes on behind an event that cannot be sent, also inside a transaction", |_| {
            stepped_over()
        }),
        test("an event that is too large stalls the subscription behind the good ones before it", |_| too_large()),
        test("a pipeline that leaves the documents out takes a subscription past an event that is too large", |_| {
            past()
        }),
    ]
}

const LARGE: usize = 9_000_000;

fn large(letter: &str) -> String {
    letter.repeat(LARGE)
}

fn looked_up(database: &Database) -> ChangeStreamModel {
    ChangeStreamModel::collection(&things(database))
        .full_document(FullDocument::UpdateLookup)
        .max_await_time(Duration::from_millis(100))
}

/// Asked by opening, as the model does.
async fn splits(database: &Database) -> anyhow::Result<bool> {
    let pipeline = [doc! { "$changeStream": {} }, doc! { "$changeStreamSplitLargeEvent": {} }];
    let command = doc! { "aggregate": 1, "pipeline": pipeline.to_vec(), "cursor": {} };
    match database.run_command(command).await {
        Ok(_) => Ok(true),
        Err(error) if code(&error) == Some(40324) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Documents 0 to 9 are inserted, the third one large, and before the last three its large field is replaced: an event with
/// the field, and the document in which it stands.
async fn written(things: &Collection<Document>) -> anyhow::Result<()> {
    insert(things, 0..2).await?;
    things.insert_one(doc! { "_id": 2, "filler": large("a") }).await?;
    insert(things, 3..7).await?;
    things.update_one(doc! { "_id": 2 }, doc! { "$set": { "filler": large("b") } }).await?;
    insert(things, 7..10).await
}

const IDS: [i32; 11] = [0, 1, 2, 3, 4, 5, 6, 2, 7, 8, 9];

async fn whole() -> anyhow::Result<()> {
    let (_server, database) = roomy().await;
    let (subscriptions, seen) = (to(looked_up(&database), &database), Seen::default());
    let subscription = subscriptions.subscribe("large", seen.handler()).await?;
    // Paused, so that it finds them all at once.
    subscription.pause().await?;
    written(&things(&database)).await?;
    subscription.resume().await?;
    if !splits(&database).await? {
        let reason = stalls(&subscription).await;
        assert_eq!(seen.ids(), IDS[..7]);
        let Reason::EventTooLarge { position } = &reason else { panic!("{reason:?}") };
        let last = seen.positions().pop().expect("the last good one");
        assert!(position.is_beyond(&last), "{position} behind {last}");
        assert!(reason.to_string().contains(&position.to_string()), "{reason}");
        return Ok(());
    }
    seen.sees(9).await;
    subscription.drained().await?;
    assert_eq!(seen.ids(), IDS);
    for delivery in seen.all() {
        assert_eq!(delivery.event.position()?, delivery.position);
        assert_eq!(delivery.event.split_event()?, None);
    }
    let all = seen.all();
    let event = &all[7].event;
    assert_eq!((event.operation()?, event.lookup_missing()?), (Operation::Update, false));
    let document: Document = event.full_document()?.expect("what was looked up");
    let update = event.update_description()?.expect("what was changed");
    assert_eq!((document.get_str("filler")?, update.updated_fields.get_str("filler")?), (&*large("b"), &*large("b")));
    assert_eq!(event.namespace()?.expect("a namespace").collection, "things");
    assert!(event.bytes().len() > 16 << 20);
    let status = subscription.status();
    assert_eq!((status.delivered, status.settled, status.reconnects), (11, 11, 0), "nothing was wrong");
    assert_eq!(status.events, status.filtered + status.delivered);
    // Stopped and begun again, twice as well: nothing is lost or comes twice.
    for id in [10, 11] {
        subscription_again(&subscriptions, &seen, &database, id).await?;
    }
    Ok(())
}

async fn subscription_again(
    subscriptions: &Subscriptions,
    seen: &Seen,
    database: &Database,
    id: i32,
) -> anyhow::Result<()> {
    let running = subscriptions.get("large").expect("it runs");
    running.shutdown().await?;
    let before = seen.ids();
    subscriptions.subscribe("large", seen.handler()).await?;
    insert(&things(database), [id]).await?;
    seen.sees(id).await;
    assert_eq!(seen.ids(), [before, vec![id]].concat());
    Ok(())
}

/// The last document, which is not counted.
const END: i32 = 100;

/// Everything from a position on to the insert of the last document.
async fn read(model: &ChangeStreamModel, from: &Checkpoint) -> anyhow::Result<Vec<(Checkpoint, bool)>> {
    let mut reader = model.open(Some(from), &Plan::default()).await?;
    let mut all = Vec::new();
    while let Some(read) = reader.next().await {
        let read = read?;
        let position = read.position().clone();
        if let Read::Event { event, .. } = read {
            if event.document_id::<i32>()? == Some(END) {
                break;
            }
            all.push((position, true));
        } else {
            all.push((position, false));
        }
    }
    Ok(all)
}

async fn around() -> anyhow::Result<()> {
    let (_server, database) = roomy().await;
    let model = looked_up(&database);
    if !splits(&database).await? {
        return Ok(());
    }
    let start = model.global_checkpoint().await?.expect("a present");
    let things = things(&database);
    // A transaction, in which all events share their time.
    things.insert_one(doc! { "_id": 2, "filler": large("a") }).await?;
    let mut session = database.client().start_session().await?;
    session.start_transaction().await?;
    for id in [0, 1] {
        things.insert_one(doc! { "_id": id }).session(&mut session).await?;
    }
    let replaced = doc! { "$set": { "filler": large("b") } };
    things.update_one(doc! { "_id": 2 }, replaced).session(&mut session).await?;
    things.insert_one(doc! { "_id": 3 }).session(&mut session).await?;
    session.commit_transaction().await?;
    insert(&things, [4]).await?;
    things.update_one(doc! { "_id": 2 }, doc! { "$set": { "filler": large("c") } }).await?;
    insert(&things, [9, END]).await?;

    // Before a large event was met the tokens have another layout than behind it.
    let met = read(&model, &start).await?;
    let events: Vec<_> = met.iter().filter(|(_, event)| *event).map(|(position, _)| position.clone()).collect();
    assert_eq!(events.len(), 8);
    for (at, (position, _)) in met.iter().enumerate() {
        let behind = met[at + 1..].iter().filter(|(_, event)| *event).count();
        let again: Vec<_> = read(&model, position).await?.into_iter().filter(|(_, event)| *event).collect();
        assert_eq!(again.len(), behind, "behind {position}, number {at} of {met:?}");
    }
    // And from one that a stream without the stage gave, at every place.
    let small = ChangeStreamModel::collection(&things).max_await_time(Duration::from_millis(100));
    let plain = read(&small, &start).await?.into_iter().filter(|(_, event)| *event);
    for (at, (position, _)) in plain.enumerate() {
        let again: Vec<_> = read(&model, &position).await?.into_iter().filter(|(_, event)| *event).collect();
        assert_eq!(again.len(), 7 - at, "behind {position}");
    }
    // And by one without it, from every place of the other.
    for (at, position) in events.iter().enumerate() {
        let again: Vec<_> = read(&small, position).await?.into_iter().filter(|(_, event)| *event).collect();
        assert_eq!(again.len(), 7 - at, "behind {position}");
    }
    ended(&things, &model, &small, events.last().expect("one in the newer layout")).await
}

/// The end of the collection, read by a stream that splits events: the next one begins behind it.
async fn ended(
    things: &Collection<Document>,
    splits: &ChangeStreamModel,
    plain: &ChangeStreamModel,
    from: &Checkpoint,
) -> anyhow::Result<()> {
    let uuid = plain.identity().await?.collection_uuid.expect("a UUID");
    things.drop().await?;
    let mut reader = splits.open(Some(from), &Plan::default()).await?;
    let mut end = from.clone();
    while let Some(read) = reader.next().await {
        end = read?.position().clone();
    }
    assert!(end.is_invalidate(), "{end}");
    assert!(plain.ended_since(from, &uuid).await? && plain.ended_since(&end, &uuid).await.is_ok());
    insert(things, [7]).await?;
    for model in [splits, plain] {
        let mut reader = model.open(Some(&end), &Plan::default()).await?;
        let Some(Ok(Read::Event { event, .. })) = reader.next().await else { panic!("the first insert") };
        assert_eq!(event.document_id::<i32>()?, Some(7));
    }
    Ok(())
}

async fn broken() -> anyhow::Result<()> {
    let (server, database) = roomy().await;
    if !splits(&database).await? {
        return Ok(());
    }
    let named = server.client_named("broken").await.database(database.name());
    let (subscriptions, seen) = (to(looked_up(&named), &database), Seen::default());
    let subscription = subscriptions.subscribe("large", seen.handler()).await?;
    let mut ids = Vec::new();
    // The first fragment comes with an open, or with a reply behind it: each reply is the one that breaks. In the first round
    // that is before the stream splits.
    for good in [0, 0, 1, 2, 3] {
        subscription.pause().await?;
        things(&database).delete_many(doc! {}).await?;
        let deleted = if ids.is_empty() { 0 } else { 10 };
        written(&things(&database)).await?;
        let failure = doc! { "failCommands": ["getMore"], "errorCode": 11600 };
        let point = server.fail_command("broken", FailMode::Skip(good), failure).await;
        subscription.resume().await?;
        point.entered(1).await;
        drop(point);
        let expected = ids.len() + deleted + IDS.len();
        seen.counts(expected).await;
        ids = seen.ids();
        assert_eq!(ids.len(), expected, "{good}: {ids:?}");
        assert_eq!(ids[expected - IDS.len()..], IDS);
    }
    subscription.drained().await?;
    assert_eq!(seen.ids().len(), ids.len());
    let status = subscription.status();
    assert_eq!(status.events, status.filtered + status.delivered);
    Ok(())
}

/// One field that does not fit into a reply: no server can split it.
fn unsplittable() -> Filter {
    let both = doc! { "$cond": [{ "$eq": ["$operationType", "update"] }, ["$fullDocument", "$updateDescription"], 0] };
    Filter::pipeline([doc! { "$set": { "both": both } }])
}

/// The first event that cannot be sent, for a reader that begins there.
async fn refusal(model: &ChangeStreamModel, from: &Checkpoint) -> anyhow::Result<(Vec<i32>, Option<Reason>)> {
    let mut reader = match model.open(Some(from), &Plan::new(unsplittable())).await {
        Ok(reader) => reader,
        Err(SourceError::Refused(reason)) => return Ok((Vec::new(), Some(reason))),
        Err(error) => return Err(error.into()),
    };
    let mut ids = Vec::new();
    loop {
        match reader.next().await {
            Some(Ok(Read::Event { event, .. })) => {
                ids.extend(event.document_id::<i32>()?);
                if ids.last() == Some(&9) {
                    return Ok((ids, None));
                }
            }
            Some(Ok(Read::Quiet(_))) => {}
            Some(Err(SourceError::Refused(reason))) => return Ok((ids, Some(reason))),
            other => panic!("{other:?}"),
        }
    }
}

/// How many aggregates have failed.
async fn failures(server: &Server) -> anyhow::Result<i64> {
    let status = server.admin_command(doc! { "serverStatus": 1 }).await?;
    let commands = status.get_document("metrics")?.get_document("commands")?;
    Ok(commands.get_document("aggregate")?.get_i64("failed")?)
}

async fn stepped_over() -> anyhow::Result<()> {
    let (server, database) = roomy().await;
    let model = looked_up(&database);
    let things = things(&database);
    things.insert_one(doc! { "_id": 2, "filler": large("a") }).await?;
    insert(&things, [0]).await?;
    let start = model.head().await?;
    let mut session = database.client().start_session().await?;
    session.start_transaction().await?;
    things.insert_one(doc! { "_id": 3 }).session(&mut session).await?;
    let replaced = doc! { "$set": { "filler": large("b") } };
    things.update_one(doc! { "_id": 2 }, replaced).session(&mut session).await?;
    things.insert_one(doc! { "_id": 4 }).session(&mut session).await?;
    things.insert_one(doc! { "_id": 5 }).session(&mut session).await?;
    session.commit_transaction().await?;
    things.update_one(doc! { "_id": 2 }, doc! { "$set": { "filler": large("c") } }).await?;
    insert(&things, [9]).await?;

    let (ids, reason) = refusal(&model, &start).await?;
    assert_eq!(ids, [0, 3]);
    let Some(Reason::EventTooLarge { position: first }) = reason.clone() else { panic!("{reason:?}") };
    // That a server has no stage to split it is found out once.
    let mut failed = Vec::new();
    for model in [looked_up(&database), model.clone()] {
        let before = failures(&server).await?;
        assert_eq!(refusal(&model, &start).await?, (ids.clone(), reason.clone()));
        failed.push(failures(&server).await? - before);
    }
    let asked = i64::from(!splits(&database).await?);
    assert_eq!(failed[0] - failed[1], asked, "{failed:?}");
    let outline = model.outline(&first).await?.expect("the event");
    assert_eq!((outline.operation()?, outline.document_id::<i32>()?), (Operation::Update, Some(2)));
    assert_eq!(outline.namespace()?.expect("a namespace").collection, "things");
    assert_eq!(outline.cluster_time()?, first.cluster_time().expect("a time"));
    assert_eq!((outline.raw_full_document()?, outline.update_description()?.is_none()), (None, true));
    assert!(model.outline(&start).await?.is_none(), "a time is no event's");

    // Behind it, inside the transaction; and behind the good ones that follow it there.
    let (ids, reason) = refusal(&model, &first).await?;
    assert_eq!(ids, [4, 5], "what follows in the transaction comes");
    let Some(Reason::EventTooLarge { position: second }) = reason else { panic!("{reason:?}") };
    assert!(second.is_beyond(&first));
    let mut reader = model.open(Some(&first), &Plan::new(unsplittable())).await?;
    let Some(Ok(Read::Event { position, .. })) = reader.next().await else { panic!("the fourth") };
    drop(reader);
    let (ids, reason) = refusal(&model, &position).await?;
    assert_eq!((ids, reason), (vec![5], Some(Reason::EventTooLarge { position: second.clone() })));
    // Behind the one that is alone at its time.
    assert_eq!(refusal(&model, &second).await?, (vec![9], None));

    // As a subscription does it: by skipping, in the run that has stalled and where nothing runs.
    let (subscriptions, seen) = (to(model, &database), Seen::default());
    let subscribe = || {
        let action = subscriptions.subscribe("large", seen.handler()).filter(unsplittable());
        action.start_at(StartAt::StoredOr(Start::After(start.clone())))
    };
    let subscription = subscribe().await?;
    assert_eq!(stalls(&subscription).await, Reason::EventTooLarge { position: first.clone() });
    assert_eq!(seen.ids(), [0, 3]);
    subscription.skip(first, "too large").await?;
    seen.sees(5).await;
    wait_until("it stalls again", PATIENCE, || async { subscription.status().state.name() == "stalled" }).await;
    assert_eq!((seen.ids(), subscription.status().skipped), (vec![0, 3, 4, 5], 1));
    subscription.shutdown().await?;
    let refused = subscribe().await.err();
    assert!(refused.is_none_or(|error| error.reason().is_some_and(|reason| reason.name() == "event_too_large")));
    for running in subscriptions.running() {
        running.shutdown().await?;
    }
    subscriptions.skip("large", second, "too large as well").await?;
    subscribe().await?;
    seen.sees(9).await;
    assert_eq!(seen.ids(), [0, 3, 4, 5, 9]);
    let skips = record(&database, "large").await?.expect("a record").skips;
    assert_eq!(skips.iter().map(|skip| &*skip.reason).collect::<Vec<_>>(), ["too large", "too large as well"]);
    Ok(())
}

async fn too_large() -> anyhow::Result<()> {
    let (_server, database) = roomy().await;
    stalled(&database).await?;
    // It holds its place: with a model that asks for less it goes on.
    let small = ChangeStreamModel::collection(&things(&database));
    let (small, rest) = (to(small, &database), Seen::default());
    small.subscribe("large", rest.handler()).await?;
    rest.sees(9).await;
    assert_eq!(rest.ids(), IDS[7..]);
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
    seen.sees(9).await;
    assert_eq!(seen.ids(), IDS[7..]);
    // And then as before.
    subscription.shutdown().await?;
    large.subscribe("large", seen.handler()).await?;
    insert(&things(&database), [15]).await?;
    seen.sees(15).await;
    assert_eq!(seen.ids(), [&IDS[7..], &[15]].concat());
    assert!(seen.all()[4].event.full_document::<Document>()?.is_some());
    Ok(())
}

/// Subscriptions to events with their documents, of which one, `large`, has stalled behind the seventh.
async fn stalled(database: &Database) -> anyhow::Result<Subscriptions> {
    let (large, seen) = (to(looked_up(database), database), Seen::default());
    let subscription = large.subscribe("large", seen.handler()).filter(unsplittable()).await?;
    subscription.pause().await?;
    written(&things(database)).await?;
    subscription.resume().await?;
    let reason = stalls(&subscription).await;
    assert_eq!(seen.ids(), IDS[..7]);
    let last = seen.positions().pop().expect("the last good one");
    let is_behind_it = matches!(&reason, Reason::EventTooLarge { position } if position.is_beyond(&last));
    assert!(is_behind_it, "{reason:?} behind {last}");
    subscription.shutdown().await?;
    Ok(large)
}
