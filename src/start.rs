//! Where a subscription starts. Values only.

use bson::Timestamp;
use serde::Serialize;

use crate::checkpoint::Checkpoint;

/// Where to start when a start has to be chosen. Default: at the present.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[non_exhaustive]
pub enum Start {
    /// At the deployment's present, pinned before the cursor opens: every change not yet majority-committed at that
    /// moment is delivered, and every later one. Some that were committed just before may be delivered as well.
    #[default]
    Present,
    /// At the oldest change the deployment still has. The oplog goes on being cut meanwhile: a start that is overtaken
    /// by it is refused with `HistoryLost`.
    Earliest,
    /// At this operation time, changes of that very time included.
    Time(#[serde(serialize_with = "as_checkpoint")] Timestamp),
    /// Behind this position (for an operation time: at it). Refused when it is another collection's, when it lies ahead
    /// of the deployment, and when the oplog no longer reaches back to it.
    After(Checkpoint),
}

/// How a stored checkpoint and a start of your own are weighed. Default: `StoredOr(Start::Present)`.
///
/// ```
/// use mongosub::{Start, StartAt, bson::Timestamp};
///
/// // A new subscription begins with everything the oplog still has; a known one goes on.
/// let replay = StartAt::StoredOr(Start::Earliest);
/// // Wherever it stood: accept the gap behind a lost position, and begin again at the present.
/// let skip = StartAt::Always(Start::Present);
/// // Handle everything since then once more.
/// let again = StartAt::Always(Start::Time(Timestamp { time: 1_767_225_600, increment: 1 }));
/// # let _ = (replay, skip, again);
/// assert_eq!(StartAt::default(), StartAt::StoredOr(Start::Present));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub enum StartAt {
    /// Resume from the stored checkpoint; a new subscription's start is pinned and stored before the first delivery.
    StoredOr(Start),
    /// Start there at each `subscribe`, whatever is stored: never refused for want of a recorded start, a new epoch each
    /// time, and no position is recorded until the save policy stores an event's. A process killed before that starts
    /// at the same rule again, so with `Always(Start::Present)` the changes in between are skipped: you chose that.
    Always(Start),
}

impl Default for StartAt {
    fn default() -> Self {
        Self::StoredOr(Start::Present)
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's serialize_with passes the field by reference")]
fn as_checkpoint<S: serde::Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
    Checkpoint::Time(*time).serialize(serializer)
}
