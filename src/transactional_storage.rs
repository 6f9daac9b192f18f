//! The seam to a storage that stores a position in one transaction with the effects of the events before it. What a
//! transaction is to the handler is the storage's own type; the run begins, lends, commits.

use bson::DateTime;

use crate::checkpoint::Checkpoint;
use crate::error::StorageError;
use crate::handler::Failure;
use crate::ids::Owner;
use crate::storage::{CheckpointStorage, Save};

/// A checkpoint storage whose transactions a handler can write in: its writes and the position become visible together,
/// or neither does.
///
/// A position is stored in a transaction only if it was not stored, nor another one beyond it, when the transaction
/// began, and only by the owner of the record. Both hold until the commit: a claim, or a save, that is made meanwhile
/// makes it fail. Nothing waits for an open transaction: another owner can claim at once.
///
/// Whoever writes one runs the suite in `mongosub::conformance` (feature `conformance`) against it.
pub trait TransactionalStorage: CheckpointStorage {
    /// What the handler writes with. It is lent, and comes back when it is dropped.
    type Transaction: Send + 'static;
    /// What one run makes its transactions with, one after the other; new, it has made none. Dropped, nothing is left of
    /// an open one.
    type Session: Default + Send + 'static;

    /// Opens a transaction for events of this save's id, owner and epoch, and says how far the record is. What is left of
    /// one before, of this owner or of an earlier one that was killed, is rolled back.
    ///
    /// # Errors
    /// [`TransactionError`]; nothing is open then.
    ///
    /// # Cancel safety
    /// Dropped, nothing is left open.
    fn begin(
        &self,
        session: &mut Self::Session,
        save: &Save,
    ) -> impl Future<Output = Result<Begun, TransactionError>> + Send;

    /// Lends the open transaction to a handler.
    fn lend(&self, session: &mut Self::Session) -> Self::Transaction;

    /// Takes back what was lent, when the handler has returned.
    ///
    /// # Errors
    /// In one sentence, when the handler has kept its transaction, or has ended it. Nothing of it is then stored by us.
    ///
    /// # Cancel safety
    /// Dropped, the transaction is rolled back.
    fn take_back(&self, session: &mut Self::Session) -> impl Future<Output = Result<(), String>> + Send;

    /// Whether a handler failed because its transaction did, in a way that another one need not: a conflict with another
    /// writer, an election.
    fn is_transient(&self, failure: &Failure) -> bool;

    /// Stores the position in the transaction, and commits it.
    ///
    /// # Errors
    /// [`TransactionError`]; after [`TransactionError::Storage`] with `Unavailable` the outcome is unknown, and the next
    /// `begin` shows it.
    ///
    /// # Cancel safety
    /// Dropped, the commit goes on, and the next `begin` shows whether it was made.
    fn commit(
        &self,
        session: &mut Self::Session,
        save: &Save,
    ) -> impl Future<Output = Result<Committed, TransactionError>> + Send;

    /// Ends an open transaction, if there is one, and leaves nothing of it. An error is no news: what is not committed is gone in any case.
    ///
    /// # Cancel safety
    /// Dropped, it goes on.
    fn abort(&self, session: &mut Self::Session) -> impl Future<Output = ()> + Send;
}

/// What became of a beginning.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Begun {
    /// It is open.
    Open {
        /// The position that is stored, if it is one of the save's epoch: events up to it are done, and must not be done
        /// again.
        stored: Option<Checkpoint>,
    },
    /// The record is another owner's, or of a later epoch.
    Superseded {
        /// Who holds it; none when another program rewrote the record.
        owner: Option<Owner>,
        /// Since when, on the storage's clock.
        since: Option<DateTime>,
    },
    /// There is no record any more.
    Gone,
}

/// What became of a transaction that was to be committed.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Committed {
    /// The position and everything written in the transaction are stored.
    Stored {
        /// When, on the storage's clock.
        at: Option<DateTime>,
    },
    /// Nothing of it is stored: the record's position covers this one. The next `begin` shows it.
    NotAhead,
    /// Nothing of it is stored: the record is another owner's.
    Superseded {
        /// Who holds it; none when another program rewrote the record.
        owner: Option<Owner>,
        /// Since when, on the storage's clock.
        since: Option<DateTime>,
    },
    /// Nothing of it is stored: there is no record any more.
    Gone,
}

/// Why a transaction did not come to an answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransactionError {
    /// It was rolled back, and another one may succeed: it met another writer, an election, or the server's time limit.
    #[error("the transaction was rolled back: {message}")]
    Transient {
        /// What the storage said.
        message: String,
    },
    /// The storage could not be asked, or refuses.
    #[error(transparent)]
    Storage(#[from] StorageError),
}
