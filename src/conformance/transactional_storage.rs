//! The suite for [`TransactionalStorage`]s: what is written in a transaction is stored with the position, or not at all.

use bson::Timestamp;

use super::report::{Failed, Report, same, that};
use crate::checkpoint::Checkpoint;
use crate::error::StorageError;
use crate::ids::{Epoch, Ownership, SubscriptionId};
use crate::storage::{Claim, ClaimOutcome, Save};
use crate::transactional_storage::{Begun, Committed, TransactionError, TransactionalStorage};

/// How the suite writes in a transaction, and sees from outside what is stored: with whatever the transactions are made
/// of.
pub trait Effects<S: TransactionalStorage>: Sync {
    /// Writes something under a key.
    fn write(&self, storage: &S, transaction: &mut S::Transaction, key: &str) -> impl Future<Output = ()> + Send;

    /// Whether something is stored under a key.
    fn is_written(&self, storage: &S, key: &str) -> impl Future<Output = bool> + Send;
}

/// Runs every check in this storage, under fresh ids and keys. Whoever passes it has to pass
/// [`checkpoint_storage`](super::checkpoint_storage) as well.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_time().build()?.block_on(async {
/// use mongosub::conformance::{self, Effects};
/// # use mongosub::memory::{MemoryCheckpointStorage as MyStorage, MemoryTransaction as MyTransaction};
///
/// struct Values;
///
/// impl Effects<MyStorage> for Values {
///     async fn write(&self, _: &MyStorage, transaction: &mut MyTransaction, key: &str) {
///         transaction.set(key, 1);
///     }
///
///     async fn is_written(&self, storage: &MyStorage, key: &str) -> bool {
///         storage.value(key).is_some()
///     }
/// }
///
/// conformance::transactional_storage(&MyStorage::new(), &Values).await.assert_passed();
/// # });
/// # Ok::<_, std::io::Error>(())
/// ```
///
/// # Cancel safety
/// Dropped, the records it has made so far stay in the storage.
pub async fn transactional_storage<S: TransactionalStorage, E: Effects<S>>(storage: &S, effects: &E) -> Report {
    let mut report = Report::default();
    macro_rules! checks {
        ($($name:ident,)*) => {
            $(
                let checked = match Checked::new(storage, effects, stringify!($name)).await {
                    Ok(checked) => checked.$name().await,
                    Err(failed) => Err(failed),
                };
                report.add(stringify!($name), checked);
            )*
        };
    }
    checks![
        a_commit_stores_the_writes_and_the_position,
        what_is_not_committed_leaves_nothing,
        a_beginning_names_the_stored_position_of_its_epoch,
        only_the_owner_of_the_record_begins,
        a_claim_does_not_wait_and_no_commit_follows_it,
        a_save_made_meanwhile_lets_the_commit_fail,
        a_position_that_is_covered_leaves_nothing,
        one_session_makes_transactions_one_after_the_other,
        what_a_killed_owner_has_left_open_is_not_in_the_way,
        a_transaction_is_lent_several_times_and_one_that_is_kept_is_an_error,
    ];
    report
}

/// A record with a start, its owner, and a key for what is written.
struct Checked<'a, S, E> {
    storage: &'a S,
    effects: &'a E,
    save: Save,
    key: String,
}

impl From<TransactionError> for Failed {
    fn from(error: TransactionError) -> Self {
        Self(format!("the transaction fails: {error}"))
    }
}

fn at(increment: u32) -> Checkpoint {
    Checkpoint::Time(Timestamp { time: 1_700_000_000, increment })
}

impl<'a, S: TransactionalStorage, E: Effects<S>> Checked<'a, S, E> {
    async fn new(storage: &'a S, effects: &'a E, name: &str) -> Result<Self, Failed> {
        let key = format!("conformance_{:016x}_{name}", fastrand::u64(..));
        let id = SubscriptionId::new(key.clone()).map_err(|error| Failed(error.to_string()))?;
        let ownership = claimed(storage, &id).await?;
        let save = Save::new(id, ownership, Epoch(5), at(1));
        storage.save(&save).await?;
        Ok(Self { storage, effects, save, key })
    }

    fn save(&self, increment: u32) -> Save {
        Save { position: at(increment), ..self.save.clone() }
    }

    /// Opens a transaction in which something is written.
    async fn written(&self) -> Result<S::Session, Failed> {
        let mut session = S::Session::default();
        let begun = self.storage.begin(&mut session, &self.save).await?;
        that(matches!(begun, Begun::Open { .. }), || format!("it should begin: {begun:?}"))?;
        let mut transaction = self.storage.lend(&mut session);
        self.effects.write(self.storage, &mut transaction, &self.key).await;
        drop(transaction);
        self.storage.take_back(&mut session).await.map_err(Failed)?;
        Ok(session)
    }

    async fn stands_at(&self, increment: u32, written: bool) -> Result<(), Failed> {
        let record = self.storage.read(&self.save.id).await?;
        same("the stored position", &record.and_then(|record| record.position), &Some(at(increment)))?;
        let is = self.effects.is_written(self.storage, &self.key).await;
        same("whether the write is stored", &is, &written)
    }

    async fn a_commit_stores_the_writes_and_the_position(self) -> Result<(), Failed> {
        let mut session = self.written().await?;
        self.stands_at(1, false).await?;
        let committed = self.storage.commit(&mut session, &self.save(7)).await?;
        that(matches!(committed, Committed::Stored { .. }), || format!("it should be stored: {committed:?}"))?;
        self.stands_at(7, true).await
    }

    async fn what_is_not_committed_leaves_nothing(self) -> Result<(), Failed> {
        let mut session = self.written().await?;
        self.storage.abort(&mut session).await;
        self.stands_at(1, false).await?;
        drop(self.written().await?);
        self.stands_at(1, false).await?;
        // And the next one can be.
        self.commit_in_time(7).await?;
        self.stands_at(7, true).await
    }

    /// Writes and commits; what was dropped may be in the way for a moment.
    async fn commit_in_time(&self, increment: u32) -> Result<(), Failed> {
        for _ in 0..50 {
            let mut session = self.written().await?;
            match self.storage.commit(&mut session, &self.save(increment)).await {
                Ok(Committed::Stored { .. }) => return Ok(()),
                Err(TransactionError::Transient { .. }) => {
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
                other => return Err(Failed(format!("it should be stored: {other:?}"))),
            }
        }
        Err(Failed("what was dropped stays in the way".into()))
    }

    async fn a_beginning_names_the_stored_position_of_its_epoch(self) -> Result<(), Failed> {
        let mut session = S::Session::default();
        for (epoch, expected) in [(5, Some(at(1))), (6, None)] {
            let begun = self.storage.begin(&mut session, &Save { epoch: Epoch(epoch), ..self.save(7) }).await?;
            let expected = Begun::Open { stored: expected };
            same(&format!("what is stored, for epoch {epoch}"), &begun, &expected)?;
            self.storage.abort(&mut session).await;
        }
        let begun = self.storage.begin(&mut session, &Save { epoch: Epoch(4), ..self.save(7) }).await?;
        that(matches!(begun, Begun::Superseded { .. }), || "a transaction of an older epoch should not begin".into())
    }

    async fn only_the_owner_of_the_record_begins(self) -> Result<(), Failed> {
        let now = claimed(self.storage, &self.save.id).await?;
        let mut session = S::Session::default();
        match self.storage.begin(&mut session, &self.save).await? {
            Begun::Superseded { owner, .. } => same("who holds it", &owner, &Some(now.owner))?,
            _ => return Err(Failed("a superseded owner should not begin".into())),
        }
        self.storage.delete(&self.save.id, None).await?;
        let begun = self.storage.begin(&mut session, &self.save).await?;
        that(matches!(begun, Begun::Gone), || "nothing should begin without a record".into())
    }

    async fn a_claim_does_not_wait_and_no_commit_follows_it(self) -> Result<(), Failed> {
        let mut session = self.written().await?;
        claimed(self.storage, &self.save.id).await?;
        match self.storage.commit(&mut session, &self.save(7)).await {
            Err(TransactionError::Transient { .. }) | Ok(Committed::Superseded { .. }) => {
                self.stands_at(1, false).await
            }
            other => Err(Failed(format!("it should not be committed behind a claim: {other:?}"))),
        }
    }

    async fn a_save_made_meanwhile_lets_the_commit_fail(self) -> Result<(), Failed> {
        let mut session = self.written().await?;
        self.storage.save(&self.save(3)).await?;
        match self.storage.commit(&mut session, &self.save(7)).await {
            Err(TransactionError::Transient { .. }) => self.stands_at(3, false).await,
            other => Err(Failed(format!("it should be rolled back behind a save: {other:?}"))),
        }
    }

    async fn a_position_that_is_covered_leaves_nothing(self) -> Result<(), Failed> {
        self.storage.save(&self.save(9)).await?;
        let mut session = self.written().await?;
        let committed = self.storage.commit(&mut session, &self.save(7)).await?;
        same("the answer to an older position", &committed, &Committed::NotAhead)?;
        self.stands_at(9, false).await
    }

    async fn one_session_makes_transactions_one_after_the_other(self) -> Result<(), Failed> {
        let mut session = S::Session::default();
        for increment in 7..10 {
            let before = Begun::Open { stored: Some(at(if increment == 7 { 1 } else { increment - 1 })) };
            same("the beginning", &self.storage.begin(&mut session, &self.save(increment)).await?, &before)?;
            // One that is left open.
            same("the beginning", &self.storage.begin(&mut session, &self.save(increment)).await?, &before)?;
            let mut transaction = self.storage.lend(&mut session);
            self.effects.write(self.storage, &mut transaction, &format!("{}_{increment}", self.key)).await;
            drop(transaction);
            self.storage.take_back(&mut session).await.map_err(Failed)?;
            let committed = self.storage.commit(&mut session, &self.save(increment)).await?;
            that(matches!(committed, Committed::Stored { .. }), || format!("it should be stored: {committed:?}"))?;
        }
        self.stands_at(9, false).await
    }

    async fn what_a_killed_owner_has_left_open_is_not_in_the_way(self) -> Result<(), Failed> {
        // Its process is gone and cannot roll it back: as good as that is a session that is never dropped.
        let left = self.written().await?;
        let ownership = claimed(self.storage, &self.save.id).await?;
        let next = Checked { save: Save { ownership, ..self.save.clone() }, key: self.key.clone(), ..self };
        let mut session = next.written().await?;
        let committed = next.storage.commit(&mut session, &next.save(7)).await?;
        that(matches!(committed, Committed::Stored { .. }), || format!("it should be stored: {committed:?}"))?;
        drop(left);
        next.stands_at(7, true).await
    }

    async fn a_transaction_is_lent_several_times_and_one_that_is_kept_is_an_error(self) -> Result<(), Failed> {
        let mut session = self.written().await?;
        let again = self.storage.lend(&mut session);
        drop(again);
        self.storage.take_back(&mut session).await.map_err(Failed)?;
        let kept = self.storage.lend(&mut session);
        let taken = self.storage.take_back(&mut session).await;
        that(taken.is_err(), || "a transaction that is kept should be an error".into())?;
        self.storage.abort(&mut session).await;
        drop(kept);
        self.stands_at(1, false).await
    }
}

async fn claimed(storage: &impl TransactionalStorage, id: &SubscriptionId) -> Result<Ownership, Failed> {
    match storage.claim(&Claim::new(id.clone())).await? {
        ClaimOutcome::Claimed(record) => record.ownership.ok_or_else(|| Failed("a claim without an owner".into())),
        other => Err(StorageError::Unavailable { message: format!("the claim was answered {other:?}") }.into()),
    }
}
