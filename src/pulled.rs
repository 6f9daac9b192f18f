//! A delivery for those who prefer to pull: it is settled by its taker's word instead of a handler's return. A value; made
//! by `run/`, taken from [`Deliveries`](crate::Deliveries).

use std::error::Error;
use std::fmt;
use std::ops::Deref;

use tokio::sync::oneshot;

use crate::delivery::Delivery;
use crate::handler::Failure;

/// One delivery out of [`Deliveries`](crate::Deliveries): [`settle`](Self::settle) it, or say that it
/// [failed](Self::fail). The next one comes after that.
///
/// Dropped without a word it is a failed attempt: the failure policy decides, and by default it comes again.
#[must_use = "dropped, it is a failed attempt"]
pub struct Pulled {
    delivery: Delivery,
    answer: Option<oneshot::Sender<Result<(), Failure>>>,
}

impl Pulled {
    pub(crate) fn new(delivery: Delivery) -> (Self, oneshot::Receiver<Result<(), Failure>>) {
        let (answer, answered) = oneshot::channel();
        (Self { delivery, answer: Some(answer) }, answered)
    }

    /// The delivery.
    pub fn delivery(&self) -> &Delivery {
        &self.delivery
    }

    /// It is handled: its position may be stored.
    pub fn settle(self) {
        self.answer(Ok(()));
    }

    /// The attempt failed: what follows is the failure policy's to say, or the verdict's, when this is a [`Failure`] with
    /// one.
    pub fn fail(self, failure: impl Into<Failure>) {
        self.answer(Err(failure.into()));
    }

    fn answer(mut self, answer: Result<(), Failure>) {
        if let Some(sender) = self.answer.take() {
            // A run that is gone does not listen; the event comes again then.
            let _ = sender.send(answer);
        }
    }
}

impl Deref for Pulled {
    type Target = Delivery;

    fn deref(&self) -> &Delivery {
        &self.delivery
    }
}

impl fmt::Debug for Pulled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pulled").field(&self.delivery).finish()
    }
}

/// What a delivery that was dropped without a word failed by.
#[derive(Debug)]
pub(crate) struct Dropped;

impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it was dropped without having been settled")
    }
}

impl Error for Dropped {}
