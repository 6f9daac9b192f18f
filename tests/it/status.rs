//! What a run shows of itself: figures that add up, a state that tells idle, behind and dead apart, metrics.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder as MetricsRecorder, SharedString,
    Unit,
};
use mongosub::bson::Timestamp;
use mongosub::{Checkpoint, SourceError, State, Status, memory};

use crate::support::{Fault, Hold, World, millis, seconds, until, until_saved, until_seen, until_settled};

fn adds_up(status: &Status) {
    let (in_flight, unsettled) = (status.events - status.delivered, status.delivered - status.settled);
    assert!(in_flight + unsettled <= 1, "one event at a time: {status:?}");
    assert!(status.in_hand_since.is_none() || unsettled == 1, "{status:?}");
}

#[tokio::test(start_paused = true)]
async fn the_figures_add_up_at_every_moment() {
    let world = World::new();
    let handler = world.seen.then(|delivery| async move {
        millis(7).await;
        if delivery.attempt < 3 { Err("again".into()) } else { Ok(()) }
    });
    let subscription = world.subscriptions.subscribe(crate::support::ID, handler).await.unwrap();
    let mut watch = subscription.watch();
    let watching = tokio::spawn(async move {
        let mut seen = 0;
        while watch.changed().await.is_ok() {
            seen += 1;
            adds_up(&watch.borrow_and_update());
        }
        seen
    });
    for key in 1..=20 {
        world.insert(key);
        if key % 4 == 0 {
            world.model.push_quiet();
        }
        millis(200).await;
        if key % 6 == 0 {
            subscription.pause().await.unwrap();
            adds_up(&subscription.status());
            subscription.resume().await.unwrap();
        }
    }
    let status = until_settled(&subscription, 20).await;
    assert_eq!((status.events, status.delivered, status.settled, status.replayed), (20, 20, 20, 0));
    assert!(world.seen.keys().len() >= 60, "three attempts each, begun anew after a pause");
    subscription.shutdown().await.unwrap();
    drop((subscription, world));
    assert!(watching.await.unwrap() > 50);
}

#[tokio::test(start_paused = true)]
async fn an_event_that_comes_again_after_a_pause_is_counted_once() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    world.insert(1);
    until_seen(&world, 1).await;
    subscription.pause().await.unwrap();
    let status = subscription.status();
    assert_eq!((status.events, status.delivered, status.settled, status.in_hand_since), (1, 1, 0, None));
    hold.let_go(1);
    subscription.resume().await.unwrap();
    let status = until_settled(&subscription, 1).await;
    assert_eq!((status.events, status.delivered, status.settled), (1, 1, 1));
    assert_eq!(world.seen.keys(), [1, 1]);
}

#[tokio::test(start_paused = true)]
async fn an_event_that_waits_for_the_storage_is_in_flight_and_not_in_hand() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.storage.every_save(Fault::Fail);
    world.insert(1);
    seconds(31).await;
    world.insert(2);
    millis(1).await;
    let status = subscription.status();
    assert_eq!((status.events, status.delivered, status.settled, status.in_hand_since), (2, 1, 1, None));
}

#[tokio::test(start_paused = true)]
async fn caught_up_begins_within_ten_seconds_of_the_head_and_ends_beyond_thirty() {
    let world = World::new();
    let (subscription, hold) = world.subscribe_held().await;
    let at = |time: u32| Timestamp { time: 1_700_000_000 + time, increment: 1 };
    until(&subscription, "caught up", |status| status.state == State::CaughtUp).await;
    for (head, state) in
        [(29, State::CaughtUp), (30, State::CaughtUp), (31, State::CatchingUp), (20, State::CatchingUp)]
    {
        world.model.set_head(at(head));
        seconds(11).await;
        let status = subscription.status();
        assert_eq!((status.state, status.lag.unwrap().as_secs()), (state, u64::from(head)), "{head} s behind");
    }
    world.model.set_head(at(10));
    seconds(11).await;
    assert_eq!(subscription.status().state, State::CaughtUp);
    // Far behind, and the position catches up with the head.
    world.model.set_head(at(1000));
    seconds(11).await;
    assert_eq!(subscription.status().state, State::CatchingUp);
    world.model.push_at(at(985), memory::delete(1));
    world.model.push_at(at(995), memory::delete(2));
    hold.let_go(1);
    until_settled(&subscription, 1).await;
    seconds(11).await;
    assert_eq!(subscription.status().state, State::CatchingUp, "15 s behind");
    hold.let_go(1);
    until_settled(&subscription, 2).await;
    until(&subscription, "caught up", |status| status.state == State::CaughtUp).await;
    assert_eq!(subscription.status().lag.unwrap().as_secs(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_feed_that_has_more_to_read_is_not_caught_up_however_near_it_is() {
    let world = World::new();
    let hold = Hold::default();
    for key in 1..=2 {
        world.insert(key);
    }
    let action = world.held(&hold).start_at(mongosub::StartAt::StoredOr(mongosub::Start::Earliest));
    let subscription = action.await.unwrap();
    seconds(30).await;
    assert_eq!(subscription.status().state, State::CatchingUp);
    hold.let_go(1);
    until(&subscription, "caught up", |status| status.state == State::CaughtUp).await;
}

#[tokio::test(start_paused = true)]
async fn the_head_is_asked_every_ten_seconds_also_while_silent_and_while_paused() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let at = |time: u32| Timestamp { time: 1_700_000_000 + time, increment: 1 };
    for time in 1..=6 {
        if time == 4 {
            subscription.pause().await.unwrap();
        }
        world.model.set_head(at(time));
        seconds(10).await;
        millis(1).await;
        let status = subscription.status();
        assert_eq!(status.head, Some(Checkpoint::Time(at(time))));
        assert_eq!(status.lag.unwrap().as_secs(), u64::from(time));
    }
    // One that fails is asked again ten seconds later.
    world.model.fail_heads(SourceError::Unavailable { message: "away".into() }, 1);
    world.model.set_head(at(70));
    seconds(10).await;
    assert_eq!(subscription.status().head, Some(Checkpoint::Time(at(6))));
    seconds(10).await;
    assert_eq!(subscription.status().head, Some(Checkpoint::Time(at(70))));
}

#[tokio::test(start_paused = true)]
async fn in_hand_since_spans_every_attempt() {
    let world = World::new();
    let handler = world.seen.then(|delivery| async move {
        seconds(1).await;
        if delivery.attempt < 5 { Err("again".into()) } else { Ok(()) }
    });
    let subscription = world.subscriptions.subscribe(crate::support::ID, handler).await.unwrap();
    assert_eq!((subscription.status().in_hand_since, subscription.status().last_event_at), (None, None));
    world.insert(1);
    until_seen(&world, 1).await;
    let since = subscription.status().in_hand_since;
    assert!(since.is_some() && subscription.status().last_event_at.is_some());
    until_seen(&world, 5).await;
    assert_eq!(subscription.status().in_hand_since, since);
    let status = until_settled(&subscription, 1).await;
    assert_eq!(status.in_hand_since, None);
}

#[tokio::test(start_paused = true)]
async fn a_status_is_a_snapshot_that_serde_writes() {
    let world = World::new();
    let handler = world.seen.then(|delivery| async move {
        if delivery.attempt == 1 { Err("no".into()) } else { std::future::pending().await }
    });
    let subscription = world.subscriptions.subscribe(crate::support::ID, handler).await.unwrap();
    world.insert(1);
    until_seen(&world, 2).await;
    let mut status = serde_json::to_value(subscription.status()).unwrap();
    for clock in ["last_event_at", "in_hand_since"] {
        assert!(status[clock].is_string(), "{status}");
        status[clock] = "now".into();
    }
    insta::assert_snapshot!(serde_json::to_string_pretty(&status).unwrap(), @r#"
    {
      "dead_lettered": 0,
      "delivered": 1,
      "events": 1,
      "fence": 1767225600000,
      "filtered": 0,
      "gaps": [],
      "gaps_recorded": 0,
      "handled": 0,
      "head": "1700000000.2",
      "held": null,
      "id": "orders_v1",
      "in_hand_since": "now",
      "lag": {
        "nanos": 0,
        "secs": 0
      },
      "last_event_at": "now",
      "not_ahead": 0,
      "parked": 0,
      "position": "1700000000.2",
      "reconnects": 0,
      "replayed": 0,
      "saved": "1700000000.2",
      "saved_at": "2026-01-01 0:00:00.0 +00:00:00",
      "saves": 0,
      "settled": 0,
      "skipped": 0,
      "state": {
        "attempts": 1,
        "error": "no",
        "position": "826553F100000000022B022C0100296E5A10045EED5EED5EED4EED8EED5EED5EED5EED46645F6964000000000000000000000000010004",
        "reason": "handler_failing",
        "state": "retrying"
      }
    }
    "#);
}

#[tokio::test(start_paused = true)]
async fn the_saved_position_is_known_from_the_beginning_and_after_each_save() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let status = subscription.status();
    assert!(status.saved.is_some());
    assert_eq!((status.saved, status.position), (world.stored().await, world.stored().await));
    assert_eq!(status.saved_at, world.record().await.unwrap().saved_at);
    seconds(5).await;
    let first = world.insert(1);
    let status = until_saved(&subscription, &first).await;
    assert_eq!((status.position, status.saves), (Some(first), 1));
    assert_eq!(status.saved_at, world.record().await.unwrap().saved_at);
}

// Metrics.

/// Every counter and gauge by its name and labels.
#[derive(Clone, Default)]
struct Figures(Arc<Mutex<BTreeMap<String, i64>>>);

struct Figure(Figures, String);

impl Figure {
    fn change(&self, change: impl FnOnce(&mut i64)) {
        change(self.0.0.lock().unwrap().entry(self.1.clone()).or_default());
    }
}

#[allow(clippy::cast_possible_wrap, reason = "test figures are small")]
impl CounterFn for Figure {
    fn increment(&self, value: u64) {
        self.change(|figure| *figure += value as i64);
    }
    fn absolute(&self, value: u64) {
        self.change(|figure| *figure = (*figure).max(value as i64));
    }
}

impl GaugeFn for Figure {
    fn increment(&self, value: f64) {
        self.change(|figure| *figure += whole(value));
    }
    fn decrement(&self, value: f64) {
        self.change(|figure| *figure -= whole(value));
    }
    fn set(&self, value: f64) {
        self.change(|figure| *figure = whole(value));
    }
}

/// Every figure here is a whole one.
#[allow(clippy::cast_possible_truncation, reason = "test figures are small")]
fn whole(value: f64) -> i64 {
    value.round() as i64
}

impl Figures {
    fn figure(&self, key: &Key) -> Arc<Figure> {
        let labels: Vec<_> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        Arc::new(Figure(self.clone(), format!("{}{{{}}}", key.name(), labels.join(","))))
    }

    fn get(&self, name: &str) -> i64 {
        let figures = self.0.lock().unwrap();
        *figures.get(name).unwrap_or_else(|| panic!("no {name} in {figures:?}"))
    }
}

impl MetricsRecorder for Figures {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.figure(key))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.figure(key))
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[tokio::test(start_paused = true)]
async fn metrics_follow_the_status_and_go_on_behind_an_earlier_run() {
    let figures = Figures::default();
    let _guard = metrics::set_default_local_recorder(&figures);
    let world = World::new();
    let subscription = world.subscribe().await;
    for key in 1..=3 {
        world.insert(key);
        seconds(2).await;
    }
    let of = |name: &str| figures.get(&format!("mongosub_{name}{{subscription=orders_v1}}"));
    assert_eq!([of("events_total"), of("delivered_total"), of("settled_total"), of("saves_total")], [3; 4]);
    assert_eq!(of("lag_seconds"), 0);
    let state = |name: &str| figures.get(&format!("mongosub_state{{subscription=orders_v1,state={name}}}"));
    assert_eq!([state("caught_up"), state("stopped")], [1, 0]);
    world.storage.every_save(Fault::Fail);
    world.insert(4);
    seconds(3).await;
    let reason = |name: &str| figures.get(&format!("mongosub_reason{{subscription=orders_v1,reason={name}}}"));
    assert_eq!([state("retrying"), reason("storage_unavailable")], [1, 1]);
    world.storage.heal();
    seconds(20).await;
    assert_eq!([state("retrying"), reason("storage_unavailable"), of("saves_total")], [0, 0, 4]);
    subscription.shutdown().await.unwrap();
    seconds(2).await;
    assert_eq!([state("stopped"), state("caught_up"), reason("requested")], [1, 0, 1]);

    world.subscribe().await;
    world.insert(5);
    seconds(3).await;
    assert_eq!([of("events_total"), of("settled_total")], [5, 5]);
    assert_eq!([state("stopped"), state("caught_up")], [0, 1]);
}
