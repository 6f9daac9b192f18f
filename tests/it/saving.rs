//! The save policy and the save mode: what is written when, and what is never written.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use mongosub::bson::Document;
use mongosub::{Checkpoint, Delivery, Kind, SaveMode, Subscription};
use tokio::time::Instant;

use crate::support::{Fault, Hold, ID, World, millis, seconds, until_saved, until_settled};

fn key(delivery: &Delivery) -> i32 {
    delivery.event.document_key::<Document>().unwrap().unwrap().get_i32("_id").unwrap()
}

/// Pushes one event after the other, each settled and at rest before the next.
async fn one_by_one(
    world: &World,
    subscription: &Subscription,
    keys: std::ops::RangeInclusive<i32>,
) -> Vec<Checkpoint> {
    let mut positions = Vec::new();
    for key in keys {
        let settled = subscription.status().settled;
        positions.push(world.insert(key));
        until_settled(subscription, settled + 1).await;
        millis(50).await;
    }
    positions
}

#[tokio::test(start_paused = true)]
async fn every_nth_settled_event_is_stored() {
    let world = World::new();
    let subscription = world.action().save_every(3).await.unwrap();
    let at = one_by_one(&world, &subscription, 1..=7).await;
    assert_eq!(world.storage.sent_positions(), [at[2].clone(), at[5].clone()]);
    assert!(world.storage.sent().iter().all(|save| save.kind == Kind::Event));
}

#[tokio::test(start_paused = true)]
async fn the_count_starts_again_at_a_quiet_save_which_covers_what_was_settled() {
    let world = World::new();
    let subscription = world.action().save_every(3).await.unwrap();
    let mut at = one_by_one(&world, &subscription, 1..=2).await;
    seconds(60).await;
    assert_eq!(world.storage.sent_positions(), [at[1].clone()]);
    at.extend(one_by_one(&world, &subscription, 3..=4).await);
    assert_eq!(world.storage.sent().len(), 1);
    at.extend(one_by_one(&world, &subscription, 5..=5).await);
    assert_eq!(world.storage.sent_positions()[1..], [at[4].clone()]);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_save_that_failed_does_not_start_the_count_again() {
    let world = World::new();
    let subscription = world.action().save_every(3).await.unwrap();
    one_by_one(&world, &subscription, 1..=2).await;
    world.storage.next_saves([Fault::Fail]);
    seconds(60).await;
    assert_eq!(world.storage.sent().len(), 1);
    let third = one_by_one(&world, &subscription, 3..=3).await;
    assert_eq!(world.stored().await.as_ref(), third.last());
}

#[tokio::test(start_paused = true)]
async fn the_count_starts_again_at_a_pause_and_at_a_drain() {
    let world = World::new();
    let subscription = world.action().save_every(3).await.unwrap();
    let at = one_by_one(&world, &subscription, 1..=2).await;
    subscription.pause().await.unwrap();
    assert_eq!(world.stored().await.as_ref(), at.last());
    subscription.resume().await.unwrap();
    one_by_one(&world, &subscription, 3..=4).await;
    assert_eq!(world.stored().await.as_ref(), at.last());
    let fourth = subscription.drained().await.unwrap();
    one_by_one(&world, &subscription, 5..=6).await;
    assert_eq!(world.stored().await, fourth);
    let seventh = one_by_one(&world, &subscription, 7..=7).await;
    assert_eq!(world.stored().await.as_ref(), seventh.last());
}

#[tokio::test(start_paused = true)]
async fn a_pause_or_a_drain_with_nothing_to_store_does_not_make_the_next_event_wanted() {
    let world = World::new();
    let subscription = world.action().save_every(10).await.unwrap();
    subscription.pause().await.unwrap();
    subscription.resume().await.unwrap();
    one_by_one(&world, &subscription, 1..=1).await;
    assert!(world.storage.sent().is_empty());
    // A drain answered while somebody waits to have caught up.
    world.model.set_head(mongosub::bson::Timestamp { time: 1_700_000_100, increment: 1 });
    let waiting = tokio::spawn({
        let subscription = subscription.clone();
        async move { subscription.caught_up().await }
    });
    millis(10).await;
    let first = subscription.drained().await.unwrap();
    one_by_one(&world, &subscription, 2..=9).await;
    assert_eq!(world.stored().await, first);
    assert!(!waiting.is_finished());
}

#[tokio::test(start_paused = true)]
async fn no_write_of_any_kind_passes_a_declined_event_until_a_later_one_is_accepted() {
    let world = World::new();
    let subscription = world.action().save_when(|delivery| key(delivery) % 3 == 0).await.unwrap();
    let start = world.stored().await;
    let at = one_by_one(&world, &subscription, 1..=3).await;
    assert_eq!(world.stored().await, Some(at[2].clone()));
    let held = one_by_one(&world, &subscription, 4..=5).await;
    for _ in 0..5 {
        world.model.push_quiet();
    }
    seconds(200).await;
    assert_eq!(world.stored().await, Some(at[2].clone()), "quiet");
    subscription.pause().await.unwrap();
    assert_eq!(world.stored().await, Some(at[2].clone()), "pause");
    subscription.resume().await.unwrap();
    assert_eq!(subscription.drained().await.unwrap(), Some(at[2].clone()), "drained");
    let sixth = one_by_one(&world, &subscription, 6..=6).await;
    assert_eq!(world.stored().await.as_ref(), sixth.last());
    let quiet = world.model.push_quiet();
    until_saved(&subscription, &quiet).await;
    one_by_one(&world, &subscription, 7..=7).await;
    assert_eq!(subscription.shutdown().await.unwrap(), Some(quiet.clone()), "shutdown");
    let record = world.record().await.unwrap();
    assert_eq!((record.position, record.clean), (Some(quiet), false), "what is held back comes again");
    assert!(held.iter().all(|position| !world.storage.sent_positions().contains(position)));
    assert_ne!(start, world.stored().await);
}

#[tokio::test(start_paused = true)]
async fn what_was_held_back_comes_again_marked_as_a_possible_repeat() {
    let world = World::new();
    let subscription = world.action().save_when(|_| false).await.unwrap();
    one_by_one(&world, &subscription, 1..=3).await;
    subscription.shutdown().await.unwrap();
    let next = world.restarted();
    let subscription = next.subscribe().await;
    until_settled(&subscription, 3).await;
    assert_eq!(next.seen.keys(), [1, 2, 3]);
    assert!(next.seen.all().iter().all(|seen| seen.may_be_repeat));
    assert_eq!(subscription.status().replayed, 3);
    next.insert(4);
    until_settled(&subscription, 4).await;
    assert!(!next.seen.all()[3].may_be_repeat);
}

#[tokio::test(start_paused = true)]
async fn the_predicate_is_asked_once_for_each_settled_event_after_the_handler() {
    let world = World::new();
    let journal: Arc<Mutex<Vec<String>>> = Arc::default();
    let notes = journal.clone();
    let handler = move |delivery: Delivery| {
        let notes = notes.clone();
        async move {
            notes.lock().unwrap().push(format!("handled {} {}", key(&delivery), delivery.attempt));
            if delivery.attempt < 3 && key(&delivery) == 1 { Err("again".into()) } else { Ok(()) }
        }
    };
    let notes = journal.clone();
    let asked = move |delivery: &Delivery| {
        notes.lock().unwrap().push(format!("asked {} {}", key(delivery), delivery.attempt));
        true
    };
    let subscription = world.subscriptions.subscribe(ID, handler).save_when(asked).await.unwrap();
    one_by_one(&world, &subscription, 1..=2).await;
    seconds(200).await;
    subscription.shutdown().await.unwrap();
    let expected = ["handled 1 1", "handled 1 2", "handled 1 3", "asked 1 3", "handled 2 1", "asked 2 1"];
    assert_eq!(*journal.lock().unwrap(), expected);
}

#[tokio::test(start_paused = true)]
async fn a_predicate_that_panics_declines() {
    let world = World::new();
    let accepts = |delivery: &Delivery| {
        assert!(key(delivery) != 2, "cannot say");
        true
    };
    let subscription = world.action().save_when(accepts).await.unwrap();
    let at = one_by_one(&world, &subscription, 1..=2).await;
    assert_eq!(subscription.drained().await.unwrap(), Some(at[0].clone()));
    seconds(100).await;
    assert_eq!(world.stored().await, Some(at[0].clone()));
    let third = one_by_one(&world, &subscription, 3..=3).await;
    assert_eq!(world.stored().await.as_ref(), third.last());
    assert_eq!(world.seen.keys(), [1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn write_behind_does_not_wait_and_newer_positions_replace_older_ones() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.next_saves([Fault::Late(Duration::from_secs(5))]);
    let mut at = one_by_one(&world, &subscription, 1..=1).await;
    at.extend((2..=50).map(|key| world.insert(key)));
    until_settled(&subscription, 50).await;
    millis(100).await;
    assert_eq!(world.storage.sent().len(), 1, "one write in flight");
    until_saved(&subscription, &at[49]).await;
    let sent = world.storage.sent_positions();
    assert_eq!(sent.len(), 2);
    assert_eq!(sent[1], at[49]);
}

#[tokio::test(start_paused = true)]
async fn write_behind_writes_are_at_least_ten_milliseconds_apart() {
    let world = World::new();
    let handler = world.seen.then(|_| async {
        millis(1).await;
        Ok(())
    });
    let subscription = world.subscriptions.subscribe(ID, handler).await.unwrap();
    let begun = Instant::now();
    let last = world.inserts(1..=100).pop().unwrap();
    until_saved(&subscription, &last).await;
    let sent = world.storage.sent_ms(begun);
    assert!(sent.windows(2).all(|pair| pair[1] - pair[0] >= 10), "{sent:?}");
    assert!((8..=12).contains(&sent.len()), "{sent:?}");
    assert!(world.storage.sent_positions().is_sorted_by(|a, b| b.is_beyond(a)));
}

#[tokio::test(start_paused = true)]
async fn write_through_hands_out_the_next_event_only_when_the_save_is_answered() {
    let world = World::new();
    let subscription = world.action().save_mode(SaveMode::WriteThrough).await.unwrap();
    world.storage.next_saves([Fault::Hang]);
    world.insert(1);
    let second = world.insert(2);
    seconds(5).await;
    assert_eq!(world.seen.keys(), [1]);
    let status = subscription.status();
    assert_eq!((status.settled, status.delivered), (1, 1));
    world.storage.release();
    until_saved(&subscription, &second).await;
    assert_eq!(world.seen.keys(), [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_storage_that_takes_its_time_is_left_alone_for_ten_milliseconds_behind_its_answer() {
    let world = World::new();
    world.storage.every_save(Fault::Late(Duration::from_millis(8)));
    let subscription = world.subscribe().await;
    let begun = Instant::now();
    for key in 1..=60 {
        world.insert(key);
        millis(1).await;
    }
    until_settled(&subscription, 60).await;
    millis(100).await;
    let sent = world.storage.sent_ms(begun);
    assert!(sent.len() >= 3 && sent.windows(2).all(|pair| pair[1] - pair[0] >= 18), "{sent:?}");
}

#[tokio::test(start_paused = true)]
async fn write_through_waits_for_wanted_saves_alone_and_does_not_space_them() {
    let world = World::new();
    let subscription = world.action().save_mode(SaveMode::WriteThrough).save_every(3).await.unwrap();
    world.storage.next_saves([Fault::Hang]);
    for key in 1..=10 {
        world.insert(key);
    }
    seconds(5).await;
    assert_eq!(world.seen.keys(), [1, 2, 3]);
    let released = Instant::now();
    world.storage.release();
    until_settled(&subscription, 10).await;
    assert_eq!(world.storage.sent_ms(released)[1..], [0, 0]);
}

#[tokio::test(start_paused = true)]
async fn pause_drained_and_shutdown_write_at_once_in_both_modes() {
    for mode in [SaveMode::WriteBehind, SaveMode::WriteThrough] {
        for ask in ["pause", "drained", "shutdown"] {
            let world = World::new();
            let hold = Hold::default();
            let subscription = world.held(&hold).save_every(2).save_mode(mode).await.unwrap();
            let at: Vec<_> = (1..=4).map(|key| world.insert(key)).collect();
            hold.let_go(2);
            until_saved(&subscription, &at[1]).await;
            let (begun, sent) = (world.storage.sent()[0].at, world.storage.sent().len());
            hold.let_go(1);
            until_settled(&subscription, 3).await;
            match ask {
                "pause" => {
                    hold.let_go(1);
                    subscription.pause().await.unwrap();
                }
                "drained" => {
                    hold.let_go(1);
                    assert_eq!(subscription.drained().await.unwrap(), Some(at[3].clone()));
                }
                _ => {
                    hold.let_go(1);
                    subscription.shutdown().await.unwrap();
                }
            }
            let stored = world.stored().await.unwrap();
            assert!(stored.is_beyond(&at[1]), "{mode:?} {ask}");
            let sent = &world.storage.sent_ms(begun)[sent..];
            assert!(!sent.is_empty() && sent.iter().all(|at| *at < 10), "{mode:?} {ask}: {sent:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn each_event_is_stored_by_default() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let at = one_by_one(&world, &subscription, 1..=3).await;
    assert_eq!(world.storage.sent_positions(), at);
    assert_eq!(subscription.status().saves, 3);
}

/// Everything else here runs under a paused clock, in which two looks at the time are equal.
#[tokio::test]
async fn saves_are_sent_under_a_clock_that_runs_too() {
    for mode in [SaveMode::WriteBehind, SaveMode::WriteThrough] {
        let world = World::new();
        let subscription = world.action().save_mode(mode).await.unwrap();
        let at = one_by_one(&world, &subscription, 1..=2).await;
        until_saved(&subscription, &at[1]).await;
        assert_eq!(world.storage.sent_positions(), at);
    }
}
