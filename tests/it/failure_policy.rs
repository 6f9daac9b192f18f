//! What follows a failure: retries that end, skips, stops, and what a handler decides for one event.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use mongosub::{
    BatchFailure, BatchLimits, Checkpoint, Delivery, Failure, Handler, OnFailure, Reason, State, Then, Verdict,
};
use tracing::Level;

use crate::support::{ID, Log, World, seconds, until, until_reason, until_saved, until_settled};

fn key(delivery: &Delivery) -> i32 {
    delivery.event.document_id::<i32>().unwrap().unwrap()
}

/// Fails key 1 in this way, every time.
fn failing(world: &World, how: fn(String) -> Failure) -> impl Handler + use<> {
    world.seen.then(move |delivery| async move {
        if key(&delivery) == 1 { Err(how(format!("failure {}", delivery.attempt))) } else { Ok(()) }
    })
}

fn stopped_at(state: &State) -> (Checkpoint, u32, String) {
    match state {
        State::Stopped(Reason::HandlerFailed { position, attempts, error }) => {
            (position.clone(), *attempts, error.clone())
        }
        state => panic!("{state:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn n_retries_are_n_more_attempts_and_stop_leaves_the_event_unsettled() {
    for retries in [0, 1, 3] {
        let world = World::new();
        let action = world.subscriptions.subscribe(ID, failing(&world, Failure::retry));
        let subscription = action.on_failure(OnFailure::retry(retries).then(Then::Stop)).await.unwrap();
        let before = world.insert(7);
        let poison = world.insert(1);
        world.insert(2);
        let stopped = until_reason(&subscription, "stopped", "handler_failed").await;
        assert_eq!(stopped_at(&stopped.state), (poison, retries + 1, format!("failure {}", retries + 1)));
        assert_eq!(stopped.state.reason().unwrap().exit_code(), 3);
        assert_eq!(world.seen.keys(), [vec![7], vec![1; retries as usize + 1]].concat());
        assert_eq!((stopped.settled, stopped.handled), (1, 1));
        assert_eq!(world.stored().await, Some(before));

        // It comes again, with what is behind it.
        let next = world.restarted();
        let subscription = next.subscribe().await;
        until_settled(&subscription, 2).await;
        assert_eq!(next.seen.keys(), [1, 2]);
        assert!(next.seen.all()[0].may_be_repeat);
    }
}

#[tokio::test(start_paused = true)]
async fn skip_settles_the_event_counts_it_and_logs_position_key_and_error() {
    let log = Log::default();
    let _guard = log.begin();
    let world = World::new();
    let action = world.subscriptions.subscribe(ID, failing(&world, Failure::retry));
    let subscription = action.on_failure(OnFailure::retry(2).then(Then::Skip)).await.unwrap();
    let poison = world.insert(1);
    let last = world.insert(2);
    let status = until_saved(&subscription, &last).await;
    assert_eq!(world.seen.keys(), [1, 1, 1, 2]);
    assert_eq!((status.settled, status.handled, status.skipped), (2, 1, 1));
    assert_eq!(status.state, State::CaughtUp, "what failed is over");
    let lines = log.messages(Level::WARN, "skips the event");
    assert_eq!(lines.len(), 1);
    for part in [ID, &poison.to_string(), r#"test.events { "_id": 1 }"#, "failure 3", "3 failed attempts"] {
        assert!(lines[0].contains(part), "{part} in {}", lines[0]);
    }
}

#[tokio::test(start_paused = true)]
async fn the_handler_decides_for_one_event_whatever_the_policy() {
    let world = World::new();
    let subscription = world.subscriptions.subscribe(ID, failing(&world, Failure::skip)).await.unwrap();
    world.insert(1);
    let last = world.insert(2);
    let status = until_saved(&subscription, &last).await;
    assert_eq!((world.seen.keys(), status.skipped), (vec![1, 2], 1));

    let world = World::new();
    let action = world.subscriptions.subscribe(ID, failing(&world, Failure::stop));
    let subscription = action.on_failure(OnFailure::retry(9).then(Then::Skip)).await.unwrap();
    let poison = world.insert(1);
    let stopped = until_reason(&subscription, "stopped", "handler_failed").await;
    assert_eq!(stopped_at(&stopped.state), (poison, 1, "failure 1".into()));
    assert_eq!(world.seen.keys(), [1]);
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_without_a_storage_is_a_failure_to_be_retried_whose_error_says_so() {
    let world = World::new();
    let subscription = world.subscriptions.subscribe(ID, failing(&world, Failure::dead_letter)).await.unwrap();
    world.insert(1);
    let shown = until_reason(&subscription, "retrying", "handler_failing").await;
    assert!(shown.state.reason().unwrap().to_string().contains("there is no storage for it"), "{:?}", shown.state);
    seconds(3600).await;
    assert!(world.seen.keys().len() > 100 && subscription.status().settled == 0, "never lost");

    // Of a policy with an end it is a failed attempt like any other.
    let world = World::new();
    let action = world.subscriptions.subscribe(ID, failing(&world, Failure::dead_letter));
    let subscription = action.on_failure(OnFailure::retry(1).then(Then::Stop)).await.unwrap();
    world.insert(1);
    until_reason(&subscription, "stopped", "handler_failed").await;
    assert_eq!(world.seen.keys(), [1, 1]);
}

#[tokio::test(start_paused = true)]
async fn panics_and_timeouts_are_failed_attempts_too() {
    let world = World::new();
    let handler = world.seen.then(|delivery| async move {
        match key(&delivery) {
            1 => panic!("it panics"),
            2 => std::future::pending().await,
            _ => Ok(()),
        }
    });
    let action = world.subscriptions.subscribe(ID, handler).handler_timeout(Duration::from_secs(5));
    let subscription = action.on_failure(OnFailure::retry(1).then(Then::Skip)).await.unwrap();
    world.inserts(1..=3);
    let status = until_settled(&subscription, 3).await;
    assert_eq!(world.seen.keys(), [1, 1, 2, 2, 3]);
    assert_eq!((status.skipped, status.handled), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn the_backoff_is_that_of_the_policy_and_begins_anew_behind_a_skip() {
    let world = World::new();
    let handler = world.seen.then(|_| async { Err("never".into()) });
    let policy = OnFailure::retry(4).then(Then::Skip).backoff(Duration::from_secs(100), Duration::from_secs(100));
    let subscription = world.subscriptions.subscribe(ID, handler).on_failure(policy).await.unwrap();
    world.inserts(1..=2);
    let begun = tokio::time::Instant::now();
    until_settled(&subscription, 2).await;
    assert!((10..=800).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    assert_eq!(world.seen.all().iter().map(|seen| seen.attempt).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]);
}

#[tokio::test(start_paused = true)]
async fn the_predicate_of_the_save_policy_is_asked_about_skipped_events_too() {
    let world = World::new();
    let asked: Arc<Mutex<Vec<i32>>> = Arc::default();
    let notes = asked.clone();
    let action = world.subscriptions.subscribe(ID, failing(&world, Failure::skip)).save_when(move |delivery| {
        notes.lock().unwrap().push(key(delivery));
        key(delivery) == 1
    });
    let subscription = action.await.unwrap();
    let poison = world.insert(1);
    world.insert(2);
    until_settled(&subscription, 2).await;
    subscription.shutdown().await.unwrap();
    assert_eq!(*asked.lock().unwrap(), [1, 2]);
    assert_eq!(world.stored().await, Some(poison));
}

type Calls = Arc<Mutex<Vec<Vec<i32>>>>;

/// A batch handler that notes keys and answers what `then` says. Event 0 is held until everything is there.
async fn in_bulk(
    world: &World,
    policy: OnFailure,
    then: impl Fn(&[i32]) -> Result<(), BatchFailure> + Clone + Send + 'static,
) -> (mongosub::Subscription, Calls) {
    let calls = Calls::default();
    let notes = calls.clone();
    let handler = move |batch: Vec<Delivery>| {
        let keys: Vec<i32> = batch.iter().map(key).collect();
        notes.lock().unwrap().push(keys.clone());
        let then = then.clone();
        async move { then(&keys) }
    };
    let limits = BatchLimits::new(100).max_wait(Duration::from_millis(10));
    let action = world.subscriptions.subscribe_batches(ID, limits, handler);
    (action.on_failure(policy).await.unwrap(), calls)
}

#[tokio::test(start_paused = true)]
async fn a_verdict_is_about_the_event_behind_what_a_batch_settled() {
    let world = World::new();
    let (subscription, calls) =
        in_bulk(&world, OnFailure::default(), |keys| match keys.iter().position(|key| *key == 3) {
            Some(at) => Err(BatchFailure::after(at, Failure::skip("not 3"))),
            None => Ok(()),
        })
        .await;
    world.inserts(1..=5);
    let status = until_settled(&subscription, 5).await;
    assert_eq!(*calls.lock().unwrap(), [vec![1, 2, 3, 4, 5], vec![4, 5]]);
    assert_eq!((status.handled, status.skipped, status.settled), (4, 1, 5));
}

#[tokio::test(start_paused = true)]
async fn of_a_batch_that_fails_as_a_whole_only_the_event_that_fails_alone_is_taken_away() {
    let world = World::new();
    let policy = OnFailure::retry(1).then(Then::Skip);
    let (subscription, calls) = in_bulk(&world, policy, |keys| {
        // As `?` does it: nobody says which one it was.
        if keys.contains(&3) { Err("one of them".into()) } else { Ok(()) }
    })
    .await;
    world.inserts(1..=5);
    let status = until_settled(&subscription, 5).await;
    assert_eq!((status.handled, status.skipped), (4, 1));
    let calls = calls.lock().unwrap();
    let all = vec![1, 2, 3, 4, 5];
    assert_eq!(calls[..3], [all.clone(), all, vec![1]], "before it is taken away, the first one is tried alone");
    assert_eq!(calls.last().unwrap(), &[4, 5]);
    assert!(calls.contains(&vec![3]), "{calls:?}");
}

#[tokio::test(start_paused = true)]
async fn failures_are_counted_by_event_and_begin_anew_behind_a_settled_part() {
    let world = World::new();
    let policy = OnFailure::retry(2).then(Then::Stop);
    let left = Arc::new(Mutex::new(vec![2, 2, 1, 1]));
    let (subscription, calls) = in_bulk(&world, policy, move |keys| match left.lock().unwrap().pop() {
        // Each of the two fails twice, which three attempts have room for.
        Some(failing) => Err(BatchFailure::after(keys.iter().position(|key| *key == failing).unwrap(), "again")),
        None => Ok(()),
    })
    .await;
    world.inserts(1..=3);
    let status = until_settled(&subscription, 3).await;
    assert_eq!(status.handled, 3);
    assert_eq!(calls.lock().unwrap().len(), 5, "{calls:?}");
}

#[tokio::test(start_paused = true)]
async fn a_policy_of_the_wrapper_is_the_default_and_the_actions_own_goes_before_it() {
    let world = World::new();
    let wrapper = world.subscriptions.clone().on_failure(OnFailure::retry(1).then(Then::Skip));
    let subscription = wrapper.subscribe(ID, failing(&world, Failure::retry)).await.unwrap();
    world.insert(1);
    until(&subscription, "skipped", |status| status.skipped == 1).await;
    let action = wrapper.subscribe("other_v1", failing(&world, Failure::retry));
    let other = action.on_failure(OnFailure::retry(1).then(Then::Stop)).await.unwrap();
    world.insert(1);
    until_reason(&other, "stopped", "handler_failed").await;
}

#[tokio::test(start_paused = true)]
async fn what_one_of_several_handlers_skips_is_not_taken_from_another_that_wants_it_again() {
    let world = World::new();
    let skips = |_: Delivery| async { Err(Failure::skip("of no use")) };
    let again =
        world.seen.then(|delivery| async move { if delivery.attempt < 3 { Err("again".into()) } else { Ok(()) } });
    let both = mongosub::fan_out().with(again).with(skips);
    let subscription = world.subscriptions.subscribe(ID, both).await.unwrap();
    world.insert(1);
    let status = until_settled(&subscription, 1).await;
    assert_eq!((world.seen.keys(), status.skipped), (vec![1, 1, 1], 1));
}

#[test]
fn a_failure_tells_its_verdict_and_the_chain_of_its_causes() {
    #[derive(Debug)]
    struct Outer(std::io::Error);
    impl std::fmt::Display for Outer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("the index is closed")
        }
    }
    impl std::error::Error for Outer {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.0)
        }
    }
    let cause = || Outer(std::io::Error::other("connection refused"));
    let failure: Failure = cause().into();
    assert_eq!(failure.verdict(), Verdict::Retry);
    assert_eq!(failure.chain(), ["the index is closed", "connection refused"]);
    assert_eq!(failure.to_string(), "the index is closed: connection refused");
    assert_eq!(Failure::dead_letter(cause()).verdict(), Verdict::DeadLetter);
    let batch: BatchFailure = Failure::stop(cause()).into();
    assert_eq!((batch.settled(), batch.failure().verdict()), (0, Verdict::Stop));
}
