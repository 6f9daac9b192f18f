//! A handler that blocks the thread it is called on: the rest of its run goes on, on the other threads of the runtime.
//! These tests need threads and real time; what blocks is let go by the test, so nothing is waited for by luck.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use mongosub::bson::{Document, doc};
use mongosub::{BatchLimits, Checkpoint, Delivery, Handler, StorageError, Subscription, memory};
use tokio::runtime::{Builder, Runtime};

use crate::support::{Fault, ID, World, millis, until, until_reason, until_saved, until_settled};

fn key(delivery: &Delivery) -> i32 {
    delivery.event.document_key::<Document>().unwrap().unwrap().get_i32("_id").unwrap()
}

/// Blocks its thread at every event that `blocks` says, until it is let go.
fn blocking(world: &World, blocks: fn(i32) -> bool) -> (mpsc::Sender<()>, impl Handler + use<>) {
    let (let_go, blocked) = mpsc::channel::<()>();
    let blocked = Mutex::new(blocked);
    let handler = world.seen.then(move |delivery: Delivery| {
        if blocks(key(&delivery)) {
            blocked.lock().unwrap().recv().unwrap();
        }
        async { Ok(()) }
    });
    (let_go, handler)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_blocks_its_thread_stops_neither_saves_nor_status_nor_the_end() {
    let world = World::new();
    let (let_go, handler) = blocking(&world, |key| key == 2);
    let action = world.subscriptions.subscribe(ID, handler).shutdown_grace(Duration::from_millis(50));
    let subscription = action.await.unwrap();
    let first = world.insert(1);
    world.insert(2);
    until(&subscription, "the second in hand", |status| status.delivered == 2).await;
    until_saved(&subscription, &first).await;
    assert!(subscription.status().in_hand_since.is_some());
    let stored = subscription.shutdown().await.unwrap();
    assert_eq!(stored, Some(first.clone()));
    let record = world.record().await.unwrap();
    assert_eq!((record.position, record.clean), (Some(first), false), "the event in hand was left behind");
    assert!(subscription.is_stopped());
    let_go.send(()).unwrap();
}

/// The same handler goes on after the stall.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stall_waits_for_a_handler_that_blocks_its_thread_so_that_it_can_be_resumed() {
    let world = World::new();
    let (let_go, handler) = blocking(&world, |_| true);
    let action = world.subscriptions.subscribe(ID, handler).shutdown_grace(Duration::from_millis(10)).save_every(10);
    let subscription = action.await.unwrap();
    let_go.send(()).unwrap();
    world.insert(1);
    world.insert(2);
    until(&subscription, "the second in hand", |status| status.delivered == 2).await;
    world.storage.next_saves([Fault::Error(StorageError::Refused { code: 121, message: "no".into() })]);
    subscription.hold().request_save();
    until_reason(&subscription, "stalled", "refused_by_server").await;
    // Beyond the grace and beyond what an end leaves to a task.
    millis(1200).await;
    let_go.send(()).unwrap();
    subscription.resume().await.unwrap();
    until_settled(&subscription, 2).await;
    assert_eq!(world.seen.keys(), [1, 2]);
}

// What is seen by a thread that is not the runtime's, so that nothing but the run moves the runtime.

/// A runtime of two threads, and the ticks of a task on it.
fn ticking() -> (Runtime, Arc<AtomicU64>) {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let ticks = Arc::new(AtomicU64::new(0));
    let ticking = ticks.clone();
    runtime.spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_millis(5)).await;
            ticking.fetch_add(1, SeqCst);
        }
    });
    (runtime, ticks)
}

/// What is waited for by a thread that is not the runtime's.
fn awaited(what: &str, done: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < until, "{what}");
        std::thread::yield_now();
    }
}

/// Events that are read at once, so that nobody else has a turn between them.
fn insert_at_once(world: &World, keys: impl IntoIterator<Item = i32>) -> Vec<Checkpoint> {
    world.model.push_transaction(keys.into_iter().map(|key| memory::insert(key, doc! {})))
}

#[test]
fn a_save_that_was_asked_for_is_sent_while_the_next_event_blocks() {
    let (runtime, _) = ticking();
    let world = World::new();
    let (let_go, handler) = blocking(&world, |key| {
        if key == 1 {
            // So that who publishes has its turn here, and is not the one that is woken behind the third.
            std::thread::sleep(Duration::from_millis(3));
        }
        key == 4
    });
    let action = world.subscriptions.subscribe(ID, handler).save_every(3);
    let subscription = runtime.block_on(action.into_future()).unwrap();
    let events = insert_at_once(&world, 1..=5);
    awaited("the fourth is with the handler", || world.seen.keys() == [1, 2, 3, 4]);
    awaited("the third is saved", || subscription.status().saved.as_ref() == Some(&events[2]));
    let_go.send(()).unwrap();
    awaited("the fifth is settled", || subscription.status().settled == 5);
}

#[test]
fn who_watches_sees_that_the_second_of_two_events_blocks() {
    let (runtime, _) = ticking();
    let world = World::new();
    let (let_go, handler) = blocking(&world, |key| key < 3);
    let action = world.subscriptions.subscribe(ID, handler).save_every(10);
    let subscription = runtime.block_on(action.into_future()).unwrap();
    let watched = subscription.watch();
    insert_at_once(&world, [1, 2, 3]);
    for key in 1..=2 {
        awaited("it is with the handler", || world.seen.keys().last() == Some(&key));
        awaited("it is seen", || watched.borrow().delivered == u64::from(key.unsigned_abs()));
        // Longer than figures wait for being published.
        std::thread::sleep(Duration::from_millis(30));
        let_go.send(()).unwrap();
    }
    awaited("the third is settled", || subscription.status().settled == 3);
}

// Where the runtime has nothing else to do, its threads but one sleep, and that one waits for I/O and timers: who calls
// the handler was woken by it.

/// The timers go on while each of the next events blocks.
fn timers_go_on(world: &World, subscription: &Subscription, ticks: &AtomicU64, let_go: &mpsc::Sender<()>) {
    for key in 1..=12 {
        world.insert(key);
        awaited("it is with the handler", || world.seen.keys().last() == Some(&key));
        let before = ticks.load(SeqCst);
        awaited("the timers go on", || ticks.load(SeqCst) > before + 2);
        let_go.send(()).unwrap();
        awaited("it is settled", || world.seen.keys().len() as u64 == subscription.status().settled);
    }
}

#[test]
fn a_handler_that_blocks_leaves_the_wait_for_io_to_another_thread_when_a_timer_has_called_it() {
    let (runtime, ticks) = ticking();
    let world = World::new();
    let (let_go, blocked) = mpsc::channel::<()>();
    let (blocked, seen) = (Mutex::new(blocked), world.seen.clone());
    let handler = move |batch: Vec<Delivery>| {
        seen.note(&batch[0]);
        blocked.lock().unwrap().recv().unwrap();
        async { Ok(()) }
    };
    let limits = BatchLimits::new(10).max_wait(Duration::from_millis(7));
    let subscribed = runtime.block_on(world.subscriptions.subscribe_batches(ID, limits, handler).into_future());
    timers_go_on(&world, &subscribed.unwrap(), &ticks, &let_go);
}

#[test]
fn a_handler_that_blocks_behind_a_wait_of_its_own_leaves_the_wait_for_io_to_another_thread() {
    let (runtime, ticks) = ticking();
    let world = World::new();
    let (let_go, blocked) = mpsc::channel::<()>();
    let (blocked, seen) = (Arc::new(Mutex::new(blocked)), world.seen.clone());
    let handler = move |delivery: Delivery| {
        let (blocked, seen) = (blocked.clone(), seen.clone());
        async move {
            tokio::time::sleep(Duration::from_millis(7)).await;
            seen.note(&delivery);
            blocked.lock().unwrap().recv().unwrap();
            Ok(())
        }
    };
    let subscribed = runtime.block_on(world.subscriptions.subscribe(ID, handler).into_future());
    timers_go_on(&world, &subscribed.unwrap(), &ticks, &let_go);
}
