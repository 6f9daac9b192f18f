//! The writing end of a status: the one place where the state is derived and logged, and where snapshots are published.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tracing::{info, warn};

use super::{State, Status};
use crate::handover::Handover;
use crate::reason::Reason;

/// Where a run is in its life, whatever retries go on inside it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Phase {
    Starting,
    Running,
    Paused,
    Stalled(Reason),
    Stopped(Reason),
}

/// Everything the state is derived from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Conditions {
    pub(crate) phase: Phase,
    pub(crate) handler: Option<Reason>,
    /// The handler flushes for long.
    pub(crate) flushing: Option<Reason>,
    pub(crate) storage: Option<Reason>,
    /// Why a dead letter is not stored yet.
    pub(crate) letters: Option<Reason>,
    /// What ails the reader.
    pub(crate) source: Option<Reason>,
    /// Why there is no reader.
    pub(crate) opening: Option<Reason>,
    pub(crate) caught_up: bool,
}

impl Conditions {
    /// The one state that says most about what a person would want to know.
    fn state(&self) -> State {
        let Self { handler, flushing, letters, storage, opening, source, .. } = self;
        let retrying = [handler, flushing, letters, storage, opening, source].into_iter().find_map(Option::as_ref);
        match (&self.phase, retrying) {
            (Phase::Stopped(reason), _) => State::Stopped(reason.clone()),
            (Phase::Stalled(reason), _) => State::Stalled(reason.clone()),
            (Phase::Paused, _) => State::Paused,
            (Phase::Starting | Phase::Running, Some(reason)) => State::Retrying(reason.clone()),
            (Phase::Starting, None) => State::Starting,
            (Phase::Running, None) if self.caught_up => State::CaughtUp,
            (Phase::Running, None) => State::CatchingUp,
        }
    }
}

/// The writing end of a status, shared by the tasks of a run. A change of state shows on the channel at once, figures
/// at most [`PUBLISHED_EVERY`] later: nobody who watches is woken for every event.
#[derive(Debug)]
pub(crate) struct Board {
    live: Mutex<Live>,
    published: watch::Sender<Status>,
    /// Figures have changed that are not published yet.
    news: Notify,
    /// What is woken here goes on while a handler blocks.
    pub(crate) handover: Arc<Handover>,
}

#[derive(Debug)]
struct Live {
    /// All but its lag, which is worked out when somebody looks.
    status: Status,
    conditions: Conditions,
    told: bool,
}

impl Live {
    fn shown(&self) -> Status {
        Status { lag: self.status.lag_now(), ..self.status.clone() }
    }
}

const PUBLISHED_EVERY: Duration = Duration::from_millis(10);

impl Board {
    pub(crate) fn new(status: Status) -> Self {
        let conditions = Conditions {
            phase: Phase::Starting,
            handler: None,
            flushing: None,
            storage: None,
            letters: None,
            source: None,
            opening: None,
            caught_up: false,
        };
        let published = watch::Sender::new(status.clone());
        let live = Mutex::new(Live { status, conditions, told: false });
        Self { live, published, news: Notify::new(), handover: Arc::default() }
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Status> {
        self.published.subscribe()
    }

    /// The status as it is, published or not.
    pub(crate) fn snapshot(&self) -> Status {
        self.live().shown()
    }

    pub(crate) fn lag(&self) -> Option<Duration> {
        self.live().status.lag_now()
    }

    pub(crate) fn is_held(&self) -> bool {
        self.live().status.held.is_some()
    }

    /// Changes figures; the state stays.
    pub(crate) fn count(&self, change: impl FnOnce(&mut Status)) {
        let mut live = self.live();
        change(&mut live.status);
        if !std::mem::replace(&mut live.told, true) {
            drop(live);
            self.handover.note();
            self.news.notify_one();
        }
    }

    /// Changes what the state is derived from; a state that changes by it is logged, one line each.
    pub(crate) fn set(&self, change: impl FnOnce(&mut Conditions)) {
        let mut live = self.live();
        let before = live.conditions.clone();
        change(&mut live.conditions);
        if live.conditions == before {
            return;
        }
        let state = live.conditions.state();
        if live.status.state != state {
            log_change(&live.status, &state);
            live.status.state = state;
            self.handover.note();
            // Under the lock, so that states are published in their order.
            self.published.send_replace(live.shown());
            if matches!(live.status.state, State::Stopped(_)) {
                // The last word: whoever publishes ends with it.
                self.news.notify_one();
            }
        }
    }

    /// Publishes figures while the run lasts.
    pub(crate) async fn publish(self: Arc<Self>) {
        loop {
            self.news.notified().await;
            {
                let mut live = self.live();
                live.told = false;
                self.published.send_replace(live.shown());
                if matches!(live.status.state, State::Stopped(_)) {
                    return;
                }
            }
            tokio::time::sleep(PUBLISHED_EVERY).await;
        }
    }
}

fn log_change(status: &Status, state: &State) {
    let position = status.position.as_ref().map(ToString::to_string).unwrap_or_default();
    let same_kind = status.state.name() == state.name()
        && status.state.reason().map(Reason::name) == state.reason().map(Reason::name);
    // A retry that goes on with other figures is no change; who retries logs it at its own pace.
    if same_kind {
        return;
    }
    let id = &status.id;
    match state {
        State::Retrying(reason) => {
            warn!(subscription = %id, position, state = "retrying", reason = reason.name(), "subscription {id} is retrying: {}", reason.pointing_to_runbook());
        }
        State::Stalled(reason) => {
            tracing::error!(subscription = %id, position, state = "stalled", reason = reason.name(), "subscription {id} has stalled: {}", reason.pointing_to_runbook());
        }
        State::Stopped(reason) if reason.exit_code() != 0 => {
            tracing::error!(subscription = %id, position, state = "stopped", reason = reason.name(), "subscription {id} has stopped: {}", reason.pointing_to_runbook());
        }
        State::Stopped(reason) => {
            info!(subscription = %id, position, state = "stopped", reason = reason.name(), "subscription {id} has stopped: {reason}");
        }
        state => info!(subscription = %id, position, state = state.name(), "subscription {id} is {}", state.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_names_the_gravest_condition() {
        let storage = Reason::StorageUnavailable { message: "x".into() };
        let source = Reason::SourceUnavailable { message: "x".into() };
        let mut conditions = Conditions {
            phase: Phase::Running,
            handler: None,
            flushing: None,
            storage: Some(storage.clone()),
            letters: None,
            source: Some(source.clone()),
            opening: None,
            caught_up: true,
        };
        assert_eq!(conditions.state(), State::Retrying(storage));
        conditions.storage = None;
        assert_eq!(conditions.state(), State::Retrying(source));
        conditions.phase = Phase::Paused;
        assert_eq!(conditions.state(), State::Paused);
        conditions.phase = Phase::Stalled(Reason::Deleted);
        assert_eq!(conditions.state(), State::Stalled(Reason::Deleted));
        conditions.phase = Phase::Running;
        conditions.source = None;
        assert_eq!(conditions.state(), State::CaughtUp);
        conditions.caught_up = false;
        assert_eq!(conditions.state(), State::CatchingUp);
    }
}
