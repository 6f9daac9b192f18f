//! What a saver has to write next, why, and from when on. It reads what the saver knows and changes nothing.

use tokio::time::Instant;

use super::{SPACING, Saver, Why};
use crate::run::desk::View;
use crate::run::policy::SaveMode;
use crate::run::progress::Mark;

impl<S> Saver<S> {
    /// The position that is still to be stored for `view`, as far as it may be.
    pub(crate) fn outstanding<'v>(&self, view: &'v View) -> Option<&'v Mark> {
        view.storable.as_ref().filter(|mark| self.is_ahead(mark) && (self.recorded || mark.events > 0))
    }

    /// What of it can be written at once: the handler has flushed it.
    pub(super) fn writable<'v>(&self, view: &'v View) -> Option<&'v Mark> {
        view.flushed().filter(|mark| self.is_ahead(mark) && (self.recorded || mark.events > 0))
    }

    /// Whether the handler is to flush first: more may be stored, and its time has come.
    pub(super) fn awaits_flush(&self, view: &View, now: Instant) -> bool {
        let seq = |mark: Option<&Mark>| mark.map_or(0, |mark| mark.seq);
        let unflushed = seq(self.outstanding(view)) > seq(view.flushed());
        unflushed && !self.frozen && (self.urgent.is_some() || self.quiet_at().is_some_and(|at| at <= now))
    }

    /// Whether a write is due as soon as the storable position moves, or has been flushed.
    pub(crate) fn awaits_movement(&self) -> bool {
        !self.frozen && (self.urgent.is_some() || self.quiet_at().is_some_and(|at| at <= Instant::now()))
    }

    /// Whether nothing is left to write of what was asked for.
    pub(crate) fn is_done(&self, view: &View) -> bool {
        self.in_flight.is_none() && (self.frozen || self.has_no_more(view))
    }

    pub(super) fn has_no_more(&self, view: &View) -> bool {
        self.outstanding(view).is_none() && self.last_word(view).is_none()
    }

    /// The stored position, when the record is to say more of it: that the run ended cleanly, that no event is in hand.
    fn last_word(&self, view: &View) -> Option<&Mark> {
        let says_more = self.clean || self.empties_hand && view.in_hand.is_none();
        self.stored.as_ref().filter(|_| says_more)
    }

    pub(super) fn is_ahead(&self, mark: &Mark) -> bool {
        self.stored.as_ref().is_none_or(|stored| mark.seq > stored.seq)
    }

    pub(super) fn quiet_at(&self) -> Option<Instant> {
        self.quiet.filter(|_| self.quiet_allowed).map(|interval| self.last_sent + interval)
    }

    /// What to write next, why, and from when on; one moment serves the whole decision.
    pub(super) fn next(&self, view: &View, now: Instant) -> Option<(Mark, Why, Instant)> {
        if self.frozen {
            return None;
        }
        if let (Some((number, _)), Some(stored)) = (&view.to_note, &self.stored) {
            return Some((stored.clone(), Why::Note(*number), self.retry_at.unwrap_or(now)));
        }
        let storable = self.writable(view);
        let requested = view.requested.as_ref().filter(|mark| self.is_ahead(mark));
        let retry_at = self.retry_at.unwrap_or(now);
        if self.urgent.is_some()
            && let Some(mark) = storable
        {
            return Some((mark.clone(), Why::Wanted, retry_at));
        }
        let quiet = storable.and_then(|mark| Some((mark, self.quiet_at()?)));
        if let Some(mark) = requested {
            let spaced = match (self.mode, self.last_answer) {
                (SaveMode::WriteBehind, Some(last)) => last + SPACING,
                _ => now,
            };
            // A quiet position that is due replaces the event's, and the write stays wanted.
            let mark = quiet.filter(|(_, at)| *at <= now).map_or(mark, |(mark, _)| mark);
            return Some((mark.clone(), Why::Wanted, spaced.max(retry_at)));
        }
        if let Some((mark, at)) = quiet {
            return Some((mark.clone(), Why::Quiet, at));
        }
        Some((self.last_word(view)?.clone(), Why::Clean, retry_at))
    }
}
