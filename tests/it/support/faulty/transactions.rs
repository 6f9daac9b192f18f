//! The same storage with transactions: they fail to begin, are rolled back, or lose their answer when told to.

use mongosub::memory::{MemorySession, MemoryTransaction};
use mongosub::{Begun, Committed, Failure, Save, StorageError, TransactionError, TransactionalStorage};

use super::{Fault, FaultyStorage};

impl FaultyStorage {
    /// The next transactions meet these when they begin, one each.
    pub fn next_begins(&self, faults: impl IntoIterator<Item = Fault>) {
        self.script().begins.extend(faults);
    }

    /// The next commits meet these, one each. `None` meets nothing, `Fault::Fail` is an unavailable storage.
    pub fn next_commits(&self, faults: impl IntoIterator<Item = Option<Fault>>) {
        self.script().commits.extend(faults);
    }

    /// So many commits are rolled back, and may succeed when they are run again.
    pub fn roll_back(&self, times: u32) {
        self.script().roll_backs += times;
    }

    /// How many commits were sent so far.
    pub fn commits_sent(&self) -> usize {
        self.script().commits_sent
    }

    /// Every transaction fails to begin, until `heal`.
    pub fn no_begins(&self) {
        self.script().no_begins = true;
    }

    /// Transactions can begin again.
    pub fn begins_again(&self) {
        self.script().no_begins = false;
    }
}

fn lost(error: TransactionError) -> StorageError {
    match error {
        TransactionError::Storage(error) => error,
        other => panic!("{other}"),
    }
}

impl TransactionalStorage for FaultyStorage {
    type Transaction = MemoryTransaction;
    type Session = MemorySession;

    async fn begin(&self, session: &mut MemorySession, save: &Save) -> Result<Begun, TransactionError> {
        let fault = {
            let mut script = self.script();
            let always = script.no_begins.then_some(Fault::Fail);
            script.begins.pop_front().or(always)
        };
        Ok(self.meet(fault, async { self.inner.begin(session, save).await.map_err(lost) }).await?)
    }

    fn lend(&self, session: &mut MemorySession) -> MemoryTransaction {
        self.inner.lend(session)
    }

    async fn take_back(&self, session: &mut MemorySession) -> Result<(), String> {
        self.inner.take_back(session).await
    }

    fn is_transient(&self, failure: &Failure) -> bool {
        self.inner.is_transient(failure)
    }

    async fn commit(&self, session: &mut MemorySession, save: &Save) -> Result<Committed, TransactionError> {
        let (fault, rolled_back) = {
            let mut script = self.script();
            script.commits_sent += 1;
            let rolled_back = script.roll_backs > 0;
            script.roll_backs = script.roll_backs.saturating_sub(1);
            (script.commits.pop_front().flatten(), rolled_back)
        };
        if rolled_back {
            return Err(TransactionError::Transient { message: "scripted".into() });
        }
        // An answer that is lost says nothing, whatever it was.
        self.meet(fault, async { Ok(self.inner.commit(session, save).await) }).await?
    }

    async fn abort(&self, session: &mut MemorySession) {
        self.inner.abort(session).await;
    }
}
