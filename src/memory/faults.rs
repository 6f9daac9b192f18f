//! What a [`MemoryModel`] is told to do otherwise than well: calls that fail or hang, answers that are another one's.

use bson::Timestamp;

use super::feed::Entry;
use super::model::MemoryModel;
use super::script::Call;
use crate::checkpoint::Checkpoint;
use crate::error::SourceError;
use crate::model::{Identity, Reopening};
use crate::reason::Reason;

/// Faults and answers.
impl MemoryModel {
    /// The next open fails.
    pub fn fail_next_open(&self, error: SourceError) {
        self.fail_opens(error, 1);
    }

    /// The next `times` opens fail, after those that are already to fail.
    pub fn fail_opens(&self, error: SourceError, times: usize) {
        self.fail(Call::Open, error, times);
    }

    /// Opens hang until [`release_opens`](Self::release_opens). One that hangs is counted already.
    pub fn hang_opens(&self) {
        self.change(|script| script.hanging = true);
    }

    /// Opens go on.
    pub fn release_opens(&self) {
        self.change(|script| script.hanging = false);
    }

    /// Every reader that is open now ends with this error, behind everything pushed before.
    pub fn break_reader(&self, error: SourceError) {
        self.change(|script| {
            let upto = script.last_reader;
            script.feed.push(Entry::Break { error, upto });
        });
    }

    /// With a reason, every reader shows itself reopening and hands out nothing; with `None` they have reconnected.
    pub fn set_reopening(&self, reason: Option<Reason>) {
        self.change(|script| {
            let was = std::mem::replace(&mut script.reopening, reason.clone()).is_some();
            let reopening = reason.map(Reopening::now);
            for state in script.readers.values() {
                state.send_modify(|state| {
                    state.reconnects += u64::from(was && reopening.is_none());
                    state.reopening.clone_from(&reopening);
                });
            }
        });
    }

    /// The source tells no global checkpoint: `None`.
    pub fn refuse_global_checkpoint(&self) {
        self.change(|script| script.tells_global_checkpoint = false);
    }

    /// The next call of `global_checkpoint` fails.
    pub fn fail_global_checkpoint(&self, error: SourceError) {
        self.fail(Call::GlobalCheckpoint, error, 1);
    }

    /// The next `times` calls of `head` fail.
    pub fn fail_heads(&self, error: SourceError, times: usize) {
        self.fail(Call::Head, error, times);
    }

    /// The next call of `earliest` fails.
    pub fn fail_earliest(&self, error: SourceError) {
        self.fail(Call::Earliest, error, 1);
    }

    /// The next call of `identity` fails.
    pub fn fail_identity(&self, error: SourceError) {
        self.fail(Call::Identity, error, 1);
    }

    /// The source sends no time when it is opened at its own now: readers do not tell where they were opened.
    pub fn send_no_time(&self) {
        self.change(|script| script.tells_time = false);
    }

    /// What `head` answers, one increment less than `global_checkpoint`. Default, and with `None`: the time of the last
    /// thing pushed.
    pub fn set_head(&self, head: impl Into<Option<Timestamp>>) {
        let head = head.into();
        self.change(|script| script.head = head);
    }

    /// What `identity` answers. Default: the collection `test.events`, the UUID that the tokens carry, a replica set
    /// named `memory`.
    pub fn set_identity(&self, identity: Identity) {
        self.change(|script| script.identity = identity);
    }

    /// The history shows the end of the collection with this UUID: `ended_since` answers `true` for it, from any position.
    /// It does so without, from a position before an [`invalidate`](Self::invalidate) of that collection.
    pub fn show_end_of(&self, collection_uuid: &str) {
        self.change(|script| script.ended.insert(collection_uuid.to_owned()));
    }

    /// The next call of `ended_since` fails.
    pub fn fail_ended_since(&self, error: SourceError) {
        self.fail(Call::EndedSince, error, 1);
    }

    /// The history has lost the event at this position, as that of an older state which was put back: `has_event` answers
    /// `false` for it.
    pub fn undo(&self, position: &Checkpoint) {
        self.change(|script| script.undone.push(position.clone()));
    }

    /// The next call of `outline` fails.
    pub fn fail_outline(&self, error: SourceError) {
        self.fail(Call::Outline, error, 1);
    }

    fn fail(&self, call: Call, error: SourceError, times: usize) {
        self.change(|script| script.failures.entry(call).or_default().extend(std::iter::repeat_n(error, times)));
    }
}
