//! The front door: `DurableSubscriptions` wraps a model and a storage, and its action starts subscriptions.

mod action;
mod letters;
mod setters;
mod skip;
mod stream;
mod transactional;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::sync::{Notify, mpsc};

use self::action::MakeWork;
pub use self::action::Subscribe;
pub use self::letters::Retried;
use self::setters::option_setters;
pub use self::skip::SkipEvents;
pub use self::stream::Deliveries;
use crate::batch_handler::{BatchHandler, BatchLimits};
use crate::checkpoint::Checkpoint;
use crate::dead_letter::DeadLetterStorage;
use crate::delivery::Delivery;
use crate::error::SubscriptionError;
use crate::filter::Filter;
use crate::handler::Handler;
use crate::ids::SubscriptionId;
use crate::model::SubscriptionModel;
use crate::on_failure::OnFailure;
use crate::registry::Registry;
use crate::run::changes::{OnHistoryLost, OnInvalidate};
use crate::run::policy::{SaveMode, SavePolicy};
use crate::run::pull::PullWork;
use crate::run::settings::Options;
use crate::run::work::{BatchWork, HandlerWork};
use crate::start::StartAt;
use crate::storage::CheckpointStorage;
use crate::subscription::Subscription;

/// Durable subscriptions: a model that reads, a storage that keeps the checkpoints, and defaults for both.
///
/// A cheap clone; the clones share the running subscriptions. Dropping the last clone and the last
/// [`Subscription`] of a run stops it, leaves the event in hand unsettled and warns: call
/// [`shutdown_all`](Self::shutdown_all) first. What was settled and not stored by then comes again.
///
/// Every setter here sets a default, which a single [`Subscribe`] can override; a value that cannot be used is refused
/// when it is awaited.
///
/// ```
/// # use mongosub::memory::{MemoryCheckpointStorage, MemoryModel};
/// use mongosub::{Delivery, DurableSubscriptions, Filter, Operation::{Insert, Update}};
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), mongosub::SubscribeError> {
/// # let (model, storage) = (MemoryModel::new(), MemoryCheckpointStorage::new());
/// let subscriptions = DurableSubscriptions::new(model, storage)
///     .save_every(10)
///     .save_quiet_position_every(Duration::from_secs(30));
///
/// let subscription = subscriptions
///     .subscribe("search_index_v3", |delivery: Delivery| async move {
///         println!("{:?}", delivery.event);
///         Ok(())
///     })
///     .filter(Filter::operations([Insert, Update]))
///     .save_every(1)
///     .await?;
/// assert_eq!(subscriptions.running().len(), 1);
///
/// for (id, ended) in subscriptions.shutdown_all().await {
///     if let Err(error) = ended {
///         eprintln!("{id}: {error}");
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub struct DurableSubscriptions<M, S> {
    inner: Arc<Inner<M, S>>,
    options: Options,
}

struct Inner<M, S> {
    model: M,
    storage: S,
    registry: Arc<Registry>,
}

impl<M, S> Clone for DurableSubscriptions<M, S> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), options: self.options.clone() }
    }
}

impl<M, S> fmt::Debug for DurableSubscriptions<M, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DurableSubscriptions").field("options", &self.options).finish_non_exhaustive()
    }
}

impl<M, S> DurableSubscriptions<M, S> {
    option_setters!();
}

impl<M: SubscriptionModel, S: CheckpointStorage> DurableSubscriptions<M, S> {
    /// Subscriptions to what `model` reads, with their checkpoints in `storage`.
    pub fn new(model: M, storage: S) -> Self {
        let inner = Inner { model, storage, registry: Arc::default() };
        Self { inner: Arc::new(inner), options: Options::default() }
    }

    /// A subscription named `id`, handled by `handler`; `.await` starts it.
    ///
    /// The id is 1–255 bytes without `#` and control characters. A fresh one starts at the present, a known one at its
    /// stored checkpoint; what the handler may then see again is marked ([`Delivery::may_be_repeat`]).
    ///
    /// After a panic or a timeout the same handler goes on, its call dropped in the middle: if it must not, use
    /// [`subscribe_with`](Self::subscribe_with).
    pub fn subscribe<H: Handler + 'static>(&self, id: impl Into<String>, handler: H) -> Subscribe<M, S> {
        self.action(id.into(), BatchLimits::new(1), Box::new(move |_, _| Box::new(HandlerWork::of(handler))))
    }

    /// As [`subscribe`](Self::subscribe), with a fresh handler from the factory at the start, after a panic, after a
    /// timeout, and after a call that was dropped.
    ///
    /// ```
    /// # use mongosub::memory::{MemoryCheckpointStorage, MemoryModel};
    /// use mongosub::{Delivery, DurableSubscriptions, Failure, Handler};
    ///
    /// #[derive(Default)]
    /// struct Totals { paid: u64 } // half counted after a panic: better begun anew
    ///
    /// impl Handler for Totals {
    ///     async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
    ///         delivery.event.operation()?;
    ///         self.paid += 1;
    ///         Ok(())
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), mongosub::SubscribeError> {
    /// # let subscriptions = DurableSubscriptions::new(MemoryModel::new(), MemoryCheckpointStorage::new());
    /// let subscription = subscriptions.subscribe_with("search_index_v3", Totals::default).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn subscribe_with<H: Handler + 'static>(
        &self,
        id: impl Into<String>,
        factory: impl FnMut() -> H + Send + 'static,
    ) -> Subscribe<M, S> {
        self.action(id.into(), BatchLimits::new(1), Box::new(move |_, _| Box::new(HandlerWork::made_by(factory))))
    }

    /// As [`subscribe`](Self::subscribe), for a handler that works in bulk: a call gets what has been read already, up
    /// to the limits, in feed order. The save policy looks at each event of a batch; after a kill a batch in hand comes
    /// again as a whole.
    ///
    /// ```
    /// # use mongosub::memory::{self, MemoryCheckpointStorage, MemoryModel};
    /// # use mongosub::bson::{Document, doc};
    /// use mongosub::{BatchLimits, Delivery, DurableSubscriptions};
    /// use std::time::Duration;
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let model = MemoryModel::new();
    /// # let subscriptions = DurableSubscriptions::new(model.clone(), MemoryCheckpointStorage::new());
    /// let limits = BatchLimits::new(500).max_wait(Duration::from_millis(20));
    /// let subscription = subscriptions
    ///     .subscribe_batches("search_index_v3", limits, |batch: Vec<Delivery>| async move {
    ///         let documents: Result<Vec<Option<Document>>, _> =
    ///             batch.iter().map(|delivery| delivery.event.full_document()).collect();
    ///         println!("{} documents in one request", documents?.len());
    ///         Ok(())
    ///     })
    ///     .await?;
    /// # model.push(memory::insert(1, doc! {}));
    /// # subscription.caught_up().await?;
    /// # assert_eq!(subscription.status().settled, 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn subscribe_batches<B: BatchHandler + 'static>(
        &self,
        id: impl Into<String>,
        limits: BatchLimits,
        handler: B,
    ) -> Subscribe<M, S> {
        self.action(id.into(), limits, Box::new(move |_, _| Box::new(BatchWork::new(handler, limits))))
    }

    /// A subscription named `id` whose deliveries are pulled, one at a time; `.await` starts it and answers the stream.
    ///
    /// It is the same subscription in another shape: the same settings, the same failure policy, the same order. A delivery
    /// is handled when it is [settled](crate::Pulled::settle). `handler_timeout` counts from when it is there to be pulled.
    ///
    /// ```
    /// # use mongosub::memory::{self, MemoryCheckpointStorage, MemoryModel};
    /// # use mongosub::bson::doc;
    /// use futures::StreamExt;
    /// use mongosub::DurableSubscriptions;
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let model = MemoryModel::new();
    /// # let subscriptions = DurableSubscriptions::new(model.clone(), MemoryCheckpointStorage::new());
    /// let mut deliveries = subscriptions.stream("search_index_v3").await?;
    /// # model.push(memory::insert(1, doc! {}));
    /// while let Some(pulled) = deliveries.next().await {
    ///     match pulled.event.document_id::<i32>() {
    ///         Ok(_) => pulled.settle(),
    ///         Err(error) => pulled.fail(error),
    ///     }
    /// #   break;
    /// }
    /// # deliveries.subscription().shutdown().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn stream(&self, id: impl Into<String>) -> Subscribe<M, S, Deliveries> {
        let (sender, receiver) = mpsc::channel(1);
        let demand = Arc::new(Notify::new());
        let work = PullWork::new(sender, demand.clone());
        let action = self.action(id.into(), BatchLimits::new(1), Box::new(move |_, _| Box::new(work)));
        action.into_other(Box::new(move |subscription| Deliveries::new(subscription, receiver, demand)))
    }

    fn action(&self, id: String, limits: BatchLimits, work: MakeWork) -> Subscribe<M, S> {
        Subscribe {
            finish: Box::new(|subscription| subscription),
            inner: self.inner.clone(),
            options: self.options.clone(),
            id,
            limits,
            work,
            filter: Filter::default(),
            start_at: StartAt::default(),
            held: false,
            transactional: false,
        }
    }

    /// The running subscription of this id, if it runs in this `DurableSubscriptions` (paused and stalled ones do).
    pub fn get(&self, id: &str) -> Option<Subscription> {
        self.inner.registry.get(id)
    }

    /// Every subscription that runs here.
    pub fn running(&self) -> Vec<Subscription> {
        self.inner.registry.running()
    }

    /// Shuts down every subscription that runs here, all at once, and says what each answered.
    ///
    /// # Errors
    /// Each answer is that of [`Subscription::shutdown`].
    ///
    /// # Cancel safety
    /// Dropped, the shutdowns go on.
    pub async fn shutdown_all(&self) -> Vec<(SubscriptionId, Result<Option<Checkpoint>, SubscriptionError>)> {
        let each = self.running().into_iter().map(|subscription| async move {
            let answer = subscription.shutdown().await;
            (subscription.id().clone(), answer)
        });
        join_all(each).await
    }

    /// The storage, for use by hand.
    pub fn storage(&self) -> &S {
        &self.inner.storage
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.inner.model
    }
}
