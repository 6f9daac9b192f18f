//! Where a subscription starts on a real server, and that a change of its filter costs it nothing.

use libtest_mimic::Trial;
use mongosub::{
    Checkpoint, Filter, Operation, Reason, Start, StartAt, SubscribeError,
    bson::{Timestamp, doc},
};

use super::plain;
use crate::{
    seen::{Seen, insert, record, subscriptions, things},
    support::{Fixture, Options, Server, test},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("a subscription that starts at the earliest reads everything the oplog still has", |_| earliest()),
        plain("a subscription that starts at a time reads that time's changes and the later ones", at_a_time),
        plain("a subscription that starts behind a position reads the changes behind it", behind),
        plain("a start in the future is refused", in_the_future),
        plain("a subscription with another filter goes on exactly where it was", another_filter),
        plain("transactions come whole and in order, across restarts in the middle of them", transactions),
    ]
}

async fn earliest() -> anyhow::Result<()> {
    let server = Server::own(Options::small_oplog()).await;
    let database = server.fresh_database().await;
    let written = things(&database);
    insert(&written, [0]).await?;
    let (early, seen) = (subscriptions(&database), Seen::default());
    early.subscribe("all", seen.handler()).start_at(StartAt::StoredOr(Start::Earliest)).await?;
    seen.sees(0).await;
    assert_eq!(seen.ids(), [0], "an oplog that has lost nothing");
    let time = seen.all()[0].event.cluster_time()?;
    early.shutdown_all().await;
    server.roll_oplog_past(time).await;
    insert(&written, [1]).await?;
    let seen = Seen::default();
    early.subscribe("rest", seen.handler()).start_at(StartAt::StoredOr(Start::Earliest)).await?;
    seen.sees(1).await;
    assert_eq!(seen.ids(), [1], "an oplog that has lost the first");
    let lost = early.subscribe("lost", seen.handler()).start_at(StartAt::StoredOr(Start::Time(time))).await.err();
    let reason = lost.as_ref().and_then(SubscribeError::reason);
    let named = matches!(reason, Some(Reason::HistoryLost { position, oldest: Some(_) }) if *position == Checkpoint::Time(time));
    assert!(named, "{lost:?}");
    assert_eq!(record(&database, "lost").await?, None);
    Ok(())
}

async fn at_a_time(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    let written = things(&database);
    let (first, seen) = (subscriptions(&database), Seen::default());
    first.subscribe("first", seen.handler()).await?;
    insert(&written, 0..4).await?;
    seen.sees(3).await;
    let time = seen.all()[2].event.cluster_time()?;
    let again = Seen::default();
    first.subscribe("again", again.handler()).start_at(StartAt::StoredOr(Start::Time(time))).await?;
    again.sees(3).await;
    assert_eq!(again.ids(), [2, 3]);
    Ok(())
}

async fn behind(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    let written = things(&database);
    let (first, seen) = (subscriptions(&database), Seen::default());
    first.subscribe("first", seen.handler()).await?;
    insert(&written, 0..4).await?;
    seen.sees(3).await;
    let again = Seen::default();
    let position = seen.positions()[1].clone();
    first.subscribe("again", again.handler()).start_at(StartAt::Always(Start::After(position))).await?;
    again.sees(3).await;
    assert_eq!(again.ids(), [2, 3]);
    Ok(())
}

async fn in_the_future(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    let future = Timestamp { time: u32::MAX - 1, increment: 1 };
    let (subscriptions, seen) = (subscriptions(&database), Seen::default());
    let start = StartAt::StoredOr(Start::Time(future));
    let refused = subscriptions.subscribe("future", seen.handler()).start_at(start).await.err();
    let reason = refused.as_ref().and_then(SubscribeError::reason);
    assert!(matches!(reason, Some(Reason::BadPosition { .. })), "{refused:?}");
    assert_eq!(record(&database, "future").await?, None);
    Ok(())
}

async fn another_filter(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    let written = things(&database);
    let (subscriptions, seen) = (subscriptions(&database), Seen::default());
    let inserts = Filter::operations([Operation::Insert]);
    let deletes = Filter::operations([Operation::Delete]);
    let subscription = subscriptions.subscribe("filter", seen.handler()).filter(inserts).await?;
    insert(&written, 0..3).await?;
    seen.sees(2).await;
    subscription.shutdown().await?;
    // Neither passes this one's token, nor does the next.
    written.delete_one(doc! { "_id": 0 }).await?;
    insert(&written, [3]).await?;
    let subscription = subscriptions.subscribe("filter", seen.handler()).filter(deletes).await?;
    written.delete_one(doc! { "_id": 1 }).await?;
    seen.counts(5).await;
    subscription.shutdown().await?;
    insert(&written, [4]).await?;
    subscriptions.subscribe("filter", seen.handler()).await?;
    seen.sees(4).await;
    assert_eq!(seen.ids(), [0, 1, 2, 0, 1, 4]);
    Ok(())
}

async fn transactions(Fixture { database, client, .. }: Fixture) -> anyhow::Result<()> {
    let written = things(&database);
    database.create_collection("things").await?;
    let mut session = client.start_session().await?;
    let (subscriptions, seen) = (subscriptions(&database), Seen::default());
    subscriptions.subscribe("transactions", seen.handler()).await?;
    for transaction in 0..3 {
        session.start_transaction().await?;
        for id in 0..5 {
            written.insert_one(doc! { "_id": 10 * transaction + id }).session(&mut session).await?;
        }
        session.commit_transaction().await?;
    }
    seen.sees(24).await;
    let all = seen.ids();
    assert_eq!(all, (0..3).flat_map(|transaction| (0..5).map(move |id| 10 * transaction + id)).collect::<Vec<_>>());
    let times: Vec<_> = seen.all().iter().map(|delivery| delivery.event.cluster_time()).collect::<Result<_, _>>()?;
    assert_eq!((times[0], times[5]), (times[4], times[9]), "the events of a transaction share their time");
    for (at, position) in seen.positions().into_iter().enumerate() {
        let rest = Seen::default();
        let start = StartAt::Always(Start::After(position));
        let subscription = subscriptions.subscribe(format!("from_{at}"), rest.handler()).start_at(start).await?;
        if at + 1 < all.len() {
            rest.sees(24).await;
        } else {
            subscription.caught_up().await?;
        }
        assert_eq!(rest.ids(), all[at + 1..], "behind event {at}");
        subscription.cancel().await?;
    }
    Ok(())
}
