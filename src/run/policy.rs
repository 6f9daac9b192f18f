//! When a storable position is stored, and what may be stored at all. Pure; called by the desk alone.

use std::fmt;
use std::sync::Arc;

use crate::delivery::Delivery;
use crate::run::progress::Mark;

/// When a storable position is stored. Default: every event.
#[derive(Clone)]
#[non_exhaustive]
pub enum SavePolicy {
    /// After every n settled events. It says how often to write, never how far is safe: quiet saves, pause, shutdown
    /// and `drained` store every settled event.
    Every(u32),
    /// When the predicate says so, asked once for each settled event. No write of any kind passes an event for which
    /// it said no, until it says yes for a later one.
    When(Arc<dyn Fn(&Delivery) -> bool + Send + Sync>),
}

impl SavePolicy {
    /// What the predicate says of a settled event; without one there is nothing to decline.
    pub(crate) fn accepts(&self, delivery: &Delivery) -> bool {
        match self {
            Self::Every(_) => true,
            Self::When(accepts) => accepts(delivery),
        }
    }
}

impl fmt::Debug for SavePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Every(1) => f.write_str("every event"),
            Self::Every(n) => write!(f, "every {n} events"),
            Self::When(_) => f.write_str("when a predicate says so"),
        }
    }
}

/// How a wanted save and the next event stand to each other. Default: [`WriteBehind`](Self::WriteBehind).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SaveMode {
    /// One write in flight, at least 10 ms apart, newer positions replacing older ones meanwhile; the next event does
    /// not wait. After a kill, the events of the last write's time come again: usually under 20 ms of work.
    #[default]
    WriteBehind,
    /// The next event waits until the save is answered: at most the event in hand comes again after a kill, at about
    /// a thousand events a second.
    WriteThrough,
}

/// The save policy at work.
#[derive(Debug)]
pub(crate) struct Policy {
    save: SavePolicy,
    /// Whether positions of quiet reads may be stored.
    saves_quiet: bool,
    /// An event was declined and none accepted since.
    held: bool,
    storable: Option<Mark>,
    requested: Option<Mark>,
    /// Events up to here need not be counted: a save covers them, or was asked for.
    counted: u64,
}

impl Policy {
    pub(crate) fn new(save: SavePolicy, saves_quiet: bool, start: Option<Mark>) -> Self {
        Self { save, saves_quiet, held: false, storable: start, requested: None, counted: 0 }
    }

    /// An event was settled and the safe position is `safe` now; `accepted` is what the predicate said of it. Answers
    /// whether a save is asked for.
    pub(crate) fn settled(&mut self, safe: &Mark, accepted: bool) -> bool {
        let wanted = match &self.save {
            SavePolicy::Every(n) => safe.events.saturating_sub(self.counted) >= u64::from(*n),
            SavePolicy::When(_) => {
                self.held = !accepted;
                accepted
            }
        };
        if !self.held {
            self.storable = Some(safe.clone());
        }
        if wanted {
            self.counted = safe.events;
            self.requested = Some(safe.clone());
        }
        wanted
    }

    /// The safe position moved by a quiet read.
    pub(crate) fn quiet(&mut self, safe: &Mark) {
        if self.saves_quiet && !self.held {
            self.storable = Some(safe.clone());
        }
    }

    /// The safe position is another one by decree: it is to be stored, and nothing is held back before it.
    pub(crate) fn jump(&mut self, safe: &Mark) {
        self.held = false;
        self.counted = safe.events;
        (self.storable, self.requested) = (Some(safe.clone()), Some(safe.clone()));
    }

    /// A write that covers this many events has succeeded: the count starts again behind it.
    pub(crate) fn saved(&mut self, events: u64) {
        self.counted = self.counted.max(events);
    }

    /// The furthest position that may be stored.
    pub(crate) fn storable(&self) -> Option<&Mark> {
        self.storable.as_ref()
    }

    /// The newest position a save was asked for.
    pub(crate) fn requested(&self) -> Option<&Mark> {
        self.requested.as_ref()
    }
}
