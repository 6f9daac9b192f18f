//! How many events a reply should hold, learned from how large they are. A value: the reader reopens, this only says so.

/// How many bytes a reply should have.
const TARGET: usize = 1 << 20;
const FIRST: u32 = 1000;
/// How many events the reply to an open holds at most: enough to see how large they are.
const SAMPLE: u32 = 100;
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

    /// How many events the reply to an open may hold. It comes before anything is known of their size, and a thousand
    /// large ones would be held in memory at once.
    pub(super) fn sample(&self) -> u32 {
        self.events.min(SAMPLE)
    }

    /// Looks at the reply to an open, and takes another size when full replies would be more than twice too large.
    /// `true` when it did. A few events say too little.
    pub(super) fn observe_sample(&mut self, events: usize, bytes: usize) -> bool {
        let mean = bytes / events.max(1);
        events >= LEAST as usize && self.shrink(mean.saturating_mul(self.events as usize), mean)
    }

    /// Looks at one reply, and takes another size when this one is off by more than twice. `true` when it did.
    ///
    /// Only a full reply says that the size is too small (twice in a row: it costs a reopen), only one of more than
    /// twice the target that it is too large.
    pub(super) fn observe(&mut self, events: usize, bytes: usize) -> bool {
        let mean = bytes / events.max(1);
        if self.shrink(bytes, mean) {
            return true;
        }
        let too_small = events >= self.events as usize && better(mean) > self.events.saturating_mul(2);
        self.small = if too_small { self.small + 1 } else { 0 };
        if self.small == 2 {
            *self = Self { events: better(mean), small: 0 };
        }
        too_small && self.small == 0
    }

    /// Events of which even the fewest fill a reply stay: the size would change nothing, and a reopen reads the last event
    /// once more.
    fn shrink(&mut self, bytes: usize, mean: usize) -> bool {
        let better = better(mean);
        let helps = mean.saturating_mul(better as usize) < SERVERS_OWN;
        let too_large = bytes > 2 * TARGET && better < self.events / 2 && helps;
        if too_large {
            *self = Self { events: better, small: 0 };
        }
        too_large
    }
}

/// The size for events of so many bytes.
fn better(mean: usize) -> u32 {
    u32::try_from(TARGET / mean.max(1)).unwrap_or(MOST).clamp(LEAST, MOST)
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

    #[test]
    fn the_reply_to_an_open_is_a_sample_and_large_events_in_it_make_smaller_replies() {
        let mut size = ReplySize::default();
        assert_eq!(size.sample(), 100);
        assert!(!size.observe_sample(100, 110_000));
        assert!(!size.observe_sample(3, 300_000), "a few say too little");
        assert!(size.observe_sample(100, 1_050_000));
        assert_eq!((size.events(), size.sample()), (99, 99));
        assert!(!size.observe_sample(100, 1_050_000));
        assert!(size.observe_sample(50, 5_000_000));
        assert_eq!((size.events(), size.sample()), (16, 16));
    }
}
