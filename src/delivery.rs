//! One event handed to the handler, with its context. A value; it is made by `run/` and by `memory::delivery`.

use std::fmt;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::checkpoint::Checkpoint;
use crate::event::ChangeEvent;
use crate::hold::Hold;
use crate::ids::{Epoch, Fence, SubscriptionId};

/// One event handed to the handler, with its context. Cheap to clone: the event is shared, not copied. A clone that is
/// kept keeps the whole reply it came in, 1 to 2 MB and up to 16.
///
/// ```
/// use mongosub::bson::Document;
/// use mongosub::{Delivery, Failure};
///
/// async fn handle(delivery: Delivery) -> Result<(), Failure> {
///     let Some(order) = delivery.event.full_document::<Document>()? else { return Ok(()) };
///     if delivery.may_be_repeat {
///         // Look whether it was done already, or do it so that doing it twice changes nothing.
///     }
///     tokio::select! {
///         () = send(&order) => Ok(()),
///         () = delivery.cancelled() => Err("asked to stop; it comes again at the next start".into()),
///     }
/// }
/// # async fn send(_: &Document) {}
/// # let _ = handle;
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Delivery {
    /// The change.
    pub event: ChangeEvent,
    /// The event's position.
    pub position: Checkpoint,
    /// Which attempt this is; 1 is the first. An attempt is counted by this run: a restart begins at 1 again.
    pub attempt: u32,
    /// Whether the handler may have seen this event before: `attempt > 1`, or up to the deployment's present at the
    /// start of a run that did not follow a clean end. Often true for none; false for a repeat only beside an owner that
    /// has been superseded and does not know it yet, at most ten seconds and its event in hand.
    pub may_be_repeat: bool,
    context: Arc<Context>,
}

pub(crate) struct Context {
    pub(crate) subscription: SubscriptionId,
    pub(crate) fence: Fence,
    pub(crate) epoch: Epoch,
    pub(crate) hold: Hold,
    pub(crate) cancelled: CancellationToken,
}

impl Delivery {
    pub(crate) fn new(event: ChangeEvent, position: Checkpoint, may_be_repeat: bool, context: Arc<Context>) -> Self {
        Self { event, position, attempt: 1, may_be_repeat, context }
    }

    /// The same with another hold: of a part of its handler.
    pub(crate) fn with_hold(self, hold: Hold) -> Self {
        let Context { subscription, fence, epoch, cancelled, .. } = &*self.context;
        let (subscription, cancelled) = (subscription.clone(), cancelled.clone());
        let context = Context { subscription, fence: *fence, epoch: *epoch, hold, cancelled };
        Self { context: Arc::new(context), ..self }
    }

    /// The id of the subscription.
    pub fn subscription(&self) -> &SubscriptionId {
        &self.context.subscription
    }

    /// The fence of this run. Write it beside your own effects and refuse lower ones, and a run that has been
    /// superseded can no longer change anything.
    pub fn fence(&self) -> Fence {
        self.context.fence
    }

    /// The epoch of the position. Positions of different epochs are not comparable: a greater one says that the source
    /// began anew (a start of your own, a collection dropped and made again, a restart behind lost history).
    pub fn epoch(&self) -> Epoch {
        self.context.epoch
    }

    /// The run's hold, to declare what is durable. Without [`.hold()`](crate::Subscribe::hold) declaring changes nothing.
    pub fn hold(&self) -> &Hold {
        &self.context.hold
    }

    /// Whether a handler that keeps the position with its own state has applied this event already: `saved` is the
    /// position it has kept, none when it has none. Keep the [`epoch`](Self::epoch) with it: a position of another epoch
    /// says nothing about this one.
    ///
    /// Written in one transaction with the state, the position makes repeats harmless: each event is applied exactly once.
    ///
    /// ```
    /// # use mongosub::{memory, bson::doc};
    /// let first = memory::delivery(memory::insert(1, doc! {}));
    /// assert!(!first.already_applied(None));
    /// assert!(first.already_applied(Some(&first.position)));
    /// ```
    pub fn already_applied(&self, saved: Option<&Checkpoint>) -> bool {
        saved.is_some_and(|saved| !self.position.is_beyond(saved))
    }

    /// Completes when the run has been asked to stop or pause: finish soon, the grace has begun.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + use<> {
        self.context.cancelled.clone().cancelled_owned()
    }

    /// Whether the run has been asked to stop or pause.
    pub fn is_cancelled(&self) -> bool {
        self.context.cancelled.is_cancelled()
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("subscription", &self.context.subscription)
            .field("position", &self.position)
            .field("attempt", &self.attempt)
            .field("may_be_repeat", &self.may_be_repeat)
            .field("fence", &self.context.fence)
            .finish_non_exhaustive()
    }
}
