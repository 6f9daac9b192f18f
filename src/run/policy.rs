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

/// The save policy at work: how far what was handled may be stored, and when that is asked for.
///
/// A position is handled, then durable (under a hold: when it is declared), then flushed (with a barrier: when the handler
/// has answered). Only what is all three may be stored.
#[derive(Debug)]
pub(crate) struct Policy {
    save: SavePolicy,
    /// Whether positions of quiet reads may be stored.
    saves_quiet: bool,
    /// An event was declined and none accepted since.
    declined: bool,
    /// How far was handled, as far as such positions are stored at all.
    handled: Option<Mark>,
    /// How far was handled and accepted.
    accepted: Option<Mark>,
    hold: Option<Held>,
    /// With a barrier: how far the handler has flushed.
    flushed: Option<Flushed>,
    requested: Option<Mark>,
    /// Events up to here need not be counted: a save covers them, or was asked for.
    counted: u64,
}

/// What was declared under a hold.
#[derive(Debug)]
struct Held {
    durable: Option<Mark>,
}

#[derive(Debug)]
struct Flushed {
    up_to: Option<Mark>,
}

impl Policy {
    pub(crate) fn new(save: SavePolicy, saves_quiet: bool, start: Option<Mark>) -> Self {
        Self {
            save,
            saves_quiet,
            declined: false,
            counted: start.as_ref().map_or(0, |mark| mark.events),
            handled: start.clone(),
            accepted: start,
            hold: None,
            flushed: None,
            requested: None,
        }
    }

    /// From now on only what is declared durable may be stored.
    pub(crate) fn hold(&mut self) {
        self.hold = Some(Held { durable: self.handled.clone() });
    }

    /// From now on only what the handler has flushed may be stored.
    pub(crate) fn put_up_barrier(&mut self) {
        self.flushed = Some(Flushed { up_to: self.storable().cloned() });
    }

    /// An event was settled and the safe position is `safe` now; `accepted` is what the predicate said of it. Answers
    /// whether a save is asked for.
    pub(crate) fn settled(&mut self, safe: &Mark, accepted: bool) -> bool {
        self.handled = Some(safe.clone());
        self.declined = !accepted;
        if accepted {
            self.accepted = Some(safe.clone());
        }
        match self.hold {
            None => self.ask(),
            Some(_) => false,
        }
    }

    /// The safe position moved by a quiet read.
    pub(crate) fn quiet(&mut self, safe: &Mark) {
        if self.saves_quiet {
            self.handled = Some(safe.clone());
            if !self.declined {
                self.accepted = Some(safe.clone());
            }
        }
    }

    /// The safe position is another one by decree: it is to be stored, and nothing is held back before it.
    pub(crate) fn jump(&mut self, safe: &Mark) {
        let safe = Some(safe);
        self.declined = false;
        self.counted = safe.map_or(0, |safe| safe.events);
        (self.handled, self.accepted, self.requested) = (safe.cloned(), safe.cloned(), safe.cloned());
        if let Some(held) = &mut self.hold {
            held.durable = safe.cloned();
        }
        if let Some(flushed) = &mut self.flushed {
            flushed.up_to = safe.cloned();
        }
    }

    /// Everything up to the mark was declared durable. Answers whether a save is asked for.
    pub(crate) fn durable(&mut self, mark: &Mark) -> bool {
        let Some(Held { durable }) = &mut self.hold else { return false };
        if durable.as_ref().is_some_and(|durable| durable.seq >= mark.seq) {
            return false;
        }
        *durable = Some(mark.clone());
        self.ask()
    }

    /// Ends the hold. Answers whether a save is asked for.
    pub(crate) fn resume_auto(&mut self) -> bool {
        self.hold.take().is_some() && self.ask()
    }

    /// Whether what may be stored by now has to be stored, by the policy.
    fn ask(&mut self) -> bool {
        let Some(storable) = self.storable() else { return false };
        let (seq, events) = (storable.seq, storable.events);
        let wanted = match &self.save {
            SavePolicy::Every(n) => events.saturating_sub(self.counted) >= u64::from(*n),
            // What may be stored is what the predicate has accepted.
            SavePolicy::When(_) => {
                let is_new = self.requested.as_ref().is_none_or(|asked| asked.seq < seq);
                is_new && (self.hold.is_some() || !self.declined)
            }
        };
        if wanted {
            self.counted = events;
            if self.flushed.is_none() {
                self.requested = self.storable().cloned();
            }
        }
        wanted
    }

    /// The handler has flushed everything up to the mark, and a save of it is asked for unless it is not `wanted`.
    pub(crate) fn flushed(&mut self, mark: &Mark, wanted: bool) {
        let Some(Flushed { up_to }) = &mut self.flushed else { return };
        *up_to = Some(mark.clone());
        if wanted {
            self.requested = Some(mark.clone());
        }
    }

    /// What was not flushed is lost with its handler.
    pub(crate) fn lose_unflushed(&mut self) {
        if let Some(Flushed { up_to }) = &self.flushed {
            self.accepted.clone_from(up_to);
        }
    }

    /// The run ends, and what is stored last is this mark, which lies at or before what may be stored.
    pub(crate) fn released(&mut self, mark: Option<&Mark>) {
        self.accepted = mark.cloned();
        self.requested = mark.cloned();
        self.flushed = Some(Flushed { up_to: mark.cloned() });
    }

    /// A write that covers this many events has succeeded: the count starts again behind it.
    pub(crate) fn saved(&mut self, events: u64) {
        self.counted = self.counted.max(events);
    }

    /// How far was handled, for a mark.
    pub(crate) fn handled(&self) -> Option<&Mark> {
        self.handled.as_ref()
    }

    /// The furthest position that may be stored, once the handler has flushed it.
    pub(crate) fn storable(&self) -> Option<&Mark> {
        match &self.hold {
            None => self.accepted.as_ref(),
            Some(Held { durable }) => {
                let both = durable.as_ref().zip(self.accepted.as_ref());
                both.map(|(durable, accepted)| if durable.seq < accepted.seq { durable } else { accepted })
            }
        }
    }

    /// The furthest position that may be stored at once.
    pub(crate) fn flushed_up_to(&self) -> Option<&Mark> {
        match &self.flushed {
            None => self.storable(),
            Some(Flushed { up_to }) => up_to.as_ref(),
        }
    }

    /// Whether what the handler does with events has to be waited for.
    pub(crate) fn has_barrier(&self) -> bool {
        self.flushed.is_some()
    }

    /// Whether only what is declared durable may be stored.
    pub(crate) fn is_held(&self) -> bool {
        self.hold.is_some()
    }

    /// How far was declared durable, under a hold.
    pub(crate) fn declared(&self) -> Option<&Mark> {
        self.hold.as_ref().and_then(|held| held.durable.as_ref())
    }

    /// The newest position a save was asked for.
    pub(crate) fn requested(&self) -> Option<&Mark> {
        self.requested.as_ref()
    }
}
