//! Random interleavings of failing documents, crashes, retries and evictions, against what must hold of each document
//! whatever happens.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use mongosub::bson::doc;
use mongosub::memory::{self, MemoryDeadLetterStorage};
use mongosub::{
    BatchFailure, BatchHandler, BatchLimits, Checkpoint, DeadLetterError, DeadLetterStorage, Delivery, DocumentKey,
    Failure, Handler, Namespace, OnFailure, State, Subscription, Then,
};
use proptest::prelude::*;
use tokio::task::JoinHandle;

use crate::support::{Fault, FaultyLetters, ID, World, id, millis};

const DOCUMENTS: i32 = 3;

#[derive(Debug, Clone)]
enum Step {
    /// A change of each of these documents.
    Push(Vec<i32>),
    /// The handlers fail for a document from now on, or do no longer.
    Poison(i32),
    Cure(i32),
    /// The letters of a document are handed out again, beside everything else.
    Retry(i32),
    /// Every retry dies where it is.
    KillRetries,
    Evict(i32),
    /// The next letters meet this.
    Store(Fault),
    /// The next removals meet this.
    Remove(Fault),
    Crash,
    Shutdown,
    PauseAndResume,
    Wait(u32),
}

fn fault() -> impl Strategy<Value = Fault> {
    let ms = |ms: u64| Duration::from_millis(ms);
    prop_oneof![
        Just(Fault::Fail),
        Just(Fault::LoseReply),
        (1u64..2000).prop_map(move |late| Fault::Late(ms(late))),
        (1u64..2000).prop_map(move |late| Fault::FailLate(ms(late))),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let document = || 0..DOCUMENTS;
    prop_oneof![
        10 => prop::collection::vec(0..DOCUMENTS, 1..8).prop_map(Step::Push),
        5 => document().prop_map(Step::Poison),
        3 => document().prop_map(Step::Cure),
        4 => document().prop_map(Step::Retry),
        1 => Just(Step::KillRetries),
        2 => document().prop_map(Step::Evict),
        4 => fault().prop_map(Step::Store),
        2 => fault().prop_map(Step::Remove),
        3 => Just(Step::Crash),
        1 => Just(Step::Shutdown),
        1 => Just(Step::PauseAndResume),
        6 => (0u32..20).prop_map(Step::Wait),
        2 => (20u32..50_000).prop_map(Step::Wait),
    ]
}

#[derive(Clone, Default)]
struct Shared {
    poisoned: Arc<Mutex<BTreeSet<i32>>>,
    /// Every event handled, by the run or by a retry.
    handled: Arc<Mutex<Vec<(i32, Checkpoint)>>>,
    /// What must not be.
    wrong: Arc<Mutex<Vec<String>>>,
}

impl Shared {
    async fn handle(&self, delivery: &Delivery) -> Result<(), Failure> {
        let document = delivery.event.document_id::<i32>()?.ok_or("no document")?;
        millis(1).await;
        if self.poisoned.lock().unwrap().contains(&document) {
            return Err("poisoned".into());
        }
        self.handled.lock().unwrap().push((document, delivery.position.clone()));
        Ok(())
    }
}

/// The run's handler: nothing of a document may come to it while the document has letters.
struct OfTheRun {
    shared: Shared,
    letters: MemoryDeadLetterStorage,
}

impl OfTheRun {
    fn check(&self, delivery: &Delivery) {
        let sequences = self.letters.sequences(&id()).now_or_never().unwrap().unwrap();
        let key = DocumentKey::of(&delivery.event);
        if sequences.iter().any(|sequence| sequence.key == key) {
            self.shared
                .wrong
                .lock()
                .unwrap()
                .push(format!("{} of {key} is delivered past its letters", delivery.position));
        }
    }
}

impl Handler for OfTheRun {
    async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
        self.check(&delivery);
        self.shared.handle(&delivery).await
    }
}

impl BatchHandler for OfTheRun {
    async fn handle_batch(&mut self, batch: &[Delivery]) -> Result<(), BatchFailure> {
        for (settled, delivery) in batch.iter().enumerate() {
            self.check(delivery);
            self.shared.handle(delivery).await.map_err(|failure| BatchFailure::after(settled, failure))?;
        }
        Ok(())
    }
}

struct Play {
    shared: Shared,
    letters: FaultyLetters,
    world: World,
    subscription: Subscription,
    every: u32,
    batches: Option<BatchLimits>,
    pushed: Vec<(i32, Checkpoint)>,
    evicted: Vec<Checkpoint>,
    retries: Vec<JoinHandle<()>>,
    n: i32,
}

fn key(document: i32) -> DocumentKey {
    DocumentKey::new(Namespace::new("test", "events"), document)
}

impl Play {
    async fn begin(every: u32, batches: Option<BatchLimits>) -> Self {
        let (shared, world) = (Shared::default(), World::new());
        let letters = FaultyLetters::new(MemoryDeadLetterStorage::new());
        let subscription = subscribe(&world, &shared, &letters, every, batches).await;
        let (pushed, evicted, retries) = (Vec::new(), Vec::new(), Vec::new());
        Self { shared, letters, world, subscription, every, batches, pushed, evicted, retries, n: 0 }
    }

    fn push(&mut self, document: i32) {
        self.n += 1;
        let position = self.world.model.push(memory::update(document, doc! { "n": self.n }));
        self.pushed.push((document, position));
    }

    async fn take(&mut self, step: Step) {
        match step {
            Step::Push(documents) => documents.into_iter().for_each(|document| self.push(document)),
            Step::Poison(document) => drop(self.shared.poisoned.lock().unwrap().insert(document)),
            Step::Cure(document) => drop(self.shared.poisoned.lock().unwrap().remove(&document)),
            Step::Retry(document) => {
                let retry = self.retry(document);
                self.retries.push(tokio::spawn(async move { drop(retry.await) }));
            }
            Step::KillRetries => self.retries.drain(..).for_each(|retry| retry.abort()),
            Step::Evict(document) => {
                let letters = self.letters.inner().letters(&id(), &key(document)).await.unwrap();
                let subscriptions = self.world.subscriptions.clone().dead_letters(self.letters.clone());
                if let Ok(evicted) = subscriptions.evict(ID, &key(document), "a test").await {
                    assert_eq!(evicted, letters.len());
                    self.evicted.extend(letters.into_iter().map(|letter| letter.position));
                }
            }
            Step::Store(fault) => self.letters.next_puts([fault]),
            Step::Remove(fault) => self.letters.next_removals([fault]),
            Step::Crash => self.crash().await,
            Step::Shutdown => {
                drop(self.subscription.shutdown().await);
                self.world = self.world.restarted();
                self.subscribe().await;
            }
            Step::PauseAndResume => {
                drop(self.subscription.pause().await);
                drop(self.subscription.resume().await);
            }
            Step::Wait(wait) => millis(wait.into()).await,
        }
    }

    fn retry(&self, document: i32) -> impl Future<Output = Result<mongosub::Retried, DeadLetterError>> + Send + use<> {
        let subscriptions = self.world.subscriptions.clone().dead_letters(self.letters.clone());
        let shared = self.shared.clone();
        let handler = move |delivery: Delivery| {
            let shared = shared.clone();
            async move { shared.handle(&delivery).await }
        };
        async move { subscriptions.retry(ID, &key(document), handler).await }
    }

    async fn subscribe(&mut self) {
        self.subscription = subscribe(&self.world, &self.shared, &self.letters, self.every, self.batches).await;
    }

    /// Drops the run as it stands, wherever it stands.
    async fn crash(&mut self) {
        let mut status = self.subscription.watch();
        self.world = self.world.restarted();
        // Those who retry hold the wrapper too.
        self.retries.drain(..).for_each(|retry| retry.abort());
        let none = World::new();
        let none = none.subscribe().await;
        drop(std::mem::replace(&mut self.subscription, none));
        status.wait_for(|status| matches!(status.state, State::Stopped(_))).await.unwrap();
        tokio::task::yield_now().await;
        self.subscribe().await;
    }

    /// What must hold at every moment.
    async fn holds(&self) -> Result<(), TestCaseError> {
        prop_assert_eq!(&*self.shared.wrong.lock().unwrap(), &Vec::<String>::new());
        let handled = self.shared.handled.lock().unwrap().clone();
        let mut parked = Vec::new();
        for document in 0..DOCUMENTS {
            let letters = self.letters.inner().letters(&id(), &key(document)).await.unwrap();
            let positions: Vec<_> = letters.into_iter().map(|letter| letter.position).collect();
            prop_assert!(positions.windows(2).all(|pair| pair[1].is_beyond(&pair[0])), "{:?}", positions);
            parked.extend(positions);

            let mut firsts: Vec<&Checkpoint> = Vec::new();
            for (_, position) in
                handled.iter().filter(|(of, position)| *of == document && !self.evicted.contains(position))
            {
                if !firsts.contains(&position) {
                    firsts.push(position);
                }
            }
            let of_document =
                self.pushed.iter().filter(|(of, position)| *of == document && !self.evicted.contains(position));
            let expected: Vec<_> = of_document.map(|(_, position)| position).take(firsts.len()).collect();
            prop_assert_eq!(firsts, expected, "document {} out of feed order", document);
        }
        let stored = self.world.stored().await.expect("a start is always stored");
        for (document, event) in &self.pushed {
            let kept = event.is_beyond(&stored)
                || parked.contains(event)
                || self.evicted.contains(event)
                || handled.contains(&(*document, event.clone()));
            prop_assert!(kept, "{} has passed {}", stored, event);
        }
        Ok(())
    }

    /// Everything heals, and everything that was put away is handed out.
    async fn end(mut self) -> Result<(), TestCaseError> {
        self.shared.poisoned.lock().unwrap().clear();
        self.letters.heal();
        (0..DOCUMENTS).for_each(|document| self.push(document));
        self.subscription.caught_up().await.unwrap();
        self.subscription.drained().await.unwrap();
        self.holds().await?;
        let status = self.subscription.status();
        prop_assert_eq!(status.settled, status.handled + status.skipped + status.dead_lettered + status.parked);
        prop_assert_eq!((status.events, status.delivered), (status.settled, status.settled));
        // What a dead retry held runs out.
        millis(60_000).await;
        for document in 0..DOCUMENTS {
            match self.retry(document).await {
                Ok(retried) => prop_assert_eq!(retried.failed, None),
                Err(error) => prop_assert!(matches!(error, DeadLetterError::NoLetters { .. }), "{}", error),
            }
        }
        prop_assert_eq!(self.letters.inner().sequences(&id()).await.unwrap(), vec![]);
        self.holds().await?;
        let handled = self.shared.handled.lock().unwrap().clone();
        for (document, event) in &self.pushed {
            let is_there = handled.contains(&(*document, event.clone())) || self.evicted.contains(event);
            prop_assert!(is_there, "{} of document {} is lost", event, document);
        }
        Ok(())
    }
}

async fn subscribe(
    world: &World,
    shared: &Shared,
    letters: &FaultyLetters,
    every: u32,
    batches: Option<BatchLimits>,
) -> Subscription {
    let handler = OfTheRun { shared: shared.clone(), letters: letters.inner().clone() };
    let action = match batches {
        None => world.subscriptions.subscribe(ID, handler),
        Some(limits) => world.subscriptions.subscribe_batches(ID, limits, handler),
    };
    let policy = OnFailure::retry(1).then(Then::DeadLetter).backoff(Duration::from_millis(2), Duration::from_millis(2));
    action.dead_letters(letters.clone()).on_failure(policy).save_every(every).await.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_the_events_of_a_document_are_handled_in_order_and_none_is_lost_or_parked_twice(
        steps in prop::collection::vec(step(), 1..60),
        every in prop_oneof![Just(1u32), Just(5)],
        batches in prop_oneof![
            2 => Just(None),
            1 => Just(Some(BatchLimits::new(4))),
            1 => Just(Some(BatchLimits::new(7).max_wait(Duration::from_millis(30)))),
        ],
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let play = async {
                let mut play = Play::begin(every, batches).await;
                for step in steps {
                    play.take(step).await;
                    play.holds().await?;
                }
                play.end().await
            };
            tokio::time::timeout(Duration::from_secs(100_000), play).await.expect("it comes to an end")
        })?;
    }
}
