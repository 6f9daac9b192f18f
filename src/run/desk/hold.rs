//! The desk as a hold sees it: marks, what is declared durable, saves that a handler asks for. Called by whoever has the
//! hold, from any thread; it never blocks for longer than the desk does.

use std::sync::MutexGuard;

use tokio::time::Instant;

use super::{Desk, Inner};
use crate::hold::{Declared, Mark, Positions};
use crate::run::progress;

impl Inner {
    /// Under a hold, since when something handled lies behind what was declared durable. Answers whether that has begun or
    /// ended.
    pub(super) fn note_held(&mut self) -> bool {
        let before = self.held_since;
        let seq = |mark: Option<&progress::Mark>| mark.map_or(0, |mark| mark.seq);
        let is_held = self.policy.is_held() && seq(self.policy.handled()) > seq(self.policy.declared());
        self.held_since = is_held.then(|| before.unwrap_or_else(Instant::now));
        self.held_since.is_some() != before.is_some()
    }
}

impl Positions for Desk {
    fn mark(&self) -> Mark {
        let inner = self.inner();
        Mark { fence: inner.fence, place: inner.policy.handled().cloned() }
    }

    fn durable_through(&self, mark: &Mark) -> Declared {
        let mut inner = self.inner();
        if mark.fence != inner.fence {
            return Declared::Stale;
        }
        if let Some(place) = &mark.place {
            let wanted = inner.policy.durable(place);
            // It is another hold from here on, if it is one.
            inner.held_since = None;
            inner.note_held();
            self.ask(inner, wanted);
            self.news.notify_one();
        }
        Declared::Accepted
    }

    fn request_save(&self) {
        let mut inner = self.inner();
        inner.save_requested = true;
        drop(inner);
        self.news.notify_one();
    }

    fn resume_auto(&self) {
        let mut inner = self.inner();
        let wanted = inner.policy.resume_auto();
        inner.note_held();
        self.ask(inner, wanted);
        self.news.notify_one();
    }
}

impl Desk {
    /// A save is asked for, if it is `wanted`, by somebody who cannot flush.
    fn ask(&self, mut inner: MutexGuard<'_, Inner>, wanted: bool) {
        if wanted && inner.policy.has_barrier() {
            inner.save_after_flush = true;
            drop(inner);
            self.want_flush();
        } else {
            self.tell(inner, wanted);
        }
    }
}
