//! The parts a run looks after, and one step of doing so: save, watch, take in what the delivering and the source
//! have to say. It decides nothing about the run's life; that is `durable`'s.

use std::sync::Arc;
use std::time::Duration;

use bson::DateTime;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use crate::checkpoint::Checkpoint;
use crate::error::{SourceError, SubscriptionError};
use crate::model::{SourceState, SubscriptionModel};
use crate::reason::Reason;
use crate::run::barrier::WindUp;
use crate::run::deliver::{Deliver, Ended, Signals};
use crate::run::desk::{Desk, View};
use crate::run::durable::Reply;
use crate::run::saver::{Lost, Saver};
use crate::run::waiters::Waiters;
use crate::run::watchdog::{Found, Watchdog};
use crate::status::{Board, Held, Phase};
use crate::storage::CheckpointStorage;

/// Caught up at most so far behind the head, and no longer beyond the second.
const CAUGHT_UP: Duration = Duration::from_secs(10);
const FALLEN_BEHIND: Duration = Duration::from_secs(30);
/// How often `caught_up` asks for the head of a source that does not answer.
const HEAD_AGAIN: Duration = Duration::from_millis(500);

pub(crate) struct Core<M: SubscriptionModel, S> {
    pub(crate) saver: Saver<S>,
    pub(crate) watchdog: Watchdog<M, S>,
    pub(crate) waiters: Waiters,
    pub(crate) board: Arc<Board>,
    pub(crate) desk: Arc<Desk>,
    pub(crate) signals: Signals,
    /// Its answer is boxed: it is big, and room for it is moved at each look at the handle.
    pub(crate) delivering: Option<JoinHandle<Box<Rested<M>>>>,
    /// The delivering while it rests: paused or stalled.
    pub(crate) at_rest: Option<Deliver<M>>,
    /// It rests because it will begin anew: what counts as settled now does not.
    pub(crate) renewing: bool,
    opened: mpsc::UnboundedReceiver<watch::Receiver<SourceState>>,
    source: Option<watch::Receiver<SourceState>>,
    source_state: SourceState,
    head_questions: JoinSet<(Reply<()>, Result<Checkpoint, SourceError>)>,
}

/// A delivering that has come to rest, and why.
pub(crate) type Rested<M> = (Deliver<M>, Ended);

/// What a step found.
#[derive(Debug)]
pub(crate) enum Turn {
    Nothing,
    Delivered(Ended),
    Lost(Lost),
}

impl<M: SubscriptionModel, S: CheckpointStorage> Core<M, S> {
    pub(crate) fn new(mut deliver: Deliver<M>, storage: S, saver: Saver<S>) -> Self {
        let (sender, opened) = mpsc::unbounded_channel();
        deliver.opened = Some(sender);
        let model = deliver.opening.model.clone();
        Self {
            saver,
            watchdog: Watchdog::new(deliver.id.clone(), deliver.ownership.clone(), model, storage),
            waiters: Waiters::new(deliver.id.clone()),
            board: deliver.board.clone(),
            desk: deliver.desk.clone(),
            signals: deliver.signals.clone(),
            delivering: None,
            at_rest: Some(deliver),
            renewing: false,
            opened,
            source: None,
            source_state: SourceState::default(),
            head_questions: JoinSet::new(),
        }
    }

    /// Sets the delivering that rests to work: with an open reader, or to open one behind the last settled position.
    pub(crate) fn set_to_work(&mut self, reader: Option<M::Reader>) {
        let Some(mut deliver) = self.at_rest.take() else { return };
        self.renewing = false;
        self.signals = Signals::default();
        deliver.begin_again(self.signals.clone());
        self.deliver(async move { Box::new(deliver.run(reader).await) });
    }

    /// Sets the delivering that rests to have its handler flush, and let go when the run ends.
    pub(crate) fn wind_up(&mut self, why: WindUp) {
        let Some(mut deliver) = self.at_rest.take() else { return };
        // The stop of before does not count here, the end of the grace does.
        self.signals = Signals::default();
        deliver.signals = self.signals.clone();
        self.deliver(async move { Box::new(deliver.wind_up(why).await) });
    }

    fn deliver(&mut self, task: impl Future<Output = Box<Rested<M>>> + Send + 'static) {
        self.delivering = Some(tokio::spawn(self.board.handover.clone().around_handlers(Box::pin(task))));
    }

    /// Whether there is a reader, as far as is known here.
    pub(crate) fn is_open(&self) -> bool {
        self.source.is_some() && self.delivering.is_some()
    }

    /// Whether everything that may have been handled before lies at or before the safe position.
    pub(crate) fn has_passed_what_may_repeat(&self, safe: Option<&Checkpoint>) -> bool {
        self.at_rest.as_ref().is_some_and(|deliver| deliver.maybe_seen.is_behind(safe, &self.source_state))
    }

    /// Asks for the head on behalf of a `caught_up`.
    pub(crate) fn ask_head(&mut self, model: M, reply: Reply<()>) {
        self.head_questions.spawn(async move {
            loop {
                match model.head().await {
                    Err(error) if error.is_retryable() && !reply.is_closed() => tokio::time::sleep(HEAD_AGAIN).await,
                    head => return (reply, head),
                }
            }
        });
    }

    /// Nobody is to be answered any more but with this reason.
    pub(crate) fn end_waiting(&mut self, reason: &Reason) {
        // Dropped questions drop their replies, and the handles then read the reason from the status.
        self.head_questions = JoinSet::new();
        self.waiters.end(reason);
    }

    /// Does what is due, then waits for one thing to happen and takes it in.
    ///
    /// # Cancel safety
    /// Nothing that happened is lost by dropping it.
    pub(crate) async fn step(&mut self) -> Turn {
        self.desk.watch(self.waiters.any() || self.saver.awaits_movement());
        let save_at = self.saver.send(&self.desk, &self.board);
        let view = self.desk.view();
        let look_at = self.watchdog.look(self.saver.answered(), self.delivering.is_some(), &view);
        self.show_held(&view);
        self.show_caught_up();
        let wanted = if self.renewing {
            None
        } else {
            let wanted = self.waiters.wanted(&view, self.saver.outstanding(&view));
            self.waiters.check(&view, self.saver.stored(), &self.source_state);
            wanted
        };
        if wanted.is_some_and(|wanted| self.waiters.any() && self.saver.hurry(wanted)) {
            return Turn::Nothing;
        }
        let wake = save_at.map_or(look_at, |at| at.min(look_at));
        self.happens(wake).await
    }

    async fn happens(&mut self, wake: Instant) -> Turn {
        let delivered = async {
            match &mut self.delivering {
                Some(task) => task.await,
                None => std::future::pending().await,
            }
        };
        let source = async {
            match &mut self.source {
                Some(source) => source.changed().await.is_ok(),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            outcome = self.saver.written() => match self.saver.take(outcome, &self.desk, &self.board) {
                Ok(()) => Turn::Nothing,
                Err(lost) => Turn::Lost(lost),
            },
            found = self.watchdog.found() => match found {
                Found::Head(head) => {
                    self.board.count(|status| status.head = Some(head));
                    Turn::Nothing
                }
                Found::Lost(reason) => Turn::Lost(Lost::Stop(reason)),
                Found::Nothing => Turn::Nothing,
            },
            Some(source) = self.opened.recv() => {
                // What the one before has said last.
                self.take_source_state();
                self.source = Some(source);
                self.source_state = left(&self.source_state);
                self.take_source_state();
                self.waiters.opened();
                Turn::Nothing
            }
            open = source => {
                if open {
                    self.take_source_state();
                } else {
                    self.source = None;
                    self.source_state = left(&self.source_state);
                    self.board.set(|conditions| conditions.source = None);
                }
                Turn::Nothing
            }
            delivered = delivered => {
                self.delivering = None;
                match delivered {
                    Ok(rested) => {
                        let (deliver, ended) = *rested;
                        self.at_rest = Some(deliver);
                        Turn::Delivered(ended)
                    }
                    Err(error) => Turn::Delivered(Ended::Stopped(Reason::HandlerFailed {
                        position: self.desk.safe().unwrap_or_else(|| Checkpoint::Text("".into())),
                        attempts: 1,
                        error: format!("the delivering task ended: {error}"),
                    })),
                }
            }
            Some(answer) = self.head_questions.join_next() => {
                if let Ok((reply, head)) = answer {
                    match head {
                        Ok(head) => self.waiters.caught_up(head, reply),
                        Err(source) => {
                            let id = self.board.snapshot().id;
                            // Who asked may have gone.
                            let _ = reply.send(Err(SubscriptionError::Source { id, source }));
                        }
                    }
                }
                Turn::Nothing
            }
            () = self.desk.news() => Turn::Nothing,
            () = tokio::time::sleep_until(wake) => Turn::Nothing,
        }
    }

    fn take_source_state(&mut self) {
        let Some(source) = &mut self.source else { return };
        let before = std::mem::replace(&mut self.source_state, source.borrow_and_update().clone());
        if self.source_state.end_at.is_none() {
            self.source_state.end_at.clone_from(&before.end_at);
        }
        let reason = self.source_state.reopening.as_ref().map(|reopening| reopening.reason.clone());
        self.board.set(|conditions| conditions.source = reason);
        let more = self.source_state.reconnects.saturating_sub(before.reconnects);
        if more > 0 {
            self.board.count(|status| status.reconnects += more);
        }
        let dropped = self.source_state.dropped.saturating_sub(before.dropped);
        if dropped > 0 {
            self.board.count(|status| {
                status.events += dropped;
                status.filtered += dropped;
            });
        }
    }

    fn show_held(&self, view: &View) {
        let shown = self.board.is_held();
        if shown == view.held.is_some() {
            return;
        }
        let held = view.held.as_ref().map(|held| {
            let age = i64::try_from(held.since.elapsed().as_millis()).unwrap_or(i64::MAX);
            let since = DateTime::from_millis(DateTime::now().timestamp_millis().saturating_sub(age));
            Held { since, mark: held.durable.clone() }
        });
        self.board.count(|status| status.held = held);
    }

    fn show_caught_up(&self) {
        let at_end = self.source_state.at_end;
        let lag = self.board.lag();
        self.board.set(|conditions| {
            let bound = if conditions.caught_up { FALLEN_BEHIND } else { CAUGHT_UP };
            let near = lag.is_none_or(|lag| lag <= bound);
            conditions.caught_up =
                near && (at_end || conditions.caught_up) && matches!(conditions.phase, Phase::Running);
        });
    }
}

/// What stays true of a reader that is gone: where it had reached the end.
fn left(state: &SourceState) -> SourceState {
    SourceState { end_at: state.end_at.clone(), ..SourceState::default() }
}
