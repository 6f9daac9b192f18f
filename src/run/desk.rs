//! Where the deliver task and the saver's task meet: what is read, settled, storable and wanted, and whether the next
//! event may be handed out. Data goes from deliver to saver; back comes only the gate.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::audit::Note;
use crate::checkpoint::{Checkpoint, Kind};
use crate::run::policy::{Policy, SavePolicy};
use crate::run::progress::{Mark, Progress};
use crate::storage::Source;

#[derive(Debug)]
pub(crate) struct Desk {
    inner: Mutex<Inner>,
    /// Wakes the saver's task: a save is asked for, or something it watches has moved.
    news: Notify,
    gate: watch::Sender<Gate>,
}

#[derive(Debug)]
struct Inner {
    progress: Progress,
    policy: Policy,
    in_hand: Option<InHand>,
    /// The last event handed out and not settled when it was given up: everything up to it comes again.
    given_up: Option<Checkpoint>,
    /// The events that were read and not settled when the reader was last closed.
    left: Vec<Checkpoint>,
    /// Until it is stored: the last jump, and the number of its position.
    jumped: Option<(u64, Arc<Jump>)>,
    /// The saver wants to hear of every movement, not of asked-for saves alone.
    watched: bool,
    /// The saver has been woken for a save that was asked for, and has not sent one since.
    told: bool,
    woken: bool,
}

/// What the handler has: the first event of it that is not settled.
#[derive(Debug, Clone)]
pub(crate) struct InHand {
    pub(crate) position: Checkpoint,
    /// The last event of it.
    last: Checkpoint,
    pub(crate) since: Instant,
}

/// What goes with a position that is not reached by settling what lies before it.
#[derive(Debug, Clone)]
pub(crate) struct Jump {
    pub(crate) kind: Kind,
    /// Positions before and behind it are not comparable.
    pub(crate) new_epoch: bool,
    /// Stored with it.
    pub(crate) note: Note,
    /// Where positions come from behind it; none when that is as before.
    pub(crate) source: Option<Source>,
}

/// What follows from an event that is settled.
#[derive(Debug, Default)]
pub(crate) struct Settled {
    /// The number of the position a save was asked for, if one was.
    pub(crate) wanted: Option<u64>,
    pub(crate) safe: Option<Checkpoint>,
}

/// What the saver tells the deliver task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Gate {
    /// No event may be handed out until a save succeeds.
    pub(crate) closed: bool,
    /// The newest stored position of this run, by its number.
    pub(crate) stored: u64,
}

/// What the saver sees at one moment.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(crate) safe: Option<Mark>,
    pub(crate) storable: Option<Mark>,
    pub(crate) requested: Option<Mark>,
    pub(crate) last_read: u64,
    pub(crate) all_settled: bool,
    pub(crate) in_hand: Option<InHand>,
    /// A jump that is not stored yet, and the number of its position.
    pub(crate) jumped: Option<(u64, Arc<Jump>)>,
}

impl Desk {
    pub(crate) fn new(start: Option<Checkpoint>, save: SavePolicy, saves_quiet: bool) -> Self {
        let progress = Progress::new(start);
        let policy = Policy::new(save, saves_quiet, progress.safe().cloned());
        let inner = Inner {
            progress,
            policy,
            in_hand: None,
            given_up: None,
            left: Vec::new(),
            jumped: None,
            watched: false,
            told: false,
            woken: false,
        };
        Self { inner: Mutex::new(inner), news: Notify::new(), gate: watch::Sender::new(Gate::default()) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Called by the deliver task.

    /// An event was read; the number it settles under.
    pub(crate) fn read_event(&self, position: Checkpoint, kind: Kind) -> u64 {
        self.inner().progress.event(position, kind)
    }

    pub(crate) fn read_quiet(&self, position: Checkpoint) {
        let mut inner = self.inner();
        inner.progress.quiet(position);
        if inner.progress.all_settled()
            && let Some(safe) = inner.progress.safe().cloned()
        {
            inner.policy.quiet(&safe);
        }
        self.tell(inner, false);
    }

    /// The events from `first` to `last` are with the handler.
    pub(crate) fn hand_out(&self, first: Checkpoint, last: Checkpoint) {
        self.inner().in_hand = Some(InHand { position: first, last, since: Instant::now() });
    }

    /// The first event in hand is settled; `next` is the one behind it, if it is still in hand.
    pub(crate) fn settle(&self, seq: u64, accepted: bool, next: Option<&Checkpoint>) -> Settled {
        let mut inner = self.inner();
        match (next, &mut inner.in_hand) {
            (Some(next), Some(in_hand)) => in_hand.position = next.clone(),
            _ => inner.in_hand = None,
        }
        inner.progress.settle(seq);
        let Some(safe) = inner.progress.safe().cloned() else { return Settled::default() };
        inner.given_up.take_if(|given_up| !given_up.is_beyond(&safe.position));
        let wanted = inner.policy.settled(&safe, accepted);
        self.tell(inner, wanted);
        Settled { wanted: wanted.then_some(safe.seq), safe: Some(safe.position) }
    }

    /// The reader is closed: what is not settled will be read again.
    pub(crate) fn abandon(&self) {
        let mut inner = self.inner();
        if let Some(in_hand) = inner.in_hand.take() {
            inner.given_up = Some(in_hand.last);
        }
        inner.left = inner.progress.unsettled();
        inner.progress.abandon();
        self.tell(inner, false);
    }

    /// Goes on at a position by decree; the number it has. The saver stores it at once.
    pub(crate) fn jump(&self, position: Checkpoint, jump: Jump) -> u64 {
        let mut inner = self.inner();
        let mark = inner.progress.jump(position, jump.kind, jump.new_epoch);
        inner.policy.jump(&mark);
        inner.given_up.take_if(|given_up| !given_up.is_beyond(&mark.position));
        inner.left.clear();
        inner.jumped = Some((mark.seq, Arc::new(jump)));
        self.tell(inner, true);
        mark.seq
    }

    /// The events up to a position that were read and not settled when the reader was last closed.
    pub(crate) fn left_unsettled(&self, through: &Checkpoint) -> Vec<Checkpoint> {
        let inner = self.inner();
        inner.left.iter().filter(|position| !position.is_beyond(through)).cloned().collect()
    }

    /// The last event handed out and given up unsettled, which comes again.
    pub(crate) fn given_up(&self) -> Option<Checkpoint> {
        self.inner().given_up.clone()
    }

    /// The last settled position.
    pub(crate) fn safe(&self) -> Option<Checkpoint> {
        self.inner().progress.safe().map(|mark| mark.position.clone())
    }

    pub(crate) fn gate(&self) -> watch::Receiver<Gate> {
        self.gate.subscribe()
    }

    pub(crate) fn gate_is(&self, open: impl Fn(&Gate) -> bool) -> bool {
        open(&self.gate.borrow())
    }

    /// Whether the saver's task was woken since the last call.
    pub(crate) fn has_woken(&self) -> bool {
        std::mem::take(&mut self.inner().woken)
    }

    fn tell(&self, mut inner: MutexGuard<'_, Inner>, asked: bool) {
        if inner.watched || (asked && !inner.told) {
            (inner.told, inner.woken) = (true, true);
            drop(inner);
            self.news.notify_one();
        }
    }

    // Called by the saver's task.

    pub(crate) fn view(&self) -> View {
        let inner = self.inner();
        View {
            safe: inner.progress.safe().cloned(),
            storable: inner.policy.storable().cloned(),
            requested: inner.policy.requested().cloned(),
            last_read: inner.progress.last_read(),
            all_settled: inner.progress.all_settled(),
            in_hand: inner.in_hand.clone(),
            jumped: inner.jumped.clone(),
        }
    }

    /// A write is sent. What is asked for from now on is news again; until then one wake stands for all, since nothing
    /// newer could be sent, and when the write is answered the saver looks anyway.
    pub(crate) fn sending(&self) {
        self.inner().told = false;
    }

    /// Whether every movement is to be told from now on.
    pub(crate) fn watch(&self, every: bool) {
        self.inner().watched = every;
    }

    /// A position is stored: the count of the save policy starts again behind it, and delivery may go on.
    pub(crate) fn saved(&self, mark: &Mark) {
        let mut inner = self.inner();
        inner.policy.saved(mark.events);
        inner.jumped.take_if(|(seq, _)| *seq <= mark.seq);
        drop(inner);
        self.gate.send_replace(Gate { closed: false, stored: mark.seq });
    }

    pub(crate) fn close_gate(&self) {
        self.gate.send_if_modified(|gate| !std::mem::replace(&mut gate.closed, true));
    }

    /// Completes when something has changed since the last call.
    ///
    /// # Cancel safety
    /// No news is lost by dropping it.
    pub(crate) async fn news(&self) {
        self.news.notified().await;
    }
}
