//! Quiet positions: when they are stored, to the second, and when they are not.

use std::time::Duration;

use mongosub::memory::MemoryModel;
use mongosub::{CheckpointStorage, Claim, Kind, Start, StartAt, State};
use tokio::time::Instant;

use crate::support::{Fault, World, id, is_running, millis, seconds, until_reason, until_saved, until_settled};

/// A quiet read every second, half a second beside the whole ones.
fn quiet_every_second(model: &MemoryModel) {
    let model = model.clone();
    tokio::spawn(async move {
        millis(500).await;
        loop {
            model.push_quiet();
            seconds(1).await;
        }
    });
}

#[tokio::test(start_paused = true)]
async fn reads_without_events_are_stored_once_per_interval_and_the_clock_starts_at_subscribe() {
    let world = World::new();
    seconds(17).await;
    let subscription = world.subscribe().await;
    let begun = Instant::now();
    quiet_every_second(&world.model);
    seconds(200).await;
    assert_eq!(world.storage.sent_ms(begun), [60_000, 120_000, 180_000]);
    assert!(world.storage.sent().iter().all(|save| save.kind == Kind::Quiet && !save.clean));
    assert_eq!(world.record().await.unwrap().kind, Some(Kind::Quiet));
    assert_eq!(subscription.status().saved, world.stored().await);
    // What was stored is the newest at that moment.
    assert_eq!(world.stored().await.unwrap().cluster_time().unwrap().increment, 1 + 180);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_subscription_that_reads_nothing_writes_nothing() {
    let world = World::new();
    let _subscription = world.subscribe().await;
    seconds(3600).await;
    assert!(world.storage.sent().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_quiet_position_that_comes_after_the_interval_is_stored_at_once() {
    let world = World::new();
    let _subscription = world.subscribe().await;
    let begun = Instant::now();
    seconds(100).await;
    let position = world.model.push_quiet();
    millis(1).await;
    assert_eq!(world.storage.sent_ms(begun), [100_000]);
    assert_eq!(world.stored().await, Some(position));
    seconds(10).await;
    world.model.push_quiet();
    seconds(300).await;
    assert_eq!(world.storage.sent_ms(begun), [100_000, 160_000]);
}

#[tokio::test(start_paused = true)]
async fn a_subscription_that_stores_an_event_within_each_interval_gets_no_extra_write() {
    let world = World::new();
    let _subscription = world.subscribe().await;
    quiet_every_second(&world.model);
    for key in 1..=20 {
        seconds(59).await;
        world.insert(key);
    }
    seconds(1).await;
    let sent = world.storage.sent();
    assert_eq!(sent.len(), 20);
    assert!(sent.iter().all(|save| save.kind == Kind::Event));
}

#[tokio::test(start_paused = true)]
async fn the_interval_runs_from_the_sending_of_a_write_and_not_from_its_answer() {
    let world = World::new();
    let _subscription = world.subscribe().await;
    let begun = Instant::now();
    quiet_every_second(&world.model);
    world.storage.next_saves([Fault::Late(Duration::from_secs(20))]);
    seconds(5).await;
    world.insert(1);
    seconds(130).await;
    assert_eq!(world.storage.sent_ms(begun), [5_000, 65_000, 125_000]);
}

#[tokio::test(start_paused = true)]
async fn the_interval_is_a_setting() {
    let world = World::new();
    let _subscription = world.action().save_quiet_position_every(Duration::from_secs(7)).await.unwrap();
    let begun = Instant::now();
    quiet_every_second(&world.model);
    seconds(30).await;
    assert_eq!(world.storage.sent_ms(begun), [7_000, 14_000, 21_000, 28_000]);
}

#[tokio::test(start_paused = true)]
async fn never_means_that_positions_of_events_alone_are_stored_also_at_the_end() {
    let world = World::new();
    let subscription = world.action().never_save_quiet_position().await.unwrap();
    let event = world.insert(1);
    until_saved(&subscription, &event).await;
    quiet_every_second(&world.model);
    seconds(3600).await;
    assert_eq!(world.storage.sent().len(), 1);
    subscription.pause().await.unwrap();
    subscription.resume().await.unwrap();
    assert_eq!(subscription.drained().await.unwrap(), Some(event.clone()));
    assert_eq!(subscription.shutdown().await.unwrap(), Some(event.clone()));
    let record = world.record().await.unwrap();
    assert_eq!((record.position, record.kind, record.clean), (Some(event), Some(Kind::Event), true));
}

#[tokio::test(start_paused = true)]
async fn a_failed_quiet_write_is_tried_again_an_interval_later_and_three_in_a_row_are_shown() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let begun = Instant::now();
    quiet_every_second(&world.model);
    world.storage.every_save(Fault::Fail);
    seconds(179).await;
    assert_eq!(world.storage.sent_ms(begun), [60_000, 120_000]);
    assert!(is_running(&subscription.status().state));
    seconds(2).await;
    assert_eq!(world.storage.sent().len(), 3);
    let State::Retrying(reason) = subscription.status().state else { panic!("{:?}", subscription.status()) };
    assert_eq!(reason.name(), "storage_unavailable");
    world.storage.heal();
    seconds(58).await;
    assert_eq!(world.storage.sent().len(), 3, "not before the interval is over");
    seconds(2).await;
    assert_eq!(world.storage.sent_ms(begun), [60_000, 120_000, 180_000, 240_000]);
    assert!(is_running(&subscription.status().state));
    assert_eq!(subscription.status().saved, world.stored().await);
}

#[tokio::test(start_paused = true)]
async fn failing_quiet_writes_do_not_stop_the_delivery() {
    let world = World::new();
    let _subscription = world.action().save_every(1000).await.unwrap();
    world.storage.every_save(Fault::Fail);
    for key in 1..=300 {
        world.insert(key);
        seconds(1).await;
    }
    assert_eq!(world.seen.keys(), (1..=300).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn no_quiet_position_is_stored_while_an_event_before_it_is_unsettled() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let start = world.stored().await;
    world.insert(1);
    let mut quiet = world.model.push_quiet();
    for _ in 0..9 {
        quiet = world.model.push_quiet();
    }
    seconds(600).await;
    assert!(world.storage.sent().is_empty());
    assert_eq!(world.stored().await, start);
    hold.let_go(1);
    until_saved(&subscription, &quiet).await;
}

#[tokio::test(start_paused = true)]
async fn no_quiet_position_is_stored_past_an_event_that_fails() {
    let world = World::new();
    let handler = world.seen.then(|_| async { Err("no".into()) });
    let _subscription = world.subscriptions.subscribe(crate::support::ID, handler).await.unwrap();
    let before = world.model.push_quiet();
    seconds(1).await;
    world.insert(1);
    quiet_every_second(&world.model);
    seconds(600).await;
    assert_eq!(world.stored().await, Some(before));
    assert_eq!(world.storage.sent().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn nothing_quiet_is_written_while_paused() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let quiet = world.model.push_quiet();
    millis(10).await;
    subscription.pause().await.unwrap();
    assert_eq!(world.stored().await, Some(quiet), "the pause itself stores it");
    quiet_every_second(&world.model);
    let sent = world.storage.sent().len();
    seconds(600).await;
    assert_eq!(world.storage.sent().len(), sent);
    subscription.resume().await.unwrap();
    seconds(2).await;
    assert_eq!(world.storage.sent().len(), sent + 1, "the interval has long passed");
}

#[tokio::test(start_paused = true)]
async fn a_superseded_run_stores_no_quiet_position() {
    let world = World::new();
    let subscription = world.subscribe().await;
    quiet_every_second(&world.model);
    seconds(58).await;
    let before = world.stored().await;
    world.storage.inner().claim(&Claim::new(id())).await.unwrap();
    until_reason(&subscription, "stopped", "superseded").await;
    seconds(600).await;
    assert_eq!(world.stored().await, before);
    assert!(world.storage.sent().len() <= 1, "at most the write that told it");
}

#[tokio::test(start_paused = true)]
async fn a_quiet_position_that_replaces_a_failing_event_save_stays_one_and_is_retried_soon() {
    let world = World::new();
    let subscription = world.action().save_quiet_position_every(Duration::from_secs(20)).await.unwrap();
    let begun = Instant::now();
    quiet_every_second(&world.model);
    world.storage.next_saves([Fault::FailLate(Duration::from_secs(25)), Fault::Fail, Fault::Fail]);
    world.insert(1);
    seconds(24).await;
    assert_eq!(world.storage.sent().len(), 1);
    seconds(2).await;
    let sent = world.storage.sent();
    assert_eq!(sent.len(), 4, "at the save backoff, not an interval later: {:?}", world.storage.sent_ms(begun));
    assert_eq!(sent[0].kind, Kind::Event);
    assert_eq!(sent[1].kind, Kind::Quiet, "the newest, since the interval had passed");
    assert!(is_running(&subscription.status().state));
}

#[tokio::test(start_paused = true)]
async fn with_a_start_of_ones_own_nothing_quiet_is_stored_before_the_policy_has_stored_an_event() {
    let world = World::new();
    let action = world.action().start_at(StartAt::Always(Start::Present)).save_every(2);
    let subscription = action.await.unwrap();
    quiet_every_second(&world.model);
    seconds(300).await;
    world.insert(1);
    until_settled(&subscription, 1).await;
    seconds(300).await;
    assert!(world.storage.sent().is_empty());
    assert_eq!(world.stored().await, None);
    let second = world.insert(2);
    until_saved(&subscription, &second).await;
    seconds(61).await;
    assert_eq!(world.record().await.unwrap().kind, Some(Kind::Quiet));
}
