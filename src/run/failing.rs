//! What follows a failed attempt: again, after a wait, or what the failure policy or the handler's own verdict says; and the
//! parking of events behind the dead letters of their document. Called by `hand_out`, and never calls the handler.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use crate::backoff::Backoff;
use crate::checkpoint::Checkpoint;
use crate::dead_letter::DynDeadLetterStorage;
use crate::handler::{Failure, Verdict};
use crate::letter::{DocumentKey, PutOutcome};
use crate::model::SubscriptionModel;
use crate::on_failure::Then;
use crate::reason::Reason;
use crate::run::deliver::{Deliver, Ended};
use crate::run::hand_out::{Batch, How};
use crate::run::parking::{Parked, full};
use crate::run::repeats::Repeats;
use crate::status::Status;
use crate::storage::BoxFuture;

/// What of an error is kept: so many causes, each so long.
const CAUSES: usize = 16;
const CAUSE_BYTES: usize = 4096;

/// An event that has failed: how often, since when, and when last. It outlasts pauses, and handlers that are lost.
#[derive(Debug, Clone)]
struct Failed {
    seq: u64,
    position: Checkpoint,
    failures: u32,
    since: Instant,
    last: Instant,
}

/// The event that failed last; and, as long as they can come again with a handler that is lost, those that failed before.
#[derive(Debug, Default)]
struct Failing(VecDeque<Failed>);

impl Failing {
    fn of(&self, position: &Checkpoint) -> Option<&Failed> {
        self.0.iter().rev().find(|failed| failed.position == *position)
    }
}

/// The events behind the stored position that were settled otherwise than by the handler, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct PutBy(VecDeque<(u64, How)>);

impl PutBy {
    pub(crate) fn note(&mut self, seq: u64, how: How, stored: u64) {
        while self.0.front().is_some_and(|(seq, _)| *seq <= stored) {
            self.0.pop_front();
        }
        self.0.push_back((seq, how));
    }

    /// The run goes back to a position, and they come again: a status that counts them no more, nor `undone` events in all.
    pub(crate) fn undo(&mut self, to: u64, undone: u64, status: &mut Status) {
        while let Some((_, how)) = self.0.back().copied().filter(|(seq, _)| *seq > to) {
            self.0.pop_back();
            let count = how.count(status);
            *count = count.saturating_sub(1);
        }
        status.settled = status.settled.saturating_sub(undone);
        status.handled = status.settled.saturating_sub(status.skipped + status.dead_lettered + status.parked);
    }
}

/// What a run keeps in mind of what went wrong.
#[derive(Debug, Default)]
pub(crate) struct Trouble {
    failing: Failing,
    pub(crate) parked: Parked,
    pub(crate) put_by: PutBy,
}

/// How long to wait with the first event in hand, and what of it.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    backoff: Option<Backoff>,
    repeats: Repeats,
    /// Its next attempt is made with it alone.
    pub(crate) alone: bool,
}

/// What follows a failure.
enum Next {
    Again,
    Then(Then, Option<Arc<dyn DynDeadLetterStorage>>),
}

impl<M: SubscriptionModel> Deliver<M> {
    /// Whether the event at the front has failed before.
    pub(crate) fn has_failed(&self, batch: &Batch) -> bool {
        batch.first().is_some_and(|first| self.trouble.failing.of(&first.position).is_some())
    }

    /// The event at the front, which settles under this number, has failed once more.
    pub(crate) fn count_failure(&mut self, seq: u64, batch: &Batch) {
        let (Some(first), now) = (batch.first(), Instant::now()) else { return };
        let position = first.position.clone();
        let begun = Failed { seq, position, failures: 0, since: now, last: now };
        let before = self.trouble.failing.of(&first.position).cloned().unwrap_or(begun);
        let stored = self.desk.stored();
        self.trouble.failing.0.retain(|failed| failed.position != first.position && failed.seq > stored);
        self.trouble.failing.0.push_back(Failed {
            seq,
            failures: before.failures.saturating_add(1),
            last: now,
            ..before
        });
    }

    /// The event that failed last is settled. Until that is stored it can come again only with a handler that is lost.
    pub(crate) fn forget_failed(&mut self) {
        if !self.barrier {
            self.trouble.failing.0.clear();
        }
    }

    /// The event at the front, which settles under this number, has cost its process so many lives: it has failed as often,
    /// and more often than the policy allows.
    pub(crate) fn count_deaths(&mut self, seq: u64, batch: &Batch, deaths: u32) {
        self.count_failure(seq, batch);
        if let Some(failed) = self.trouble.failing.0.back_mut() {
            let cap = self.settings.on_failure.cap().map_or(0, |(retries, _)| retries.saturating_add(1));
            failed.failures = failed.failures.max(deaths).max(cap);
        }
    }

    /// What follows when the first of `handed` events has failed, which is counted already.
    pub(crate) async fn failed(
        &mut self,
        batch: &mut Batch,
        handed: usize,
        failure: Failure,
        patience: &mut Patience,
    ) -> Result<(), Ended> {
        let Some(first) = batch.first().cloned() else { return Ok(()) };
        let Some(failed) = self.trouble.failing.of(&first.position).cloned() else { return Ok(()) };
        let (attempts, since, last) = (failed.failures, failed.since, failed.last);
        let (position, mut error) = (first.position.clone(), failure.to_string());
        let next = self.follows(&failure, attempts, handed, patience);
        let id = self.id.clone();
        let key = DocumentKey::of(&first.event);
        match next {
            Next::Again => {
                if failure.verdict() == Verdict::DeadLetter {
                    error.push_str(
                        " (it is to be a dead letter, and there is no storage for it: set .dead_letters(storage))",
                    );
                }
                self.again(position, attempts, error, patience).await?;
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
                    let letter = letter.failed(attempts, chain.clone(), since.elapsed(), last.elapsed());
                    Box::pin(async move { storage.dyn_put(&letter).await })
                };
                // Before, since it may be stored though its answer never comes.
                self.trouble.parked.note(&key);
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
        self.forget_failed();
        Ok(())
    }

    fn follows(&self, failure: &Failure, failures: u32, handed: usize, patience: &mut Patience) -> Next {
        let storage = self.settings.dead_letters.clone();
        match (failure.verdict(), self.settings.on_failure.cap()) {
            (Verdict::Stop, _) => Next::Then(Then::Stop, None),
            (Verdict::Skip, _) => Next::Then(Then::Skip, None),
            (Verdict::DeadLetter, _) if storage.is_some() => Next::Then(Then::DeadLetter, storage),
            (Verdict::Retry | Verdict::DeadLetter, Some((retries, then))) if failures > retries => {
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
    async fn again(
        &mut self,
        position: Checkpoint,
        attempts: u32,
        error: String,
        patience: &mut Patience,
    ) -> Result<(), Ended> {
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

    pub(crate) async fn settle_first(&mut self, batch: &mut Batch, how: How) -> Result<(), Ended> {
        let wanted = self.settle(batch, 1, how);
        self.saved_if(wanted).await
    }

    /// Waits, and has the handler flush meanwhile if that is wanted.
    pub(crate) async fn rest(&mut self, wait: Duration) -> Result<(), Ended> {
        let until = Instant::now() + wait;
        loop {
            tokio::select! {
                biased;
                () = self.signals.stop.cancelled() => return Err(Ended::Asked),
                () = tokio::time::sleep_until(until) => return Ok(()),
                () = self.desk.flush_wanted(), if self.barrier => {}
            }
            self.flush().await?;
        }
    }
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
