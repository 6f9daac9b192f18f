//! Deliveries as a stream, for those who prefer to pull.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::Stream;
use tokio::sync::{Notify, mpsc};

use crate::pulled::Pulled;
use crate::subscription::Subscription;

/// The deliveries of one subscription, pulled one at a time; what [`stream`](crate::DurableSubscriptions::stream) answers.
///
/// It is a `futures::Stream`. The next delivery is there when the one before is settled, or has failed for good; a failed
/// one comes again after its backoff.
///
/// The stream ends when the subscription stops: [`Subscription::stopped`] says why. While it retries, is paused or has
/// stalled, nothing comes: its [`status`](Subscription::status) tells.
///
/// Dropping it shuts the subscription down; a delivery that is still out stays unsettled and comes again at the next start.
///
/// # Cancel safety
/// A `next()` that is dropped loses nothing.
pub struct Deliveries {
    subscription: Subscription,
    pulled: mpsc::Receiver<Pulled>,
    demand: Arc<Notify>,
}

impl Deliveries {
    pub(super) fn new(subscription: Subscription, pulled: mpsc::Receiver<Pulled>, demand: Arc<Notify>) -> Self {
        Self { subscription, pulled, demand }
    }

    /// The running subscription: its status, pause, resume and shutdown.
    pub fn subscription(&self) -> &Subscription {
        &self.subscription
    }
}

impl Stream for Deliveries {
    type Item = Pulled;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Pulled>> {
        let polled = self.pulled.poll_recv(context);
        if polled.is_pending() {
            self.demand.notify_one();
        }
        polled
    }
}

impl Drop for Deliveries {
    fn drop(&mut self) {
        self.pulled.close();
        self.subscription.begin_shutdown();
    }
}

impl fmt::Debug for Deliveries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deliveries").field("subscription", &self.subscription).finish_non_exhaustive()
    }
}
