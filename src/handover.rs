//! A handler may block the thread it is called on. A thread of the runtime keeps two things that no other thread takes
//! from it while it is blocked: the task it has woken last, and the wait for I/O and timers, which the other threads
//! have slept behind. Both are handed over before a handler is polled, if there may be any.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What one run's tasks have to hand over.
#[derive(Debug, Default)]
pub(crate) struct Handover {
    due: AtomicBool,
}

impl Handover {
    /// Somebody was woken.
    pub(crate) fn note(&self) {
        // Only the thread that has noted it acts on it: what others note costs a handover that was not needed.
        self.due.store(true, Ordering::Relaxed);
    }

    /// A task that polls handlers. Whenever it is polled its thread may have come from the wait for I/O.
    pub(crate) async fn around_handlers<T>(self: Arc<Self>, mut task: Boxed<'_, T>) -> T {
        poll_fn(|context| {
            self.note();
            task.as_mut().poll(context)
        })
        .await
    }

    /// A task that has to go on while a handler blocks.
    pub(crate) async fn beside_handlers<T>(self: Arc<Self>, mut task: Boxed<'_, T>) -> T {
        let mut noting: Option<(Waker, Waker)> = None;
        poll_fn(|context| {
            let (_, waker) = match noting.take() {
                Some(known) if known.0.will_wake(context.waker()) => noting.insert(known),
                _ => {
                    let waker = context.waker().clone();
                    let handover = self.clone();
                    noting.insert((waker.clone(), Waker::from(Arc::new(Noting { handover, waker }))))
                }
            };
            task.as_mut().poll(&mut Context::from_waker(waker))
        })
        .await
    }

    /// A call of a handler, which may block at every poll.
    pub(crate) async fn before<T>(&self, mut call: Boxed<'_, T>) -> T {
        poll_fn(|context| {
            self.hand_over();
            call.as_mut().poll(context)
        })
        .await
    }

    fn hand_over(&self) {
        if self.due.load(Ordering::Relaxed) {
            self.due.store(false, Ordering::Relaxed);
            // The second takes the place of the last woken, the first and what was there before it go to where every
            // thread takes from, and one that sleeps is woken for them: it will wait for I/O as well.
            tokio::spawn(std::future::ready(()));
            tokio::spawn(std::future::ready(()));
        }
    }
}

/// The waker of a task, which notes that it was used.
struct Noting {
    handover: Arc<Handover>,
    waker: Waker,
}

impl Wake for Noting {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.handover.note();
        self.waker.wake_by_ref();
    }
}
