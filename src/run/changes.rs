//! What a run does when its source changes under it: the policies, as a user sets them. Values only.

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
