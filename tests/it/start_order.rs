//! The order of a start: cut between any two steps it loses nothing, refused it leaves everything as it was, and what
//! can heal is waited for.

use std::time::Duration;

use futures::FutureExt;
use mongosub::bson::doc;
use mongosub::memory::{self, MemoryModel};
use mongosub::{
    Checkpoint, CheckpointStorage, Deployment, Kind, Namespace, Reason, SourceError, Start, StartAt, StorageError,
    SubscribeError, Subscription, SubscriptionModel,
};
use tokio::time::{Instant, timeout};

use crate::support::{
    Cut, Fault, ID, Logs, Stepped, World, id, is_running, left_at, unavailable, until, until_saved, until_settled,
};

fn silent() -> SourceError {
    SourceError::Unavailable { message: "scripted".into() }
}

/// What a start can begin from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum From {
    /// Nothing is stored, the global checkpoint is told.
    New,
    /// Nothing is stored, and the opening tells the time.
    NewUnrecorded,
    /// Nothing is stored, at a position of one's own.
    NewAfter,
    Stored,
}

impl From {
    const ALL: [Self; 4] = [Self::New, Self::NewUnrecorded, Self::NewAfter, Self::Stored];

    /// A feed of event 0, and what is stored.
    fn world(self) -> (World, StartAt) {
        let world = World::new();
        let first = world.model.push(memory::insert(0, doc! {}));
        match self {
            Self::New | Self::NewAfter => {}
            Self::NewUnrecorded => world.model.refuse_global_checkpoint(),
            Self::Stored => world.storage.inner().put(left_at(&first)),
        }
        (world, if self == Self::NewAfter { StartAt::StoredOr(Start::After(first)) } else { StartAt::default() })
    }
}

fn subscribe(
    world: &World,
    process: &Stepped,
    start_at: &StartAt,
) -> impl Future<Output = Result<Subscription, SubscribeError>> + use<> {
    let action = process.subscriptions.subscribe(ID, world.seen.handler()).start_at(start_at.clone());
    action.start_when_no_start_position_can_be_recorded(true).into_future()
}

#[tokio::test(start_paused = true)]
async fn a_start_reads_the_record_pins_its_position_opens_there_and_only_then_claims() {
    for (from, expected) in [
        (From::New, "read identity global_checkpoint open claim"),
        (From::NewUnrecorded, "read identity global_checkpoint open open claim"),
        (From::NewAfter, "read identity open claim"),
        (From::Stored, "read identity has_event open claim"),
    ] {
        let (world, start_at) = from.world();
        let process = world.stepped();
        subscribe(&world, &process, &start_at).await.unwrap();
        let mut calls = process.steps.calls();
        calls.retain(|call| *call != "head");
        assert_eq!(calls.join(" "), expected, "{from:?}");
    }
}

/// Cuts the start before and behind each of its calls. What is pushed behind the cut is delivered by the next start
/// if the position was pinned in the record by then, and everything after that start in any case.
async fn cut_everywhere(dies: bool) {
    for from in From::ALL {
        let mut cuts = 0;
        for number in 0.. {
            let mut hit = false;
            for cut in [Cut::Before, Cut::After] {
                let (world, start_at) = from.world();
                let process = world.stepped();
                process.steps.cut(number, cut);
                if let Ok(started) = timeout(Duration::from_secs(5), subscribe(&world, &process, &start_at)).await {
                    assert!(number > 4, "{from:?}: a start is at least five calls");
                    started.unwrap();
                    continue;
                }
                hit = true;
                cuts += 1;
                assert_eq!(world.model.active_readers(), 0, "{from:?} {number} {cut:?}: no cursor is left");
                assert!(process.subscriptions.get(ID).is_none());
                let pinned = world.stored().await.is_some() || from == From::NewAfter;
                world.model.push(memory::insert(1, doc! {}));
                // The same process tries again, or the next one does.
                let next = if dies {
                    drop(process);
                    world.stepped()
                } else {
                    process
                };
                let subscription = subscribe(&world, &next, &start_at).await.unwrap();
                let last = world.model.push(memory::insert(2, doc! {}));
                until_saved(&subscription, &last).await;
                let expected: &[i32] = if pinned { &[1, 2] } else { &[2] };
                assert_eq!(world.seen.keys(), expected, "{from:?} {number} {cut:?}");
            }
            if !hit {
                break;
            }
        }
        assert!(cuts >= 10, "{from:?}: {cuts}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_start_dropped_before_or_behind_any_of_its_calls_loses_nothing_and_frees_the_id() {
    cut_everywhere(false).await;
}

#[tokio::test(start_paused = true)]
async fn a_process_that_dies_before_or_behind_any_call_of_its_start_loses_nothing() {
    cut_everywhere(true).await;
}

#[tokio::test(start_paused = true)]
async fn a_cut_behind_the_claim_of_a_new_subscription_has_stored_the_pinned_present() {
    let (world, start_at) = From::New.world();
    let process = world.stepped();
    let calls = {
        let (world, start_at) = From::New.world();
        let process = world.stepped();
        subscribe(&world, &process, &start_at).await.unwrap();
        process.steps.calls()
    };
    let claim = calls.iter().position(|call| *call == "claim").unwrap();
    process.steps.cut(claim, Cut::After);
    assert!(timeout(Duration::from_secs(5), subscribe(&world, &process, &start_at)).await.is_err());
    let record = world.record().await.unwrap();
    assert_eq!(record.kind, Some(Kind::Start));
    world.model.push(memory::insert(1, doc! {}));
    let next = world.restarted();
    let subscription = next.subscribe().await;
    until_settled(&subscription, 1).await;
    assert_eq!(next.seen.keys(), [1]);
}

/// Every way a source or a storage can refuse a start for good.
fn refusals() -> Vec<(&'static str, SourceError, Reason)> {
    let position: Checkpoint = "1700000000.1".parse().unwrap();
    let reasons = [
        Reason::HistoryLost { position: position.clone(), oldest: None },
        Reason::BadPosition { code: 280, message: "no such token".into() },
        Reason::RefusedByServer { code: 40324, message: "unknown stage".into() },
        Reason::EventTooLarge { position },
        Reason::NotAReplicaSet,
    ];
    let unauthorized = Reason::Unauthorized { action: "changeStream".into(), resource: "test.events".into() };
    let missing = SourceError::Unauthorized { action: "changeStream".into(), resource: "test.events".into() };
    let refused = reasons.into_iter().map(|reason| (reason.name(), SourceError::Refused(reason.clone()), reason));
    refused.chain([("unauthorized", missing, unauthorized)]).collect()
}

#[tokio::test(start_paused = true)]
async fn an_open_that_fails_for_good_leaves_the_record_and_its_running_owner_untouched() {
    for (name, error, reason) in refusals() {
        let world = World::new();
        let first = world.subscribe().await;
        let event = world.model.push(memory::insert(1, doc! {}));
        until_saved(&first, &event).await;
        let before = world.record().await;
        let opens = world.model.opens();

        let second = world.restarted();
        world.model.fail_next_open(error);
        let began = Instant::now();
        let refused = second.subscriptions.subscribe(ID, second.seen.handler()).await.unwrap_err();
        assert_eq!(refused, SubscribeError::Refused { id: id(), reason }, "{name}");
        assert_eq!(refused.exit_code(), 3);
        assert_eq!((Instant::now() - began, world.model.opens()), (Duration::ZERO, opens + 1), "{name}: at once");
        assert_eq!(world.record().await, before, "{name}");
        assert!(second.subscriptions.get(ID).is_none());

        let event = world.model.push(memory::insert(2, doc! {}));
        until_saved(&first, &event).await;
        assert!(is_running(&first.status().state), "{name}: the owner goes on");
        second.subscribe().await;
    }
}

#[tokio::test(start_paused = true)]
async fn whatever_call_is_refused_for_good_the_record_and_its_owner_are_untouched() {
    type Fail = fn(&MemoryModel, SourceError);
    let calls: [(&str, Fail); 3] = [
        ("identity", |model, error| model.fail_identity(error)),
        ("head", |model, error| model.fail_heads(error, 1)),
        ("open", |model, error| model.fail_next_open(error)),
    ];
    for (name, fail) in calls {
        let world = World::new();
        let event = world.model.push(memory::insert(1, doc! {}));
        let mut record = left_at(&event);
        record.clean = false;
        world.storage.inner().put(record);
        // The n-th call of this name, as often as a start makes it.
        let process = world.stepped();
        process.subscriptions.subscribe(ID, world.seen.handler()).await.unwrap().shutdown().await.unwrap();
        let mut record = left_at(&event);
        record.clean = false;
        for nth in 1..=process.steps.count(name) {
            world.storage.inner().put(record.clone());
            let process = world.stepped();
            let model = world.model.clone();
            let refused = SourceError::Refused(Reason::NotAReplicaSet);
            if nth == 1 {
                fail(&model, refused);
            } else {
                process.steps.after(name, nth - 1, move || fail(&model, refused));
            }
            let started = process.subscriptions.subscribe(ID, world.seen.handler()).await;
            let Err(error) = started else {
                // The watchdog asks for the head too, and a run that goes on is no start.
                assert_eq!(name, "head");
                continue;
            };
            assert_eq!(error.reason(), Some(&Reason::NotAReplicaSet), "{name} {nth}");
            assert_eq!(world.record().await.as_ref(), Some(&record), "{name} {nth}");
        }
    }
    let world = World::new();
    world.model.fail_global_checkpoint(SourceError::Refused(Reason::NotAReplicaSet));
    let error = world.subscriptions.subscribe(ID, world.seen.handler()).await.unwrap_err();
    assert_eq!((error.reason(), world.record().await), (Some(&Reason::NotAReplicaSet), None));
    world.model.fail_earliest(SourceError::Refused(Reason::NotAReplicaSet));
    let action = world.subscriptions.subscribe(ID, world.seen.handler());
    let error = action.start_at(StartAt::StoredOr(Start::Earliest)).await.unwrap_err();
    assert_eq!((error.reason(), world.record().await), (Some(&Reason::NotAReplicaSet), None));
}

#[tokio::test(start_paused = true)]
async fn what_a_storage_refuses_for_good_is_an_error_at_once_and_leaves_the_record_untouched() {
    let unreadable =
        StorageError::Unreadable { id: ID.into(), field: "mongosub.schema".into(), message: "is newer".into() };
    let errors = [
        (unreadable, "unreadable_record"),
        (StorageError::Unauthorized { action: "find".into(), resource: "app.checkpoints".into() }, "unauthorized"),
        (StorageError::Refused { code: 2, message: "no".into() }, "refused_by_server"),
    ];
    for (error, name) in errors {
        for at_claim in [false, true] {
            let world = World::new();
            let event = world.model.push(memory::insert(1, doc! {}));
            world.storage.inner().put(left_at(&event));
            if at_claim {
                world.storage.next_claims([Fault::Error(error.clone())]);
            } else {
                world.storage.next_reads_fail([error.clone()]);
            }
            let began = Instant::now();
            let refused = world.subscriptions.subscribe(ID, world.seen.handler()).await.unwrap_err();
            assert!(matches!(refused, SubscribeError::Refused { .. }), "{refused:?}");
            assert_eq!(refused.reason().map(Reason::name), Some(name));
            assert_eq!((refused.exit_code(), began.elapsed()), (3, Duration::ZERO));
            assert_eq!(world.record().await, Some(left_at(&event)));
            assert_eq!((world.model.active_readers(), world.subscriptions.running().len()), (0, 0));
            world.subscribe().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_reply_was_lost_is_made_again_and_the_first_pin_stays() {
    let logs = Logs::capture();
    let world = World::new();
    world.model.push(memory::insert(0, doc! {}));
    let process = world.stepped();
    world.storage.next_claims([Fault::LoseReply, Fault::LoseReply]);
    let model = world.model.clone();
    process.steps.after("claim", 1, move || drop(model.push(memory::insert(1, doc! {}))));
    let model = world.model.clone();
    process.steps.after("claim", 2, move || drop(model.push(memory::insert(2, doc! {}))));
    let subscription = process.subscriptions.subscribe(ID, world.seen.handler()).await.unwrap();
    assert_eq!(process.steps.count("claim"), 3);
    let last = world.model.push(memory::insert(3, doc! {}));
    until_saved(&subscription, &last).await;
    assert_eq!(world.seen.keys(), [1, 2, 3], "all behind the first pin, each once");
    assert_eq!(logs.lines("WARN", "is not started yet").len(), 2);
    assert!(logs.lines("WARN", "taken over").is_empty(), "nobody but this start was there");
    assert_eq!(world.record().await.unwrap().ownership.unwrap().fence, subscription.status().fence);
}

/// Two processes pin their present before either claims, and event 1 lies between the pins. The claim of one is late;
/// the other has handled what it could by then, and stored nothing of it.
async fn race(slow_is_first_to_pin: bool) -> (World, World) {
    let early = World::new();
    let late = early.restarted();
    early.model.push(memory::insert(0, doc! {}));
    early.model.hang_opens();
    let mut first = Box::pin(early.subscriptions.subscribe(ID, early.seen.handler()).save_every(100).into_future());
    assert!((&mut first).now_or_never().is_none());
    early.model.push(memory::insert(1, doc! {}));
    let mut second = Box::pin(late.subscriptions.subscribe(ID, late.seen.handler()).into_future());
    assert!((&mut second).now_or_never().is_none());
    assert_eq!(early.model.opens(), 2);
    let slow = if slow_is_first_to_pin { &early } else { &late };
    slow.storage.next_claims([Fault::Late(Duration::from_secs(1))]);
    early.model.release_opens();
    let (first, second) = tokio::join!(first, second);
    let (winner, loser) = if slow_is_first_to_pin { (second, first) } else { (first, second) };
    let (winner, loser) = (winner.unwrap(), loser.unwrap());
    early.model.push(memory::insert(2, doc! {}));
    until_settled(&loser, if slow_is_first_to_pin { 1 } else { 2 }).await;
    assert_eq!(winner.stopped().await.name(), "superseded");
    (early, late)
}

#[tokio::test(start_paused = true)]
async fn of_two_first_starts_at_once_the_one_stored_first_wins_and_the_loser_reads_from_it() {
    // The later pin is stored first: the earlier one, though it had its cursor open, reads from the later.
    let (early, late) = race(true).await;
    assert_eq!((early.seen.keys(), late.seen.keys()), (vec![2], vec![2]));
    // The earlier pin is stored first: the later one reads from it, event 1 included.
    let (early, late) = race(false).await;
    assert_eq!((early.seen.keys(), late.seen.keys()), (vec![1, 2], vec![1, 2]));
    // Its rival may have handled them already.
    let repeats: Vec<bool> = late.seen.all().iter().map(|seen| seen.may_be_repeat).collect();
    assert_eq!(repeats, [true, false]);
    // The loser's pin lies ahead of event 1; the position in the record says where the two agreed to start.
    assert_eq!(late.model.opened_from().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_record_that_moves_between_its_reading_and_the_claim_is_read_from_where_it_is_then() {
    let world = World::new();
    let at: Vec<_> = (1..=2).map(|key| world.model.push(memory::insert(key, doc! {}))).collect();
    world.storage.inner().put(left_at(&at[0]));
    let process = world.stepped();
    let (store, moved) = (world.storage.inner().clone(), left_at(&at[1]));
    process.steps.after("open", 1, move || store.put(moved));
    let subscription = process.subscriptions.subscribe(ID, world.seen.handler()).await.unwrap();
    let last = world.model.push(memory::insert(3, doc! {}));
    until_saved(&subscription, &last).await;
    assert_eq!(world.seen.keys(), [3]);
    assert_eq!(world.model.opened_from(), [Some(at[0].clone()), Some(at[1].clone())]);
    assert_eq!(world.model.active_readers(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_record_that_is_deleted_between_its_reading_and_the_claim_is_a_new_start_that_is_stored_first() {
    let world = World::new();
    let event = world.model.push(memory::insert(1, doc! {}));
    world.storage.inner().put(left_at(&event));
    world.model.push(memory::insert(2, doc! {}));
    let process = world.stepped();
    let store = world.storage.inner().clone();
    process.steps.after("open", 1, move || {
        assert_eq!(store.delete(&id(), None).now_or_never(), Some(Ok(true)));
    });
    let subscription = process.subscriptions.subscribe(ID, world.seen.handler()).await.unwrap();
    let record = world.record().await.unwrap();
    assert_eq!(record.kind, Some(Kind::Start), "the start is stored before the first delivery");
    assert_eq!(record.position, world.model.global_checkpoint().await.unwrap());
    let last = world.model.push(memory::insert(3, doc! {}));
    until_saved(&subscription, &last).await;
    assert_eq!(world.seen.keys(), [3]);
}

#[tokio::test(start_paused = true)]
async fn what_can_heal_is_tried_again_with_a_warning_each_until_it_has() {
    let logs = Logs::capture();
    let world = World::new();
    world.storage.next_reads_fail([unavailable()]);
    world.model.fail_identity(silent());
    world.model.fail_global_checkpoint(silent());
    world.model.fail_heads(silent(), 1);
    world.model.fail_opens(silent(), 2);
    world.storage.next_claims([Fault::Fail]);
    let began = Instant::now();
    let subscription = world.subscribe().await;
    assert!(began.elapsed() < Duration::from_secs(60));
    assert_eq!(logs.lines("WARN", "is not started yet").len(), 7);
    assert_eq!(logs.lines("WARN", "checkpoint storage is not available").len(), 2);
    world.model.push(memory::insert(1, doc! {}));
    until_settled(&subscription, 1).await;
}

#[tokio::test(start_paused = true)]
async fn what_does_not_heal_within_the_start_timeout_is_timed_out_with_the_last_reason() {
    for limit in [None, Some(Duration::from_secs(7))] {
        let world = World::new();
        world.model.fail_opens(silent(), 100_000);
        let began = Instant::now();
        let mut action = world.subscriptions.subscribe(ID, world.seen.handler());
        if let Some(limit) = limit {
            action = action.start_timeout(limit);
        }
        let error = action.await.unwrap_err();
        let last = Reason::SourceUnavailable { message: "scripted".into() };
        assert_eq!(error, SubscribeError::TimedOut { id: id(), last });
        assert_eq!(error.exit_code(), 3);
        assert_eq!(began.elapsed().as_secs(), limit.map_or(60, |limit| limit.as_secs()));
        assert!(world.model.opens() > 5);
        assert_eq!(world.record().await, None);
        assert!(world.subscriptions.running().is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_not_answered_times_out_naming_who_did_not_answer() {
    for (number, who) in ["storage", "source", "source", "source", "source"].into_iter().enumerate() {
        let world = World::new();
        let process = world.stepped();
        process.steps.cut(number, Cut::Before);
        let began = Instant::now();
        let error = process.subscriptions.subscribe(ID, world.seen.handler()).await.unwrap_err();
        let calls = process.steps.calls();
        let SubscribeError::TimedOut { last, .. } = &error else { panic!("{error:?}") };
        assert_eq!(last.name(), format!("{who}_unavailable"), "{calls:?}");
        assert_eq!(began.elapsed(), Duration::from_secs(60));
    }
    let world = World::new();
    world.storage.next_claims([Fault::Hang]);
    let error = world.subscriptions.subscribe(ID, world.seen.handler()).await.unwrap_err();
    assert_eq!(error.reason().map(Reason::name), Some("storage_unavailable"));
    assert_eq!(world.model.active_readers(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_scope_around_the_storages_collections_leaves_them_out_only_in_the_same_deployment() {
    use mongosub::{Identity, Scope};
    let own = Namespace::new("test", "checkpoints");
    let set = |name: &str, hosts: &[&str]| Deployment {
        set_name: name.into(),
        hosts: hosts.iter().map(ToString::to_string).collect(),
    };
    let here = set("rs0", &["a:1", "b:1"]);
    let database = Scope::Database { db: "test".into() };
    for (scope, lives_in, left_out) in [
        (database.clone(), set("rs0", &["b:1", "c:1"]), true),
        (Scope::Deployment, set("rs0", &["b:1"]), true),
        (Scope::Database { db: "other".into() }, set("rs0", &["b:1"]), false),
        (database.clone(), set("rs0", &["c:1"]), false),
        (database, set("rs1", &["a:1", "b:1"]), false),
    ] {
        let logs = Logs::capture();
        let world = World::new();
        let mut identity = Identity::new(scope.clone());
        identity.deployment = Some(here.clone());
        world.model.set_identity(identity);
        world.storage.lives_in(lives_in, vec![own.clone()]);
        let subscription = world.subscribe().await;
        world.model.push(memory::insert(1, doc! {}).namespace(&own));
        world.model.push(memory::insert(2, doc! {}));
        until_settled(&subscription, if left_out { 1 } else { 2 }).await;
        assert_eq!(world.seen.keys(), if left_out { vec![2] } else { vec![1, 2] }, "{scope}");
        let line = logs.lines("INFO", "starts at");
        assert_eq!(line.len(), 1);
        let said = if left_out { "left out: test.checkpoints" } else { "left out: nothing" };
        assert!(line[0].contains(said), "{line:?}");
        // It stays left out when the cursor is opened again, and it is no part of the fingerprint.
        subscription.pause().await.unwrap();
        world.model.push(memory::insert(3, doc! {}).namespace(&own));
        subscription.resume().await.unwrap();
        world.model.push(memory::insert(4, doc! {}));
        until(&subscription, "4 delivered", |_| world.seen.keys().last() == Some(&4)).await;
        assert_eq!(world.seen.keys().contains(&3), !left_out);
        assert_eq!(world.record().await.unwrap().pipeline, Some(crate::support::fingerprint()));
    }
}

#[tokio::test(start_paused = true)]
async fn a_subscription_to_the_storages_own_collection_is_refused_in_the_same_deployment_alone() {
    let own = Namespace::new("test", "events");
    for (hosts, refused) in [("memory:27017", true), ("elsewhere:1", false)] {
        let world = World::new();
        let deployment = Deployment { set_name: "memory".into(), hosts: vec![hosts.into()] };
        world.storage.lives_in(deployment, vec![own.clone()]);
        match world.subscriptions.subscribe(ID, world.seen.handler()).await {
            Err(error) => {
                assert!(refused, "{error}");
                assert!(matches!(error, SubscribeError::Config { field: "model", .. }), "{error:?}");
                assert_eq!((error.exit_code(), world.model.opens()), (2, 0));
                assert_eq!(world.record().await, None);
            }
            Ok(_) => assert!(!refused),
        }
    }
}
