//! Positions that are committed in one transaction with the handler's writes: each event is applied exactly once.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use mongosub::bson::doc;
use mongosub::memory::{Conflict, MemoryCheckpointStorage, MemoryModel, MemoryTransaction};
use mongosub::{
    CheckpointStorage, Claim, Delivery, Deployment, Failure, Kind, OnFailure, Subscribe, SubscribeError, Subscription,
    Then, TransactionHandler,
};
use proptest::prelude::*;

use crate::support::{
    Fault, FaultyStorage, Hold, ID, Recorder, World, id, millis, seconds, until, until_reason, until_seen,
    until_settled,
};

/// Where the memory model's feed and its storage are.
fn here() -> Deployment {
    Deployment { set_name: "memory".into(), hosts: vec!["memory:27017".into()] }
}

fn world() -> World {
    let world = World::new();
    world.storage.lives_in(here(), Vec::new());
    world
}

/// What is to happen at the events that are handled next.
#[derive(Clone, Default)]
struct Script(Arc<Mutex<Vec<(i32, What)>>>);

#[derive(Clone)]
enum What {
    Fail,
    Conflict,
    Panic,
    Skip,
    Keep(Arc<Mutex<Option<MemoryTransaction>>>),
    Wait(Hold),
}

impl Script {
    fn at(&self, key: i32, what: What) {
        self.0.lock().unwrap().push((key, what));
    }

    fn take(&self, key: i32) -> Option<What> {
        let mut script = self.0.lock().unwrap();
        let at = script.iter().position(|(at, _)| *at == key)?;
        Some(script.remove(at).1)
    }
}

/// A handler that writes down what it got, counts it in the transaction, and then does what the script says.
fn counting(seen: &Recorder, script: &Script) -> impl TransactionHandler<MemoryTransaction> + use<> {
    let (seen, script) = (seen.clone(), script.clone());
    move |mut transaction: MemoryTransaction, delivery: Delivery| {
        seen.note(&delivery);
        let script = script.clone();
        async move {
            // An `invalidate` has none.
            let Some(key) = delivery.event.document_id::<i32>()? else { return Ok(()) };
            let count = |name: &str| transaction.get(name).and_then(|count| count.as_i32()).unwrap_or(0) + 1;
            let (one, all) = (count(&key.to_string()), count("all"));
            transaction.set(key.to_string(), one);
            transaction.set("all", all);
            match script.take(key) {
                None => Ok(()),
                Some(What::Fail) => {
                    // So that it can be seen what came before.
                    millis(10).await;
                    Err("scripted".into())
                }
                Some(What::Conflict) => Err(Conflict.into()),
                Some(What::Panic) => panic!("scripted"),
                Some(What::Skip) => Err(Failure::skip("not wanted")),
                Some(What::Keep(kept)) => {
                    *kept.lock().unwrap() = Some(transaction);
                    Ok(())
                }
                Some(What::Wait(hold)) => {
                    hold.wait().await;
                    Ok(())
                }
            }
        }
    }
}

fn action(world: &World, script: &Script) -> Subscribe<MemoryModel, FaultyStorage> {
    world.subscriptions.subscribe_in_transaction(ID, counting(&world.seen, script))
}

async fn subscribed(world: &World, script: &Script) -> Subscription {
    action(world, script).await.unwrap()
}

/// How often each of these events is counted in what is stored.
fn counts(storage: &MemoryCheckpointStorage, keys: std::ops::RangeInclusive<i32>) -> Vec<i32> {
    keys.map(|key| storage.value(&key.to_string()).and_then(|count| count.as_i32()).unwrap_or(0)).collect()
}

#[tokio::test(start_paused = true)]
async fn writes_and_position_are_committed_together_and_nothing_is_written_beside() {
    let (world, script) = (world(), Script::default());
    let subscription = subscribed(&world, &script).await;
    let positions = world.inserts(1..=5);
    let status = until_settled(&subscription, 5).await;
    assert_eq!((status.handled, world.storage.commits_sent()), (5, 5));
    assert_eq!(world.stored().await.as_ref(), positions.last());
    assert_eq!(counts(world.storage.inner(), 1..=5), [1; 5]);
    let status = until(&subscription, "saved", |status| status.saved.as_ref() == positions.last()).await;
    assert_eq!(status.saves, 5, "each commit is a save");
    let record = world.record().await.unwrap();
    assert_eq!((record.kind, record.source), (Some(Kind::Event), Some(crate::support::source())));
    assert_eq!(record.pipeline, Some(crate::support::fingerprint()));
    assert_eq!(world.storage.sent().len(), 0, "no save beside the transactions");
    assert_eq!(subscription.shutdown().await.unwrap(), positions.last().cloned());
    assert!(world.record().await.unwrap().clean);
}

#[tokio::test(start_paused = true)]
async fn up_to_n_events_that_are_there_already_go_into_one_transaction() {
    let (world, script, hold) = (world(), Script::default(), Hold::default());
    script.at(1, What::Wait(hold.clone()));
    let subscription = action(&world, &script).save_every(4).await.unwrap();
    world.insert(1);
    until_seen(&world, 1).await;
    let positions = world.inserts(2..=10);
    hold.let_go(1);
    until_settled(&subscription, 10).await;
    // 1, then 2 to 5, 6 to 9, 10: nothing waits for more.
    assert_eq!(world.storage.commits_sent(), 4);
    assert_eq!(counts(world.storage.inner(), 1..=10), [1; 10]);
    assert_eq!(world.stored().await.as_ref(), positions.last());
}

#[tokio::test(start_paused = true)]
async fn what_lies_in_front_of_a_failing_event_is_committed_and_the_policy_gets_the_one_that_failed() {
    let (world, script, hold) = (world(), Script::default(), Hold::default());
    script.at(1, What::Wait(hold.clone()));
    for _ in 0..3 {
        script.at(4, What::Fail);
    }
    let policy = OnFailure::retry(2).then(Then::Skip);
    let subscription = action(&world, &script).save_every(10).on_failure(policy).await.unwrap();
    world.insert(1);
    until_seen(&world, 1).await;
    let positions = world.inserts(2..=6);
    hold.let_go(1);
    let status = until(&subscription, "failing", |status| status.state.name() == "retrying").await;
    assert_eq!(status.settled, 3, "2 and 3 are committed: {:?}", world.seen.keys());
    assert_eq!(world.stored().await, Some(positions[1].clone()));
    let status = until_settled(&subscription, 6).await;
    assert_eq!((status.handled, status.skipped), (5, 1));
    assert_eq!(counts(world.storage.inner(), 1..=6), [1, 1, 1, 0, 1, 1]);
    let of = |key| {
        let seen = world.seen.all().into_iter().filter(move |seen| seen.key == key);
        seen.map(|seen| (seen.attempt, seen.may_be_repeat)).collect::<Vec<_>>()
    };
    assert_eq!(of(2), [(1, false), (2, true)], "run again without the one that failed");
    assert_eq!(of(4).len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_commit_whose_answer_was_lost_is_not_handled_again() {
    let (world, script) = (world(), Script::default());
    let subscription = subscribed(&world, &script).await;
    world.storage.next_commits([Some(Fault::LoseReply)]);
    let positions = world.inserts(1..=2);
    let status = until_settled(&subscription, 2).await;
    assert_eq!(world.seen.keys(), [1, 2]);
    assert_eq!(counts(world.storage.inner(), 1..=2), [1, 1]);
    assert_eq!((world.stored().await, status.handled), (Some(positions[1].clone()), 2));
    assert!(matches!(subscription.shutdown().await, Ok(Some(_))));
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_for_several_events_settles_those_it_covers_when_others_have_joined_them() {
    let (world, script, hold) = (world(), Script::default(), Hold::default());
    script.at(1, What::Wait(hold.clone()));
    let subscription = action(&world, &script).save_every(10).shutdown_grace(Duration::from_secs(1)).await.unwrap();
    world.insert(1);
    until_seen(&world, 1).await;
    world.inserts(2..=3);
    // Whatever the answer, the run is gone before it comes.
    world.storage.next_commits([None, Some(Fault::LoseReply)]);
    hold.let_go(1);
    while world.storage.commits_sent() < 2 {
        millis(1).await;
    }
    world.storage.no_begins();
    subscription.pause().await.unwrap();
    world.inserts(4..=6);
    world.storage.begins_again();
    subscription.resume().await.unwrap();
    until_settled(&subscription, 6).await;
    assert_eq!(world.seen.keys(), [1, 2, 3, 4, 5, 6]);
    assert_eq!(counts(world.storage.inner(), 1..=6), [1; 6]);
}

#[tokio::test(start_paused = true)]
async fn a_storage_that_does_not_answer_is_no_failure_of_the_handler() {
    let (world, script) = (world(), Script::default());
    let policy = OnFailure::retry(0).then(Then::Stop);
    let subscription = action(&world, &script).on_failure(policy).await.unwrap();
    world.storage.no_begins();
    world.insert(1);
    until_reason(&subscription, "retrying", "storage_unavailable").await;
    seconds(300).await;
    assert_eq!(world.seen.keys(), [0; 0], "nothing is handled without a transaction");
    world.storage.begins_again();
    world.storage.next_commits([Some(Fault::Fail), Some(Fault::Fail)]);
    let status = until_settled(&subscription, 1).await;
    assert_eq!((status.handled, counts(world.storage.inner(), 1..=1)), (1, vec![1]));
    until(&subscription, "running", |status| status.state.reason().is_none()).await;
}

#[tokio::test(start_paused = true)]
async fn a_storage_that_hangs_shows_and_a_shutdown_ends_it_with_the_event_unsettled() {
    let (world, script) = (world(), Script::default());
    let subscription = action(&world, &script).shutdown_grace(Duration::from_secs(2)).await.unwrap();
    let start = world.stored().await;
    world.storage.next_begins([Fault::Hang]);
    world.insert(1);
    until_reason(&subscription, "retrying", "storage_unavailable").await;
    assert_eq!(subscription.shutdown().await.unwrap(), start);
    assert_eq!(world.seen.keys(), [0; 0]);
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_record_stalls_and_a_deleted_one_stops() {
    let (world, script) = (world(), Script::default());
    let subscription = subscribed(&world, &script).await;
    let refused = mongosub::StorageError::Refused { code: 73, message: "scripted".into() };
    world.storage.next_begins([Fault::Error(refused)]);
    world.insert(1);
    until_reason(&subscription, "stalled", "refused_by_server").await;
    subscription.resume().await.unwrap();
    until_settled(&subscription, 1).await;
    world.storage.inner().delete(&id(), None).await.unwrap();
    world.insert(2);
    until_reason(&subscription, "stopped", "deleted").await;
    assert_eq!(counts(world.storage.inner(), 1..=2), [1, 0]);
}

#[tokio::test(start_paused = true)]
async fn what_is_rolled_back_runs_again_as_a_whole_and_says_so() {
    let (world, script) = (world(), Script::default());
    let subscription = subscribed(&world, &script).await;
    script.at(1, What::Conflict);
    world.storage.roll_back(1);
    world.insert(1);
    let status = until_settled(&subscription, 1).await;
    let seen: Vec<_> = world.seen.all().into_iter().map(|seen| (seen.attempt, seen.may_be_repeat)).collect();
    assert_eq!(seen, [(1, false), (2, true), (3, true)]);
    assert_eq!((status.handled, counts(world.storage.inner(), 1..=1)), (1, vec![1]));
    // Another writer of the same value.
    let hold = Hold::default();
    script.at(2, What::Wait(hold.clone()));
    world.insert(2);
    until_seen(&world, 4).await;
    world.storage.inner().set_value("all", 100);
    hold.let_go(1);
    until_settled(&subscription, 2).await;
    assert_eq!(world.storage.inner().value("all"), Some(101.into()));
}

#[tokio::test(start_paused = true)]
async fn transactions_rolled_back_for_two_minutes_are_a_failure_of_the_handler() {
    let (world, script) = (world(), Script::default());
    let policy = OnFailure::retry(0).then(Then::Skip);
    let subscription = action(&world, &script).on_failure(policy).await.unwrap();
    world.storage.roll_back(u32::MAX);
    let begun = tokio::time::Instant::now();
    world.insert(1);
    until_reason(&subscription, "retrying", "storage_unavailable").await;
    until_settled(&subscription, 1).await;
    let took = begun.elapsed().as_secs();
    assert!((120..122).contains(&took), "{took} s");
    assert_eq!((subscription.status().skipped, counts(world.storage.inner(), 1..=1)), (1, vec![0]));
}

/// Another process claims the id while event 1 is in hand, which is counted as a death; the run stops of it.
async fn superseded_in_a_transaction(world: &World, script: &Script) {
    let hold = Hold::default();
    let subscription = subscribed(world, script).await;
    script.at(1, What::Wait(hold.clone()));
    world.insert(1);
    until_seen(world, 1).await;
    // Nothing waits for the open transaction.
    world.storage.inner().claim(&Claim::new(id())).await.unwrap();
    assert_eq!(world.record().await.unwrap().unclean_ends, 1);
    hold.let_go(1);
    until_reason(&subscription, "stopped", "superseded").await;
}

#[tokio::test(start_paused = true)]
async fn a_superseded_owners_writes_are_rolled_back() {
    let (world, script) = (world(), Script::default());
    superseded_in_a_transaction(&world, &script).await;
    assert_eq!(counts(world.storage.inner(), 1..=1), [0]);
    assert_eq!(world.storage.inner().value("all"), None);
    // One that was superseded before it began is not handled at all.
    let other = World::over(world.model.clone(), world.storage.inner().clone());
    other.storage.lives_in(here(), Vec::new());
    let subscription = subscribed(&other, &script).await;
    until_settled(&subscription, 1).await;
    world.storage.inner().claim(&Claim::new(id())).await.unwrap();
    world.insert(2);
    until_reason(&subscription, "stopped", "superseded").await;
    assert_eq!(other.seen.keys(), [1]);
}

#[tokio::test(start_paused = true)]
async fn an_owner_whose_transaction_finds_it_superseded_says_that_it_lives_and_stores_nothing() {
    let (world, script) = (world(), Script::default());
    superseded_in_a_transaction(&world, &script).await;
    millis(10).await;
    assert_eq!(world.record().await.unwrap().unclean_ends, 0, "it is alive");
    assert_eq!(world.storage.sent().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_fails_when_it_was_superseded_is_not_judged_by_the_failure_policy() {
    let (world, script) = (world(), Script::default());
    let policy = OnFailure::retry(0).then(Then::Skip);
    let subscription = action(&world, &script).on_failure(policy).await.unwrap();
    script.at(1, What::Fail);
    world.insert(1);
    until_seen(&world, 1).await;
    world.storage.inner().claim(&Claim::new(id())).await.unwrap();
    let status = until_reason(&subscription, "stopped", "superseded").await;
    assert_eq!((status.settled, status.skipped), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn failures_panics_and_timeouts_leave_nothing_of_their_transaction() {
    let (world, script, hold) = (world(), Script::default(), Hold::default());
    let subscription = action(&world, &script).handler_timeout(Duration::from_secs(5)).await.unwrap();
    script.at(1, What::Fail);
    script.at(1, What::Panic);
    script.at(1, What::Wait(hold));
    script.at(1, What::Fail);
    world.insert(1);
    until(&subscription, "timed out", |status| {
        matches!(status.state.reason(), Some(mongosub::Reason::HandlerFailing { attempts: 3, error, .. })
            if error.contains("longer than its limit of 5s"))
    })
    .await;
    until_settled(&subscription, 1).await;
    assert_eq!(world.seen.all().last().unwrap().attempt, 5);
    assert_eq!(counts(world.storage.inner(), 1..=1), [1]);
}

#[tokio::test(start_paused = true)]
async fn an_event_that_kills_its_process_is_found_in_transactions_too() {
    let (mut world, script) = (world(), Script::default());
    subscribed(&world, &script).await.shutdown().await.unwrap();
    let positions = world.inserts(1..=5);
    for life in 0..7 {
        script.at(3, What::Wait(Hold::default()));
        let policy = OnFailure::retry(5).then(Then::Skip);
        let subscription = action(&world, &script).save_every(1000).on_failure(policy).await.unwrap();
        if life < 6 {
            for _ in 0..1000 {
                millis(1).await;
                if world.seen.keys().contains(&3) {
                    break;
                }
            }
            assert!(world.seen.keys().contains(&3), "life {life}");
            // Its process dies.
            let next = World::over(world.model.clone(), world.storage.inner().clone());
            next.storage.lives_in(here(), Vec::new());
            let mut status = subscription.watch();
            drop((world, subscription));
            status.wait_for(|status| status.state.name() == "stopped").await.unwrap();
            tokio::task::yield_now().await;
            world = next;
            continue;
        }
        subscription.caught_up().await.unwrap();
        assert_eq!(subscription.status().skipped, 1);
        assert!(!world.seen.keys().contains(&3));
        assert_eq!(counts(world.storage.inner(), 1..=5), [1, 1, 0, 1, 1]);
        assert_eq!(world.record().await.unwrap().in_hand, None);
        assert_eq!(subscription.shutdown().await.unwrap().as_ref(), positions.last());
        assert!(world.record().await.unwrap().clean);
    }
}

#[tokio::test(start_paused = true)]
async fn a_transaction_that_is_kept_is_a_failed_attempt() {
    let (world, script, kept) = (world(), Script::default(), Arc::default());
    let subscription = subscribed(&world, &script).await;
    script.at(1, What::Keep(Arc::clone(&kept)));
    script.at(1, What::Fail);
    world.insert(1);
    let status = until_reason(&subscription, "retrying", "handler_failing").await;
    let reason = status.state.reason().unwrap().to_string();
    assert!(reason.contains("has kept its transaction beyond its return"), "{reason}");
    until_settled(&subscription, 1).await;
    drop(kept);
    assert_eq!(counts(world.storage.inner(), 1..=1), [1]);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_position_is_never_saved_beside_a_transaction() {
    let (world, script, hold) = (world(), Script::default(), Hold::default());
    let subscription = action(&world, &script).save_quiet_position_every(Duration::from_secs(10)).await.unwrap();
    let quiet = world.model.push_quiet();
    let status = until(&subscription, "saved", |status| status.saved.as_ref() == Some(&quiet)).await;
    assert_eq!((status.saves, world.storage.sent().len()), (1, 1));
    script.at(1, What::Wait(hold.clone()));
    let event = world.insert(1);
    until_seen(&world, 1).await;
    let quiet = world.model.push_quiet();
    seconds(60).await;
    assert_eq!(world.storage.sent().len(), 1, "nothing is written while a transaction is open");
    hold.let_go(1);
    until(&subscription, "saved", |status| status.saved.as_ref() == Some(&quiet)).await;
    assert_eq!(world.storage.sent_positions()[1..], *std::slice::from_ref(&quiet));
    let record = world.record().await.unwrap();
    let mut source = crate::support::source();
    source.last_event = Some(event);
    assert_eq!((record.kind, record.source), (Some(Kind::Quiet), Some(source)));
    assert_eq!(counts(world.storage.inner(), 1..=1), [1], "the transaction did not meet the save");
    assert_eq!(world.seen.keys(), [1]);
    // The storage is away for the next one, and for a transaction as well.
    world.storage.every_save(Fault::Fail);
    world.model.push_quiet();
    until_reason(&subscription, "retrying", "storage_unavailable").await;
    world.storage.heal();
    let status = until(&subscription, "running", |status| status.state.reason().is_none()).await;
    assert_eq!(status.saves, 4);
    subscription.pause().await.unwrap();
    let last = world.insert(2);
    subscription.resume().await.unwrap();
    until_settled(&subscription, 2).await;
    assert_eq!(subscription.drained().await.unwrap(), Some(last));
}

#[tokio::test(start_paused = true)]
async fn no_transaction_begins_while_a_save_is_on_its_way() {
    let (world, script) = (world(), Script::default());
    let subscription = action(&world, &script).save_quiet_position_every(Duration::from_secs(10)).await.unwrap();
    world.storage.next_saves([Fault::Late(Duration::from_secs(3))]);
    world.model.push_quiet();
    while world.storage.sent().is_empty() {
        millis(100).await;
    }
    world.insert(1);
    seconds(2).await;
    assert_eq!(world.seen.keys(), [0; 0]);
    until_settled(&subscription, 1).await;
    assert_eq!((world.seen.keys(), world.storage.commits_sent()), (vec![1], 1), "nothing was run again");
}

#[tokio::test(start_paused = true)]
async fn events_settled_without_a_transaction_are_stored_by_the_next_save() {
    let (world, script) = (world(), Script::default());
    for key in [2, 4] {
        script.at(key, What::Skip);
    }
    let subscription = subscribed(&world, &script).await;
    let positions = world.inserts(1..=4);
    until_settled(&subscription, 4).await;
    assert_eq!(subscription.drained().await.unwrap(), Some(positions[3].clone()));
    assert_eq!(counts(world.storage.inner(), 1..=4), [1, 0, 1, 0]);
    assert_eq!(subscription.shutdown().await.unwrap(), Some(positions[3].clone()));
    let record = world.record().await.unwrap();
    assert_eq!((record.clean, record.position), (true, Some(positions[3].clone())));
}

#[tokio::test(start_paused = true)]
async fn superseded_is_found_by_a_quiet_save_too() {
    let (world, script) = (world(), Script::default());
    let subscription = action(&world, &script).save_quiet_position_every(Duration::from_secs(1)).await.unwrap();
    world.storage.inner().claim(&Claim::new(id())).await.unwrap();
    world.model.push_quiet();
    until_reason(&subscription, "stopped", "superseded").await;
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_had_in_a_transaction_is_refused_by_name() {
    let (world, script) = (World::new(), Script::default());
    let refused = |answer: Result<Subscription, SubscribeError>| match answer {
        Err(SubscribeError::Config { field, message }) => (field, message),
        other => panic!("{other:?}"),
    };
    let (field, message) = refused(action(&world, &script).await);
    assert_eq!(field, "storage");
    assert!(message.contains("does not show"), "{message}");
    world.storage.lives_in(Deployment { set_name: "other".into(), hosts: here().hosts }, Vec::new());
    let (field, message) = refused(action(&world, &script).await);
    assert_eq!(field, "storage");
    assert!(message.contains("replica set other") && message.contains("memory"), "{message}");
    world.storage.lives_in(here(), Vec::new());
    assert_eq!(refused(action(&world, &script).save_when(|_| true).await).0, "save_when");
    assert_eq!(refused(action(&world, &script).hold().await).0, "hold");
    assert_eq!(refused(action(&world, &script).save_every(0).await).0, "save_every");
    assert_eq!(world.record().await, None, "nothing is claimed");
    subscribed(&world, &script).await;
}

/// One thing that happens to a run, or beside it.
#[derive(Debug, Clone)]
enum Step {
    Insert,
    Quiet,
    Invalidate,
    Begin(u8),
    Commit(u8),
    RollBack,
    Fail(i32),
    Conflict(i32),
    Panic(i32),
    Skip(i32),
    Time(u64),
    PauseAndResume,
    /// The process dies here.
    Kill,
    /// Another process takes over while this one goes on.
    TakeOver,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => Just(Step::Insert),
        1 => Just(Step::Quiet),
        1 => Just(Step::Invalidate),
        2 => (0u8..3).prop_map(Step::Begin),
        4 => (0u8..4).prop_map(Step::Commit),
        2 => Just(Step::RollBack),
        1 => (1i32..30).prop_map(Step::Fail),
        1 => (1i32..30).prop_map(Step::Conflict),
        1 => (1i32..30).prop_map(Step::Panic),
        1 => (1i32..30).prop_map(Step::Skip),
        6 => (0u64..3000).prop_map(Step::Time),
        1 => Just(Step::PauseAndResume),
        2 => Just(Step::Kill),
        1 => Just(Step::TakeOver),
    ];
    prop::collection::vec(step, 1..60)
}

fn fault(number: u8) -> Fault {
    match number {
        0 => Fault::Fail,
        1 => Fault::Late(Duration::from_millis(700)),
        2 => Fault::FailLate(Duration::from_millis(700)),
        _ => Fault::LoseReply,
    }
}

/// A run of its own process.
struct Life {
    world: World,
    subscription: Subscription,
}

impl Life {
    async fn begin(model: &MemoryModel, store: &MemoryCheckpointStorage, script: &Script, every: u32) -> Self {
        let world = World::over(model.clone(), store.clone());
        world.storage.lives_in(here(), Vec::new());
        let action = action(&world, script).save_every(every).save_quiet_position_every(Duration::from_secs(2));
        let policy = OnFailure::retry_forever().backoff(Duration::from_millis(10), Duration::from_millis(50));
        let subscription = action.on_failure(policy).await.unwrap();
        Self { world, subscription }
    }
}

async fn play(steps: Vec<Step>, every: u32) {
    let (model, store, script) = (MemoryModel::new(), MemoryCheckpointStorage::new(), Script::default());
    let mut lives = vec![Life::begin(&model, &store, &script, every).await];
    let mut last = 0;
    let mut skipped = Vec::new();
    for step in steps {
        let life = lives.last().unwrap();
        match step {
            Step::Insert => {
                last += 1;
                model.push(mongosub::memory::insert(last, doc! {}));
            }
            Step::Quiet => drop(model.push_quiet()),
            Step::Invalidate => drop(model.invalidate()),
            Step::Begin(number) => life.world.storage.next_begins([fault(number)]),
            Step::Commit(number) => life.world.storage.next_commits([Some(fault(number))]),
            Step::RollBack => life.world.storage.roll_back(1),
            Step::Fail(key) => script.at(key, What::Fail),
            Step::Conflict(key) => script.at(key, What::Conflict),
            Step::Panic(key) => script.at(key, What::Panic),
            Step::Skip(key) => {
                skipped.push(key);
                script.at(key, What::Skip);
            }
            Step::Time(time) => millis(time).await,
            Step::PauseAndResume => {
                life.subscription.pause().await.unwrap();
                life.subscription.resume().await.unwrap();
            }
            Step::Kill => {
                // Whatever was on its way comes to its end or not.
                lives.pop();
                lives.push(Life::begin(&model, &store, &script, every).await);
            }
            Step::TakeOver => lives.push(Life::begin(&model, &store, &script, every).await),
        }
    }
    let life = lives.last().unwrap();
    // The next start is at the end of everything.
    for _ in 0..1000 {
        millis(100).await;
        let behind = store.read(&id()).await.unwrap().unwrap();
        if life.subscription.caught_up().await.is_ok() && behind.position.is_some() {
            break;
        }
    }
    let counted = counts(&store, 1..=last);
    for (key, count) in (1..=last).zip(counted) {
        let may_be_skipped = skipped.contains(&key);
        assert!(count == 1 || (may_be_skipped && count == 0), "{key} is applied {count} times");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn each_event_is_applied_exactly_once_whatever_happens(steps in steps(), every in 1u32..5) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(play(steps, every));
    }
}

/// What is stored is then further than the run knows.
#[tokio::test(start_paused = true)]
async fn a_pause_behind_a_lost_commit_of_a_careful_run_comes_to_an_end() {
    use Step::{Commit, Insert, Kill, PauseAndResume, RollBack, TakeOver, Time};
    let insert = || std::iter::repeat_n(Insert, 3);
    let steps = [TakeOver, Insert, Kill, RollBack, Commit(3)].into_iter().chain(insert());
    let steps = steps.chain([Commit(0), TakeOver, Commit(0), Commit(1), Time(1129), Commit(3), Time(1350), Insert]);
    play(steps.chain([PauseAndResume, Time(1706), Time(1841), Kill]).collect(), 1).await;
}

/// The suite's writes, in memory.
struct Values;

impl mongosub::conformance::Effects<MemoryCheckpointStorage> for Values {
    async fn write(&self, _: &MemoryCheckpointStorage, transaction: &mut MemoryTransaction, key: &str) {
        transaction.set(key, 1);
    }

    async fn is_written(&self, storage: &MemoryCheckpointStorage, key: &str) -> bool {
        storage.value(key).is_some()
    }
}

#[tokio::test(start_paused = true)]
async fn transactions_in_memory_pass_the_suite() {
    let storage = MemoryCheckpointStorage::new();
    mongosub::conformance::transactional_storage(&storage, &Values).await.assert_passed();
}
