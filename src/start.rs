//! Where a subscription starts. Values only.

use bson::Timestamp;
use serde::Serialize;

use crate::checkpoint::Checkpoint;

/// Where to start when a start has to be chosen.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[non_exhaustive]
pub enum Start {
    /// At the deployment's present, pinned before the cursor opens: every change not yet majority-committed at that
    /// moment is delivered, and every later one.
    #[default]
    Present,
    /// At the oldest change the deployment still has.
    Earliest,
    /// At this operation time, changes of that very time included.
    Time(#[serde(serialize_with = "as_checkpoint")] Timestamp),
    /// Behind this position (for an operation time: at it).
    After(Checkpoint),
}

/// How a stored checkpoint and a start of your own are weighed. Default: `StoredOr(Start::Present)`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub enum StartAt {
    /// Resume from the stored checkpoint; a new subscription's start is pinned and stored before the first delivery.
    StoredOr(Start),
    /// Start there at each `subscribe`, whatever is stored: never refused, a new epoch each time, and no position is
    /// recorded until the save policy stores an event's. A process killed before that starts at the same rule again,
    /// so with `Always(Start::Present)` the changes in between are skipped: you chose that.
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
