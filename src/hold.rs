//! Holding positions back until the handler's own state is durable: what a handler takes, declares and asks for. A value
//! in front of the run that keeps the positions; it never blocks and does no I/O.

use std::fmt;
use std::sync::Arc;

use crate::checkpoint::{Checkpoint, Kind};
use crate::ids::Fence;

/// A run's positions, as its handler may declare them durable. A cheap clone, for any task or thread; nothing here blocks.
///
/// A subscription with [`.hold()`](crate::Subscribe::hold) stores only what was declared durable here, never what was
/// merely handled. Take a [`mark`](Self::mark) of what has been handled, make it durable, then declare
/// [`durable_through`](Self::durable_through) it. After a kill everything behind the last one declared comes again. What
/// is never declared is never stored: the oplog drops a position that stands still for too long.
///
/// A subscription without a hold stores what was handled; declaring then changes nothing.
///
/// The handler's ([`Handler::claimed`](crate::Handler::claimed), [`Delivery::hold`](crate::Delivery::hold)) and the
/// handle's ([`Subscription::hold`](crate::Subscription::hold)) are the same one. It ends with its run: marks of an
/// earlier one are [`Stale`](Declared::Stale).
///
/// ```
/// # use mongosub::memory::{self, MemoryCheckpointStorage, MemoryModel};
/// # use mongosub::bson::doc;
/// use mongosub::{Delivery, DurableSubscriptions, Failure, Handler};
///
/// /// Buffers 100 events, and stores them in the background.
/// #[derive(Default)]
/// struct Buffered { events: Vec<Delivery> }
///
/// impl Handler for Buffered {
///     async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
///         let hold = delivery.hold().clone();
///         // Excludes the event in hand, which is handled only when this call has returned.
///         let mark = hold.mark();
///         self.events.push(delivery);
///         if self.events.len() > 100 {
///             let last = self.events.pop();
///             let full = std::mem::replace(&mut self.events, last.into_iter().collect());
///             tokio::spawn(async move {
///                 store(full).await;
///                 hold.durable_through(&mark);
///             });
///         }
///         Ok(())
///     }
/// }
///
/// # async fn store(events: Vec<Delivery>) { assert_eq!(events.len(), 100) }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let model = MemoryModel::new();
/// # let subscriptions = DurableSubscriptions::new(model.clone(), MemoryCheckpointStorage::new());
/// let subscription = subscriptions.subscribe("search_index_v3", Buffered::default()).hold().await?;
/// # let positions: Vec<_> = (0..250).map(|key| model.push(memory::insert(key, doc! {}))).collect();
/// # subscription.caught_up().await?;
/// # for _ in 0..10 { tokio::task::yield_now().await }
/// # assert_eq!(subscription.shutdown().await?.as_ref(), Some(&positions[199]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Hold {
    pub(crate) positions: Arc<dyn Positions>,
}

/// What keeps the positions: a run's desk, or what stands in front of it.
pub(crate) trait Positions: Send + Sync {
    fn mark(&self) -> Mark;
    fn durable_through(&self, mark: &Mark) -> Declared;
    fn request_save(&self);
    fn resume_auto(&self);
}

impl Hold {
    /// What has been handled by now, quiet positions included. Inside a handler it excludes the event in hand, and of a
    /// batch in hand everything.
    pub fn mark(&self) -> Mark {
        self.positions.mark()
    }

    /// Declares that everything up to a mark is durable: it may be stored. Marks only advance; one that lies behind an
    /// earlier one is accepted and changes nothing.
    pub fn durable_through(&self, mark: &Mark) -> Declared {
        self.positions.durable_through(mark)
    }

    /// Asks for a save of everything that may be stored now, whatever the save policy says. It does not wait for it.
    /// Requests merge; one that comes during a save is honoured next.
    pub fn request_save(&self) {
        self.positions.request_save();
    }

    /// Ends the hold for the rest of the run: what was handled may be stored from now on, without a word of the handler.
    pub fn resume_auto(&self) {
        self.positions.resume_auto();
    }
}

impl Hold {
    /// Of a delivery that no run hands out.
    pub(crate) fn of_nobody(fence: Fence) -> Self {
        Self { positions: Arc::new(Nobody(fence)) }
    }
}

struct Nobody(Fence);

impl Positions for Nobody {
    fn mark(&self) -> Mark {
        Mark { fence: self.0, place: None }
    }

    fn durable_through(&self, mark: &Mark) -> Declared {
        if mark.fence == self.0 { Declared::Accepted } else { Declared::Stale }
    }

    fn request_save(&self) {}

    fn resume_auto(&self) {}
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").field("mark", &self.mark()).finish_non_exhaustive()
    }
}

/// How far a run had been handled at one moment. It belongs to its run, and cannot be stored: what is stored is a
/// [`Checkpoint`].
#[derive(Debug, Clone, PartialEq)]
pub struct Mark {
    pub(crate) fence: Fence,
    /// None before anything that has a position.
    pub(crate) place: Option<Place>,
}

impl Mark {
    /// Its position; none when the run has handled nothing and its source tells no start.
    pub fn position(&self) -> Option<&Checkpoint> {
        self.place.as_ref().map(|place| &place.position)
    }
}

/// What became of a declaration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Declared {
    /// Everything up to the mark may be stored.
    Accepted,
    /// The mark is of an earlier run: nothing has changed, and what it covers comes again.
    Stale,
}

/// A position together with where it stands in its run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Place {
    /// Counts the positions of this run; a later position has a greater one. The start has 0.
    pub(crate) seq: u64,
    /// How many events of this run lie up to and with it.
    pub(crate) events: u64,
    /// How many epochs have begun in this run before it. An `invalidate` is the last position of its own.
    pub(crate) epoch: u32,
    pub(crate) position: Checkpoint,
    pub(crate) kind: Kind,
}
