//! The user's handler as the run sees it: boxed, with panics caught and a factory for fresh ones.

use std::any::Any;
use std::panic::AssertUnwindSafe;

use futures::FutureExt;

use crate::delivery::Delivery;
use crate::handler::Handler;
use crate::storage::BoxFuture;

/// Handles deliveries. It never panics: a panic of the user's code is a failure.
pub(crate) trait Work: Send + 'static {
    /// One attempt; the error is what went wrong.
    fn work<'a>(&'a mut self, delivery: &'a Delivery) -> BoxFuture<'a, Result<(), String>>;
    /// Begins anew after a call that was dropped in the middle: with a fresh handler, if there is a factory.
    fn renew(&mut self);
}

type Factory<H> = Box<dyn FnMut() -> H + Send>;

/// A [`Handler`] as work.
pub(crate) struct HandlerWork<H> {
    handler: H,
    factory: Option<Factory<H>>,
}

impl<H: Handler + 'static> HandlerWork<H> {
    pub(crate) fn of(handler: H) -> Self {
        Self { handler, factory: None }
    }

    pub(crate) fn made_by(mut factory: impl FnMut() -> H + Send + 'static) -> Self {
        Self { handler: factory(), factory: Some(Box::new(factory)) }
    }
}

impl<H: Handler + 'static> Work for HandlerWork<H> {
    fn work<'a>(&'a mut self, delivery: &'a Delivery) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            let handler = &mut self.handler;
            // The call itself can panic, not only its future.
            let call = AssertUnwindSafe(async move { handler.handle(delivery.clone()).await });
            match call.catch_unwind().await {
                Ok(done) => done.map_err(|failure| failure.to_string()),
                Err(panic) => {
                    self.renew();
                    Err(format!("the handler panicked: {}", panic_message(&*panic)))
                }
            }
        })
    }

    fn renew(&mut self) {
        if let Some(factory) = &mut self.factory {
            // A factory that panics leaves the old handler at work; its panic is reported by the panic hook.
            if let Ok(fresh) = std::panic::catch_unwind(AssertUnwindSafe(factory)) {
                self.handler = fresh;
            }
        }
    }
}

/// The text of a panic, as far as it has one.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
