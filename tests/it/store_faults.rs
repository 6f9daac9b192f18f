//! A storage that fails, hangs, answers late or loses its reply: the handler has no part in it.

use std::time::Duration;

use mongosub::bson::Timestamp;
use mongosub::{
    Checkpoint, CheckpointStorage, Kind, Reason, Save, SaveMode, SaveOutcome, StorageError, SubscriptionError,
};
use tokio::time::Instant;

use crate::support::{Fault, World, id, is_running, millis, seconds, until, until_reason, until_saved, until_settled};

#[tokio::test(start_paused = true)]
async fn a_failing_save_is_retried_alone() {
    for mode in [SaveMode::WriteBehind, SaveMode::WriteThrough] {
        let world = World::new();
        let subscription = world.action().save_mode(mode).await.unwrap();
        world.storage.next_saves(vec![Fault::Fail; 5]);
        let first = world.insert(1);
        let status = until_reason(&subscription, "retrying", "storage_unavailable").await;
        assert_eq!((status.settled, status.in_hand_since), (1, None));
        until_saved(&subscription, &first).await;
        assert_eq!(world.seen.keys(), [1]);
        assert_eq!(world.storage.sent_positions(), vec![first; 6]);
        assert!(is_running(&subscription.status().state));
    }
}

#[tokio::test(start_paused = true)]
async fn the_retry_of_a_save_backs_off_to_ten_seconds_at_most() {
    let world = World::new();
    let _subscription = world.subscribe().await;
    world.storage.every_save(Fault::Fail);
    let begun = Instant::now();
    world.insert(1);
    seconds(600).await;
    let sent = world.storage.sent_ms(begun);
    let waits: Vec<u128> = sent.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let bounds = (0..waits.len()).map(|n| (100u128 << n.min(20)).min(10_000));
    // A millisecond for the timer's granularity.
    assert!(waits.iter().zip(bounds).all(|(wait, bound)| *wait <= bound + 1), "{waits:?}");
    assert!(waits.iter().any(|wait| *wait > 5_000), "{waits:?}");
    assert!(waits.len() > 60, "{waits:?}");
}

#[tokio::test(start_paused = true)]
async fn a_storage_that_fails_for_thirty_seconds_stops_the_delivery_until_it_heals() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.every_save(Fault::Fail);
    let mut last = None;
    for key in 1..=60 {
        last = Some(world.insert(key));
        seconds(1).await;
    }
    // The first save was wanted with the first event; what is handed out at 30 s or later has to wait.
    let seen = world.seen.keys();
    assert!((30..=31).contains(&seen.len()), "{seen:?}");
    let status = until_reason(&subscription, "retrying", "storage_unavailable").await;
    assert_eq!(status.events, status.delivered + 1, "one event is read and waits");
    world.storage.heal();
    until_saved(&subscription, &last.unwrap()).await;
    assert_eq!(world.seen.keys(), (1..=60).collect::<Vec<_>>());
    assert!(is_running(&subscription.status().state));
}

#[tokio::test(start_paused = true)]
async fn a_save_that_hangs_for_thirty_seconds_stops_the_delivery_and_says_so() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.every_save(Fault::Hang);
    let mut last = None;
    for key in 1..=29 {
        last = Some(world.insert(key));
        seconds(1).await;
    }
    assert!(is_running(&subscription.status().state), "{:?}", subscription.status().state);
    assert_eq!(world.seen.keys().len(), 29);
    seconds(2).await;
    until_reason(&subscription, "retrying", "storage_unavailable").await;
    let next = world.insert(30);
    seconds(600).await;
    assert_eq!(world.seen.keys().len(), 29);
    assert_eq!(world.storage.sent().len(), 1, "one write in flight");
    world.storage.release();
    until_saved(&subscription, &next).await;
    assert_eq!(world.seen.keys(), (1..=30).collect::<Vec<_>>());
    assert!(next.is_beyond(&last.unwrap()));
    assert!(is_running(&subscription.status().state));
}

#[tokio::test(start_paused = true)]
async fn the_thirty_seconds_begin_anew_with_each_success() {
    let world = World::new();
    let _subscription = world.subscribe().await;
    world.storage.every_save(Fault::Late(Duration::from_secs(20)));
    for key in 1..=200 {
        world.insert(key);
        seconds(1).await;
    }
    assert_eq!(world.seen.keys().len(), 200);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_subscription_whose_wanted_save_fails_shows_it_and_holds_back_the_next_event() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.every_save(Fault::Fail);
    world.insert(1);
    seconds(40).await;
    until_reason(&subscription, "retrying", "storage_unavailable").await;
    world.insert(2);
    seconds(40).await;
    assert_eq!(world.seen.keys(), [1]);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_comes_late_delays_nothing_in_write_behind() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.every_save(Fault::Late(Duration::from_secs(3)));
    for key in 1..=20 {
        world.insert(key);
        millis(100).await;
    }
    assert_eq!(subscription.status().settled, 20);
    let sent = world.storage.sent_positions();
    assert_eq!(sent.len(), 1);
    seconds(20).await;
    assert_eq!(world.storage.sent().len(), 2, "newer positions replaced older ones");
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_is_answered_by_saving_the_same_again() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.next_saves([Fault::LoseReply]);
    let first = world.insert(1);
    until_saved(&subscription, &first).await;
    let status = subscription.status();
    assert_eq!((status.saves, status.not_ahead), (1, 0));
    assert_eq!(world.storage.sent_positions(), [first.clone(), first]);
    assert_eq!(world.seen.keys(), [1]);
    assert!(is_running(&status.state));
}

#[tokio::test(start_paused = true)]
async fn a_save_that_is_covered_by_what_is_stored_is_fine_and_counted() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let record = world.record().await.unwrap();
    let ahead = Checkpoint::Time(Timestamp { time: 1_700_000_000, increment: 3 });
    let save = Save::new(id(), record.ownership.unwrap(), record.epoch.unwrap(), ahead.clone());
    assert!(matches!(world.storage.inner().save(&save).await, Ok(SaveOutcome::Saved { .. })));
    world.insert(1);
    let status = until(&subscription, "not ahead", |status| status.not_ahead == 1).await;
    assert_eq!(status.saves, 0);
    assert_eq!(world.stored().await, Some(ahead));
    assert!(is_running(&status.state));
    let second = world.insert(2);
    until_saved(&subscription, &second).await;
    assert_eq!(world.stored().await, Some(second));
    assert_eq!((subscription.status().saves, subscription.status().not_ahead), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn saves_go_forward_only_whatever_happens_to_them() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let late = |seconds| Fault::Late(Duration::from_secs(seconds));
    let faults = [Fault::Fail, late(2), Fault::LoseReply, Fault::FailLate(Duration::from_secs(1)), late(1)];
    for round in 0..8 {
        world.storage.next_saves(faults.iter().cycle().skip(round).take(5).cloned());
        for key in 0..30 {
            world.insert(key);
            if key % 7 == 0 {
                world.model.push_quiet();
            }
            millis(137).await;
        }
    }
    assert!(world.storage.sent_positions().is_sorted_by(|a, b| !a.is_beyond(b)));
    let last = subscription.shutdown().await.unwrap();
    assert_eq!(last, world.storage.sent_positions().last().cloned());
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_record_stalls_the_run_and_a_resume_tries_again() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let error =
        StorageError::Unreadable { id: "orders_v1".into(), field: "resumeToken".into(), message: "is a string".into() };
    world.storage.every_save(Fault::Error(error));
    let start = world.record().await;
    let first = world.insert(1);
    let status = until_reason(&subscription, "stalled", "unreadable_record").await;
    assert!(matches!(status.state.reason(), Some(Reason::UnreadableRecord { field, .. }) if field == "resumeToken"));
    millis(1).await;
    assert_eq!(world.model.active_readers(), 0, "the cursor is closed");
    world.insert(2);
    seconds(300).await;
    assert_eq!((world.seen.keys(), world.storage.sent().len()), (vec![1], 1), "nothing is tried");
    assert_eq!(world.record().await, start);
    assert!(matches!(subscription.pause().await, Err(SubscriptionError::Ended { .. })));
    assert!(world.subscriptions.get("orders_v1").is_some(), "the id is kept");
    world.storage.heal();
    subscription.resume().await.unwrap();
    until_settled(&subscription, 2).await;
    assert_eq!(world.seen.keys(), [1, 2]);
    assert!(subscription.drained().await.unwrap().unwrap().is_beyond(&first));
}

#[tokio::test(start_paused = true)]
async fn a_refused_save_stalls_the_run() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.next_saves([Fault::Error(StorageError::Refused { code: 121, message: "validator".into() })]);
    world.insert(1);
    let status = until_reason(&subscription, "stalled", "refused_by_server").await;
    assert_eq!(status.state.reason().unwrap().exit_code(), 3);
    subscription.resume().await.unwrap();
    assert_eq!(subscription.drained().await.unwrap(), world.stored().await);
}

#[tokio::test(start_paused = true)]
async fn a_stall_waits_for_the_event_in_hand_and_ends_who_waits_at_once() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    world.storage.next_saves([Fault::Error(StorageError::Refused { code: 121, message: "validator".into() })]);
    world.insert(1);
    world.insert(2);
    millis(10).await;
    let waiting = tokio::spawn({
        let subscription = subscription.clone();
        async move { subscription.drained().await }
    });
    millis(10).await;
    hold.let_go(1);
    let drained = waiting.await.unwrap();
    until_settled(&subscription, 1).await;
    assert!(matches!(drained, Err(SubscriptionError::Ended { reason: Reason::RefusedByServer { .. }, .. })));
    hold.let_go(1);
    until_settled(&subscription, 2).await;
    seconds(1).await;
    subscription.resume().await.unwrap();
    let last = subscription.drained().await.unwrap();
    assert_eq!((world.seen.keys(), last), (vec![1, 2], world.stored().await));
}

#[tokio::test(start_paused = true)]
async fn a_missing_privilege_is_retried_and_shown() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let error = StorageError::Unauthorized { action: "update".into(), resource: "app.checkpoints".into() };
    world.storage.every_save(Fault::Error(error));
    let first = world.insert(1);
    until_reason(&subscription, "retrying", "unauthorized").await;
    world.storage.heal();
    until_saved(&subscription, &first).await;
    assert!(is_running(&subscription.status().state));
}

#[tokio::test(start_paused = true)]
async fn a_record_deleted_under_a_run_stops_it_at_the_next_save_and_is_never_made_again() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.inner().delete(&id(), None).await.unwrap();
    world.insert(1);
    until_reason(&subscription, "stopped", "deleted").await;
    seconds(300).await;
    assert_eq!(world.record().await, None);
    assert_eq!(subscription.stopped().await.exit_code(), 3);
    world.subscribe().await;
}

#[tokio::test(start_paused = true)]
async fn a_record_deleted_under_a_quiet_run_is_noticed_within_ten_seconds() {
    let world = World::new();
    let subscription = world.subscribe().await;
    seconds(25).await;
    world.storage.inner().delete(&id(), None).await.unwrap();
    let deleted = Instant::now();
    until_reason(&subscription, "stopped", "deleted").await;
    assert!(deleted.elapsed() <= Duration::from_secs(10));
    assert_eq!(world.record().await, None);
}

#[tokio::test(start_paused = true)]
async fn a_record_deleted_in_the_middle_of_an_event_stops_the_run_behind_it() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    world.insert(1);
    world.insert(2);
    seconds(1).await;
    world.storage.inner().delete(&id(), None).await.unwrap();
    seconds(15).await;
    hold.let_go(5);
    until_reason(&subscription, "stopped", "deleted").await;
    assert_eq!(world.seen.keys(), [1], "nothing more is handed out");
    assert_eq!(world.record().await, None);
}

#[tokio::test(start_paused = true)]
async fn ownership_is_asked_for_every_ten_seconds_without_an_answered_save_and_never_with_one() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let before = world.storage.reads_sent();
    for key in 1..=40 {
        world.insert(key);
        seconds(1).await;
    }
    assert_eq!(world.storage.reads_sent(), before, "each save answered the question");
    seconds(60).await;
    let asked = world.storage.reads_sent() - before;
    assert!((5..=6).contains(&asked), "{asked}");
    subscription.pause().await.unwrap();
    seconds(60).await;
    assert_eq!(world.storage.reads_sent() - before, asked, "a resume asks");
}

#[tokio::test(start_paused = true)]
async fn a_look_at_the_record_that_fails_is_repeated_and_changes_nothing() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let before = world.storage.reads_sent();
    world.storage.next_reads_fail(vec![StorageError::Unavailable { message: "away".into() }; 3]);
    seconds(45).await;
    assert!(world.storage.reads_sent() - before >= 4);
    assert!(is_running(&subscription.status().state));
}

#[tokio::test(start_paused = true)]
async fn what_is_stored_names_the_run_that_stored_it() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let claimed = world.record().await.unwrap();
    let first = world.insert(1);
    until_saved(&subscription, &first).await;
    let record = world.record().await.unwrap();
    assert_eq!(record.ownership, claimed.ownership);
    assert_eq!(record.ownership.unwrap().fence, subscription.status().fence);
    assert_eq!((record.epoch, record.pipeline, record.source), (claimed.epoch, claimed.pipeline, claimed.source));
    assert_eq!((record.kind, record.cluster_time), (Some(Kind::Event), first.cluster_time()));
    assert_eq!(record.saved_at, subscription.status().saved_at);
}

#[tokio::test(start_paused = true)]
async fn a_clean_end_without_events_keeps_what_the_stored_position_is_of() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let first = world.insert(1);
    until_saved(&subscription, &first).await;
    subscription.shutdown().await.unwrap();
    let next = world.restarted();
    next.subscribe().await.shutdown().await.unwrap();
    let record = next.record().await.unwrap();
    assert_eq!((record.position, record.kind, record.clean), (Some(first), Some(Kind::Event), true));
}
