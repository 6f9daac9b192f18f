//! Holds the newest position that is to be stored and writes it: one write in flight, forward only. It knows the
//! storage's seam and the clock, not the handler: a failing write is retried alone.

mod answer;
mod next;
mod save;

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use self::save::as_stored;
use crate::backoff::Backoff;
use crate::error::StorageError;
use crate::ids::{Epoch, Ownership};
use crate::reason::Reason;
use crate::run::desk::Desk;
use crate::run::policy::SaveMode;
use crate::run::progress::Mark;
use crate::run::repeats::Repeats;
use crate::status::Board;
use crate::storage::{CheckpointStorage, Hand, Record, Save, SaveOutcome};

/// Between the answer to a write and the next write, in [`SaveMode::WriteBehind`].
const SPACING: Duration = Duration::from_millis(10);
/// How long a wanted save may fail before no further event is handed out.
const PATIENCE: Duration = Duration::from_secs(30);
/// Quiet writes that fail in a row before the status shows it.
const QUIET_FAILURES: u32 = 3;

#[allow(clippy::struct_excessive_bools, reason = "each is a fact of its own, and they go together in every way")]
pub(crate) struct Saver<S> {
    storage: S,
    template: Save,
    /// The epoch of this run that the template's source was seen in.
    source_epoch: u32,
    /// What is stored at the start, to be stored once more as it is when a run ends cleanly before any read.
    resumed: Option<Save>,
    mode: SaveMode,
    quiet: Option<Duration>,
    /// The stored position as far as this run knows it.
    stored: Option<Mark>,
    in_flight: Option<Write>,
    /// Everything storable is wanted at once until this position is stored: pause, shutdown, drained.
    urgent: Option<u64>,
    frozen: bool,
    /// Once more the stored position, with the note that the run ended cleanly.
    clean: bool,
    /// The record holds a note of an event in hand.
    noted: bool,
    /// No event is in hand: the record shall say so.
    empties_hand: bool,
    /// With a start that could not, or was not to be, recorded: nothing is stored before an event is.
    recorded: bool,
    /// Quiet writes wait until the save policy has stored an event, for the same starts.
    quiet_allowed: bool,
    last_sent: Instant,
    /// When the last write was answered: what keeps a busy storage busy is not followed at once by more.
    last_answer: Option<Instant>,
    answered: Instant,
    wanted_since: Option<Instant>,
    retry_at: Option<Instant>,
    backoff: Backoff,
    quiet_failures: u32,
    last_error: Option<Reason>,
    repeats: Repeats,
    /// Written since the last answer and not answered for: the record may have them.
    unanswered: Vec<Mark>,
    /// How many writes of the handler's work are counted.
    taken_over: u64,
}

struct Write {
    mark: Mark,
    why: Why,
    clean: bool,
    empties_hand: bool,
    task: JoinHandle<Result<SaveOutcome, StorageError>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Wanted,
    Quiet,
    Clean,
    /// The position as it is stored, with a note of the event in hand by its number.
    Note(u64),
}

impl<S: CheckpointStorage> Saver<S> {
    pub(crate) fn new(
        storage: S,
        template: Save,
        mode: SaveMode,
        quiet: Option<Duration>,
        stored: Option<Record>,
    ) -> Self {
        let now = Instant::now();
        let recorded = stored.is_some();
        let noted = stored.as_ref().is_some_and(|record| record.in_hand.is_some());
        let resumed = stored.and_then(|record| as_stored(&template, record));
        Self {
            storage,
            template,
            source_epoch: 0,
            mode,
            quiet,
            stored: resumed.as_ref().map(|save| Mark { kind: save.kind, ..Mark::start(save.position.clone()) }),
            resumed,
            in_flight: None,
            urgent: None,
            frozen: false,
            clean: false,
            noted,
            empties_hand: false,
            recorded,
            quiet_allowed: recorded,
            last_sent: now,
            last_answer: None,
            answered: now,
            wanted_since: None,
            retry_at: None,
            backoff: Backoff::new(Duration::from_millis(100), Duration::from_secs(10)),
            quiet_failures: 0,
            last_error: None,
            repeats: Repeats::default(),
            unanswered: Vec::new(),
            taken_over: 0,
        }
    }

    pub(crate) fn stored(&self) -> Option<&Mark> {
        self.stored.as_ref()
    }

    /// The epoch of the positions it stores.
    pub(crate) fn epoch(&self) -> Epoch {
        self.template.epoch
    }

    /// When a save was last answered: the proof that the record is still the run's own.
    pub(crate) fn answered(&self) -> Instant {
        self.answered
    }

    pub(crate) fn last_error(&self) -> Option<&Reason> {
        self.last_error.as_ref()
    }

    pub(crate) fn is_writing(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Everything storable is wanted now, until the position with this number is stored. Answers whether that is news.
    pub(crate) fn hurry(&mut self, up_to: u64) -> bool {
        let is_stored = self.stored.as_ref().is_some_and(|stored| stored.seq >= up_to);
        if is_stored || self.urgent.is_some_and(|urgent| urgent >= up_to) {
            return false;
        }
        self.urgent = Some(up_to);
        self.retry_at = None;
        true
    }

    /// Nothing is written any more, but what is in flight goes on.
    pub(crate) fn freeze(&mut self) {
        self.frozen = true;
    }

    pub(crate) fn thaw(&mut self) {
        self.frozen = false;
        self.retry_at = None;
    }

    /// The run begins anew from `stored`, with another fence. No write is in flight.
    pub(crate) fn begin_anew(&mut self, ownership: &Ownership, stored: Option<Mark>) {
        self.template.ownership = ownership.clone();
        if let Some(resumed) = &mut self.resumed {
            resumed.ownership = ownership.clone();
        }
        self.stored = stored;
        (self.urgent, self.wanted_since, self.clean) = (None, None, false);
        self.answered = Instant::now();
        self.unanswered.clear();
        self.thaw();
    }

    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// The run rests or ends, and no event is in hand: a note that says otherwise has to go.
    pub(crate) fn empty_hand(&mut self) {
        self.empties_hand = self.noted;
    }

    /// The run ends with everything it delivered stored: the record shall say so.
    pub(crate) fn mark_clean(&mut self) {
        self.clean = true;
    }

    /// Sends the next write if its time has come. Answers when to ask again.
    pub(crate) fn send(&mut self, desk: &Desk, board: &Board) -> Option<Instant> {
        let view = desk.view();
        let now = Instant::now();
        if let Some(stored) = &view.stored_by_work {
            self.take_over(stored, desk, board);
        }
        if desk.take_save_request()
            && let Some(up_to) = self.outstanding(&view).map(|mark| mark.seq)
        {
            self.hurry(up_to);
        }
        if let (Some((number, _)), None) = (&view.to_note, &self.stored) {
            // With nothing stored there is nothing to note it beside.
            desk.noted(*number);
        }
        if self.awaits_flush(&view, now) {
            desk.want_flush();
        }
        let next = self.next(&view, now);
        if let Some((_, Why::Wanted, _)) = next {
            let since = *self.wanted_since.get_or_insert(now);
            if now >= since + PATIENCE {
                self.give_up_waiting(desk, board);
            }
        }
        let patience_ends = self.wanted_since.map(|since| since + PATIENCE).filter(|at| *at > now);
        if self.in_flight.is_some() {
            return patience_ends;
        }
        // A quiet position may come to be storable when its time has come, without anything else happening.
        let later = [patience_ends, self.quiet_at().filter(|at| *at > now)];
        let soonest = |at: Option<Instant>| later.into_iter().chain([at]).flatten().min();
        let (mark, why) = match next {
            Some((_, _, at)) if at > now => return soonest(Some(at)),
            Some((mark, why, _)) => (mark, why),
            None => return soonest(None),
        };
        desk.sending();
        let mut save = self.save(&mark, &view, desk.seen());
        save.keep_event(desk.last_event());
        if let (Why::Note(_), Some((_, in_hand))) = (why, &view.to_note) {
            (self.noted, self.empties_hand) = (true, false);
            save.hand = Hand::Holds(in_hand.clone());
        }
        let (storage, empties_hand) = (self.storage.clone(), save.hand == Hand::Empty);
        let task = tokio::spawn(async move { storage.save(&save).await });
        self.last_sent = now;
        self.in_flight = Some(Write { mark, why, clean: self.clean, empties_hand, task });
        patience_ends
    }

    fn give_up_waiting(&mut self, desk: &Desk, board: &Board) {
        desk.close_gate();
        let reason = self.last_error.get_or_insert_with(|| Reason::StorageUnavailable {
            message: format!("no answer for {} s", PATIENCE.as_secs()),
        });
        let reason = reason.clone();
        board.set(|conditions| conditions.storage = Some(reason));
    }

    /// Waits for the write in flight; without one, for ever.
    ///
    /// # Cancel safety
    /// The write goes on, and its outcome is there at the next call.
    pub(crate) async fn written(&mut self) -> Result<SaveOutcome, StorageError> {
        match &mut self.in_flight {
            None => std::future::pending().await,
            Some(write) => (&mut write.task)
                .await
                .unwrap_or_else(|error| Err(StorageError::Unavailable { message: format!("the save ended: {error}") })),
        }
    }
}

/// Why a run cannot go on saving.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Lost {
    Stop(Reason),
    Stall(Reason),
}
