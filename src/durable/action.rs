//! The action that starts a subscription: its own settings, and the parts of a run put together once it is awaited.

use std::fmt;
use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use super::Inner;
use super::setters::option_setters;
use crate::batch_handler::BatchLimits;
use crate::checkpoint::Checkpoint;
use crate::dead_letter::DeadLetterStorage;
use crate::delivery::Delivery;
use crate::error::SubscribeError;
use crate::filter::Filter;
use crate::hold::Hold;
use crate::ids::{Owner, SubscriptionId};
use crate::metrics;
use crate::model::{Plan, SubscriptionModel};
use crate::on_failure::OnFailure;
use crate::run::barrier;
use crate::run::careful::Careful;
use crate::run::changes::{OnHistoryLost, OnInvalidate};
use crate::run::deliver::{Deliver, Signals};
use crate::run::desk::Desk;
use crate::run::durable::Run;
use crate::run::failing::Trouble;
use crate::run::maybe_seen::MaybeSeen;
use crate::run::open::Opening;
use crate::run::policy::{SaveMode, SavePolicy};
use crate::run::saver::Saver;
use crate::run::settings::{Options, Settings};
use crate::run::start::{InTheWay, Started, Starting};
use crate::run::window;
use crate::run::work::Work;
use crate::start::StartAt;
use crate::status::{Board, Status};
use crate::storage::{BoxFuture, CheckpointStorage, Record, Save};
use crate::subscription::Subscription;

/// Made when the subscription has started.
pub(super) type MakeWork = Box<dyn FnOnce(&Settings, &Arc<Board>) -> Box<dyn Work> + Send>;

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
pub struct Subscribe<M, S, O = Subscription> {
    pub(super) inner: Arc<Inner<M, S>>,
    pub(super) options: Options,
    pub(super) id: String,
    pub(super) limits: BatchLimits,
    pub(super) work: MakeWork,
    pub(super) filter: Filter,
    pub(super) start_at: StartAt,
    pub(super) held: bool,
    /// What is made of the subscription once it runs.
    pub(super) finish: Box<dyn FnOnce(Subscription) -> O + Send>,
    /// Positions are stored in transactions with the handler's effects.
    pub(super) transactional: bool,
}

impl<M, S, O> Subscribe<M, S, O> {
    option_setters!();

    /// Stores only what the handler has declared durable ([`Hold`](crate::Hold)), never what was merely handled. Default:
    /// what was handled is stored.
    ///
    /// After a kill everything behind the last declaration comes again. What is never declared is never stored.
    pub fn hold(mut self) -> Self {
        self.held = true;
        self
    }

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

impl<M, S> Subscribe<M, S> {
    /// The same with another answer.
    pub(super) fn into_other<O>(self, finish: Box<dyn FnOnce(Subscription) -> O + Send>) -> Subscribe<M, S, O> {
        let Self { inner, options, id, limits, work, filter, start_at, held, transactional, finish: _ } = self;
        Subscribe { inner, options, id, limits, work, filter, start_at, held, finish, transactional }
    }
}

impl<M, S, O> fmt::Debug for Subscribe<M, S, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscribe").field("id", &self.id).field("options", &self.options).finish_non_exhaustive()
    }
}

impl<M: SubscriptionModel, S: CheckpointStorage, O: 'static> IntoFuture for Subscribe<M, S, O> {
    type Output = Result<O, SubscribeError>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.start())
    }
}

impl<M: SubscriptionModel, S: CheckpointStorage, O> Subscribe<M, S, O> {
    async fn start(self) -> Result<O, SubscribeError> {
        let id = SubscriptionId::new(self.id)
            .map_err(|error| SubscribeError::Config { field: "id", message: error.to_string() })?;
        let settings = self.options.settings()?;
        if self.limits.max == 0 {
            let message = "0 events are no batch; 1 hands them out one by one".to_owned();
            return Err(SubscribeError::Config { field: "max", message });
        }
        if self.transactional {
            settings.fit_for_transactions(self.held)?;
        }
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
            transactional: self.transactional,
        };
        let started = starting.run().await?;

        let Started { reader, plan, ownership, epoch, from, stored, pipeline, source, repeats_until, gaps, has_gap } =
            started;
        let mut status = Status::new(id.clone(), ownership.fence);
        status.position.clone_from(&from);
        status.saved = stored.as_ref().and_then(|record| record.position.clone());
        status.saved_at = stored.as_ref().and_then(|record| record.saved_at);
        (status.gaps, status.gaps_recorded) = (gaps, u64::from(has_gap));
        let board = Arc::new(Board::new(status));
        let quiet_interval = settings.quiet_interval;
        let template = Save {
            pipeline: Some(pipeline.clone()),
            source: Some(source.clone()),
            ..Save::new(id.clone(), ownership.clone(), epoch, from.clone().unwrap_or(Checkpoint::Text("".into())))
        };
        let restarted = stored.as_ref().is_some_and(Record::is_at_gap).then_some(0);
        let careful = stored.as_ref().and_then(Careful::behind);
        let recorded = stored.is_some();
        let saver =
            Saver::new(self.inner.storage.clone(), template, settings.save_mode, settings.quiet_interval, stored);
        let desk = Desk::new(ownership.fence, from.clone(), settings.save.clone(), settings.quiet_interval.is_some());
        let desk = Arc::new(desk);
        let mut work = (self.work)(&settings, &board);
        if self.held {
            desk.hold();
        }
        let has_barrier = work.buffers();
        if has_barrier {
            desk.put_up_barrier();
        }
        let hold = Hold { positions: desk.clone() };
        if let Err(reason) = barrier::tell_first(&mut *work, from, hold.clone()).await {
            return Err(SubscribeError::Refused { id, reason });
        }
        let deliver = Deliver {
            opening: Opening { id: id.clone(), model: self.inner.model.clone(), plan },
            id: id.clone(),
            ownership,
            epoch,
            desk,
            board: board.clone(),
            work,
            barrier: has_barrier,
            told: true,
            careful,
            anew: None,
            maybe_seen: MaybeSeen::up_to(repeats_until),
            pipeline,
            recorded,
            source,
            restarted,
            taken: None,
            counted: None,
            handed_out: None,
            trouble: Trouble::default(),
            signals: Signals::default(),
            opened: None,
            settings,
        };
        if let Some(interval) = quiet_interval {
            window::look_beside(&board, id.clone(), self.inner.model.clone(), interval);
        }
        let (commands, receiver) = mpsc::unbounded_channel();
        let subscription = Subscription::new(id, commands, &board, hold);
        tokio::spawn(board.clone().publish());
        tokio::spawn(metrics::publish(board.subscribe()));
        let run = Run::new(deliver, self.inner.storage.clone(), saver, receiver).run(reader);
        tokio::spawn(board.handover.clone().beside_handlers(Box::pin(run)));
        reserved.keep(subscription.clone());
        Ok((self.finish)(subscription))
    }
}
