//! What was read, in feed order, and what of it is settled. Pure: no clock, no I/O; called by the desk alone.

use std::collections::VecDeque;

use crate::checkpoint::{Checkpoint, Kind};
pub(crate) use crate::hold::Place as Mark;

impl Mark {
    pub(crate) fn start(position: Checkpoint) -> Self {
        Self { seq: 0, events: 0, epoch: 0, position, kind: Kind::Start }
    }

    /// The epoch of what is read behind it. (The epoch of a run that starts at an `invalidate` is the next already.)
    fn epoch_behind(&self) -> u32 {
        self.epoch + u32::from(self.kind == Kind::Invalidate)
    }
}

#[derive(Debug)]
struct Entry {
    mark: Mark,
    settled: bool,
}

/// A queue of positions in feed order. The safe position is the last one before which everything is settled.
#[derive(Debug)]
pub(crate) struct Progress {
    safe: Option<Mark>,
    waiting: VecDeque<Entry>,
    seq: u64,
    events: u64,
    /// The epoch of the next position.
    epoch: u32,
}

impl Progress {
    pub(crate) fn new(start: Option<Checkpoint>) -> Self {
        Self { safe: start.map(Mark::start), waiting: VecDeque::new(), seq: 0, events: 0, epoch: 0 }
    }

    /// An event was read; it is unsettled until `settle` is called with the number returned.
    pub(crate) fn event(&mut self, position: Checkpoint, kind: Kind) -> u64 {
        self.events += 1;
        let mark = self.mark(position, kind);
        let seq = mark.seq;
        self.waiting.push_back(Entry { mark, settled: false });
        seq
    }

    /// The scan got this far. It waits behind the events before it, so it can neither be lost nor overtake one.
    pub(crate) fn quiet(&mut self, position: Checkpoint) {
        // A filter can hide the `invalidate` that ends the feed from the events.
        let kind = if position.is_invalidate() { Kind::Invalidate } else { Kind::Quiet };
        let mark = self.mark(position, kind);
        match self.waiting.back_mut() {
            None => self.safe = Some(mark),
            // Quiet upon quiet behind the same event: the last one stands for all, so memory stays bounded.
            Some(last) if last.settled && last.mark.kind == Kind::Quiet => last.mark = mark,
            Some(_) => self.waiting.push_back(Entry { mark, settled: true }),
        }
    }

    /// An event is settled. Answers whether the safe position moved.
    pub(crate) fn settle(&mut self, seq: u64) -> bool {
        if let Ok(at) = self.waiting.binary_search_by_key(&seq, |entry| entry.mark.seq) {
            self.waiting[at].settled = true;
        }
        let mut moved = false;
        while self.waiting.front().is_some_and(|entry| entry.settled) {
            self.safe = self.waiting.pop_front().map(|entry| entry.mark);
            moved = true;
        }
        moved
    }

    /// What was handled behind `to` is lost with its handler: everything behind it will be read again.
    pub(crate) fn go_back(&mut self, to: Option<Mark>) {
        self.waiting.clear();
        self.events = to.as_ref().map_or(0, |mark| mark.events);
        self.epoch = to.as_ref().map_or(0, Mark::epoch_behind);
        self.safe = to;
    }

    /// The reader was closed: what was read and is not safe will be read again.
    pub(crate) fn abandon(&mut self) {
        self.waiting.clear();
        self.events = self.safe.as_ref().map_or(0, |mark| mark.events);
        self.epoch = self.safe.as_ref().map_or(0, Mark::epoch_behind);
    }

    /// The events that were read and are not settled.
    pub(crate) fn unsettled(&self) -> Vec<Checkpoint> {
        self.waiting.iter().filter(|entry| !entry.settled).map(|entry| entry.mark.position.clone()).collect()
    }

    /// Goes on at a position that need not have been read, in a new epoch or further on in this one: what was read and is
    /// not settled is given up.
    pub(crate) fn jump(&mut self, position: Checkpoint, kind: Kind, new_epoch: bool) -> Mark {
        self.abandon();
        self.epoch += u32::from(new_epoch);
        let mark = self.mark(position, kind);
        self.safe = Some(mark.clone());
        mark
    }

    /// An event that was read and is not safe yet.
    pub(crate) fn mark_of(&self, seq: u64) -> Option<&Mark> {
        let at = self.waiting.binary_search_by_key(&seq, |entry| entry.mark.seq).ok()?;
        Some(&self.waiting[at].mark)
    }

    pub(crate) fn safe(&self) -> Option<&Mark> {
        self.safe.as_ref()
    }

    /// How many epochs have begun in this run before the next position.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The number of the last position read.
    pub(crate) fn last_read(&self) -> u64 {
        self.seq
    }

    pub(crate) fn all_settled(&self) -> bool {
        self.waiting.is_empty()
    }

    fn mark(&mut self, position: Checkpoint, kind: Kind) -> Mark {
        self.seq += 1;
        let mark = Mark { seq: self.seq, events: self.events, epoch: self.epoch, position, kind };
        self.epoch = mark.epoch_behind();
        mark
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(n: usize) -> Checkpoint {
        Checkpoint::Time(bson::Timestamp { time: 1, increment: u32::try_from(n).unwrap() })
    }

    /// The position of an `invalidate`, in order with the others.
    fn end_at(n: usize) -> Checkpoint {
        let uuid = "AB".repeat(16);
        crate::checkpoint::Token::new(format!("8200000001{n:08X}2B022C0100296F5A1004{uuid}04")).unwrap().into()
    }

    #[derive(Debug, Clone)]
    enum Step {
        Event,
        Quiet,
        /// An event that ends the epoch.
        Invalidate,
        /// One that a filter hides.
        HiddenInvalidate,
        /// Settle the n-th of the unsettled, in any order.
        Settle(usize),
        /// Try and fail: nothing is told to progress.
        Fail,
        /// Save: nothing is told to progress.
        Save,
        Abandon,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => Just(Step::Event),
            2 => Just(Step::Quiet),
            1 => Just(Step::Invalidate),
            1 => Just(Step::HiddenInvalidate),
            4 => (0usize..5).prop_map(Step::Settle),
            1 => Just(Step::Fail),
            1 => Just(Step::Save),
            1 => Just(Step::Abandon),
        ];
        prop::collection::vec(step, 0..120)
    }

    /// What was read, as a plain list keeps it.
    #[derive(Debug, Clone)]
    struct Plain {
        seq: u64,
        position: Checkpoint,
        epoch: u32,
        settled: bool,
    }

    proptest! {
        /// Against a plain list of everything read: the safe position never passes an unsettled event, never goes
        /// back, is always the furthest it can be, ends at the last position once all is settled, and belongs to the
        /// epoch that as many `invalidate`s before it have begun.
        #[test]
        fn the_safe_position_is_exactly_the_settled_prefix(steps in steps()) {
            let mut progress = Progress::new(Some(at(0)));
            let mut read: Vec<Plain> = Vec::new();
            let (mut safe_before, mut next, mut saved) = (0, 0, 0);
            let start = Plain { seq: 0, position: at(0), epoch: 0, settled: true };
            for step in steps {
                let ends = matches!(step, Step::Invalidate | Step::HiddenInvalidate);
                let epoch = read.iter().filter(|entry| entry.position.is_invalidate()).count();
                match step {
                    Step::Event | Step::Quiet | Step::Invalidate | Step::HiddenInvalidate => {
                        next += 1;
                        let position = if ends { end_at(next) } else { at(next) };
                        let settled = matches!(step, Step::Quiet | Step::HiddenInvalidate);
                        if settled {
                            progress.quiet(position.clone());
                        } else {
                            progress.event(position.clone(), if ends { Kind::Invalidate } else { Kind::Event });
                        }
                        let epoch = u32::try_from(epoch).unwrap();
                        read.push(Plain { seq: progress.last_read(), position, epoch, settled });
                    }
                    Step::Settle(n) => {
                        let unsettled: Vec<usize> = (0..read.len()).filter(|i| !read[*i].settled).collect();
                        if let Some(i) = unsettled.get(n) {
                            read[*i].settled = true;
                            progress.settle(read[*i].seq);
                        }
                    }
                    Step::Fail => {}
                    Step::Save => {
                        let safe = progress.safe().map_or(0, |mark| mark.seq);
                        prop_assert!(safe >= saved, "a save went back");
                        saved = safe;
                    }
                    Step::Abandon => {
                        progress.abandon();
                        let prefix = read.iter().take_while(|entry| entry.settled).count();
                        read.truncate(prefix);
                    }
                }
                let expected = read.iter().take_while(|entry| entry.settled).last().unwrap_or(&start);
                let safe = progress.safe().unwrap();
                prop_assert_eq!((&safe.position, safe.epoch), (&expected.position, expected.epoch));
                prop_assert!(safe.seq >= safe_before);
                safe_before = safe.seq;
            }
            let left: Vec<u64> = read.iter().filter(|entry| !entry.settled).map(|entry| entry.seq).collect();
            for seq in left {
                progress.settle(seq);
            }
            let last = read.last().unwrap_or(&start);
            let safe = progress.safe().unwrap();
            prop_assert_eq!((&safe.position, safe.epoch), (&last.position, last.epoch));
            prop_assert!(progress.all_settled());
        }
    }

    #[test]
    fn quiet_reads_behind_an_unsettled_event_do_not_pile_up() {
        let mut progress = Progress::new(None);
        let event = progress.event(at(1), Kind::Event);
        for n in 2..1000 {
            progress.quiet(at(n));
        }
        assert_eq!(progress.waiting.len(), 2);
        assert!(progress.safe().is_none());
        progress.settle(event);
        assert_eq!(progress.safe().unwrap().position, at(999));
        assert_eq!(progress.safe().unwrap().kind, Kind::Quiet);
    }
}
