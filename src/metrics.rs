//! Metrics, derived from the status through the `metrics` facade; without a recorder they cost next to nothing.

use std::time::Duration;

use metrics::{counter, gauge};
use tokio::sync::watch;

use crate::reason::Reason;
use crate::status::{State, Status};

const EVERY: Duration = Duration::from_secs(1);

/// Publishes a status as metrics once a second, and once more when the run has stopped.
pub(crate) async fn publish(mut status: watch::Receiver<Status>) {
    let mut reason = None;
    loop {
        let now = status.borrow_and_update().clone();
        record(&now, &mut reason);
        // The sender lives as long as the run.
        if matches!(now.state, State::Stopped(_)) || status.changed().await.is_err() {
            return;
        }
        if !matches!(status.borrow().state, State::Stopped(_)) {
            tokio::time::sleep(EVERY).await;
        }
    }
}

fn record(status: &Status, reason_before: &mut Option<&'static str>) {
    let id = status.id.to_string();
    let total = |name: &'static str, value: u64| counter!(name, "subscription" => id.clone()).absolute(value);
    total("mongosub_events_total", status.events);
    total("mongosub_delivered_total", status.delivered);
    total("mongosub_settled_total", status.settled);
    total("mongosub_replayed_total", status.replayed);
    total("mongosub_reconnects_total", status.reconnects);
    total("mongosub_saves_total", status.saves);
    total("mongosub_saves_not_ahead_total", status.not_ahead);
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
    if *reason_before != reason {
        set(*reason_before, 0.0);
    }
    set(reason, 1.0);
    *reason_before = reason;
}
