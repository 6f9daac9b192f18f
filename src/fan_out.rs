//! Several handlers as one: each event goes to all of them, and a position is stored when all of them have it. It knows
//! handlers and holds alone.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::join_all;

use crate::checkpoint::Checkpoint;
use crate::delivery::Delivery;
use crate::handler::{Failure, Handler, Verdict};
use crate::hold::{Declared, Hold, Mark, Positions};
use crate::storage::BoxFuture;

/// So often the members are asked to come to one position, before it is an error.
const ROUNDS: usize = 8;

/// A handler of several: `fan_out().with(a).with(b)`.
///
/// Each event goes to all members, side by side, and is handled when all of them have handled it; a member that has is
/// not asked again while the others are. A member that fails fails the event; of several verdicts the one that passes
/// over least counts: stop, then retry, then dead letter, then skip.
///
/// Before a save all members that [buffer](Handler::buffers) flush, and are brought to the highest position that any of
/// them reports; one that cannot follow fails the save, and with it every member begins anew. At the end, if what they
/// let go of differs, the lowest is stored. Under a [hold](crate::Subscribe::hold) a position is durable when every member
/// has declared it; each has a hold of its own, in `claimed` and in its deliveries, and one that has nothing to declare
/// says so with [`resume_auto`](Hold::resume_auto).
///
/// ```
/// # use mongosub::memory::{self, MemoryCheckpointStorage, MemoryModel};
/// # use mongosub::bson::doc;
/// use mongosub::{Delivery, DurableSubscriptions, fan_out};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let model = MemoryModel::new();
/// # let subscriptions = DurableSubscriptions::new(model.clone(), MemoryCheckpointStorage::new());
/// let both = fan_out()
///     .with(|delivery: Delivery| async move { index(delivery).await })
///     .with(|delivery: Delivery| async move { audit(delivery).await });
/// let subscription = subscriptions.subscribe("search_and_audit_v1", both).await?;
/// # model.push(memory::insert(1, doc! {}));
/// # subscription.caught_up().await?;
/// # assert_eq!(subscription.status().settled, 1);
/// # Ok(())
/// # }
/// # async fn index(_: Delivery) -> Result<(), mongosub::Failure> { Ok(()) }
/// # async fn audit(_: Delivery) -> Result<(), mongosub::Failure> { Ok(()) }
/// ```
#[derive(Default)]
pub struct FanOut {
    members: Vec<Member>,
}

/// A fan-out without members yet; one that stays so handles every event by doing nothing.
pub fn fan_out() -> FanOut {
    FanOut::default()
}

struct Member {
    handler: Box<dyn DynHandler>,
    /// The last event it has handled.
    done: Option<Checkpoint>,
    hold: Option<Hold>,
}

/// [`Handler`] as an object.
trait DynHandler: Send {
    fn handle(&mut self, delivery: Delivery) -> BoxFuture<'_, Result<(), Failure>>;
    fn buffers(&self) -> bool;
    fn claimed(&mut self, from: Option<Checkpoint>, hold: Hold) -> BoxFuture<'_, Result<(), Failure>>;
    fn flush(&mut self, through: Checkpoint) -> BoxFuture<'_, Result<Checkpoint, Failure>>;
    fn released(&mut self, through: Checkpoint) -> BoxFuture<'_, Result<Checkpoint, Failure>>;
}

impl<H: Handler> DynHandler for H {
    fn handle(&mut self, delivery: Delivery) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(Handler::handle(self, delivery))
    }

    fn buffers(&self) -> bool {
        Handler::buffers(self)
    }

    fn claimed(&mut self, from: Option<Checkpoint>, hold: Hold) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(Handler::claimed(self, from, hold))
    }

    fn flush(&mut self, through: Checkpoint) -> BoxFuture<'_, Result<Checkpoint, Failure>> {
        Box::pin(Handler::flush(self, through))
    }

    fn released(&mut self, through: Checkpoint) -> BoxFuture<'_, Result<Checkpoint, Failure>> {
        Box::pin(Handler::released(self, through))
    }
}

impl FanOut {
    /// Adds a member.
    #[must_use]
    pub fn with<H: Handler + 'static>(mut self, handler: H) -> Self {
        self.members.push(Member { handler: Box::new(handler), done: None, hold: None });
        self
    }

    fn buffering(&mut self) -> impl Iterator<Item = &mut Member> {
        self.members.iter_mut().filter(|member| member.handler.buffers())
    }
}

impl Member {
    async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
        let position = delivery.position.clone();
        let delivery = match &self.hold {
            Some(hold) => delivery.with_hold(hold.clone()),
            None => delivery,
        };
        self.handler.handle(delivery).await?;
        self.done = Some(position);
        Ok(())
    }
}

impl Handler for FanOut {
    async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
        let undone = self.members.iter_mut().filter(|member| member.done.as_ref() != Some(&delivery.position));
        let answers = join_all(undone.map(|member| member.handle(delivery.clone()))).await;
        // What one member wants passed over must not pass over what another one has not done.
        let weight = |failure: &Failure| match failure.verdict() {
            Verdict::Stop => 3,
            Verdict::Retry => 2,
            Verdict::DeadLetter => 1,
            Verdict::Skip => 0,
        };
        match answers.into_iter().filter_map(Result::err).max_by_key(weight) {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }

    fn buffers(&self) -> bool {
        self.members.iter().any(|member| member.handler.buffers())
    }

    async fn claimed(&mut self, from: Option<Checkpoint>, hold: Hold) -> Result<(), Failure> {
        let declared = self.members.iter().map(|_| Says::Durable(None)).collect();
        let common = Arc::new(Common { hold, declared: Mutex::new(declared) });
        for (index, member) in self.members.iter_mut().enumerate() {
            let hold = Hold { positions: Arc::new(OfMember { common: common.clone(), index }) };
            member.hold = Some(hold.clone());
            member.handler.claimed(from.clone(), hold).await?;
        }
        Ok(())
    }

    async fn flush(&mut self, through: Checkpoint) -> Result<Checkpoint, Failure> {
        let mut highest = through;
        let mut answers: Vec<Option<Checkpoint>> = self.buffering().map(|_| None).collect();
        for _ in 0..ROUNDS {
            let asked = self.buffering().zip(&mut answers).map(|(member, answer)| {
                let highest = &highest;
                async move {
                    if answer.as_ref().is_none_or(|answer| highest.is_beyond(answer)) {
                        let came = member.handler.flush(highest.clone()).await?;
                        if highest.is_beyond(&came) {
                            return Err(format!("a member flushed up to {came}, and cannot follow to {highest}").into());
                        }
                        *answer = Some(came);
                    }
                    Ok(())
                }
            });
            let failed = join_all(asked).await.into_iter().find(Result::is_err);
            failed.unwrap_or(Ok::<(), Failure>(()))?;
            let before = highest.clone();
            for answer in answers.iter().flatten() {
                if answer.is_beyond(&highest) {
                    highest = answer.clone();
                }
            }
            if highest == before {
                return Ok(highest);
            }
        }
        Err(format!("its members came to no common position in {ROUNDS} rounds").into())
    }

    async fn released(&mut self, through: Checkpoint) -> Result<Checkpoint, Failure> {
        let answers = join_all(self.buffering().map(|member| member.handler.released(through.clone()))).await;
        let answers = answers.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(answers.into_iter().fold(through, |lowest, answer| if lowest.is_beyond(&answer) { answer } else { lowest }))
    }
}

impl fmt::Debug for FanOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FanOut").field("members", &self.members.len()).finish()
    }
}

/// The run's hold and what each member has declared in it.
struct Common {
    hold: Hold,
    /// Of each member.
    declared: Mutex<Vec<Says>>,
}

/// What a member says of what it has made durable.
enum Says {
    /// It declares it: up to this mark so far.
    Durable(Option<Mark>),
    /// It does not declare any more.
    Nothing,
}

impl Common {
    fn declared(&self) -> MutexGuard<'_, Vec<Says>> {
        self.declared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Declares what every member that has to has declared.
    fn declare(&self, declared: &[Says]) {
        let marks = declared.iter().filter_map(|says| match says {
            Says::Durable(mark) => Some(mark.as_ref()),
            Says::Nothing => None,
        });
        let mut marks = marks.peekable();
        if marks.peek().is_none() {
            return self.hold.resume_auto();
        }
        let marks = marks.collect::<Option<Vec<_>>>().unwrap_or_default();
        if let Some(lowest) = marks.into_iter().min_by_key(|mark| seq(mark)) {
            self.hold.durable_through(lowest);
        }
    }
}

fn seq(mark: &Mark) -> Option<u64> {
    mark.place.as_ref().map(|place| place.seq)
}

/// The hold of one member.
struct OfMember {
    common: Arc<Common>,
    index: usize,
}

impl Positions for OfMember {
    fn mark(&self) -> Mark {
        self.common.hold.mark()
    }

    fn durable_through(&self, mark: &Mark) -> Declared {
        let fence = self.common.hold.mark().fence;
        if mark.fence != fence {
            return Declared::Stale;
        }
        let mut declared = self.common.declared();
        if let Says::Durable(last) = &mut declared[self.index]
            && last.as_ref().is_none_or(|last| last.fence != fence || seq(last) < seq(mark))
        {
            *last = Some(mark.clone());
        }
        self.common.declare(&declared);
        Declared::Accepted
    }

    fn request_save(&self) {
        self.common.hold.request_save();
    }

    fn resume_auto(&self) {
        let mut declared = self.common.declared();
        declared[self.index] = Says::Nothing;
        self.common.declare(&declared);
    }
}
