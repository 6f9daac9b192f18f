//! Which of many equal failures to log: the first, then every tenth, and at least one a minute. Pure but for the clock.

use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug, Default)]
pub(crate) struct Repeats {
    failures: u32,
    logged: Option<Instant>,
}

impl Repeats {
    /// Counts one failure and says whether to log it.
    pub(crate) fn is_due(&mut self) -> bool {
        self.failures = self.failures.saturating_add(1);
        let now = Instant::now();
        let due = self.failures.is_multiple_of(10) || self.logged.is_none_or(|at| now - at >= Duration::from_secs(60));
        if due {
            self.logged = Some(now);
        }
        due
    }

    pub(crate) fn count(&self) -> u32 {
        self.failures
    }

    /// It went well: the next failure is a first one again.
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_every_tenth_and_one_a_minute() {
        let mut repeats = Repeats::default();
        let due: Vec<u32> = (1..=30).filter(|_| repeats.is_due()).collect();
        assert_eq!(due, [1, 10, 20, 30]);
        tokio::time::advance(Duration::from_secs(61)).await;
        assert!(repeats.is_due());
        assert!(!repeats.is_due());
        repeats.reset();
        assert!(repeats.is_due());
    }
}
