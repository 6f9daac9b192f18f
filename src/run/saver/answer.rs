//! What the saver makes of the answer to a write.

use tokio::time::Instant;
use tracing::{debug, warn};

use super::{Lost, QUIET_FAILURES, Saver, Why, Write};
use crate::error::StorageError;
use crate::reason::Reason;
use crate::run::desk::{Desk, StoredByWork};
use crate::run::progress::Mark;
use crate::status::Board;
use crate::storage::{CheckpointStorage, SaveOutcome};

impl<S: CheckpointStorage> Saver<S> {
    /// Takes in the outcome of the write in flight.
    ///
    /// # Errors
    /// The reason to stop or stall, when no retry can help.
    pub(crate) fn take(
        &mut self,
        outcome: Result<SaveOutcome, StorageError>,
        desk: &Desk,
        board: &Board,
    ) -> Result<(), Lost> {
        let Some(Write { mark, why, clean, empties_hand, .. }) = self.in_flight.take() else { return Ok(()) };
        self.last_answer = Some(Instant::now());
        if matches!(outcome, Ok(SaveOutcome::Saved { .. } | SaveOutcome::NotAhead)) && clean {
            self.clean = false;
        }
        if empties_hand {
            match outcome {
                Ok(SaveOutcome::Saved { .. }) => (self.noted, self.empties_hand) = (false, false),
                // The record is further than is known here, by a commit whose answer was lost.
                Ok(SaveOutcome::NotAhead) => self.empties_hand = false,
                _ => {}
            }
        }
        match outcome {
            Ok(SaveOutcome::Saved { .. } | SaveOutcome::NotAhead) if let Why::Note(number) = why => {
                desk.noted(number);
                self.went_well(board);
                Ok(())
            }
            Ok(SaveOutcome::Saved { at }) => {
                let jump = desk.view().jumped.filter(|(seq, _)| *seq <= mark.seq);
                board.count(|status| {
                    status.saves += 1;
                    status.saved_at = at;
                    if let Some((_, jump)) = &jump {
                        status.noted(&jump.note, at);
                    }
                });
                self.stored_now(mark, why, desk, board);
                Ok(())
            }
            Ok(SaveOutcome::NotAhead) => {
                board.count(|status| status.not_ahead += 1);
                self.stored_now(mark, why, desk, board);
                Ok(())
            }
            Ok(SaveOutcome::Superseded { owner, since }) => Err(Lost::Stop(Reason::Superseded { owner, since })),
            Ok(SaveOutcome::Gone) => Err(Lost::Stop(Reason::Deleted)),
            Err(error) => self.failed(&error, &mark, why, board),
        }
    }

    /// A position that the handler's work has stored needs no write any more.
    pub(super) fn take_over(&mut self, stored: &StoredByWork, desk: &Desk, board: &Board) {
        let StoredByWork { mark, at, saves } = stored;
        let new = saves.saturating_sub(std::mem::replace(&mut self.taken_over, *saves));
        if new > 0 {
            board.count(|status| {
                status.saves += new;
                status.saved_at = at.or(status.saved_at);
            });
        }
        if self.is_ahead(mark) {
            // It counts as a write of ours: the next quiet one has its time an interval later.
            (self.last_sent, self.last_answer) = (Instant::now(), Some(Instant::now()));
            self.stored_now(mark.clone(), Why::Wanted, desk, board);
        }
    }

    fn stored_now(&mut self, mark: Mark, why: Why, desk: &Desk, board: &Board) {
        debug!(subscription = %self.template.id, position = %mark.position, "checkpoint stored");
        // A write that was in flight when the handler's work stored more.
        let mark = self.stored.take().filter(|stored| stored.seq > mark.seq).unwrap_or(mark);
        self.wanted_since = None;
        self.quiet_failures = 0;
        self.went_well(board);
        if why == Why::Wanted && mark.events > 0 {
            self.recorded = true;
            self.quiet_allowed = true;
        }
        board.count(|status| status.saved = Some(mark.position.clone()));
        desk.saved(&mark);
        self.urgent = self.urgent.filter(|urgent| *urgent > mark.seq);
        self.unanswered.clear();
        self.stored = Some(mark);
    }

    /// The storage has answered.
    fn went_well(&mut self, board: &Board) {
        self.answered = Instant::now();
        (self.retry_at, self.last_error) = (None, None);
        self.backoff.reset();
        self.repeats.reset();
        board.set(|conditions| conditions.storage = None);
    }

    fn failed(&mut self, error: &StorageError, mark: &Mark, why: Why, board: &Board) -> Result<(), Lost> {
        let reason = error.reason();
        self.last_error = Some(reason.clone());
        match error {
            StorageError::Unavailable { .. } | StorageError::Unauthorized { .. } => {}
            StorageError::Unreadable { .. } | StorageError::Refused { .. } => return Err(Lost::Stall(reason)),
        }
        self.keep_unanswered(mark);
        let shown = if why == Why::Quiet {
            // Tried again an interval later; the timer runs from the sending of this one.
            self.quiet_failures += 1;
            self.quiet_failures >= QUIET_FAILURES
        } else {
            self.retry_at = Some(Instant::now() + self.backoff.next_wait());
            true
        };
        if self.repeats.is_due() {
            let (id, position, failures) = (&self.template.id, &mark.position, self.repeats.count());
            warn!(subscription = %id, %position, failures, "subscription {id} could not store {position}: {error}");
        }
        if shown {
            board.set(|conditions| conditions.storage = Some(reason));
        }
        Ok(())
    }
}
