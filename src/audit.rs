//! What a record keeps of the events that a subscription was not given: gaps in the history, and what was skipped by
//! hand. Values only; a storage keeps them beside the position, in the same write.

use bson::DateTime;
use serde::Serialize;

use crate::checkpoint::Checkpoint;
use crate::ids::Owner;
use crate::model::Scope;

/// How many of each kind a record keeps: the newest.
pub const AUDITED: usize = 16;

/// Changes that were lost to a subscription: the source no longer had them when it came to read them, and
/// [`OnHistoryLost::RestartAt`](crate::OnHistoryLost::RestartAt) let it go on behind them.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Gap {
    /// Everything up to it had been read.
    pub from: Checkpoint,
    /// Where reading began again.
    pub to: Checkpoint,
    /// What was read, and so where the changes in between were.
    pub scope: Scope,
    /// When it was recorded, on the storage's clock; none before it is.
    #[serde(serialize_with = "as_text")]
    pub at: Option<DateTime>,
}

impl Gap {
    /// A gap that is not recorded yet.
    pub fn new(from: Checkpoint, to: Checkpoint, scope: Scope) -> Self {
        Self { from, to, scope, at: None }
    }
}

/// Events that were stepped over because somebody said so.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Skipped {
    /// Everything up to it was settled. None when nothing was known to be.
    pub from: Option<Checkpoint>,
    /// The last position that was stepped over.
    pub through: Checkpoint,
    /// Why, in the words of whoever did it.
    pub reason: String,
    /// The owner that the record had then: host and process.
    pub by: Owner,
    /// When it was recorded, on the storage's clock; none before it is.
    #[serde(serialize_with = "as_text")]
    pub at: Option<DateTime>,
}

impl Skipped {
    /// A skip that is not recorded yet.
    pub fn new(from: Option<Checkpoint>, through: Checkpoint, reason: impl Into<String>, by: Owner) -> Self {
        Self { from, through, reason: reason.into(), by, at: None }
    }
}

/// An entry that is stored together with a position.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Note {
    /// History was lost, and the position is where reading begins again.
    Gap(Gap),
    /// Events were stepped over, and the position is the last of them.
    Skipped(Skipped),
}

/// Appends an entry unless it is the last one already: a save whose answer was lost is made again. Keeps the newest.
pub(crate) fn append<T>(entries: &mut Vec<T>, entry: T, is_same: impl Fn(&T, &T) -> bool) {
    if entries.last().is_some_and(|last| is_same(last, &entry)) {
        return;
    }
    entries.push(entry);
    entries.drain(..entries.len().saturating_sub(AUDITED));
}

#[allow(clippy::ref_option, reason = "serde's serialize_with passes the field by reference")]
fn as_text<S: serde::Serializer>(at: &Option<DateTime>, serializer: S) -> Result<S::Ok, S::Error> {
    at.map(|at| at.to_string()).serialize(serializer)
}
