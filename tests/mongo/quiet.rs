//! A subscription that nothing happens to, on a deployment where much happens: its place in the oplog moves on with it.

use std::time::Duration;

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Checkpoint, DurableSubscriptions, Kind, Plan, Reason, SourceError, Start, StartAt,
    SubscribeError, SubscriptionModel,
};

use crate::{
    seen::{Seen, insert, record, storage, stored, subscriptions, things},
    support::{Options, Server, test},
};

pub fn tests() -> Vec<Trial> {
    vec![test("a quiet position outlives the last event in the oplog, and the event's own token does not", |_| async {
        quiet_position_outlives_the_last_event().await
    })]
}

async fn quiet_position_outlives_the_last_event() -> anyhow::Result<()> {
    // Positions are lost here: not on a server that others use.
    let server = Server::own(Options::small_oplog()).await;
    let database = server.fresh_database().await;
    let written = things(&database);
    let model = ChangeStreamModel::collection(&written).max_await_time(Duration::from_millis(100));
    let quiet = DurableSubscriptions::new(model.clone(), storage(&database))
        .save_quiet_position_every(Duration::from_millis(100));
    let never = subscriptions(&database).never_save_quiet_position();
    let (seen, seen_by_never) = (Seen::default(), Seen::default());
    let subscription = quiet.subscribe("quiet", seen.handler()).await?;
    never.subscribe("never", seen_by_never.handler()).await?;
    insert(&written, [1]).await?;
    seen.sees(1).await;
    seen_by_never.sees(1).await;
    let last = seen.positions()[0].clone();
    let time = seen.all()[0].event.cluster_time()?;
    stored(&database, "never", "the event is stored", |record| (record.position.as_ref() == Some(&last)).then_some(()))
        .await;
    never.shutdown_all().await;
    let unmoved = record(&database, "never").await?.and_then(|record| record.position);
    assert_eq!(unmoved, Some(last.clone()), "without quiet positions the event's is the last one");

    server.roll_oplog_past(time).await;
    let oldest = server.oldest_oplog_time().await;
    let position = stored(&database, "quiet", "a quiet position that the oplog still has is stored", |record| {
        let position = record.position.filter(|_| record.kind == Some(Kind::Quiet))?;
        position.cluster_time().is_some_and(|time| time > oldest).then_some(position)
    })
    .await;
    assert!(position.is_beyond(&last));
    assert_eq!((seen.ids(), subscription.status().saves > 1), (vec![1], true));
    subscription.shutdown().await?;
    insert(&written, [2]).await?;
    quiet.subscribe("quiet", seen.handler()).await?;
    seen.sees(2).await;
    assert_eq!(seen.ids(), [1, 2], "nothing is lost, nothing comes twice");

    // The event's own token is lost: to the model, to the subscription that stored it, and as a start.
    let error = model.open(Some(&last), &Plan::default()).await.err();
    assert!(matches!(&error, Some(SourceError::Refused(reason)) if is_lost(reason, &last)), "{error:?}");
    let before = record(&database, "never").await?;
    for action in [
        never.subscribe("never", seen_by_never.handler()),
        never.subscribe("new", seen_by_never.handler()).start_at(StartAt::StoredOr(Start::After(last.clone()))),
    ] {
        let refused = action.await.err();
        let is_refused = matches!(&refused, Some(SubscribeError::Refused { reason, .. }) if is_lost(reason, &last));
        assert!(is_refused, "{refused:?}");
    }
    assert_eq!(record(&database, "never").await?, before, "the record and its owner are untouched");
    assert_eq!(record(&database, "new").await?, None);
    assert!(never.running().is_empty());
    assert_eq!(seen_by_never.ids(), [1]);
    Ok(())
}

/// Lost, with the position and a later oldest one named.
fn is_lost(reason: &Reason, at: &Checkpoint) -> bool {
    matches!(reason, Reason::HistoryLost { position, oldest: Some(oldest) } if position == at && oldest.is_beyond(at))
}
