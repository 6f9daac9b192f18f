//! How a reader recovers: one pure step function from what happened to what to do next. No I/O, no clock.

use super::classify::{Class, Fault, Phase};
use super::size::ReplySize;

/// What happened to the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Happened {
    /// The aggregate was accepted.
    Opened,
    /// A reply was read.
    Replied(Replied),
    /// The aggregate, or asking for a reply, failed.
    Failed(Phase, Fault),
    /// The cursor gave no further reply, without an error.
    Ended,
}

/// What a reply was like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Replied {
    /// How many events it came with, fragments of one counted apart.
    pub(super) events: usize,
    /// How large it was.
    pub(super) bytes: usize,
    /// It came with the aggregate.
    pub(super) first: bool,
    /// The position has moved.
    pub(super) moved: bool,
    /// It has not moved for so long that the server may be cut off from those that write.
    pub(super) still: bool,
    pub(super) end: End,
}

/// What comes behind a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum End {
    /// The next one.
    #[default]
    Open,
    /// Nothing: it was the cursor's last.
    Closed,
    /// Nothing: an `invalidate` has ended the feed.
    Invalidated,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Next {
    /// Ask for the next reply.
    Read,
    /// Open from the last position read, after a wait.
    Open(Wait),
    /// The feed has ended.
    End,
    /// The next event is one that the server cannot send: find out which, or a way to open behind it if it is done.
    Unsendable(Fault),
    /// Nothing more can be done.
    Fail(Fault),
}

/// How long to wait before the next open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// Not at all: nothing is wrong, it is to be opened in another way.
    No,
    /// Longer after each failure in a row.
    Backoff,
    /// Long: somebody has to do something.
    Slowly,
}

/// How to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct How {
    /// At most this many events in the reply to the open.
    pub(super) first: u32,
    /// At most this many events in a later reply.
    pub(super) events: u32,
    /// The server has accepted the start but is far behind: no first batch, no time limit.
    pub(super) behind: bool,
    /// With the stage that splits large events.
    pub(super) split: bool,
}

/// Whether the stream is opened with the stage that splits large events.
///
/// Not before one was met: the stage changes the layout of the tokens, and what is stored with it another program, or an
/// older server, may not resume from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Split {
    /// No event was too large yet.
    #[default]
    Untried,
    /// To be asked for; the next open says whether the server has it.
    Asked,
    /// It is there.
    Has,
    /// It is not.
    Lacks,
}

/// What the step function remembers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Recovery {
    size: ReplySize,
    behind: bool,
    /// An event is too large for a reply, and the good ones before it are taken one by one: how many so far.
    one_by_one: Option<u32>,
    split: Split,
    /// Failures since the last good read.
    failures: u32,
    /// How often in a row the server ended the stream without a word and without anything read.
    hollow: u32,
}

/// After this many events that did fit, one by one is over.
const FIT_AGAIN: u32 = 4000;
/// After this many endings without a word something hides the reason.
const HOLLOW: u32 = 5;

impl Recovery {
    /// For a stream from a position of one that splits large events, or of another one; and whether the server is known to
    /// lack the stage.
    pub(super) fn new(splits: bool, lacks: bool) -> Self {
        let split = match (splits, lacks) {
            (_, true) => Split::Lacks,
            // The tokens that follow have the layout of the position.
            (true, false) => Split::Asked,
            (false, false) => Split::Untried,
        };
        Self { split, ..Self::default() }
    }

    /// How the next open is to be done.
    pub(super) fn how(&self) -> How {
        let (sample, events) = match self.one_by_one {
            Some(_) => (1, 1),
            None => (self.size.sample(), self.size.events()),
        };
        let split = matches!(self.split, Split::Asked | Split::Has);
        How { first: if self.behind { 0 } else { sample }, events, behind: self.behind, split }
    }

    /// How many failures there were since the last good read.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// The step.
    pub(super) fn step(&mut self, happened: Happened) -> Next {
        match happened {
            Happened::Opened => {
                self.behind = false;
                if self.split == Split::Asked {
                    self.split = Split::Has;
                }
                Next::Read
            }
            Happened::Replied(reply) => self.replied(reply),
            Happened::Failed(phase, fault) => self.failed(phase, fault),
            Happened::Ended => self.ended(),
        }
    }

    fn replied(&mut self, reply: Replied) -> Next {
        // The first reply of an open is a good read only when it moved the position: a stream that opens and fails
        // again and again must not be tried without pause.
        if reply.moved || !(reply.first || reply.end == End::Closed) {
            self.failures = 0;
            self.hollow = 0;
        }
        match reply.end {
            End::Open => {}
            End::Closed => return self.ended(),
            End::Invalidated => return Next::End,
        }
        // Where it opens is the driver's choice, by what the members say of themselves now.
        if reply.still {
            return Next::Open(Wait::No);
        }
        if let Some(events) = &mut self.one_by_one {
            *events += u32::try_from(reply.events).unwrap_or(FIT_AGAIN);
            let over = *events >= FIT_AGAIN || (reply.events == 0 && !reply.first);
            return if over {
                self.one_by_one = None;
                Next::Open(Wait::No)
            } else {
                Next::Read
            };
        }
        let changed = if reply.first {
            self.size.observe_sample(reply.events, reply.bytes)
        } else {
            self.size.observe(reply.events, reply.bytes)
        };
        if changed { Next::Open(Wait::No) } else { Next::Read }
    }

    fn failed(&mut self, phase: Phase, fault: Fault) -> Next {
        match fault.class {
            Class::Behind if !self.behind => {
                self.behind = true;
                Next::Open(Wait::No)
            }
            // Also with no time limit asked for: the server is busy.
            Class::Retry | Class::Behind => {
                self.behind = false;
                self.failures = self.failures.saturating_add(1);
                Next::Open(Wait::Backoff)
            }
            Class::Unauthorized => {
                self.failures = self.failures.saturating_add(1);
                Next::Open(Wait::Slowly)
            }
            Class::NoSplit if self.how().split => {
                self.split = Split::Lacks;
                Next::Open(Wait::No)
            }
            // Whatever it is that is refused: without the stage the server will say.
            Class::Fatal if phase == Phase::Open && self.split == Split::Asked => {
                self.split = Split::Lacks;
                Next::Open(Wait::No)
            }
            Class::TooLarge if phase != Phase::Command && self.split == Split::Untried => {
                self.split = Split::Asked;
                Next::Open(Wait::No)
            }
            Class::TooLarge | Class::ImageMissing if phase != Phase::Command => {
                if self.split == Split::Asked {
                    self.split = Split::Has;
                }
                // The server gives up the good events before it in the same reply, so these are fetched one by one; with
                // one event to a reply it is that event.
                match self.one_by_one {
                    None => {
                        self.one_by_one = Some(0);
                        Next::Open(Wait::No)
                    }
                    Some(_) => Next::Unsendable(fault),
                }
            }
            Class::TooLarge
            | Class::ImageMissing
            | Class::NoSplit
            | Class::HistoryLost
            | Class::BadToken
            | Class::NotAReplicaSet
            | Class::Fatal => Next::Fail(fault),
        }
    }

    fn ended(&mut self) -> Next {
        self.failures = self.failures.saturating_add(1);
        self.hollow += 1;
        if self.hollow >= HOLLOW {
            return Next::Fail(Fault::fatal(
                "the server ends the stream as soon as it is opened and does not say why: what it reads was dropped \
                 or renamed, and the pipeline hides the `invalidate` event that says so",
            ));
        }
        Next::Open(Wait::Backoff)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(class: Class) -> Fault {
        Fault { class, code: None, message: String::new() }
    }

    fn failed(class: Class) -> Happened {
        Happened::Failed(Phase::GetMore, fault(class))
    }

    const GOOD: Replied = Replied { events: 1, bytes: 1000, first: false, moved: true, still: false, end: End::Open };

    #[test]
    fn a_good_stream_is_read_on() {
        let mut recovery = Recovery::default();
        assert_eq!(recovery.step(Happened::Opened), Next::Read);
        assert_eq!(recovery.step(Happened::Replied(Replied { first: true, ..Replied::default() })), Next::Read);
        assert_eq!(recovery.step(Happened::Replied(GOOD)), Next::Read);
        assert_eq!(recovery, Recovery::default());
    }

    #[test]
    fn what_heals_by_itself_is_opened_again_and_a_good_read_forgets_the_failures() {
        let mut recovery = Recovery::default();
        for failures in 1..=3 {
            assert_eq!(recovery.step(failed(Class::Retry)), Next::Open(Wait::Backoff));
            assert_eq!(recovery.failures(), failures);
        }
        recovery.step(Happened::Opened);
        recovery.step(Happened::Replied(Replied { first: true, ..Replied::default() }));
        assert_eq!(recovery.failures(), 3, "an open that read nothing is no progress");
        recovery.step(Happened::Replied(GOOD));
        assert_eq!(recovery.failures(), 0);
    }

    #[test]
    fn a_missing_right_is_asked_for_slowly() {
        assert_eq!(Recovery::default().step(failed(Class::Unauthorized)), Next::Open(Wait::Slowly));
    }

    #[test]
    fn what_cannot_heal_fails_with_what_was_said() {
        for class in [Class::HistoryLost, Class::BadToken, Class::NotAReplicaSet, Class::Fatal, Class::NoSplit] {
            assert_eq!(Recovery::default().step(failed(class)), Next::Fail(fault(class)));
        }
    }

    #[test]
    fn far_behind_is_opened_without_a_limit_and_the_next_open_has_one_again() {
        let mut recovery = Recovery::default();
        assert_eq!(recovery.step(Happened::Failed(Phase::Open, fault(Class::Behind))), Next::Open(Wait::No));
        assert_eq!(recovery.how(), How { first: 0, events: 1000, behind: true, split: false });
        assert_eq!(recovery.failures(), 0);
        recovery.step(Happened::Opened);
        assert_eq!(recovery.how(), How { first: 100, events: 1000, behind: false, split: false });
        recovery.step(Happened::Failed(Phase::Open, fault(Class::Behind)));
        let again = recovery.step(Happened::Failed(Phase::Open, fault(Class::Behind)));
        assert_eq!((again, recovery.how().behind), (Next::Open(Wait::Backoff), false));
    }

    fn at_open(class: Class) -> Happened {
        Happened::Failed(Phase::Open, fault(class))
    }

    /// On a server that cannot split.
    fn lacking() -> Recovery {
        Recovery::new(false, true)
    }

    #[test]
    fn an_event_that_is_too_large_is_split_where_the_server_can_and_that_is_no_failure() {
        let mut recovery = Recovery::default();
        assert!(!recovery.how().split, "not before there was one");
        assert_eq!(recovery.step(failed(Class::TooLarge)), Next::Open(Wait::No));
        assert_eq!((recovery.how().split, recovery.how().events, recovery.failures()), (true, 1000, 0));
        recovery.step(Happened::Opened);
        recovery.step(Happened::Replied(GOOD));
        // From then on.
        recovery.step(failed(Class::Retry));
        assert!(recovery.how().split);
    }

    #[test]
    fn a_server_that_cannot_split_is_asked_once() {
        for class in [Class::NoSplit, Class::Fatal] {
            let mut recovery = Recovery::default();
            recovery.step(failed(Class::TooLarge));
            assert_eq!(recovery.step(at_open(class)), Next::Open(Wait::No));
            assert_eq!((recovery.how().split, recovery.failures()), (false, 0));
            recovery.step(Happened::Opened);
            assert_eq!(recovery.step(failed(Class::TooLarge)), Next::Open(Wait::No));
            assert_eq!((recovery.how().split, recovery.how().events), (false, 1), "one by one, and not asked again");
            assert_eq!(recovery.step(at_open(Class::Fatal)), Next::Fail(fault(Class::Fatal)));
        }
    }

    #[test]
    fn a_position_of_a_stream_that_splits_goes_on_as_one_unless_the_server_cannot() {
        assert!(Recovery::new(true, false).how().split);
        assert!(!Recovery::new(true, true).how().split && !Recovery::new(false, false).how().split);
        let mut recovery = Recovery::new(true, false);
        recovery.step(Happened::Opened);
        // Another member took over.
        assert_eq!(recovery.step(at_open(Class::NoSplit)), Next::Open(Wait::No));
        assert!(!recovery.how().split);
    }

    #[test]
    fn what_the_server_cannot_send_is_reached_one_by_one() {
        for class in [Class::TooLarge, Class::ImageMissing] {
            let mut recovery = lacking();
            assert_eq!(recovery.step(failed(class)), Next::Open(Wait::No));
            assert_eq!(recovery.how().events, 1);
            recovery.step(Happened::Opened);
            for _ in 0..7 {
                assert_eq!(recovery.step(Happened::Replied(Replied { bytes: 9_000_000, ..GOOD })), Next::Read);
            }
            assert_eq!(recovery.step(failed(class)), Next::Unsendable(fault(class)));
        }
    }

    #[test]
    fn a_field_that_does_not_fit_alone_is_reached_one_by_one_too() {
        let mut recovery = Recovery::default();
        recovery.step(failed(Class::TooLarge));
        assert_eq!(recovery.step(at_open(Class::TooLarge)), Next::Open(Wait::No));
        assert_eq!((recovery.how().split, recovery.how().events), (true, 1));
        assert_eq!(recovery.step(at_open(Class::TooLarge)), Next::Unsendable(fault(Class::TooLarge)));
    }

    #[test]
    fn one_by_one_is_over_at_the_end_of_the_oplog_or_when_enough_did_fit() {
        let mut recovery = lacking();
        recovery.step(failed(Class::TooLarge));
        assert_eq!(recovery.step(Happened::Replied(Replied { first: true, ..Replied::default() })), Next::Read);
        assert_eq!(recovery.step(Happened::Replied(Replied::default())), Next::Open(Wait::No));
        assert_eq!(recovery.how().events, 1000);
        recovery.step(failed(Class::TooLarge));
        let steps = (0..4000).map(|_| recovery.step(Happened::Replied(GOOD))).filter(|next| *next != Next::Read);
        assert_eq!(steps.collect::<Vec<_>>(), [Next::Open(Wait::No)]);
    }

    #[test]
    fn a_better_reply_size_is_opened_at_once_and_is_no_failure() {
        let mut recovery = Recovery::default();
        let large = Replied { events: 160, bytes: 16_000_000, ..GOOD };
        assert_eq!(recovery.step(Happened::Replied(large)), Next::Open(Wait::No));
        assert_eq!((recovery.how().events, recovery.failures()), (16, 0));
    }

    #[test]
    fn a_stream_that_stands_still_is_opened_anew_and_is_no_failure() {
        let mut recovery = Recovery::default();
        let still = Replied { still: true, ..Replied::default() };
        assert_eq!(recovery.step(Happened::Replied(still)), Next::Open(Wait::No));
        assert_eq!(recovery, Recovery::default());
    }

    #[test]
    fn an_invalidate_ends_the_feed() {
        let last = Replied { end: End::Invalidated, ..GOOD };
        assert_eq!(Recovery::default().step(Happened::Replied(last)), Next::End);
    }

    #[test]
    fn an_end_without_a_word_is_opened_again_but_not_for_ever() {
        let mut recovery = Recovery::default();
        let closed = Happened::Replied(Replied { end: End::Closed, first: true, ..Replied::default() });
        for happened in [closed.clone(), Happened::Ended, closed.clone(), Happened::Ended] {
            assert_eq!(recovery.step(happened), Next::Open(Wait::Backoff));
        }
        assert!(matches!(recovery.step(closed), Next::Fail(Fault { class: Class::Fatal, .. })));
    }
}
