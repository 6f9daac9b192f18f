//! The user's handler as the run sees it, whatever its shape: boxed, with panics caught and a factory for fresh ones.

use std::any::Any;
use std::panic::AssertUnwindSafe;

use bson::DateTime;
use futures::FutureExt;

use crate::batch_handler::{BatchHandler, BatchLimits};
use crate::checkpoint::Checkpoint;
use crate::delivery::Delivery;
use crate::error::StorageError;
use crate::handler::{Failure, Handler};
use crate::hold::Hold;
use crate::run::deliver::Ended;
use crate::storage::{BoxFuture, Save, SaveOutcome};

/// Handles deliveries. It never panics: a panic of the user's code is a failure.
pub(crate) trait Work: Send + 'static {
    /// How many deliveries a call takes, and how long it waits for them.
    fn limits(&self) -> BatchLimits;
    /// One attempt at a batch, which is not empty.
    fn work<'a>(&'a mut self, batch: &'a [Delivery]) -> BoxFuture<'a, Done>;
    /// Begins anew after a call that was dropped in the middle: with a fresh handler, if there is a factory. Answers
    /// whether it is a fresh one.
    fn renew(&mut self) -> bool;

    /// Whether what was handled is safe only once it is flushed.
    fn buffers(&self) -> bool {
        false
    }
    /// Before the first delivery of a handler: where the run stands.
    fn claimed(&mut self, _from: Option<Checkpoint>, _hold: Hold) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }
    /// Makes everything up to a position durable. Only what buffers is asked.
    fn flush(&mut self, through: Checkpoint) -> BoxFuture<'_, Result<Checkpoint, String>> {
        Box::pin(async { Ok(through) })
    }
    /// Whether it stores the positions of what it settles by itself, and whatever else is stored while it is at work.
    fn stores(&self) -> bool {
        false
    }
    /// What goes with the positions it stores from now on. Only what stores is told.
    fn bind(&mut self, _template: Save) {}
    /// Stores a position that lies behind events it did not settle. Only what stores is asked.
    fn store(&mut self, _save: Save) -> BoxFuture<'_, Result<SaveOutcome, StorageError>> {
        Box::pin(async { Ok(SaveOutcome::NotAhead) })
    }
    /// The run ends. Only what buffers is asked.
    fn released(&mut self, through: Checkpoint) -> BoxFuture<'_, Result<Checkpoint, String>> {
        Box::pin(async { Ok(through) })
    }
}

/// How far an attempt came.
#[derive(Debug)]
pub(crate) struct Done {
    /// So many deliveries from the front are handled.
    pub(crate) settled: usize,
    /// What went wrong with the one behind them, and what is to follow.
    pub(crate) failed: Option<Failure>,
    /// A fresh handler goes on.
    pub(crate) renewed: bool,
    /// The position of the last one settled is stored.
    pub(crate) stored: Option<Stored>,
    /// It is not the handler that failed, and nothing more can be done.
    pub(crate) ended: Option<Box<Ended>>,
}

/// A position that was stored by whoever settled it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored {
    /// When, on the storage's clock; none when it had been stored before.
    pub(crate) at: Option<DateTime>,
}

impl Done {
    pub(crate) fn all(settled: usize) -> Self {
        Self { settled, failed: None, renewed: false, stored: None, ended: None }
    }

    pub(crate) fn ended(ended: Ended) -> Self {
        Self { ended: Some(Box::new(ended)), ..Self::all(0) }
    }

    pub(crate) fn failed(settled: usize, why: impl Into<Failure>) -> Self {
        Self { failed: Some(why.into()), ..Self::all(settled) }
    }
}

type Factory<H> = Box<dyn FnMut() -> H + Send>;

/// A handler and where fresh ones come from.
struct Source<H> {
    handler: H,
    factory: Option<Factory<H>>,
}

impl<H> Source<H> {
    fn renew(&mut self) -> bool {
        let Some(factory) = &mut self.factory else { return false };
        // A factory that panics leaves the old handler at work; its panic is reported by the panic hook.
        let Ok(fresh) = std::panic::catch_unwind(AssertUnwindSafe(factory)) else { return false };
        self.handler = fresh;
        true
    }

    /// What a caught panic of its handler comes to.
    fn panicked(&mut self, panic: &(dyn Any + Send)) -> Done {
        Done { renewed: self.renew(), ..Done::failed(0, panicked(panic)) }
    }
}

pub(crate) fn panicked(panic: &(dyn Any + Send)) -> String {
    format!("the handler panicked: {}", panic_message(panic))
}

/// A call of the user's code beside deliveries, with its panic caught.
async fn asked<T>(call: impl Future<Output = Result<T, Failure>>) -> Result<T, String> {
    match AssertUnwindSafe(call).catch_unwind().await {
        Ok(answer) => answer.map_err(|failure| failure.to_string()),
        Err(panic) => Err(panicked(&*panic)),
    }
}

/// A [`Handler`] as work: one delivery a call.
pub(crate) struct HandlerWork<H>(Source<H>);

impl<H: Handler + 'static> HandlerWork<H> {
    pub(crate) fn of(handler: H) -> Self {
        Self(Source { handler, factory: None })
    }

    pub(crate) fn made_by(mut factory: impl FnMut() -> H + Send + 'static) -> Self {
        Self(Source { handler: factory(), factory: Some(Box::new(factory)) })
    }
}

impl<H: Handler + 'static> Work for HandlerWork<H> {
    fn limits(&self) -> BatchLimits {
        BatchLimits::new(1)
    }

    fn work<'a>(&'a mut self, batch: &'a [Delivery]) -> BoxFuture<'a, Done> {
        Box::pin(async move {
            let handler = &mut self.0.handler;
            // The call itself can panic, not only its future.
            let call = AssertUnwindSafe(async move { handler.handle(batch[0].clone()).await });
            match call.catch_unwind().await {
                Ok(Ok(())) => Done::all(1),
                Ok(Err(failure)) => Done::failed(0, failure),
                Err(panic) => self.0.panicked(&*panic),
            }
        })
    }

    fn renew(&mut self) -> bool {
        self.0.renew()
    }

    fn buffers(&self) -> bool {
        self.0.handler.buffers()
    }

    fn claimed(&mut self, from: Option<Checkpoint>, hold: Hold) -> BoxFuture<'_, Result<(), String>> {
        let handler = &mut self.0.handler;
        Box::pin(asked(async move { handler.claimed(from, hold).await }))
    }

    fn flush(&mut self, through: Checkpoint) -> BoxFuture<'_, Result<Checkpoint, String>> {
        let handler = &mut self.0.handler;
        Box::pin(asked(async move { handler.flush(through).await }))
    }

    fn released(&mut self, through: Checkpoint) -> BoxFuture<'_, Result<Checkpoint, String>> {
        let handler = &mut self.0.handler;
        Box::pin(asked(async move { handler.released(through).await }))
    }
}

/// A [`BatchHandler`] as work.
pub(crate) struct BatchWork<H> {
    source: Source<H>,
    limits: BatchLimits,
}

impl<H: BatchHandler + 'static> BatchWork<H> {
    pub(crate) fn new(handler: H, limits: BatchLimits) -> Self {
        Self { source: Source { handler, factory: None }, limits }
    }
}

impl<H: BatchHandler + 'static> Work for BatchWork<H> {
    fn limits(&self) -> BatchLimits {
        self.limits
    }

    fn work<'a>(&'a mut self, batch: &'a [Delivery]) -> BoxFuture<'a, Done> {
        Box::pin(async move {
            let handler = &mut self.source.handler;
            let call = AssertUnwindSafe(async move { handler.handle_batch(batch).await });
            match call.catch_unwind().await {
                Ok(Ok(())) => Done::all(batch.len()),
                Ok(Err(failure)) => Done::failed(failure.settled().min(batch.len()), failure.into_failure()),
                Err(panic) => self.source.panicked(&*panic),
            }
        })
    }

    fn renew(&mut self) -> bool {
        self.source.renew()
    }
}

/// The text of a panic, as far as it has one.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
