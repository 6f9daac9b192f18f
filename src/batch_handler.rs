//! The seam to the user's code that handles deliveries in bulk: how many it takes at once, and how far it came.

use std::fmt;
use std::time::Duration;

use crate::delivery::Delivery;
use crate::handler::Failure;

/// Handles batches of deliveries, one batch at a time and in feed order.
///
/// Every `FnMut(Vec<Delivery>) -> impl Future<Output = Result<(), BatchFailure>>` is one; name the closure's argument
/// type. `Ok` settles the whole batch; [`BatchFailure`] settles the part in front of what failed.
///
/// ```
/// use mongosub::{BatchFailure, BatchHandler, Delivery};
///
/// struct Index { documents: usize }
///
/// impl BatchHandler for Index {
///     async fn handle_batch(&mut self, batch: &[Delivery]) -> Result<(), BatchFailure> {
///         for (settled, delivery) in batch.iter().enumerate() {
///             let document: Option<mongosub::bson::Document> =
///                 delivery.event.full_document().map_err(|error| BatchFailure::after(settled, error))?;
///             self.documents += usize::from(document.is_some());
///         }
///         Ok(())
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no handler of batches",
    note = "write `|batch: Vec<Delivery>| async move {{ ..; Ok(()) }}` or `impl BatchHandler`"
)]
pub trait BatchHandler: Send {
    /// Handles a batch, which is never empty. What an error leaves unsettled comes again after a backoff, first in the
    /// next batch.
    ///
    /// # Cancel safety
    /// The future is dropped in the middle when `handler_timeout` passes, or when the grace of a pause or shutdown
    /// has run out; the whole batch is then unsettled and comes again.
    fn handle_batch(&mut self, batch: &[Delivery]) -> impl Future<Output = Result<(), BatchFailure>> + Send;
}

impl<F, Fut> BatchHandler for F
where
    F: FnMut(Vec<Delivery>) -> Fut + Send,
    Fut: Future<Output = Result<(), BatchFailure>> + Send,
{
    fn handle_batch(&mut self, batch: &[Delivery]) -> impl Future<Output = Result<(), BatchFailure>> + Send {
        self(batch.to_vec())
    }
}

/// How large a batch may be, and how long it may take to fill. Default: what was read already, at most 1000 events.
///
/// A batch also ends at 16 MB, whatever its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchLimits {
    /// The most events of a batch. Default: 1000; 0 is refused.
    pub max: usize,
    /// How long a batch that is not full waits for more, from its first event on. Default: 0, which takes what was read
    /// already. The events of a batch that waits are delivered so much later.
    pub max_wait: Duration,
}

impl BatchLimits {
    /// At most so many events, and no waiting for more.
    pub fn new(max: usize) -> Self {
        Self { max, max_wait: Duration::ZERO }
    }

    /// Waits for a batch to fill, at most so long from its first event on.
    pub fn max_wait(mut self, max_wait: Duration) -> Self {
        self.max_wait = max_wait;
        self
    }
}

impl Default for BatchLimits {
    fn default() -> Self {
        Self::new(1000)
    }
}

/// A batch that was not handled to its end: a part of it is settled, and the event behind it has failed. `?` makes one of
/// any error, with nothing settled; then the first event has failed, as far as anybody knows. What follows is the failure
/// policy's ([`OnFailure`](crate::OnFailure)) or the failure's own: by default the rest comes again after a backoff.
///
/// It is no `Error` itself, so that every error can become one.
#[derive(Debug)]
pub struct BatchFailure {
    settled: usize,
    failure: Failure,
}

impl BatchFailure {
    /// The first `settled` deliveries of the batch are handled, the one behind them failed: for a cause, or with a
    /// [`Failure`] that says what is to follow. A number larger than the batch settles the batch.
    pub fn after(settled: usize, failure: impl Into<Failure>) -> Self {
        Self { settled, failure: failure.into() }
    }

    /// How many deliveries of the batch are settled.
    pub fn settled(&self) -> usize {
        self.settled
    }

    /// What went wrong with the one behind them.
    pub fn failure(&self) -> &Failure {
        &self.failure
    }

    pub(crate) fn into_failure(self) -> Failure {
        self.failure
    }
}

impl<E: Into<Failure>> From<E> for BatchFailure {
    fn from(cause: E) -> Self {
        Self::after(0, cause)
    }
}

/// The cause with the causes behind it.
impl fmt::Display for BatchFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure.fmt(f)
    }
}
