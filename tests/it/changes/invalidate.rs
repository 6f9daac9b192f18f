//! The end of a feed, and what comes behind it in the same run.

use mongosub::{BatchLimits, Delivery, Epoch, Kind, OnInvalidate, Reason, State};

use crate::support::{ID, Logs, World, is_running, until, until_reason, until_saved, until_settled};

const SECOND: &str = "2222222222224222A222222222222222";
const THIRD: &str = "3333333333334333A333333333333333";

#[tokio::test(start_paused = true)]
async fn a_run_goes_on_behind_an_invalidate_in_the_next_epoch_with_the_new_collection() {
    let world = World::new();
    let logs = Logs::capture();
    let subscription = world.subscribe().await;
    let before = world.insert(1);
    until_saved(&subscription, &before).await;
    let first = world.record().await.unwrap();
    let end = world.model.invalidate();
    world.model.recreate(SECOND);
    // It came before the run has opened again.
    let after = world.insert(2);
    until_saved(&subscription, &after).await;
    let record = world.record().await.unwrap();
    assert_eq!(world.seen.keys(), [1, -1, 2]);
    assert_eq!(world.model.opened_from().last(), Some(&Some(end.clone())));
    assert_eq!(record.epoch, first.epoch.map(|epoch| Epoch(epoch.0 + 1)));
    assert_eq!(record.source.unwrap().collection_uuid.as_deref(), Some(SECOND));
    let status = subscription.status();
    assert_eq!((status.events, status.delivered, status.settled, status.reconnects), (3, 3, 3, 0));
    let said = logs.lines("WARN", "dropped or renamed");
    assert!(said.len() == 1 && said[0].contains(&end.to_string()), "{said:?}");
}

#[tokio::test(start_paused = true)]
async fn two_quick_drops_are_two_ends_and_nothing_in_between_is_missed() {
    for batches in [false, true] {
        let world = World::new();
        let subscription = if batches {
            let seen = world.seen.clone();
            let handler = move |batch: Vec<Delivery>| {
                for delivery in &batch {
                    seen.note(delivery);
                }
                async { Ok(()) }
            };
            world.subscriptions.subscribe_batches(ID, BatchLimits::new(100), handler).await
        } else {
            world.action().await
        };
        let subscription = subscription.unwrap();
        let epoch = world.record().await.unwrap().epoch.unwrap();
        world.insert(1);
        world.model.invalidate();
        world.model.recreate(SECOND);
        world.insert(2);
        world.model.invalidate();
        world.model.recreate(THIRD);
        world.model.invalidate();
        let last = world.insert(3);
        until_saved(&subscription, &last).await;
        assert_eq!(world.seen.keys(), [1, -1, 2, -1, -1, 3]);
        let record = world.record().await.unwrap();
        assert_eq!((record.epoch, record.kind), (Some(Epoch(epoch.0 + 3)), Some(Kind::Event)));
        assert_eq!(record.source.unwrap().collection_uuid.as_deref(), Some(THIRD));
    }
}

#[tokio::test(start_paused = true)]
async fn a_run_that_ends_on_an_invalidate_stores_it_as_the_end_of_its_epoch() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let epoch = world.record().await.unwrap().epoch;
    let end = world.model.invalidate();
    until_settled(&subscription, 1).await;
    assert_eq!(subscription.shutdown().await.unwrap(), Some(end.clone()));
    let record = world.record().await.unwrap();
    assert_eq!((record.position, record.kind, record.epoch), (Some(end), Some(Kind::Invalidate), epoch));
    // The next run begins the epoch behind it.
    world.model.recreate(SECOND);
    let next = world.restarted();
    let subscription = next.subscribe().await;
    let event = next.insert(2);
    until_saved(&subscription, &event).await;
    assert_eq!(next.record().await.unwrap().epoch, epoch.map(|epoch| Epoch(epoch.0 + 1)));
    assert_eq!(next.seen.keys(), [2]);
}

#[tokio::test(start_paused = true)]
async fn an_invalidate_given_up_at_a_pause_begins_its_epoch_once() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let epoch = world.record().await.unwrap().epoch.unwrap();
    world.model.invalidate();
    until(&subscription, "the invalidate is in hand", |status| status.in_hand_since.is_some()).await;
    subscription.pause().await.unwrap();
    subscription.resume().await.unwrap();
    hold.let_go(10);
    world.model.recreate(SECOND);
    let event = world.insert(2);
    until_saved(&subscription, &event).await;
    assert_eq!(world.record().await.unwrap().epoch, Some(Epoch(epoch.0 + 1)));
    assert_eq!(world.seen.keys(), [-1, -1, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_is_to_stop_at_an_invalidate_does_and_one_behind_it_goes_on() {
    let world = World::new();
    let subscription = world.action().on_invalidate(OnInvalidate::Stop).await.unwrap();
    let end = world.model.invalidate();
    world.insert(2);
    let status = until_reason(&subscription, "stopped", "invalidated").await;
    assert_eq!(status.state, State::Stopped(Reason::Invalidated { position: end }));
    let next = world.restarted();
    let subscription = next.subscribe().await;
    until_settled(&subscription, 1).await;
    assert!(is_running(&subscription.status().state));
    assert_eq!(next.seen.keys(), [2]);
}

#[tokio::test(start_paused = true)]
async fn a_finite_feed_that_ends_behind_an_invalidate_ends() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let end = world.model.invalidate();
    world.model.end();
    until_reason(&subscription, "stopped", "ended").await;
    assert_eq!(world.stored().await, Some(end));
}
