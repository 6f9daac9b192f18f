//! One owner at a time: a second process takes over at once, the first one finds out; what follows an end that was not
//! clean may be repeats; an `invalidate` ends a run and its epoch.

use std::sync::Arc;
use std::time::Duration;

use mongosub::bson::{DateTime, doc};
use mongosub::memory;
use mongosub::{
    Checkpoint, Epoch, Fence, Kind, OnInvalidate, Reason, Start, StartAt, State, SubscribeError, Subscription,
    SubscriptionError,
};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::support::{
    Fault, ID, Logs, World, is_running, left_at, millis, seconds, until, until_reason, until_saved, until_settled,
};

/// The reason of a run that was taken over, as the record has it now.
async fn superseded(world: &World) -> Reason {
    let record = world.record().await.unwrap();
    Reason::Superseded { owner: record.ownership.map(|it| it.owner), since: record.claimed_at }
}

/// Why a run stops; it does within an hour.
async fn ended(subscription: &Subscription) -> Reason {
    tokio::time::timeout(Duration::from_secs(3600), subscription.stopped()).await.expect("it stops")
}

fn repeats(world: &World) -> Vec<(i32, bool)> {
    world.seen.all().iter().map(|seen| (seen.key, seen.may_be_repeat)).collect()
}

#[tokio::test(start_paused = true)]
async fn a_second_process_takes_over_at_once_and_the_first_stops_at_its_next_save() {
    let first = World::new();
    let old = first.subscribe().await;
    let event = first.model.push(memory::insert(1, doc! {}));
    until_saved(&old, &event).await;
    seconds(1).await;
    let second = first.restarted();
    let began = Instant::now();
    let new = second.subscribe().await;
    assert_eq!(began.elapsed(), Duration::ZERO);
    assert!(new.status().fence > old.status().fence);
    let expected = superseded(&first).await;
    let event = first.model.push(memory::insert(2, doc! {}));
    assert_eq!(ended(&old).await, expected);
    assert!(began.elapsed() < Duration::from_secs(1), "at its next save, not at a check by the clock");
    assert!(matches!(&expected, Reason::Superseded { owner: Some(_), since: Some(_) }));
    assert_eq!(expected.exit_code(), 3);
    assert!(first.subscriptions.get(ID).is_none(), "its id is free");
    until_saved(&new, &event).await;
    assert_eq!(second.seen.keys(), [2]);
    assert_eq!(first.model.active_readers(), 1);
    // Every method of the one that ended says why.
    let error = SubscriptionError::Ended { id: old.id().clone(), reason: expected };
    assert_eq!(old.drained().await.unwrap_err(), error);
    assert_eq!(old.shutdown().await.unwrap_err(), error);
    assert_eq!(old.cancel().await.unwrap_err(), error);
    assert!(second.record().await.is_some());
}

#[tokio::test(start_paused = true)]
async fn the_event_in_hand_of_a_superseded_run_finishes_and_no_further_one_is_handed_out() {
    let first = World::new();
    let gate = Arc::new(Semaphore::new(1));
    let pass = gate.clone();
    let handler = first.seen.then(move |_| {
        let pass = pass.clone();
        async move {
            pass.acquire().await?.forget();
            Ok(())
        }
    });
    let old = first.subscriptions.subscribe(ID, handler).await.unwrap();
    first.storage.next_saves([Fault::Late(Duration::from_secs(3))]);
    let at: Vec<_> = (1..=3).map(|key| first.model.push(memory::insert(key, doc! {}))).collect();
    until(&old, "event 2 in hand", |status| status.delivered == 2).await;
    let second = first.restarted();
    let new = second.subscribe().await;
    seconds(5).await;
    assert_eq!((first.seen.keys(), old.is_stopped()), (vec![1, 2], false), "it waits for the event in hand");
    assert!(new.status().settled == 3);
    gate.add_permits(10);
    assert_eq!(ended(&old).await.name(), "superseded");
    assert_eq!((old.status().settled, first.seen.keys()), (2, vec![1, 2]));
    assert_eq!(second.seen.keys(), [1, 2, 3]);
    until_saved(&new, &at[2]).await;
    assert_eq!(second.stored().await.as_ref(), Some(&at[2]), "the first one's save was refused");
}

#[tokio::test(start_paused = true)]
async fn an_idle_owner_notices_within_10_s() {
    let first = World::new();
    let old = first.subscribe().await;
    for passed in [3, 9, 17] {
        seconds(passed).await;
        assert!(is_running(&old.status().state));
    }
    let second = first.restarted();
    let new = second.subscribe().await;
    let began = Instant::now();
    let expected = superseded(&first).await;
    assert_eq!(ended(&old).await, expected);
    assert!(began.elapsed() <= Duration::from_secs(10), "{:?}", began.elapsed());
    assert!(first.storage.sent().is_empty());
    assert!(is_running(&new.status().state));
    seconds(60).await;
    assert!(is_running(&new.status().state), "the new owner finds itself");
}

#[tokio::test(start_paused = true)]
async fn an_owner_notices_though_its_handler_hangs_and_stops_after_the_grace() {
    let first = World::new();
    let handler = first.seen.then(|_| std::future::pending());
    let old = first.subscriptions.subscribe(ID, handler).shutdown_grace(Duration::from_secs(5)).await.unwrap();
    first.model.push(memory::insert(1, doc! {}));
    until(&old, "in hand", |status| status.delivered == 1).await;
    let second = first.restarted();
    let new = second.subscribe().await;
    let began = Instant::now();
    assert_eq!(ended(&old).await.name(), "superseded");
    assert!(began.elapsed() <= Duration::from_secs(16), "{:?}", began.elapsed());
    until_settled(&new, 1).await;
}

#[tokio::test(start_paused = true)]
async fn an_owner_whose_saves_are_answered_does_not_ask_whether_it_is_the_owner() {
    let world = World::new();
    let subscription = world.subscribe().await;
    for key in 1..=20 {
        let event = world.model.push(memory::insert(key, doc! {}));
        until_saved(&subscription, &event).await;
        seconds(5).await;
    }
    assert_eq!(world.storage.reads_sent(), 1, "the start's own");
    seconds(60).await;
    assert!((5..=7).contains(&world.storage.reads_sent()), "{}", world.storage.reads_sent());
}

#[tokio::test(start_paused = true)]
async fn a_claim_from_an_owner_that_saved_less_than_60_s_ago_warns_and_names_it() {
    for (ago, clean, warned) in [(0, false, 1), (59, false, 1), (60, false, 0), (3600, false, 0), (1, true, 0)] {
        let logs = Logs::capture();
        let world = World::new();
        let at = world.model.push(memory::insert(1, doc! {}));
        let mut record = left_at(&at);
        record.clean = clean;
        let now = DateTime::from_millis(1_767_225_600_000 - ago * 1000);
        record.saved_at = Some(now);
        world.storage.inner().put(record);
        world.subscribe().await;
        let lines = logs.lines("WARN", "is taken over from host:1:before");
        assert_eq!(lines.len(), warned, "{ago} {clean}: {lines:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_id_that_runs_here_is_refused_until_it_has_stopped() {
    let world = World::new();
    let starting = world.stepped();
    starting.steps.cut(0, crate::support::Cut::Before);
    let mut hangs = Box::pin(starting.subscriptions.subscribe(ID, world.seen.handler()).into_future());
    assert!(futures::FutureExt::now_or_never(&mut hangs).is_none());
    let error = starting.subscriptions.subscribe(ID, world.seen.handler()).await.unwrap_err();
    assert!(matches!(error, SubscribeError::AlreadyRunning { .. }), "{error:?}");
    drop(hangs);

    let subscription = starting.subscriptions.subscribe(ID, world.seen.handler()).await.unwrap();
    let before = world.record().await;
    for paused in [false, true] {
        if paused {
            subscription.pause().await.unwrap();
        }
        let clone = starting.subscriptions.clone();
        let error = clone.subscribe(ID, world.seen.handler()).await.unwrap_err();
        assert!(matches!(error, SubscribeError::AlreadyRunning { .. }), "{error:?}");
        assert_eq!(error.exit_code(), 2);
        assert_eq!(world.record().await, before, "the run is not disturbed");
    }
    // Another id is free.
    starting.subscriptions.subscribe("other_v1", world.seen.handler()).await.unwrap();
    subscription.shutdown().await.unwrap();
    assert!(starting.subscriptions.get(ID).is_none());
    starting.subscriptions.subscribe(ID, world.seen.handler()).await.unwrap();
}

/// A run that has stalled: its history is gone.
async fn stalled(world: &World) -> Subscription {
    let subscription = world.subscribe().await;
    let event = world.model.push(memory::insert(1, doc! {}));
    until_saved(&subscription, &event).await;
    let reason = Reason::HistoryLost { position: event, oldest: None };
    world.model.break_reader(mongosub::SourceError::Refused(reason));
    until_reason(&subscription, "stalled", "history_lost").await;
    subscription
}

#[tokio::test(start_paused = true)]
async fn a_stalled_run_that_was_superseded_meanwhile_refuses_to_resume() {
    let first = World::new();
    let old = stalled(&first).await;
    seconds(60).await;
    assert!(matches!(old.status().state, State::Stalled(_)), "it tries nothing");
    let second = first.restarted();
    let new = second.subscribe().await;
    seconds(60).await;
    let reason = superseded(&first).await;
    let error = old.resume().await.unwrap_err();
    assert_eq!(error, SubscriptionError::Ended { id: old.id().clone(), reason: reason.clone() });
    assert_eq!(ended(&old).await, reason);
    assert!(is_running(&new.status().state));
    // Alone, it would have gone on.
    let alone = World::new();
    let subscription = stalled(&alone).await;
    subscription.resume().await.unwrap();
    alone.model.push(memory::insert(2, doc! {}));
    until_settled(&subscription, 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_paused_run_that_was_superseded_meanwhile_refuses_to_resume() {
    let first = World::new();
    let old = first.subscribe().await;
    old.pause().await.unwrap();
    let second = first.restarted();
    second.subscribe().await;
    let reason = superseded(&first).await;
    let error = old.resume().await.unwrap_err();
    assert_eq!(error, SubscriptionError::Ended { id: old.id().clone(), reason });
}

#[tokio::test(start_paused = true)]
async fn after_an_end_that_was_not_clean_everything_up_to_the_head_may_be_a_repeat() {
    let first = World::new();
    let subscription = first.subscriptions.subscribe(ID, first.seen.handler()).save_every(100).await.unwrap();
    first.model.push(memory::insert(1, doc! {}));
    first.model.push_transaction([memory::insert(2, doc! {}), memory::insert(3, doc! {})]);
    until_settled(&subscription, 3).await;
    assert_eq!(repeats(&first), [(1, false), (2, false), (3, false)]);
    let next = first.restarted();
    // The process dies.
    drop((subscription, first));
    millis(1).await;
    let subscription = next.subscribe().await;
    until_settled(&subscription, 3).await;
    next.model.push(memory::insert(4, doc! {}));
    until_settled(&subscription, 4).await;
    assert_eq!(repeats(&next), [(1, true), (2, true), (3, true), (4, false)]);
    assert_eq!(subscription.status().replayed, 3);
}

#[tokio::test(start_paused = true)]
async fn after_a_clean_end_nothing_is_a_repeat() {
    let first = World::new();
    let subscription = first.subscribe().await;
    first.model.push(memory::insert(1, doc! {}));
    until_settled(&subscription, 1).await;
    subscription.shutdown().await.unwrap();
    let record = first.record().await.unwrap();
    assert!(record.clean);
    first.model.push(memory::insert(2, doc! {}));
    let next = first.restarted();
    let subscription = next.subscribe().await;
    assert!(!next.record().await.unwrap().clean, "a claim clears it: this run has not ended yet");
    until_settled(&subscription, 1).await;
    assert_eq!(repeats(&next), [(2, false)]);
}

#[tokio::test(start_paused = true)]
async fn a_start_of_ones_own_may_repeat_what_earlier_runs_have_seen() {
    let first = World::new();
    first.model.push(memory::insert(1, doc! {}));
    let earliest = StartAt::Always(Start::Earliest);
    let action = first.subscriptions.subscribe(ID, first.seen.handler());
    let subscription = action.start_at(earliest.clone()).await.unwrap();
    until_settled(&subscription, 1).await;
    assert_eq!(repeats(&first), [(1, false)], "the first run of all repeats nothing");
    subscription.shutdown().await.unwrap();
    let next = first.restarted();
    let action = next.subscriptions.subscribe(ID, next.seen.handler());
    let subscription = action.start_at(earliest).await.unwrap();
    next.model.push(memory::insert(2, doc! {}));
    until_settled(&subscription, 2).await;
    assert_eq!(repeats(&next), [(1, true), (2, false)]);
}

#[tokio::test(start_paused = true)]
async fn a_record_that_another_run_moved_or_made_while_this_one_started_may_be_repeated_from() {
    let world = World::new();
    let at: Vec<_> = (1..=3).map(|key| world.model.push(memory::insert(key, doc! {}))).collect();
    world.storage.inner().put(left_at(&at[0]));
    let process = world.stepped();
    let (store, mut moved) = (world.storage.inner().clone(), left_at(&at[1]));
    (moved.clean, moved.saved_at) = (false, Some(DateTime::from_millis(1_767_225_600_000)));
    process.steps.after("open", 1, move || store.put(moved));
    let subscription = process.subscriptions.subscribe(ID, world.seen.handler()).await.unwrap();
    world.model.push(memory::insert(4, doc! {}));
    until_settled(&subscription, 2).await;
    assert_eq!(repeats(&world), [(3, true), (4, false)]);
}

#[tokio::test(start_paused = true)]
async fn a_record_of_another_program_is_taken_over_in_a_new_epoch() {
    let world = World::new();
    let at = world.model.push(memory::insert(1, doc! {}));
    let mut record = left_at(&at);
    (record.kind, record.epoch, record.cluster_time, record.ownership) = (None, None, None, None);
    (record.claimed_at, record.saved_at, record.pipeline, record.source) = (None, None, None, None);
    record.clean = false;
    world.storage.inner().put(record);
    let subscription = world.subscribe().await;
    let record = world.record().await.unwrap();
    assert_eq!((record.position.as_ref(), record.epoch), (Some(&at), None), "a claim stores no position");
    let event = world.model.push(memory::insert(2, doc! {}));
    until_saved(&subscription, &event).await;
    let record = world.record().await.unwrap();
    assert_eq!(record.epoch, record.claimed_at.map(|at| Epoch(at.timestamp_millis())));
    assert_eq!((record.kind, record.source), (Some(Kind::Event), left_at(&event).source));
    assert_eq!(world.seen.keys(), [2]);
}

#[tokio::test(start_paused = true)]
async fn a_fence_never_repeats_not_even_after_a_delete() {
    let world = World::new();
    let mut fences: Vec<Fence> = Vec::new();
    for round in 0..6 {
        let subscription = world.subscribe().await;
        fences.push(subscription.status().fence);
        if round % 2 == 0 {
            subscription.cancel().await.unwrap();
        } else {
            subscription.shutdown().await.unwrap();
        }
    }
    assert!(fences.windows(2).all(|pair| pair[0] < pair[1]), "{fences:?}");
}

/// Delivers one event and the `invalidate` behind it, and stops there.
async fn invalidated(world: &World) -> (Subscription, Checkpoint) {
    let subscription = world.action().on_invalidate(OnInvalidate::Stop).await.unwrap();
    world.model.push(memory::insert(1, doc! {}));
    let end = world.model.invalidate();
    assert_eq!(ended(&subscription).await, Reason::Invalidated { position: end.clone() });
    (subscription, end)
}

#[tokio::test(start_paused = true)]
async fn an_invalidate_is_delivered_and_stored_and_stops_a_run_that_is_to_stop() {
    let world = World::new();
    let (subscription, end) = invalidated(&world).await;
    assert_eq!(world.seen.all().last().map(|seen| &seen.position), Some(&end));
    let record = world.record().await.unwrap();
    assert_eq!((record.position, record.kind), (Some(end.clone()), Some(Kind::Invalidate)));
    assert!(record.clean);
    assert_eq!(subscription.status().saved, Some(end));
    assert_eq!(subscription.status().state.reason().map(Reason::exit_code), Some(3));
    assert!(world.subscriptions.get(ID).is_none());
    assert_eq!(world.model.active_readers(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_next_start_resumes_behind_the_invalidate_in_the_next_epoch() {
    let world = World::new();
    let (_, end) = invalidated(&world).await;
    let epoch = world.record().await.unwrap().epoch.unwrap();
    world.model.push(memory::insert(2, doc! {}));
    let next = world.restarted();
    let subscription = next.subscribe().await;
    assert_eq!(world.model.opened_from().last(), Some(&Some(end)));
    let last = next.model.push(memory::insert(3, doc! {}));
    until_saved(&subscription, &last).await;
    assert_eq!(repeats(&next), [(2, false), (3, false)]);
    let record = next.record().await.unwrap();
    assert_eq!((record.epoch, record.kind), (Some(Epoch(epoch.0 + 1)), Some(Kind::Event)));
    subscription.shutdown().await.unwrap();
    let after = next.restarted();
    let subscription = after.subscribe().await;
    let last = after.model.push(memory::insert(4, doc! {}));
    until_saved(&subscription, &last).await;
    assert_eq!(after.record().await.unwrap().epoch, record.epoch, "once");
}

#[tokio::test(start_paused = true)]
async fn a_run_behind_an_invalidate_that_ends_before_any_event_is_still_behind_it() {
    let world = World::new();
    let (_, end) = invalidated(&world).await;
    for _ in 0..3 {
        let next = world.restarted();
        let subscription = next.subscribe().await;
        assert_eq!(subscription.shutdown().await.unwrap(), Some(end.clone()));
        let record = next.record().await.unwrap();
        assert_eq!((record.position, record.kind), (Some(end.clone()), Some(Kind::Invalidate)));
    }
    let next = world.restarted();
    let subscription = next.subscribe().await;
    next.model.push(memory::insert(2, doc! {}));
    until_settled(&subscription, 1).await;
    assert_eq!(next.seen.keys(), [2]);
}

#[tokio::test(start_paused = true)]
async fn an_invalidate_that_was_not_stored_comes_again() {
    let world = World::new();
    let action = world.action().on_invalidate(OnInvalidate::Stop);
    let subscription = action.shutdown_grace(Duration::from_secs(1)).await.unwrap();
    world.storage.every_save(Fault::Fail);
    world.model.push(memory::insert(1, doc! {}));
    let end = world.model.invalidate();
    assert_eq!(ended(&subscription).await.name(), "invalidated");
    assert_ne!(world.stored().await, Some(end.clone()));
    let next = world.restarted();
    let subscription = next.action().on_invalidate(OnInvalidate::Stop).await.unwrap();
    assert_eq!(ended(&subscription).await, Reason::Invalidated { position: end.clone() });
    assert_eq!(repeats(&next), [(1, true), (-1, true)]);
    assert_eq!(next.stored().await, Some(end));
}
