//! Transactions of the checkpoint storage: what a handler is lent, and how one begins, commits and ends. A session is lent
//! by value and comes back by being dropped, so that no operation ever borrows it from a run.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use bson::RawDocumentBuf;
use mongodb::ClientSession;
use mongodb::error::{Error, ErrorKind, TRANSIENT_TRANSACTION_ERROR, UNKNOWN_TRANSACTION_COMMIT_RESULT};
use mongodb::options::{ReadConcern, ReturnDocument};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::call::{CallError, call};
use super::checkpoint_storage::{
    DEADLINE, FIND, MongoCheckpointStorage, WRITE, by_id, majority, outcome, primary, simple,
};
use super::classify::describe;
use super::record::decode;
use super::record_pipeline;
use crate::error::StorageError;
use crate::handler::Failure;
use crate::storage::{Save, SaveOutcome};
use crate::transactional_storage::{Begun, Committed, TransactionError, TransactionalStorage};

/// How long a commit whose outcome is unknown is made again: a sound one is answered at once, one that meets an election
/// within seconds.
const COMMIT_AGAIN: Duration = Duration::from_secs(120);
const COMMIT_PAUSE: Duration = Duration::from_millis(50);

/// The transaction that a delivery is handled in: the driver's [`ClientSession`], with the transaction begun. Writes made
/// with `.session(&mut *transaction)` are committed with the event's position, or not at all.
///
/// * It is ours to commit and to abort. It goes back by being dropped; one that a handler keeps, commits or aborts is a
///   failed attempt, and nothing of it is stored with the position.
/// * The collections must come from the `Client` that the checkpoint storage was made with: the driver refuses others.
///   So its writes are always in the storage's own deployment.
/// * Make collections beforehand. A server before 4.4 refuses to make one in a transaction, and a later one lets
///   transactions that make the same one fail and run again.
/// * Reads are of one snapshot, majority-committed (read concern `snapshot`, on the primary); it is committed with write
///   concern majority.
/// * A transaction lives for at most the server's `transactionLifetimeLimitSeconds`, 60 s. A handler, or a batch of
///   [`save_every`](crate::Subscribe::save_every), that takes longer is rolled back and runs again.
/// * What is done outside of it is no part of it: another service, a write without the session. That is done again
///   whenever the event is handled again.
///
/// ```no_run
/// # use mongosub::bson::{Document, doc};
/// # use mongosub::mongodb::Collection;
/// # use mongosub::{Failure, Transaction};
/// async fn pay(mut transaction: Transaction, accounts: &Collection<Document>) -> Result<(), Failure> {
///     let change = |amount: i64| doc! { "$inc": { "balance": amount } };
///     accounts.update_one(doc! { "_id": "ann" }, change(-7)).session(&mut *transaction).await?;
///     accounts.update_one(doc! { "_id": "bob" }, change(7)).session(&mut transaction).await?;
///     Ok(())
/// }
/// ```
pub struct Transaction {
    /// There until it is dropped.
    session: Option<Box<ClientSession>>,
    back: Option<oneshot::Sender<Box<ClientSession>>>,
}

impl Deref for Transaction {
    type Target = ClientSession;

    fn deref(&self) -> &ClientSession {
        self.session.as_ref().expect("it is there until it is dropped")
    }
}

impl DerefMut for Transaction {
    fn deref_mut(&mut self) -> &mut ClientSession {
        self.session.as_mut().expect("it is there until it is dropped")
    }
}

impl<'a> From<&'a mut Transaction> for &'a mut ClientSession {
    fn from(transaction: &'a mut Transaction) -> Self {
        transaction
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if let (Some(session), Some(back)) = (self.session.take(), self.back.take()) {
            // Who lent it may have gone; then the driver aborts what is open.
            let _ = back.send(session);
        }
    }
}

impl fmt::Debug for Transaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transaction").finish_non_exhaustive()
    }
}

/// An open transaction, here or lent.
pub struct OpenTransaction {
    session: Option<Box<ClientSession>>,
    lent: Option<oneshot::Receiver<Box<ClientSession>>>,
}

impl fmt::Debug for OpenTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenTransaction").field("is_lent", &self.session.is_none()).finish()
    }
}

const KEPT: &str = "the handler has kept its transaction beyond its return";
const ENDED: &str = "the handler has committed or aborted its transaction itself";

impl TransactionalStorage for MongoCheckpointStorage {
    type Transaction = Transaction;
    type Session = OpenTransaction;

    async fn begin(&self, save: &Save) -> Result<Begun<OpenTransaction>, TransactionError> {
        let (records, filter) = (self.records.clone(), by_id(&save.id));
        let begin = async move {
            let mut session = records.client().start_session().await?;
            session
                .start_transaction()
                .read_concern(ReadConcern::snapshot())
                .write_concern(majority())
                .selection_criteria(primary())
                .await?;
            // From here on, whoever changes the record makes the commit fail.
            let found = records.find_one(filter).collation(simple()).max_time(DEADLINE).session(&mut session).await?;
            Ok((session, found))
        };
        let (session, found) = call(DEADLINE, begin).await.map_err(|error| self.transaction_error(&error, FIND))?;
        let Some(stored) = found else { return Ok(Begun::Gone) };
        let record = decode(&save.id, &stored)?;
        let is_later = record.epoch.is_some_and(|epoch| epoch > save.epoch);
        if record.ownership.as_ref() != Some(&save.ownership) || is_later {
            let (owner, since) = (record.ownership.map(|now| now.owner), record.claimed_at);
            return Ok(Begun::Superseded { owner, since });
        }
        let stored = record.position.filter(|_| record.epoch == Some(save.epoch));
        Ok(Begun::Open { session: OpenTransaction { session: Some(Box::new(session)), lent: None }, stored })
    }

    fn lend(&self, open: &mut OpenTransaction) -> Transaction {
        let (back, lent) = oneshot::channel();
        open.lent = Some(lent);
        Transaction { session: open.session.take(), back: Some(back) }
    }

    async fn take_back(&self, open: &mut OpenTransaction) -> Result<(), String> {
        let lent = open.lent.take();
        let session = lent.and_then(|mut lent| lent.try_recv().ok());
        let Some(mut session) = session else { return Err(KEPT.to_owned()) };
        // The driver tells in no other way whether it is still open: then it refuses, and asks nobody.
        let asked = async move {
            let again = session.start_transaction().await;
            Ok((session, again))
        };
        match call(DEADLINE, asked).await {
            Ok((session, Err(error))) if matches!(*error.kind, ErrorKind::Transaction { .. }) => {
                open.session = Some(session);
                Ok(())
            }
            _ => Err(ENDED.to_owned()),
        }
    }

    fn is_transient(&self, failure: &Failure) -> bool {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(failure.cause());
        while let Some(error) = cause {
            if error.downcast_ref::<Error>().is_some_and(|error| error.contains_label(TRANSIENT_TRANSACTION_ERROR)) {
                return true;
            }
            cause = error.source();
        }
        false
    }

    async fn commit(&self, open: OpenTransaction, save: &Save) -> Result<Committed, TransactionError> {
        let Some(session) = open.session else {
            return Err(TransactionError::Transient { message: "it was not given back".into() });
        };
        let stored = self.save_in(session, save).await?;
        let outcome = match &stored.1 {
            None => SaveOutcome::Gone,
            Some(stored) => outcome(save, stored)?,
        };
        let session = stored.0;
        let at = match outcome {
            SaveOutcome::Saved { at } => at,
            refused => {
                self.abort(OpenTransaction { session: Some(session), lent: None }).await;
                return Ok(match refused {
                    SaveOutcome::Superseded { owner, since } => Committed::Superseded { owner, since },
                    SaveOutcome::Gone => Committed::Gone,
                    SaveOutcome::NotAhead | SaveOutcome::Saved { .. } => Committed::NotAhead,
                });
            }
        };
        match call(COMMIT_AGAIN + DEADLINE, commit_until_known(session)).await {
            Ok(()) => Ok(Committed::Stored { at }),
            Err(error) => Err(self.transaction_error(&error, WRITE)),
        }
    }

    async fn abort(&self, open: OpenTransaction) {
        if let Some(mut session) = open.session {
            // What cannot be aborted is rolled back by the server, when it has waited long enough.
            let _ = call(DEADLINE, async move { session.abort_transaction().await }).await;
        }
    }
}

impl MongoCheckpointStorage {
    /// Stores the position in the transaction, and gives the record as the transaction sees it.
    async fn save_in(
        &self,
        mut session: Box<ClientSession>,
        save: &Save,
    ) -> Result<(Box<ClientSession>, Option<RawDocumentBuf>), TransactionError> {
        let (records, filter, pipeline) = (self.records.clone(), by_id(&save.id), record_pipeline::save(save));
        let update = async move {
            let stored = records
                .find_one_and_update(filter, pipeline)
                .return_document(ReturnDocument::After)
                .collation(simple())
                .max_time(DEADLINE)
                .session(&mut *session)
                .await;
            if stored.is_err() {
                // Best at once, so that the next attempt does not meet what this one has written.
                let _ = session.abort_transaction().await;
            }
            Ok((session, stored?))
        };
        call(DEADLINE, update).await.map_err(|error| self.transaction_error(&error, WRITE))
    }

    fn transaction_error(&self, error: &CallError, action: &'static str) -> TransactionError {
        match error {
            CallError::Driver(error) if error.contains_label(TRANSIENT_TRANSACTION_ERROR) => {
                let message = match describe(error) {
                    (Some(code), message) => format!("code {code} {message}"),
                    (None, message) => message,
                };
                TransactionError::Transient { message }
            }
            CallError::Driver(error) if error.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT) => {
                let message = format!("whether a transaction was committed is not known: {}", describe(error).1);
                TransactionError::Storage(StorageError::Unavailable { message })
            }
            error => TransactionError::Storage(self.error(error, action)),
        }
    }
}

/// Commits, again and again as long as the outcome is unknown, which is harmless.
async fn commit_until_known(mut session: Box<ClientSession>) -> mongodb::error::Result<()> {
    let until = Instant::now() + COMMIT_AGAIN;
    loop {
        match session.commit_transaction().await {
            Err(error) if error.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT) && Instant::now() < until => {
                tokio::time::sleep(COMMIT_PAUSE).await;
            }
            committed => return committed,
        }
    }
}
