//! History that is lost, at a start and in a run, under both policies.

use mongosub::bson::{DateTime, doc};
use mongosub::{
    Checkpoint, Epoch, Gap, Kind, Note, OnHistoryLost, Reason, SourceError, Start, StartAt, SubscribeError, memory,
};

use crate::support::{
    Fault, Hold, Logs, World, left_at, seconds, source, until, until_reason, until_saved, until_settled,
};

fn lost(position: &Checkpoint) -> SourceError {
    SourceError::Refused(Reason::HistoryLost { position: position.clone(), oldest: None })
}

/// A record at the first of five events, with the history before the fourth gone.
fn lost_meanwhile() -> (World, Vec<Checkpoint>) {
    let world = World::new();
    let events = world.inserts(1..=5);
    world.storage.inner().put(left_at(&events[0]));
    world.model.drop_history_before(&events[3]);
    (world, events)
}

fn refused(error: Option<SubscribeError>) -> Reason {
    error.and_then(|error| error.reason().cloned()).expect("a reason")
}

#[tokio::test(start_paused = true)]
async fn lost_history_is_refused_by_default_with_both_times_and_what_can_be_done() {
    let (world, events) = lost_meanwhile();
    let before = world.record().await;
    let reason = refused(world.action().await.err());
    let oldest = events[3].cluster_time().map(Checkpoint::Time);
    assert_eq!(reason, Reason::HistoryLost { position: events[0].clone(), oldest: oldest.clone() });
    let said = reason.to_string();
    for part in
        [&events[0].to_string(), &oldest.unwrap().to_string(), "(2023-11-14 22:13:20", "StartAt::Always", "RestartAt"]
    {
        assert!(said.contains(part), "{part:?} in {said}");
    }
    assert_eq!(world.record().await, before, "the record and its owner are as they were");
}

#[tokio::test(start_paused = true)]
async fn a_start_behind_lost_history_stores_the_new_start_in_a_new_epoch_with_the_gap_before_it_reads() {
    let (world, events) = lost_meanwhile();
    let logs = Logs::capture();
    world.storage.next_saves([Fault::Hang]);
    let hold = Hold::default();
    let action = world.held(&hold).on_history_lost(OnHistoryLost::RestartAt(Start::Earliest));
    let starting = tokio::spawn(async move { action.await });
    seconds(1).await;
    assert!(!starting.is_finished());
    assert_eq!((world.model.reads(), world.seen.all().len()), (0, 0), "nothing is read before it is stored");
    assert_eq!(world.stored().await.as_ref(), Some(&events[0]));
    world.storage.release();
    let subscription = starting.await.unwrap().unwrap();
    let record = world.record().await.unwrap();
    let to = Checkpoint::Time(events[3].cluster_time().unwrap());
    assert_eq!((record.position.as_ref(), record.kind), (Some(&to), Some(Kind::Start)));
    assert!(record.epoch > Some(Epoch(5)), "{:?}", record.epoch);
    assert_eq!(record.source, Some(source()));
    let [gap] = &record.gaps[..] else { panic!("{:?}", record.gaps) };
    assert_eq!((&gap.from, &gap.to, &gap.scope), (&events[0], &to, &source().scope));
    assert!(gap.at.is_some());
    hold.let_go(2);
    until_settled(&subscription, 2).await;
    assert_eq!(world.seen.keys(), [4, 5]);
    let status = subscription.status();
    assert_eq!((&status.gaps, status.gaps_recorded), (&record.gaps, 1));
    let said = logs.lines("WARN", "has lost the changes between");
    assert!(
        said.len() == 1 && said[0].contains(&events[0].to_string()) && said[0].contains(&to.to_string()),
        "{said:?}"
    );

    // The next start goes on, in that epoch, and still shows the gap.
    until_saved(&subscription, &events[4]).await;
    subscription.shutdown().await.unwrap();
    let next = world.restarted();
    let subscription = next.subscribe().await;
    assert_eq!((subscription.status().gaps, subscription.status().gaps_recorded), (record.gaps, 0));
    assert_eq!(next.record().await.unwrap().epoch, record.epoch);
}

#[tokio::test(start_paused = true)]
async fn every_start_can_be_the_one_behind_lost_history() {
    for start in ["present", "time", "after"] {
        let (world, events) = lost_meanwhile();
        let start = match start {
            "present" => Start::Present,
            "time" => Start::Time(events[4].cluster_time().unwrap()),
            _ => Start::After(events[3].clone()),
        };
        let subscription = world.action().on_history_lost(OnHistoryLost::RestartAt(start.clone())).await.unwrap();
        let last = world.insert(6);
        until_saved(&subscription, &last).await;
        let expected: &[i32] = if start == Start::Present { &[6] } else { &[5, 6] };
        assert_eq!(world.seen.keys(), expected, "{start:?}");
        assert_eq!(world.record().await.unwrap().gaps.len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_start_that_is_lost_too_before_anything_behind_it_was_stored_is_refused_whatever_the_policy() {
    let (world, events) = lost_meanwhile();
    let restart = || OnHistoryLost::RestartAt(Start::Earliest);
    let subscription = world.action().on_history_lost(restart()).never_save_quiet_position().await.unwrap();
    // It ends before anything is stored behind the new start.
    drop(subscription);
    let mut record = world.record().await.unwrap();
    assert_eq!(record.kind, Some(Kind::Start));
    let again = World::over(world.model.clone(), mongosub::memory::MemoryCheckpointStorage::new());
    again.storage.inner().put(record.clone());
    let later = again.inserts(6..=8);
    again.model.drop_history_before(&later[1]);
    let reason = refused(again.action().on_history_lost(restart()).await.err());
    assert_eq!(reason.name(), "history_lost");
    assert_eq!(again.record().await, Some(record.clone()));

    // With one event stored behind it, it may begin again.
    record.position = Some(events[4].clone());
    record.kind = Some(Kind::Event);
    again.storage.inner().put(record);
    let subscription = again.action().on_history_lost(restart()).await.unwrap();
    until_settled(&subscription, 2).await;
    assert_eq!((again.seen.keys(), subscription.status().gaps.len()), (vec![7, 8], 2));
}

#[tokio::test(start_paused = true)]
async fn a_new_start_chosen_by_hand_that_is_lost_is_refused_whatever_the_policy() {
    let (world, events) = lost_meanwhile();
    for start_at in
        [StartAt::Always(Start::After(events[1].clone())), StartAt::StoredOr(Start::After(events[1].clone()))]
    {
        world.storage.inner().put(mongosub::Record::empty(crate::support::id()));
        let action = world.action().start_at(start_at).on_history_lost(OnHistoryLost::RestartAt(Start::Present));
        assert_eq!(refused(action.await.err()).name(), "history_lost");
    }
}

#[tokio::test(start_paused = true)]
async fn the_oldest_position_is_asked_for_again_when_it_is_lost_at_the_open_five_times_at_most() {
    for (failures, starts) in [(4, true), (5, false)] {
        let world = World::new();
        let first = world.insert(1);
        world.model.fail_opens(lost(&first), failures);
        let started = world.action().start_at(StartAt::StoredOr(Start::Earliest)).await;
        assert_eq!(started.is_ok(), starts, "{failures} failures");
        assert_eq!(world.model.opens(), 5);

        // At a restart as well: the first open is that of the lost position.
        let world = World::new();
        let first = world.insert(1);
        world.storage.inner().put(left_at(&first));
        world.model.fail_opens(lost(&first), 1 + failures);
        let started = world.action().on_history_lost(OnHistoryLost::RestartAt(Start::Earliest)).await;
        assert_eq!(started.is_ok(), starts, "{failures} failures");
        assert_eq!(world.model.opens(), 6);
    }
}

#[tokio::test(start_paused = true)]
async fn history_lost_in_a_run_stalls_it_by_default_and_nothing_behind_the_gap_is_delivered() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let first = world.insert(1);
    until_saved(&subscription, &first).await;
    subscription.pause().await.unwrap();
    let events = world.inserts(2..=5);
    world.model.drop_history_before(&events[2]);
    assert!(subscription.resume().await.is_err());
    until_reason(&subscription, "stalled", "history_lost").await;
    assert_eq!((world.seen.keys(), world.stored().await), (vec![1], Some(first)));
}

/// A run whose reader is left behind by the history while its first event is in hand.
async fn overtaken(
    action: impl FnOnce(&World) -> mongosub::Subscribe<memory::MemoryModel, crate::support::FaultyStorage>,
) -> (World, mongosub::Subscription, Vec<Checkpoint>) {
    let world = World::new();
    let subscription = action(&world).await.unwrap();
    let first = world.insert(1);
    until_saved(&subscription, &first).await;
    subscription.pause().await.unwrap();
    let mut events = vec![first];
    events.extend(world.inserts(2..=5));
    world.model.drop_history_before(&events[3]);
    (world, subscription, events)
}

#[tokio::test(start_paused = true)]
async fn a_run_that_loses_history_stores_the_new_start_with_the_gap_and_reads_only_then() {
    let restart = |world: &World| world.action().on_history_lost(OnHistoryLost::RestartAt(Start::Earliest));
    let (world, subscription, events) = overtaken(restart).await;
    let epoch = world.record().await.unwrap().epoch.unwrap();
    world.storage.next_saves([Fault::Fail, Fault::LoseReply, Fault::Hang]);
    let resumed = subscription.clone();
    tokio::spawn(async move { resumed.resume().await });
    seconds(5).await;
    assert_eq!(world.seen.keys(), [1], "nothing is read before the new start is stored");
    world.storage.release();
    until_settled(&subscription, 3).await;
    assert_eq!(world.seen.keys(), [1, 4, 5]);
    until_saved(&subscription, &events[4]).await;
    let record = world.record().await.unwrap();
    let to = Checkpoint::Time(events[3].cluster_time().unwrap());
    assert_eq!(record.epoch, Some(Epoch(epoch.0 + 1)));
    let [gap] = &record.gaps[..] else { panic!("{:?}", record.gaps) };
    assert_eq!((&gap.from, &gap.to), (&events[0], &to));
    let status = subscription.status();
    assert_eq!((&status.gaps[0].from, &status.gaps[0].to), (&events[0], &to));
    assert_eq!((status.gaps.len(), status.gaps_recorded), (1, 1));
    // The new start was stored as such.
    assert!(world.storage.sent().iter().any(|save| save.position == to && save.kind == Kind::Start));
}

#[tokio::test(start_paused = true)]
async fn a_reader_whose_last_item_is_lost_history_begins_again_too() {
    let world = World::new();
    let subscription = world.action().on_history_lost(OnHistoryLost::RestartAt(Start::Present)).await.unwrap();
    let first = world.insert(1);
    world.model.break_reader(lost(&first));
    world.insert(2);
    until(&subscription, "the gap is recorded", |status| status.gaps_recorded == 1).await;
    let last = world.insert(3);
    until_saved(&subscription, &last).await;
    assert_eq!(world.seen.keys(), [1, 3]);
    assert_eq!(world.record().await.unwrap().gaps[0].from, first);
}

#[tokio::test(start_paused = true)]
async fn a_run_whose_new_start_is_lost_before_anything_behind_it_was_stored_stalls() {
    let world = World::new();
    let action = world.action().on_history_lost(OnHistoryLost::RestartAt(Start::Present));
    let subscription = action.never_save_quiet_position().await.unwrap();
    let first = world.insert(1);
    world.model.break_reader(lost(&first));
    until(&subscription, "the gap is recorded", |status| status.gaps_recorded == 1).await;
    world.model.break_reader(lost(&first));
    until_reason(&subscription, "stalled", "history_lost").await;
    assert_eq!(subscription.status().gaps_recorded, 1);
    // It can be resumed, and with an event stored behind the new start it may begin again.
    subscription.resume().await.unwrap();
    let second = world.insert(2);
    until_saved(&subscription, &second).await;
    world.model.break_reader(lost(&second));
    until(&subscription, "the second gap is recorded", |status| status.gaps_recorded == 2).await;
}

#[tokio::test(start_paused = true)]
async fn what_save_when_held_back_is_void_behind_a_gap_and_the_gap_begins_at_what_could_be_stored() {
    let world = World::new();
    let action = world.action().save_when(|delivery| {
        delivery
            .event
            .document_key::<mongosub::bson::Document>()
            .is_ok_and(|key| key == Some(doc! { "_id": 1 }) || key == Some(doc! { "_id": 3 }))
    });
    let subscription = action.on_history_lost(OnHistoryLost::RestartAt(Start::Present)).await.unwrap();
    let first = world.insert(1);
    let second = world.insert(2);
    until_settled(&subscription, 2).await;
    world.model.break_reader(lost(&second));
    until(&subscription, "the gap is recorded", |status| status.gaps_recorded == 1).await;
    let record = world.record().await.unwrap();
    assert_eq!((&record.gaps[0].from, record.position.as_ref()), (&first, Some(&record.gaps[0].to)));
    let last = world.insert(3);
    until_saved(&subscription, &last).await;
}

#[tokio::test(start_paused = true)]
async fn a_run_that_looks_for_a_new_start_retries_what_heals_and_stalls_at_what_does_not() {
    let world = World::new();
    let subscription = world.action().on_history_lost(OnHistoryLost::RestartAt(Start::Present)).await.unwrap();
    let first = world.insert(1);
    until_saved(&subscription, &first).await;
    world.model.fail_global_checkpoint(SourceError::Unavailable { message: "down".into() });
    world.model.break_reader(lost(&first));
    until_reason(&subscription, "retrying", "source_unavailable").await;
    until(&subscription, "the gap is recorded", |status| status.gaps_recorded == 1).await;
    let second = world.insert(2);
    until_saved(&subscription, &second).await;
    world.model.refuse_global_checkpoint();
    world.model.break_reader(lost(&second));
    until_reason(&subscription, "stalled", "no_start_position").await;
}

#[tokio::test(start_paused = true)]
async fn a_takeover_while_the_new_start_is_stored_stops_the_run_and_nothing_is_read() {
    let restart = |world: &World| world.action().on_history_lost(OnHistoryLost::RestartAt(Start::Earliest));
    let (world, subscription, events) = overtaken(restart).await;
    world.storage.next_saves([Fault::Hang]);
    let resumed = subscription.clone();
    tokio::spawn(async move { resumed.resume().await });
    seconds(1).await;
    let next = world.restarted();
    let other = next.action().on_history_lost(OnHistoryLost::RestartAt(Start::Earliest)).await.unwrap();
    world.storage.release();
    until_reason(&subscription, "stopped", "superseded").await;
    assert_eq!(world.seen.keys(), [1]);
    until_saved(&other, &events[4]).await;
    let record = next.record().await.unwrap();
    assert_eq!((next.seen.keys(), record.gaps.len()), (vec![4, 5], 1));
    assert_eq!(record.position, Some(events[4].clone()));
}

#[test]
fn a_record_keeps_the_newest_notes_and_each_once() {
    let mut record = left_at(&Checkpoint::Text("x".into()));
    let at = |n: usize| Checkpoint::Text(n.to_string().into());
    for n in 0..20 {
        for _ in 0..2 {
            let gap = Gap::new(at(n), at(n + 1), source().scope);
            record.note(&Note::Gap(gap), DateTime::from_millis(1));
        }
    }
    let kept: Vec<_> = record.gaps.iter().map(|gap| gap.from.clone()).collect();
    assert_eq!(kept, (4..20).map(at).collect::<Vec<_>>());
}
