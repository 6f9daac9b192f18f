//! A source that breaks, reopens, refuses or ends; and who waits to have caught up or drained meanwhile.

use std::time::Duration;

use mongosub::bson::Timestamp;
use mongosub::{Checkpoint, OnInvalidate, Reason, SourceError, State, Subscription, SubscriptionError};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::support::{
    Fault, World, is_running, millis, seconds, until, until_reason, until_saved, until_seen, until_settled,
};

fn down() -> SourceError {
    SourceError::Unavailable { message: "no primary".into() }
}

fn lost(position: &Checkpoint) -> SourceError {
    SourceError::Refused(Reason::HistoryLost { position: position.clone(), oldest: None })
}

fn caught_up(subscription: &Subscription) -> JoinHandle<Result<(), SubscriptionError>> {
    let subscription = subscription.clone();
    tokio::spawn(async move { subscription.caught_up().await })
}

fn drained(subscription: &Subscription) -> JoinHandle<Result<Option<Checkpoint>, SubscriptionError>> {
    let subscription = subscription.clone();
    tokio::spawn(async move { subscription.drained().await })
}

#[tokio::test(start_paused = true)]
async fn what_the_source_refuses_stalls_the_run_behind_everything_read_before() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let first = world.insert(1);
    world.model.break_reader(lost(&first));
    world.insert(2);
    until_seen(&world, 1).await;
    seconds(100).await;
    assert!(is_running(&subscription.status().state), "the error waits behind the event");
    hold.let_go(1);
    let status = until_reason(&subscription, "stalled", "history_lost").await;
    assert_eq!(status.state.reason().unwrap().exit_code(), 3);
    until_saved(&subscription, &first).await;
    seconds(600).await;
    assert_eq!((world.seen.keys(), world.model.active_readers(), world.model.opens()), (vec![1], 0, 1));
    hold.let_go(1);
    subscription.resume().await.unwrap();
    until_settled(&subscription, 2).await;
    assert_eq!((world.seen.keys(), world.model.opened_from()[1].clone()), (vec![1, 2], Some(first)));
}

#[tokio::test(start_paused = true)]
async fn a_resume_that_is_refused_stalls_again_and_says_why() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let first = world.insert(1);
    until_saved(&subscription, &first).await;
    world.model.break_reader(lost(&first));
    until_reason(&subscription, "stalled", "history_lost").await;
    world.model.fail_next_open(lost(&first));
    let error = subscription.resume().await.unwrap_err();
    assert!(matches!(error, SubscriptionError::Ended { reason: Reason::HistoryLost { .. }, .. }), "{error:?}");
    assert!(matches!(subscription.status().state, State::Stalled(Reason::HistoryLost { .. })));
    subscription.resume().await.unwrap();
    assert!(is_running(&subscription.status().state));
}

#[tokio::test(start_paused = true)]
async fn what_can_heal_is_opened_again_from_the_last_settled_position() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let first = world.insert(1);
    world.model.break_reader(down());
    world.model.fail_opens(down(), 5);
    let last = world.insert(2);
    until_reason(&subscription, "retrying", "source_unavailable").await;
    until_saved(&subscription, &last).await;
    assert_eq!(world.seen.keys(), [1, 2]);
    assert!(world.seen.all().iter().all(|seen| !seen.may_be_repeat));
    let status = until(&subscription, "running", |status| is_running(&status.state)).await;
    assert_eq!(status.reconnects, 1);
    let opened_from = world.model.opened_from();
    assert_eq!(opened_from.len(), 7);
    assert!(opened_from[1..].iter().all(|from| from.as_ref() == Some(&first)));
}

#[tokio::test(start_paused = true)]
async fn a_source_whose_readers_break_at_once_is_not_asked_without_a_pause() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let model = world.model.clone();
    let breaking = tokio::spawn(async move {
        loop {
            model.break_reader(down());
            millis(5).await;
        }
    });
    seconds(120).await;
    let opens = world.model.opens();
    assert!((15..100).contains(&opens), "{opens} opens in two minutes");
    breaking.abort();
    let last = world.insert(1);
    until_saved(&subscription, &last).await;
}

#[tokio::test(start_paused = true)]
async fn a_missing_privilege_is_asked_for_slowly() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let denied = SourceError::Unauthorized { action: "changeStream".into(), resource: "app.orders".into() };
    world.model.break_reader(denied.clone());
    world.model.fail_opens(denied, 5);
    until_reason(&subscription, "retrying", "unauthorized").await;
    let begun = Instant::now();
    let last = world.insert(1);
    until_saved(&subscription, &last).await;
    assert_eq!(begun.elapsed().as_secs(), 60);
    assert!(is_running(&subscription.status().state));
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_reopens_shows_at_once_and_its_reconnects_are_counted_over_all_readers() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let reason = Reason::SourceUnavailable { message: "election".into() };
    for round in 1..=3 {
        world.model.set_reopening(Some(reason.clone()));
        let status = until_reason(&subscription, "retrying", "source_unavailable").await;
        assert_eq!(status.state, State::Retrying(reason.clone()));
        world.model.set_reopening(None);
        let status = until(&subscription, "running", |status| is_running(&status.state)).await;
        assert_eq!(status.reconnects, round);
        // The next round has another reader.
        subscription.pause().await.unwrap();
        subscription.resume().await.unwrap();
    }
    let last = world.insert(1);
    until_saved(&subscription, &last).await;
}

#[tokio::test(start_paused = true)]
async fn a_handler_at_work_does_not_hide_that_the_source_is_reopening() {
    let world = World::new();
    let (subscription, _hold) = world.subscribe_held().await;
    world.insert(1);
    until_seen(&world, 1).await;
    world.model.set_reopening(Some(Reason::SourceUnavailable { message: "election".into() }));
    until_reason(&subscription, "retrying", "source_unavailable").await;
}

#[tokio::test(start_paused = true)]
async fn a_finite_feed_ends_with_everything_stored() {
    let world = World::new();
    let subscription = world.action().save_every(100).await.unwrap();
    let last = world.inserts(1..=5).pop().unwrap();
    world.model.end();
    let status = until_reason(&subscription, "stopped", "ended").await;
    assert_eq!((status.settled, status.state.reason().unwrap().exit_code()), (5, 0));
    let record = world.record().await.unwrap();
    assert_eq!((record.position, record.clean), (Some(last), true));
    assert!(world.subscriptions.get(crate::support::ID).is_none());
}

#[tokio::test(start_paused = true)]
async fn an_invalidate_stops_a_run_that_is_to_stop_and_the_next_reads_what_came_before_it_started() {
    let world = World::new();
    let subscription = world.action().on_invalidate(OnInvalidate::Stop).await.unwrap();
    world.insert(1);
    let end = world.model.invalidate();
    world.insert(2);
    let status = until_reason(&subscription, "stopped", "invalidated").await;
    assert_eq!(status.state.reason().unwrap().exit_code(), 3);
    assert_eq!((world.seen.all().len(), world.stored().await), (2, Some(end)));
    let next = world.restarted();
    let subscription = next.subscribe().await;
    until_settled(&subscription, 1).await;
    assert_eq!(next.seen.keys(), [2]);
}

// Caught up.

#[tokio::test(start_paused = true)]
async fn having_caught_up_is_not_delayed_by_later_writes() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    for key in 1..=3 {
        world.insert(key);
    }
    let waiting = caught_up(&subscription);
    millis(1).await;
    for key in 4..=1000 {
        world.insert(key);
    }
    hold.let_go(2);
    until_settled(&subscription, 2).await;
    millis(1).await;
    assert!(!waiting.is_finished());
    // Events of the head's own time may still come, until one of a later time is read.
    hold.let_go(2);
    waiting.await.unwrap().unwrap();
    assert!(subscription.status().settled <= 4);
}

#[tokio::test(start_paused = true)]
async fn having_caught_up_means_every_event_of_a_transaction_at_the_head() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let events = (1..=3).map(|key| mongosub::memory::insert(key, mongosub::bson::doc! {}));
    let at = world.model.push_transaction(events);
    assert_eq!(at[0].cluster_time(), at[2].cluster_time());
    let waiting = caught_up(&subscription);
    for settled in 1..=2 {
        hold.let_go(1);
        until_settled(&subscription, settled).await;
        seconds(20).await;
        assert!(!waiting.is_finished(), "{settled} settled");
    }
    hold.let_go(1);
    waiting.await.unwrap().unwrap();
    assert_eq!(subscription.status().settled, 3);
}

#[tokio::test(start_paused = true)]
async fn having_caught_up_is_answered_at_once_when_nothing_is_outstanding() {
    let world = World::new();
    let subscription = world.subscribe().await;
    subscription.caught_up().await.unwrap();
    let last = world.insert(1);
    until_saved(&subscription, &last).await;
    subscription.caught_up().await.unwrap();
    subscription.shutdown().await.unwrap();
    let next = world.restarted();
    let subscription = next.subscribe().await;
    subscription.caught_up().await.unwrap();
    assert!(next.seen.keys().is_empty());
}

#[tokio::test(start_paused = true)]
async fn having_caught_up_by_a_quiet_position_counts() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.model.set_head(Timestamp { time: 1_700_000_050, increment: 1 });
    let waiting = caught_up(&subscription);
    seconds(60).await;
    assert!(!waiting.is_finished());
    world.model.push_quiet_at(Timestamp { time: 1_700_000_050, increment: 2 });
    waiting.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn who_waits_to_have_caught_up_waits_while_the_run_retries_and_rests() {
    let world = World::new();
    let subscription = world.subscribe().await;
    subscription.pause().await.unwrap();
    world.insert(1);
    world.model.fail_heads(down(), 3);
    let waiting = caught_up(&subscription);
    seconds(10).await;
    assert!(!waiting.is_finished(), "paused");
    world.model.fail_opens(down(), 5);
    let resume = tokio::spawn({
        let subscription = subscription.clone();
        async move { subscription.resume().await }
    });
    until_reason(&subscription, "retrying", "source_unavailable").await;
    assert!(!waiting.is_finished(), "retrying");
    resume.await.unwrap().unwrap();
    waiting.await.unwrap().unwrap();
    assert_eq!(world.seen.keys(), [1]);
}

#[tokio::test(start_paused = true)]
async fn who_waits_is_told_why_when_the_run_stops() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let first = world.insert(1);
    world.insert(2);
    until_seen(&world, 1).await;
    let waiting = (caught_up(&subscription), drained(&subscription));
    millis(1).await;
    let stopping = subscription.clone();
    let shutdown = tokio::spawn(async move { stopping.shutdown().await });
    millis(1).await;
    hold.let_go(1);
    shutdown.await.unwrap().unwrap();
    let error = SubscriptionError::Ended { id: crate::support::id(), reason: Reason::Requested };
    assert_eq!(waiting.0.await.unwrap().unwrap_err(), error);
    // What was read when it was asked was settled and stored by the shutdown.
    assert_eq!(waiting.1.await.unwrap().unwrap(), Some(first));
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_what_a_stall_cuts_off_is_told_why() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let first = world.insert(1);
    until_saved(&subscription, &first).await;
    world.model.set_head(Timestamp { time: 1_700_000_900, increment: 1 });
    let waiting = caught_up(&subscription);
    seconds(1).await;
    world.model.break_reader(lost(&first));
    let error = waiting.await.unwrap().unwrap_err();
    assert!(matches!(error, SubscriptionError::Ended { reason: Reason::HistoryLost { .. }, .. }), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_head_that_is_refused_is_the_answer_of_who_asked() {
    let world = World::new();
    let subscription = world.subscribe().await;
    seconds(1).await;
    world.model.fail_heads(SourceError::Unauthorized { action: "hello".into(), resource: "cluster".into() }, 1);
    assert!(matches!(subscription.caught_up().await, Err(SubscriptionError::Source { .. })));
    subscription.caught_up().await.unwrap();
}

// Drained.

#[tokio::test(start_paused = true)]
async fn drained_comes_back_under_a_flow_that_never_ends() {
    let world = World::new();
    let handler = world.seen.then(|_| async {
        millis(3).await;
        Ok(())
    });
    let subscription = world.subscriptions.subscribe(crate::support::ID, handler).save_every(1000).await.unwrap();
    let model = world.model.clone();
    let flow = tokio::spawn(async move {
        for key in 0.. {
            model.push(mongosub::memory::insert(key, mongosub::bson::doc! {}));
            millis(2).await;
        }
    });
    until_settled(&subscription, 10).await;
    for _ in 0..20 {
        let begun = Instant::now();
        let settled = subscription.status().settled;
        let stored = subscription.drained().await.unwrap().unwrap();
        assert!(begun.elapsed() < Duration::from_millis(100));
        let upto = usize::try_from(settled).unwrap();
        assert!(!world.seen.all()[upto - 1].position.is_beyond(&stored));
        assert_eq!(world.stored().await, Some(stored));
    }
    flow.abort();
}

#[tokio::test(start_paused = true)]
async fn drained_waits_for_a_storage_that_fails() {
    let world = World::new();
    let subscription = world.action().save_every(10).await.unwrap();
    let first = world.insert(1);
    until_settled(&subscription, 1).await;
    world.storage.every_save(Fault::Fail);
    let waiting = drained(&subscription);
    seconds(120).await;
    assert!(!waiting.is_finished());
    world.storage.heal();
    assert_eq!(waiting.await.unwrap().unwrap(), Some(first));
}

#[tokio::test(start_paused = true)]
async fn drained_with_nothing_read_answers_what_is_stored() {
    let world = World::new();
    let subscription = world.subscribe().await;
    assert_eq!(subscription.drained().await.unwrap(), world.stored().await);
    assert!(world.storage.sent().is_empty());
    subscription.pause().await.unwrap();
    assert_eq!(subscription.drained().await.unwrap(), world.stored().await);
}

#[tokio::test(start_paused = true)]
async fn drained_waits_for_an_event_that_a_pause_abandoned() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let first = world.insert(1);
    until_seen(&world, 1).await;
    let waiting = drained(&subscription);
    millis(1).await;
    subscription.pause().await.unwrap();
    seconds(10).await;
    assert!(!waiting.is_finished(), "it was read, and it is not settled");
    // Nothing is read and unsettled now, as far as a new question goes.
    assert_eq!(subscription.drained().await.unwrap(), world.stored().await);
    hold.let_go(1);
    subscription.resume().await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap(), Some(first));
}
