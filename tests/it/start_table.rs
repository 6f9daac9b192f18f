//! Where a subscription starts, row by row of the start table: what is asked, what is opened, what is stored.

use mongosub::bson::{Timestamp, doc};
use mongosub::memory;
use mongosub::{Checkpoint, Kind, Reason, Record, Start, StartAt, SubscribeError, Subscription};
use proptest::prelude::*;

use crate::support::{ID, Logs, Stepped, World, fingerprint, id, left_at, seconds, source, until_saved, until_settled};

/// A feed of three events, 1 to 3, and their positions.
fn three() -> (World, Vec<Checkpoint>) {
    let world = World::new();
    let positions = (1..=3).map(|key| world.model.push(memory::insert(key, doc! {}))).collect();
    (world, positions)
}

fn time_of(position: &Checkpoint) -> Timestamp {
    position.cluster_time().unwrap()
}

/// The present of a feed that was pushed to `last`: one increment further.
fn present_after(last: &Checkpoint) -> Checkpoint {
    let last = time_of(last);
    Checkpoint::Time(Timestamp { time: last.time, increment: last.increment + 1 })
}

/// Every start of one's own in a feed of three, the position it opens at, and the first event it delivers.
fn starts(at: &[Checkpoint]) -> Vec<(Start, Checkpoint, i32)> {
    let beginning = Checkpoint::Time(Timestamp { time: time_of(&at[0]).time, increment: 1 });
    vec![
        (Start::Present, present_after(&at[2]), 4),
        (Start::Earliest, beginning, 1),
        (Start::Time(time_of(&at[1])), Checkpoint::Time(time_of(&at[1])), 2),
        (Start::After(at[1].clone()), at[1].clone(), 3),
    ]
}

async fn subscribe(world: &World, process: &Stepped, start_at: StartAt) -> Result<Subscription, SubscribeError> {
    process.subscriptions.subscribe(ID, world.seen.handler()).start_at(start_at).await
}

/// Pushes event 4 and waits until it has come through: everything from `first` on was delivered, in order.
async fn delivers_from(world: &World, subscription: &Subscription, first: i32) -> Checkpoint {
    let last = world.model.push(memory::insert(4, doc! {}));
    until_saved(subscription, &last).await;
    assert_eq!(world.seen.keys(), (first..=4).collect::<Vec<_>>());
    last
}

#[tokio::test(start_paused = true)]
async fn a_stored_checkpoint_is_resumed_whatever_the_start_and_nothing_is_asked_for_a_position() {
    for (start, _, _) in starts(&three().1) {
        let (world, at) = three();
        world.storage.inner().put(left_at(&at[0]));
        let process = world.stepped();
        let subscription = subscribe(&world, &process, StartAt::StoredOr(start)).await.unwrap();
        assert_eq!(world.model.opened_from(), [Some(at[0].clone())]);
        assert_eq!((process.steps.count("global_checkpoint"), process.steps.count("earliest")), (0, 0));
        let record = world.record().await.unwrap();
        let mut untouched = left_at(&at[0]);
        (untouched.ownership, untouched.claimed_at, untouched.clean) =
            (record.ownership.clone(), record.claimed_at, false);
        assert_eq!(record, untouched, "a resume only claims");
        assert_eq!(subscription.status().saved, Some(at[0].clone()));
        delivers_from(&world, &subscription, 2).await;
        assert_eq!(world.record().await.unwrap().epoch, left_at(&at[0]).epoch, "a resume keeps the epoch");
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_stored_the_start_is_stored_with_all_that_belongs_to_it_and_read_from() {
    for (start, position, first) in starts(&three().1) {
        let (world, _) = three();
        let process = world.stepped();
        let asked = usize::from(start == Start::Present);
        let subscription = subscribe(&world, &process, StartAt::StoredOr(start)).await.unwrap();
        assert_eq!(process.steps.count("global_checkpoint"), asked);
        assert_eq!(world.model.opened_from(), [Some(position.clone())]);
        let record = world.record().await.unwrap();
        let ownership = record.ownership.clone().unwrap();
        let mut expected = Record::empty(id());
        expected.position = Some(position.clone());
        expected.kind = Some(Kind::Start);
        expected.epoch = record.epoch;
        expected.cluster_time = position.cluster_time();
        expected.ownership = Some(ownership.clone());
        expected.claimed_at = record.claimed_at;
        expected.saved_at = record.claimed_at;
        expected.pipeline = Some(fingerprint());
        expected.source = Some(source());
        assert_eq!(record, expected);
        assert!(record.epoch.is_some() && record.claimed_at.is_some());
        assert_eq!(subscription.status().fence, ownership.fence);
        assert_eq!(subscription.status().saved, Some(position));
        delivers_from(&world, &subscription, first).await;
        assert_eq!(world.record().await.unwrap().epoch, record.epoch);
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_with_a_fence_and_no_position_is_nothing_stored() {
    let (world, at) = three();
    let mut record = left_at(&at[0]);
    (record.position, record.cluster_time, record.kind, record.epoch) = (None, None, None, None);
    (record.saved_at, record.pipeline, record.source) = (None, None, None);
    world.storage.inner().put(record);
    let process = world.stepped();
    let subscription = subscribe(&world, &process, StartAt::default()).await.unwrap();
    assert_eq!(process.steps.count("global_checkpoint"), 1);
    assert_eq!(world.stored().await, Some(present_after(&at[2])));
    delivers_from(&world, &subscription, 4).await;
}

#[tokio::test(start_paused = true)]
async fn no_global_checkpoint_is_no_start_position_and_nothing_is_registered_or_written() {
    for stored in [false, true] {
        let (world, at) = three();
        if stored {
            let mut record = left_at(&at[0]);
            (record.position, record.kind, record.epoch, record.cluster_time) = (None, None, None, None);
            world.storage.inner().put(record);
        }
        world.model.refuse_global_checkpoint();
        let before = world.record().await;
        let process = world.stepped();
        let error = subscribe(&world, &process, StartAt::default()).await.unwrap_err();
        assert!(matches!(error, SubscribeError::Refused { reason: Reason::NoStartPosition, .. }), "{error:?}");
        assert_eq!(error.exit_code(), 3);
        assert_eq!(world.record().await, before);
        assert_eq!((world.model.opens(), process.steps.count("claim")), (0, 0));
        assert!(process.subscriptions.get(ID).is_none());
        assert!(process.subscriptions.running().is_empty());
        // The id is free: a start that needs no global checkpoint takes it.
        subscribe(&world, &process, StartAt::StoredOr(Start::Earliest)).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn the_override_stores_the_opening_time_and_opens_there_again_before_the_first_delivery() {
    let (world, at) = three();
    world.model.refuse_global_checkpoint();
    let process = world.stepped();
    // What changes between the two opens lies behind the time of the first.
    let model = world.model.clone();
    process.steps.after("open", 1, move || drop(model.push(memory::insert(4, doc! {}))));
    let action = process.subscriptions.subscribe(ID, world.seen.handler());
    let subscription = action.start_when_no_start_position_can_be_recorded(true).await.unwrap();
    let time = present_after(&at[2]);
    assert_eq!(world.model.opened_from(), [None, Some(time.clone())]);
    assert_eq!(process.steps.calls().iter().filter(|call| **call == "open" || **call == "claim").count(), 3);
    assert_eq!(world.seen.keys(), [0; 0], "stored before the first delivery");
    let record = world.record().await.unwrap();
    assert_eq!((record.position.as_ref(), record.kind), (Some(&time), Some(Kind::Start)));
    assert_eq!((record.pipeline, record.source), (Some(fingerprint()), Some(source())));
    assert_eq!(subscription.status().saved, Some(time));
    until_settled(&subscription, 1).await;
    assert_eq!(world.seen.keys(), [4]);
    // A pause before the first event of a later run cannot slide: the position is pinned.
    assert_eq!(world.model.active_readers(), 1, "the first cursor is closed");
}

#[tokio::test(start_paused = true)]
async fn the_override_pins_the_start_so_that_a_pause_before_the_first_event_loses_nothing() {
    for told in [true, false] {
        let (world, _) = three();
        if !told {
            world.model.refuse_global_checkpoint();
        }
        let action = world.subscriptions.subscribe(ID, world.seen.handler());
        let subscription = action.start_when_no_start_position_can_be_recorded(true).await.unwrap();
        subscription.pause().await.unwrap();
        world.model.push(memory::insert(4, doc! {}));
        subscription.resume().await.unwrap();
        until_settled(&subscription, 1).await;
        assert_eq!(world.seen.keys(), [4]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_source_that_sends_no_time_starts_with_nothing_stored_until_the_first_settled_event_is() {
    let logs = Logs::capture();
    let (world, _) = three();
    world.model.refuse_global_checkpoint();
    world.model.send_no_time();
    let action = world.subscriptions.subscribe(ID, world.seen.handler());
    let subscription = action.start_when_no_start_position_can_be_recorded(true).await.unwrap();
    assert_eq!(world.model.opened_from(), [None]);
    assert_eq!(logs.lines("WARN", "starts with nothing stored").len(), 1);
    let record = world.record().await.unwrap();
    assert_eq!((record.position, record.epoch), (None, None));
    assert!(record.ownership.is_some());
    for _ in 0..5 {
        world.model.push_quiet();
        seconds(61).await;
    }
    assert_eq!(subscription.drained().await.unwrap(), None);
    assert!(world.storage.sent().is_empty(), "no quiet saves before an event's");
    let event = delivers_from(&world, &subscription, 4).await;
    assert_eq!(world.stored().await, Some(event));
    let quiet = world.model.push_quiet();
    until_saved(&subscription, &quiet).await;
    assert_eq!(world.record().await.unwrap().kind, Some(Kind::Quiet));
}

#[tokio::test(start_paused = true)]
async fn the_override_changes_nothing_where_a_position_is_known() {
    let (world, at) = three();
    let action = world.subscriptions.subscribe(ID, world.seen.handler());
    let subscription = action.start_when_no_start_position_can_be_recorded(true).await.unwrap();
    assert_eq!(world.model.opened_from(), [Some(present_after(&at[2]))]);
    subscription.shutdown().await.unwrap();
    world.model.refuse_global_checkpoint();
    let next = world.restarted();
    next.subscribe().await;
    assert_eq!(world.model.opened_from().len(), 2, "a resume needs no global checkpoint");
}

#[tokio::test(start_paused = true)]
async fn a_start_of_ones_own_begins_there_whatever_is_stored_and_records_no_position() {
    for index in 0..4 {
        for stored in [false, true] {
            let (world, at) = three();
            let (start, position, first) = starts(&at).swap_remove(index);
            if stored {
                // Of another deployment and collection even: it is not looked at.
                let mut record = left_at(&present_after(&at[2]));
                record.source.as_mut().unwrap().set_name = Some("other".into());
                world.storage.inner().put(record);
            }
            let before = world.record().await;
            let process = world.stepped();
            let asked = usize::from(start == Start::Present);
            let subscription = subscribe(&world, &process, StartAt::Always(start)).await.unwrap();
            assert_eq!(process.steps.count("global_checkpoint"), asked);
            assert_eq!(world.model.opened_from(), [Some(position)]);
            let record = world.record().await.unwrap();
            assert_eq!(record.position, before.as_ref().and_then(|before| before.position.clone()));
            assert_eq!(record.epoch, before.as_ref().and_then(|before| before.epoch));
            assert_eq!(record.ownership.as_ref().map(|it| it.fence), Some(subscription.status().fence));
            // What is stored was not this run's doing.
            assert_eq!((subscription.status().saved, subscription.status().saved_at), (None, None));
            delivers_from(&world, &subscription, first).await;
            let now = world.record().await.unwrap();
            assert!(now.epoch > record.epoch, "an event of a new epoch is stored, wherever it lies");
            assert_eq!(now.source, Some(source()));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_start_of_ones_own_at_the_present_needs_no_global_checkpoint_and_no_override() {
    for sends_time in [true, false] {
        let (world, at) = three();
        world.model.refuse_global_checkpoint();
        if !sends_time {
            world.model.send_no_time();
        }
        let process = world.stepped();
        let subscription = subscribe(&world, &process, StartAt::Always(Start::Present)).await.unwrap();
        let opened = if sends_time { vec![None, Some(present_after(&at[2]))] } else { vec![None] };
        assert_eq!(world.model.opened_from(), opened);
        assert_eq!(world.stored().await, None);
        delivers_from(&world, &subscription, 4).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_start_of_ones_own_stores_nothing_before_an_events_position_is() {
    let (world, at) = three();
    world.storage.inner().put(left_at(&at[0]));
    let action = world.subscriptions.subscribe(ID, world.seen.handler()).save_every(2);
    let subscription = action.start_at(StartAt::Always(Start::Present)).await.unwrap();
    for _ in 0..5 {
        world.model.push_quiet();
        seconds(61).await;
    }
    subscription.drained().await.unwrap();
    subscription.pause().await.unwrap();
    subscription.resume().await.unwrap();
    subscription.shutdown().await.unwrap();
    assert!(world.storage.sent().is_empty());
    assert_eq!(world.stored().await, Some(at[0].clone()));
    assert!(!world.record().await.unwrap().clean, "what is stored is not where this run stood");

    // One event is settled and not stored by the count of two: quiet reads still store nothing.
    let action = world.subscriptions.subscribe(ID, world.seen.handler()).save_every(2);
    let subscription = action.start_at(StartAt::Always(Start::Present)).await.unwrap();
    world.model.push(memory::insert(4, doc! {}));
    until_settled(&subscription, 1).await;
    for _ in 0..3 {
        world.model.push_quiet();
        seconds(61).await;
    }
    assert!(world.storage.sent().is_empty());
    let second = world.model.push(memory::insert(5, doc! {}));
    until_saved(&subscription, &second).await;
    let quiet = world.model.push_quiet();
    until_saved(&subscription, &quiet).await;
}

#[tokio::test(start_paused = true)]
async fn a_start_of_ones_own_has_a_new_epoch_each_time() {
    let world = World::new();
    let mut epochs = Vec::new();
    for key in 1..=4 {
        let action = world.subscriptions.subscribe(ID, world.seen.handler());
        let subscription = action.start_at(StartAt::Always(Start::Earliest)).await.unwrap();
        let last = world.model.push(memory::insert(key, doc! {}));
        until_saved(&subscription, &last).await;
        subscription.shutdown().await.unwrap();
        epochs.push(world.record().await.unwrap().epoch.unwrap());
    }
    assert!(epochs.windows(2).all(|pair| pair[0] < pair[1]), "{epochs:?}");
    assert_eq!(world.seen.keys(), [1, 1, 2, 1, 2, 3, 1, 2, 3, 4]);
}

/// One combination of everything that decides a start.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools, reason = "the table's columns are yes or no")]
struct Case {
    /// Events pushed before the start.
    events: usize,
    stored: Stored,
    always: bool,
    start: Begin,
    told: bool,
    unrecorded: bool,
    sends_time: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Stored {
    Nothing,
    FenceOnly,
    /// The position of the n-th event; 0 is the present before all of them.
    At(usize),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Begin {
    Present,
    Earliest,
    Time(usize),
    After(usize),
}

fn cases() -> impl Strategy<Value = Case> {
    let stored = prop_oneof![Just(Stored::Nothing), Just(Stored::FenceOnly), (0usize..4).prop_map(Stored::At)];
    let start = prop_oneof![
        3 => Just(Begin::Present),
        1 => Just(Begin::Earliest),
        1 => (0usize..4).prop_map(Begin::Time),
        1 => (0usize..4).prop_map(Begin::After),
    ];
    (0usize..4, stored, any::<bool>(), start, any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
        |(events, stored, always, start, told, unrecorded, sends_time)| {
            let within = |at: usize| at.min(events);
            let stored = if let Stored::At(at) = stored { Stored::At(within(at)) } else { stored };
            let start = match start {
                Begin::Time(at) => Begin::Time(within(at)),
                Begin::After(at) => Begin::After(within(at)),
                other => other,
            };
            Case { events, stored, always, start, told, unrecorded, sends_time }
        },
    )
}

/// What the table says: refused, or the first event delivered and where a start is stored.
struct Expected {
    first: usize,
    asked: bool,
    /// The record's position when `subscribe` has returned.
    stored: Option<Checkpoint>,
}

fn table(case: &Case, at: &[Checkpoint], present: &Checkpoint) -> Option<Expected> {
    if let (Stored::At(n), false) = (case.stored, case.always) {
        return Some(Expected { first: n + 1, asked: false, stored: Some(at[n].clone()) });
    }
    let before = if let Stored::At(n) = case.stored { Some(at[n].clone()) } else { None };
    let (first, position) = match case.start {
        Begin::Present if !case.told && !case.unrecorded && !case.always => return None,
        Begin::Present => (case.events + 1, (case.told || case.sends_time).then(|| present.clone())),
        Begin::Earliest => (1, Some(Checkpoint::Time(Timestamp { time: time_of(&at[0]).time, increment: 1 }))),
        Begin::Time(n) => (n.max(1), Some(Checkpoint::Time(time_of(&at[n])))),
        Begin::After(n) => (n + 1, Some(at[n].clone())),
    };
    let stored = if case.always { before } else { position };
    Some(Expected { first, asked: case.start == Begin::Present, stored })
}

async fn holds(case: Case) {
    let world = World::new();
    let mut at = vec![world.model.push_quiet()];
    at.extend((1..=case.events).map(|key| world.model.push(memory::insert(i32::try_from(key).unwrap(), doc! {}))));
    let present = present_after(at.last().unwrap());
    match case.stored {
        Stored::Nothing => {}
        Stored::At(n) => world.storage.inner().put(left_at(&at[n])),
        Stored::FenceOnly => {
            let mut record = Record::empty(id());
            record.ownership = left_at(&at[0]).ownership;
            world.storage.inner().put(record);
        }
    }
    if !case.told {
        world.model.refuse_global_checkpoint();
    }
    if !case.sends_time {
        world.model.send_no_time();
    }
    let start = match case.start {
        Begin::Present => Start::Present,
        Begin::Earliest => Start::Earliest,
        Begin::Time(n) => Start::Time(time_of(&at[n])),
        Begin::After(n) => Start::After(at[n].clone()),
    };
    let start_at = if case.always { StartAt::Always(start) } else { StartAt::StoredOr(start) };
    let before = world.record().await;
    let process = world.stepped();
    let action = process.subscriptions.subscribe(ID, world.seen.handler()).start_at(start_at);
    let started = action.start_when_no_start_position_can_be_recorded(case.unrecorded).await;
    let Some(expected) = table(&case, &at, &present) else {
        let reason = started.unwrap_err().reason().cloned();
        assert_eq!(reason, Some(Reason::NoStartPosition));
        assert_eq!(world.record().await, before);
        return;
    };
    let subscription = started.unwrap();
    assert_eq!(process.steps.count("global_checkpoint"), usize::from(expected.asked));
    assert_eq!(world.stored().await, expected.stored);
    let push = |key| world.model.push(memory::insert(i32::try_from(key).unwrap(), doc! {}));
    push(case.events + 1);
    let last = push(case.events + 2);
    until_saved(&subscription, &last).await;
    let delivered: Vec<usize> = world.seen.keys().into_iter().map(|key| usize::try_from(key).unwrap()).collect();
    assert_eq!(delivered, (expected.first..=case.events + 2).collect::<Vec<_>>());
    let epochs = (before.and_then(|before| before.epoch), world.record().await.unwrap().epoch);
    let resumed = matches!(case.stored, Stored::At(_)) && !case.always;
    assert!(if resumed { epochs.0 == epochs.1 } else { epochs.0 < epochs.1 }, "{epochs:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_combination_starts_as_the_table_says(case in cases()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(holds(case));
    }
}
