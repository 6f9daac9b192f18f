//! Metrics, derived from the status through the `metrics` facade; without a recorder they cost next to nothing.

use std::time::Duration;

use metrics::{counter, gauge};
use tokio::sync::watch;

use crate::reason::Reason;
use crate::status::{State, Status};

const EVERY: Duration = Duration::from_secs(1);

/// Publishes a status as metrics once a second, and once more when the run has stopped.
pub(crate) async fn publish(mut status: watch::Receiver<Status>) {
    let mut before: Option<Status> = None;
    loop {
        let now = status.borrow_and_update().clone();
        record(&now, before.as_ref());
        before = Some(now.clone());
        // The sender lives as long as the run.
        if matches!(now.state, State::Stopped(_)) || status.changed().await.is_err() {
            return;
        }
        if !matches!(status.borrow().state, State::Stopped(_)) {
            tokio::time::sleep(EVERY).await;
        }
    }
}

/// Counters grow by what has come since: a status counts one run, and a later run of the id goes on behind it.
fn record(status: &Status, before: Option<&Status>) {
    let id = status.id.to_string();
    let total = |name: &'static str, of: fn(&Status) -> u64| {
        counter!(name, "subscription" => id.clone()).increment(of(status).saturating_sub(before.map_or(0, of)));
    };
    total("mongosub_events_total", |status| status.events);
    total("mongosub_filtered_total", |status| status.filtered);
    total("mongosub_delivered_total", |status| status.delivered);
    total("mongosub_settled_total", |status| status.settled);
    total("mongosub_handled_total", |status| status.handled);
    total("mongosub_skipped_total", |status| status.skipped);
    total("mongosub_dead_lettered_total", |status| status.dead_lettered);
    total("mongosub_parked_total", |status| status.parked);
    total("mongosub_replayed_total", |status| status.replayed);
    total("mongosub_reconnects_total", |status| status.reconnects);
    total("mongosub_saves_total", |status| status.saves);
    total("mongosub_saves_not_ahead_total", |status| status.not_ahead);
    total("mongosub_gaps_total", |status| status.gaps_recorded);
    if let Some(lag) = status.lag {
        gauge!("mongosub_lag_seconds", "subscription" => id.clone()).set(lag.as_secs_f64());
    }
    for state in ["starting", "catching_up", "caught_up", "paused", "retrying", "stalled", "stopped"] {
        let is = f64::from(u8::from(status.state.name() == state));
        gauge!("mongosub_state", "subscription" => id.clone(), "state" => state).set(is);
    }
    let reason = status.state.reason().map(Reason::name);
    let set = |reason: Option<&'static str>, to: f64| {
        if let Some(reason) = reason {
            gauge!("mongosub_reason", "subscription" => id.clone(), "reason" => reason).set(to);
        }
    };
    let reason_before = before.and_then(|before| before.state.reason()).map(Reason::name);
    if reason_before != reason {
        set(reason_before, 0.0);
    }
    set(reason, 1.0);
}
