//! What a start checks: the settings, whether the stored position is this source's own, and what it warns about.

use std::time::Duration;

use mongosub::bson::{Timestamp, doc};
use mongosub::memory::{self, MemoryModel};
use mongosub::{
    Checkpoint, Deployment, DurableSubscriptions, Filter, Fingerprint, Identity, Kind, Namespace, OnFailure, Operation,
    Reason, Scope, Start, StartAt, Subscribe, SubscribeError, SubscriptionModel, Then,
};
use tokio::time::Instant;

use crate::support::{FaultyStorage, ID, Logs, UUID, World, left_at, seconds, until_saved, until_settled};

const OTHER: &str = "0DDBA110DDBA41108110DDBA110DDBA1";

type Action = Subscribe<MemoryModel, FaultyStorage>;
type Wrapper = DurableSubscriptions<MemoryModel, FaultyStorage>;

async fn identity(model: &MemoryModel) -> Identity {
    model.identity().await.unwrap()
}

/// A feed of one event at which a run of an hour ago ended.
fn stored() -> (World, Checkpoint) {
    let world = World::new();
    let at = world.model.push(memory::insert(1, doc! {}));
    world.storage.inner().put(left_at(&at));
    (world, at)
}

/// It is refused as changed, nothing was opened, the record is untouched and the id free.
async fn refused_as_changed(world: &World) -> (String, String) {
    let before = world.record().await;
    let error = world.subscriptions.subscribe(ID, world.seen.handler()).await.unwrap_err();
    let Some(Reason::SourceChanged { was, is }) = error.reason() else { panic!("{error:?}") };
    assert!(matches!(error, SubscribeError::Refused { .. }));
    assert_eq!((error.exit_code(), world.model.opens()), (3, 0));
    assert_eq!(world.record().await, before);
    assert!(world.subscriptions.running().is_empty());
    (was.clone(), is.clone())
}

#[tokio::test(start_paused = true)]
async fn a_position_of_another_replica_set_is_refused() {
    for scope in [Scope::Collection(Namespace::new("test", "events")), Scope::Deployment] {
        let (world, _) = stored();
        let mut is = identity(&world.model).await;
        is.deployment = Some(Deployment { set_name: "rs1".into(), hosts: vec!["memory:27017".into()] });
        is.scope = scope;
        world.model.set_identity(is);
        let (was, is) = refused_as_changed(&world).await;
        assert_eq!((was.as_str(), is.as_str()), ("replica set memory", "replica set rs1"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_position_of_a_collection_that_was_made_anew_is_refused() {
    let (world, at) = stored();
    // A quiet token carries no UUID: the record's own is what is compared.
    for position in [at, world.model.push_quiet()] {
        world.storage.inner().put(left_at(&position));
        let mut is = identity(&world.model).await;
        is.collection_uuid = Some(OTHER.into());
        world.model.set_identity(is);
        let (was, is) = refused_as_changed(&world).await;
        assert!(was.ends_with(UUID) && is.ends_with(OTHER), "{was} {is}");
    }
    // The same digits in other letters are the same.
    let mut is = identity(&world.model).await;
    is.collection_uuid = Some(UUID.to_lowercase());
    world.model.set_identity(is);
    world.subscribe().await;
}

#[tokio::test(start_paused = true)]
async fn a_position_of_another_collection_is_refused() {
    let (world, _) = stored();
    let mut is = identity(&world.model).await;
    is.scope = Scope::Collection(Namespace::new("test", "orders"));
    is.collection_uuid = None;
    world.model.set_identity(is);
    let (was, is) = refused_as_changed(&world).await;
    assert_eq!((was.as_str(), is.as_str()), ("collection test.events", "collection test.orders"));
}

#[tokio::test(start_paused = true)]
async fn a_start_behind_another_collections_token_is_refused_and_nothing_is_stored() {
    let world = World::new();
    let token = world.model.push(memory::insert(1, doc! {})).to_string().replace(UUID, OTHER);
    let after = Start::After(token.parse().unwrap());
    for start_at in [StartAt::StoredOr(after.clone()), StartAt::Always(after)] {
        let error = world.subscriptions.subscribe(ID, world.seen.handler()).start_at(start_at).await.unwrap_err();
        assert_eq!(error.reason().map(Reason::name), Some("source_changed"));
        assert_eq!((world.record().await, world.model.opens()), (None, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_rights_do_not_show_is_not_checked_and_not_forgotten() {
    let (world, _) = stored();
    world.model.set_identity(Identity::new(Scope::Collection(Namespace::new("test", "events"))));
    let logs = Logs::capture();
    let subscription = world.subscribe().await;
    let line = logs.lines("INFO", "starts at");
    assert!(line[0].contains("identity checks: position not ahead, event at the position;"), "{line:?}");
    let event = world.model.push(memory::insert(2, doc! {}));
    until_saved(&subscription, &event).await;
    // A later start with more rights can still tell another deployment.
    assert_eq!(world.record().await.unwrap().source, left_at(&event).source);
    subscription.shutdown().await.unwrap();
    world.model.set_identity(identity(&MemoryModel::new()).await);
    let subscription = world.subscribe().await;
    let line = logs.lines("INFO", "starts at");
    let checks = "identity checks: position not ahead, replica set name, collection UUID, event at the position;";
    assert!(line[1].contains(checks), "{line:?}");
    subscription.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_record_behind_an_invalidate_is_not_checked_for_the_uuid_and_gets_the_new_one() {
    let world = World::new();
    let end = world.model.invalidate();
    let mut record = left_at(&end);
    record.kind = Some(Kind::Invalidate);
    world.storage.inner().put(record);
    let mut is = identity(&world.model).await;
    is.collection_uuid = Some(OTHER.into());
    world.model.set_identity(is);
    let subscription = world.subscribe().await;
    let event = world.model.push(memory::insert(1, doc! {}));
    until_saved(&subscription, &event).await;
    assert_eq!(world.record().await.unwrap().source.unwrap().collection_uuid.as_deref(), Some(OTHER));
}

#[tokio::test(start_paused = true)]
async fn a_record_without_a_uuid_is_not_checked_for_it_and_the_next_save_records_it() {
    let world = World::new();
    let quiet = world.model.push_quiet();
    let mut record = left_at(&quiet);
    record.source.as_mut().unwrap().collection_uuid = None;
    let mut bare = record.clone();
    bare.source = None;
    for record in [record, bare] {
        world.storage.inner().put(record);
        let subscription = world.subscribe().await;
        let event = world.model.push(memory::insert(1, doc! {}));
        until_saved(&subscription, &event).await;
        assert_eq!(world.record().await.unwrap().source, left_at(&event).source);
        subscription.shutdown().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn the_uuid_of_a_collection_that_comes_to_be_later_is_recorded_when_it_is_first_seen() {
    let world = World::new();
    let mut is = identity(&world.model).await;
    is.collection_uuid = None;
    world.model.set_identity(is);
    let subscription = world.subscribe().await;
    assert_eq!(world.record().await.unwrap().source.unwrap().collection_uuid, None);
    let event = world.model.push(memory::insert(1, doc! {}));
    until_saved(&subscription, &event).await;
    assert_eq!(world.record().await.unwrap().source.unwrap().collection_uuid.as_deref(), Some(UUID));
    let quiet = world.model.push_quiet();
    until_saved(&subscription, &quiet).await;
    assert_eq!(world.record().await.unwrap().source.unwrap().collection_uuid.as_deref(), Some(UUID));
}

fn time(increment: u32) -> Timestamp {
    Timestamp { time: 1_700_000_000, increment }
}

#[tokio::test(start_paused = true)]
async fn a_position_ahead_of_the_deployment_is_asked_about_for_30_s_and_then_refused() {
    let world = World::new();
    for position in [Checkpoint::Time(time(9)), world.model.push_quiet_at(time(9))] {
        world.storage.inner().put(left_at(&position));
        world.model.set_head(time(7));
        let began = Instant::now();
        let (was, is) = refused_as_changed(&world).await;
        assert!(was.contains(&position.to_string()) && is.contains("1700000000.7"), "{was} {is}");
        assert_eq!(began.elapsed(), Duration::from_secs(30));
    }
}

#[tokio::test(start_paused = true)]
async fn a_position_one_increment_ahead_is_that_of_an_idle_deployment() {
    let world = World::new();
    world.storage.inner().put(left_at(&Checkpoint::Time(time(8))));
    world.model.set_head(time(7));
    let began = Instant::now();
    world.subscribe().await;
    assert_eq!(began.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_head_that_catches_up_within_30_s_starts() {
    let (world, _) = stored();
    let quiet = world.model.push_quiet_at(time(9));
    world.storage.inner().put(left_at(&quiet));
    world.model.set_head(time(3));
    let model = world.model.clone();
    tokio::spawn(async move {
        seconds(29).await;
        model.set_head(None);
    });
    let began = Instant::now();
    let subscription = world.subscribe().await;
    assert_eq!(began.elapsed().as_secs(), 29);
    world.model.push(memory::insert(2, doc! {}));
    until_settled(&subscription, 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_start_of_ones_own_in_the_future_is_a_bad_position_and_stores_nothing() {
    let world = World::new();
    let start = Start::Time(Timestamp { time: 1_800_000_000, increment: 1 });
    let error = world.subscriptions.subscribe(ID, world.seen.handler()).start_at(StartAt::StoredOr(start)).await;
    assert_eq!(error.unwrap_err().reason().map(Reason::name), Some("bad_position"));
    assert_eq!(world.record().await, None);
}

#[tokio::test(start_paused = true)]
async fn an_id_that_cannot_be_used_is_refused_by_name() {
    let world = World::new();
    for bad in [String::new(), "x".repeat(256), "a#b".into(), "a\u{7}b".into(), "a\nb".into()] {
        let error = world.subscriptions.subscribe(bad.clone(), world.seen.handler()).await.unwrap_err();
        assert!(matches!(error, SubscribeError::Config { field: "id", .. }), "{bad:?}: {error:?}");
        assert_eq!(error.exit_code(), 2);
    }
    assert_eq!((world.storage.reads_sent(), world.model.opens()), (0, 0));
    let longest = "x".repeat(255);
    world.subscriptions.subscribe(longest, world.seen.handler()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_setting_that_cannot_be_used_is_refused_by_name_as_a_default_and_as_an_override() {
    type Set<T> = fn(T) -> T;
    let cases: [(&str, Set<Wrapper>, Set<Action>); 7] = [
        ("save_every", |w| w.save_every(0), |a| a.save_every(0)),
        (
            "save_quiet_position_every",
            |w| w.save_quiet_position_every(Duration::ZERO),
            |a| a.save_quiet_position_every(Duration::ZERO),
        ),
        ("handler_timeout", |w| w.handler_timeout(Duration::ZERO), |a| a.handler_timeout(Duration::ZERO)),
        ("start_timeout", |w| w.start_timeout(Duration::ZERO), |a| a.start_timeout(Duration::ZERO)),
        (
            "on_failure",
            |w| w.on_failure(OnFailure::default().backoff(Duration::ZERO, Duration::from_secs(1))),
            |a| a.on_failure(OnFailure::default().backoff(Duration::ZERO, Duration::from_secs(1))),
        ),
        (
            "on_failure",
            |w| w.on_failure(OnFailure::default().backoff(Duration::from_secs(2), Duration::from_secs(1))),
            |a| a.on_failure(OnFailure::default().backoff(Duration::from_secs(2), Duration::from_secs(1))),
        ),
        (
            "on_failure",
            |w| w.on_failure(OnFailure::retry(3).then(Then::DeadLetter)),
            |a| a.on_failure(OnFailure::retry(3).then(Then::DeadLetter)),
        ),
    ];
    for (name, as_default, as_override) in cases {
        let world = World::new();
        let action = as_override(world.subscriptions.subscribe(ID, world.seen.handler()));
        let error = action.await.unwrap_err();
        let SubscribeError::Config { field, .. } = &error else { panic!("{error:?}") };
        assert_eq!((*field, error.exit_code()), (name, 2));
        let wrapper = as_default(world.subscriptions.clone());
        let error = wrapper.subscribe(ID, world.seen.handler()).await.unwrap_err();
        let SubscribeError::Config { field, .. } = &error else { panic!("{error:?}") };
        assert_eq!(*field, name);
        assert_eq!((world.storage.reads_sent(), world.model.opens()), (0, 0));
        assert_eq!(world.record().await, None);
        assert!(world.subscriptions.running().is_empty());
        world.subscribe().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_setting_without_bounds_is_for_ever_and_not_a_crash() {
    let world = World::new();
    let action = world.subscriptions.subscribe(ID, world.seen.handler());
    let action = action.start_timeout(Duration::MAX).save_quiet_position_every(Duration::MAX);
    let action = action.shutdown_grace(Duration::MAX).handler_timeout(Duration::MAX);
    let subscription =
        action.on_failure(OnFailure::default().backoff(Duration::from_secs(1), Duration::MAX)).await.unwrap();
    let event = world.model.push(memory::insert(1, doc! {}));
    until_saved(&subscription, &event).await;
    world.model.push_quiet();
    seconds(120).await;
    assert_eq!(world.stored().await, Some(event));
    subscription.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_override_goes_before_a_default_and_the_start_line_lists_both_with_what_was_defaulted() {
    let logs = Logs::capture();
    let world = World::new();
    let wrapper = world.subscriptions.clone().save_every(0).start_timeout(Duration::from_secs(5));
    wrapper.subscribe(ID, world.seen.handler()).save_every(3).await.unwrap();
    let lines = logs.lines("INFO", "starts at");
    assert_eq!(lines.len(), 1);
    for part in ["save=every 3 events,", "start_timeout=5s,", "save_mode=WriteBehind (default)", "1700000000.2"] {
        assert!(lines[0].contains(part), "{part}: {}", lines[0]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_quiet_interval_above_a_day_is_warned_about() {
    let day = Duration::from_secs(24 * 60 * 60);
    for (interval, warned) in [(day, 0), (day + Duration::from_secs(1), 1)] {
        let logs = Logs::capture();
        let world = World::new();
        let action = world.subscriptions.subscribe(ID, world.seen.handler());
        action.save_quiet_position_every(interval).await.unwrap();
        assert_eq!(logs.lines("WARN", "save_quiet_position_every").len(), warned);
    }
}

#[tokio::test(start_paused = true)]
async fn another_pipeline_than_the_one_that_produced_the_position_is_one_warning() {
    let (world, at) = stored();
    let mut record = left_at(&at);
    record.pipeline = Some(Fingerprint("other".into()));
    world.storage.inner().put(record.clone());
    let logs = Logs::capture();
    let subscription = world.subscribe().await;
    assert_eq!(logs.lines("WARN", "has changed").len(), 1);
    // Nothing has come of the new pipeline yet: the position is still the old one's.
    subscription.shutdown().await.unwrap();
    assert_eq!(world.record().await.unwrap().pipeline, record.pipeline);
    let subscription = world.subscribe().await;
    assert_eq!(logs.lines("WARN", "has changed").len(), 2);
    let event = world.model.push(memory::insert(2, doc! {}));
    until_saved(&subscription, &event).await;
    subscription.shutdown().await.unwrap();
    assert_eq!(world.record().await, {
        let mut expected = left_at(&event);
        let is = world.record().await.unwrap();
        (expected.ownership, expected.claimed_at, expected.saved_at) = (is.ownership, is.claimed_at, is.saved_at);
        Some(expected)
    });
    world.subscribe().await;
    assert_eq!(logs.lines("WARN", "has changed").len(), 2, "the same pipeline is no warning");
    // A start of one's own leaves the stored position aside, and its pipeline with it.
    let (world, _) = stored();
    world.storage.inner().put(record);
    let action = world.subscriptions.subscribe(ID, world.seen.handler());
    action.start_at(StartAt::Always(Start::Earliest)).await.unwrap();
    assert_eq!(logs.lines("WARN", "has changed").len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_resume_that_ends_before_any_read_leaves_the_stored_position_what_it_was() {
    for kind in [Kind::Event, Kind::Quiet, Kind::Start] {
        let (world, at) = stored();
        let mut record = left_at(&at);
        record.kind = Some(kind);
        record.clean = false;
        world.storage.inner().put(record.clone());
        let subscription = world.subscribe().await;
        assert_eq!(subscription.shutdown().await.unwrap(), Some(at.clone()));
        let is = world.record().await.unwrap();
        record.clean = true;
        record.ownership.clone_from(&is.ownership);
        (record.claimed_at, record.saved_at) = (is.claimed_at, is.saved_at);
        // The run before it had ended without a word.
        record.unclean_ends = 1;
        assert_eq!(is, record);
    }
}

#[tokio::test(start_paused = true)]
async fn a_filter_that_changed_is_one_warning_and_the_record_names_the_one_that_produced_the_position() {
    let inserts = || Filter::operations([Operation::Insert]);
    let logs = Logs::capture();
    let world = World::new();
    let subscription = world.subscribe().await;
    subscription.shutdown().await.unwrap();
    let before = world.record().await.unwrap().pipeline;
    let subscription = world.subscriptions.subscribe(ID, world.seen.handler()).filter(inserts()).await.unwrap();
    assert_eq!(logs.lines("WARN", "has changed").len(), 1);
    world.model.push(memory::delete(1));
    let event = world.model.push(memory::insert(2, doc! {}));
    until_saved(&subscription, &event).await;
    assert_eq!(world.seen.keys(), [2]);
    assert_ne!(world.record().await.unwrap().pipeline, before);
    subscription.shutdown().await.unwrap();
    world.subscriptions.subscribe(ID, world.seen.handler()).filter(inserts()).await.unwrap();
    assert_eq!(logs.lines("WARN", "has changed").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_start_whose_time_is_over_while_it_asks_for_the_head_says_that_it_waits_for_it() {
    let world = World::new();
    world.storage.inner().put(left_at(&Checkpoint::Time(time(9))));
    world.model.set_head(time(7));
    let action = world.subscriptions.subscribe(ID, world.seen.handler()).start_timeout(Duration::from_secs(5));
    let SubscribeError::TimedOut { last, .. } = action.await.unwrap_err() else { panic!("it is not refused yet") };
    let said = "its present, 1700000000.7, has not reached 1700000000.9";
    assert_eq!(last, Reason::SourceUnavailable { message: said.into() });
}
