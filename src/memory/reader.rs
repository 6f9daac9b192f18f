//! The reader of a scripted model: hands out what was pushed, in order, and keeps its [`SourceState`] beside it.

use std::sync::Arc;

use bson::Timestamp;
use tokio::sync::watch;

use crate::checkpoint::Checkpoint;
use crate::error::SourceError;
use crate::event::{ChangeEvent, Operation};
use crate::memory::feed::{Dropped, Entry, quiet_token};
use crate::memory::script::Shared;
use crate::model::{Plan, Read, Reader, SourceState};
use crate::reason::Reason;

/// Reads a [`MemoryModel`](crate::memory::MemoryModel). It has no task and no channel: it reads when it is asked.
#[derive(Debug)]
pub struct MemoryReader {
    pub(super) shared: Arc<Shared>,
    pub(super) number: u64,
    pub(super) plan: Plan,
    /// The number of the next entry.
    pub(super) next: u64,
    /// The position last handed out, or opened at.
    pub(super) last: Checkpoint,
    pub(super) opened_at: Option<Checkpoint>,
    /// The time of the last entry that the filter did not pass and nothing has been handed out behind.
    pub(super) skipped: Option<Timestamp>,
    pub(super) ended: bool,
    pub(super) changed: watch::Receiver<()>,
    pub(super) state: watch::Sender<SourceState>,
}

enum Step {
    Item(Option<Result<Read, SourceError>>),
    Wait,
}

impl Reader for MemoryReader {
    async fn next(&mut self) -> Option<Result<Read, SourceError>> {
        loop {
            self.changed.mark_unchanged();
            match self.step() {
                Step::Item(item) => return item,
                Step::Wait => {
                    // The sender lives in `shared`, which this reader holds.
                    let _ = self.changed.changed().await;
                }
            }
        }
    }

    fn opened_at(&self) -> Option<Checkpoint> {
        self.opened_at.clone()
    }

    fn state(&self) -> watch::Receiver<SourceState> {
        self.state.subscribe()
    }
}

impl MemoryReader {
    fn step(&mut self) -> Step {
        if self.ended {
            return Step::Item(None);
        }
        let shared = self.shared.clone();
        let mut script = shared.lock();
        if script.reopening.is_some() {
            return Step::Wait;
        }
        let read = loop {
            match script.feed.get(self.next) {
                Err(Dropped) => {
                    let oldest = Some(Checkpoint::Time(script.feed.oldest));
                    let reason = Reason::HistoryLost { position: self.last.clone(), oldest };
                    return self.end(Some(Err(SourceError::Refused(reason))));
                }
                Ok(Some(Entry::Break { error, upto })) => {
                    if self.number <= *upto {
                        let error = error.clone();
                        return self.end(Some(Err(error)));
                    }
                    self.next += 1;
                }
                Ok(Some(Entry::Quiet(token))) => {
                    self.next += 1;
                    break Read::Quiet(Checkpoint::Token(token.clone()));
                }
                Ok(Some(Entry::Event { event, position })) => {
                    self.next += 1;
                    if passes(event, &self.plan) {
                        self.ended = position.is_invalidate();
                        break Read::Event { event: event.clone(), position: Checkpoint::Token(position.clone()) };
                    }
                    self.skipped = Some(position.cluster_time());
                }
                Ok(None) => {
                    // The reply's post-batch token, when it lies beyond what was handed out.
                    let quiet = self.skipped.take().map(|time| Checkpoint::Token(quiet_token(time)));
                    if let Some(quiet) = quiet.filter(|quiet| quiet.is_beyond(&self.last)) {
                        break Read::Quiet(quiet);
                    }
                    self.note_end(true);
                    return if script.feed.ended { self.end(None) } else { Step::Wait };
                }
            }
        };
        self.skipped = None;
        self.last = read.position().clone();
        self.note_end(self.next == script.feed.end());
        script.reads += 1;
        Step::Item(Some(Ok(read)))
    }

    fn end(&mut self, item: Option<Result<Read, SourceError>>) -> Step {
        self.ended = true;
        Step::Item(item)
    }

    /// Shows whether everything there is has been handed out.
    pub(super) fn note_end(&self, at_end: bool) {
        self.state.send_if_modified(|state| {
            let end_at = if at_end { Some(self.last.clone()) } else { state.end_at.clone() };
            let changed = (state.at_end, &state.end_at) != (at_end, &end_at);
            (state.at_end, state.end_at) = (at_end, end_at);
            changed
        });
    }
}

impl Drop for MemoryReader {
    fn drop(&mut self) {
        self.shared.lock().readers.remove(&self.number);
    }
}

/// Whether an event is handed out. What cannot be decoded is: the handler gets to see it, and says so.
fn passes(event: &ChangeEvent, plan: &Plan) -> bool {
    if event.operation().is_ok_and(|operation| operation == Operation::Invalidate) {
        return true;
    }
    let left_out = event.namespace().ok().flatten().is_some_and(|namespace| plan.leave_out.contains(&namespace));
    !left_out && plan.filter.matches(event).unwrap_or(true)
}
