//! The oplog is shorter than the way that a subscription lies behind: it stalls with both positions, what was read before
//! is delivered, and nothing behind the gap is.

use std::{sync::Arc, time::Duration};

use futures::TryStreamExt;
use libtest_mimic::Trial;
use mongosub::{
    Checkpoint, Reason, Start, StartAt, State, Subscription, SubscriptionError,
    bson::{Document, doc},
    mongodb::Database,
};
use tokio::sync::Semaphore;

use super::{APP, cursors, held, hit_by_faults, stalls};
use crate::{
    seen::{PATIENCE, Seen, insert, record, stored, subscriptions, things},
    support::{Options, Server, test, wait_until},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test(
            "a slow handler that the oplog overtakes stalls with both positions, behind everything that was read",
            |_| overtaken(),
        ),
        test("a pause longer than the oplog stalls at the resume with both positions, and delivers nothing", |_| {
            paused_too_long()
        }),
    ]
}

/// The last position read, and a later oldest one.
fn assert_lost(reason: &Reason, read: &Checkpoint) {
    let Reason::HistoryLost { position, oldest: Some(oldest) } = reason else { panic!("{reason:?}") };
    // A quiet position may have been read behind the last event.
    assert!(position == read || position.is_beyond(read), "{position} was read, {read} is the last event's");
    assert!(oldest.is_beyond(position), "{oldest} is the oldest, {position} was read");
}

/// A resume changes nothing: what is lost stays lost.
async fn assert_stays_lost(subscription: &Subscription, read: &Checkpoint) {
    let Err(SubscriptionError::Ended { reason, .. }) = subscription.resume().await else { panic!("it goes on") };
    assert_lost(&reason, read);
    assert_lost(&stalls(subscription, "it is still lost").await, read);
}

/// The codes that the server has answered the stream's requests with, in their order: `getmore 136`. It notes them only
/// when it was told to.
async fn refusals(database: &Database) -> anyhow::Result<Vec<String>> {
    let failed = doc! { "appName": APP, "errCode": { "$exists": true } };
    let profile = database.collection::<Document>("system.profile");
    let notes: Vec<Document> = profile.find(failed).sort(doc! { "$natural": 1 }).await?.try_collect().await?;
    notes.iter().map(|note| Ok(format!("{} {}", note.get_str("op")?, note.get_i32("errCode")?))).collect()
}

async fn overtaken() -> anyhow::Result<()> {
    const WRITTEN: i32 = 20;
    let server = Server::own(Options::small_oplog()).await;
    let database = server.fresh_database().await;
    let written = things(&database);
    let (seen, turns) = (Seen::default(), Arc::new(Semaphore::new(0)));
    let subscriptions = hit_by_faults(&server, &database).await;
    let subscription = subscriptions.subscribe("slow", held(&seen, &turns)).await?;
    insert(&written, [0]).await?;
    wait_until("the first is in hand", PATIENCE, || async { subscription.status().in_hand_since.is_some() }).await;
    // More than is read ahead: the cursor comes to rest.
    insert(&written, 1..WRITTEN).await?;
    let time = server.oldest_oplog_time().await;
    server.roll_oplog_past(time).await;
    wait_until("nothing more is read", PATIENCE, || async {
        cursors(&server, &database).await.iter().all(|cursor| cursor.get_str("type").is_ok_and(|it| it == "idleCursor"))
    })
    .await;
    let hello = server.admin_command(doc! { "hello": 1 }).await?;
    server.roll_oplog_past(hello.get_timestamp("operationTime")?).await;
    insert(&written, [WRITTEN]).await?;
    assert_eq!(seen.ids(), [0; 0]);
    assert!(!matches!(subscription.status().state, State::Stalled(_)), "it does not know yet");

    database.run_command(doc! { "profile": 2 }).await?;
    turns.add_permits(1000);
    let reason = stalls(&subscription, "the oplog has overtaken it").await;
    // The cursor was refused, which can heal; what stalls it is the 286 of the opening that follows. (The server notes that
    // one nowhere: it runs in the oplog's own database.)
    assert_eq!(refusals(&database).await?, ["getmore 136"]);
    let ids = seen.ids();
    let delivered = i32::try_from(ids.len())?;
    assert_eq!(ids, (0..delivered).collect::<Vec<_>>());
    assert!(delivered > 1 && delivered < WRITTEN, "{delivered} of {WRITTEN} were read ahead");
    let read = seen.positions().pop().expect("a position");
    assert_lost(&reason, &read);
    assert_stays_lost(&subscription, &read).await;
    let kept = stored(&database, "slow", "everything delivered is stored", |record| {
        record.position.filter(|_| seen.is_covered_by(subscription.status().saved.as_ref()))
    })
    .await;
    assert!(kept == read || kept.is_beyond(&read));
    assert_eq!(seen.ids(), ids, "nothing behind the gap is delivered");
    // Where somebody accepts the gap it goes on.
    subscription.shutdown().await?;
    let again = subscriptions.subscribe("slow", seen.handler()).start_at(StartAt::Always(Start::Earliest)).await?;
    seen.sees(WRITTEN).await;
    again.caught_up().await?;
    assert_eq!(seen.ids()[ids.len()..], [WRITTEN]);
    println!(
        "faults: overtaken by the oplog with {} written: {delivered} read ahead and delivered, then history lost",
        WRITTEN + 1
    );
    Ok(())
}

async fn paused_too_long() -> anyhow::Result<()> {
    let server = Server::own(Options::small_oplog()).await;
    let database = server.fresh_database().await;
    let written = things(&database);
    let (subscriptions, seen) = (subscriptions(&database), Seen::default());
    let subscriptions = subscriptions.save_quiet_position_every(Duration::from_millis(100));
    let subscription = subscriptions.subscribe("paused", seen.handler()).await?;
    insert(&written, 0..3).await?;
    seen.sees(2).await;
    subscription.pause().await?;
    let before = record(&database, "paused").await?;
    let read = seen.positions().pop().expect("a position");
    insert(&written, 3..6).await?;
    let hello = server.admin_command(doc! { "hello": 1 }).await?;
    server.roll_oplog_past(hello.get_timestamp("operationTime")?).await;
    insert(&written, 6..9).await?;
    assert_eq!(subscription.status().state, State::Paused);
    assert_stays_lost(&subscription, &read).await;
    assert_stays_lost(&subscription, &read).await;
    assert_eq!(seen.ids(), [0, 1, 2], "nothing behind the gap is delivered");
    assert_eq!(record(&database, "paused").await?, before, "nothing is stored past the gap");
    // Nor by a new start, which says the same.
    subscription.shutdown().await?;
    let refused = subscriptions.subscribe("paused", seen.handler()).await.err();
    assert_lost(refused.as_ref().and_then(mongosub::SubscribeError::reason).expect("a reason"), &read);
    subscriptions.subscribe("paused", seen.handler()).start_at(StartAt::Always(Start::Earliest)).await?;
    seen.sees(8).await;
    assert_eq!(seen.ids(), [0, 1, 2, 6, 7, 8]);
    println!("faults: a pause longer than the oplog: history lost at 2 resumes and a start, 3 of 9 writes in the gap");
    Ok(())
}
