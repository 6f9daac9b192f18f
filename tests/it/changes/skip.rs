//! Events stepped over by hand, in a run and where nothing runs.

use mongosub::bson::Timestamp;
use mongosub::{
    Checkpoint, Epoch, Failure, Kind, Reason, SourceError, State, SubscribeError, SubscriptionError, memory,
};

use crate::support::{
    Fault, ID, Logs, World, is_running, left_at, millis, until, until_reason, until_saved, until_settled,
};

const WHY: &str = "INC-7";

/// A handler that fails for these keys.
fn failing(
    world: &World,
    keys: &'static [i32],
) -> mongosub::Subscribe<memory::MemoryModel, crate::support::FaultyStorage> {
    let handler = world.seen.then(move |delivery| {
        let key = delivery.event.document_key::<mongosub::bson::Document>().unwrap();
        let fails = key.is_some_and(|key| keys.contains(&key.get_i32("_id").unwrap()));
        async move { if fails { Err(Failure::from("no")) } else { Ok(()) } }
    });
    world.subscriptions.subscribe(ID, handler)
}

fn refused(answer: Result<(), SubscriptionError>) -> String {
    match answer {
        Err(SubscriptionError::Refused { message, .. }) => message,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_failing_event_is_stepped_over_and_nothing_else_is() {
    let world = World::new();
    let logs = Logs::capture();
    let subscription = failing(&world, &[2]).await.unwrap();
    let events = world.inserts(1..=3);
    until_reason(&subscription, "retrying", "handler_failing").await;
    subscription.skip(events[1].clone(), WHY).await.unwrap();
    let record = world.record().await.unwrap();
    let [skipped] = &record.skips[..] else { panic!("{:?}", record.skips) };
    assert_eq!((skipped.from.as_ref(), &skipped.through, &*skipped.reason), (Some(&events[0]), &events[1], WHY));
    assert_eq!(Some(&skipped.by), record.ownership.as_ref().map(|ownership| &ownership.owner));
    assert!(skipped.at.is_some());
    until_saved(&subscription, &events[2]).await;
    let status = subscription.status();
    assert_eq!((status.events, status.delivered, status.settled, status.skipped), (3, 3, 3, 1));
    assert_eq!(world.seen.all().iter().filter(|seen| seen.key != 2).map(|seen| seen.key).collect::<Vec<_>>(), [1, 3]);
    let said = logs.lines("WARN", "skips everything up to");
    assert!(said.len() == 1 && said[0].contains(WHY), "{said:?}");
    let record = world.record().await.unwrap();
    assert_eq!((record.skips.len(), record.kind), (1, Some(Kind::Event)));
}

#[tokio::test(start_paused = true)]
async fn a_run_that_is_stalled_on_an_event_too_large_to_be_sent_goes_on_behind_it() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let first = world.insert(1);
    until_saved(&subscription, &first).await;
    subscription.pause().await.unwrap();
    let large = world.insert(2);
    world.model.fail_next_open(SourceError::Refused(Reason::EventTooLarge { position: large.clone() }));
    assert!(subscription.resume().await.is_err());
    until_reason(&subscription, "stalled", "event_too_large").await;
    subscription.skip(large.clone(), WHY).await.unwrap();
    let last = world.insert(3);
    until_saved(&subscription, &last).await;
    assert_eq!((world.seen.keys(), subscription.status().skipped), (vec![1, 3], 1));
}

#[tokio::test(start_paused = true)]
async fn a_paused_run_stays_paused_and_resumes_behind_what_was_skipped() {
    let world = World::new();
    let subscription = world.subscribe().await;
    subscription.pause().await.unwrap();
    let events = world.inserts(1..=4);
    // A time stands for everything before it.
    let through = Checkpoint::Time(events[2].cluster_time().unwrap());
    subscription.skip(through.clone(), WHY).await.unwrap();
    assert_eq!(subscription.status().state, State::Paused);
    assert_eq!(
        world.record().await.map(|record| (record.position, record.kind)),
        Some((Some(through), Some(Kind::Quiet)))
    );
    subscription.resume().await.unwrap();
    until_settled(&subscription, 2).await;
    assert_eq!(world.seen.keys(), [3, 4]);
}

#[tokio::test(start_paused = true)]
async fn what_is_held_back_by_save_when_can_be_stepped_over_and_what_lies_behind_comes_again() {
    let world = World::new();
    let subscription = world.action().save_when(|_| false).await.unwrap();
    let events = world.inserts(1..=3);
    until_settled(&subscription, 3).await;
    subscription.skip(events[1].clone(), WHY).await.unwrap();
    assert_eq!(world.stored().await.as_ref(), Some(&events[1]));
    until(&subscription, "the third comes again", |_| world.seen.all().len() == 4).await;
    let again = world.seen.all().pop().unwrap();
    assert_eq!((again.key, again.may_be_repeat), (3, true));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_skipped_without_a_reason_backwards_ahead_of_the_source_or_in_another_order() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let events = world.inserts(1..=2);
    until_saved(&subscription, &events[1]).await;
    let before = world.record().await;
    let next = Checkpoint::Time(Timestamp { time: 1_700_000_000, increment: 4 });
    let ahead = Checkpoint::Time(Timestamp { time: 1_700_000_000, increment: 5 });
    for (through, why, wanted) in [
        (next.clone(), "", "reason: must say why"),
        (next.clone(), "  \n", "reason: must say why"),
        (next, &*"x".repeat(1001), "reason: is longer"),
        (events[0].clone(), WHY, "does not lie beyond"),
        (events[1].clone(), WHY, "does not lie beyond"),
        (Checkpoint::Text("line 17".into()), WHY, "cannot be compared"),
        (ahead, WHY, "lies ahead"),
    ] {
        let message = refused(subscription.skip(through, why).await);
        assert!(message.contains(wanted), "{message}");
    }
    assert_eq!(world.record().await, before);
    assert!(is_running(&subscription.status().state));
    assert_eq!(world.model.opens(), 1, "it was not interrupted");
}

#[tokio::test(start_paused = true)]
async fn an_event_that_is_settled_after_all_is_not_skipped_and_the_run_goes_on() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let first = world.insert(1);
    until(&subscription, "it is in hand", |status| status.in_hand_since.is_some()).await;
    let skipping = {
        let (subscription, first) = (subscription.clone(), first.clone());
        tokio::spawn(async move { subscription.skip(first, WHY).await })
    };
    millis(100).await;
    hold.let_go(2);
    assert!(refused(skipping.await.unwrap()).contains("does not lie beyond"));
    let second = world.insert(2);
    until_saved(&subscription, &second).await;
    assert_eq!((world.seen.keys(), subscription.status().skipped), (vec![1, 2], 0));
    assert!(world.record().await.unwrap().skips.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_call_that_hangs_is_given_up_when_its_grace_is_over() {
    let world = World::new();
    let hold = crate::support::Hold::default();
    let subscription = world.held(&hold).shutdown_grace(std::time::Duration::from_secs(2)).await.unwrap();
    let first = world.insert(1);
    until(&subscription, "it is in hand", |status| status.in_hand_since.is_some()).await;
    subscription.skip(first.clone(), WHY).await.unwrap();
    hold.let_go(10);
    let second = world.insert(2);
    until_saved(&subscription, &second).await;
    let status = subscription.status();
    assert_eq!((world.seen.keys(), status.skipped, status.settled), (vec![1, 2], 1, 2));
}

#[tokio::test(start_paused = true)]
async fn a_skip_that_cannot_be_stored_in_time_says_so_and_goes_on_trying_while_paused() {
    let world = World::new();
    let subscription = failing(&world, &[1]).await.unwrap();
    let events = world.inserts(1..=2);
    until_reason(&subscription, "retrying", "handler_failing").await;
    world.storage.every_save(Fault::Fail);
    let answer = subscription.skip(events[0].clone(), WHY).await;
    assert!(matches!(answer, Err(SubscriptionError::NotSaved { .. })), "{answer:?}");
    assert_eq!(subscription.status().state, State::Paused);
    world.storage.heal();
    until_saved(&subscription, &events[0]).await;
    assert_eq!(world.record().await.unwrap().skips.len(), 1);
    subscription.resume().await.unwrap();
    until_saved(&subscription, &events[1]).await;
}

#[tokio::test(start_paused = true)]
async fn a_superseded_run_skips_nothing_and_stops() {
    let world = World::new();
    let subscription = failing(&world, &[1]).await.unwrap();
    let event = world.insert(1);
    until_reason(&subscription, "retrying", "handler_failing").await;
    let next = world.restarted();
    let (_other, _hold) = next.subscribe_held().await;
    let answer = subscription.skip(event, WHY).await;
    assert!(matches!(answer, Err(SubscriptionError::Ended { reason: Reason::Superseded { .. }, .. })), "{answer:?}");
    assert!(next.record().await.unwrap().skips.is_empty());
}

#[tokio::test(start_paused = true)]
async fn where_nothing_runs_the_record_is_moved_with_the_audit_and_the_next_start_reads_behind_it() {
    for clean in [true, false] {
        let world = World::new();
        let events = world.inserts(1..=4);
        let mut record = left_at(&events[0]);
        record.clean = clean;
        world.storage.inner().put(record);
        world.subscriptions.skip(ID, events[2].clone(), WHY).await.unwrap();
        let record = world.record().await.unwrap();
        let skipped = &record.skips[0];
        assert_eq!((skipped.from.as_ref(), &skipped.through, &*skipped.reason), (Some(&events[0]), &events[2], WHY));
        assert_eq!((record.position.as_ref(), record.epoch, record.clean), (Some(&events[2]), Some(Epoch(5)), clean));
        let subscription = world.subscribe().await;
        until_settled(&subscription, 1).await;
        assert_eq!(
            world.seen.all().iter().map(|seen| (seen.key, seen.may_be_repeat)).collect::<Vec<_>>(),
            [(4, !clean)]
        );
        assert_eq!(subscription.status().skipped, 0, "this run has skipped nothing");
    }
}

#[tokio::test(start_paused = true)]
async fn where_nothing_runs_what_cannot_be_skipped_is_refused_by_its_field() {
    let world = World::new();
    let events = world.inserts(1..=3);
    let field = |answer: Result<(), SubscribeError>| match answer {
        Err(SubscribeError::Config { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    let subscriptions = &world.subscriptions;
    assert_eq!(field(subscriptions.skip("a#b", events[1].clone(), WHY).await), "id");
    assert_eq!(field(subscriptions.skip(ID, events[1].clone(), WHY).await), "id");
    let before = left_at(&events[1]);
    world.storage.inner().put(before.clone());
    assert_eq!(field(subscriptions.skip(ID, events[2].clone(), "").await), "reason");
    assert_eq!(field(subscriptions.skip(ID, events[1].clone(), WHY).await), "through");
    let ahead = Checkpoint::Time(Timestamp { time: 1_800_000_000, increment: 1 });
    assert_eq!(field(subscriptions.skip(ID, ahead, WHY).await), "through");
    assert_eq!(world.record().await, Some(before));
    let subscription = world.subscribe().await;
    let running = subscriptions.skip(ID, events[2].clone(), WHY).await;
    assert!(matches!(running, Err(SubscribeError::AlreadyRunning { .. })), "{running:?}");
    subscription.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_skip_over_the_end_of_a_collection_forgets_its_uuid() {
    let world = World::new();
    let first = world.insert(1);
    world.storage.inner().put(left_at(&first));
    world.model.invalidate();
    world.model.recreate("2222222222224222A222222222222222");
    let quiet = world.model.push_quiet();
    let last = world.insert(2);
    world.subscriptions.skip(ID, quiet, WHY).await.unwrap();
    let source = world.record().await.unwrap().source.unwrap();
    assert_eq!((source.collection_uuid, source.last_event), (None, Some(first)));
    let subscription = world.subscribe().await;
    until_saved(&subscription, &last).await;
    assert_eq!(world.seen.keys(), [2]);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_skips_over_the_end_of_a_collection_forgets_its_uuid_too() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let first = world.insert(1);
    until_saved(&subscription, &first).await;
    subscription.pause().await.unwrap();
    world.model.invalidate();
    world.model.recreate("2222222222224222A222222222222222");
    let quiet = world.model.push_quiet();
    subscription.skip(quiet, WHY).await.unwrap();
    let source = world.record().await.unwrap().source.unwrap();
    assert_eq!((source.collection_uuid, source.last_event), (None, Some(first)));
    subscription.resume().await.unwrap();
    let last = world.insert(2);
    until_saved(&subscription, &last).await;
    assert_eq!(world.seen.keys(), [1, 2]);
}
