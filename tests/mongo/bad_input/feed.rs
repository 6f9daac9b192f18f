//! A running subscription that meets what it could not know of: odd events, and a storage that is gone for a while.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Delivery, DurableSubscriptions, Filter, Operation, Reason, State, Status,
    bson::{Document, RawDocumentBuf, doc, raw::RawArrayBuf, rawdoc},
    mongodb::Database,
};

use super::plain;
use crate::{
    seen::{Seen, insert, storage, subscriptions, things},
    support::{Context, Options, Server, test, wait_until},
};

pub fn tests() -> Vec<Trial> {
    vec![
        plain("a string that is no UTF-8 is delivered, its decoding names it, and the next event comes", broken_text),
        plain("an operation of a name that nobody knows is kept", unknown_operation),
        test("a storage that is down holds the events back after half a minute, and none is lost", storage_down),
    ]
}

/// How many events are read and not handed out.
fn in_flight(status: &Status) -> u64 {
    status.events - status.filtered - status.delivered
}

/// Inserts a document whose field `text` holds bytes that are no UTF-8.
async fn insert_broken(database: &Database, id: i32) -> anyhow::Result<()> {
    let mut bytes = rawdoc! { "_id": id, "text": "abcd" }.into_bytes();
    let at = bytes.windows(4).position(|window| window == b"abcd").expect("the text");
    bytes[at..at + 4].copy_from_slice(b"a\xFF\xFEd");
    let mut documents = RawArrayBuf::new();
    documents.push(RawDocumentBuf::from_bytes(bytes)?);
    let insert = rawdoc! { "insert": "things", "documents": documents };
    database.run_raw_command(insert).await?;
    Ok(())
}

async fn broken_text(database: Database) -> anyhow::Result<()> {
    let seen = Seen::default();
    let errors = Arc::new(Mutex::new(Vec::new()));
    let (noted, failed) = (seen.clone(), errors.clone());
    let handler = move |delivery: Delivery| {
        if let Err(error) = delivery.event.full_document::<Document>() {
            failed.lock().unwrap().push(error);
        }
        noted.note(delivery);
        async { Ok(()) }
    };
    let subscriptions = subscriptions(&database);
    let subscription = subscriptions.subscribe("broken", handler).await?;
    insert(&things(&database), [1]).await?;
    insert_broken(&database, 2).await?;
    insert(&things(&database), [3]).await?;
    seen.sees(3).await;
    assert_eq!(seen.ids(), [1, 2, 3]);
    let errors = errors.lock().unwrap().clone();
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert_eq!(errors[0].to_string(), "cannot decode \"fullDocument\" of the change event: Invalid UTF-8");
    assert!(seen.is_covered_by(subscription.shutdown().await?.as_ref()));
    Ok(())
}

async fn unknown_operation(database: Database) -> anyhow::Result<()> {
    let seen = Seen::default();
    let subscriptions = subscriptions(&database);
    let filter = Filter::pipeline([doc! { "$set": { "operationType": "frobnicate" } }]);
    subscriptions.subscribe("unknown", seen.handler()).filter(filter).await?;
    insert(&things(&database), [1]).await?;
    seen.sees(1).await;
    assert_eq!(seen.operations(), [Operation::from("frobnicate")]);
    Ok(())
}

async fn storage_down(ctx: Context) -> anyhow::Result<()> {
    let fixture = ctx.plain().await;
    let written = things(&fixture.database);
    let keeper = Server::own(Options::default()).await;
    let model = ChangeStreamModel::collection(&written);
    let subscriptions = DurableSubscriptions::new(model, storage(&keeper.fresh_database().await));
    let seen = Seen::default();
    let subscription = subscriptions.subscribe("held", seen.handler()).await?;
    insert(&written, [0]).await?;
    seen.sees(0).await;
    subscription.drained().await?;
    keeper.kill().await;
    let down = Instant::now();
    let mut next = 1;
    while in_flight(&subscription.status()) == 0 {
        insert(&written, [next]).await?;
        next += 1;
        assert!(down.elapsed() < Duration::from_secs(60), "events are still handed out");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let held = down.elapsed();
    assert!(held > Duration::from_secs(29), "held back after {held:?}");
    let status = subscription.status();
    assert!(matches!(status.state, State::Retrying(Reason::StorageUnavailable { .. })), "{status:?}");
    // Read, and not handed out.
    assert_eq!((in_flight(&status), status.delivered), (1, seen.all().len() as u64));
    insert(&written, [next]).await?;
    keeper.start().await;
    seen.sees(next).await;
    assert_eq!(seen.ids(), (0..=next).collect::<Vec<_>>());
    wait_until("the state says so", Duration::from_secs(30), || async {
        !matches!(subscription.status().state, State::Retrying(_))
    })
    .await;
    assert!(seen.is_covered_by(subscription.shutdown().await?.as_ref()));
    Ok(())
}
