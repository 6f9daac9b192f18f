//! The seam to the user's code that handles a delivery in a transaction of the checkpoint storage.

use crate::delivery::Delivery;
use crate::handler::Failure;

/// Handles deliveries, one at a time and in feed order, each with the transaction that its position is stored in.
///
/// `T` is the storage's: [`Transaction`](crate::Transaction) with a
/// [`MongoCheckpointStorage`](crate::MongoCheckpointStorage). Every
/// `FnMut(T, Delivery) -> impl Future<Output = Result<(), Failure>>` is one; name the types of the closure's arguments.
///
/// ```
/// use mongosub::bson::{Document, doc};
/// use mongosub::mongodb::Collection;
/// use mongosub::{Delivery, Failure, Transaction, TransactionHandler};
///
/// struct Totals { totals: Collection<Document> }
///
/// impl TransactionHandler<Transaction> for Totals {
///     async fn handle(&mut self, mut transaction: Transaction, delivery: Delivery) -> Result<(), Failure> {
///         let Some(order) = delivery.event.full_document::<Document>()? else { return Ok(()) };
///         let change = doc! { "$inc": { "total": order.get_i64("total")? } };
///         let customer = doc! { "_id": order.get_str("customer")? };
///         self.totals.update_one(customer, change).upsert(true).session(&mut *transaction).await?;
///         Ok(())
///     }
/// }
/// # let _ = |totals: Totals| { fn takes(_: impl TransactionHandler<Transaction>) {} takes(totals) };
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no handler of deliveries in a transaction `{T}`",
    note = "write `|mut transaction: Transaction, delivery: Delivery| async move {{ ..; Ok(()) }}` or `impl TransactionHandler<Transaction>`"
)]
pub trait TransactionHandler<T>: Send {
    /// Handles one delivery. `Ok` lets its writes and its position be committed, by us; an error rolls the transaction
    /// back, and is what the failure policy says. The transaction goes back when it is dropped, at the latest when the
    /// future is done: one that is kept longer, or that the handler commits or aborts itself, is a failed attempt.
    ///
    /// It may be called again for the same event, with another transaction, without having failed: what it does outside
    /// of its transaction is done again then.
    ///
    /// # Cancel safety
    /// The future is dropped in the middle when `handler_timeout` passes, or when the grace of a pause or shutdown
    /// has run out; its transaction is rolled back, and the event comes again.
    fn handle(&mut self, transaction: T, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send;
}

impl<T, F, Fut> TransactionHandler<T> for F
where
    F: FnMut(T, Delivery) -> Fut + Send,
    Fut: Future<Output = Result<(), Failure>> + Send,
{
    fn handle(&mut self, transaction: T, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send {
        self(transaction, delivery)
    }
}
