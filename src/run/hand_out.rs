//! Hands a batch to the handler, one call at a time, until all of it is settled: attempts and the save policy behind them;
//! what follows a failure is `failing`'s. It settles events at the desk and never stores anything itself; called by `deliver`.

use std::panic::AssertUnwindSafe;

use bson::DateTime;
use tracing::{error, trace, warn};

use crate::delivery::Delivery;
use crate::handler::Failure;
use crate::model::SubscriptionModel;
use crate::run::deliver::{Deliver, Ended, is_beyond};
use crate::run::desk::Gate;
use crate::run::failing::Patience;
use crate::run::policy::SaveMode;
use crate::run::work::{Done, Stored, panic_message};
use crate::status::Status;
use crate::storage::Hand;

/// A batch ends behind the event that fills it: however many its handler takes, they lie in memory together.
const BATCH_BYTES: usize = 16 << 20;

/// What one call of the handler gets, in feed order. Its allocation is used again.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    deliveries: Vec<Delivery>,
    /// The numbers they settle under.
    seqs: Vec<u64>,
    /// Room for what the predicate says of them.
    accepted: Vec<bool>,
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

    /// The number that the first one settles under.
    pub(crate) fn first_seq(&self) -> u64 {
        self.seqs.first().copied().unwrap_or_default()
    }

    pub(crate) fn first(&self) -> Option<&Delivery> {
        self.deliveries.first()
    }

    /// The front of it comes again.
    pub(crate) fn count_attempt(&mut self, handed: usize) {
        for delivery in self.deliveries.iter_mut().take(handed) {
            delivery.attempt += 1;
            delivery.may_be_repeat = true;
        }
    }

    fn remove_settled(&mut self, settled: usize) {
        self.deliveries.drain(..settled);
        self.seqs.drain(..settled);
        if self.is_empty() {
            self.bytes = 0;
        }
    }
}

/// How an event was settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    Handled,
    Skipped,
    DeadLettered,
    Parked,
}

impl How {
    pub(crate) fn count(self, status: &mut Status) -> &mut u64 {
        match self {
            Self::Handled => &mut status.handled,
            Self::Skipped => &mut status.skipped,
            Self::DeadLettered => &mut status.dead_lettered,
            Self::Parked => &mut status.parked,
        }
    }
}

impl<M: SubscriptionModel> Deliver<M> {
    /// Hands out until the whole batch is settled.
    pub(crate) async fn hand_out(&mut self, batch: &mut Batch) -> Result<(), Ended> {
        self.gate(|gate| !gate.closed).await?;
        if self.has_to_ask_for_parked() {
            self.know_parked().await?;
        }
        self.note_handed_out(batch);
        let (mut patience, mut has_failed) = (Patience::default(), false);
        loop {
            if self.may_park() {
                self.park(batch).await?;
            }
            if self.careful.is_some() && !has_failed {
                self.take_care(batch, &mut patience).await?;
            }
            let handed = self.deliverable(&batch.deliveries, &patience);
            if handed == 0 {
                return Ok(());
            }
            if self.barrier && !self.work.stores() && self.has_failed(batch) {
                // Should it take the handler along again, nothing else is lost with it.
                self.flush().await?;
            }
            let done = self.attempt(&batch.deliveries[..handed]).await?;
            let Done { settled, failed, renewed, stored, ended } = done;
            let last = stored.and(settled.checked_sub(1)).and_then(|last| self.desk.mark_of(batch.seqs[last]));
            let wanted = self.settle(batch, settled, How::Handled);
            match stored.zip(last) {
                Some((Stored { at }, last)) => self.desk.stored_by_work(last, at),
                None => self.saved_if(wanted).await?,
            }
            if let Some(ended) = ended {
                return Err(*ended);
            }
            if settled > 0 {
                self.store_with_care().await?;
                patience = Patience::default();
                self.forget_failed();
            }
            if settled < handed {
                let failure = failed.unwrap_or_else(|| Failure::retry("it settled only a part of its batch"));
                self.count_failure(batch.first_seq(), batch);
                if renewed && let Some(first) = batch.first().map(|first| first.position.clone()) {
                    self.begin_fresh(first, &failure.to_string()).await?;
                }
                // Events in a transaction are handled one by one: those behind it were not.
                let failed = if self.work.stores() { 1 } else { handed - settled };
                self.failed(batch, failed, failure, &mut patience).await?;
                has_failed = true;
                continue;
            }
            if std::mem::take(&mut has_failed) {
                self.board.set(|conditions| conditions.handler = None);
            }
            if let Some(why) = failed {
                warn!(subscription = %self.id, "the handler of subscription {} settled a whole batch and reported a failure: {why}", self.id);
            }
            if !batch.is_empty() && self.signals.stop.is_cancelled() {
                return Err(Ended::Asked);
            }
        }
    }

    /// If a save was asked for, the handler flushes before it, and in write-through mode the next event waits for it.
    pub(crate) async fn saved_if(&mut self, wanted: Option<u64>) -> Result<(), Ended> {
        let Some(wanted) = wanted else { return Ok(()) };
        if self.barrier {
            self.flush().await?;
        }
        match self.settings.save_mode {
            SaveMode::WriteThrough => self.gate(|gate| gate.stored >= wanted).await,
            SaveMode::WriteBehind => Ok(()),
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

    /// One call of the handler.
    async fn attempt(&mut self, batch: &[Delivery]) -> Result<Done, Ended> {
        let limit = self.settings.handler_timeout.filter(|_| !self.work.stores());
        if self.work.stores() {
            let mut template = self.template();
            if self.careful.is_some() {
                // What is noted as in hand is done when its position is committed.
                template.hand = Hand::Empty;
            }
            self.work.bind(template);
        }
        let call = self.board.handover.before(self.work.work(batch));
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
    pub(crate) fn settle(&mut self, batch: &mut Batch, settled: usize, how: How) -> Option<u64> {
        if settled == 0 {
            return None;
        }
        // Asked before, since a predicate may ask the desk itself.
        let mut accepted = std::mem::take(&mut batch.accepted);
        accepted.extend(batch.deliveries.iter().take(settled).map(|delivery| self.accepts(delivery)));
        let next = batch.deliveries.get(settled).map(|delivery| &delivery.position);
        let events = batch.seqs.iter().copied().zip(accepted.drain(..));
        let wanted = self.desk.settle(events, next, |safe| {
            self.board.count(|status| {
                let settled = settled as u64;
                status.settled += settled;
                *how.count(status) += settled;
                if safe.is_some() {
                    status.position = safe.cloned();
                }
                if next.is_none() {
                    status.in_hand_since = None;
                }
            });
        });
        if how != How::Handled {
            for seq in &batch.seqs[..settled] {
                self.trouble.put_by.note(*seq, how, self.desk.stored());
            }
        }
        batch.accepted = accepted;
        batch.remove_settled(settled);
        wanted
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

    pub(crate) async fn gate(&mut self, open: impl Fn(&Gate) -> bool) -> Result<(), Ended> {
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
