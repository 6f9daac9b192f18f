//! A handler that fails, panics or hangs: the same event again, visibly, and nothing passed over.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mongosub::bson::Document;
use mongosub::{Delivery, Failure, Handler, OnFailure, Reason, State};
use tokio::time::Instant;
use tracing::Level;

use crate::support::{
    ID, Log, World, is_running, millis, seconds, until_reason, until_saved, until_seen, until_settled,
};

fn key(delivery: &Delivery) -> i32 {
    delivery.event.document_key::<Document>().unwrap().unwrap().get_i32("_id").unwrap()
}

/// Fails the first `times` attempts of key 1.
fn failing(world: &World, times: u32) -> impl Handler + use<> {
    world.seen.then(move |delivery| async move {
        if key(&delivery) == 1 && delivery.attempt <= times {
            Err(format!("not yet {}", delivery.attempt).into())
        } else {
            Ok(())
        }
    })
}

#[tokio::test(start_paused = true)]
async fn a_failed_event_is_tried_again_before_the_next_one_and_its_attempts_count() {
    let world = World::new();
    let subscription = world.subscriptions.subscribe(ID, failing(&world, 3)).await.unwrap();
    let first = world.insert(1);
    let second = world.insert(2);
    until_saved(&subscription, &second).await;
    let seen = world.seen.all();
    let attempts: Vec<_> = seen.iter().map(|seen| (seen.key, seen.attempt, seen.may_be_repeat)).collect();
    assert_eq!(attempts, [(1, 1, false), (1, 2, true), (1, 3, true), (1, 4, true), (2, 1, false)]);
    assert!(seen[..4].iter().all(|seen| seen.position == first));
    let status = subscription.status();
    assert_eq!((status.events, status.delivered, status.settled, status.replayed), (2, 2, 2, 0));
}

#[tokio::test(start_paused = true)]
async fn failing_shows_from_the_second_attempt_with_position_and_error_and_ends_with_success() {
    let world = World::new();
    let handler = world.seen.then(|delivery| async move {
        seconds(10).await;
        if delivery.attempt <= 2 { Err(format!("not yet {}", delivery.attempt).into()) } else { Ok(()) }
    });
    let subscription = world.subscriptions.subscribe(ID, handler).await.unwrap();
    let first = world.insert(1);
    seconds(5).await;
    assert!(is_running(&subscription.status().state), "the first attempt is no failure");
    until_seen(&world, 2).await;
    let failing = |attempts, error: &str| {
        State::Retrying(Reason::HandlerFailing { position: first.clone(), attempts, error: error.into() })
    };
    assert_eq!(subscription.status().state, failing(1, "not yet 1"));
    until_seen(&world, 3).await;
    assert_eq!(subscription.status().state, failing(2, "not yet 2"));
    until_settled(&subscription, 1).await;
    millis(1).await;
    assert!(is_running(&subscription.status().state));
}

#[tokio::test(start_paused = true)]
async fn attempts_back_off_to_thirty_seconds_at_most_and_go_on_for_ever() {
    let world = World::new();
    let times: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let notes = times.clone();
    let handler = move |_: Delivery| {
        notes.lock().unwrap().push(Instant::now());
        async { Err::<(), Failure>("never".into()) }
    };
    let _subscription = world.subscriptions.subscribe(ID, handler).await.unwrap();
    world.insert(1);
    seconds(3600).await;
    let times = times.lock().unwrap();
    let waits: Vec<u128> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_millis()).collect();
    let bounds = (0..waits.len()).map(|n| (100u128 << n.min(20)).min(30_000));
    assert!(waits.iter().zip(bounds).all(|(wait, bound)| *wait <= bound + 1), "{waits:?}");
    assert!(waits.len() > 120 && waits.iter().any(|wait| *wait > 15_000), "{waits:?}");
    // Full jitter: also much shorter than the bound.
    assert!(waits[10..].iter().any(|wait| *wait < 7_000), "{waits:?}");
}

#[tokio::test(start_paused = true)]
async fn the_backoff_begins_anew_for_the_next_event() {
    let world = World::new();
    let handler = world.seen.then(|delivery| async move {
        if key(&delivery) == 1 && delivery.attempt <= 15 || key(&delivery) == 2 && delivery.attempt == 1 {
            return Err("again".into());
        }
        Ok(())
    });
    let subscription = world.subscriptions.subscribe(ID, handler).await.unwrap();
    world.insert(1);
    until_settled(&subscription, 1).await;
    let begun = Instant::now();
    world.insert(2);
    until_settled(&subscription, 2).await;
    assert!(begun.elapsed() <= Duration::from_millis(101));
}

#[tokio::test(start_paused = true)]
async fn the_backoff_is_a_setting() {
    let world = World::new();
    let handler = world.seen.then(|_| async { Err("never".into()) });
    let action = world.subscriptions.subscribe(ID, handler);
    let policy = OnFailure::retry_forever().backoff(Duration::from_millis(1), Duration::from_millis(2));
    let _subscription = action.on_failure(policy).await.unwrap();
    world.insert(1);
    seconds(1).await;
    assert!(world.seen.all().len() > 300);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_fails_for_ever_stores_nothing_and_passes_nothing() {
    let world = World::new();
    let subscription = world.subscriptions.subscribe(ID, failing(&world, u32::MAX)).await.unwrap();
    let start = world.stored().await;
    for key in 1..=3 {
        world.insert(key);
        world.model.push_quiet();
    }
    seconds(7200).await;
    assert_eq!(world.stored().await, start);
    assert!(world.seen.keys().iter().all(|key| *key == 1));
    let status = subscription.status();
    assert_eq!((status.events, status.delivered, status.settled), (1, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn failures_log_the_first_then_every_tenth_and_one_a_minute() {
    let log = Log::default();
    let _guard = log.begin();
    let world = World::new();
    let handler = world.seen.then(|_| async { Err("never".into()) });
    let _subscription = world.subscriptions.subscribe(ID, handler).await.unwrap();
    world.insert(1);
    seconds(3600).await;
    let attempts = world.seen.all().len();
    let lines = log.messages(Level::WARN, "failed for the event at");
    let least = 1 + attempts / 10;
    assert!((least..=least + 60).contains(&lines.len()), "{} lines for {attempts} attempts", lines.len());
    assert!(lines.iter().all(|line| line.contains("never") && line.contains(ID)));
    assert_eq!(log.messages(Level::WARN, "is retrying").len(), 1, "one line for the state");
}

/// Panics the first time it sees a key, in the future or in the call itself.
struct Panicking {
    world: Arc<Mutex<Vec<(u32, i32, u32)>>>,
    instance: u32,
    in_call: bool,
}

impl Handler for Panicking {
    fn handle(&mut self, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send {
        self.world.lock().unwrap().push((self.instance, key(&delivery), delivery.attempt));
        assert!(!(self.in_call && delivery.attempt == 1), "in the call");
        let in_call = self.in_call;
        async move {
            millis(1).await;
            assert!(in_call || delivery.attempt > 1, "in the future");
            Ok(())
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_a_failed_attempt_in_the_future_and_in_the_call_itself() {
    for in_call in [false, true] {
        let world = World::new();
        let calls: Arc<Mutex<Vec<_>>> = Arc::default();
        let handler = Panicking { world: calls.clone(), instance: 0, in_call };
        let subscription = world.subscriptions.subscribe(ID, handler).await.unwrap();
        world.insert(1);
        world.insert(2);
        let shown = until_reason(&subscription, "retrying", "handler_failing").await;
        let expected = if in_call { "in the call" } else { "in the future" };
        assert!(shown.state.reason().unwrap().to_string().contains(expected), "{shown:?}");
        until_settled(&subscription, 2).await;
        assert_eq!(*calls.lock().unwrap(), [(0, 1, 1), (0, 1, 2), (0, 2, 1), (0, 2, 2)], "the same handler goes on");
    }
}

#[tokio::test(start_paused = true)]
async fn a_factory_gives_a_fresh_handler_after_a_panic() {
    let world = World::new();
    let calls: Arc<Mutex<Vec<_>>> = Arc::default();
    let (made, notes) = (AtomicU32::new(0), calls.clone());
    let factory = move || Panicking { world: notes.clone(), instance: made.fetch_add(1, SeqCst), in_call: false };
    let subscription = world.subscriptions.subscribe_with(ID, factory).await.unwrap();
    world.insert(1);
    world.insert(2);
    until_settled(&subscription, 2).await;
    assert_eq!(*calls.lock().unwrap(), [(0, 1, 1), (1, 1, 2), (1, 2, 1), (2, 2, 2)]);
}

/// Hangs the first time it sees a key.
struct Hanging {
    calls: Arc<Mutex<Vec<(u32, i32, u32)>>>,
    dropped: Arc<AtomicU32>,
    instance: u32,
}

struct CountDrop(Arc<AtomicU32>);

impl Drop for CountDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

impl Handler for Hanging {
    async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
        let _dropped = CountDrop(self.dropped.clone());
        self.calls.lock().unwrap().push((self.instance, key(&delivery), delivery.attempt));
        if delivery.attempt == 1 && !delivery.may_be_repeat {
            std::future::pending::<()>().await;
        }
        millis(1).await;
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_timeout_makes_a_hung_call_a_failed_attempt_and_drops_it() {
    let world = World::new();
    let (calls, dropped) = (Arc::<Mutex<Vec<_>>>::default(), Arc::<AtomicU32>::default());
    let handler = Hanging { calls: calls.clone(), dropped: dropped.clone(), instance: 0 };
    let action = world.subscriptions.subscribe(ID, handler).handler_timeout(Duration::from_secs(5));
    let subscription = action.await.unwrap();
    let begun = Instant::now();
    world.insert(1);
    let shown = until_reason(&subscription, "retrying", "handler_failing").await;
    assert!((5_000..5_200).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    assert!(shown.state.reason().unwrap().to_string().contains("5s"), "{shown:?}");
    until_settled(&subscription, 1).await;
    assert_eq!(*calls.lock().unwrap(), [(0, 1, 1), (0, 1, 2)]);
    assert_eq!(dropped.load(SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn a_factory_gives_a_fresh_handler_after_a_timeout_and_after_an_abandoned_call() {
    let world = World::new();
    let (calls, dropped) = (Arc::<Mutex<Vec<_>>>::default(), Arc::<AtomicU32>::default());
    let (made, notes, drops) = (AtomicU32::new(0), calls.clone(), dropped.clone());
    let factory = move || Hanging { calls: notes.clone(), dropped: drops.clone(), instance: made.fetch_add(1, SeqCst) };
    let action = world.subscriptions.subscribe_with(ID, factory).handler_timeout(Duration::from_secs(60));
    let subscription = action.await.unwrap();
    world.insert(1);
    until_settled(&subscription, 1).await;
    world.insert(2);
    millis(1).await;
    subscription.pause().await.unwrap();
    subscription.resume().await.unwrap();
    until_settled(&subscription, 2).await;
    assert_eq!(*calls.lock().unwrap(), [(0, 1, 1), (1, 1, 2), (1, 2, 1), (2, 2, 1)]);
    assert_eq!(dropped.load(SeqCst), 4);
}

#[tokio::test(start_paused = true)]
async fn a_factory_that_panics_leaves_the_old_handler_at_work() {
    let world = World::new();
    let calls: Arc<Mutex<Vec<_>>> = Arc::default();
    let (made, notes) = (AtomicU32::new(0), calls.clone());
    let factory = move || {
        let instance = made.fetch_add(1, SeqCst);
        assert!(instance == 0, "no second one");
        Panicking { world: notes.clone(), instance, in_call: false }
    };
    let subscription = world.subscriptions.subscribe_with(ID, factory).await.unwrap();
    world.insert(1);
    until_settled(&subscription, 1).await;
    assert_eq!(*calls.lock().unwrap(), [(0, 1, 1), (0, 1, 2)]);
}

#[tokio::test(start_paused = true)]
async fn an_event_in_hand_for_a_minute_is_warned_about_every_minute() {
    let log = Log::default();
    let _guard = log.begin();
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let first = world.insert(1);
    seconds(59).await;
    assert!(log.messages(Level::WARN, "has had the event").is_empty());
    seconds(2).await;
    let lines = log.messages(Level::WARN, "has had the event");
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("for 60 s") && lines[0].contains(&first.to_string()) && lines[0].contains(ID));
    seconds(120).await;
    assert_eq!(log.messages(Level::WARN, "has had the event").len(), 3);
    hold.let_go(1);
    until_settled(&subscription, 1).await;
    world.insert(2);
    seconds(59).await;
    assert_eq!(log.messages(Level::WARN, "has had the event").len(), 3, "the next event has its own minute");
}

#[tokio::test(start_paused = true)]
async fn an_event_that_fails_for_minutes_counts_as_in_hand_too() {
    let log = Log::default();
    let _guard = log.begin();
    let world = World::new();
    let handler = world.seen.then(|_| async { Err("never".into()) });
    let subscription = world.subscriptions.subscribe(ID, handler).await.unwrap();
    world.insert(1);
    seconds(61).await;
    assert_eq!(log.messages(Level::WARN, "has had the event").len(), 1);
    assert!(subscription.status().in_hand_since.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_delivery_knows_its_subscription_its_fence_and_whether_the_end_has_begun() {
    let world = World::new();
    let told: Arc<Mutex<Vec<bool>>> = Arc::default();
    let notes = told.clone();
    let handler = world.seen.then(move |delivery: Delivery| {
        let notes = notes.clone();
        async move {
            assert_eq!(delivery.subscription().as_str(), ID);
            notes.lock().unwrap().push(delivery.is_cancelled());
            delivery.cancelled().await;
            notes.lock().unwrap().push(delivery.is_cancelled());
            Ok(())
        }
    });
    let subscription = world.subscriptions.subscribe(ID, handler).await.unwrap();
    world.insert(1);
    millis(5).await;
    let stored = subscription.shutdown().await.unwrap();
    assert_eq!(*told.lock().unwrap(), [false, true]);
    assert_eq!(stored, Some(world.seen.all()[0].position.clone()), "it finished, so it is settled and stored");
}
