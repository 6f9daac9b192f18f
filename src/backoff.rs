//! Waiting longer after each failure. A value: it tells how long, the caller waits.

use std::fmt;
use std::time::Duration;

/// Exponential backoff with full jitter: a random wait between zero and a bound that doubles up to a cap.
///
/// ```
/// use mongosub::Backoff;
/// use std::time::Duration;
///
/// let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
/// assert!(backoff.next_wait() <= Duration::from_millis(100));
/// assert_eq!(backoff.bound(), Duration::from_millis(200));
/// backoff.reset();
/// assert_eq!(backoff.bound(), Duration::from_millis(100));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    cap: Duration,
    failures: u32,
}

impl Backoff {
    /// A backoff whose bound is `first` after the first failure and at most `cap`.
    pub const fn new(first: Duration, cap: Duration) -> Self {
        Self { first, cap, failures: 0 }
    }

    /// The bound after the failures so far: the longest the next wait can be.
    pub fn bound(&self) -> Duration {
        self.first.saturating_mul(1u32.checked_shl(self.failures).unwrap_or(u32::MAX)).min(self.cap)
    }

    /// Counts one failure and says how long to wait now.
    pub fn next_wait(&mut self) -> Duration {
        let bound = self.bound();
        self.failures = self.failures.saturating_add(1);
        bound.mul_f64(fastrand::f64())
    }

    /// How many failures in a row were counted.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Begins anew after progress.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

impl fmt::Debug for Backoff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} to {:?}", self.first, self.cap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_doubles_to_its_cap_and_a_reset_begins_anew() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
        let mut bounds = Vec::new();
        for _ in 0..60 {
            let bound = backoff.bound();
            assert!(backoff.next_wait() <= bound);
            bounds.push(bound.as_millis());
        }
        assert_eq!(bounds[..8], [100, 200, 400, 800, 1600, 3200, 6400, 10_000]);
        assert!(bounds[8..].iter().all(|bound| *bound == 10_000));
        backoff.reset();
        assert_eq!(backoff.bound(), Duration::from_millis(100));
    }
}
