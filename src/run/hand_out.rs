//! Hands a batch to the handler, one call at a time, until all of it is settled: attempts, retries, and the save policy
//! behind them. It settles events at the desk and never stores anything itself; called by `deliver`.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use bson::DateTime;
use tokio::time::Instant;
use tracing::{error, trace, warn};

use crate::checkpoint::Checkpoint;
use crate::delivery::Delivery;
use crate::model::SubscriptionModel;
use crate::reason::Reason;
use crate::run::deliver::{Deliver, Ended, is_beyond};
use crate::run::desk::Gate;
use crate::run::policy::SaveMode;
use crate::run::repeats::Repeats;
use crate::run::work::{Done, panic_message};

const YIELD_EVERY: Duration = Duration::from_millis(1);
/// A batch ends behind the event that fills it: however many its handler takes, they lie in memory together.
const BATCH_BYTES: usize = 16 << 20;

/// What one call of the handler gets, in feed order. Its allocation is used again.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    deliveries: Vec<Delivery>,
    /// The numbers they settle under.
    seqs: Vec<u64>,
    bytes: usize,
}

impl Batch {
    pub(crate) fn push(&mut self, seq: u64, delivery: Delivery) {
        self.bytes += delivery.event.bytes().len();
        self.seqs.push(seq);
        self.deliveries.push(delivery);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.deliveries.is_empty()
    }

    pub(crate) fn is_full(&self, max: usize) -> bool {
        self.deliveries.len() >= max || self.bytes >= BATCH_BYTES
    }

    fn remove_settled(&mut self, settled: usize) {
        self.deliveries.drain(..settled);
        self.seqs.drain(..settled);
        if self.is_empty() {
            self.bytes = 0;
        }
    }
}

impl<M: SubscriptionModel> Deliver<M> {
    /// Hands out until the whole batch is settled.
    pub(crate) async fn hand_out(&mut self, batch: &mut Batch) -> Result<(), Ended> {
        self.gate(|gate| !gate.closed).await?;
        self.note_handed_out(batch);
        self.let_others_run().await;
        let mut backoff = None;
        let mut repeats = Repeats::default();
        loop {
            let Done { settled, failed, renewed } = self.attempt(&batch.deliveries).await?;
            let wanted = self.settle(batch, settled);
            if wanted.is_some() && self.barrier {
                self.flush().await?;
            }
            if let Some(wanted) = wanted
                && self.settings.save_mode == SaveMode::WriteThrough
            {
                self.gate(|gate| gate.stored >= wanted).await?;
            }
            let (first, why) = match (batch.deliveries.first(), failed) {
                (Some(first), why) => (first, why.unwrap_or_else(|| "it settled only a part of its batch".into())),
                (None, why) => {
                    if let Some(why) = why {
                        warn!(subscription = %self.id, "the handler of subscription {} settled a whole batch and reported a failure: {why}", self.id);
                    }
                    if backoff.is_some() {
                        self.board.set(|conditions| conditions.handler = None);
                    }
                    return Ok(());
                }
            };
            if renewed {
                self.begin_fresh(first.position.clone(), &why).await?;
            }
            if settled > 0 {
                (backoff, repeats) = (None, Repeats::default());
            }
            let wait = backoff.get_or_insert_with(|| self.settings.retry_backoff.clone()).next_wait();
            let (position, attempts) = (first.position.clone(), first.attempt);
            self.failed(position, attempts, why, wait, &mut repeats).await?;
            for delivery in &mut batch.deliveries {
                delivery.attempt += 1;
                delivery.may_be_repeat = true;
            }
        }
    }

    fn note_handed_out(&mut self, batch: &Batch) {
        let (Some(first), Some(last)) = (batch.deliveries.first(), batch.deliveries.last()) else { return };
        for delivery in &batch.deliveries {
            trace!(subscription = %self.id, position = %delivery.position, "delivering");
        }
        self.desk.hand_out(first.position.clone(), last.position.clone());
        let before = self.handed_out.as_ref();
        let new = batch.deliveries.iter().filter(|delivery| is_beyond(&delivery.position, before));
        let (delivered, replayed) =
            new.fold((0, 0), |(n, repeats), delivery| (n + 1, repeats + u64::from(delivery.may_be_repeat)));
        if delivered > 0 {
            self.handed_out = Some(last.position.clone());
        }
        self.board.count(|status| {
            status.delivered += delivered;
            status.replayed += replayed;
            status.in_hand_since = Some(DateTime::now());
        });
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

    /// One call of the handler.
    async fn attempt(&mut self, batch: &[Delivery]) -> Result<Done, Ended> {
        let limit = self.settings.handler_timeout;
        let call = self.work.work(batch);
        let call = async {
            match limit {
                None => Some(call.await),
                Some(limit) => tokio::time::timeout(limit, call).await.ok(),
            }
        };
        let done = tokio::select! {
            biased;
            done = call => done,
            () = self.signals.abandon.cancelled() => return Err(self.abandon_call()),
        };
        Ok(done.unwrap_or_else(|| {
            let why = format!("it took longer than its limit of {:?}", limit.unwrap_or_default());
            Done { renewed: self.work.renew(), ..Done::failed(0, why) }
        }))
    }

    /// Settles the front of the batch. Answers the number of the position a save was asked for, if one was.
    fn settle(&mut self, batch: &mut Batch, settled: usize) -> Option<u64> {
        let (mut wanted, mut safe) = (None, None);
        for at in 0..settled {
            let accepted = self.accepts(&batch.deliveries[at]);
            let next = batch.deliveries.get(at + 1).map(|delivery| &delivery.position);
            let answer = self.desk.settle(batch.seqs[at], accepted, next);
            wanted = answer.wanted.or(wanted);
            safe = answer.safe;
        }
        batch.remove_settled(settled);
        let is_done = batch.is_empty();
        self.board.count(|status| {
            status.settled += settled as u64;
            if safe.is_some() {
                status.position = safe;
            }
            if is_done {
                status.in_hand_since = None;
            }
        });
        wanted
    }

    /// An attempt has failed: says so, and waits for the next one.
    async fn failed(
        &mut self,
        position: Checkpoint,
        attempts: u32,
        error: String,
        wait: Duration,
        repeats: &mut Repeats,
    ) -> Result<(), Ended> {
        if repeats.is_due() {
            let id = &self.id;
            warn!(
                subscription = %id, %position, attempts,
                "the handler of subscription {id} failed for the event at {position} (attempt {attempts}): {error}"
            );
        }
        let until = Instant::now() + wait;
        loop {
            tokio::select! {
                biased;
                () = self.signals.stop.cancelled() => return Err(Ended::Asked),
                () = tokio::time::sleep_until(until) => break,
                () = self.desk.flush_wanted(), if self.barrier => {}
            }
            self.flush().await?;
        }
        let reason = Reason::HandlerFailing { position, attempts, error };
        self.board.set(|conditions| conditions.handler = Some(reason));
        Ok(())
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
        if self.desk.gate_is(&open) {
            return Ok(());
        }
        let mut gate = self.desk.gate();
        tokio::select! {
            biased;
            () = self.signals.stop.cancelled() => Err(Ended::Asked),
            // The desk outlives this task, so the gate cannot be gone.
            _ = gate.wait_for(open) => Ok(()),
        }
    }
}
