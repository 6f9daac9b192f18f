//! What was read, in feed order, and what of it is settled. Pure: no clock, no I/O; called by the desk alone.

use std::collections::VecDeque;

use crate::checkpoint::{Checkpoint, Kind};
pub(crate) use crate::hold::Place as Mark;

impl Mark {
    pub(crate) fn start(position: Checkpoint) -> Self {
        Self { seq: 0, events: 0, position, kind: Kind::Start }
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
}

impl Progress {
    pub(crate) fn new(start: Option<Checkpoint>) -> Self {
        Self { safe: start.map(Mark::start), waiting: VecDeque::new(), seq: 0, events: 0 }
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
        let mark = self.mark(position, Kind::Quiet);
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
        self.safe = to;
    }

    /// The reader was closed: what was read and is not safe will be read again.
    pub(crate) fn abandon(&mut self) {
        self.waiting.clear();
    }

    pub(crate) fn safe(&self) -> Option<&Mark> {
        self.safe.as_ref()
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
        Mark { seq: self.seq, events: self.events, position, kind }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(n: usize) -> Checkpoint {
        Checkpoint::Time(bson::Timestamp { time: 1, increment: u32::try_from(n).unwrap() })
    }

    #[derive(Debug, Clone)]
    enum Step {
        Event,
        Quiet,
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
            4 => (0usize..5).prop_map(Step::Settle),
            1 => Just(Step::Fail),
            1 => Just(Step::Save),
            1 => Just(Step::Abandon),
        ];
        prop::collection::vec(step, 0..120)
    }

    proptest! {
        /// Against a plain list of everything read: the safe position never passes an unsettled event, never goes
        /// back, is always the furthest it can be, and ends at the last position once all is settled.
        #[test]
        fn the_safe_position_is_exactly_the_settled_prefix(steps in steps()) {
            let mut progress = Progress::new(Some(at(0)));
            let mut read: Vec<(u64, usize, bool)> = Vec::new();
            let mut safe_before = 0;
            let mut next = 0;
            let mut saved = 0;
            for step in steps {
                match step {
                    Step::Event => {
                        next += 1;
                        let seq = progress.event(at(next), Kind::Event);
                        read.push((seq, next, false));
                    }
                    Step::Quiet => {
                        next += 1;
                        progress.quiet(at(next));
                        read.push((progress.last_read(), next, true));
                    }
                    Step::Settle(n) => {
                        let unsettled: Vec<usize> = (0..read.len()).filter(|i| !read[*i].2).collect();
                        if let Some(i) = unsettled.get(n) {
                            read[*i].2 = true;
                            progress.settle(read[*i].0);
                        }
                    }
                    Step::Fail => {}
                    Step::Save => {
                        let seq = progress.safe().unwrap().seq;
                        prop_assert!(seq >= saved, "a save would go back");
                        saved = seq;
                    }
                    Step::Abandon => {
                        progress.abandon();
                        let settled = read.iter().take_while(|entry| entry.2).count();
                        read.truncate(settled);
                    }
                }
                let expected = read.iter().take_while(|entry| entry.2).last().map_or(0, |entry| entry.1);
                let safe = progress.safe().unwrap();
                prop_assert_eq!(&safe.position, &at(expected));
                prop_assert!(safe.seq >= safe_before);
                safe_before = safe.seq;
            }
            let left: Vec<u64> = read.iter().filter(|entry| !entry.2).map(|entry| entry.0).collect();
            for seq in left {
                progress.settle(seq);
            }
            let last = read.last().map_or(0, |entry| entry.1);
            prop_assert_eq!(&progress.safe().unwrap().position, &at(last));
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
