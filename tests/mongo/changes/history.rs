//! The oplog no longer reaches back to the position, really: with `RestartAt` the subscription goes on, and its record keeps
//! the gap. (That it stalls by default, in a run and at a start, is shown in `faults/lost.rs`.)

use libtest_mimic::Trial;
use mongosub::{
    Checkpoint, Kind, OnHistoryLost, Record, Start, Subscription,
    bson::{Document, doc},
    mongodb::Database,
};

use crate::{
    seen::{Seen, insert, record, subscriptions, things},
    support::{Options, Server, test},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("a start behind history that is really lost begins again, and the record keeps the gap", |_| async {
            lost(false).await
        }),
        test("a run behind history that is really lost begins again, and the record keeps the gap", |_| async {
            lost(true).await
        }),
    ]
}

/// The gap is recorded, in this epoch, and shows as it is stored.
async fn assert_gap(database: &Database, before: &Record, subscription: &Subscription) -> anyhow::Result<Checkpoint> {
    let after = record(database, "lost").await?.expect("a record");
    assert!(after.epoch > before.epoch, "{:?} {:?}", after.epoch, before.epoch);
    let [gap] = &after.gaps[..] else { panic!("{:?}", after.gaps) };
    assert_eq!(Some(&gap.from), before.position.as_ref());
    assert!(gap.to.is_beyond(&gap.from) && gap.at > before.saved_at, "{gap:?}");
    let status = subscription.status();
    assert_eq!((status.gaps.len(), status.gaps_recorded), (1, 1));
    assert_eq!((&status.gaps[0].from, &status.gaps[0].to), (&gap.from, &gap.to));
    let raw = database.collection::<Document>("checkpoints").find_one(doc! { "_id": "lost" }).await?.expect("it");
    let stored = raw.get_document("mongosub")?.get_array("gaps")?[0].as_document().expect("a document").clone();
    assert_eq!(stored.get_str("collection")?, "things");
    assert_eq!(stored.get_str("to")?, gap.to.to_string());
    Ok(gap.to.clone())
}

async fn lost(runs: bool) -> anyhow::Result<()> {
    let server = Server::own(Options::small_oplog()).await;
    let database = server.fresh_database().await;
    let written = things(&database);
    let seen = Seen::default();
    let subscriptions = subscriptions(&database).on_history_lost(OnHistoryLost::RestartAt(Start::Earliest));
    let mut subscription = subscriptions.subscribe("lost", seen.handler()).await?;
    insert(&written, 0..3).await?;
    seen.sees(2).await;
    if runs {
        subscription.pause().await?;
    } else {
        subscription.shutdown().await?;
    }
    let before = record(&database, "lost").await?.expect("a record");
    assert_ne!(before.kind, Some(Kind::Start));
    insert(&written, 3..6).await?;
    let hello = server.admin_command(doc! { "hello": 1 }).await?;
    server.roll_oplog_past(hello.get_timestamp("operationTime")?).await;
    insert(&written, 6..9).await?;
    if runs {
        subscription.resume().await?;
    } else {
        subscription = subscriptions.subscribe("lost", seen.handler()).await?;
    }
    seen.sees(8).await;
    assert_eq!(seen.ids(), [0, 1, 2, 6, 7, 8]);
    let to = assert_gap(&database, &before, &subscription).await?;
    let stored = subscription.shutdown().await?;
    assert!(seen.is_covered_by(stored.as_ref()), "{stored:?}");
    println!(
        "changes: history lost {}: 3 of 9 writes in the gap, on from {to}",
        if runs { "in a run" } else { "at a start" }
    );
    Ok(())
}
