//! The front door: `DurableSubscriptions` wraps a model and a storage, and its action starts subscriptions.

use std::fmt;
use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::sync::mpsc;

use crate::checkpoint::Checkpoint;
use crate::delivery::Delivery;
use crate::error::{SubscribeError, SubscriptionError};
use crate::filter::Filter;
use crate::handler::Handler;
use crate::ids::{Owner, SubscriptionId};
use crate::metrics;
use crate::model::{Plan, SubscriptionModel};
use crate::registry::Registry;
use crate::run::deliver::{Deliver, Signals};
use crate::run::desk::Desk;
use crate::run::durable::Run;
use crate::run::maybe_seen::MaybeSeen;
use crate::run::open::Opening;
use crate::run::policy::{SaveMode, SavePolicy};
use crate::run::saver::Saver;
use crate::run::settings::Options;
use crate::run::start::{InTheWay, Started, Starting};
use crate::run::window;
use crate::run::work::{HandlerWork, Work};
use crate::start::StartAt;
use crate::status::{Board, State, Status};
use crate::storage::{BoxFuture, CheckpointStorage, Save};
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

/// The setters of [`Options`], for the wrapper's defaults and the action's overrides alike.
macro_rules! option_setters {
    () => {
        /// Stores the position after every n settled events. Default: 1. After a kill, up to n events more come again.
        /// Quiet saves, pause, shutdown and `drained` store every settled event, whatever n is.
        pub fn save_every(mut self, events: u32) -> Self {
            self.options.save = Some(SavePolicy::Every(events));
            self
        }

        /// Stores the position when the predicate says so; it is asked once for each settled event, after the
        /// handler. No write of any kind passes an event for which it said no, until it says yes for a later one: after
        /// a kill, everything since it last said yes comes again. For handlers that buffer; [the guide](crate::guide)
        /// has one.
        pub fn save_when(mut self, accepts: impl Fn(&Delivery) -> bool + Send + Sync + 'static) -> Self {
            self.options.save = Some(SavePolicy::When(Arc::new(accepts)));
            self
        }

        /// Whether the next event waits for a wanted save. Default: [`SaveMode::WriteBehind`], in which what was
        /// settled during the last write comes again after a kill.
        pub fn save_mode(mut self, mode: SaveMode) -> Self {
            self.options.save_mode = Some(mode);
            self
        }

        /// How often the position is stored when no save of an event has stored it: quiet reads, and events that
        /// `save_every` has not counted out yet. Default: 60 s. It must be well below the time the oplog reaches back,
        /// or a filter that matches nothing for long loses its place, though nothing was missed.
        pub fn save_quiet_position_every(mut self, interval: Duration) -> Self {
            self.options.quiet_interval = Some(Some(interval));
            self
        }

        /// Stores positions of events alone, also at a pause and at the end. A subscription that is quiet for longer
        /// than the oplog reaches back then ends with `HistoryLost` at its next start.
        pub fn never_save_quiet_position(mut self) -> Self {
            self.options.quiet_interval = Some(None);
            self
        }

        /// Starts though no start position can be recorded, instead of refusing with `NoStartPosition`. Default:
        /// false. The start is then taken from the opening reply; from a server that sends no time nothing is stored
        /// until the first settled event is, and what changes before that is lost if it pauses or ends before.
        pub fn start_when_no_start_position_can_be_recorded(mut self, start: bool) -> Self {
            self.options.start_when_no_start_position_can_be_recorded = Some(start);
            self
        }

        /// How long `subscribe` retries what can heal before it gives up. Default: 60 s. A start that was stored by
        /// then stays stored, and the next `subscribe` goes on from it.
        pub fn start_timeout(mut self, timeout: Duration) -> Self {
            self.options.start_timeout = Some(timeout);
            self
        }

        /// How long one call of the handler may take. Default: for ever, with a warning every minute. A call that
        /// takes longer is a failed attempt: its future is dropped in the middle and the event is tried again.
        pub fn handler_timeout(mut self, timeout: Duration) -> Self {
            self.options.handler_timeout = Some(Some(timeout));
            self
        }

        /// How long a pause or shutdown waits for the event in hand. Default: 30 s. Then its call is dropped, and the
        /// event comes again.
        pub fn shutdown_grace(mut self, grace: Duration) -> Self {
            self.options.shutdown_grace = Some(grace);
            self
        }

        /// The first and the longest wait between attempts of a failing handler; it doubles, with full jitter.
        /// Default: 100 ms and 30 s, for ever. The events behind the failing one wait as long.
        pub fn retry_backoff(mut self, first: Duration, longest: Duration) -> Self {
            self.options.retry_backoff = Some((first, longest));
            self
        }
    };
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
        self.action(id.into(), Box::new(move || Box::new(HandlerWork::of(handler))))
    }

    /// As [`subscribe`](Self::subscribe), with a fresh handler from the factory at the start, after a panic, after a
    /// timeout, and after a call that was dropped.
    ///
    /// ```
    /// # use mongosub::memory::{MemoryCheckpointStorage, MemoryModel};
    /// use mongosub::{Delivery, DurableSubscriptions, Failure, Handler};
    ///
    /// #[derive(Default)]
    /// struct Batch(Vec<Delivery>); // half filled after a panic: better begun anew
    ///
    /// impl Handler for Batch {
    ///     async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
    ///         self.0.push(delivery);
    ///         Ok(())
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), mongosub::SubscribeError> {
    /// # let subscriptions = DurableSubscriptions::new(MemoryModel::new(), MemoryCheckpointStorage::new());
    /// let subscription = subscriptions.subscribe_with("search_index_v3", Batch::default).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn subscribe_with<H: Handler + 'static>(
        &self,
        id: impl Into<String>,
        factory: impl FnMut() -> H + Send + 'static,
    ) -> Subscribe<M, S> {
        self.action(id.into(), Box::new(move || Box::new(HandlerWork::made_by(factory))))
    }

    fn action(&self, id: String, work: MakeWork) -> Subscribe<M, S> {
        Subscribe {
            inner: self.inner.clone(),
            options: self.options.clone(),
            id,
            work,
            filter: Filter::default(),
            start_at: StartAt::default(),
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

type MakeWork = Box<dyn FnOnce() -> Box<dyn Work> + Send>;

/// A subscription to be: setters, then `.await`.
///
/// It returns when the cursor is open, the start recorded and the id claimed: every change sent after that is
/// delivered. Another process that runs the id is superseded by it.
///
/// # Errors
/// [`SubscribeError`]: what cannot heal at once, what can after `start_timeout`. Nothing is registered then, and the id
/// is free. A cursor that cannot be opened leaves the record and its owner untouched.
///
/// # Cancel safety
/// Dropped, nothing is registered and the id is free; a claim or a start that was stored already stays stored, and the
/// next `subscribe` goes on from it.
#[must_use = "it starts when it is awaited"]
pub struct Subscribe<M, S> {
    inner: Arc<Inner<M, S>>,
    options: Options,
    id: String,
    work: MakeWork,
    filter: Filter,
    start_at: StartAt,
}

impl<M, S> Subscribe<M, S> {
    option_setters!();

    /// Which events to read. Default: every one. An `invalidate` always gets through.
    ///
    /// What it leaves out is passed over for good: a wider filter later has no history before the stored position, and
    /// the start warns of that.
    pub fn filter(mut self, filter: Filter) -> Self {
        self.filter = filter;
        self
    }

    /// Where to start. Default: at the stored checkpoint, or at the present for a new subscription. Whoever starts
    /// elsewhere by [`StartAt::Always`] accepts the gap, or the repeats, in between.
    pub fn start_at(mut self, start_at: StartAt) -> Self {
        self.start_at = start_at;
        self
    }
}

impl<M, S> fmt::Debug for Subscribe<M, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscribe").field("id", &self.id).field("options", &self.options).finish_non_exhaustive()
    }
}

impl<M: SubscriptionModel, S: CheckpointStorage> IntoFuture for Subscribe<M, S> {
    type Output = Result<Subscription, SubscribeError>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.start())
    }
}

impl<M: SubscriptionModel, S: CheckpointStorage> Subscribe<M, S> {
    async fn start(self) -> Result<Subscription, SubscribeError> {
        let id = SubscriptionId::new(self.id)
            .map_err(|error| SubscribeError::Config { field: "id", message: error.to_string() })?;
        let settings = self.options.settings()?;
        for warning in settings.warnings() {
            tracing::warn!(subscription = %id, "subscription {id}: {warning}");
        }
        let reserved = self.inner.registry.reserve(&id)?;
        let described = self.options.describe(&settings);
        let starting = Starting {
            id: &id,
            model: &self.inner.model,
            storage: &self.inner.storage,
            plan: Plan::new(self.filter),
            start_at: &self.start_at,
            settings: &settings,
            described: &described,
            owner: Owner::fresh(),
            in_the_way: InTheWay::default(),
        };
        let started = starting.run().await?;

        let Started { reader, plan, ownership, epoch, from, stored, pipeline, source, repeats_until } = started;
        let mut status = Status::new(id.clone(), ownership.fence);
        status.position.clone_from(&from);
        status.saved = stored.as_ref().and_then(|record| record.position.clone());
        status.saved_at = stored.as_ref().and_then(|record| record.saved_at);
        let board = Arc::new(Board::new(status));
        let quiet_interval = settings.quiet_interval;
        let template = Save {
            pipeline: Some(pipeline),
            source: Some(source),
            ..Save::new(id.clone(), ownership.clone(), epoch, from.clone().unwrap_or(Checkpoint::Text("".into())))
        };
        let saver =
            Saver::new(self.inner.storage.clone(), template, settings.save_mode, settings.quiet_interval, stored);
        let deliver = Deliver {
            opening: Opening { id: id.clone(), model: self.inner.model.clone(), plan },
            id: id.clone(),
            ownership,
            desk: Arc::new(Desk::new(from, settings.save.clone(), settings.quiet_interval.is_some())),
            board: board.clone(),
            work: (self.work)(),
            maybe_seen: MaybeSeen::up_to(repeats_until),
            taken: None,
            counted: None,
            handed_out: None,
            yielded: None,
            signals: Signals::default(),
            opened: None,
            settings,
        };
        if let Some(interval) = quiet_interval {
            let look = window::warn_when_short(id.clone(), self.inner.model.clone(), interval);
            // It ends with the run, whose handles and tasks hold the other ends of its status.
            let mut status = board.subscribe();
            tokio::spawn(async move {
                tokio::select! {
                    () = look => {}
                    _ = status.wait_for(|status| matches!(status.state, State::Stopped(_))) => {}
                }
            });
        }
        let (commands, receiver) = mpsc::unbounded_channel();
        let subscription = Subscription::new(id, commands, &board);
        tokio::spawn(board.clone().publish());
        tokio::spawn(metrics::publish(board.subscribe()));
        tokio::spawn(Run::new(deliver, self.inner.storage.clone(), saver, receiver).run(reader));
        reserved.keep(subscription.clone());
        Ok(subscription)
    }
}
