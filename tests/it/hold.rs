//! Under a hold only what the handler has declared durable is stored.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use mongosub::{BatchLimits, Checkpoint, Declared, Delivery, Mark, State};
use tracing::Level;

use crate::support::{Fault, ID, Log, World, is_running, millis, seconds, until, until_seen, until_settled};

/// Marks taken inside the handler, one for each event.
type Marks = Arc<Mutex<Vec<Mark>>>;

fn marking(world: &World, marks: &Marks) -> impl mongosub::Handler + use<> {
    let marks = marks.clone();
    world.seen.then(move |delivery: Delivery| {
        marks.lock().unwrap().push(delivery.hold().mark());
        async { Ok(()) }
    })
}

#[tokio::test(start_paused = true)]
async fn of_250_events_in_batches_of_100_saved_in_the_background_199_are_safe() {
    let world = World::new();
    let mut in_batch = 0;
    let handler = world.seen.then(move |delivery: Delivery| {
        in_batch += 1;
        if in_batch % 100 == 0 {
            let (hold, mark) = (delivery.hold().clone(), delivery.hold().mark());
            tokio::spawn(async move {
                millis(500).await;
                assert_eq!(hold.durable_through(&mark), Declared::Accepted);
            });
        }
        async { Ok(()) }
    });
    let subscription = world.subscriptions.subscribe(ID, handler).hold().await.unwrap();
    let at = world.inserts(1..=250);
    until_settled(&subscription, 250).await;
    seconds(1).await;
    assert_eq!(world.stored().await.as_ref(), Some(&at[198]));
    drop((subscription, world.subscriptions.clone()));
    let next = world.restarted();
    let subscription = next.subscribe().await;
    subscription.caught_up().await.unwrap();
    assert_eq!(next.seen.keys(), (200..=250).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn what_was_merely_handled_is_stored_by_nothing() {
    let world = World::new();
    let start = world.insert(0);
    let subscription = world.action().hold().await.unwrap();
    let start = world.stored().await.unwrap_or(start);
    world.inserts(1..=5);
    until_settled(&subscription, 5).await;
    world.model.push_quiet();
    seconds(600).await;
    subscription.pause().await.unwrap();
    subscription.resume().await.unwrap();
    assert_eq!(subscription.drained().await.unwrap(), Some(start.clone()));
    assert_eq!(subscription.shutdown().await.unwrap(), Some(start.clone()));
    assert!(world.storage.sent_positions().iter().all(|sent| *sent == start));
    assert!(!world.record().await.unwrap().clean);
}

#[tokio::test(start_paused = true)]
async fn a_mark_excludes_the_event_in_hand_and_the_batch_in_hand() {
    let world = World::new();
    let marks = Marks::default();
    let subscription = world.subscriptions.subscribe(ID, marking(&world, &marks)).hold().await.unwrap();
    let at = world.inserts(1..=3);
    until_settled(&subscription, 3).await;
    let positions: Vec<_> = marks.lock().unwrap().iter().map(|mark| mark.position().cloned()).collect();
    assert_eq!(positions[1..], [Some(at[0].clone()), Some(at[1].clone())]);
    assert_eq!(subscription.hold().mark().position(), Some(&at[2]));

    let world = World::new();
    let marks = Marks::default();
    let handler = {
        let marks = marks.clone();
        move |batch: Vec<Delivery>| {
            marks.lock().unwrap().push(batch[0].hold().mark());
            async { Ok(()) }
        }
    };
    let limits = BatchLimits::new(10).max_wait(Duration::from_millis(5));
    let subscription = world.subscriptions.subscribe_batches(ID, limits, handler).hold().await.unwrap();
    let start = world.stored().await;
    world.inserts(1..=10);
    until_settled(&subscription, 10).await;
    assert_eq!(marks.lock().unwrap()[0].position(), start.as_ref());
}

#[tokio::test(start_paused = true)]
async fn marks_only_advance_and_the_save_policy_counts_what_is_durable() {
    let world = World::new();
    let marks = Marks::default();
    let handler = marking(&world, &marks);
    let subscription = world.subscriptions.subscribe(ID, handler).hold().save_every(3).await.unwrap();
    let at = world.inserts(1..=10);
    until_settled(&subscription, 10).await;
    let (hold, marks) = (subscription.hold().clone(), marks.lock().unwrap().clone());
    let declare = async |event: usize| {
        // The mark taken with event n in hand covers n events.
        assert_eq!(hold.durable_through(&marks[event]), Declared::Accepted);
        millis(50).await;
        world.storage.sent_positions()
    };
    assert!(declare(2).await.is_empty());
    assert_eq!(declare(4).await, [at[3].clone()]);
    assert_eq!(declare(1).await, [at[3].clone()]);
    assert_eq!(declare(6).await, [at[3].clone()]);
    assert_eq!(declare(9).await, [at[3].clone(), at[8].clone()]);
}

#[tokio::test(start_paused = true)]
async fn a_request_saves_what_is_declared_at_once_and_requests_merge() {
    let world = World::new();
    let subscription = world.action().hold().save_every(1000).await.unwrap();
    let hold = subscription.hold().clone();
    let at = world.inserts(1..=2);
    until_settled(&subscription, 2).await;
    let _ = hold.durable_through(&hold.mark());
    millis(100).await;
    assert!(world.storage.sent().is_empty());
    world.storage.next_saves([Fault::Late(Duration::from_millis(500))]);
    for _ in 0..5 {
        hold.request_save();
    }
    millis(100).await;
    assert_eq!(world.storage.sent_positions(), [at[1].clone()]);
    // During that save: honoured next, and once.
    let third = world.insert(3);
    until_settled(&subscription, 3).await;
    let _ = hold.durable_through(&hold.mark());
    hold.request_save();
    hold.request_save();
    millis(100).await;
    assert_eq!(world.storage.sent().len(), 1);
    seconds(1).await;
    assert_eq!(world.storage.sent_positions(), [at[1].clone(), third]);
    hold.request_save();
    seconds(1).await;
    assert_eq!(world.storage.sent().len(), 2, "nothing is left to save");
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_hold_saves_what_was_handled() {
    let world = World::new();
    let subscription = world.action().save_every(1000).await.unwrap();
    let first = world.insert(1);
    until_settled(&subscription, 1).await;
    assert!(world.storage.sent().is_empty());
    subscription.hold().request_save();
    millis(50).await;
    assert_eq!(world.storage.sent_positions(), [first]);
}

#[tokio::test(start_paused = true)]
async fn resume_auto_ends_the_hold() {
    let world = World::new();
    let subscription = world.action().hold().await.unwrap();
    let second = world.inserts(1..=2).pop().unwrap();
    until_settled(&subscription, 2).await;
    subscription.hold().resume_auto();
    millis(50).await;
    assert_eq!(world.stored().await, Some(second));
    let third = world.insert(3);
    until_settled(&subscription, 3).await;
    assert_eq!(subscription.shutdown().await.unwrap(), Some(third));
    assert!(world.record().await.unwrap().clean);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_position_is_stored_when_it_was_declared() {
    let world = World::new();
    let subscription = world.action().hold().save_quiet_position_every(Duration::from_secs(10)).await.unwrap();
    let start = world.stored().await.unwrap();
    let quiet = world.model.push_quiet();
    until(&subscription, "at the quiet position", |status| status.position.as_ref() == Some(&quiet)).await;
    seconds(30).await;
    assert_eq!(world.stored().await, Some(start));
    assert_eq!(subscription.hold().mark().position(), Some(&quiet));
    let _ = subscription.hold().durable_through(&subscription.hold().mark());
    seconds(11).await;
    assert_eq!(world.stored().await, Some(quiet));
}

#[tokio::test(start_paused = true)]
async fn marks_of_an_earlier_run_are_stale_and_change_nothing() {
    let world = World::new();
    let marks = Marks::default();
    let handler = marking(&world, &marks);
    let subscription = world.subscriptions.subscribe(ID, handler).hold().await.unwrap();
    world.inserts(1..=2);
    until_settled(&subscription, 2).await;
    let old = subscription.hold().mark();
    subscription.shutdown().await.unwrap();
    let subscription = world.action().hold().await.unwrap();
    until_settled(&subscription, 2).await;
    let stored = world.stored().await;
    assert_eq!(subscription.hold().durable_through(&old), Declared::Stale);
    seconds(1).await;
    assert_eq!(world.stored().await, stored);
    let _ = subscription.hold().durable_through(&subscription.hold().mark());
    seconds(1).await;
    assert_ne!(world.stored().await, stored);
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_lasts_shows_and_is_warned_about_after_a_minute_and_is_no_stall() {
    let log = Log::default();
    let _logging = log.begin();
    let world = World::new();
    let subscription = world.action().hold().await.unwrap();
    let start: Option<Checkpoint> = world.stored().await;
    assert_eq!(subscription.status().held, None);
    world.insert(1);
    until_settled(&subscription, 1).await;
    let status = until(&subscription, "held", |status| status.held.is_some()).await;
    assert_eq!(status.held.unwrap().mark, start);
    seconds(59).await;
    assert!(log.messages(Level::WARN, "has been held").is_empty());
    seconds(2).await;
    assert_eq!(log.messages(Level::WARN, "has been held").len(), 1);
    seconds(600).await;
    assert_eq!(log.messages(Level::WARN, "has been held").len(), 1);
    assert!(is_running(&subscription.status().state), "{:?}", subscription.status());
    let _ = subscription.hold().durable_through(&subscription.hold().mark());
    until(&subscription, "not held", |status| status.held.is_none()).await;
}

#[tokio::test(start_paused = true)]
async fn a_pause_goes_on_behind_what_was_handled_and_a_handler_lost_takes_back_what_was_not_declared() {
    let world = World::new();
    let subscription = world.action().hold().await.unwrap();
    world.inserts(1..=3);
    until_settled(&subscription, 3).await;
    subscription.pause().await.unwrap();
    subscription.resume().await.unwrap();
    world.insert(4);
    until_settled(&subscription, 4).await;
    assert_eq!(world.seen.keys(), [1, 2, 3, 4]);
    subscription.shutdown().await.unwrap();

    // A factory's handler that panics takes with it what it had not made durable: that comes again, to the next one.
    let world = World::new();
    let seen = world.seen.clone();
    let factory = move || {
        seen.then(|delivery: Delivery| async move {
            let key = delivery.event.document_id::<i32>()?;
            assert!(key != Some(3) || delivery.may_be_repeat, "gone");
            Ok(())
        })
    };
    let subscription = world.subscriptions.subscribe_with(ID, factory).hold().await.unwrap();
    let fence = subscription.status().fence;
    world.inserts(1..=4);
    until_seen(&world, 7).await;
    assert_eq!(world.seen.keys(), [1, 2, 3, 1, 2, 3, 4]);
    until_settled(&subscription, 4).await;
    assert!(subscription.status().fence > fence);
    assert_eq!(subscription.status().settled, 4);
    assert!(!matches!(subscription.status().state, State::Stopped(_)));
}
