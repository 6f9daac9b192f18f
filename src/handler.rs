//! The seam to the user's code: what handles a delivery, and how it says that it failed.

use std::error::Error;
use std::fmt;

use crate::delivery::Delivery;

/// Handles deliveries, one at a time and in feed order.
///
/// Every `FnMut(Delivery) -> impl Future<Output = Result<(), Failure>>` is one; name the closure's argument type.
/// What is shared is cloned in the closure:
///
/// ```
/// # use std::sync::{Arc, atomic::{AtomicU64, Ordering::Relaxed}};
/// use mongosub::{Delivery, Handler};
///
/// let seen = Arc::new(AtomicU64::new(0));
/// let handler = move |delivery: Delivery| {
///     let seen = seen.clone();
///     async move {
///         delivery.event.full_document::<mongosub::bson::Document>()?;
///         seen.fetch_add(1, Relaxed);
///         Ok(())
///     }
/// };
/// # fn takes(_: impl Handler) {} takes(handler);
/// ```
///
/// State that changes goes into a struct:
///
/// ```
/// use mongosub::{Delivery, Failure, Handler};
///
/// struct Count { seen: u64 }
///
/// impl Handler for Count {
///     async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
///         delivery.event.document_id::<i32>()?;
///         self.seen += 1;
///         Ok(())
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no handler",
    note = "write `|delivery: Delivery| async move {{ ..; Ok(()) }}` or `impl Handler`"
)]
pub trait Handler: Send {
    /// Handles one delivery. `Ok` settles the event; an error is retried after a backoff, with the same event.
    ///
    /// # Cancel safety
    /// The future is dropped in the middle when `handler_timeout` passes, or when the grace of a pause or shutdown
    /// has run out; the event is then unsettled and comes again.
    fn handle(&mut self, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send;
}

impl<F, Fut> Handler for F
where
    F: FnMut(Delivery) -> Fut + Send,
    Fut: Future<Output = Result<(), Failure>> + Send,
{
    fn handle(&mut self, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send {
        self(delivery)
    }
}

/// A failed attempt to handle a delivery: it is tried again after a backoff. `?` makes one of any error.
///
/// It is no `Error` itself, so that every error can become one.
///
/// ```
/// # fn index(_: &str) -> std::io::Result<()> { Ok(()) }
/// use mongosub::{Delivery, Failure};
///
/// async fn handle(delivery: Delivery) -> Result<(), Failure> {
///     let id: String = delivery.event.document_id()?.ok_or("a change without a document")?;
///     index(&id)?;
///     Ok(())
/// }
/// # let _ = handle;
/// assert_eq!(Failure::retry("the index is closed").to_string(), "the index is closed");
/// ```
pub struct Failure {
    cause: Box<dyn Error + Send + Sync>,
}

impl Failure {
    /// A failure to be retried, for this cause.
    pub fn retry(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { cause: cause.into() }
    }

    /// What went wrong.
    pub fn cause(&self) -> &(dyn Error + Send + Sync + 'static) {
        &*self.cause
    }
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failure {
    fn from(cause: E) -> Self {
        Self::retry(cause)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Failure").field(&self.cause).finish()
    }
}

/// The cause with the causes behind it.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.cause)?;
        let mut source = self.cause.source();
        while let Some(cause) = source {
            write!(f, ": {cause}")?;
            source = cause.source();
        }
        Ok(())
    }
}
