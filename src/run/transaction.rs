//! A handler whose effects are stored in one transaction with the position: as work. It begins and commits, and runs again
//! what was rolled back; what follows a failure of the handler is `failing`'s. It knows the storage's seam, no driver.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use bson::DateTime;
use futures::FutureExt;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::backoff::Backoff;
use crate::batch_handler::BatchLimits;
use crate::checkpoint::Kind;
use crate::delivery::Delivery;
use crate::error::StorageError;
use crate::handler::{Failure, Verdict};
use crate::ids::Owner;
use crate::reason::Reason;
use crate::run::deliver::Ended;
use crate::run::repeats::Repeats;
use crate::run::work::{Done, Stored, Work, panicked};
use crate::status::Board;
use crate::storage::{BoxFuture, Save, SaveOutcome};
use crate::transaction_handler::TransactionHandler;
use crate::transactional_storage::{Begun, Committed, TransactionError, TransactionalStorage};

/// How long transactions that are rolled back are run again before that counts as a failure of the handler.
const AGAIN: Duration = Duration::from_secs(120);
/// A storage that has not answered for so long, or has rolled back for so long, shows in the status.
const SHOWN: Duration = Duration::from_secs(10);

/// A [`TransactionHandler`] as work: several deliveries in one transaction, if that many are there.
pub(crate) struct TransactionWork<S: TransactionalStorage, H> {
    storage: S,
    handler: H,
    limits: BatchLimits,
    handler_timeout: Option<Duration>,
    template: Option<Save>,
    session: S::Session,
    /// How often the first event in hand was rolled back without a failure that is counted.
    again: u32,
    shown: Shown,
}

/// How the storage fares, in the status.
struct Shown {
    board: Arc<Board>,
    is_shown: bool,
}

impl Shown {
    fn show(&mut self, reason: Reason) {
        self.is_shown = true;
        self.board.set(|conditions| conditions.storage = Some(reason));
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.is_shown) {
            self.board.set(|conditions| conditions.storage = None);
        }
    }

    /// Waits for an answer however long it takes.
    async fn answer<T>(&mut self, call: impl Future<Output = T>) -> T {
        tokio::pin!(call);
        match tokio::time::timeout(SHOWN, &mut call).await {
            Ok(answer) => answer,
            Err(_) => {
                let message = format!("no answer for {} s", SHOWN.as_secs());
                self.show(Reason::StorageUnavailable { message });
                call.await
            }
        }
    }
}

/// What came of one transaction.
enum Tried {
    /// So many from the front are done and stored.
    Stored(usize, Stored),
    /// The handler failed at one of them, and nothing is stored.
    Failed(usize, Failure),
    /// It was rolled back and may succeed when run again.
    RolledBack(String),
    Unavailable(StorageError),
    Ended(Ended),
}

impl From<TransactionError> for Tried {
    fn from(error: TransactionError) -> Self {
        match error {
            TransactionError::Transient { message } => Self::RolledBack(message),
            TransactionError::Storage(error) if error.is_retryable() => Self::Unavailable(error),
            TransactionError::Storage(error) => Self::Ended(Ended::Stalled(error.reason())),
        }
    }
}

impl<S: TransactionalStorage, H: TransactionHandler<S::Transaction> + 'static> TransactionWork<S, H> {
    /// With at most so many events in a transaction.
    pub(crate) fn new(
        storage: S,
        handler: H,
        events: usize,
        handler_timeout: Option<Duration>,
        board: Arc<Board>,
    ) -> Self {
        let limits = BatchLimits::new(events);
        let shown = Shown { board, is_shown: false };
        Self {
            storage,
            handler,
            limits,
            handler_timeout,
            template: None,
            session: S::Session::default(),
            again: 0,
            shown,
        }
    }

    /// Runs transactions until everything in front of a failure is stored.
    async fn transact(&mut self, batch: &[Delivery]) -> Done {
        let (mut done, mut end) = (Done::all(0), batch.len());
        let mut rolled_back: Option<Instant> = None;
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
        let mut unavailable = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
        let mut repeats = Repeats::default();
        while done.settled < end {
            let rest = &batch[done.settled..end];
            let first = &rest[0];
            let tried = self.once(rest).await;
            if !matches!(tried, Tried::Unavailable(_) | Tried::RolledBack(_)) {
                self.shown.clear();
            }
            match tried {
                Tried::Stored(events, stored) => {
                    done.settled += events;
                    done.stored = Some(stored);
                    (self.again, rolled_back) = (0, None);
                }
                Tried::Failed(0, failure) => {
                    // Whoever takes over ends the transaction, which is no failure of the handler.
                    done.ended = self.ended(first).await.map(Box::new);
                    done.failed = Some(failure).filter(|_| done.ended.is_none());
                    return done;
                }
                Tried::Failed(at, failure) => {
                    // What is in front of it has succeeded, and was rolled back with it: once more, without it.
                    end = done.settled + at;
                    done.failed = Some(failure);
                    self.again += 1;
                }
                Tried::RolledBack(why) => {
                    self.again += 1;
                    let since = *rolled_back.get_or_insert_with(Instant::now);
                    let (id, position) = (first.subscription(), &first.position);
                    debug!(subscription = %id, %position, "a transaction of subscription {id} was rolled back and is run again: {why}");
                    if since.elapsed() >= AGAIN {
                        let why =
                            format!("its transaction was rolled back for {} s, at last by: {why}", AGAIN.as_secs());
                        done.failed = Some(Failure::retry(why));
                        return done;
                    }
                    if since.elapsed() >= SHOWN {
                        let message = format!("transactions are rolled back: {why}");
                        self.shown.show(Reason::StorageUnavailable { message });
                    }
                    tokio::time::sleep(backoff.next_wait()).await;
                }
                Tried::Unavailable(error) => {
                    self.again += 1;
                    rolled_back = None;
                    if repeats.is_due() {
                        let (id, failures) = (first.subscription(), repeats.count());
                        warn!(subscription = %id, failures, "subscription {id} has no transaction: {error}");
                    }
                    self.shown.show(error.reason());
                    tokio::select! {
                        biased;
                        () = first.cancelled() => {
                            done.ended = Some(Box::new(Ended::Asked));
                            return done;
                        }
                        () = tokio::time::sleep(unavailable.next_wait()) => {}
                    }
                }
                Tried::Ended(ended) => {
                    done.ended = Some(Box::new(ended));
                    return done;
                }
            }
        }
        done
    }

    /// One transaction.
    async fn once(&mut self, batch: &[Delivery]) -> Tried {
        let Some(save) = batch.last().and_then(|last| self.save(last)) else {
            return Tried::Ended(Ended::Asked);
        };
        let stored = match self.shown.answer(self.storage.begin(&mut self.session, &save)).await {
            Ok(Begun::Open { stored }) => stored,
            Ok(Begun::Superseded { owner, since }) => return Tried::Ended(superseded(owner, since)),
            Ok(Begun::Gone) => return Tried::Ended(Ended::Stopped(Reason::Deleted)),
            Err(error) => return error.into(),
        };
        // A commit whose answer was lost was made.
        let applied = batch.iter().take_while(|delivery| delivery.already_applied(stored.as_ref())).count();
        if applied > 0 {
            self.storage.abort(&mut self.session).await;
            return Tried::Stored(applied, Stored { at: None });
        }
        for (at, delivery) in batch.iter().enumerate() {
            let transaction = self.storage.lend(&mut self.session);
            let handled = self.handle(transaction, delivery).await;
            let given_back = self.storage.take_back(&mut self.session).await.map_err(Failure::retry);
            let Err(failure) = handled.and(given_back) else { continue };
            self.storage.abort(&mut self.session).await;
            if failure.verdict() == Verdict::Retry && self.storage.is_transient(&failure) {
                return Tried::RolledBack(failure.to_string());
            }
            return Tried::Failed(at, failure);
        }
        match self.shown.answer(self.storage.commit(&mut self.session, &save)).await {
            Ok(Committed::Stored { at }) => Tried::Stored(batch.len(), Stored { at }),
            // Whatever has moved it, the next one sees it when it begins.
            Ok(Committed::NotAhead) => Tried::RolledBack("the stored position has moved".into()),
            Ok(Committed::Superseded { owner, since }) => Tried::Ended(superseded(owner, since)),
            Ok(Committed::Gone) => Tried::Ended(Ended::Stopped(Reason::Deleted)),
            Err(error) => error.into(),
        }
    }

    /// Why nothing more can be done for an event, if the record is no longer this run's.
    async fn ended(&mut self, delivery: &Delivery) -> Option<Ended> {
        let save = self.save(delivery)?;
        let begun = self.shown.answer(self.storage.begin(&mut self.session, &save)).await;
        self.storage.abort(&mut self.session).await;
        match begun {
            Ok(Begun::Superseded { owner, since }) => Some(superseded(owner, since)),
            Ok(Begun::Gone) => Some(Ended::Stopped(Reason::Deleted)),
            Ok(Begun::Open { .. }) | Err(_) => None,
        }
    }

    async fn handle(&mut self, transaction: S::Transaction, delivery: &Delivery) -> Result<(), Failure> {
        let mut delivery = delivery.clone();
        delivery.attempt = delivery.attempt.saturating_add(self.again);
        delivery.may_be_repeat |= self.again > 0;
        let (handler, limit) = (&mut self.handler, self.handler_timeout);
        // The call itself can panic, not only its future.
        let call = AssertUnwindSafe(async move { handler.handle(transaction, delivery).await }).catch_unwind();
        let answer = match limit {
            None => call.await,
            Some(limit) => match tokio::time::timeout(limit, call).await {
                Ok(answer) => answer,
                Err(_) => return Err(Failure::retry(format!("it took longer than its limit of {limit:?}"))),
            },
        };
        answer.unwrap_or_else(|panic| Err(Failure::retry(panicked(&*panic))))
    }

    /// What stores an event's position.
    fn save(&self, delivery: &Delivery) -> Option<Save> {
        let mut save = self.template.clone()?;
        if let Some(source) = &mut save.source
            && delivery.position.token().is_some_and(|token| token.collection_uuid().is_some())
        {
            // What was read ahead may be another collection's.
            source.collection_uuid = None;
            source.see(&delivery.position);
        }
        (save.epoch, save.kind) = (delivery.epoch(), Kind::of_event(&delivery.position));
        save.position = delivery.position.clone();
        save.keep_event(None);
        Some(save)
    }
}

fn superseded(owner: Option<Owner>, since: Option<DateTime>) -> Ended {
    Ended::Stopped(Reason::Superseded { owner, since })
}

impl<S: TransactionalStorage, H: TransactionHandler<S::Transaction> + 'static> Work for TransactionWork<S, H> {
    fn limits(&self) -> BatchLimits {
        self.limits
    }

    fn work<'a>(&'a mut self, batch: &'a [Delivery]) -> BoxFuture<'a, Done> {
        Box::pin(self.transact(batch))
    }

    fn renew(&mut self) -> bool {
        false
    }

    /// Nothing is stored beside its transactions.
    fn buffers(&self) -> bool {
        true
    }

    fn stores(&self) -> bool {
        true
    }

    fn bind(&mut self, template: Save) {
        self.template = Some(template);
    }

    fn store(&mut self, save: Save) -> BoxFuture<'_, Result<SaveOutcome, StorageError>> {
        let storage = &self.storage;
        let shown = &mut self.shown;
        Box::pin(async move {
            let answer = shown.answer(storage.save(&save)).await;
            match &answer {
                Err(error) if error.is_retryable() => shown.show(error.reason()),
                _ => shown.clear(),
            }
            answer
        })
    }
}
