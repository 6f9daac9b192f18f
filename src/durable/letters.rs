//! Dead letters by hand: what there is, handing a document's letters to a handler again, and deleting them. It works
//! whether or not the subscription runs, here or elsewhere, and never touches its position.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::DurableSubscriptions;
use crate::backoff::Backoff;
use crate::dead_letter::DynDeadLetterStorage;
use crate::delivery::{Context, Delivery};
use crate::error::{DeadLetterError, StorageError};
use crate::event::ChangeEvent;
use crate::handler::{Failure, Handler, Verdict};
use crate::hold::Hold;
use crate::ids::{Fence, Owner, SubscriptionId};
use crate::letter::{DocumentKey, EvictOutcome, HoldOutcome, Letter, LetterKind, RemoveOutcome, Sequence};
use crate::model::SubscriptionModel;
use crate::run::failing::bounded;
use crate::run::work::{HandlerWork, Work};
use crate::storage::{BoxFuture, CheckpointStorage};

/// How long a retrier that has died keeps a sequence from others, and how often a living one says that it lives.
const LEASE: Duration = Duration::from_secs(30);
const RENEWED_EVERY: Duration = Duration::from_secs(10);
/// How long a write that follows a handled letter is tried: the lease lasts as long.
const WRITTEN_WITHIN: Duration = Duration::from_secs(25);

/// What became of a retry.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Retried {
    /// How many letters the handler has handled; they are removed.
    pub handled: u64,
    /// How many it skipped ([`Failure::skip`]); they are removed, each logged at warn.
    pub skipped: u64,
    /// The letter it failed for, with the new error; it and those behind it are left. None when it went through.
    pub failed: Option<Letter>,
}

impl<M: SubscriptionModel, S: CheckpointStorage> DurableSubscriptions<M, S> {
    /// The documents of a subscription that have dead letters, with how many each has.
    ///
    /// # Errors
    /// [`DeadLetterError`].
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub async fn dead_letter_sequences(&self, id: impl Into<String>) -> Result<Vec<Sequence>, DeadLetterError> {
        let (id, letters) = self.letters_of(id.into())?;
        letters.dyn_sequences(&id).await.map_err(|source| DeadLetterError::Storage { id, source })
    }

    /// The dead letters of a document in feed order, without their events: errors, attempts, positions, times.
    ///
    /// # Errors
    /// [`DeadLetterError`].
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub async fn dead_letters_of(
        &self,
        id: impl Into<String>,
        key: &DocumentKey,
    ) -> Result<Vec<Letter>, DeadLetterError> {
        let (id, letters) = self.letters_of(id.into())?;
        letters.dyn_letters(&id, key).await.map_err(|source| DeadLetterError::Storage { id, source })
    }

    /// The event of a dead letter; none when the letter is no longer there.
    ///
    /// # Errors
    /// [`DeadLetterError`].
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub async fn dead_letter_event(&self, letter: &Letter) -> Result<Option<ChangeEvent>, DeadLetterError> {
        let (id, letters) = self.letters_of(letter.subscription.to_string())?;
        let event = letters.dyn_event(letter).await;
        let event = event.and_then(|event| event.map(|event| readable(letter, event)).transpose());
        event.map_err(|source| DeadLetterError::Storage { id, source })
    }

    /// Hands the dead letters of a document to a handler again, in feed order, one at a time: those the run parks behind
    /// them meanwhile too. Each that is handled is removed; the first that fails ends the retry. With the last one the
    /// document is free, and its next event is delivered by the run.
    ///
    /// The subscription may run, here or elsewhere, and its position is not touched. One retry of a document at a time:
    /// it holds the letters for 30 s at a time. A process that dies hands the letter in hand out again at the next retry:
    /// at least once, as everywhere. A delivery's `attempt` counts the failed attempts before it, its fence is that of
    /// the newest claim when the retry began.
    ///
    /// A letter is done when the handler has returned `Ok` and, if it [`buffers`](Handler::buffers), has flushed; its
    /// `claimed` is called before the first one, its `released` never. A hold is not waited for.
    ///
    /// ```
    /// # use mongosub::memory::{self, MemoryCheckpointStorage, MemoryDeadLetterStorage, MemoryModel};
    /// # use mongosub::{Failure, bson::doc};
    /// use mongosub::{Delivery, DocumentKey, DurableSubscriptions, OnFailure, Then};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let model = MemoryModel::new();
    /// let subscriptions = DurableSubscriptions::new(model.clone(), MemoryCheckpointStorage::new())
    ///     .dead_letters(MemoryDeadLetterStorage::new())
    ///     .on_failure(OnFailure::retry(3).then(Then::DeadLetter));
    /// # let handler = |_: Delivery| async { Err(Failure::dead_letter("no such index")) };
    /// # let subscription = subscriptions.subscribe("search_index_v3", handler).await?;
    /// # model.push(memory::insert(7, doc! {}));
    /// # subscription.caught_up().await?;
    /// for sequence in subscriptions.dead_letter_sequences("search_index_v3").await? {
    ///     let mended = |delivery: Delivery| async move {
    ///         println!("{:?} again, after {} attempts", delivery.event, delivery.attempt - 1);
    ///         Ok(())
    ///     };
    ///     let retried = subscriptions.retry("search_index_v3", &sequence.key, mended).await?;
    ///     assert!(retried.failed.is_none(), "{}: {:?}", sequence.key, retried.failed);
    /// }
    /// # assert!(subscriptions.dead_letter_sequences("search_index_v3").await?.is_empty());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`DeadLetterError`]. What was handled before is removed; only the letter in hand can come again though it was
    /// handled.
    ///
    /// # Cancel safety
    /// Dropped, the call of the handler is dropped in the middle, and nobody can retry the document until at most 30 s
    /// later.
    pub async fn retry<H: Handler + 'static>(
        &self,
        id: impl Into<String>,
        key: &DocumentKey,
        handler: H,
    ) -> Result<Retried, DeadLetterError> {
        let (id, letters) = self.letters_of(id.into())?;
        let storage = |source| DeadLetterError::Storage { id: id.clone(), source };
        let record = self.storage().read(&id).await.map_err(storage)?;
        let fence = record.and_then(|record| record.ownership).map_or(Fence(0), |ownership| ownership.fence);
        let held = Held { letters, id, key: key.clone(), owner: Owner::fresh() };
        held.hold().await?;
        let mut retry = Retry {
            fence,
            work: Box::new(HandlerWork::of(handler)),
            told: false,
            outcome: Retried { handled: 0, skipped: 0, failed: None },
        };
        let ended = retry.run(&held).await;
        if !matches!(ended, Ok(true)) {
            // Without an answer the hold runs out by itself.
            let _ = held.letters.dyn_release(&held.id, &held.key, &held.owner).await;
        }
        ended?;
        Ok(retry.outcome)
    }

    /// Deletes all dead letters of a document, for good: their changes are lost to the subscription. The reason is
    /// logged at warn with how many they were. Answers that number. The document's next event is delivered by the run.
    ///
    /// # Errors
    /// [`DeadLetterError`]; `NoReason` for an empty reason, `HeldBy` while somebody retries them.
    ///
    /// # Cancel safety
    /// Dropped, they may or may not be deleted.
    pub async fn evict(
        &self,
        id: impl Into<String>,
        key: &DocumentKey,
        reason: &str,
    ) -> Result<usize, DeadLetterError> {
        let (id, letters) = self.letters_of(id.into())?;
        if reason.trim().is_empty() {
            return Err(DeadLetterError::NoReason);
        }
        match letters.dyn_evict(&id, key).await {
            Ok(EvictOutcome::Evicted(count)) => {
                warn!(
                    subscription = %id, %key, letters = count, reason,
                    "{count} dead letters of {key} of subscription {id} are deleted: {reason}"
                );
                Ok(count)
            }
            Ok(EvictOutcome::HeldBy { owner, until }) => {
                Err(DeadLetterError::HeldBy { id, key: key.clone(), owner, until })
            }
            Ok(EvictOutcome::NoSequence) => Err(DeadLetterError::NoLetters { id, key: key.clone() }),
            Err(source) => Err(DeadLetterError::Storage { id, source }),
        }
    }

    fn letters_of(&self, id: String) -> Result<(SubscriptionId, Arc<dyn DynDeadLetterStorage>), DeadLetterError> {
        let id = SubscriptionId::new(id)?;
        let letters = self.options.dead_letters.clone().ok_or(DeadLetterError::NoStorage)?;
        Ok((id, letters))
    }
}

/// A retry of one document.
struct Retry {
    fence: Fence,
    work: Box<dyn Work>,
    /// The handler knows that it begins.
    told: bool,
    outcome: Retried,
}

impl Retry {
    /// Goes through the letters. Answers whether the sequence has ended by it.
    async fn run(&mut self, held: &Held) -> Result<bool, DeadLetterError> {
        loop {
            let letters = held.letters.dyn_letters(&held.id, &held.key).await.map_err(|source| held.storage(source))?;
            let mut letters = letters.into_iter().filter(|letter| letter.kind != LetterKind::Skipped).peekable();
            if letters.peek().is_none() {
                return Ok(false);
            }
            for letter in letters {
                match self.attempt(held, &letter).await? {
                    None => self.outcome.handled += 1,
                    Some(failure) if failure.verdict() == Verdict::Skip => {
                        let (id, position, key) = (&held.id, &letter.position, &held.key);
                        warn!(
                            subscription = %id, %position, %key,
                            "a retry of subscription {id} skips the dead letter of {key} at {position}: {failure}"
                        );
                        self.outcome.skipped += 1;
                    }
                    Some(failure) => {
                        self.outcome.failed = Some(held.failed(letter, &failure).await?);
                        return Ok(false);
                    }
                }
                if held.removed(&letter).await? {
                    let (id, key, Retried { handled, skipped, .. }) = (&held.id, &held.key, &self.outcome);
                    info!(
                        subscription = %id, %key, handled, skipped,
                        "{key} of subscription {id} has no dead letters any more: {handled} handled, {skipped} skipped"
                    );
                    return Ok(true);
                }
            }
        }
    }

    /// One call of the handler, while the hold is kept.
    async fn attempt(&mut self, held: &Held, letter: &Letter) -> Result<Option<Failure>, DeadLetterError> {
        let event = held.letters.dyn_event(letter).await.map_err(|source| held.storage(source))?;
        let Some(event) = event else { return Err(held.lost()) };
        let event = readable(letter, event).map_err(|source| held.storage(source))?;
        let context = Context {
            subscription: held.id.clone(),
            fence: self.fence,
            epoch: letter.epoch,
            hold: Hold::of_nobody(self.fence),
            cancelled: CancellationToken::new(),
        };
        let mut delivery = Delivery::new(event, letter.position.clone(), true, Arc::new(context));
        delivery.attempt = letter.attempts.saturating_add(1);
        tokio::select! {
            biased;
            failure = self.call(delivery) => Ok(failure),
            error = held.keep() => Err(error),
        }
    }

    /// Has the handler handle a letter, and flush it if it keeps effects back.
    async fn call(&mut self, delivery: Delivery) -> Option<Failure> {
        if !self.told {
            self.told = true;
            if let Err(error) = self.work.claimed(None, delivery.hold().clone()).await {
                return Some(error.into());
            }
        }
        let position = delivery.position.clone();
        let done = self.work.work(&[delivery]).await;
        if done.settled == 0 {
            return Some(done.failed.unwrap_or_else(|| "it did not settle the event".into()));
        }
        if !self.work.buffers() {
            return None;
        }
        match self.work.flush(position.clone()).await {
            Ok(through) if position.is_beyond(&through) => {
                Some(format!("its flush answered {through}, which does not cover {position}").into())
            }
            Ok(_) => None,
            Err(error) => Some(error.into()),
        }
    }
}

/// A sequence that is this process's own for a while.
struct Held {
    letters: Arc<dyn DynDeadLetterStorage>,
    id: SubscriptionId,
    key: DocumentKey,
    owner: Owner,
}

impl Held {
    async fn hold(&self) -> Result<(), DeadLetterError> {
        let (id, key) = (self.id.clone(), self.key.clone());
        match self.letters.dyn_hold(&id, &key, &self.owner, LEASE).await {
            Ok(HoldOutcome::Held) => Ok(()),
            Ok(HoldOutcome::HeldBy { owner, until }) => Err(DeadLetterError::HeldBy { id, key, owner, until }),
            Ok(HoldOutcome::NoSequence) => Err(DeadLetterError::NoLetters { id, key }),
            Err(source) => Err(DeadLetterError::Storage { id, source }),
        }
    }

    /// Keeps it for as long as this is polled, and ends when it is lost.
    async fn keep(&self) -> DeadLetterError {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(RENEWED_EVERY).await;
            let asked = Instant::now();
            match self.letters.dyn_hold(&self.id, &self.key, &self.owner, LEASE).await {
                Ok(HoldOutcome::Held) => renewed = asked,
                Err(error) if error.is_retryable() && renewed.elapsed() < LEASE => {}
                Ok(_) => return self.lost(),
                Err(source) => return self.storage(source),
            }
        }
    }

    /// A letter has failed once more: as it is now.
    async fn failed(&self, mut letter: Letter, failure: &Failure) -> Result<Letter, DeadLetterError> {
        let chain = bounded(failure.chain());
        let noted = self.insist(|| self.letters.dyn_note_failure(&letter, &self.owner, &chain)).await?;
        if !noted {
            return Err(self.lost());
        }
        letter.attempts = letter.attempts.saturating_add(1);
        letter.error = chain;
        Ok(letter)
    }

    /// A letter is done. Answers whether its sequence has ended by it.
    async fn removed(&self, letter: &Letter) -> Result<bool, DeadLetterError> {
        match self.insist(|| self.letters.dyn_remove(letter, &self.owner)).await? {
            RemoveOutcome::Removed => Ok(false),
            // None there any more: an earlier try had removed it, and its answer was lost.
            RemoveOutcome::Ended | RemoveOutcome::NoSequence => Ok(true),
            RemoveOutcome::NotHeld => Err(self.lost()),
        }
    }

    /// Writes what the handler must not be called again for: tries while the hold lasts.
    async fn insist<'a, T>(
        &self,
        ask: impl Fn() -> BoxFuture<'a, Result<T, StorageError>>,
    ) -> Result<T, DeadLetterError> {
        let end = Instant::now() + WRITTEN_WITHIN;
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));
        loop {
            match ask().await {
                Ok(answer) => return Ok(answer),
                Err(error) if error.is_retryable() && Instant::now() < end => {}
                Err(error) => return Err(self.storage(error)),
            }
            tokio::time::sleep(backoff.next_wait()).await;
        }
    }

    fn storage(&self, source: StorageError) -> DeadLetterError {
        DeadLetterError::Storage { id: self.id.clone(), source }
    }

    fn lost(&self) -> DeadLetterError {
        DeadLetterError::HoldLost { id: self.id.clone(), key: self.key.clone() }
    }
}

fn readable(letter: &Letter, event: bytes::Bytes) -> Result<ChangeEvent, StorageError> {
    ChangeEvent::new(event).map_err(|error| StorageError::Unreadable {
        id: format!("{} {} {}", letter.subscription, letter.key, letter.reference),
        field: "event".into(),
        message: error.to_string(),
    })
}
