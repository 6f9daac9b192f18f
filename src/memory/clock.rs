//! The clock of the storages in memory: it begins at a fixed date and goes with tokio's, so that a test with a paused
//! clock sees the same times in every run.

use tokio::time::Instant;

/// What it shows when it is made: 2026-01-01T00:00:00Z.
const BEGINNING: i64 = 1_767_225_600_000;

#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    begun: Instant,
}

impl Default for Clock {
    fn default() -> Self {
        Self { begun: Instant::now() }
    }
}

impl Clock {
    /// In milliseconds since 1970.
    pub(super) fn now(&self) -> i64 {
        let passed = Instant::now().saturating_duration_since(self.begun).as_millis();
        BEGINNING.saturating_add(i64::try_from(passed).unwrap_or(i64::MAX))
    }
}
