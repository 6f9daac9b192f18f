//! Deliveries pulled out of a stream: the same subscription in another shape.

use std::time::Duration;

use futures::{FutureExt, StreamExt};
use mongosub::{Failure, OnFailure, State, Then};
use tokio::time::Instant;

use crate::support::{ID, World, millis, seconds, until, until_reason, until_settled};

#[tokio::test(start_paused = true)]
async fn one_delivery_is_out_at_a_time_and_the_next_comes_when_it_is_settled() {
    let world = World::new();
    let mut deliveries = world.subscriptions.stream(ID).await.unwrap();
    let at = world.inserts(1..=3);
    for position in &at {
        let pulled = deliveries.next().await.unwrap();
        assert_eq!((&pulled.position, pulled.attempt), (position, 1));
        seconds(5).await;
        assert!(deliveries.next().now_or_never().is_none());
        assert_ne!(world.stored().await.as_ref(), Some(position));
        pulled.settle();
    }
    until_settled(deliveries.subscription(), 3).await;
    assert_eq!(deliveries.subscription().shutdown().await.unwrap().as_ref(), Some(&at[2]));
    assert!(deliveries.next().await.is_none(), "it ends with its subscription");
    assert!(world.record().await.unwrap().clean);
}

#[tokio::test(start_paused = true)]
async fn a_failed_one_and_a_dropped_one_come_again_as_further_attempts() {
    let world = World::new();
    let mut deliveries = world.subscriptions.stream(ID).await.unwrap();
    world.inserts(1..=2);
    deliveries.next().await.unwrap().fail("not now");
    until_reason(deliveries.subscription(), "retrying", "handler_failing").await;
    let again = deliveries.next().await.unwrap();
    assert_eq!((again.attempt, again.may_be_repeat), (2, true));
    drop(again);
    let again = deliveries.next().await.unwrap();
    assert_eq!(again.attempt, 3);
    let reason = deliveries.subscription().status().state.reason().unwrap().to_string();
    assert!(reason.contains("dropped without having been settled"), "{reason}");
    again.settle();
    let second = deliveries.next().await.unwrap();
    assert_eq!((second.event.document_id::<i32>().unwrap(), second.attempt), (Some(2), 1));
}

#[tokio::test(start_paused = true)]
async fn the_failure_policy_and_verdicts_hold_for_what_is_pulled() {
    let world = World::new();
    let policy = OnFailure::retry(1).then(Then::Skip);
    let mut deliveries = world.subscriptions.stream(ID).on_failure(policy).await.unwrap();
    world.inserts(1..=3);
    drop(deliveries.next().await.unwrap());
    drop(deliveries.next().await.unwrap());
    let second = deliveries.next().await.unwrap();
    assert_eq!(second.event.document_id::<i32>().unwrap(), Some(2), "the first was dropped twice, and is skipped");
    second.fail(Failure::skip("of no use"));
    let third = deliveries.next().await.unwrap();
    assert_eq!(third.event.document_id::<i32>().unwrap(), Some(3));
    third.fail(Failure::stop("enough"));
    assert!(deliveries.next().await.is_none());
    let status = deliveries.subscription().status();
    assert_eq!((status.skipped, status.handled), (2, 0));
    assert_eq!(deliveries.subscription().stopped().await.name(), "handler_failed");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_stream_is_a_shutdown_with_the_event_in_hand_unsettled() {
    let world = World::new();
    let mut deliveries = world.subscriptions.stream(ID).await.unwrap();
    let at = world.inserts(1..=3);
    deliveries.next().await.unwrap().settle();
    let out = deliveries.next().await.unwrap();
    let subscription = deliveries.subscription().clone();
    let before = Instant::now();
    drop(deliveries);
    assert_eq!(subscription.stopped().await.name(), "requested");
    assert!(Instant::now() - before < Duration::from_secs(1), "nobody is waited for");
    // Too late: it comes again.
    out.settle();
    millis(10).await;
    assert_eq!(world.stored().await.as_ref(), Some(&at[0]));
    assert!(!world.record().await.unwrap().clean);
    let mut deliveries = world.subscriptions.stream(ID).await.unwrap();
    let again = deliveries.next().await.unwrap();
    assert_eq!((&again.position, again.may_be_repeat), (&at[1], true));
}

#[tokio::test(start_paused = true)]
async fn a_delivery_that_nobody_waits_for_is_in_nobodys_hand() {
    let world = World::new();
    let mut deliveries = world.subscriptions.stream(ID).await.unwrap();
    let at = world.inserts(1..=2);
    seconds(1).await;
    let before = Instant::now();
    deliveries.subscription().pause().await.unwrap();
    assert!(Instant::now() - before < Duration::from_secs(1), "a pause does not wait for it");
    deliveries.subscription().resume().await.unwrap();
    assert_eq!(deliveries.next().await.unwrap().position, at[0]);
    until(deliveries.subscription(), "running", |status| !matches!(status.state, State::Paused)).await;
}

#[tokio::test(start_paused = true)]
async fn a_next_that_is_dropped_loses_nothing() {
    let world = World::new();
    let mut deliveries = world.subscriptions.stream(ID).await.unwrap();
    for key in 1..=20_i32 {
        let _ = tokio::time::timeout(Duration::from_micros(700) * (key.unsigned_abs() % 4), deliveries.next()).await;
        world.insert(key);
        tokio::task::yield_now().await;
        let pulled = deliveries.next().await.unwrap();
        assert_eq!((pulled.event.document_id::<i32>().unwrap(), pulled.attempt), (Some(key), 1));
        pulled.settle();
    }
}
