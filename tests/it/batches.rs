//! Handlers that work in bulk: what a batch holds, what of it is settled, and what comes again.

use std::future::IntoFuture;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mongosub::bson::doc;
use mongosub::{
    BatchFailure, BatchHandler, BatchLimits, Delivery, Reason, SaveMode, State, SubscribeError, Subscription, memory,
};
use tokio::time::Instant;

use crate::support::{Hold, ID, World, millis, seconds, until, until_saved, until_settled};

/// What the handler got, batch by batch: keys and attempts.
type Notes = Arc<Mutex<Vec<Vec<(i32, u32)>>>>;

/// Notes each batch, waits to be let go, and answers what `then` says.
struct Bulk<F> {
    notes: Notes,
    hold: Hold,
    then: F,
}

impl<F: FnMut(&[Delivery]) -> Result<(), BatchFailure> + Send> BatchHandler for Bulk<F> {
    async fn handle_batch(&mut self, batch: &[Delivery]) -> Result<(), BatchFailure> {
        let noted = batch.iter().map(|delivery| (key(delivery), delivery.attempt)).collect();
        self.notes.lock().unwrap().push(noted);
        self.hold.wait().await;
        (self.then)(batch)
    }
}

fn key(delivery: &Delivery) -> i32 {
    delivery.event.document_id::<i32>().unwrap().unwrap()
}

/// A world with a subscription in bulk, whose first batch is event 1 alone and held.
struct Bench {
    world: World,
    notes: Notes,
    hold: Hold,
    subscription: Subscription,
}

impl Bench {
    async fn begin(
        limits: BatchLimits,
        mode: SaveMode,
        then: impl FnMut(&[Delivery]) -> Result<(), BatchFailure> + Send + 'static,
    ) -> Self {
        let (world, notes, hold) = (World::new(), Notes::default(), Hold::default());
        let handler = Bulk { notes: notes.clone(), hold: hold.clone(), then };
        let action = world.subscriptions.subscribe_batches(ID, limits, handler).save_mode(mode);
        let subscription = action.shutdown_grace(Duration::from_secs(5)).await.unwrap();
        let bench = Self { world, notes, hold, subscription };
        bench.world.insert(1);
        bench.until_calls(1).await;
        bench
    }

    async fn until_calls(&self, calls: usize) {
        for _ in 0..100_000 {
            if self.notes().len() >= calls {
                return;
            }
            millis(1).await;
        }
        panic!("never {calls} calls: {:?}", self.notes());
    }

    fn notes(&self) -> Vec<Vec<(i32, u32)>> {
        self.notes.lock().unwrap().clone()
    }

    fn keys(&self) -> Vec<Vec<i32>> {
        self.notes().iter().map(|batch| batch.iter().map(|(key, _)| *key).collect()).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_what_was_read_already_up_to_its_limit_and_in_order() {
    let bench = Bench::begin(BatchLimits::new(4), SaveMode::WriteBehind, |_| Ok(())).await;
    let positions = bench.world.inserts(2..=7);
    bench.hold.let_go(3);
    until_saved(&bench.subscription, positions.last().unwrap()).await;
    assert_eq!(bench.keys(), [vec![1], vec![2, 3, 4, 5], vec![6, 7]]);
    let status = bench.subscription.status();
    assert_eq!((status.events, status.delivered, status.settled), (7, 7, 7));
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_may_wait_is_filled_and_no_event_of_it_waits_longer_than_allowed() {
    let limits = BatchLimits::new(3).max_wait(Duration::from_secs(2));
    let bench = Bench::begin(limits, SaveMode::WriteBehind, |_| Ok(())).await;
    bench.hold.let_go(100);
    until_settled(&bench.subscription, 1).await;
    let begun = Instant::now();
    for key in 2..=4 {
        bench.world.insert(key);
        millis(500).await;
    }
    until_settled(&bench.subscription, 4).await;
    assert!(begun.elapsed() < Duration::from_millis(1600), "a full batch does not wait: {:?}", begun.elapsed());
    let begun = Instant::now();
    bench.world.insert(5);
    millis(1500).await;
    bench.world.insert(6);
    until_settled(&bench.subscription, 6).await;
    assert_eq!(begun.elapsed().as_millis() / 10, 200, "counted from the first event on");
    assert_eq!(bench.keys(), [vec![1], vec![2, 3, 4], vec![5, 6]]);
}

#[tokio::test(start_paused = true)]
async fn a_failure_settles_what_lies_in_front_and_the_rest_comes_again_first() {
    let bench = Bench::begin(BatchLimits::new(10), SaveMode::WriteBehind, |batch| {
        match batch.iter().position(|delivery| key(delivery) == 4 && delivery.attempt < 3) {
            Some(at) => Err(BatchFailure::after(at, "four is difficult")),
            None => Ok(()),
        }
    })
    .await;
    let positions = bench.world.inserts(2..=6);
    bench.hold.let_go(2);
    until_saved(&bench.subscription, &positions[1]).await;
    let status = until(&bench.subscription, "failing", |status| status.state.name() == "retrying").await;
    let failing =
        Reason::HandlerFailing { position: positions[2].clone(), attempts: 1, error: "four is difficult".into() };
    assert_eq!(status.state, State::Retrying(failing));
    assert_eq!((status.delivered, status.settled, status.position.as_ref()), (6, 3, Some(&positions[1])));
    seconds(10).await;
    assert_eq!(bench.world.stored().await.unwrap(), positions[1], "nothing stored passes an event that failed");
    bench.hold.let_go(10);
    until_saved(&bench.subscription, &positions[4]).await;
    let first = [2, 3, 4, 5, 6].map(|key| (key, 1)).to_vec();
    let again = |attempt| [4, 5, 6].map(|key| (key, attempt)).to_vec();
    assert_eq!(bench.notes(), [vec![(1, 1)], first, again(2), again(3)]);
    assert_eq!(bench.subscription.status().delivered, 6, "each counts once");
    assert_eq!(bench.subscription.status().state.name(), "caught_up");
}

#[tokio::test(start_paused = true)]
async fn any_error_fails_a_batch_with_nothing_settled_and_so_does_a_panic() {
    let calls = Arc::new(Mutex::new(0));
    let bench = Bench::begin(BatchLimits::new(10), SaveMode::WriteBehind, move |_| {
        let mut calls = calls.lock().unwrap();
        *calls += 1;
        match *calls {
            2 => Err("not now")?,
            3 => {
                drop(calls);
                panic!("not now either")
            }
            _ => Ok(()),
        }
    })
    .await;
    bench.world.inserts(2..=3);
    bench.hold.let_go(10);
    until_settled(&bench.subscription, 3).await;
    assert_eq!(bench.notes(), [vec![(1, 1)], vec![(2, 1), (3, 1)], vec![(2, 2), (3, 2)], vec![(2, 3), (3, 3)]]);
}

#[tokio::test(start_paused = true)]
async fn a_batch_given_up_by_a_pause_comes_again_and_is_marked_to_its_last_event() {
    let marks: Arc<Mutex<Vec<(i32, bool)>>> = Arc::default();
    let marked = marks.clone();
    let bench = Bench::begin(BatchLimits::new(10), SaveMode::WriteBehind, move |batch| {
        marked.lock().unwrap().extend(batch.iter().map(|delivery| (key(delivery), delivery.may_be_repeat)));
        Ok(())
    })
    .await;
    let given_up = bench.world.inserts(2..=4);
    bench.hold.let_go(1);
    bench.until_calls(2).await;
    bench.subscription.pause().await.unwrap();
    assert!(given_up[0].is_beyond(&bench.world.stored().await.unwrap()));
    bench.world.insert(5);
    bench.subscription.resume().await.unwrap();
    bench.until_calls(3).await;
    bench.hold.let_go(10);
    until_settled(&bench.subscription, 5).await;
    assert_eq!(bench.keys()[1..], [vec![2, 3, 4], vec![2, 3, 4, 5]]);
    assert_eq!(*marks.lock().unwrap(), [(1, false), (2, true), (3, true), (4, true), (5, false)]);
    assert_eq!(bench.subscription.status().delivered, 5, "each counts once");
}

/// What is read beyond the head tells nothing of what lies before it in the same batch.
#[tokio::test(start_paused = true)]
async fn a_repeat_that_was_read_into_a_batch_and_not_handed_out_stays_marked() {
    let limits = BatchLimits::new(10).max_wait(Duration::from_secs(1));
    let marks = Arc::new(Mutex::new(Vec::new()));
    let subscribe = |world: &World| {
        let marks = marks.clone();
        let handler = move |batch: Vec<Delivery>| {
            marks.lock().unwrap().extend(batch.iter().map(|delivery| (key(delivery), delivery.may_be_repeat)));
            async { Ok(()) }
        };
        world.subscriptions.subscribe_batches(ID, limits, handler).save_when(|_| false).into_future()
    };
    let world = World::new();
    let subscription = subscribe(&world).await.unwrap();
    world.insert(1);
    until_settled(&subscription, 1).await;
    subscription.shutdown().await.unwrap();
    let world = world.restarted();
    let subscription = subscribe(&world).await.unwrap();
    world.insert(2);
    millis(10).await;
    assert_eq!(subscription.status().events, 2, "both wait for more");
    subscription.pause().await.unwrap();
    subscription.resume().await.unwrap();
    millis(10).await;
    subscription.shutdown().await.unwrap();
    assert!(!world.record().await.unwrap().clean, "the first comes again");
    let world = world.restarted();
    let subscription = subscribe(&world).await.unwrap();
    until_settled(&subscription, 2).await;
    assert_eq!(*marks.lock().unwrap(), [(1, false), (1, true), (2, true)]);
}

#[tokio::test(start_paused = true)]
async fn a_batch_ends_behind_the_event_that_makes_it_16_mb() {
    let bench = Bench::begin(BatchLimits::new(1000), SaveMode::WriteBehind, |_| Ok(())).await;
    let filling = "x".repeat(6 << 20);
    for key in 2..=6 {
        bench.world.model.push(memory::insert(key, doc! { "filling": &filling }));
    }
    bench.hold.let_go(10);
    until_settled(&bench.subscription, 6).await;
    assert_eq!(bench.keys(), [vec![1], vec![2, 3, 4], vec![5, 6]]);
}

#[tokio::test(start_paused = true)]
async fn in_write_through_the_next_batch_waits_for_the_save_of_the_one_before() {
    let bench = Bench::begin(BatchLimits::new(2), SaveMode::WriteThrough, |_| Ok(())).await;
    let positions = bench.world.inserts(2..=5);
    bench.hold.let_go(2);
    bench.until_calls(3).await;
    assert_eq!(bench.world.stored().await.unwrap(), positions[1], "stored before the third call");
    assert_eq!(bench.keys(), [vec![1], vec![2, 3], vec![4, 5]]);
}

#[tokio::test(start_paused = true)]
async fn the_save_policy_looks_at_each_event_of_a_batch() {
    let (world, hold) = (World::new(), Hold::default());
    let handler = Bulk { notes: Notes::default(), hold: hold.clone(), then: |_: &[Delivery]| Ok(()) };
    let action = world.subscriptions.subscribe_batches(ID, BatchLimits::default(), handler);
    let subscription = action.save_when(|delivery| key(delivery) % 4 == 0).await.unwrap();
    let positions = world.inserts(1..=11);
    hold.let_go(100);
    until_settled(&subscription, 11).await;
    until_saved(&subscription, &positions[7]).await;
    subscription.shutdown().await.unwrap();
    assert_eq!(world.stored().await.unwrap(), positions[7], "no write passes an event that was declined");
}

#[tokio::test(start_paused = true)]
async fn a_batch_of_nothing_is_refused_by_name() {
    let world = World::new();
    let handler = |_: Vec<Delivery>| async { Ok(()) };
    let refused = world.subscriptions.subscribe_batches(ID, BatchLimits::new(0), handler).await;
    assert!(matches!(refused, Err(SubscribeError::Config { field: "max", .. })), "{refused:?}");
    assert!(world.record().await.is_none());
}
