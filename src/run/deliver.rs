//! Takes reads from the reader and hands them out, one call at a time and in feed order. It settles events at the
//! desk and never stores anything itself.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use bson::DateTime;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{error, trace, warn};

use crate::checkpoint::Checkpoint;
use crate::delivery::{Context, Delivery};
use crate::error::SourceError;
use crate::event::ChangeEvent;
use crate::ids::{Ownership, SubscriptionId};
use crate::model::{Read, Reader, SourceState, SubscriptionModel};
use crate::reason::Reason;
use crate::run::desk::{Desk, Gate};
use crate::run::maybe_seen::MaybeSeen;
use crate::run::open::{Again, Opening};
use crate::run::policy::SaveMode;
use crate::run::repeats::Repeats;
use crate::run::saver::kind_of;
use crate::run::settings::Settings;
use crate::run::work::{Work, panic_message};
use crate::status::{Board, Phase};

const YIELD_EVERY: Duration = Duration::from_millis(1);

/// Everything of a run that stays the same through pauses.
pub(crate) struct Deliver<M: SubscriptionModel> {
    pub(crate) opening: Opening<M>,
    pub(crate) id: SubscriptionId,
    pub(crate) ownership: Ownership,
    pub(crate) settings: Settings,
    pub(crate) desk: Arc<Desk>,
    pub(crate) board: Arc<Board>,
    pub(crate) work: Box<dyn Work>,
    pub(crate) maybe_seen: MaybeSeen,
    /// The last position taken from a reader, settled or not.
    pub(crate) taken: Option<Checkpoint>,
    /// The last event counted as read, and as delivered: one that comes again after a rest is counted once.
    pub(crate) counted: Option<Checkpoint>,
    pub(crate) handed_out: Option<Checkpoint>,
    /// When the tasks that this one woke last got their turn.
    pub(crate) yielded: Option<Instant>,
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
    /// The record is no longer the run's own.
    Stopped(Reason),
}

impl<M: SubscriptionModel> Deliver<M> {
    /// Delivers until asked to stop or the source cannot go on; gives itself back, with the handler, for a resume.
    pub(crate) async fn run(mut self, reader: Option<M::Reader>) -> (Self, Ended) {
        let ended = self.open_and_deliver(reader).await;
        self.desk.abandon();
        self.board.count(|status| status.in_hand_since = None);
        self.board.set(|conditions| (conditions.handler, conditions.opening) = (None, None));
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
        let mut again = Again::default();
        let mut next = reader;
        loop {
            let mut reader = match next.take() {
                Some(reader) => reader,
                None => {
                    let stop = self.signals.stop.clone();
                    let from = self.desk.safe();
                    let reopened = tokio::select! {
                        biased;
                        () = stop.cancelled() => return Ended::Asked,
                        reopened = again.open(&self.opening, from.as_ref(), &self.board) => reopened,
                    };
                    match reopened {
                        Ok(reader) => reader,
                        Err(reason) => return Ended::Stalled(reason),
                    }
                }
            };
            // The saver's task may be gone already; then nobody asks how the reader fares.
            if let Some(opened) = &self.opened {
                let _ = opened.send(reader.state());
            }
            self.board.set(|conditions| conditions.phase = Phase::Running);
            let taken = self.taken.clone();
            let error = match self.deliver(&mut reader).await {
                Left::Ended(ended) => return ended,
                Left::Broken(error) => error,
            };
            again.broken(error, self.taken != taken);
            self.board.count(|status| status.reconnects += 1);
        }
    }

    async fn deliver(&mut self, reader: &mut M::Reader) -> Left {
        let context = Arc::new(Context {
            subscription: self.id.clone(),
            fence: self.ownership.fence,
            cancelled: self.signals.stop.clone(),
        });
        let stop = self.signals.stop.clone();
        let stop = stop.cancelled();
        tokio::pin!(stop);
        loop {
            tokio::task::consume_budget().await;
            let read = tokio::select! {
                biased;
                () = &mut stop => return Left::Ended(Ended::Asked),
                read = reader.next() => read,
            };
            match read {
                Some(Ok(Read::Quiet(position))) => {
                    self.taken = Some(position.clone());
                    self.desk.read_quiet(position);
                    self.show_position();
                }
                Some(Ok(Read::Event { event, position })) => {
                    if let Err(ended) = self.event(event, position, &context).await {
                        return Left::Ended(ended);
                    }
                }
                Some(Err(SourceError::Refused(reason))) => return Left::Ended(Ended::Stalled(reason)),
                // What can heal goes on by itself, though this reader could not cure it.
                Some(Err(error)) => return Left::Broken(error),
                None => return Left::Ended(Ended::Stopped(self.end_of_feed())),
            }
        }
    }

    fn end_of_feed(&self) -> Reason {
        match &self.taken {
            Some(position) if position.is_invalidate() => Reason::Invalidated { position: position.clone() },
            _ => Reason::Ended,
        }
    }

    /// Hands one event out until it is settled.
    async fn event(&mut self, event: ChangeEvent, position: Checkpoint, context: &Arc<Context>) -> Result<(), Ended> {
        let seq = self.desk.read_event(position.clone(), kind_of(&position));
        self.taken = Some(position.clone());
        let is_new = is_beyond(&position, self.counted.as_ref());
        self.counted = Some(position.clone());
        self.board.count(|status| {
            status.events += u64::from(is_new);
            status.last_event_at = Some(DateTime::now());
        });
        self.gate(|gate| !gate.closed).await?;
        let may_be_repeat = self.maybe_seen.covers(&position);
        trace!(subscription = %self.id, %position, "delivering");
        self.desk.hand_out(position.clone());
        let is_new = is_beyond(&position, self.handed_out.as_ref());
        self.handed_out = Some(position.clone());
        self.board.count(|status| {
            status.delivered += u64::from(is_new);
            status.replayed += u64::from(is_new && may_be_repeat);
            status.in_hand_since = Some(DateTime::now());
        });
        self.let_others_run().await;
        let delivery = Delivery::new(event, position, may_be_repeat, context.clone());
        let delivery = self.until_settled(delivery).await?;
        let accepted = self.accepts(&delivery);
        let asked = self.desk.settle(seq, accepted);
        self.show_position();
        self.board.count(|status| {
            status.settled += 1;
            status.in_hand_since = None;
        });
        match asked {
            Some(wanted) if self.settings.save_mode == SaveMode::WriteThrough => {
                self.gate(|gate| gate.stored >= wanted).await
            }
            _ => Ok(()),
        }
    }

    /// The handler may block its thread, and a task that was woken here waits where no other thread takes it from: it
    /// has its turn before. That costs a microsecond, so it is done when the saver's task was woken, else now and then.
    async fn let_others_run(&mut self) {
        let now = Instant::now();
        if self.desk.has_woken() || self.yielded.is_none_or(|at| now - at >= YIELD_EVERY) {
            self.yielded = Some(now);
            tokio::task::yield_now().await;
        }
    }

    async fn until_settled(&mut self, mut delivery: Delivery) -> Result<Delivery, Ended> {
        let mut backoff = self.settings.retry_backoff.clone();
        let mut repeats = Repeats::default();
        loop {
            let Some(error) = self.attempt(&delivery).await? else {
                if delivery.attempt > 1 {
                    self.board.set(|conditions| conditions.handler = None);
                }
                return Ok(delivery);
            };
            let attempts = delivery.attempt;
            if repeats.is_due() {
                let (id, position) = (&self.id, &delivery.position);
                warn!(
                    subscription = %id, %position, attempts,
                    "the handler of subscription {id} failed for the event at {position} (attempt {attempts}): {error}"
                );
            }
            tokio::select! {
                biased;
                () = self.signals.stop.cancelled() => return Err(Ended::Asked),
                () = tokio::time::sleep(backoff.next_wait()) => {}
            }
            let reason = Reason::HandlerFailing { position: delivery.position.clone(), attempts, error };
            self.board.set(|conditions| conditions.handler = Some(reason));
            delivery.attempt += 1;
            delivery.may_be_repeat = true;
        }
    }

    /// One call of the handler; `Some` is why it failed.
    async fn attempt(&mut self, delivery: &Delivery) -> Result<Option<String>, Ended> {
        let abandon = self.signals.abandon.clone();
        let limit = self.settings.handler_timeout;
        let call = self.work.work(delivery);
        let call = async {
            match limit {
                None => Some(call.await),
                Some(limit) => tokio::time::timeout(limit, call).await.ok(),
            }
        };
        let done = tokio::select! {
            biased;
            done = call => done,
            () = abandon.cancelled() => {
                self.work.renew();
                return Err(Ended::Asked);
            }
        };
        let done = done.unwrap_or_else(|| {
            self.work.renew();
            Err(format!("it took longer than its limit of {:?}", limit.unwrap_or_default()))
        });
        Ok(done.err())
    }

    /// Asks `save_when`. A predicate that panics has not said yes: nothing is stored past the event.
    fn accepts(&self, delivery: &Delivery) -> bool {
        std::panic::catch_unwind(AssertUnwindSafe(|| self.settings.save.accepts(delivery))).unwrap_or_else(|panic| {
            let (id, position) = (&self.id, &delivery.position);
            error!(
                subscription = %id, %position,
                "save_when of subscription {id} panicked, which declines the event at {position}: {}", panic_message(&*panic)
            );
            false
        })
    }

    async fn gate(&mut self, open: impl Fn(&Gate) -> bool) -> Result<(), Ended> {
        let mut gate = self.desk.gate();
        if open(&gate.borrow()) {
            return Ok(());
        }
        tokio::select! {
            biased;
            () = self.signals.stop.cancelled() => Err(Ended::Asked),
            // The desk outlives this task, so the gate cannot be gone.
            _ = gate.wait_for(open) => Ok(()),
        }
    }

    fn show_position(&self) {
        let safe = self.desk.safe();
        self.board.count(|status| {
            status.lag = safe.as_ref().zip(status.head.as_ref()).and_then(|(at, head)| crate::status::lag(at, head));
            status.position = safe;
        });
    }
}

fn is_beyond(position: &Checkpoint, last: Option<&Checkpoint>) -> bool {
    last.is_none_or(|last| position.is_beyond(last))
}
