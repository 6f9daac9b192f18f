//! A filter that no longer passes the stored event: because it was changed, or because what it looks up has changed. A
//! subscription goes on exactly behind that event, wherever in a transaction it stands.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Delivery, DurableSubscriptions, Failure, Filter, FullDocument, Kind, Operation, bson::doc,
    mongodb::Database,
};
use tokio::sync::Semaphore;

use crate::{
    seen::{Seen, Subscriptions, record, storage, things},
    support::{Context, test},
};

pub fn tests() -> Vec<Trial> {
    [
        (
            "a changed filter goes on behind a stored event that it does not pass, anywhere in a transaction",
            Then::Changed,
        ),
        ("a filter on looked-up documents goes on behind one that has left it, anywhere in a transaction", Then::Left),
        ("a filter on looked-up documents goes on behind one that is gone, anywhere in a transaction", Then::Gone),
    ]
    .map(|(name, then)| test(name, move |ctx: Context| async move { resumes(ctx.plain().await.database, then).await }))
    .into()
}

/// What becomes of the stored event while nothing runs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    /// The new filter does not pass it.
    Changed,
    /// The document it looks up does not pass the filter any more.
    Left,
    /// The document is deleted.
    Gone,
}

/// How many events of the transaction one is stopped behind; there is one more, that of the document with this number.
const EVENTS: i32 = 6;

/// Handles as many events as there are turns, and then waits; what it waits with is not settled.
fn stopping(seen: &Seen, turns: &Arc<Semaphore>) -> impl FnMut(Delivery) -> Handled + Send + use<> {
    let (seen, turns) = (seen.clone(), turns.clone());
    move |delivery| {
        let (seen, turns) = (seen.clone(), turns.clone());
        async move {
            turns.acquire().await?.forget();
            seen.note(delivery);
            Ok(())
        }
        .boxed()
    }
}

type Handled = futures::future::BoxFuture<'static, Result<(), Failure>>;

async fn resumes(database: Database, then: Then) -> anyhow::Result<()> {
    let things = things(&database);
    let model = ChangeStreamModel::collection(&things)
        .full_document(FullDocument::UpdateLookup)
        .max_await_time(Duration::from_millis(100));
    let subscriptions: Subscriptions =
        DurableSubscriptions::new(model, storage(&database)).shutdown_grace(Duration::ZERO);
    let paid = || Filter::operations([Operation::Update]).and(Filter::field("status").eq("paid"));
    things.insert_many((0..=EVENTS).map(|id| doc! { "_id": id, "status": "open" })).await?;
    // One for each event that it stops behind.
    let mut stopped = Vec::new();
    let turns: Vec<_> =
        (1..=EVENTS).map(|events| Arc::new(Semaphore::new(usize::try_from(events).expect("few")))).collect();
    for (at, turns) in turns.iter().enumerate() {
        let seen = Seen::default();
        let id = format!("{then:?}_{at}");
        let subscription = subscriptions.subscribe(&id, stopping(&seen, turns)).filter(paid()).await?;
        stopped.push((id, subscription, seen));
    }
    let mut session = database.client().start_session().await?;
    session.start_transaction().await?;
    for id in 0..=EVENTS {
        things.update_one(doc! { "_id": id }, doc! { "$set": { "status": "paid" } }).session(&mut session).await?;
    }
    session.commit_transaction().await?;
    for (at, (id, subscription, seen)) in stopped.iter().enumerate() {
        seen.counts(at + 1).await;
        // All of them share one time: it is the place inside the transaction that counts.
        subscription.shutdown().await?;
        let stored = record(&database, id).await?.expect("a record");
        assert_eq!((stored.position, stored.kind), (seen.positions().pop(), Some(Kind::Event)), "{id}");
    }

    for (at, (id, _, seen)) in (0_i32..).zip(&stopped) {
        let only = doc! { "_id": at };
        let filter = match then {
            Then::Changed => Filter::pipeline([doc! { "$match": {
                "operationType": "update", "fullDocument.status": "paid", "documentKey._id": { "$ne": at },
            } }]),
            Then::Left => {
                things.update_one(only, doc! { "$set": { "status": "open" } }).await?;
                paid()
            }
            Then::Gone => {
                things.delete_one(only).await?;
                paid()
            }
        };
        let before = seen.ids();
        let mut expected: Vec<i32> = (at + 1..EVENTS).collect();
        // The last document, in the transaction and once for every time it was set since.
        expected.extend(std::iter::repeat_n(EVENTS, usize::try_from(at)? + 2));
        let subscription = subscriptions.subscribe(id, seen.handler()).filter(filter).await?;
        let end = doc! { "$set": { "status": "paid", "at": at } };
        things.update_one(doc! { "_id": EVENTS }, end).await?;
        seen.counts(before.len() + expected.len()).await;
        subscription.caught_up().await?;
        assert_eq!(seen.ids()[before.len()..], expected, "{then:?} behind {at}");
        let status = subscription.status();
        assert_eq!(status.events, status.filtered + status.delivered, "{then:?} behind {at}: {status:?}");
        let covered = if then == Then::Changed { at } else { 0 };
        assert!(status.filtered >= u64::try_from(covered)?, "{then:?} behind {at}: {status:?}");
        subscription.shutdown().await?;
    }

    Ok(())
}
