//! The desk when a run goes on at a position that it did not reach by settling what lies before it: behind lost history,
//! behind events that were skipped by hand; and which collection an epoch is about.

use std::sync::Arc;

use super::{Desk, Inner};
use crate::audit::Note;
use crate::checkpoint::{Checkpoint, Kind};
use crate::storage::Source;

/// What goes with a position that is not reached by settling what lies before it.
#[derive(Debug, Clone)]
pub(crate) struct Jump {
    pub(crate) kind: Kind,
    /// Positions before and behind it are not comparable.
    pub(crate) new_epoch: bool,
    /// Stored with it.
    pub(crate) note: Note,
    /// Where positions come from behind it; none when that is as before.
    pub(crate) source: Option<Source>,
}

impl Inner {
    /// Takes in what an event's position shows: the collection that this epoch is about.
    pub(super) fn see(&mut self, position: &Checkpoint) {
        let epoch = self.progress.epoch();
        if self.seen.as_ref().is_none_or(|(seen, _)| *seen != epoch) {
            let uuid = position.token().and_then(|token| token.collection_uuid());
            self.seen = uuid.map(|uuid| (epoch, uuid.into()));
        }
    }
}

impl Desk {
    /// Goes on at a position by decree; the number it has. The saver stores it at once.
    pub(crate) fn jump(&self, position: Checkpoint, jump: Jump) -> u64 {
        let mut inner = self.inner();
        let mark = inner.progress.jump(position, jump.kind, jump.new_epoch);
        inner.policy.jump(&mark);
        inner.given_up.take_if(|given_up| !given_up.is_beyond(&mark.position));
        (inner.flush_wanted, inner.save_after_flush, inner.held_since) = (false, false, None);
        (inner.left, inner.seen) = (Vec::new(), None);
        inner.jumped = Some((mark.seq, Arc::new(jump)));
        self.tell(inner, true);
        mark.seq
    }

    /// The events up to a position that were read and not settled when the reader was last closed.
    pub(crate) fn left_unsettled(&self, through: &Checkpoint) -> Vec<Checkpoint> {
        let inner = self.inner();
        inner.left.iter().filter(|position| !position.is_beyond(through)).cloned().collect()
    }
}
