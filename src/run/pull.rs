//! Deliveries pulled out of a stream as work: the call ends when the taker has answered. Made by `durable`, like every work.

use std::sync::Arc;

use tokio::sync::{Notify, mpsc};

use crate::batch_handler::BatchLimits;
use crate::delivery::Delivery;
use crate::pulled::{Dropped, Pulled};
use crate::run::deliver::Ended;
use crate::run::work::{Done, Work};
use crate::storage::BoxFuture;

/// Hands each delivery to whoever polls the stream, one at a time.
pub(crate) struct PullWork {
    deliveries: mpsc::Sender<Pulled>,
    /// Told when somebody waits for a delivery: before that it is in nobody's hand, and a pause need not wait for it.
    demand: Arc<Notify>,
}

impl PullWork {
    pub(crate) fn new(deliveries: mpsc::Sender<Pulled>, demand: Arc<Notify>) -> Self {
        Self { deliveries, demand }
    }
}

impl Work for PullWork {
    fn limits(&self) -> BatchLimits {
        BatchLimits::new(1)
    }

    fn work<'a>(&'a mut self, batch: &'a [Delivery]) -> BoxFuture<'a, Done> {
        Box::pin(async move {
            tokio::select! {
                biased;
                () = batch[0].cancelled() => return Done::ended(Ended::Asked),
                () = self.deliveries.closed() => return Done::ended(Ended::Asked),
                () = self.demand.notified() => {}
            }
            let (pulled, answered) = Pulled::new(batch[0].clone());
            if self.deliveries.send(pulled).await.is_err() {
                return Done::ended(Ended::Asked);
            }
            tokio::select! {
                biased;
                answer = answered => match answer {
                    Ok(Ok(())) => Done::all(1),
                    Ok(Err(failure)) => Done::failed(0, failure),
                    // With its stream it was not refused: nobody is there any more.
                    Err(_) if self.deliveries.is_closed() => Done::ended(Ended::Asked),
                    Err(_) => Done::failed(0, Dropped),
                },
                () = self.deliveries.closed() => Done::ended(Ended::Asked),
            }
        })
    }

    fn renew(&mut self) -> bool {
        false
    }
}
