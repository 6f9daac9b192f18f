//! Where the deliver task and the saver's task meet: what is read, settled, storable and wanted, and whether the next
//! event may be handed out. Data goes from deliver to saver; back come only the gate and the wish for a flush.

mod flush;
mod hold;
mod jump;
mod note;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bson::DateTime;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

pub(crate) use self::jump::Jump;
use crate::checkpoint::{Checkpoint, Kind};
use crate::ids::Fence;
use crate::run::policy::{Policy, SavePolicy};
use crate::run::progress::{Mark, Progress};
use crate::storage;

#[derive(Debug)]
pub(crate) struct Desk {
    inner: Mutex<Inner>,
    /// Wakes the saver's task: a save is asked for, or something it watches has moved.
    news: Notify,
    gate: watch::Sender<Gate>,
    /// Wakes the deliver task: the handler is to flush.
    flush: Notify,
}

#[derive(Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is a fact of its own, and they go together in every way")]
struct Inner {
    fence: Fence,
    progress: Progress,
    policy: Policy,
    in_hand: Option<InHand>,
    /// The furthest event handed out.
    handed_out: Option<Checkpoint>,
    /// The last event handed out and not settled when it was given up: everything up to it comes again.
    given_up: Option<Checkpoint>,
    /// The events that were read and not settled when the reader was last closed.
    left: Vec<Checkpoint>,
    /// The UUID of the collection that events were last read of, and the epoch they were read in.
    seen: Option<(u32, Arc<str>)>,
    /// Until it is stored: the last jump, and the number of its position.
    jumped: Option<(u64, Arc<Jump>)>,
    /// The saver wants to hear of every movement, not of asked-for saves alone.
    watched: bool,
    /// The saver has been woken for a save that was asked for, and has not sent one since.
    told: bool,
    /// The event that is to be noted in the record, by the number of its note; and how many there were.
    to_note: Option<(u64, storage::InHand)>,
    notes: u64,
    /// The handler asks for a save of everything that may be stored.
    save_requested: bool,
    /// The handler is to flush what may be stored.
    flush_wanted: bool,
    /// A save is asked for as soon as it has.
    save_after_flush: bool,
    /// The last position that was stored by the handler's work.
    stored_by_work: Option<StoredByWork>,
    /// Since when something handled has not been declared durable, under a hold.
    held_since: Option<Instant>,
}

/// What the handler has: the first event of it that is not settled.
#[derive(Debug, Clone)]
pub(crate) struct InHand {
    pub(crate) position: Checkpoint,
    /// The last event of it.
    last: Checkpoint,
    pub(crate) since: Instant,
}

/// What is to be flushed, and the last event handed out, beyond which no answer can be.
#[derive(Debug)]
pub(crate) struct Unflushed {
    pub(crate) through: Mark,
    pub(crate) delivered: Checkpoint,
}

/// What the saver tells the deliver task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Gate {
    /// No event may be handed out until a save succeeds.
    pub(crate) closed: bool,
    /// The newest stored position of this run, by its number.
    pub(crate) stored: u64,
    /// The newest event in hand that is noted in the record, by the number of its note.
    pub(crate) noted: u64,
}

/// What the saver sees at one moment.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(crate) safe: Option<Mark>,
    /// The furthest position that may be stored, once the handler has flushed it.
    pub(crate) storable: Option<Mark>,
    /// With a barrier: how far the handler has flushed of it. Without one everything storable is.
    flushed: Option<Mark>,
    has_barrier: bool,
    pub(crate) requested: Option<Mark>,
    pub(crate) last_read: u64,
    pub(crate) all_settled: bool,
    pub(crate) in_hand: Option<InHand>,
    /// A jump that is not stored yet, and the number of its position.
    pub(crate) jumped: Option<(u64, Arc<Jump>)>,
    /// An event that is to be noted in the record, and the number of the note.
    pub(crate) to_note: Option<(u64, storage::InHand)>,
    pub(crate) held: Option<HeldBack>,
    pub(crate) stored_by_work: Option<StoredByWork>,
}

/// A position that is stored, and was not by the saver.
#[derive(Debug, Clone)]
pub(crate) struct StoredByWork {
    pub(crate) mark: Mark,
    /// When the last one was, on the storage's clock.
    pub(crate) at: Option<DateTime>,
    /// How many have been, in this run.
    pub(crate) saves: u64,
}

/// What a hold keeps from being stored.
#[derive(Debug, Clone)]
pub(crate) struct HeldBack {
    pub(crate) since: Instant,
    /// The last position declared durable.
    pub(crate) durable: Option<Checkpoint>,
}

impl View {
    /// What may be stored at once.
    pub(crate) fn flushed(&self) -> Option<&Mark> {
        if self.has_barrier { self.flushed.as_ref() } else { self.storable.as_ref() }
    }
}

impl Desk {
    pub(crate) fn new(fence: Fence, start: Option<Checkpoint>, save: SavePolicy, saves_quiet: bool) -> Self {
        let progress = Progress::new(start);
        let policy = Policy::new(save, saves_quiet, progress.safe().cloned());
        let inner = Inner {
            fence,
            progress,
            policy,
            in_hand: None,
            handed_out: None,
            given_up: None,
            left: Vec::new(),
            seen: None,
            jumped: None,
            watched: false,
            told: false,
            to_note: None,
            notes: 0,
            save_requested: false,
            flush_wanted: false,
            save_after_flush: false,
            stored_by_work: None,
            held_since: None,
        };
        let gate = watch::Sender::new(Gate::default());
        Self { inner: Mutex::new(inner), news: Notify::new(), gate, flush: Notify::new() }
    }

    /// From now on only what is declared durable may be stored.
    pub(crate) fn hold(&self) {
        self.inner().policy.hold();
    }

    /// From now on only what the handler has flushed may be stored.
    pub(crate) fn put_up_barrier(&self) {
        self.inner().policy.put_up_barrier();
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Called by the deliver task.

    /// An event was read; the number it settles under.
    pub(crate) fn read_event(&self, position: Checkpoint, kind: Kind) -> u64 {
        let mut inner = self.inner();
        inner.see(&position);
        inner.progress.event(position, kind)
    }

    pub(crate) fn read_quiet(&self, position: Checkpoint) {
        let mut inner = self.inner();
        inner.progress.quiet(position);
        let mut news = false;
        if inner.progress.all_settled()
            && let Some(safe) = inner.progress.safe().cloned()
        {
            inner.policy.quiet(&safe);
            news = inner.note_held();
        }
        self.tell(inner, false);
        if news {
            self.news.notify_one();
        }
    }

    /// The events from `first` to `last` are with the handler.
    pub(crate) fn hand_out(&self, first: Checkpoint, last: Checkpoint) {
        let mut inner = self.inner();
        // What comes again was handed out up to where it was the first time.
        if inner.handed_out.as_ref().is_none_or(|before| last.is_beyond(before)) {
            inner.handed_out = Some(last.clone());
        }
        inner.in_hand = Some(InHand { position: first, last, since: Instant::now() });
    }

    /// The first events in hand are settled, each by its number and by what the predicate said of it; `next` is the one
    /// behind them, if it is still in hand. `count` is told the safe position before anybody can see it: who waits for it
    /// finds the figures of what lies before it. Answers the number of the position a save was asked for, if one was.
    pub(crate) fn settle(
        &self,
        events: impl Iterator<Item = (u64, bool)>,
        next: Option<&Checkpoint>,
        count: impl FnOnce(Option<&Checkpoint>),
    ) -> Option<u64> {
        let mut inner = self.inner();
        match (next, &mut inner.in_hand) {
            (Some(next), Some(in_hand)) => in_hand.position = next.clone(),
            _ => inner.in_hand = None,
        }
        let mut wanted = None;
        for (seq, accepted) in events {
            inner.progress.settle(seq);
            let Some(safe) = inner.progress.safe().cloned() else { continue };
            inner.given_up.take_if(|given_up| !given_up.is_beyond(&safe.position));
            if inner.policy.settled(&safe, accepted) {
                wanted = Some(safe.seq);
            }
        }
        count(inner.progress.safe().map(|safe| &safe.position));
        let news = inner.note_held();
        // With a barrier the saver hears of it when the handler has flushed.
        let flushes = wanted.is_some() && inner.policy.has_barrier();
        inner.save_after_flush |= flushes;
        self.tell(inner, wanted.is_some() && !flushes);
        if news {
            self.news.notify_one();
        }
        wanted
    }

    /// The reader is closed: what is not settled will be read again.
    pub(crate) fn abandon(&self) {
        let mut inner = self.inner();
        // A run that goes through events once more has more of them behind it than those in hand.
        if let Some(InHand { last, .. }) = inner.in_hand.take()
            && inner.given_up.as_ref().is_none_or(|before| last.is_beyond(before))
        {
            inner.given_up = Some(last);
        }
        // What was not noted yet is not in hand.
        inner.to_note = None;
        inner.left = inner.progress.unsettled();
        inner.progress.abandon();
        self.tell(inner, false);
    }

    /// The last event handed out and given up unsettled, which comes again.
    pub(crate) fn given_up(&self) -> Option<Checkpoint> {
        self.inner().given_up.clone()
    }

    /// The last settled position.
    pub(crate) fn safe(&self) -> Option<Checkpoint> {
        self.inner().progress.safe().map(|mark| mark.position.clone())
    }

    /// How many epochs have begun in this run before what is read next.
    pub(crate) fn epoch(&self) -> u32 {
        self.inner().progress.epoch()
    }

    pub(crate) fn gate(&self) -> watch::Receiver<Gate> {
        self.gate.subscribe()
    }

    /// The newest stored position, by its number.
    pub(crate) fn stored(&self) -> u64 {
        self.gate.borrow().stored
    }

    pub(crate) fn gate_is(&self, open: impl Fn(&Gate) -> bool) -> bool {
        open(&self.gate.borrow())
    }

    fn tell(&self, mut inner: MutexGuard<'_, Inner>, asked: bool) {
        if inner.watched || (asked && !inner.told) {
            inner.told = true;
            drop(inner);
            self.news.notify_one();
        }
    }

    // Called by the saver's task.

    pub(crate) fn view(&self) -> View {
        let inner = self.inner();
        View {
            held: inner
                .held_since
                .map(|since| HeldBack { since, durable: inner.policy.declared().map(|mark| mark.position.clone()) }),
            stored_by_work: inner.stored_by_work.clone(),
            safe: inner.progress.safe().cloned(),
            storable: inner.policy.storable().cloned(),
            flushed: inner.policy.flushed_up_to().filter(|_| inner.policy.has_barrier()).cloned(),
            has_barrier: inner.policy.has_barrier(),
            requested: inner.policy.requested().cloned(),
            last_read: inner.progress.last_read(),
            all_settled: inner.progress.all_settled(),
            in_hand: inner.in_hand.clone(),
            jumped: inner.jumped.clone(),
            to_note: inner.to_note.clone(),
        }
    }

    /// The UUID of the collection that was last seen in an event, and the epoch of that.
    pub(crate) fn seen(&self) -> Option<(u32, Arc<str>)> {
        self.inner().seen.clone()
    }

    /// The last event that was handed out in this run, if it is one that a history can be asked for.
    pub(crate) fn last_event(&self) -> Option<Checkpoint> {
        self.inner().handed_out.clone().filter(Checkpoint::names_event)
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
        self.gate.send_modify(|gate| (gate.closed, gate.stored) = (false, mark.seq));
    }

    /// Whether the handler has asked for a save since the last call.
    pub(crate) fn take_save_request(&self) -> bool {
        std::mem::take(&mut self.inner().save_requested)
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
