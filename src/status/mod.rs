//! What a run shows of itself: a snapshot, and the board that keeps it (`board`).

mod board;

use std::time::Duration;

use bson::DateTime;
use serde::Serialize;

pub(crate) use self::board::{Board, Phase};
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
    /// Needs a person: the cursor is closed, id and fence are kept, nothing is tried until `resume` or `skip`. A hold that
    /// lasts is none: [`Status::held`] shows it.
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
/// events = filtered + delivered + in flight; delivered = settled + unsettled; settled = handled + skipped + dead-lettered +
/// parked. What comes again because its handler was lost, and the run has begun anew, counts once.
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
    /// The safe position: everything delivered up to it is settled. It may be stored, unless it is held back.
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
    /// Events handed out, each counted once however often it was tried: to the handler, to be parked, or stepped over by
    /// hand.
    pub delivered: u64,
    /// Events settled, whatever settled them.
    pub settled: u64,
    /// Events for which the handler returned `Ok`.
    pub handled: u64,
    /// Events that the failure policy or a verdict of the handler passed over, and those stepped over by hand that are
    /// known of: they had been read, or were too large to be.
    pub skipped: u64,
    /// Events that failed and were put into the dead letter storage.
    pub dead_lettered: u64,
    /// Events that went into the dead letter storage behind an earlier event of their document, without a call of the
    /// handler. One that comes again after a crash, and is in there already, counts here.
    pub parked: u64,
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
            handled: 0,
            skipped: 0,
            dead_lettered: 0,
            parked: 0,
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
