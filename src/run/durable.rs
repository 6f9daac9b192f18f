//! The life of a run: what its handle asks, and how it pauses, stalls and stops. It ends when it is told to, when it is
//! no longer the owner, when the feed ends, or when nobody holds its handle any more.

mod skip;

use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tracing::{error, warn};

use crate::checkpoint::Checkpoint;
use crate::error::{StorageError, SubscriptionError};
use crate::ids::{Ownership, SubscriptionId};
use crate::model::SubscriptionModel;
use crate::reason::Reason;
use crate::run::anew::Renewal;
use crate::run::barrier::Anew;
use crate::run::core::{Core, Turn};
use crate::run::deliver::{Deliver, Ended};
use crate::run::saver::{Lost, Saver};
use crate::run::skip::Skip;
use crate::run::watchdog::still_own;
use crate::status::{Phase, State};
use crate::storage::CheckpointStorage;

/// The last save of a pause or shutdown gets what is left of the grace, and at least this. So long, too, may the
/// record's deletion by a cancel and the look at it by a resume take.
pub(crate) const LAST_SAVE: Duration = Duration::from_secs(10);

pub(crate) type Reply<T> = oneshot::Sender<Result<T, SubscriptionError>>;

/// What a handle can ask of its run.
pub(crate) enum Command {
    Pause(Reply<()>),
    Resume(Reply<()>),
    Shutdown(Reply<Option<Checkpoint>>),
    Cancel(Reply<()>),
    Drained(Reply<Option<Checkpoint>>),
    CaughtUp(Reply<()>),
    Skip(Skip, Reply<()>),
}

/// A run's own task.
pub(crate) struct Run<M: SubscriptionModel, S> {
    pub(crate) id: SubscriptionId,
    pub(crate) ownership: Ownership,
    model: M,
    pub(crate) storage: S,
    pub(crate) grace: Duration,
    pub(crate) core: Core<M, S>,
    pub(crate) renewal: Renewal,
    commands: mpsc::UnboundedReceiver<Command>,
}

/// Where a winding down leads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Goal {
    Pause,
    Stall(Reason),
    Stop(Reason),
    Cancel,
}

impl<M: SubscriptionModel, S: CheckpointStorage> Run<M, S> {
    pub(crate) fn new(
        deliver: Deliver<M>,
        storage: S,
        saver: Saver<S>,
        commands: mpsc::UnboundedReceiver<Command>,
    ) -> Self {
        Self {
            id: deliver.id.clone(),
            ownership: deliver.ownership.clone(),
            model: deliver.opening.model.clone(),
            storage: storage.clone(),
            grace: deliver.settings.shutdown_grace,
            renewal: Renewal::new(deliver.desk.view().safe, saver.stored().cloned()),
            core: Core::new(deliver, storage, saver),
            commands,
        }
    }

    /// Delivers from an open reader until the end of the run.
    pub(crate) async fn run(mut self, reader: M::Reader) {
        self.core.set_to_work(Some(reader));
        loop {
            tokio::select! {
                biased;
                command = self.commands.recv() => match command {
                    None => return self.let_go(),
                    Some(command) => if self.obey(command).await { return },
                },
                () = Self::anew_due(self.renewal.at) => {
                    let goal = self.begin_anew().await;
                    if let Some(goal) = goal && let Some(reason) = self.reach(goal).await { return self.end(&reason) }
                }
                turn = self.core.step() => {
                    let goal = match turn {
                        Turn::Nothing | Turn::Delivered(Ended::Asked) => continue,
                        Turn::Delivered(Ended::Anew) => match self.plan_anew() {
                            Some(goal) => goal,
                            None => continue,
                        },
                        Turn::Delivered(Ended::Stalled(reason)) => Goal::Stall(reason),
                        Turn::Delivered(Ended::Stopped(reason)) => self.stopped(reason),
                        Turn::Lost(lost) => self.lost(lost, None),
                    };
                    if let Some(reason) = self.reach(goal).await { return self.end(&reason) }
                }
            }
        }
    }

    /// Does what the handle asks. Answers whether the run has ended by it.
    async fn obey(&mut self, command: Command) -> bool {
        let stalled = match self.core.board.snapshot().state {
            State::Stalled(reason) => Some(self.ended(reason)),
            _ => None,
        };
        match (command, stalled) {
            (Command::Pause(reply) | Command::CaughtUp(reply), Some(error)) => self.answer(None, reply, Err(error)),
            (Command::Pause(reply), None) => {
                let ended = self.reach(Goal::Pause).await;
                let paused = self.verdict(ended.as_ref()).map(|_| ());
                self.answer(ended.as_ref(), reply, paused)
            }
            (Command::Resume(reply), _) => self.resume(reply).await,
            (Command::Skip(skip, reply), _) => self.skip(skip, reply).await,
            (Command::Shutdown(reply), _) => {
                let ended = self.reach(Goal::Stop(Reason::Requested)).await;
                let saved = self.verdict(ended.as_ref());
                self.answer(ended.as_ref(), reply, saved)
            }
            (Command::Cancel(reply), _) => {
                let ended = self.reach(Goal::Cancel).await;
                let deleted = match &ended {
                    Some(Reason::Requested) => self.delete().await,
                    _ => self.verdict(ended.as_ref()).map(|_| ()),
                };
                self.answer(ended.as_ref(), reply, deleted)
            }
            (Command::Drained(reply), Some(error)) => self.answer(None, reply, Err(error)),
            (Command::Drained(reply), None) => {
                let view = self.core.desk.view();
                // What was read ahead of a pause was given up, and is not waited for.
                let at_rest = self.core.delivering.is_none() && view.all_settled;
                let target = if at_rest { view.safe.map_or(0, |safe| safe.seq) } else { view.last_read };
                self.core.waiters.drained(target, reply);
                false
            }
            (Command::CaughtUp(reply), None) => {
                self.core.ask_head(self.model.clone(), reply);
                false
            }
        }
    }

    /// Ends the run, if it is to end, and answers behind that: who is answered finds the id free. Answers whether the
    /// run has ended.
    fn answer<T>(&mut self, ended: Option<&Reason>, reply: Reply<T>, answer: Result<T, SubscriptionError>) -> bool {
        if let Some(reason) = ended {
            self.end(reason);
        }
        // Who asked may have gone; then nobody needs the answer.
        let _ = reply.send(answer);
        ended.is_some()
    }

    /// Reads on from the last settled position, if the record is still the run's own.
    async fn resume(&mut self, reply: Reply<()>) -> bool {
        if self.core.is_open() {
            return self.answer(None, reply, Ok(()));
        }
        if self.core.delivering.is_some() {
            self.core.waiters.resumed(reply);
            return false;
        }
        let read = tokio::time::timeout(LAST_SAVE, self.storage.read(&self.id)).await;
        let record = match read.unwrap_or_else(|_| Err(no_answer())) {
            Ok(record) => record,
            Err(source) => {
                let error = SubscriptionError::Storage { id: self.id.clone(), source };
                return self.answer(None, reply, Err(error));
            }
        };
        if let Some(reason) = still_own(record.as_ref(), &self.ownership) {
            self.core.saver.freeze();
            self.say_alive(&reason);
            let ended = self.reach(Goal::Stop(reason.clone())).await;
            let error = self.ended(reason);
            return self.answer(ended.as_ref(), reply, Err(error));
        }
        self.core.board.set(|conditions| conditions.phase = Phase::Starting);
        self.core.waiters.resumed(reply);
        let goal = self.set_off().await;
        self.ends_at(goal).await
    }

    /// Sets the delivering that rests to work, with a fresh handler if it has lost its own. Answers where the run is to go
    /// when it cannot.
    async fn set_off(&mut self) -> Option<Goal> {
        let has_lost_its_handler = self.core.at_rest.as_ref().is_some_and(|deliver| deliver.anew.is_some());
        if has_lost_its_handler {
            return match self.plan_anew() {
                None => self.begin_anew().await,
                goal => goal,
            };
        }
        self.core.saver.thaw();
        self.core.set_to_work(None);
        None
    }

    /// Brings the run to a goal, if there is one. Answers whether it has ended by it.
    async fn ends_at(&mut self, goal: Option<Goal>) -> bool {
        let Some(goal) = goal else { return false };
        let ended = self.reach(goal).await;
        if let Some(reason) = &ended {
            self.end(reason);
        }
        ended.is_some()
    }

    /// Brings the run to rest and to its goal. Answers the reason when the run ends there.
    async fn reach(&mut self, goal: Goal) -> Option<Reason> {
        if let Goal::Stall(reason) = &goal {
            // At once: the last save may take its time, and what waits for movement would wait in vain.
            self.core.board.set(|conditions| conditions.phase = Phase::Stalled(reason.clone()));
            self.core.end_waiting(reason);
        }
        let grace_ends = Instant::now() + self.grace;
        self.renewal.at = None;
        let goal = self.stop_delivering(goal, grace_ends).await;
        let goal = self.wind_up(goal, grace_ends).await;
        let goal = self.last_save(goal, grace_ends).await;
        match goal {
            Goal::Pause => {
                self.core.board.set(|conditions| conditions.phase = Phase::Paused);
                None
            }
            Goal::Stall(reason) => {
                self.core.end_waiting(&reason);
                self.core.board.set(|conditions| conditions.phase = Phase::Stalled(reason));
                None
            }
            Goal::Stop(reason) => Some(reason),
            Goal::Cancel => Some(Reason::Requested),
        }
    }

    /// Whoever took the id over may have counted this run as one that died. It is of no use to insist.
    pub(crate) fn say_alive(&self, lost: &Reason) {
        if let Reason::Superseded { .. } = lost {
            let (storage, id, ownership) = (self.storage.clone(), self.id.clone(), self.ownership.clone());
            tokio::spawn(async move { drop(storage.not_dead(&id, &ownership).await) });
        }
    }

    /// The delivering has stopped: at the end of its feed, or because its work found the record lost.
    pub(crate) fn stopped(&mut self, reason: Reason) -> Goal {
        match reason {
            Reason::Superseded { .. } | Reason::Deleted => self.lost(Lost::Stop(reason), None),
            reason => Goal::Stop(reason),
        }
    }

    /// Nothing more can be saved. Who asked for the end gets it all the same, and is told what is not stored.
    pub(crate) fn lost(&mut self, lost: Lost, goal: Option<Goal>) -> Goal {
        self.core.saver.freeze();
        if let Lost::Stop(reason) = &lost {
            self.say_alive(reason);
        }
        match (lost, goal) {
            (Lost::Stop(reason), _) => Goal::Stop(reason),
            (Lost::Stall(_), Some(goal @ (Goal::Stop(Reason::Requested) | Goal::Cancel))) => goal,
            (Lost::Stall(reason), _) => Goal::Stall(reason),
        }
    }

    /// Deletes the record, if it is still the run's own.
    async fn delete(&mut self) -> Result<(), SubscriptionError> {
        let id = self.id.clone();
        let storage = |source| SubscriptionError::Storage { id: id.clone(), source };
        let in_time = |result| tokio::time::timeout(LAST_SAVE, result);
        let deleted = in_time(self.storage.delete(&self.id, Some(&self.ownership))).await;
        if deleted.unwrap_or_else(|_| Err(no_answer())).map_err(storage)? {
            return Ok(());
        }
        let record = tokio::time::timeout(LAST_SAVE, self.storage.read(&self.id)).await;
        let record = record.unwrap_or_else(|_| Err(no_answer())).map_err(storage)?;
        match still_own(record.as_ref(), &self.ownership) {
            None | Some(Reason::Deleted) => Ok(()),
            Some(reason) => Err(self.ended(reason)),
        }
    }

    /// What a pause or shutdown answers: the stored checkpoint, or why it is not what it should be.
    fn verdict(&self, ended: Option<&Reason>) -> Result<Option<Checkpoint>, SubscriptionError> {
        match (ended, self.core.board.snapshot().state) {
            (Some(reason), _) if *reason != Reason::Requested => return Err(self.ended(reason.clone())),
            (None, State::Stalled(reason)) => return Err(self.ended(reason)),
            _ => {}
        }
        if let Some(Anew { position, error, .. }) = self.core.at_rest.as_ref().and_then(|deliver| deliver.anew.as_ref())
        {
            // Handled, and not to be stored: it comes again.
            let (position, error) = (position.clone(), error.clone());
            let last = Reason::HandlerFailed { position: position.clone(), attempts: 1, error };
            return Err(SubscriptionError::NotSaved { id: self.id.clone(), position, last });
        }
        let view = self.core.desk.view();
        match self.core.saver.outstanding(&view) {
            Some(mark) => {
                let last = self.core.saver.last_error().cloned().unwrap_or_else(|| no_answer().reason());
                let error = SubscriptionError::NotSaved { id: self.id.clone(), position: mark.position.clone(), last };
                Err(error)
            }
            None => Ok(self.core.saver.stored().map(|mark| mark.position.clone())),
        }
    }

    fn ended(&self, reason: Reason) -> SubscriptionError {
        SubscriptionError::Ended { id: self.id.clone(), reason }
    }

    /// The end: whoever still asks is answered with the reason.
    fn end(&mut self, reason: &Reason) {
        let view = self.core.desk.view();
        if let Some(mark) = self.core.saver.outstanding(&view).filter(|_| !self.core.saver.is_frozen()) {
            let (id, position) = (&self.id, &mark.position);
            error!(subscription = %id, %position, "subscription {id} ends without having stored {position}; what lies behind the stored checkpoint comes again");
        }
        self.core.end_waiting(reason);
        self.core.board.set(|conditions| conditions.phase = Phase::Stopped(reason.clone()));
        // Dropping the commands that are left makes their handles read the reason from the status.
        self.commands.close();
    }

    /// Every handle was dropped without a shutdown.
    fn let_go(mut self) {
        let id = &self.id;
        warn!(
            subscription = %id,
            "subscription {id} was dropped while it ran: it stops reading, and an event in hand comes again; call shutdown() first"
        );
        self.core.signals.stop.cancel();
        self.core.signals.abandon.cancel();
        if let Some(task) = &self.core.delivering {
            task.abort();
        }
        self.end(&Reason::Requested);
    }
}

pub(crate) fn no_answer() -> StorageError {
    StorageError::Unavailable { message: format!("no answer within {} s", LAST_SAVE.as_secs()) }
}
