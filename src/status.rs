//! What a run shows of itself: a snapshot on a watch channel, and the one place where its state is derived and logged.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bson::DateTime;
use serde::Serialize;
use tokio::sync::{Notify, watch};
use tracing::{info, warn};

use crate::audit::{Gap, Note, append};
use crate::checkpoint::Checkpoint;
use crate::ids::{Fence, SubscriptionId};
use crate::reason::Reason;

/// What a subscription is doing.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
#[non_exhaustive]
pub enum State {
    /// Opening, for the first time or after a resume.
    Starting,
    /// Reading, behind the deployment's present.
    CatchingUp,
    /// The last reply ended at the end of the oplog, and the position read is at most 10 s behind the head (it
    /// becomes `CatchingUp` again beyond 30 s).
    CaughtUp,
    /// Asked to pause; the cursor is closed.
    Paused,
    /// Holds its position and goes on by itself.
    Retrying(Reason),
    /// Needs a person: the cursor is closed, id and fence are kept, nothing is tried until `resume`.
    Stalled(Reason),
    /// Has ended; the id is free.
    Stopped(Reason),
}

impl State {
    /// The state's name, in snake case: for metrics and logs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::CatchingUp => "catching_up",
            Self::CaughtUp => "caught_up",
            Self::Paused => "paused",
            Self::Retrying(_) => "retrying",
            Self::Stalled(_) => "stalled",
            Self::Stopped(_) => "stopped",
        }
    }

    /// Why it retries, has stalled or has stopped.
    pub fn reason(&self) -> Option<&Reason> {
        match self {
            Self::Retrying(reason) | Self::Stalled(reason) | Self::Stopped(reason) => Some(reason),
            _ => None,
        }
    }
}

/// A snapshot of a subscription. All counts are of this run, since `subscribe`.
///
/// events = filtered + delivered + in flight (what was skipped before it was handed out stays there); delivered = settled
/// + unsettled.
///
/// *Idle*, *dead* and *behind* are told apart by two figures: a subscription that is idle has an old
/// [`last_event_at`](Self::last_event_at) and a small [`lag`](Self::lag), one that is behind has a large lag.
///
/// ```
/// # use mongosub::memory::{MemoryCheckpointStorage, MemoryModel};
/// # use mongosub::{Delivery, DurableSubscriptions, State};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let subscriptions = DurableSubscriptions::new(MemoryModel::new(), MemoryCheckpointStorage::new());
/// # let subscription = subscriptions.subscribe("search_index_v3", |_: Delivery| async { Ok(()) }).await?;
/// let mut status = subscription.watch();
/// status.wait_for(|status| status.state == State::CaughtUp).await?;
/// assert_eq!(subscription.status().events, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Status {
    /// The subscription's id.
    pub id: SubscriptionId,
    /// What it is doing.
    pub state: State,
    /// The fence of the run.
    pub fence: Fence,
    /// The safe position: everything delivered up to it is settled.
    pub position: Option<Checkpoint>,
    /// When the last event was taken from the reader (this process's clock).
    #[serde(serialize_with = "as_text")]
    pub last_event_at: Option<DateTime>,
    /// The deployment's majority time when last asked; it is asked every 10 s.
    pub head: Option<Checkpoint>,
    /// How far the safe position lies behind the head, to the second: the deployment's own times are compared.
    pub lag: Option<Duration>,
    /// The stored checkpoint.
    pub saved: Option<Checkpoint>,
    /// When it was stored, on the storage's clock.
    #[serde(serialize_with = "as_text")]
    pub saved_at: Option<DateTime>,
    /// Since when the event in hand is with the handler, retries included (this process's clock).
    #[serde(serialize_with = "as_text")]
    pub in_hand_since: Option<DateTime>,
    /// Under a hold, what it keeps from being stored.
    pub held: Option<Held>,
    /// Events read.
    pub events: u64,
    /// Events read once more and dropped, because the position that the stream was opened at covers them: a stream is opened
    /// at a time, which an event or a whole transaction can share.
    pub filtered: u64,
    /// Events handed to the handler, each counted once however often it was tried.
    pub delivered: u64,
    /// Events settled: handled, or handed out and then skipped.
    pub settled: u64,
    /// Events stepped over by hand that are known of: those that had been read, and one that could not be.
    pub skipped: u64,
    /// Deliveries that the handler may have seen in an earlier run.
    pub replayed: u64,
    /// How often the reader has reopened its cursor.
    pub reconnects: u64,
    /// Answered saves that stored something.
    pub saves: u64,
    /// Answered saves that found their position covered already.
    pub not_ahead: u64,
    /// The newest gaps in the subscription's history, those of earlier runs too, oldest first: changes that were lost to
    /// it, as its record has them.
    pub gaps: Vec<Gap>,
    /// How many of them this run has recorded.
    pub gaps_recorded: u64,
}

/// What a hold keeps from being stored: something was handled behind the last position declared durable.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Held {
    /// Since when (this process's clock).
    #[serde(serialize_with = "as_plain_text")]
    pub since: DateTime,
    /// The last position declared durable.
    pub mark: Option<Checkpoint>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's serialize_with passes the field by reference")]
fn as_plain_text<S: serde::Serializer>(at: &DateTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(at)
}

#[allow(clippy::ref_option, reason = "serde's serialize_with passes the field by reference")]
fn as_text<S: serde::Serializer>(at: &Option<DateTime>, serializer: S) -> Result<S::Ok, S::Error> {
    at.map(|at| at.to_string()).serialize(serializer)
}

impl Status {
    pub(crate) fn new(id: SubscriptionId, fence: Fence) -> Self {
        Self {
            id,
            state: State::Starting,
            fence,
            position: None,
            last_event_at: None,
            head: None,
            lag: None,
            saved: None,
            saved_at: None,
            in_hand_since: None,
            held: None,
            events: 0,
            filtered: 0,
            delivered: 0,
            settled: 0,
            skipped: 0,
            replayed: 0,
            reconnects: 0,
            saves: 0,
            not_ahead: 0,
            gaps: Vec::new(),
            gaps_recorded: 0,
        }
    }

    /// A note was stored.
    pub(crate) fn noted(&mut self, note: &Note, at: Option<DateTime>) {
        match note {
            Note::Gap(gap) => {
                append(&mut self.gaps, Gap { at, ..gap.clone() }, |_, _| false);
                self.gaps_recorded += 1;
            }
            Note::Skipped(_) => {}
        }
    }

    /// How far the position lies behind the head, in whole seconds of cluster time.
    fn lag_now(&self) -> Option<Duration> {
        let position = self.position.as_ref()?.cluster_time()?;
        let head = self.head.as_ref()?.cluster_time()?;
        Some(Duration::from_secs(u64::from(head.time.saturating_sub(position.time))))
    }
}

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
    /// What ails the reader.
    pub(crate) source: Option<Reason>,
    /// Why there is no reader.
    pub(crate) opening: Option<Reason>,
    pub(crate) caught_up: bool,
}

impl Conditions {
    /// The one state that says most about what a person would want to know.
    fn state(&self) -> State {
        let retrying = [&self.handler, &self.flushing, &self.storage, &self.opening, &self.source];
        let retrying = retrying.into_iter().find_map(Option::as_ref);
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
            source: None,
            opening: None,
            caught_up: false,
        };
        let published = watch::Sender::new(status.clone());
        Self { live: Mutex::new(Live { status, conditions, told: false }), published, news: Notify::new() }
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
