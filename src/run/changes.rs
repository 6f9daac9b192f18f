//! What a run does when its source changes under it: the policies, as a user sets them. Values only.

use crate::start::Start;

/// What follows an `invalidate`: the watched collection was dropped or renamed, or another one was renamed over it, or
/// the watched database was dropped. Default: [`Continue`](Self::Continue).
///
/// Everything up to the `invalidate` is delivered in any case, it too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum OnInvalidate {
    /// The subscription goes on behind the `invalidate`, in a new epoch, with whatever bears the name afterwards: the
    /// first insert into a collection made anew is delivered, however early it came. What has come by a rename is in no
    /// event, and so is not delivered.
    #[default]
    Continue,
    /// The run stops with [`Reason::Invalidated`](crate::Reason::Invalidated); the next `subscribe` goes on behind it.
    Stop,
}

/// What follows when the source no longer has the changes behind the position: the oplog has been cut past it.
/// Default: [`Stall`](Self::Stall).
///
/// What was lost is lost in either case; the question is who decides that the subscription goes on without it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnHistoryLost {
    /// The subscription stalls, and a `subscribe` is refused, with
    /// [`Reason::HistoryLost`](crate::Reason::HistoryLost).
    #[default]
    Stall,
    /// The subscription goes on at this start, in a new epoch. The start is stored before anything is read there, together
    /// with the [`Gap`](crate::Gap), which is warned about, counted and kept in the record and the status. What a handler
    /// had not declared to be stored (`save_when`) is taken as lost too.
    ///
    /// When a new start is lost as well, before anything behind it was stored, the subscription stalls all the same.
    RestartAt(Start),
}
