//! Pause, resume, shutdown, cancel, and being dropped: what each waits for, what it stores, what it answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use mongosub::bson::Document;
use mongosub::{
    CheckpointStorage, Claim, Delivery, Failure, Handler, Kind, Reason, SaveMode, SourceError, State, StorageError,
    SubscribeError, Subscription, SubscriptionError,
};
use tokio::time::Instant;
use tracing::Level;

use crate::support::{
    Fault, Hold, ID, Log, World, id, is_running, millis, seconds, until_reason, until_saved, until_seen, until_settled,
};

fn ended(error: &SubscriptionError) -> &'static str {
    match error {
        SubscriptionError::Ended { reason, .. } => reason.name(),
        other => panic!("{other:?}"),
    }
}

/// Asks in a task of its own.
fn ask<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
    subscription: &Subscription,
    what: impl FnOnce(Subscription) -> F,
) -> tokio::task::JoinHandle<T> {
    tokio::spawn(what(subscription.clone()))
}

// Pause and resume.

#[tokio::test(start_paused = true)]
async fn a_pause_waits_for_the_event_in_hand_and_stores_it() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let first = world.insert(1);
    world.insert(2);
    until_seen(&world, 1).await;
    let begun = Instant::now();
    let pause = ask(&subscription, |subscription| async move { subscription.pause().await });
    seconds(20).await;
    assert!(!pause.is_finished());
    hold.let_go(1);
    pause.await.unwrap().unwrap();
    assert_eq!(begun.elapsed().as_secs(), 20);
    assert_eq!(subscription.status().state, State::Paused);
    assert_eq!((world.seen.keys(), world.stored().await), (vec![1], Some(first.clone())));
    assert_eq!(world.model.active_readers(), 0);
    assert!(!world.record().await.unwrap().clean, "a pause is no end");
    hold.let_go(1);
    subscription.resume().await.unwrap();
    until_settled(&subscription, 2).await;
    assert_eq!(world.seen.keys(), [1, 2]);
    assert_eq!(world.model.opened_from().last().unwrap(), &Some(first));
}

#[tokio::test(start_paused = true)]
async fn a_pause_abandons_a_hung_handler_after_the_grace_and_the_event_comes_again() {
    let log = Log::default();
    let _guard = log.begin();
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let start = world.stored().await;
    let first = world.insert(1);
    until_seen(&world, 1).await;
    let begun = Instant::now();
    subscription.pause().await.unwrap();
    assert_eq!(begun.elapsed().as_secs(), 30);
    assert_eq!(world.stored().await, start);
    let lines = log.messages(Level::WARN, "did not finish");
    assert!(lines.len() == 1 && lines[0].contains(&first.to_string()), "{lines:?}");
    hold.let_go(1);
    subscription.resume().await.unwrap();
    until_saved(&subscription, &first).await;
    let seen: Vec<_> = world.seen.all().iter().map(|seen| (seen.key, seen.attempt, seen.may_be_repeat)).collect();
    assert_eq!(seen, [(1, 1, false), (1, 1, true)]);
    world.insert(2);
    hold.let_go(1);
    until_settled(&subscription, 2).await;
    assert!(!world.seen.all()[2].may_be_repeat);
}

#[tokio::test(start_paused = true)]
async fn the_grace_is_a_setting() {
    let world = World::new();
    let action = world.held(&Hold::default()).shutdown_grace(Duration::from_secs(3));
    let subscription = action.await.unwrap();
    world.insert(1);
    until_seen(&world, 1).await;
    let begun = Instant::now();
    subscription.pause().await.unwrap();
    assert_eq!(begun.elapsed().as_secs(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_pause_does_not_wait_for_the_backoff_of_a_failing_handler() {
    let world = World::new();
    let handler = world.seen.then(|_| async { Err("never".into()) });
    let subscription = world.subscriptions.subscribe(ID, handler).await.unwrap();
    world.insert(1);
    seconds(300).await;
    let begun = Instant::now();
    subscription.pause().await.unwrap();
    assert!(begun.elapsed() < Duration::from_millis(1));
    assert_eq!(subscription.status().state, State::Paused);
    let tried = world.seen.all().len();
    seconds(300).await;
    assert_eq!(world.seen.all().len(), tried);
    subscription.resume().await.unwrap();
    until_seen(&world, tried + 1).await;
    let last = world.seen.all().pop().unwrap();
    assert_eq!((last.key, last.attempt, last.may_be_repeat), (1, 1, true));
}

#[tokio::test(start_paused = true)]
async fn a_pause_awaits_a_hanging_write_then_says_not_saved_and_goes_on_trying() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.next_saves([Fault::Hang]);
    let first = world.insert(1);
    until_settled(&subscription, 1).await;
    let begun = Instant::now();
    let error = subscription.pause().await.unwrap_err();
    assert_eq!(begun.elapsed().as_secs(), 30);
    let SubscriptionError::NotSaved { position, last, .. } = error else { panic!("{error:?}") };
    assert_eq!((position, last.name()), (first.clone(), "storage_unavailable"));
    assert_eq!(subscription.status().state, State::Paused);
    seconds(100).await;
    world.storage.release();
    until_saved(&subscription, &first).await;
    subscription.pause().await.unwrap();
    subscription.resume().await.unwrap();
    world.insert(2);
    until_settled(&subscription, 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_paused_run_goes_on_trying_a_save_that_fails() {
    let world = World::new();
    let subscription = world.action().save_every(10).await.unwrap();
    let first = world.insert(1);
    until_settled(&subscription, 1).await;
    world.storage.every_save(Fault::Fail);
    assert!(matches!(subscription.pause().await, Err(SubscriptionError::NotSaved { .. })));
    let sent = world.storage.sent().len();
    seconds(100).await;
    assert!(world.storage.sent().len() >= sent + 10);
    world.storage.heal();
    until_saved(&subscription, &first).await;
}

#[tokio::test(start_paused = true)]
async fn the_last_save_of_a_pause_has_ten_seconds_when_the_handler_took_the_grace() {
    let world = World::new();
    let hold = Hold::default();
    let subscription = world.held(&hold).await.unwrap();
    world.storage.next_saves([Fault::Late(Duration::from_secs(8))]);
    let first = world.insert(1);
    until_seen(&world, 1).await;
    let pause = ask(&subscription, |subscription| async move { subscription.pause().await });
    seconds(29).await;
    hold.let_go(1);
    pause.await.unwrap().unwrap();
    assert_eq!(world.stored().await, Some(first));
}

#[tokio::test(start_paused = true)]
async fn pausing_and_resuming_twice_changes_nothing() {
    let world = World::new();
    let subscription = world.subscribe().await;
    subscription.resume().await.unwrap();
    assert_eq!(world.model.opens(), 1, "it runs already");
    subscription.pause().await.unwrap();
    subscription.pause().await.unwrap();
    subscription.resume().await.unwrap();
    subscription.resume().await.unwrap();
    assert_eq!((world.model.opens(), world.model.active_readers()), (2, 1));
    let both = [
        ask(&subscription, |subscription| async move { subscription.pause().await }),
        ask(&subscription, |subscription| async move { subscription.resume().await }),
        ask(&subscription, |subscription| async move { subscription.pause().await }),
        ask(&subscription, |subscription| async move { subscription.resume().await }),
    ];
    for asked in both {
        asked.await.unwrap().unwrap();
    }
    let last = world.insert(1);
    until_saved(&subscription, &last).await;
    assert_eq!((world.seen.keys(), world.model.active_readers()), (vec![1], 1));
}

#[tokio::test(start_paused = true)]
async fn a_second_resume_waits_for_the_same_cursor() {
    let world = World::new();
    let subscription = world.subscribe().await;
    subscription.pause().await.unwrap();
    world.model.hang_opens();
    let first = ask(&subscription, |subscription| async move { subscription.resume().await });
    millis(10).await;
    let second = ask(&subscription, |subscription| async move { subscription.resume().await });
    seconds(10).await;
    assert!(!first.is_finished() && !second.is_finished());
    assert_eq!(subscription.status().state, State::Starting);
    world.model.release_opens();
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(world.model.opens(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_resume_checks_that_the_record_is_still_its_own() {
    let world = World::new();
    let subscription = world.subscribe().await;
    subscription.pause().await.unwrap();
    world.storage.inner().claim(&Claim::new(id())).await.unwrap();
    world.insert(1);
    assert_eq!(ended(&subscription.resume().await.unwrap_err()), "superseded");
    assert!(subscription.is_stopped());
    assert!(matches!(subscription.status().state, State::Stopped(Reason::Superseded { owner: Some(_), .. })));
    assert!(world.seen.keys().is_empty());

    let world = World::new();
    let subscription = world.subscribe().await;
    subscription.pause().await.unwrap();
    world.storage.inner().delete(&id(), None).await.unwrap();
    assert_eq!(ended(&subscription.resume().await.unwrap_err()), "deleted");
    assert_eq!(world.record().await, None);
    world.subscribe().await;
}

#[tokio::test(start_paused = true)]
async fn a_resume_that_cannot_read_the_record_changes_nothing() {
    let world = World::new();
    let subscription = world.subscribe().await;
    subscription.pause().await.unwrap();
    world.storage.next_reads_fail([StorageError::Unavailable { message: "away".into() }]);
    assert!(matches!(subscription.resume().await, Err(SubscriptionError::Storage { .. })));
    assert_eq!(subscription.status().state, State::Paused);
    subscription.resume().await.unwrap();
    assert!(is_running(&subscription.status().state));
}

#[tokio::test(start_paused = true)]
async fn a_feed_that_has_ended_cannot_be_paused() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.model.end();
    until_reason(&subscription, "stopped", "ended").await;
    assert_eq!(ended(&subscription.pause().await.unwrap_err()), "ended");
    // Also when it ends in the middle of the pause's last event.
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    world.insert(1);
    world.model.end();
    until_seen(&world, 1).await;
    let pause = ask(&subscription, |subscription| async move { subscription.pause().await });
    millis(1).await;
    hold.let_go(1);
    pause.await.unwrap().unwrap();
    subscription.resume().await.unwrap();
    until_reason(&subscription, "stopped", "ended").await;
}

#[tokio::test(start_paused = true)]
async fn a_pause_in_write_through_does_not_wait_for_the_next_event_to_be_let_through() {
    let world = World::new();
    let subscription = world.action().save_mode(SaveMode::WriteThrough).await.unwrap();
    world.storage.next_saves([Fault::Late(Duration::from_secs(5))]);
    let first = world.insert(1);
    world.insert(2);
    until_settled(&subscription, 1).await;
    let begun = Instant::now();
    subscription.pause().await.unwrap();
    assert_eq!(begun.elapsed().as_secs(), 5);
    assert_eq!((world.seen.keys(), world.stored().await), (vec![1], Some(first)));
}

#[tokio::test(start_paused = true)]
async fn a_pause_while_the_delivery_is_stopped_by_the_storage_works_and_so_does_the_resume() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.every_save(Fault::Fail);
    world.insert(1);
    seconds(31).await;
    world.insert(2);
    seconds(1).await;
    assert!(matches!(subscription.pause().await, Err(SubscriptionError::NotSaved { .. })));
    subscription.resume().await.unwrap();
    seconds(10).await;
    assert_eq!(world.seen.keys(), [1], "not before a save succeeds");
    world.storage.heal();
    until_settled(&subscription, 2).await;
    let status = subscription.status();
    assert_eq!((world.seen.keys(), status.events, status.delivered), (vec![1, 2], 2, 2));
}

// Shutdown.

#[tokio::test(start_paused = true)]
async fn a_shutdown_finishes_the_event_in_hand_stores_it_and_answers_what_is_stored() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let first = world.insert(1);
    world.insert(2);
    until_seen(&world, 1).await;
    let shutdown = ask(&subscription, |subscription| async move { subscription.shutdown().await });
    seconds(5).await;
    hold.let_go(1);
    assert_eq!(shutdown.await.unwrap().unwrap(), Some(first.clone()));
    assert!(subscription.is_stopped());
    assert!(world.subscriptions.get(ID).is_none());
    let record = world.record().await.unwrap();
    assert_eq!((record.position, record.kind, record.clean), (Some(first), Some(Kind::Event), true));
    assert_eq!((world.seen.keys(), world.model.active_readers()), (vec![1], 0));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_abandons_a_hung_handler_and_is_not_clean() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let first = world.insert(1);
    hold.let_go(1);
    until_saved(&subscription, &first).await;
    world.insert(2);
    until_seen(&world, 2).await;
    let begun = Instant::now();
    assert_eq!(subscription.shutdown().await.unwrap(), Some(first.clone()));
    assert_eq!(begun.elapsed().as_secs(), 30);
    let record = world.record().await.unwrap();
    assert_eq!((record.position, record.clean), (Some(first), false));
    let next = world.restarted();
    let subscription = next.subscribe().await;
    until_settled(&subscription, 1).await;
    let seen = next.seen.all();
    assert_eq!((seen[0].key, seen[0].may_be_repeat), (2, true));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_while_the_handler_fails_is_not_clean() {
    let world = World::new();
    let handler = world.seen.then(|_| async { Err("never".into()) });
    let subscription = world.subscriptions.subscribe(ID, handler).await.unwrap();
    let start = world.stored().await;
    world.insert(1);
    seconds(10).await;
    assert_eq!(subscription.shutdown().await.unwrap(), start);
    assert!(!world.record().await.unwrap().clean);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_that_cannot_store_says_so_after_the_grace_and_the_event_comes_again() {
    for fault in [Fault::Fail, Fault::Hang] {
        let world = World::new();
        let subscription = world.subscribe().await;
        world.storage.every_save(fault);
        let first = world.insert(1);
        until_settled(&subscription, 1).await;
        let begun = Instant::now();
        let error = subscription.shutdown().await.unwrap_err();
        assert_eq!(begun.elapsed().as_secs(), 30);
        let SubscriptionError::NotSaved { position, .. } = &error else { panic!("{error:?}") };
        assert_eq!(*position, first);
        assert!(subscription.is_stopped());
        let next = world.restarted();
        let subscription = next.subscribe().await;
        until_settled(&subscription, 1).await;
        let seen = next.seen.all();
        assert_eq!((seen[0].key, seen[0].may_be_repeat), (1, true));
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_save_gets_at_least_ten_seconds_when_the_handler_has_used_the_grace_up() {
    let world = World::new();
    let hold = Hold::default();
    let subscription = world.held(&hold).shutdown_grace(Duration::from_secs(2)).await.unwrap();
    hold.let_go(1);
    world.storage.every_save(Fault::Fail);
    let first = world.insert(1);
    world.insert(2);
    until_seen(&world, 2).await;
    let begun = Instant::now();
    let error = subscription.shutdown().await.unwrap_err();
    assert!(matches!(error, SubscriptionError::NotSaved { position, .. } if position == first));
    assert_eq!(begun.elapsed().as_secs(), 12);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_that_meets_an_unreadable_record_ends_the_run_and_says_what_is_not_stored() {
    let world = World::new();
    let subscription = world.action().save_every(10).await.unwrap();
    let first = world.insert(1);
    until_settled(&subscription, 1).await;
    let error = StorageError::Unreadable { id: ID.into(), field: "version".into(), message: "is odd".into() };
    world.storage.every_save(Fault::Error(error));
    let error = subscription.shutdown().await.unwrap_err();
    let SubscriptionError::NotSaved { position, last, .. } = &error else { panic!("{error:?}") };
    assert_eq!((position, last.name()), (&first, "unreadable_record"));
    assert!(subscription.is_stopped());
}

#[tokio::test(start_paused = true)]
async fn a_second_shutdown_answers_the_same() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let first = world.insert(1);
    until_settled(&subscription, 1).await;
    let both = [(); 3].map(|()| ask(&subscription, |subscription| async move { subscription.shutdown().await }));
    for shutdown in both {
        assert_eq!(shutdown.await.unwrap().unwrap(), Some(first.clone()));
    }
    assert_eq!(subscription.shutdown().await.unwrap(), Some(first.clone()));
    assert_eq!(ended(&subscription.pause().await.unwrap_err()), "requested");
    assert_eq!(ended(&subscription.resume().await.unwrap_err()), "requested");
    assert_eq!(ended(&subscription.drained().await.unwrap_err()), "requested");
    assert_eq!(ended(&subscription.caught_up().await.unwrap_err()), "requested");
    assert_eq!(ended(&subscription.cancel().await.unwrap_err()), "requested");
    assert_eq!(world.stored().await, Some(first), "a run that has ended deletes nothing");
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_does_not_wait_for_a_source_that_does_not_open() {
    let world = World::new();
    let subscription = world.subscribe().await;
    subscription.pause().await.unwrap();
    world.model.fail_opens(SourceError::Unavailable { message: "down".into() }, 10_000);
    let resume = ask(&subscription, |subscription| async move { subscription.resume().await });
    until_reason(&subscription, "retrying", "source_unavailable").await;
    seconds(60).await;
    let begun = Instant::now();
    let stored = subscription.shutdown().await.unwrap();
    assert!(begun.elapsed() < Duration::from_millis(1));
    assert_eq!((stored, world.record().await.unwrap().clean), (world.stored().await, true));
    assert_eq!(ended(&resume.await.unwrap().unwrap_err()), "requested");
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_a_paused_and_a_stalled_run() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let first = world.insert(1);
    until_settled(&subscription, 1).await;
    subscription.pause().await.unwrap();
    assert_eq!(subscription.shutdown().await.unwrap(), Some(first.clone()));
    assert!(world.record().await.unwrap().clean);

    let world = world.restarted();
    let subscription = world.subscribe().await;
    let reason = Reason::HistoryLost { position: first.clone(), oldest: None };
    world.model.break_reader(SourceError::Refused(reason));
    until_reason(&subscription, "stalled", "history_lost").await;
    assert_eq!(subscription.shutdown().await.unwrap(), Some(first));
    assert!(world.record().await.unwrap().clean);
    assert!(world.subscriptions.get(ID).is_none());
    world.subscribe().await;
}

#[tokio::test(start_paused = true)]
async fn everything_is_shut_down_at_once() {
    let world = World::new();
    let hold = Hold::default();
    for name in ["a", "b", "c"] {
        let hold = hold.clone();
        let handler = world.seen.then(move |_| {
            let hold = hold.clone();
            async move {
                hold.wait().await;
                Ok(())
            }
        });
        world.subscriptions.subscribe(name, handler).await.unwrap();
    }
    world.insert(1);
    until_seen(&world, 3).await;
    assert_eq!(world.subscriptions.running().len(), 3);
    let begun = Instant::now();
    let answers = world.subscriptions.shutdown_all().await;
    assert_eq!(begun.elapsed().as_secs(), 30, "all graces at once");
    assert_eq!(answers.iter().filter(|(_, answer)| answer.is_ok()).count(), 3);
    assert!(world.subscriptions.running().is_empty());
}

#[tokio::test(start_paused = true)]
async fn dropping_the_future_of_a_shutdown_does_not_stop_it() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let first = world.insert(1);
    until_seen(&world, 1).await;
    assert!(tokio::time::timeout(Duration::from_secs(1), subscription.shutdown()).await.is_err());
    hold.let_go(1);
    assert_eq!(subscription.stopped().await, Reason::Requested);
    assert_eq!(world.stored().await, Some(first));
}

// Cancel.

#[tokio::test(start_paused = true)]
async fn a_cancel_awaits_the_write_in_flight_and_deletes_behind_it() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.next_saves([Fault::Hang]);
    world.insert(1);
    until_settled(&subscription, 1).await;
    millis(1).await;
    let cancel = ask(&subscription, |subscription| async move { subscription.cancel().await });
    seconds(120).await;
    assert!(!cancel.is_finished(), "the write is awaited to its end");
    assert!(world.record().await.is_some());
    world.storage.release();
    cancel.await.unwrap().unwrap();
    assert_eq!(world.record().await, None);
    assert!(subscription.is_stopped());
    seconds(300).await;
    assert_eq!((world.record().await, world.storage.sent().len()), (None, 1), "nothing is written behind it");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_stores_nothing_on_its_way() {
    let world = World::new();
    let subscription = world.action().save_every(10).await.unwrap();
    world.insert(1);
    until_settled(&subscription, 1).await;
    subscription.cancel().await.unwrap();
    assert_eq!((world.record().await, world.storage.sent().len()), (None, 0));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_of_a_superseded_run_leaves_the_record() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.inner().claim(&Claim::new(id())).await.unwrap();
    let record = world.record().await;
    assert_eq!(ended(&subscription.cancel().await.unwrap_err()), "superseded");
    assert_eq!(world.record().await, record);
    assert!(subscription.is_stopped());
}

#[tokio::test(start_paused = true)]
async fn a_cancel_of_a_record_that_is_gone_is_fine() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.inner().delete(&id(), None).await.unwrap();
    subscription.cancel().await.unwrap();
    assert!(subscription.is_stopped());
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_cannot_delete_says_so_and_the_run_has_stopped() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.next_deletes_fail([StorageError::Unavailable { message: "away".into() }]);
    assert!(matches!(subscription.cancel().await, Err(SubscriptionError::Storage { .. })));
    assert!(subscription.is_stopped());
    assert!(world.record().await.is_some());
    world.subscribe().await;
}

#[tokio::test(start_paused = true)]
async fn a_cancel_ends_a_stalled_run_and_one_whose_handler_hangs() {
    let world = World::new();
    let (subscription, _hold) = world.subscribe_held().await;
    world.insert(1);
    until_seen(&world, 1).await;
    let begun = Instant::now();
    subscription.cancel().await.unwrap();
    assert_eq!((begun.elapsed().as_secs(), world.record().await), (30, None));

    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.next_saves([Fault::Error(StorageError::Refused { code: 121, message: "no".into() })]);
    world.insert(1);
    until_reason(&subscription, "stalled", "refused_by_server").await;
    subscription.cancel().await.unwrap();
    assert_eq!(world.record().await, None);
}

/// Another thread asks for the id as soon as it is answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_id_is_free_when_shutdown_and_cancel_answer() {
    let world = World::new();
    for round in 0..200 {
        let subscription = world.subscribe().await;
        if round % 2 == 0 {
            subscription.shutdown().await.unwrap();
        } else {
            subscription.cancel().await.unwrap();
        }
        assert!(subscription.is_stopped(), "round {round}");
    }
}

// Dropped.

#[tokio::test(start_paused = true)]
async fn dropping_the_handle_changes_nothing() {
    let world = World::new();
    drop(world.subscribe().await);
    seconds(1).await;
    world.insert(1);
    until_seen(&world, 1).await;
    let subscription = world.subscriptions.get(ID).unwrap();
    assert!(is_running(&subscription.status().state));
    assert!(matches!(
        world.subscriptions.subscribe(ID, world.seen.handler()).await,
        Err(SubscribeError::AlreadyRunning { .. })
    ));
}

#[tokio::test(start_paused = true)]
async fn dropping_the_last_of_both_stops_reading_leaves_the_event_unsettled_and_warns() {
    let log = Log::default();
    let _guard = log.begin();
    let world = World::new();
    let (subscription, _hold) = world.subscribe_held().await;
    let watch = subscription.watch();
    let start = world.stored().await;
    world.insert(1);
    until_seen(&world, 1).await;
    let World { model, storage, subscriptions, seen } = world;
    drop(subscriptions);
    seconds(1).await;
    assert_eq!(model.active_readers(), 1, "a handle is left");
    drop(subscription);
    millis(1).await;
    assert_eq!(model.active_readers(), 0);
    assert_eq!(log.messages(Level::WARN, "was dropped while it ran").len(), 1);
    assert!(matches!(watch.borrow().state, State::Stopped(_)));
    let next = World::over(model, storage.inner().clone());
    assert_eq!(next.stored().await, start);
    let subscription = next.subscribe().await;
    until_settled(&subscription, 1).await;
    assert_eq!((seen.keys(), next.seen.keys()), (vec![1], vec![1]));
    assert!(next.seen.all()[0].may_be_repeat);
}

#[tokio::test(start_paused = true)]
async fn dropping_the_future_of_a_subscribe_frees_the_id() {
    let world = World::new();
    world.model.hang_opens();
    let start = tokio::time::timeout(Duration::from_secs(1), world.action().into_future()).await;
    assert!(start.is_err());
    assert!(world.subscriptions.get(ID).is_none());
    world.model.release_opens();
    let subscription = world.subscribe().await;
    world.insert(1);
    until_settled(&subscription, 1).await;
    assert_eq!(world.seen.keys(), [1]);
}

// The same handler.

/// Counts itself.
struct Once(Arc<AtomicU32>);

impl Handler for Once {
    async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
        delivery.event.document_key::<Document>()?;
        self.0.fetch_add(1, SeqCst);
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_with_state_is_the_same_one_after_a_resume() {
    let world = World::new();
    let handled = Arc::new(AtomicU32::new(0));
    let subscription = world.subscriptions.subscribe(ID, Once(handled.clone())).await.unwrap();
    world.insert(1);
    until_settled(&subscription, 1).await;
    subscription.pause().await.unwrap();
    subscription.resume().await.unwrap();
    world.insert(2);
    until_settled(&subscription, 2).await;
    assert_eq!(handled.load(SeqCst), 2);
}
