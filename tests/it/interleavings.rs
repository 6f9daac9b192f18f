//! Random interleavings of everything that can happen to a run, against what must hold whatever happens.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use mongosub::bson::doc;
use mongosub::memory::{self, MemoryModel};
use mongosub::{
    BatchFailure, BatchHandler, BatchLimits, Checkpoint, Deliveries, Delivery, Failure, Handler, SaveMode, SourceError,
    State, StorageError, Subscribe, Subscription,
};
use proptest::prelude::*;
use tokio::task::JoinHandle;

use crate::support::{Fault, FaultyStorage, ID, World, millis};

#[derive(Debug, Clone)]
enum Step {
    Push(u8),
    Transaction(u8),
    Quiet,
    /// The next calls of the handler fail.
    Fail(u8),
    /// The next call panics; what is pulled next is dropped without a word.
    Panic,
    /// The next flushes of a handler that buffers fail.
    FailFlush(u8),
    /// The next call takes so long.
    Slow(u16),
    Store(StoreFault),
    Heal,
    BreakReader,
    FailOpens(u8),
    Wait(u32),
    Pause,
    Resume,
    Shutdown,
    /// Everything of the run is dropped.
    Crash,
    /// Another process subscribes while this one runs.
    Takeover,
}

#[derive(Debug, Clone)]
enum StoreFault {
    Fail(u8),
    Late(u16),
    FailLate(u16),
    LoseReply,
    FailAll,
    Unreadable,
}

fn step() -> impl Strategy<Value = Step> {
    let store = prop_oneof![
        3 => (1u8..4).prop_map(StoreFault::Fail),
        2 => (1u16..3000).prop_map(StoreFault::Late),
        2 => (1u16..3000).prop_map(StoreFault::FailLate),
        2 => Just(StoreFault::LoseReply),
        1 => Just(StoreFault::FailAll),
        1 => Just(StoreFault::Unreadable),
    ];
    prop_oneof![
        8 => (1u8..6).prop_map(Step::Push),
        2 => (2u8..5).prop_map(Step::Transaction),
        4 => Just(Step::Quiet),
        2 => (1u8..4).prop_map(Step::Fail),
        1 => Just(Step::Panic),
        1 => (1u8..3).prop_map(Step::FailFlush),
        2 => (1u16..40_000).prop_map(Step::Slow),
        3 => store.prop_map(Step::Store),
        2 => Just(Step::Heal),
        2 => Just(Step::BreakReader),
        1 => (1u8..4).prop_map(Step::FailOpens),
        4 => (0u32..50).prop_map(Step::Wait),
        3 => (50u32..100_000).prop_map(Step::Wait),
        1 => Just(Step::Pause),
        2 => Just(Step::Resume),
        1 => Just(Step::Shutdown),
        1 => Just(Step::Crash),
        1 => Just(Step::Takeover),
    ]
}

#[derive(Clone, Default)]
struct Shared {
    pushed: Arc<Mutex<Vec<Checkpoint>>>,
    /// Every call that was about to answer `Ok`.
    handled: Arc<Mutex<Vec<Checkpoint>>>,
    /// What no loss of a handler can take back.
    durable: Arc<Mutex<Vec<Checkpoint>>>,
    /// Those of the calls that were an owner's.
    owned: Arc<Mutex<Vec<Checkpoint>>>,
    /// Repeats of an owner's calls that were not marked.
    unmarked: Arc<Mutex<Vec<Checkpoint>>>,
    /// Whether this run, which may not know it yet, is no owner any more. Each run has its own.
    superseded: Arc<AtomicBool>,
    moods: Arc<Mutex<Moods>>,
}

#[derive(Default)]
struct Moods {
    fail: u8,
    fail_flushes: u8,
    panic: bool,
    slow: Option<u16>,
}

struct Moody(Shared);

impl Shared {
    fn make_durable(&self, positions: &mut Vec<Checkpoint>) {
        self.durable.lock().unwrap().append(positions);
    }
}

/// Keeps what it was given until it is asked to flush; what it keeps goes with it.
struct Buffering {
    moody: Moody,
    buffer: Vec<Checkpoint>,
}

impl Handler for Buffering {
    async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
        let position = delivery.position.clone();
        self.moody.handle(delivery).await?;
        self.buffer.push(position);
        Ok(())
    }

    async fn flush(&mut self, through: Checkpoint) -> Result<Checkpoint, Failure> {
        millis(3).await;
        let fails = {
            let mut moods = self.moody.0.moods.lock().unwrap();
            let fails = moods.fail_flushes > 0;
            moods.fail_flushes = moods.fail_flushes.saturating_sub(1);
            fails
        };
        if fails {
            return Err("moody".into());
        }
        self.moody.0.make_durable(&mut self.buffer);
        Ok(through)
    }
}

/// Makes what it was given durable in the background, and declares it then.
struct Holding(Moody);

impl Handler for Holding {
    async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
        let hold = delivery.hold().clone();
        self.0.handle(delivery).await?;
        let shared = self.0.0.clone();
        let late = 1 + 700 * (shared.handled.lock().unwrap().len() as u64 % 5);
        tokio::spawn(async move {
            millis(late).await;
            let mark = hold.mark();
            let mut covered = shared.handled.lock().unwrap().clone();
            covered.retain(|position| mark.position().is_some_and(|mark| !position.is_beyond(mark)));
            shared.make_durable(&mut covered);
            let _ = hold.durable_through(&mark);
        });
        Ok(())
    }

    fn buffers(&self) -> bool {
        false
    }
}

impl Handler for Moody {
    async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
        let (panics, slow) = {
            let mut moods = self.0.moods.lock().unwrap();
            if moods.fail > 0 {
                moods.fail -= 1;
                return Err("moody".into());
            }
            (std::mem::take(&mut moods.panic), moods.slow.take())
        };
        millis(slow.map_or(1, u64::from)).await;
        assert!(!panics, "moody");
        // Side by side with an owner that does not know yet, no run can know what the other handles.
        if !self.0.superseded.load(Ordering::Relaxed) {
            let mut owned = self.0.owned.lock().unwrap();
            if owned.contains(&delivery.position) && !delivery.may_be_repeat {
                self.0.unmarked.lock().unwrap().push(delivery.position.clone());
            }
            owned.push(delivery.position.clone());
        }
        self.0.handled.lock().unwrap().push(delivery.position);
        Ok(())
    }
}

/// The same in bulk: what fails in a batch is the first that fails alone.
impl BatchHandler for Moody {
    async fn handle_batch(&mut self, batch: &[Delivery]) -> Result<(), BatchFailure> {
        for (settled, delivery) in batch.iter().enumerate() {
            let handled = self.handle(delivery.clone()).await;
            handled.map_err(|failure| BatchFailure::after(settled, failure.to_string()))?;
        }
        Ok(())
    }
}

/// How a run of the play is set up.
#[derive(Debug, Clone, Copy)]
struct Setup {
    mode: SaveMode,
    every: u32,
    handler: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Single,
    Batches(BatchLimits),
    Buffering,
    Holding,
    Pulled,
}

/// Takes what it pulls as a handler would. With it its stream is dropped.
struct Puller(JoinHandle<()>);

impl Puller {
    fn of(mut deliveries: Deliveries, mut moody: Moody) -> Self {
        Self(tokio::spawn(async move {
            while let Some(pulled) = deliveries.next().await {
                let drops = std::mem::take(&mut moody.0.moods.lock().unwrap().panic);
                if drops {
                    continue;
                }
                match moody.handle(pulled.delivery().clone()).await {
                    Ok(()) => pulled.settle(),
                    Err(failure) => pulled.fail(failure),
                }
            }
        }))
    }
}

impl Drop for Puller {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A run, and who pulls what it delivers.
struct Running(Subscription, Option<Puller>);

impl Deref for Running {
    type Target = Subscription;

    fn deref(&self) -> &Subscription {
        &self.0
    }
}

struct Play {
    shared: Shared,
    world: World,
    subscription: Running,
    /// A paused run of an earlier process does not look, so it may be here to the end.
    superseded: Vec<(World, Running)>,
    setup: Setup,
    key: i32,
}

type Action<O> = Subscribe<MemoryModel, FaultyStorage, O>;

fn set_up<O>(action: Action<O>, Setup { mode, every, .. }: Setup) -> Action<O> {
    action.save_mode(mode).save_every(every).save_quiet_position_every(Duration::from_secs(20))
}

async fn subscribe(world: &World, shared: &Shared, setup: Setup) -> Running {
    let moody = Moody(shared.clone());
    let action = match setup.handler {
        Kind::Single => world.subscriptions.subscribe(ID, moody),
        Kind::Batches(limits) => world.subscriptions.subscribe_batches(ID, limits, moody),
        Kind::Buffering => {
            let shared = shared.clone();
            let make = move || Buffering { moody: Moody(shared.clone()), buffer: Vec::new() };
            world.subscriptions.subscribe_with(ID, make)
        }
        Kind::Holding => world.subscriptions.subscribe(ID, Holding(moody)).hold(),
        Kind::Pulled => {
            let deliveries = set_up(world.subscriptions.stream(ID), setup).await.unwrap();
            return Running(deliveries.subscription().clone(), Some(Puller::of(deliveries, moody)));
        }
    };
    Running(set_up(action, setup).await.unwrap(), None)
}

impl Play {
    async fn begin(setup: Setup) -> Self {
        let (shared, world) = (Shared::default(), World::new());
        let subscription = subscribe(&world, &shared, setup).await;
        Self { shared, world, subscription, superseded: Vec::new(), setup, key: 0 }
    }

    fn next_event(&mut self) -> memory::MemoryEvent {
        self.key += 1;
        memory::insert(self.key, doc! {})
    }

    async fn take(&mut self, step: Step) {
        match step {
            Step::Push(events) => {
                for _ in 0..events {
                    let event = self.next_event();
                    self.shared.pushed.lock().unwrap().push(self.world.model.push(event));
                }
            }
            Step::Transaction(events) => {
                let events: Vec<_> = (0..events).map(|_| self.next_event()).collect();
                self.shared.pushed.lock().unwrap().extend(self.world.model.push_transaction(events));
            }
            Step::Quiet => drop(self.world.model.push_quiet()),
            Step::Fail(calls) => self.shared.moods.lock().unwrap().fail = calls,
            Step::Panic => self.shared.moods.lock().unwrap().panic = true,
            Step::FailFlush(times) => self.shared.moods.lock().unwrap().fail_flushes = times,
            Step::Slow(millis) => self.shared.moods.lock().unwrap().slow = Some(millis),
            Step::Store(fault) => self.store_fault(&fault),
            Step::Heal => self.world.storage.heal(),
            Step::BreakReader => self.world.model.break_reader(down()),
            Step::FailOpens(opens) => self.world.model.fail_opens(down(), opens.into()),
            Step::Wait(wait) => millis(wait.into()).await,
            // What it answers depends on the rest; what must hold does not.
            Step::Pause => drop(self.subscription.pause().await),
            Step::Resume => drop(self.subscription.resume().await),
            Step::Shutdown => {
                drop(self.subscription.shutdown().await);
                self.start_again().await;
            }
            Step::Crash => {
                let gone: Vec<_> = self.superseded.drain(..).map(|(_, old)| old.watch()).collect();
                for mut status in gone {
                    // One that knows already finishes the event in hand first.
                    status.wait_for(|status| matches!(status.state, State::Stopped(_))).await.unwrap();
                }
                self.crash().await;
            }
            Step::Takeover => {
                self.shared.superseded.store(true, Ordering::Relaxed);
                self.shared.superseded = Arc::default();
                let next = self.world.restarted();
                let subscription = subscribe(&next, &self.shared, self.setup).await;
                let old = std::mem::replace(&mut self.world, next);
                self.superseded.push((old, std::mem::replace(&mut self.subscription, subscription)));
            }
        }
    }

    /// Begins another run over the same feed and records, when the one before has ended.
    async fn start_again(&mut self) {
        // Nobody goes on with what was out.
        self.subscription.1 = None;
        self.world = self.world.restarted();
        self.subscription = subscribe(&self.world, &self.shared, self.setup).await;
    }

    /// Drops the run as it stands: first what holds it, then the rest.
    async fn crash(&mut self) {
        let mut status = self.subscription.watch();
        self.world = self.world.restarted();
        // A handle of nothing takes the place of the last one.
        let none = World::new();
        let none = Running(none.subscribe().await, None);
        drop(std::mem::replace(&mut self.subscription, none));
        status.wait_for(|status| matches!(status.state, State::Stopped(_))).await.unwrap();
        tokio::task::yield_now().await;
        self.subscription = subscribe(&self.world, &self.shared, self.setup).await;
    }

    fn store_fault(&self, fault: &StoreFault) {
        let ms = |ms: u16| Duration::from_millis(ms.into());
        let storage = &self.world.storage;
        match fault {
            StoreFault::Fail(times) => storage.next_saves(vec![Fault::Fail; (*times).into()]),
            StoreFault::Late(late) => storage.next_saves([Fault::Late(ms(*late))]),
            StoreFault::FailLate(late) => storage.next_saves([Fault::FailLate(ms(*late))]),
            StoreFault::LoseReply => storage.next_saves([Fault::LoseReply]),
            StoreFault::FailAll => storage.every_save(Fault::Fail),
            StoreFault::Unreadable => {
                let error =
                    StorageError::Unreadable { id: ID.into(), field: "version".into(), message: "is odd".into() };
                storage.next_saves([Fault::Error(error)]);
            }
        }
    }

    /// What must hold at every moment.
    async fn holds(&self) -> Result<(), TestCaseError> {
        let (pushed, handled) =
            (self.shared.pushed.lock().unwrap().clone(), self.shared.handled.lock().unwrap().clone());
        let mut firsts: Vec<&Checkpoint> = Vec::new();
        for position in &handled {
            if !firsts.contains(&position) {
                firsts.push(position);
            }
        }
        prop_assert_eq!(&firsts, &pushed.iter().take(firsts.len()).collect::<Vec<_>>(), "out of feed order");
        prop_assert_eq!(&*self.shared.unmarked.lock().unwrap(), &[], "repeated without a mark");
        let stored = self.world.stored().await.expect("a start is always stored");
        let safe = match self.setup.handler {
            Kind::Single | Kind::Batches(_) | Kind::Pulled => handled,
            Kind::Buffering | Kind::Holding => self.shared.durable.lock().unwrap().clone(),
        };
        for event in &pushed {
            prop_assert!(event.is_beyond(&stored) || safe.contains(event), "{} has passed {}", stored, event);
        }
        Ok(())
    }

    /// Everything heals: everything pushed must then be handled and stored.
    async fn end(mut self) -> Result<(), TestCaseError> {
        self.world.storage.heal();
        self.world.storage.forget_faults();
        *self.shared.moods.lock().unwrap() = Moods::default();
        if self.subscription.is_stopped() {
            self.subscription = subscribe(&self.world, &self.shared, self.setup).await;
        }
        if matches!(self.subscription.status().state, State::Paused | State::Stalled(_) | State::Starting) {
            self.subscription.resume().await.unwrap();
        }
        let event = self.next_event();
        let last = self.world.model.push(event);
        self.shared.pushed.lock().unwrap().push(last.clone());
        while let Err(error) = self.subscription.caught_up().await {
            // So often was a process gone with this event in hand that a person has to say whether it is tried again.
            let is_careful = error.to_string().contains("the process died");
            prop_assert!(is_careful, "{}", error);
            self.subscription.resume().await.unwrap();
        }
        if self.setup.handler == Kind::Holding {
            // Everything handled is declared by then.
            millis(10_000).await;
        }
        prop_assert_eq!(self.subscription.drained().await.unwrap(), Some(last.clone()));
        self.holds().await?;
        let (pushed, handled) =
            (self.shared.pushed.lock().unwrap().clone(), self.shared.handled.lock().unwrap().clone());
        prop_assert!(pushed.iter().all(|event| handled.contains(event)), "lost");
        let status = self.subscription.status();
        prop_assert_eq!((status.events, status.delivered), (status.settled, status.settled));
        prop_assert_eq!(self.subscription.shutdown().await.unwrap(), Some(last));
        prop_assert!(self.world.record().await.unwrap().clean);
        for (_, old) in &self.superseded {
            // It looks every ten seconds, and then finishes the event in hand, for thirty at most.
            let mut status = old.watch();
            let rests = |state: &State| matches!(state, State::Paused | State::Stalled(_) | State::Stopped(_));
            let resting = status.wait_for(|status| rests(&status.state));
            drop(tokio::time::timeout(Duration::from_secs(120), resting).await.expect("an old owner stops"));
            prop_assert!(old.resume().await.is_err(), "{:?}", old.status());
            prop_assert!(old.is_stopped());
        }
        Ok(())
    }
}

fn down() -> SourceError {
    SourceError::Unavailable { message: "scripted".into() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_every_event_is_handled_in_order_and_the_stored_position_passes_none(
        steps in prop::collection::vec(step(), 1..60),
        through in any::<bool>(),
        every in prop_oneof![Just(1u32), Just(3)],
        handler in prop_oneof![
            2 => Just(Kind::Single),
            1 => Just(Kind::Batches(BatchLimits::new(4))),
            1 => Just(Kind::Batches(BatchLimits::new(7).max_wait(Duration::from_millis(30)))),
            2 => Just(Kind::Buffering),
            2 => Just(Kind::Holding),
            2 => Just(Kind::Pulled),
        ],
    ) {
        let mode = if through { SaveMode::WriteThrough } else { SaveMode::WriteBehind };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let play = async {
                let mut play = Play::begin(Setup { mode, every, handler }).await;
                for step in steps {
                    play.take(step).await;
                    play.holds().await?;
                }
                play.end().await
            };
            // Long in virtual time: pauses and shutdowns that wait for a storage which never answers take half a
            // minute each.
            tokio::time::timeout(Duration::from_secs(100_000), play).await.expect("it comes to an end")
        })?;
    }
}
