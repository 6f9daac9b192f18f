//! Which events the handler may have seen before. A value; the deliver task asks it for each event.

use crate::checkpoint::Checkpoint;
use crate::model::SourceState;
use crate::run::waiters::has_reached;

/// What may have been handled before this delivery of it, by an earlier run or by a call that was dropped.
#[derive(Debug, Clone, Default)]
pub(crate) struct MaybeSeen {
    /// The source's head when the run started, if the run before it did not end cleanly.
    head: Option<Checkpoint>,
    /// The event handed out by this run and given up unsettled.
    given_up: Option<Checkpoint>,
}

impl MaybeSeen {
    pub(crate) fn up_to(head: Option<Checkpoint>) -> Self {
        Self { head, given_up: None }
    }

    /// An event was handed out and given up: it comes again, and with it everything up to one given up further on.
    pub(crate) fn give_up(&mut self, position: Checkpoint) {
        if self.given_up.as_ref().is_none_or(|before| position.is_beyond(before)) {
            self.given_up = Some(position);
        }
    }

    /// Whether the event at this position may have been seen.
    pub(crate) fn covers(&self, position: &Checkpoint) -> bool {
        let up_to_head = self.head.as_ref().is_some_and(|head| !is_past(position, head));
        up_to_head || self.given_up.as_ref().is_some_and(|given_up| !position.is_beyond(given_up))
    }

    /// Everything before the event at this position is settled: what lies before it is forgotten. What was only read may
    /// come again.
    pub(crate) fn forget_before(&mut self, position: &Checkpoint) {
        self.head.take_if(|head| is_past(position, head));
        self.given_up.take_if(|given_up| position.is_beyond(given_up));
    }

    /// Whether everything that may have been seen lies at or before the safe position: nothing is left to repeat.
    pub(crate) fn is_behind(&self, safe: Option<&Checkpoint>, source: &SourceState) -> bool {
        let reached = |head: &Checkpoint| safe.is_some_and(|safe| has_reached(safe, head, source));
        let settled = |given_up: &Checkpoint| safe.is_some_and(|safe| !given_up.is_beyond(safe));
        self.head.as_ref().is_none_or(reached) && self.given_up.as_ref().is_none_or(settled)
    }
}

fn is_past(position: &Checkpoint, head: &Checkpoint) -> bool {
    match head {
        // Events of the head's own time lie beyond the time itself.
        Checkpoint::Time(head) => position.cluster_time().is_some_and(|at| at > *head),
        head => position.is_beyond(head),
    }
}

#[cfg(test)]
mod tests {
    use bson::Timestamp;

    use super::*;
    use crate::checkpoint::Token;

    fn time(increment: u32) -> Checkpoint {
        Checkpoint::Time(Timestamp { time: 1, increment })
    }

    fn token(increment: u32, rest: &str) -> Checkpoint {
        Token::new(format!("8200000001{increment:08X}{rest}")).unwrap().into()
    }

    #[test]
    fn everything_of_the_heads_own_time_is_covered_and_nothing_behind_it() {
        let mut seen = MaybeSeen::up_to(Some(time(5)));
        seen.give_up(token(5, "AA"));
        assert!(seen.covers(&token(4, "AA")));
        assert!(seen.covers(&token(5, "AA")));
        assert!(seen.covers(&token(5, "BB")), "the head still covers it");
        assert!(!seen.covers(&token(6, "AA")));
        assert!(seen.covers(&token(4, "AA")), "what was read and not settled comes again");
        seen.forget_before(&token(6, "AA"));
        assert!(!seen.covers(&token(4, "AA")));
        seen.give_up(token(7, "AA"));
        assert!(seen.covers(&token(7, "AA")));
        assert!(!seen.covers(&token(7, "BB")));
        seen.forget_before(&token(7, "AA"));
        assert!(seen.covers(&token(7, "AA")));
        seen.forget_before(&token(7, "BB"));
        assert!(!seen.covers(&token(7, "AA")));
    }

    #[test]
    fn what_was_given_up_further_on_stays_covered() {
        let mut seen = MaybeSeen::default();
        seen.give_up(token(5, "AA"));
        seen.give_up(token(2, "AA"));
        assert!(seen.covers(&token(3, "AA")) && seen.covers(&token(5, "AA")));
        assert!(!seen.covers(&token(6, "AA")));
    }

    #[test]
    fn nothing_is_left_only_when_the_heads_own_time_is_known_to_be_over() {
        let seen = MaybeSeen::up_to(Some(time(5)));
        let mut source = SourceState::default();
        assert!(!seen.is_behind(None, &source));
        assert!(!seen.is_behind(Some(&token(5, "AA")), &source));
        source.end_at = Some(token(5, "BB"));
        assert!(!seen.is_behind(Some(&token(5, "AA")), &source));
        assert!(seen.is_behind(Some(&token(5, "BB")), &source));
        assert!(seen.is_behind(Some(&token(6, "AA")), &SourceState::default()));
        assert!(MaybeSeen::default().is_behind(None, &source));
    }
}
