//! The failure policy: how often a failed event is tried again, how long the waits are, and what follows. A value; it is
//! carried out by `run/failing.rs`.

use std::fmt;
use std::time::Duration;

use crate::backoff::Backoff;

/// What follows when the handler fails for an event. Default: it is tried again for ever, after 100 ms, doubling to 30 s,
/// with full jitter; everything behind it waits as long.
///
/// A handler can decide for one event itself: [`Failure`](crate::Failure) has the verdicts.
///
/// ```
/// use mongosub::{OnFailure, Then};
/// use std::time::Duration;
///
/// let policy = OnFailure::retry(3).then(Then::DeadLetter);
/// let patient = policy.backoff(Duration::from_secs(1), Duration::from_secs(60));
/// assert_eq!(format!("{patient:?}"), "retry 3 times after 1s to 60s, then DeadLetter");
/// assert_eq!(format!("{:?}", OnFailure::default()), "retry for ever after 100ms to 30s");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct OnFailure {
    /// None is for ever.
    cap: Option<(u32, Then)>,
    first: Duration,
    longest: Duration,
}

/// What follows when the retries of an event are used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Then {
    /// The subscription stops with `Stopped(HandlerFailed)`. The event stays unsettled and comes again at the next start.
    Stop,
    /// The event is put into the dead letter storage and settled; later events of the same document are parked behind it.
    /// Nothing is lost: `retry` hands them to a handler, in order. It needs
    /// [`dead_letters`](crate::DurableSubscriptions::dead_letters).
    DeadLetter,
    /// The event is settled and never comes again: its change is lost to the handler. Counted, and logged at warn with
    /// position, key and error.
    Skip,
}

/// So many retries; [`then`](Self::then) says what follows.
#[derive(Debug, Clone, Copy)]
#[must_use = "say what follows: `.then(Then::Stop)`"]
pub struct Retries(u32);

impl Retries {
    /// What follows when the last of them has failed.
    pub fn then(self, then: Then) -> OnFailure {
        OnFailure { cap: Some((self.0, then)), ..OnFailure::default() }
    }
}

impl OnFailure {
    /// Tries again until it succeeds. That is the default.
    pub fn retry_forever() -> Self {
        Self::default()
    }

    /// `n` retries *after* the first attempt: n + 1 attempts in all; 0 is none. They are counted by the run, through pauses,
    /// stalls and new handlers; a start begins at the first attempt again.
    ///
    /// Of a batch the event behind the settled part has failed. Before the policy takes it away it is tried once alone,
    /// in a call of its own, so that the failure of a whole batch is never put down to an innocent first event.
    pub fn retry(n: u32) -> Retries {
        Retries(n)
    }

    /// The first and the longest wait between attempts; it doubles, with full jitter. Default: 100 ms and 30 s.
    #[must_use]
    pub fn backoff(mut self, first: Duration, longest: Duration) -> Self {
        (self.first, self.longest) = (first, longest);
        self
    }

    /// How many retries there are, and what follows them; none is for ever.
    pub fn cap(&self) -> Option<(u32, Then)> {
        self.cap
    }

    pub(crate) fn new_backoff(&self) -> Backoff {
        Backoff::new(self.first, self.longest)
    }

    /// No wait is longer than this.
    pub(crate) fn at_most(mut self, longest: Duration) -> Self {
        (self.first, self.longest) = (self.first.min(longest), self.longest.min(longest));
        self
    }

    /// What is wrong with it by itself.
    pub(crate) fn wrong(&self) -> Option<&'static str> {
        (self.first.is_zero() || self.longest < self.first)
            .then_some("the first wait of the backoff must be above 0 s and not above the longest")
    }
}

impl Default for OnFailure {
    fn default() -> Self {
        Self { cap: None, first: Duration::from_millis(100), longest: Duration::from_secs(30) }
    }
}

impl fmt::Debug for OnFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cap, first, longest } = self;
        match cap {
            None => write!(f, "retry for ever after {first:?} to {longest:?}"),
            Some((n, then)) => write!(f, "retry {n} times after {first:?} to {longest:?}, then {then:?}"),
        }
    }
}
