//! The seam to the user's code: what handles a delivery, and how it says that it failed.

use std::error::Error;
use std::fmt;

use crate::checkpoint::Checkpoint;
use crate::delivery::Delivery;
use crate::hold::Hold;

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
    /// Handles one delivery. `Ok` settles the event; what follows an error is the failure policy's
    /// ([`OnFailure`](crate::OnFailure)) or the [`Failure`]'s own: by default the same event again, after a backoff.
    ///
    /// It should not block its thread. One that does holds up its own deliveries; saves, status, warnings and the check of
    /// the ownership go on on the other threads of the runtime, if it has any. `handler_timeout` does not end it.
    ///
    /// # Cancel safety
    /// The future is dropped in the middle when `handler_timeout` passes, or when the grace of a pause or shutdown
    /// has run out; the event is then unsettled and comes again.
    fn handle(&mut self, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Whether it may keep back effects of what it has handled until [`flush`](Self::flush). Default: true; a closure
    /// does not.
    ///
    /// What buffers is asked to flush before anything is stored, and to that end waited for: an event in hand holds a save
    /// up. After a panic or a timeout with [`subscribe_with`](crate::DurableSubscriptions::subscribe_with), what was
    /// handled and not flushed comes again. A handler whose effects are done when it returns answers false and is spared
    /// both; `flush` and `released` are then never called.
    fn buffers(&self) -> bool {
        true
    }

    /// The id is claimed and the run stands at `from`; deliveries begin after it, with the event behind `from`. Every
    /// handler is told before its first delivery, a fresh one of the factory too. Default: nothing.
    ///
    /// Whoever keeps the position with an own state looks here how far that has come
    /// ([`Delivery::already_applied`]). `hold` is the run's, for handlers that declare what is durable.
    ///
    /// # Errors
    /// The first one is the error of `subscribe`; a later one restarts the run after a backoff, with the next handler of
    /// the factory.
    ///
    /// # Cancel safety
    /// The future is dropped in the middle when `subscribe` is, or the run is asked to stop.
    fn claimed(&mut self, from: Option<Checkpoint>, hold: Hold) -> impl Future<Output = Result<(), Failure>> + Send {
        drop((from, hold));
        async { Ok(()) }
    }

    /// Makes durable whatever was handled up to `through`, and answers how far that is true: at least `through`, at most
    /// the last delivery. Default: nothing is to be done. Nothing is handled meanwhile, and the save waits for it.
    ///
    /// It is called when the save policy asks for a save, and before a quiet, pause or shutdown save when anything has
    /// been handled since; [`save_every`](crate::Subscribe::save_every) says how often that is. One that takes longer
    /// than 30 s shows as `Retrying(Flushing)` and is waited for.
    ///
    /// # Errors
    /// After an error, or an answer that does not cover `through`, nothing is stored: the handler is dropped, and the run
    /// begins anew at its stored checkpoint, after a backoff (1 s, doubling to 60 s), with a fresh handler of the
    /// factory. Without a factory it ends with `Stopped(HandlerFailed)`.
    ///
    /// # Cancel safety
    /// The future is dropped in the middle when the grace of a pause or shutdown has run out.
    fn flush(&mut self, through: Checkpoint) -> impl Future<Output = Result<Checkpoint, Failure>> + Send {
        async { Ok(through) }
    }

    /// The run ends, and `through` is what it would store last. The answer is stored instead: `through`, or less where
    /// more is to come again, but never less than what is stored already, and never more than was delivered. Default:
    /// `through`. It is not called when the id was taken over, or the record deleted.
    ///
    /// # Errors
    /// An error is logged: it stores nothing and stops nothing.
    ///
    /// # Cancel safety
    /// The future is dropped in the middle when the grace of the shutdown has run out.
    fn released(&mut self, through: Checkpoint) -> impl Future<Output = Result<Checkpoint, Failure>> + Send {
        async { Ok(through) }
    }
}

impl<F, Fut> Handler for F
where
    F: FnMut(Delivery) -> Fut + Send,
    Fut: Future<Output = Result<(), Failure>> + Send,
{
    fn handle(&mut self, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send {
        self(delivery)
    }

    fn buffers(&self) -> bool {
        false
    }
}

/// A failed attempt to handle a delivery, with what is to follow. `?` makes one of any error: it is then tried again
/// after a backoff, as often as the failure policy says ([`OnFailure`](crate::OnFailure)).
///
/// It is no `Error` itself, so that every error can become one.
///
/// ```
/// # fn index(_: &str) -> std::io::Result<()> { Ok(()) }
/// use mongosub::{Delivery, Failure};
///
/// async fn handle(delivery: Delivery) -> Result<(), Failure> {
///     let Some(id) = delivery.event.document_id::<String>()? else {
///         return Err(Failure::skip("a change without a document"));
///     };
///     index(&id)?;
///     Ok(())
/// }
/// # let _ = handle;
/// assert_eq!(Failure::retry("the index is closed").to_string(), "the index is closed");
/// ```
pub struct Failure {
    verdict: Verdict,
    cause: Box<dyn Error + Send + Sync>,
}

/// What a handler wants to follow from its failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// What the failure policy says: by default it is tried again, for ever.
    Retry,
    /// The event goes into the dead letter storage at once, whatever the policy.
    DeadLetter,
    /// The event is passed over at once, whatever the policy.
    Skip,
    /// The subscription stops at once, whatever the policy.
    Stop,
}

impl Failure {
    /// A failure to be retried as the failure policy says, for this cause.
    pub fn retry(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(Verdict::Retry, cause)
    }

    /// Trying again is of no use: the event goes into the dead letter storage, and later events of the same document are
    /// parked behind it. Without a storage ([`dead_letters`](crate::DurableSubscriptions::dead_letters)) it is a
    /// failure to be retried, whose error says so.
    pub fn dead_letter(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(Verdict::DeadLetter, cause)
    }

    /// The event is not wanted: it is settled and never comes again. Counted, and logged at warn.
    pub fn skip(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(Verdict::Skip, cause)
    }

    /// The subscription stops with `Stopped(HandlerFailed)`; the event is unsettled and comes again at the next start.
    pub fn stop(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(Verdict::Stop, cause)
    }

    fn new(verdict: Verdict, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { verdict, cause: cause.into() }
    }

    /// What is to follow.
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// What went wrong.
    pub fn cause(&self) -> &(dyn Error + Send + Sync + 'static) {
        &*self.cause
    }

    /// The cause and the causes behind it, each as text.
    pub fn chain(&self) -> Vec<String> {
        let mut chain = vec![self.cause.to_string()];
        let mut source = self.cause.source();
        while let Some(cause) = source {
            chain.push(cause.to_string());
            source = cause.source();
        }
        chain
    }
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failure {
    fn from(cause: E) -> Self {
        Self::retry(cause)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Failure").field(&self.verdict).field(&self.cause).finish()
    }
}

/// The cause with the causes behind it.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.chain().join(": "))
    }
}
