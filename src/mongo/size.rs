//! How many events a reply should hold, learned from how large they are. A value: the reader reopens, this only says so.

/// How many bytes a reply should have.
const TARGET: usize = 1_500_000;
const FIRST: u32 = 1000;
const LEAST: u32 = 16;
const MOST: u32 = 4000;
/// The server ends a reply here by itself, whatever was asked for.
const SERVERS_OWN: usize = 16 << 20;

/// The batch size of a cursor, which is fixed for its life, and when another one would be better.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReplySize {
    events: u32,
    /// How many full replies in a row were much too small.
    small: u32,
}

impl Default for ReplySize {
    fn default() -> Self {
        Self { events: FIRST, small: 0 }
    }
}

impl ReplySize {
    pub(super) fn events(&self) -> u32 {
        self.events
    }

    /// Looks at one reply, and takes another size when this one is off by more than twice. `true` when it did.
    ///
    /// Only a full reply says that the size is too small (twice in a row: it costs a reopen), only one of more than
    /// twice the target that it is too large. Events of which even the fewest fill a reply stay: the size would change
    /// nothing, and a reopen reads the last event once more.
    pub(super) fn observe(&mut self, events: usize, bytes: usize) -> bool {
        let mean = bytes / events.max(1);
        let better = u32::try_from(TARGET / mean.max(1)).unwrap_or(MOST).clamp(LEAST, MOST);
        let full = events >= self.events as usize;
        let too_small = full && better > self.events.saturating_mul(2);
        let helps = mean.saturating_mul(better as usize) < SERVERS_OWN;
        let too_large = bytes > 2 * TARGET && better < self.events / 2 && helps;
        self.small = if too_small { self.small + 1 } else { 0 };
        if too_large || self.small == 2 {
            *self = Self { events: better, small: 0 };
            return true;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_1_kb_keep_the_first_size() {
        let mut size = ReplySize::default();
        for events in [1000, 1, 0, 1000, 1000, 1000] {
            assert!(!size.observe(events, events * 1100));
        }
        assert_eq!(size.events(), 1000);
    }

    #[test]
    fn small_events_get_larger_replies_once_two_in_a_row_are_full() {
        let mut size = ReplySize::default();
        assert!(!size.observe(1000, 250_000));
        assert!(!size.observe(10, 2500));
        assert!(!size.observe(1000, 250_000));
        assert!(size.observe(1000, 250_000));
        assert_eq!(size.events(), 4000);
        assert!(!size.observe(4000, 1_000_000));
    }

    #[test]
    fn events_that_fill_a_reply_in_any_case_keep_the_size() {
        let mut size = ReplySize::default();
        for _ in 0..3 {
            assert!(!size.observe(1, 15_000_000));
        }
        assert_eq!(size.events(), 1000);
        assert!(size.observe(15, 15_009_000), "16 events of 1 MB do not fill it");
        assert_eq!(size.events(), 16);
    }

    #[test]
    fn large_events_get_smaller_replies_at_once() {
        let mut size = ReplySize::default();
        assert!(size.observe(160, 16_000_000));
        assert_eq!(size.events(), 16);
        assert!(!size.observe(16, 1_600_000));
        assert!(!size.observe(1, 16_000_000));
        assert_eq!(size.events(), 16);
    }
}
