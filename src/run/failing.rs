//! What follows a failed attempt: again, after a wait, or what the failure policy or the handler's own verdict says; and the
//! parking of events behind the dead letters of their document. Called by `hand_out`, and never calls the handler.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, warn};

use crate::backoff::Backoff;
use crate::checkpoint::Checkpoint;
use crate::dead_letter::DynDeadLetterStorage;
use crate::delivery::Delivery;
use crate::error::StorageError;
use crate::handler::{Failure, Verdict};
use crate::letter::{DocumentKey, MAX_LETTERS, MAX_SEQUENCES, NewLetter, ParkingLimit, PutOutcome};
use crate::model::SubscriptionModel;
use crate::on_failure::Then;
use crate::reason::Reason;
use crate::run::deliver::{Deliver, Ended};
use crate::run::hand_out::{Batch, How};
use crate::run::repeats::Repeats;
use crate::storage::BoxFuture;

/// How often a missing privilege is asked for again.
const UNAUTHORIZED_AGAIN: Duration = Duration::from_secs(10);
/// What of an error is kept: so many causes, each so long.
const CAUSES: usize = 16;
const CAUSE_BYTES: usize = 4096;

/// The documents that may have dead letters, as far as the run knows: those that had some when it began, and those it gave
/// some itself. None else gives any. A document that is not here has none; of one that is here the storage knows.
#[derive(Debug, Default)]
pub(crate) struct Parked(Option<HashSet<DocumentKey>>);

impl Parked {
    fn holds(&self, delivery: &Delivery) -> bool {
        let known = self.0.as_ref().filter(|known| !known.is_empty());
        known.is_some_and(|known| known.contains(&DocumentKey::of(&delivery.event)))
    }
}

/// How the first event in hand fares: its failures in a row.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    failures: u32,
    backoff: Option<Backoff>,
    repeats: Repeats,
    first: Option<Instant>,
    /// Its next attempt is made with it alone.
    alone: bool,
}

/// What follows a failure.
enum Next {
    Again,
    Then(Then, Option<Arc<dyn DynDeadLetterStorage>>),
}

impl<M: SubscriptionModel> Deliver<M> {
    /// How many events from the front the next call gets. None is parked, as far as is known here.
    pub(crate) fn deliverable(&self, batch: &[Delivery], patience: &Patience) -> usize {
        if patience.alone {
            return batch.len().min(1);
        }
        batch.iter().take_while(|delivery| !self.parked.holds(delivery)).count()
    }

    /// Asks, once, which documents have dead letters.
    pub(crate) async fn know_parked(&mut self) -> Result<(), Ended> {
        if self.parked.0.is_some() || !self.settings.park_later_events {
            return Ok(());
        }
        let Some(storage) = self.settings.dead_letters.clone() else { return Ok(()) };
        let id = self.id.clone();
        let sequences = self.insist(|| storage.dyn_sequences(&id)).await?;
        let known = sequences.into_iter().map(|sequence| sequence.key).filter(DocumentKey::parks);
        self.parked.0 = Some(known.collect());
        Ok(())
    }

    /// Parks the events at the front whose documents have dead letters, up to the first that is to be delivered.
    pub(crate) async fn park(&mut self, batch: &mut Batch) -> Result<(), Ended> {
        while let Some(first) = batch.first().filter(|first| self.parked.holds(first)).cloned() {
            let Some(storage) = self.settings.dead_letters.clone() else { return Ok(()) };
            let letter = self.letter(&first);
            match self.insist(|| storage.dyn_append(&letter)).await? {
                PutOutcome::Stored | PutOutcome::AlreadyStored => {
                    let (id, position, key) = (&self.id, &first.position, &letter.key);
                    debug!(subscription = %id, %position, %key, "parked behind the dead letters of its document");
                    self.settle_first(batch, How::Parked).await?;
                }
                PutOutcome::NoSequence => {
                    self.parked.0.as_mut().map(|known| known.remove(&letter.key));
                }
                PutOutcome::Full(limit) => return Err(full(&letter, limit)),
            }
        }
        Ok(())
    }

    /// The first of `handed` events has failed.
    pub(crate) async fn failed(
        &mut self,
        batch: &mut Batch,
        handed: usize,
        failure: Failure,
        patience: &mut Patience,
    ) -> Result<(), Ended> {
        let Some(first) = batch.first().cloned() else { return Ok(()) };
        let now = Instant::now();
        patience.failures = patience.failures.saturating_add(1);
        let since = *patience.first.get_or_insert(now);
        let (attempts, position, mut error) = (patience.failures, first.position.clone(), failure.to_string());
        let next = self.follows(&failure, handed, patience);
        let id = self.id.clone();
        let key = DocumentKey::of(&first.event);
        match next {
            Next::Again => {
                if failure.verdict() == Verdict::DeadLetter {
                    error.push_str(
                        " (it is to be a dead letter, and there is no storage for it: set .dead_letters(storage))",
                    );
                }
                self.again(position, error, patience).await?;
                batch.count_attempt(handed);
                return Ok(());
            }
            Next::Then(Then::Stop, _) => {
                return Err(Ended::Stopped(Reason::HandlerFailed { position, attempts, error }));
            }
            Next::Then(Then::DeadLetter, Some(storage)) => {
                // From here on it is the storage that is waited for.
                self.board.set(|conditions| conditions.handler = None);
                let letter = self.letter(&first);
                let chain = bounded(failure.chain());
                let put = || -> BoxFuture<'static, _> {
                    let (storage, letter) = (storage.clone(), letter.clone());
                    let letter = letter.failed(attempts, chain.clone(), since.elapsed(), now.elapsed());
                    Box::pin(async move { storage.dyn_put(&letter).await })
                };
                // Before, since it may be stored though its answer never comes.
                if let Some(known) = self.parked.0.as_mut().filter(|_| key.parks()) {
                    known.insert(key.clone());
                }
                match self.insist(put).await? {
                    PutOutcome::Stored | PutOutcome::AlreadyStored => {}
                    PutOutcome::Full(limit) => return Err(full(&letter, limit)),
                    PutOutcome::NoSequence => {
                        let message = "the dead letter storage began no sequence".to_owned();
                        return Err(Ended::Stalled(Reason::RefusedByServer { code: 0, message }));
                    }
                }
                warn!(
                    subscription = %id, %position, %key, attempts,
                    "the event of {key} at {position} is a dead letter of subscription {id} after {attempts} failed attempts: {error}"
                );
                self.settle_first(batch, How::DeadLettered).await?;
            }
            Next::Then(Then::DeadLetter | Then::Skip, _) => {
                warn!(
                    subscription = %id, %position, %key, attempts,
                    "subscription {id} skips the event of {key} at {position} after {attempts} failed attempts: {error}"
                );
                self.settle_first(batch, How::Skipped).await?;
            }
        }
        self.board.set(|conditions| conditions.handler = None);
        *patience = Patience::default();
        Ok(())
    }

    fn follows(&self, failure: &Failure, handed: usize, patience: &mut Patience) -> Next {
        let storage = self.settings.dead_letters.clone();
        match (failure.verdict(), self.settings.on_failure.cap()) {
            (Verdict::Stop, _) => Next::Then(Then::Stop, None),
            (Verdict::Skip, _) => Next::Then(Then::Skip, None),
            (Verdict::DeadLetter, _) if storage.is_some() => Next::Then(Then::DeadLetter, storage),
            (Verdict::Retry | Verdict::DeadLetter, Some((retries, then))) if patience.failures > retries => {
                // Nobody knows which of several it was.
                if handed > 1 {
                    patience.alone = true;
                    return Next::Again;
                }
                Next::Then(then, storage)
            }
            (Verdict::Retry | Verdict::DeadLetter, _) => Next::Again,
        }
    }

    /// Says that an attempt has failed, and waits for the next one.
    async fn again(&mut self, position: Checkpoint, error: String, patience: &mut Patience) -> Result<(), Ended> {
        let attempts = patience.failures;
        if patience.repeats.is_due() {
            let id = &self.id;
            warn!(
                subscription = %id, %position, attempts,
                "the handler of subscription {id} failed for the event at {position} (attempt {attempts}): {error}"
            );
        }
        let wait = patience.backoff.get_or_insert_with(|| self.settings.on_failure.new_backoff()).next_wait();
        self.rest(wait).await?;
        let reason = Reason::HandlerFailing { position, attempts, error };
        self.board.set(|conditions| conditions.handler = Some(reason));
        Ok(())
    }

    async fn settle_first(&mut self, batch: &mut Batch, how: How) -> Result<(), Ended> {
        let wanted = self.settle(batch, 1, how);
        self.written_through(wanted).await
    }

    fn letter(&self, delivery: &Delivery) -> NewLetter {
        let key = DocumentKey::of(&delivery.event);
        let (position, event) = (delivery.position.clone(), delivery.event.bytes().clone());
        NewLetter::parked(self.id.clone(), key, self.epoch, position, event)
    }

    /// Asks the dead letter storage until it answers. What it refuses for good needs a person.
    async fn insist<'a, T>(&mut self, ask: impl Fn() -> BoxFuture<'a, Result<T, StorageError>>) -> Result<T, Ended> {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
        let mut repeats = Repeats::default();
        loop {
            let answer = tokio::select! {
                biased;
                answer = ask() => answer,
                () = self.signals.abandon.cancelled() => return Err(Ended::Asked),
            };
            let error = match answer {
                Ok(answer) => {
                    if repeats.count() > 0 {
                        self.board.set(|conditions| conditions.letters = None);
                    }
                    return Ok(answer);
                }
                Err(error) => error,
            };
            let wait = match &error {
                StorageError::Unavailable { .. } => backoff.next_wait(),
                StorageError::Unauthorized { .. } => UNAUTHORIZED_AGAIN,
                refused => return Err(Ended::Stalled(refused.reason())),
            };
            if repeats.is_due() {
                let (id, failures) = (&self.id, repeats.count());
                warn!(subscription = %id, failures, "the dead letter storage of subscription {id} fails: {error}");
            }
            let reason = match error.reason() {
                Reason::StorageUnavailable { message } => {
                    Reason::StorageUnavailable { message: format!("dead letters: {message}") }
                }
                reason => reason,
            };
            self.board.set(|conditions| conditions.letters = Some(reason));
            self.rest(wait).await?;
        }
    }

    async fn rest(&mut self, wait: Duration) -> Result<(), Ended> {
        tokio::select! {
            biased;
            () = self.signals.stop.cancelled() => Err(Ended::Asked),
            () = tokio::time::sleep(wait) => Ok(()),
        }
    }
}

fn full(letter: &NewLetter, limit: ParkingLimit) -> Ended {
    let limit = match limit {
        ParkingLimit::Documents => format!("{MAX_SEQUENCES} documents have dead letters"),
        ParkingLimit::Events => format!("the document has {MAX_LETTERS} dead letters"),
    };
    Ended::Stalled(Reason::ParkingFull { position: letter.position.clone(), document: letter.key.to_string(), limit })
}

/// An error of any size, cut to what is kept.
pub(crate) fn bounded(mut chain: Vec<String>) -> Vec<String> {
    chain.truncate(CAUSES);
    for cause in &mut chain {
        let end = (0..=CAUSE_BYTES.min(cause.len())).rev().find(|at| cause.is_char_boundary(*at));
        cause.truncate(end.unwrap_or(0));
    }
    chain
}
