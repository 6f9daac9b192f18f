//! Takes reads from the reader, batch by batch and in feed order, and has them handed out (`hand_out`). It never stores
//! anything itself.

use std::pin::Pin;
use std::sync::Arc;

use bson::DateTime;
use futures::FutureExt;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};
use tracing::warn;

use crate::batch_handler::BatchLimits;
use crate::checkpoint::{Checkpoint, Kind};
use crate::delivery::{Context, Delivery};
use crate::error::SourceError;
use crate::event::ChangeEvent;
use crate::ids::{Epoch, Ownership, SubscriptionId};
use crate::model::{Fingerprint, Read, Reader, SourceState, SubscriptionModel};
use crate::reason::Reason;
use crate::run::barrier::Anew;
use crate::run::careful::Careful;
use crate::run::changes::OnInvalidate;
use crate::run::desk::Desk;
use crate::run::failing::Trouble;
use crate::run::hand_out::Batch;
use crate::run::maybe_seen::MaybeSeen;
use crate::run::open::{Again, Opening};
use crate::run::settings::Settings;
use crate::run::work::Work;
use crate::status::{Board, Phase};
use crate::storage::Source;

/// Everything of a run that stays the same through pauses.
pub(crate) struct Deliver<M: SubscriptionModel> {
    pub(crate) opening: Opening<M>,
    pub(crate) id: SubscriptionId,
    pub(crate) ownership: Ownership,
    /// The epoch the run began with.
    pub(crate) epoch: Epoch,
    pub(crate) settings: Settings,
    pub(crate) desk: Arc<Desk>,
    pub(crate) board: Arc<Board>,
    pub(crate) work: Box<dyn Work>,
    /// Whether the handler has to flush before anything is stored.
    pub(crate) barrier: bool,
    /// The handler knows where the run stands.
    pub(crate) told: bool,
    /// Set while the run is careful.
    pub(crate) careful: Option<Careful>,
    /// Set when what was handled is lost with its handler.
    pub(crate) anew: Option<Anew>,
    pub(crate) maybe_seen: MaybeSeen,
    /// The fingerprint of what is read.
    pub(crate) pipeline: Fingerprint,
    /// Whether a position may be stored before an event's is.
    pub(crate) recorded: bool,
    /// Where the positions come from that are read now.
    pub(crate) source: Source,
    /// The last new start behind lost history, by its number.
    pub(crate) restarted: Option<u64>,
    /// The last position taken from a reader, settled or not.
    pub(crate) taken: Option<Checkpoint>,
    /// The last event counted as read, and as delivered: one that comes again after a rest is counted once.
    pub(crate) counted: Option<Checkpoint>,
    pub(crate) handed_out: Option<Checkpoint>,
    pub(crate) trouble: Trouble,
    pub(crate) signals: Signals,
    /// Where the saver's task is told how an opened reader fares.
    pub(crate) opened: Option<mpsc::UnboundedSender<watch::Receiver<SourceState>>>,
}

/// How the saver's task ends a delivering: first asked, then told.
#[derive(Debug, Clone, Default)]
pub(crate) struct Signals {
    /// Hand out nothing more; the event in hand may finish. The handler sees it as `cancelled`.
    pub(crate) stop: CancellationToken,
    /// Drop the call in hand.
    pub(crate) abandon: CancellationToken,
}

/// How a reader was left.
enum Left {
    Ended(Ended),
    /// An `invalidate` was its last item, and the run is to go on behind it.
    Invalidated(Checkpoint),
    /// Its last item was an error that a new one may not meet.
    Broken(SourceError),
}

/// Why delivering ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// It was asked to.
    Asked,
    /// The source cannot go on.
    Stalled(Reason),
    /// The feed is over.
    Stopped(Reason),
    /// What was handled is lost with its handler; `Deliver::anew` says why.
    Anew,
}

impl<M: SubscriptionModel> Deliver<M> {
    /// Delivers until asked to stop or the source cannot go on; gives itself back, with the handler, for a resume.
    pub(crate) async fn run(mut self, reader: Option<M::Reader>) -> (Self, Ended) {
        let ended = self.open_and_deliver(reader).await;
        self.desk.abandon();
        self.board.count(|status| status.in_hand_since = None);
        self.board.set(|conditions| {
            (conditions.handler, conditions.letters, conditions.opening) = (None, None, None);
        });
        (self, ended)
    }

    /// Made ready to deliver again after a rest.
    pub(crate) fn begin_again(&mut self, signals: Signals) {
        self.signals = signals;
        self.taken = self.desk.safe();
        if let Some(given_up) = self.desk.given_up() {
            self.maybe_seen.give_up(given_up);
        }
    }

    async fn open_and_deliver(&mut self, reader: Option<M::Reader>) -> Ended {
        if let Err(ended) = self.tell_handler().await {
            return ended;
        }
        let mut again = Again::default();
        let mut next = reader;
        // Behind a rest the source may be another one.
        let mut was = next.is_none().then(|| self.source_at_rest());
        loop {
            let mut reader = match next.take() {
                Some(reader) => reader,
                None => {
                    let stop = self.signals.stop.clone();
                    let from = self.desk.safe();
                    let reopened = tokio::select! {
                        biased;
                        () = stop.cancelled() => return Ended::Asked,
                        reopened = again.open(&self.opening, from.as_ref(), was.as_ref(), &self.board) => reopened,
                    };
                    match reopened {
                        Ok(reader) => reader,
                        Err(reason @ Reason::HistoryLost { .. }) => match self.restart(reason).await {
                            Ok(reader) => reader,
                            Err(ended) => return ended,
                        },
                        Err(reason) => return Ended::Stalled(reason),
                    }
                }
            };
            was = None;
            // The saver's task may be gone already; then nobody asks how the reader fares.
            if let Some(opened) = &self.opened {
                let _ = opened.send(reader.state());
            }
            self.board.set(|conditions| conditions.phase = Phase::Running);
            let taken = self.taken.clone();
            match self.deliver(&mut reader).await {
                Left::Ended(Ended::Stalled(reason @ Reason::HistoryLost { .. })) => {
                    drop(reader);
                    match self.restart(reason).await {
                        Ok(reader) => next = Some(reader),
                        Err(ended) => return ended,
                    }
                }
                Left::Ended(ended) => return ended,
                // A reader that ends without having read anything has nothing behind the `invalidate` either.
                Left::Invalidated(_) if self.taken == taken => return Ended::Stopped(Reason::Ended),
                Left::Invalidated(position) => self.say_continues(&position),
                Left::Broken(error) => {
                    again.broken(error, self.taken != taken);
                    self.board.count(|status| status.reconnects += 1);
                }
            }
        }
    }

    /// Where the position that it goes on at comes from.
    fn source_at_rest(&self) -> Source {
        let mut source = self.source.clone();
        source.last_event = self.desk.last_event().or(source.last_event);
        source
    }

    async fn deliver(&mut self, reader: &mut M::Reader) -> Left {
        let context = Arc::new(Context {
            subscription: self.id.clone(),
            fence: self.ownership.fence,
            epoch: Epoch(self.epoch.0 + i64::from(self.desk.epoch())),
            hold: self.hold(),
            cancelled: self.signals.stop.clone(),
        });
        let stop = self.signals.stop.clone();
        let stop = stop.cancelled();
        tokio::pin!(stop);
        let mut batch = Batch::default();
        loop {
            tokio::task::consume_budget().await;
            if self.barrier
                && self.desk.flush_is_wanted()
                && let Err(ended) = self.flush().await
            {
                return Left::Ended(ended);
            }
            let last = match self.gather(reader, stop.as_mut(), &mut batch, &context).await {
                Ok(last) => last,
                Err(ended) => return Left::Ended(ended),
            };
            if !batch.is_empty()
                && let Err(ended) = self.hand_out(&mut batch).await
            {
                return Left::Ended(ended);
            }
            if let Some(left) = last {
                return left;
            }
        }
    }

    /// Takes what one call of the handler gets, or a quiet read. Answers how the reader was left, when what was taken
    /// is the last of it.
    async fn gather(
        &mut self,
        reader: &mut M::Reader,
        mut stop: Pin<&mut WaitForCancellationFuture<'_>>,
        batch: &mut Batch,
        context: &Arc<Context>,
    ) -> Result<Option<Left>, Ended> {
        let limits = if self.careful.is_some() { BatchLimits::new(1) } else { self.work.limits() };
        let mut waits_until = None;
        loop {
            let read = if batch.is_empty() {
                tokio::select! {
                    biased;
                    () = stop.as_mut() => return Err(Ended::Asked),
                    read = reader.next() => read,
                    () = self.desk.flush_wanted(), if self.barrier => return Ok(None),
                }
            } else if limits.max_wait.is_zero() {
                match reader.next().now_or_never() {
                    Some(read) => read,
                    None => return Ok(None),
                }
            } else {
                let until = *waits_until.get_or_insert_with(|| Instant::now() + limits.max_wait);
                tokio::select! {
                    biased;
                    () = stop.as_mut() => return Err(Ended::Asked),
                    read = reader.next() => read,
                    () = tokio::time::sleep_until(until) => return Ok(None),
                }
            };
            match read {
                Some(Ok(Read::Quiet(position))) => {
                    self.note_taken(&position);
                    self.desk.read_quiet(position);
                    if batch.is_empty() {
                        self.show_safe(self.desk.safe());
                        return Ok(None);
                    }
                }
                Some(Ok(Read::Event { event, position })) => {
                    self.take(event, position, batch, context);
                    if batch.is_full(limits.max) {
                        return Ok(None);
                    }
                }
                Some(Err(SourceError::Refused(reason))) => return Ok(Some(Left::Ended(Ended::Stalled(reason)))),
                // What can heal goes on by itself, though this reader could not cure it.
                Some(Err(error)) => return Ok(Some(Left::Broken(error))),
                None => return Ok(Some(self.end_of_feed())),
            }
        }
    }

    fn take(&mut self, event: ChangeEvent, position: Checkpoint, batch: &mut Batch, context: &Arc<Context>) {
        let seq = self.desk.read_event(position.clone(), Kind::of_event(&position));
        let is_new = is_beyond(&position, self.counted.as_ref());
        if is_new {
            self.counted = Some(position.clone());
        }
        self.note_taken(&position);
        self.board.count(|status| {
            status.events += u64::from(is_new);
            status.last_event_at = Some(DateTime::now());
        });
        if batch.is_empty() {
            self.maybe_seen.forget_before(&position);
        }
        let may_be_repeat = self.maybe_seen.covers(&position);
        batch.push(seq, Delivery::new(event, position, may_be_repeat, context.clone()));
    }

    fn note_taken(&mut self, position: &Checkpoint) {
        if position.is_invalidate() {
            self.source.collection_uuid = None;
        } else {
            self.source.see(position);
        }
        self.taken = Some(position.clone());
    }

    fn end_of_feed(&self) -> Left {
        match (&self.taken, self.settings.on_invalidate) {
            (Some(position), OnInvalidate::Continue) if position.is_invalidate() => Left::Invalidated(position.clone()),
            (Some(position), OnInvalidate::Stop) if position.is_invalidate() => {
                Left::Ended(Ended::Stopped(Reason::Invalidated { position: position.clone() }))
            }
            _ => Left::Ended(Ended::Stopped(Reason::Ended)),
        }
    }

    fn say_continues(&self, position: &Checkpoint) {
        let id = &self.id;
        warn!(
            subscription = %id, %position,
            "what subscription {id} watches was dropped or renamed: it goes on behind the invalidate at {position}"
        );
    }

    pub(crate) fn show_safe(&self, safe: Option<Checkpoint>) {
        self.board.count(|status| status.position = safe);
    }
}

pub(crate) fn is_beyond(position: &Checkpoint, last: Option<&Checkpoint>) -> bool {
    last.is_none_or(|last| position.is_beyond(last))
}
