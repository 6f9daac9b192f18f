//! The desk as the barrier sees it: what the handler is to flush, what it has, and what is lost with it. Called by the
//! deliver task and, where a flush is wanted or a run begins anew, by the saver's.

use bson::DateTime;
use tokio::sync::futures::Notified;

use super::{Desk, StoredByWork, Unflushed};
use crate::ids::Fence;
use crate::run::policy::{Policy, SavePolicy};
use crate::run::progress::Mark;

impl Desk {
    /// What the handler is to flush: the furthest position that may be stored, if it has not been flushed.
    pub(crate) fn unflushed(&self) -> Option<Unflushed> {
        let mut inner = self.inner();
        inner.flush_wanted = false;
        if !inner.policy.has_barrier() {
            return None;
        }
        let through = inner.policy.storable()?;
        if inner.policy.flushed_up_to().is_some_and(|flushed| flushed.seq >= through.seq) {
            return None;
        }
        let delivered = inner.handed_out.clone().filter(|last| last.is_beyond(&through.position));
        Some(Unflushed { delivered: delivered.unwrap_or_else(|| through.position.clone()), through: through.clone() })
    }

    /// The handler has flushed everything up to a position.
    pub(crate) fn flushed(&self, mark: &Mark) {
        let mut inner = self.inner();
        let wanted = std::mem::take(&mut inner.save_after_flush);
        inner.policy.flushed(mark, wanted);
        self.tell(inner, wanted);
        if !wanted {
            // Somebody waits for it: a quiet save, a drain, a request.
            self.news.notify_one();
        }
    }

    /// An event that was read and is not safe yet.
    pub(crate) fn mark_of(&self, seq: u64) -> Option<Mark> {
        self.inner().progress.mark_of(seq).cloned()
    }

    /// Everything up to a position is stored already, and was not by the saver: at this time, none if it had been before.
    pub(crate) fn stored_by_work(&self, mark: Mark, at: Option<DateTime>) {
        let mut inner = self.inner();
        inner.save_after_flush = false;
        if inner.policy.flushed_up_to().is_none_or(|flushed| flushed.seq < mark.seq) {
            inner.policy.flushed(&mark, false);
        }
        let saves = inner.stored_by_work.as_ref().map_or(0, |before| before.saves) + u64::from(at.is_some());
        let at = at.or_else(|| inner.stored_by_work.as_ref().and_then(|before| before.at));
        inner.stored_by_work = Some(StoredByWork { mark, at, saves });
        drop(inner);
        self.news.notify_one();
    }

    /// What was not flushed is lost with its handler, and is not waited for any more.
    pub(crate) fn lose_unflushed(&self) {
        let mut inner = self.inner();
        inner.save_after_flush = false;
        inner.policy.lose_unflushed();
    }

    /// The run ends, and its handler lets everything up to a position be stored, which is no more than may be.
    pub(crate) fn released(&self, mark: Option<&Mark>) {
        self.inner().policy.released(mark);
    }

    /// The furthest position that may be stored, flushed or not.
    pub(crate) fn storable(&self) -> Option<Mark> {
        self.inner().policy.storable().cloned()
    }

    /// Whether something handled is lost when the handler is: it was declined, not declared durable, or not flushed.
    pub(crate) fn keeps_something_unsafe(&self) -> bool {
        let inner = self.inner();
        let events = |mark: Option<&Mark>| mark.map_or(0, |mark| mark.events);
        events(inner.progress.safe()) > events(inner.policy.flushed_up_to())
    }

    pub(crate) fn flush_is_wanted(&self) -> bool {
        self.inner().flush_wanted
    }

    /// Completes when a flush is wanted.
    ///
    /// # Cancel safety
    /// The wish stays, and shows in `flush_is_wanted`.
    pub(crate) fn flush_wanted(&self) -> Notified<'_> {
        self.flush.notified()
    }

    /// Wants the handler to flush what may be stored.
    pub(crate) fn want_flush(&self) {
        if !std::mem::replace(&mut self.inner().flush_wanted, true) {
            self.flush.notify_one();
        }
    }

    /// The run begins anew behind `start`, under another fence: what was handled behind it is lost with its handler.
    pub(crate) fn begin_anew(&self, fence: Fence, start: Option<Mark>, save: SavePolicy, saves_quiet: bool) {
        // What could not be stored is not waited for any more.
        self.gate.send_modify(|gate| gate.closed = false);
        let inner = &mut *self.inner();
        let (held, barrier) = (inner.policy.is_held(), inner.policy.has_barrier());
        inner.fence = fence;
        inner.given_up.clone_from(&inner.handed_out);
        inner.in_hand = None;
        inner.held_since = None;
        (inner.flush_wanted, inner.save_after_flush) = (false, false);
        (inner.left, inner.jumped, inner.to_note) = (Vec::new(), None, None);
        inner.progress.go_back(start.clone());
        inner.policy = Policy::new(save, saves_quiet, start);
        if held {
            inner.policy.hold();
        }
        if barrier {
            inner.policy.put_up_barrier();
        }
    }
}
