//! Subscriptions whose handler writes in one transaction with the position.

use super::{DurableSubscriptions, Subscribe};
use crate::batch_handler::BatchLimits;
use crate::model::SubscriptionModel;
use crate::run::transaction::TransactionWork;
use crate::transaction_handler::TransactionHandler;
use crate::transactional_storage::TransactionalStorage;

impl<M: SubscriptionModel, S: TransactionalStorage> DurableSubscriptions<M, S> {
    /// As [`subscribe`](Self::subscribe), for effects that are to happen exactly once: the handler gets a transaction, and
    /// what it writes with it is committed with the event's position, or not at all. A killed or superseded process
    /// leaves neither half.
    ///
    /// With a [`MongoCheckpointStorage`](crate::MongoCheckpointStorage) the transaction is a
    /// [`Transaction`](crate::Transaction), the driver's session; its docs say what it takes. The source must be the same
    /// deployment as the storage, which both have to show.
    ///
    /// * [`save_every(n)`](Subscribe::save_every): up to n events that have been read already go into one transaction, in
    ///   order, and nothing waits for more. When the handler fails for one of them, those in front of it are run again
    ///   without it and committed, and the failure policy gets the one that failed. `save_when` and `hold` are refused.
    /// * A transaction that is rolled back by a conflict, an election or the server's time limit is run again as a whole,
    ///   for up to 120 s, before that counts as a failure. The handler sees a greater
    ///   [`attempt`](crate::Delivery::attempt) and [`may_be_repeat`](crate::Delivery::may_be_repeat); what it does outside
    ///   of the transaction is done again.
    /// * A storage that does not answer is retried for ever, shown as `Retrying(StorageUnavailable)`; that is no failure
    ///   of the handler. A commit whose answer was lost is found out about: the events are not handled again if it was
    ///   made.
    /// * An event that is skipped, dead-lettered or parked has no transaction. Its position is stored after it.
    ///
    /// ```no_run
    /// # use mongosub::bson::{Document, doc};
    /// use mongosub::{ChangeStreamModel, Delivery, DurableSubscriptions, MongoCheckpointStorage, Transaction};
    ///
    /// # async fn example(db: mongosub::mongodb::Database) -> Result<(), Box<dyn std::error::Error>> {
    /// let (payments, totals) = (db.collection::<Document>("payments"), db.collection::<Document>("totals"));
    /// let storage = MongoCheckpointStorage::new(&db.collection::<Document>("checkpoints"));
    /// let subscriptions = DurableSubscriptions::new(ChangeStreamModel::collection(&payments), storage);
    /// // In a transaction none can be made by every server.
    /// db.create_collection("totals").await?;
    /// let subscription = subscriptions
    ///     .subscribe_in_transaction("totals_v1", move |mut transaction: Transaction, delivery: Delivery| {
    ///         let totals = totals.clone();
    ///         async move {
    ///             let Some(payment) = delivery.event.full_document::<Document>()? else { return Ok(()) };
    ///             let change = doc! { "$inc": { "total": payment.get_i64("amount")? } };
    ///             let account = doc! { "_id": payment.get_str("account")? };
    ///             totals.update_one(account, change).upsert(true).session(&mut *transaction).await?;
    ///             Ok(())
    ///         }
    ///     })
    ///     .save_every(100)
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Beside those of [`Subscribe`], [`SubscribeError::Config`](crate::SubscribeError::Config) naming `storage` when
    /// source and storage are not one deployment, or do not show it; `save_when` or `hold` when they are set.
    pub fn subscribe_in_transaction<H: TransactionHandler<S::Transaction> + 'static>(
        &self,
        id: impl Into<String>,
        handler: H,
    ) -> Subscribe<M, S> {
        let storage = self.inner.storage.clone();
        let action = self.action(
            id.into(),
            BatchLimits::new(1),
            Box::new(move |settings, board| {
                let (events, timeout) = (settings.events_in_a_transaction(), settings.handler_timeout);
                Box::new(TransactionWork::new(storage, handler, events, timeout, board.clone()))
            }),
        );
        Subscribe { transactional: true, ..action }
    }
}
