//! The handle of a running subscription.

use std::fmt;
use std::sync::{Arc, Weak};

use tokio::sync::{mpsc, oneshot, watch};

use crate::checkpoint::Checkpoint;
use crate::error::SubscriptionError;
use crate::hold::Hold;
use crate::ids::SubscriptionId;
use crate::reason::Reason;
use crate::run::durable::{Command, Reply};
use crate::run::skip::Skip;
use crate::status::{Board, State, Status};

/// A running subscription. A cheap clone; dropping it changes nothing: the run belongs to the
/// [`DurableSubscriptions`](crate::DurableSubscriptions) that made it.
///
/// Every method that asks something of the run is cancel-safe: dropped, the run still does what was asked.
///
/// ```
/// # use mongosub::memory::{self, MemoryCheckpointStorage, MemoryModel};
/// # use mongosub::{Delivery, DurableSubscriptions, State, bson::doc};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let model = MemoryModel::new();
/// # let subscriptions = DurableSubscriptions::new(model.clone(), MemoryCheckpointStorage::new());
/// # let handler = |_: Delivery| async { Ok(()) };
/// let subscription = subscriptions.subscribe("search_index_v3", handler).await?;
/// subscription.pause().await?;
/// assert_eq!(subscription.status().state, State::Paused);
/// model.push(memory::insert(1, doc! {}));
/// subscription.resume().await?;
/// subscription.caught_up().await?;
/// assert_eq!(subscription.status().settled, 1);
/// subscription.cancel().await?;
/// assert!(subscription.is_stopped());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Subscription {
    inner: Arc<Inner>,
}

struct Inner {
    id: SubscriptionId,
    commands: mpsc::UnboundedSender<Command>,
    /// As it is published, and as it is while the run lasts.
    status: watch::Receiver<Status>,
    board: Weak<Board>,
    hold: Hold,
}

impl Subscription {
    pub(crate) fn new(
        id: SubscriptionId,
        commands: mpsc::UnboundedSender<Command>,
        board: &Arc<Board>,
        hold: Hold,
    ) -> Self {
        let (status, board) = (board.subscribe(), Arc::downgrade(board));
        Self { inner: Arc::new(Inner { id, commands, status, board, hold }) }
    }

    /// The subscription's id.
    pub fn id(&self) -> &SubscriptionId {
        &self.inner.id
    }

    /// How it fares now.
    pub fn status(&self) -> Status {
        let live = self.inner.board.upgrade().map(|board| board.snapshot());
        live.unwrap_or_else(|| self.inner.status.borrow().clone())
    }

    /// How it fares, on a watch channel: newer snapshots replace older ones. A change of state shows at once, figures
    /// at most 10 ms later.
    pub fn watch(&self) -> watch::Receiver<Status> {
        self.inner.status.clone()
    }

    /// The run's hold, to declare what is durable; the same one its handler has. Without
    /// [`.hold()`](crate::Subscribe::hold) declaring changes nothing.
    pub fn hold(&self) -> &Hold {
        &self.inner.hold
    }

    /// Whether it has stopped.
    pub fn is_stopped(&self) -> bool {
        matches!(self.inner.status.borrow().state, State::Stopped(_))
    }

    /// Waits until the subscription stops, and says why.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub async fn stopped(&self) -> Reason {
        self.reason_of(|state| matches!(state, State::Stopped(_))).await
    }

    /// Takes the head of the source now, and returns when the safe position has reached it: every change that was
    /// majority-committed at the call is settled then. Later writes do not delay it.
    ///
    /// # Errors
    /// [`SubscriptionError::Ended`] when the run stalls or stops first, [`SubscriptionError::Source`] when the head is
    /// refused; it waits while the run retries, and while it is paused.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub async fn caught_up(&self) -> Result<(), SubscriptionError> {
        self.ask(Command::CaughtUp).await
    }

    /// Returns the stored checkpoint once everything read so far is settled, and stored as far as it may be.
    ///
    /// # Errors
    /// [`SubscriptionError::Ended`] when the run stalls or stops first; it waits while the run retries.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub async fn drained(&self) -> Result<Option<Checkpoint>, SubscriptionError> {
        self.ask(Command::Drained).await
    }

    /// Hands out nothing more, waits for the event in hand (up to `shutdown_grace`; then its call is dropped and it
    /// comes again), stores the storable position and closes the cursor. What was read ahead is dropped and read
    /// again at [`resume`](Self::resume). A handler that blocks its thread is waited for without a limit.
    ///
    /// # Errors
    /// [`SubscriptionError::NotSaved`] when the position could not be stored in time: the subscription is paused all
    /// the same and goes on trying to store it. [`SubscriptionError::Ended`] when the run has stalled or stopped.
    ///
    /// # Cancel safety
    /// Dropped, it is still done.
    pub async fn pause(&self) -> Result<(), SubscriptionError> {
        self.ask(Command::Pause).await
    }

    /// Reads on from the last settled position of this run, after a pause or a stall. It returns when the cursor is
    /// open; while the source does not answer it waits, and the status says so.
    ///
    /// # Errors
    /// [`SubscriptionError::Ended`] when the record is no longer this run's own, or the source refuses;
    /// [`SubscriptionError::Storage`] when the record could not be read: nothing has changed then.
    ///
    /// # Cancel safety
    /// Dropped, it is still done.
    pub async fn resume(&self) -> Result<(), SubscriptionError> {
        self.ask(Command::Resume).await
    }

    /// Stops as [`pause`](Self::pause) does, keeps the stored checkpoint and returns it; the id is free. The next
    /// start goes on behind it and, if everything handed out was stored, repeats nothing.
    ///
    /// # Errors
    /// [`SubscriptionError::NotSaved`] when the last position could not be stored within the grace, at least 10 s:
    /// the run has stopped, and what lies behind the stored checkpoint comes again. [`SubscriptionError::Ended`] when it
    /// had stopped before, for another reason.
    ///
    /// # Cancel safety
    /// Dropped, it is still done.
    pub async fn shutdown(&self) -> Result<Option<Checkpoint>, SubscriptionError> {
        match self.ask(Command::Shutdown).await {
            Err(SubscriptionError::Ended { reason: Reason::Requested, .. }) => Ok(self.status().saved),
            answer => answer,
        }
    }

    /// Stops, waits for a write in flight to its end, and deletes the stored checkpoint if it is still the run's own.
    ///
    /// # Errors
    /// [`SubscriptionError::Storage`] when the record could not be deleted, [`SubscriptionError::Ended`] when it is
    /// another owner's: it is left then. The run has stopped in any case.
    ///
    /// # Cancel safety
    /// Dropped, it is still done.
    pub async fn cancel(&self) -> Result<(), SubscriptionError> {
        self.ask(Command::Cancel).await
    }

    /// Steps over exactly the events up to and with the one at `through`: one that is too large to be sent, one that the
    /// handler fails for, a range that is held back. It stops handing out as [`pause`](Self::pause) does, stores the
    /// position together with who did it, when, from where and why, and goes on behind it; a stalled run is resumed by it,
    /// a paused one stays paused.
    ///
    /// With a dead letter storage, what can be kept of them is put there first, and later events of the same documents wait
    /// behind that; of an event that cannot be sent, its outline.
    ///
    /// What is stepped over is lost to the subscription; what is known of it is counted
    /// ([`Status::skipped`](crate::Status::skipped)) and warned about, and the record keeps the newest 16 skips.
    /// Everything behind `through` that was handed out and not stored comes again.
    ///
    /// ```
    /// # use mongosub::memory::{self, MemoryCheckpointStorage, MemoryModel};
    /// # use mongosub::{Delivery, DurableSubscriptions, bson::doc};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let model = MemoryModel::new();
    /// # let subscriptions = DurableSubscriptions::new(model.clone(), MemoryCheckpointStorage::new());
    /// let handler = |_: Delivery| async { Err("no such field".into()) };
    /// let subscription = subscriptions.subscribe("search_index_v3", handler).await?;
    /// let bad = model.push(memory::insert(1, doc! { "status": 7 }));
    /// # subscription.watch().wait_for(|status| status.in_hand_since.is_some()).await?;
    /// assert!(subscription.skip(bad.clone(), "").await.is_err());
    /// subscription.skip(bad.clone(), "INC-7: written by a broken import").await?;
    /// assert_eq!((subscription.status().saved, subscription.status().skipped), (Some(bad), 1));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`SubscriptionError::Refused`] without a reason, for a position that is not beyond what is settled and storable,
    /// that cannot be compared with it, or that lies ahead of the source's present; [`SubscriptionError::Source`] when the
    /// source could not be asked or has another collection: nothing has changed then. [`SubscriptionError::NotSaved`] when
    /// it could not be stored within ten seconds: the subscription is paused then, goes on trying to store it, and
    /// [`resume`](Self::resume) goes on behind it. [`SubscriptionError::Ended`] when the run has stopped.
    ///
    /// # Cancel safety
    /// Dropped, it is still done.
    pub async fn skip(&self, through: Checkpoint, reason: impl Into<String>) -> Result<(), SubscriptionError> {
        let skip = Skip { through, reason: reason.into() };
        self.ask(|reply| Command::Skip(skip, reply)).await
    }

    /// As [`shutdown`](Self::shutdown), without waiting for it.
    pub(crate) fn begin_shutdown(&self) {
        let (reply, _) = oneshot::channel();
        // A run that is gone has nothing to end.
        let _ = self.inner.commands.send(Command::Shutdown(reply));
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, SubscriptionError> {
        let (reply, answer) = oneshot::channel();
        // A run that is gone drops the command, and with it the reply.
        let _ = self.inner.commands.send(command(reply));
        match answer.await {
            Ok(answer) => answer,
            Err(_) => {
                let reason = self.reason_of(|state| matches!(state, State::Stopped(_) | State::Stalled(_))).await;
                Err(SubscriptionError::Ended { id: self.inner.id.clone(), reason })
            }
        }
    }

    async fn reason_of(&self, wanted: impl Fn(&State) -> bool) -> Reason {
        let mut status = self.inner.status.clone();
        // A run whose runtime was shut down under it never says why it stopped.
        let reason = status.wait_for(|status| wanted(&status.state)).await.ok().and_then(|s| s.state.reason().cloned());
        reason.unwrap_or(Reason::Requested)
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription")
            .field("id", &self.inner.id)
            .field("state", &self.inner.status.borrow().state)
            .finish_non_exhaustive()
    }
}
