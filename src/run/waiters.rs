//! Who waits for a place to be reached: `drained`, `caught_up`, `resume`. Looked at whenever something has moved.

use crate::checkpoint::Checkpoint;
use crate::error::SubscriptionError;
use crate::ids::SubscriptionId;
use crate::model::SourceState;
use crate::reason::Reason;
use crate::run::desk::View;
use crate::run::durable::Reply;
use crate::run::progress::Mark;

pub(crate) struct Waiters {
    id: SubscriptionId,
    drained: Vec<Drained>,
    caught_up: Vec<(Checkpoint, Reply<()>)>,
    resumed: Vec<Reply<()>>,
}

struct Drained {
    /// The last position read when it was asked.
    target: Target,
    /// Once that is settled: the position to be stored, which later ones do not move on.
    wanted: Option<u64>,
    reply: Reply<Option<Checkpoint>>,
}

impl Waiters {
    pub(crate) fn new(id: SubscriptionId) -> Self {
        Self { id, drained: Vec::new(), caught_up: Vec::new(), resumed: Vec::new() }
    }

    /// Waits until everything read up to the number is settled, and stored as far as it may be.
    pub(crate) fn drained(&mut self, last_read: u64, reply: Reply<Option<Checkpoint>>) {
        self.drained.push(Drained { target: Target::Read(last_read), wanted: None, reply });
    }

    /// The run begins anew behind what was read: those who wait for a place in it wait for its last position.
    pub(crate) fn begin_anew(&mut self, read: Option<&Checkpoint>) {
        for waiter in &mut self.drained {
            waiter.wanted = None;
            waiter.target = match (&waiter.target, read) {
                (Target::Read(_), Some(read)) => Target::Position(read.clone()),
                (target, _) => target.clone(),
            };
        }
    }

    /// Waits until the safe position has reached the head.
    pub(crate) fn caught_up(&mut self, head: Checkpoint, reply: Reply<()>) {
        self.caught_up.push((head, reply));
    }

    pub(crate) fn resumed(&mut self, reply: Reply<()>) {
        self.resumed.push(reply);
    }

    /// The cursor is open.
    pub(crate) fn opened(&mut self) {
        for reply in self.resumed.drain(..) {
            // Who waited may have gone; then nobody needs the answer. The same holds for every reply below.
            let _ = reply.send(Ok(()));
        }
    }

    /// Whether anyone waits for something to move.
    pub(crate) fn any(&self) -> bool {
        !self.drained.is_empty() || !self.caught_up.is_empty()
    }

    /// The position that is to be stored for those whose reads are all settled, by its number.
    pub(crate) fn wanted(&mut self, view: &View, outstanding: Option<&Mark>) -> Option<u64> {
        for waiter in &mut self.drained {
            if waiter.wanted.is_none() && waiter.target.is_settled(view) {
                waiter.wanted = Some(outstanding.map_or(0, |mark| mark.seq));
            }
        }
        self.drained.iter().filter_map(|waiter| waiter.wanted).max().filter(|wanted| *wanted > 0)
    }

    /// Answers those whose place is reached.
    pub(crate) fn check(&mut self, view: &View, stored: Option<&Mark>, source: &SourceState) {
        let stored_seq = stored.map_or(0, |mark| mark.seq);
        for waiter in std::mem::take(&mut self.drained) {
            if waiter.wanted.is_some_and(|wanted| stored_seq >= wanted) {
                let _ = waiter.reply.send(Ok(stored.map(|mark| mark.position.clone())));
            } else if !waiter.reply.is_closed() {
                self.drained.push(waiter);
            }
        }
        for (head, reply) in std::mem::take(&mut self.caught_up) {
            if view.safe.as_ref().is_some_and(|safe| has_reached(&safe.position, &head, source)) {
                let _ = reply.send(Ok(()));
            } else if !reply.is_closed() {
                self.caught_up.push((head, reply));
            }
        }
    }

    /// The run has stalled or stopped: all of them end with its reason.
    pub(crate) fn end(&mut self, reason: &Reason) {
        let error = SubscriptionError::Ended { id: self.id.clone(), reason: reason.clone() };
        for waiter in self.drained.drain(..) {
            let _ = waiter.reply.send(Err(error.clone()));
        }
        let caught_up = self.caught_up.drain(..).map(|(_, reply)| reply);
        for reply in caught_up.chain(self.resumed.drain(..)) {
            let _ = reply.send(Err(error.clone()));
        }
    }
}

/// What is to be settled.
#[derive(Debug, Clone)]
enum Target {
    /// The position read with this number.
    Read(u64),
    /// A position that is to be read again.
    Position(Checkpoint),
}

impl Target {
    fn is_settled(&self, view: &View) -> bool {
        match self {
            Self::Read(0) => true,
            Self::Read(number) => view.safe.as_ref().is_some_and(|safe| safe.seq >= *number),
            Self::Position(position) => view.safe.as_ref().is_some_and(|safe| !position.is_beyond(&safe.position)),
        }
    }
}

/// Everything up to the majority time `head` is settled: the safe position lies beyond that time, or at it with the
/// reply it came in having ended at the end of the oplog (events of one transaction share their time).
pub(crate) fn has_reached(safe: &Checkpoint, head: &Checkpoint, source: &SourceState) -> bool {
    let (Some(at), Some(time)) = (safe.cluster_time(), head.cluster_time()) else {
        // Positions without a time: the end of what there is must do.
        return source.at_end && source.end_at.as_ref() == Some(safe);
    };
    // A time says nothing of the events at it: only a token can have been the last of its time.
    let end = source.end_at.as_ref().filter(|end| end.token().is_some() && end.cluster_time() == Some(time));
    at > time || (at == time && end.is_some_and(|end| !end.is_beyond(safe)))
}
