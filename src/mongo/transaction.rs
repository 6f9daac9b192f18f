//! Transactions of the checkpoint storage: what a handler is lent, and how one begins, commits and ends. A session is lent
//! by value and comes back by being dropped, so that no operation ever borrows it from a run.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use bson::{Document, RawDocumentBuf, doc};
use mongodb::error::{Error, ErrorKind, TRANSIENT_TRANSACTION_ERROR, UNKNOWN_TRANSACTION_COMMIT_RESULT};
use mongodb::options::{ReadConcern, ReturnDocument};
use mongodb::{Client, ClientSession, Collection};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::call::{CallError, call};
use super::checkpoint_storage::{
    DEADLINE, FIND, MongoCheckpointStorage, WRITE, by_id, majority, outcome, primary, simple,
};
use super::classify::describe;
use super::record::{OURS, decode};
use super::record_pipeline;
use crate::error::StorageError;
use crate::handler::Failure;
use crate::ids::SubscriptionId;
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

/// What a run makes its transactions with: one session of the driver, here or lent, so that whoever takes over knows which
/// one to end.
#[derive(Default)]
pub struct MongoSession {
    session: Option<Box<ClientSession>>,
    lent: Option<oneshot::Receiver<Box<ClientSession>>>,
    /// The session that the record names as this owner's.
    named: Option<Document>,
}

impl MongoSession {
    /// The driver's session, also when it was lent and has come back since.
    fn take(&mut self) -> Option<Box<ClientSession>> {
        let back = self.lent.take().and_then(|mut lent| lent.try_recv().ok());
        self.session.take().or(back)
    }
}

impl fmt::Debug for MongoSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MongoSession").field("is_lent", &self.lent.is_some()).finish_non_exhaustive()
    }
}

/// Where the record names the session of its owner.
const SESSION: &str = "mongosub.session";

const KEPT: &str = "the handler has kept its transaction beyond its return";
const ENDED: &str = "the handler has committed or aborted its transaction itself";

impl TransactionalStorage for MongoCheckpointStorage {
    type Transaction = Transaction;
    type Session = MongoSession;

    async fn begin(&self, open: &mut MongoSession, save: &Save) -> Result<Begun, TransactionError> {
        let session = match open.take() {
            Some(session) => session,
            None => Box::new(self.ask(start(self.records.client().clone()), FIND).await?),
        };
        if open.named.as_ref() != Some(session.id()) {
            self.name_session(save, session.id()).await?;
            open.named = Some(session.id().clone());
        }
        let (session, found) = self.ask(begin(self.records.clone(), by_id(&save.id), session), FIND).await?;
        let record = found.map(|stored| decode(&save.id, &stored)).transpose();
        let begun = match record {
            Ok(Some(record)) => {
                let is_later = record.epoch.is_some_and(|epoch| epoch > save.epoch);
                if record.ownership.as_ref() == Some(&save.ownership) && !is_later {
                    open.session = Some(session);
                    return Ok(Begun::Open { stored: record.position.filter(|_| record.epoch == Some(save.epoch)) });
                }
                Ok(Begun::Superseded { owner: record.ownership.map(|now| now.owner), since: record.claimed_at })
            }
            Ok(None) => Ok(Begun::Gone),
            Err(error) => Err(error.into()),
        };
        open.session = Some(session);
        self.abort(open).await;
        begun
    }

    fn lend(&self, open: &mut MongoSession) -> Transaction {
        let (back, lent) = oneshot::channel();
        open.lent = Some(lent);
        Transaction { session: open.session.take(), back: Some(back) }
    }

    async fn take_back(&self, open: &mut MongoSession) -> Result<(), String> {
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

    async fn commit(&self, open: &mut MongoSession, save: &Save) -> Result<Committed, TransactionError> {
        let Some(session) = open.take() else {
            return Err(TransactionError::Transient { message: "it was not given back".into() });
        };
        let update = save_in(self.records.clone(), save.clone(), session);
        let (session, stored) = self.ask(update, WRITE).await?;
        let stored = match stored {
            Ok(stored) => stored,
            Err(error) => {
                open.session = Some(session);
                return Err(self.transaction_error(&CallError::Driver(error), WRITE));
            }
        };
        let outcome = stored.map_or(Ok(SaveOutcome::Gone), |stored| outcome(save, &stored));
        let at = match outcome {
            Ok(SaveOutcome::Saved { at }) => at,
            refused => {
                open.session = Some(session);
                self.abort(open).await;
                return Ok(match refused? {
                    SaveOutcome::Superseded { owner, since } => Committed::Superseded { owner, since },
                    SaveOutcome::Gone => Committed::Gone,
                    SaveOutcome::NotAhead | SaveOutcome::Saved { .. } => Committed::NotAhead,
                });
            }
        };
        let committed = call(COMMIT_AGAIN + DEADLINE, commit_until_known(session)).await;
        let (session, committed) = committed.map_err(|error| self.transaction_error(&error, WRITE))?;
        open.session = Some(session);
        match committed {
            Ok(()) => Ok(Committed::Stored { at }),
            Err(error) => Err(self.transaction_error(&CallError::Driver(error), WRITE)),
        }
    }

    async fn abort(&self, open: &mut MongoSession) {
        let Some(mut session) = open.take() else { return };
        // What cannot be aborted is rolled back by the server, when it has waited long enough.
        let aborted = call(DEADLINE, async move {
            let _ = session.abort_transaction().await;
            Ok(session)
        });
        open.session = aborted.await.ok();
    }
}

impl MongoCheckpointStorage {
    async fn ask<T: Send + 'static>(
        &self,
        operation: impl Future<Output = mongodb::error::Result<T>> + Send + 'static,
        action: &'static str,
    ) -> Result<T, TransactionError> {
        call(DEADLINE, operation).await.map_err(|error| self.transaction_error(&error, action))
    }

    /// Names the session in the record, so that whoever takes over can end it; and ends the one that is named there.
    async fn name_session(&self, save: &Save, session: &Document) -> Result<(), TransactionError> {
        self.end_session(&save.id).await;
        // Behind it: killed in between, the next one still finds what is to be ended.
        let mut own = by_id(&save.id);
        own.insert("mongosub.fence", save.ownership.fence.0);
        own.insert("mongosub.owner", save.ownership.owner.as_str());
        let (records, named) = (self.records.clone(), doc! { "$set": { SESSION: session } });
        let name = async move { records.update_one(own, named).write_concern(majority()).collation(simple()).await };
        self.ask(name, WRITE).await.map(drop)
    }

    /// Ends the transaction that the owner of a record may have left open. Its process can have been killed, and what that
    /// has written, the record too, would be locked for as long as the server lets a transaction live: a minute.
    ///
    /// An error is no news: where it cannot be ended, the server does it in the end.
    pub(super) async fn end_session(&self, id: &SubscriptionId) {
        let (records, filter) = (self.records.clone(), by_id(id));
        let end = async move {
            let record = records
                .find_one(filter)
                .read_concern(ReadConcern::majority())
                .selection_criteria(primary())
                .collation(simple())
                .max_time(DEADLINE)
                .await?;
            let session =
                record.as_ref().and_then(|record| record.get_document(OURS).ok()?.get_document("session").ok());
            if let Some(session) = session.and_then(|session| Document::try_from(session).ok()) {
                let kill = doc! { "killSessions": [session] };
                records.client().database("admin").run_command(kill).await?;
            }
            Ok(())
        };
        let _ = call(DEADLINE, end).await;
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

async fn start(client: Client) -> mongodb::error::Result<ClientSession> {
    client.start_session().await
}

/// Begins, and reads the record: from there on, whoever changes it makes the commit fail.
async fn begin(
    records: Collection<RawDocumentBuf>,
    filter: Document,
    mut session: Box<ClientSession>,
) -> mongodb::error::Result<(Box<ClientSession>, Option<RawDocumentBuf>)> {
    // One that was left open when its handler was dropped. Without one there is nothing to abort.
    let _ = session.abort_transaction().await;
    session
        .start_transaction()
        .read_concern(ReadConcern::snapshot())
        .write_concern(majority())
        .selection_criteria(primary())
        .await?;
    let found = records.find_one(filter).collation(simple()).max_time(DEADLINE).session(&mut *session).await?;
    Ok((session, found))
}

/// Stores the position in the transaction, and gives the record as the transaction sees it.
async fn save_in(
    records: Collection<RawDocumentBuf>,
    save: Save,
    mut session: Box<ClientSession>,
) -> mongodb::error::Result<(Box<ClientSession>, mongodb::error::Result<Option<RawDocumentBuf>>)> {
    let stored = records
        .find_one_and_update(by_id(&save.id), record_pipeline::save(&save))
        .return_document(ReturnDocument::After)
        .collation(simple())
        .max_time(DEADLINE)
        .session(&mut *session)
        .await;
    if stored.is_err() {
        // At once, so that the next attempt does not meet what this one has written.
        let _ = session.abort_transaction().await;
    }
    Ok((session, stored))
}

/// Commits, again and again as long as the outcome is unknown, which is harmless.
async fn commit_until_known(
    mut session: Box<ClientSession>,
) -> mongodb::error::Result<(Box<ClientSession>, mongodb::error::Result<()>)> {
    let until = Instant::now() + COMMIT_AGAIN;
    loop {
        match session.commit_transaction().await {
            Err(error) if error.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT) && Instant::now() < until => {
                tokio::time::sleep(COMMIT_PAUSE).await;
            }
            committed => return Ok((session, committed)),
        }
    }
}
