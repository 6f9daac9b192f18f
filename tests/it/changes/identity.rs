//! Whether another collection under the name is explained by the source's own history, at a start and at a resume.

use mongosub::bson::Timestamp;
use mongosub::{
    Checkpoint, Deployment, OnInvalidate, Reason, Scope, SourceError, Start, StartAt, SubscribeError, SubscriptionModel,
};

use crate::support::{ID, UUID, World, left_at, until_reason, until_saved, until_settled};

const SECOND: &str = "2222222222224222A222222222222222";

fn changed(reason: Option<&Reason>) -> (&str, &str) {
    match reason {
        Some(Reason::SourceChanged { was, is }) => (was, is),
        other => panic!("{other:?}"),
    }
}

/// A record at the first event, and two more behind it.
fn left() -> (World, Vec<Checkpoint>) {
    let world = World::new();
    let events = world.inserts(1..=3);
    world.storage.inner().put(left_at(&events[0]));
    (world, events)
}

/// The collection does not exist now.
async fn gone(world: &World) {
    let mut identity = world.model.identity().await.unwrap();
    identity.collection_uuid = None;
    world.model.set_identity(identity);
}

#[tokio::test(start_paused = true)]
async fn a_collection_made_anew_while_nothing_ran_is_explained_by_its_end_and_everything_is_delivered() {
    let (world, _) = left();
    world.model.invalidate();
    world.model.recreate(SECOND);
    let last = world.insert(4);
    let subscription = world.subscribe().await;
    until_saved(&subscription, &last).await;
    assert_eq!(world.seen.keys(), [2, 3, -1, 4]);
    let record = world.record().await.unwrap();
    assert_eq!(record.source.unwrap().collection_uuid.as_deref(), Some(SECOND));
    assert_eq!(record.epoch.map(|epoch| epoch.0), Some(6));
}

#[tokio::test(start_paused = true)]
async fn the_invalidate_policy_holds_for_an_explained_collection_too() {
    let (world, _) = left();
    let end = world.model.invalidate();
    world.model.recreate(SECOND);
    world.insert(4);
    let subscription = world.action().on_invalidate(OnInvalidate::Stop).await.unwrap();
    let status = until_reason(&subscription, "stopped", "invalidated").await;
    assert_eq!(status.state.reason(), Some(&Reason::Invalidated { position: end }));
    assert_eq!(world.seen.keys(), [2, 3, -1]);
}

#[tokio::test(start_paused = true)]
async fn until_its_end_is_read_the_record_names_the_collection_that_the_positions_are_of() {
    let (world, events) = left();
    world.model.invalidate();
    world.model.recreate(SECOND);
    let (subscription, hold) = world.subscribe_held().await;
    hold.let_go(1);
    until_saved(&subscription, &events[1]).await;
    assert_eq!(world.record().await.unwrap().source.unwrap().collection_uuid.as_deref(), Some(UUID));
}

#[tokio::test(start_paused = true)]
async fn another_collection_that_nothing_explains_is_refused_and_nothing_is_delivered() {
    for exists in [true, false] {
        let (world, _) = left();
        world.model.recreate(SECOND);
        if !exists {
            gone(&world).await;
        }
        let before = world.record().await;
        let error = world.action().await.unwrap_err();
        let (was, is) = changed(error.reason());
        assert!(was.contains(UUID), "{was}");
        assert!(is.contains(if exists { SECOND } else { "no collection" }), "{is}");
        assert_eq!((world.seen.all().len(), world.model.opens(), world.record().await), (0, 0, before));
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_collection_that_does_not_exist_is_explained_too() {
    let (world, _) = left();
    world.model.invalidate();
    gone(&world).await;
    let subscription = world.subscribe().await;
    until_settled(&subscription, 3).await;
    assert_eq!(world.seen.keys(), [2, 3, -1]);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_found_out_is_retried_and_lost_history_says_so() {
    let (world, _) = left();
    world.model.invalidate();
    world.model.recreate(SECOND);
    world.model.fail_ended_since(SourceError::Unavailable { message: "down".into() });
    let subscription = world.subscribe().await;
    subscription.shutdown().await.unwrap();

    let (world, events) = left();
    world.model.recreate(SECOND);
    world.model.drop_history_before(&events[2]);
    let error = world.action().await.unwrap_err();
    assert_eq!(error.reason().map(Reason::name), Some("history_lost"));
}

#[tokio::test(start_paused = true)]
async fn a_start_of_ones_own_is_judged_the_same_way() {
    let (world, events) = left();
    let start = || StartAt::Always(Start::After(events[1].clone()));
    world.model.recreate(SECOND);
    changed(world.action().start_at(start()).await.unwrap_err().reason());
    world.model.show_end_of(UUID);
    let subscription = world.action().start_at(start()).await.unwrap();
    until_settled(&subscription, 1).await;
    assert_eq!(world.seen.keys(), [3]);
}

/// Pauses a run behind its first event.
async fn paused() -> (World, mongosub::Subscription) {
    let world = World::new();
    let subscription = world.subscribe().await;
    let first = world.insert(1);
    until_saved(&subscription, &first).await;
    subscription.pause().await.unwrap();
    (world, subscription)
}

#[tokio::test(start_paused = true)]
async fn a_resume_verifies_the_source_as_a_start_does() {
    // Dropped and made anew.
    let (world, subscription) = paused().await;
    world.model.invalidate();
    world.model.recreate(SECOND);
    subscription.resume().await.unwrap();
    let last = world.insert(2);
    until_saved(&subscription, &last).await;
    assert_eq!(world.seen.keys(), [1, -1, 2]);

    // Another collection.
    let (world, subscription) = paused().await;
    world.model.recreate(SECOND);
    world.insert(2);
    assert!(subscription.resume().await.is_err());
    changed(subscription.status().state.reason());

    // Another replica set.
    let (world, subscription) = paused().await;
    let mut identity = world.model.identity().await.unwrap();
    identity.deployment = Some(Deployment { set_name: "other".into(), hosts: Vec::new() });
    world.model.set_identity(identity);
    world.insert(2);
    assert!(subscription.resume().await.is_err());
    assert_eq!(changed(subscription.status().state.reason()), ("replica set memory", "replica set other"));

    // An older copy: its present lies before the position.
    let (world, subscription) = paused().await;
    world.model.set_head(Timestamp { time: 1_600_000_000, increment: 1 });
    assert!(subscription.resume().await.is_err());
    changed(subscription.status().state.reason());
    assert_eq!(world.seen.keys(), [1]);
    // It has caught up with it.
    world.model.set_head(None);
    subscription.resume().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_history_without_the_event_at_the_position_is_another_source_at_a_start_a_resume_and_a_skip() {
    let (world, events) = left();
    world.model.undo(&events[0]);
    let before = world.record().await;
    let error = world.action().await.unwrap_err();
    let (was, is) = changed(error.reason());
    assert!(was.contains(&events[0].to_string()) && is.contains("older state"), "{was}; {is}");
    assert_eq!((world.seen.all().len(), world.model.opens(), world.record().await), (0, 0, before));

    let (world, subscription) = paused().await;
    let stored = world.stored().await.unwrap();
    world.model.undo(&stored);
    world.insert(2);
    assert!(subscription.resume().await.is_err());
    let status = subscription.status();
    assert!(changed(status.state.reason()).0.contains(&stored.to_string()));
    assert_eq!(world.seen.keys(), [1]);
    subscription.shutdown().await.unwrap();

    // Nothing is skipped to an event that is not there: the next start would be refused.
    let (world, events) = left();
    world.model.undo(&events[1]);
    let answer = world.subscriptions.skip(ID, events[1].clone(), "INC-7").await;
    assert!(
        matches!(&answer, Err(SubscribeError::Config { field: "through", message }) if message.contains("no event"))
    );
    let (world, subscription) = paused().await;
    let next = world.insert(2);
    world.model.undo(&next);
    let answer = subscription.skip(next, "INC-7").await.unwrap_err().to_string();
    assert!(answer.contains("no event of the source is at"), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn the_event_at_a_position_is_asked_for_only_where_the_record_says_it_was_read() {
    // In another scope it need not be shown.
    let (world, events) = left();
    world.model.undo(&events[0]);
    let mut record = left_at(&events[0]);
    record.source.as_mut().unwrap().scope = Scope::Database { db: "test".into() };
    world.storage.inner().put(record.clone());
    world.subscribe().await.shutdown().await.unwrap();

    // As another program left it.
    record.source = None;
    world.storage.inner().put(record);
    world.restarted().subscribe().await.shutdown().await.unwrap();

    // No event is at a quiet position.
    let (world, _) = left();
    let quiet = world.model.push_quiet();
    world.model.undo(&quiet);
    world.storage.inner().put(left_at(&quiet));
    world.subscribe().await.shutdown().await.unwrap();
}

/// A record at a quiet position behind event 1, or a run that is paused there.
async fn quiet_behind_an_event(world: &World) -> (mongosub::Subscription, Checkpoint) {
    let subscription = world.subscribe().await;
    let event = world.insert(1);
    until_saved(&subscription, &event).await;
    assert_eq!(world.record().await.unwrap().source.unwrap().last_event, None, "the position is its own");
    let quiet = world.model.push_quiet();
    until_saved(&subscription, &quiet).await;
    let record = world.record().await.unwrap();
    assert_eq!((record.kind, record.source.unwrap().last_event), (Some(mongosub::Kind::Quiet), Some(event.clone())));
    subscription.pause().await.unwrap();
    (subscription, event)
}

#[tokio::test(start_paused = true)]
async fn a_history_without_the_last_event_before_a_quiet_position_is_another_source() {
    let world = World::new();
    let (subscription, event) = quiet_behind_an_event(&world).await;
    subscription.resume().await.unwrap();
    subscription.pause().await.unwrap();
    world.model.undo(&event);
    world.insert(2);
    assert!(subscription.resume().await.is_err());
    assert!(changed(subscription.status().state.reason()).0.contains(&event.to_string()));
    subscription.shutdown().await.unwrap();
    let before = world.record().await;

    let next = world.restarted();
    let error = next.action().await.unwrap_err();
    let (was, is) = changed(error.reason());
    assert!(was.contains(&event.to_string()) && is.contains("older state"), "{was}; {is}");
    assert_eq!((next.seen.all().len(), next.record().await), (0, before));
}

#[tokio::test(start_paused = true)]
async fn the_last_event_is_kept_through_runs_that_see_none_and_is_not_missed_once_history_has_gone() {
    let world = World::new();
    let (subscription, event) = quiet_behind_an_event(&world).await;
    subscription.shutdown().await.unwrap();
    let next = world.restarted();
    let subscription = next.subscribe().await;
    let quiet = next.model.push_quiet();
    until_saved(&subscription, &quiet).await;
    assert_eq!(next.record().await.unwrap().source.unwrap().last_event, Some(event.clone()));
    subscription.shutdown().await.unwrap();

    // The position still is in the history, the event no longer.
    next.model.undo(&event);
    next.model.drop_history_before(&quiet);
    let last = next.restarted();
    let subscription = last.subscribe().await;
    let event = last.insert(2);
    until_saved(&subscription, &event).await;
    assert_eq!(last.record().await.unwrap().source.unwrap().last_event, None);
}

#[tokio::test(start_paused = true)]
async fn another_host_list_is_no_change() {
    let (world, subscription) = paused().await;
    let mut identity = world.model.identity().await.unwrap();
    identity.deployment.as_mut().unwrap().hosts = vec!["elsewhere:27017".into()];
    world.model.set_identity(identity);
    subscription.resume().await.unwrap();
    let last = world.insert(2);
    until_saved(&subscription, &last).await;
    subscription.shutdown().await.unwrap();
    world.restarted().subscribe().await;
}
