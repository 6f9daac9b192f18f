//! Cut anywhere, and started again over the same feed and the same records: nothing lost, order kept, repeats bounded.

use std::sync::{Arc, Mutex};

use mongosub::bson::{Document, doc};
use mongosub::memory::{self, MemoryCheckpointStorage, MemoryModel};
use mongosub::{
    Checkpoint, CheckpointStorage, Claim, ClaimOutcome, Delivery, DurableSubscriptions, Failure, Handler, Ownership,
    Record, Save, SaveMode, SaveOutcome, StorageError, SubscriptionId,
};
use tokio::sync::watch;

use crate::support::{ID, id, millis};

/// Counts the steps of a run and cuts it at one of them: who takes that step, and every later one, never comes back.
#[derive(Clone)]
struct Cut {
    at: usize,
    steps: Arc<Mutex<Vec<&'static str>>>,
    fired: Arc<watch::Sender<bool>>,
}

impl Cut {
    fn at(at: usize) -> Self {
        Self { at, steps: Arc::default(), fired: Arc::new(watch::Sender::new(false)) }
    }

    async fn step(&self, name: &'static str) {
        let is_cut = {
            let mut steps = self.steps.lock().unwrap();
            let is_cut = steps.len() == self.at;
            if !is_cut {
                steps.push(name);
            }
            is_cut
        };
        if is_cut {
            self.fired.send_replace(true);
            std::future::pending::<()>().await;
        }
    }

    async fn fired(&self) {
        let mut fired = self.fired.subscribe();
        fired.wait_for(|fired| *fired).await.unwrap();
    }
}

/// The calls of one run, each with whether it was marked as a possible repeat.
type Began = Vec<(Checkpoint, bool)>;

/// What outlives every run.
#[derive(Clone)]
struct Outside {
    model: MemoryModel,
    records: MemoryCheckpointStorage,
    /// Every event pushed, in feed order.
    pushed: Arc<Mutex<Vec<Checkpoint>>>,
    /// How much of the script is pushed.
    script: Arc<Mutex<usize>>,
    /// Every call of the handler, by its run: when it began, and when it was about to answer `Ok`.
    began: Arc<Mutex<Vec<Began>>>,
    finished: Arc<Mutex<Vec<Checkpoint>>>,
    /// The last save that was answered to its run.
    answered: Arc<Mutex<Option<Checkpoint>>>,
}

impl Outside {
    fn new() -> Self {
        Self {
            model: MemoryModel::new(),
            records: MemoryCheckpointStorage::new(),
            pushed: Arc::default(),
            script: Arc::default(),
            began: Arc::default(),
            finished: Arc::default(),
            answered: Arc::default(),
        }
    }

    /// Pushes the next piece of the script; answers how long to wait behind it.
    fn push_next(&self) -> Option<u64> {
        let mut script = self.script.lock().unwrap();
        let mut pushed = self.pushed.lock().unwrap();
        let one = |key: i32| memory::insert(key, doc! {});
        let wait = match *script {
            0 => {
                pushed.extend([self.model.push(one(1)), self.model.push(one(2))]);
                5
            }
            1 => {
                self.model.push_quiet();
                70
            }
            2 => {
                pushed.extend(self.model.push_transaction([one(3), one(4), one(5)]));
                0
            }
            3 => {
                self.model.push_quiet();
                pushed.push(self.model.push(one(6)));
                130
            }
            4 => {
                self.model.push_quiet();
                65_000
            }
            5 => {
                pushed.extend((7..=9).map(|key| self.model.push(one(key))));
                1000
            }
            _ => return None,
        };
        *script += 1;
        Some(wait)
    }

    fn stored(&self) -> Option<Record> {
        futures::executor::block_on(self.records.read(&id())).unwrap()
    }

    /// What must hold at every moment: the stored position has not passed an event that was not handled.
    fn is_safe(&self) {
        let Some(stored) = self.stored().and_then(|record| record.position) else { return };
        let finished = self.finished.lock().unwrap();
        for event in self.pushed.lock().unwrap().iter() {
            assert!(event.is_beyond(&stored) || finished.contains(event), "{stored} has passed {event}");
        }
        if let Some(answered) = &*self.answered.lock().unwrap() {
            assert!(!answered.is_beyond(&stored), "{answered} was answered as saved, {stored} is stored");
        }
    }
}

struct Cuttable {
    cut: Cut,
    outside: Outside,
}

impl Handler for Cuttable {
    async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
        let Self { cut, outside } = self;
        cut.step("handler begins").await;
        let note = (delivery.position.clone(), delivery.may_be_repeat);
        outside.began.lock().unwrap().last_mut().unwrap().push(note);
        millis(20).await;
        let key = delivery.event.document_key::<Document>()?.unwrap();
        if key.get_i32("_id")? == 4 && delivery.attempt == 1 {
            return Err("once".into());
        }
        outside.finished.lock().unwrap().push(delivery.position);
        cut.step("handler ends").await;
        Ok(())
    }
}

#[derive(Clone)]
struct CuttableStorage {
    cut: Cut,
    outside: Outside,
}

impl CheckpointStorage for CuttableStorage {
    async fn read(&self, id: &SubscriptionId) -> Result<Option<Record>, StorageError> {
        self.cut.step("read").await;
        self.outside.records.read(id).await
    }

    async fn claim(&self, claim: &Claim) -> Result<ClaimOutcome, StorageError> {
        self.cut.step("claim sent").await;
        let outcome = self.outside.records.claim(claim).await;
        self.cut.step("claim carried out").await;
        outcome
    }

    async fn save(&self, save: &Save) -> Result<SaveOutcome, StorageError> {
        self.cut.step("save sent").await;
        millis(3).await;
        let outcome = self.outside.records.save(save).await;
        self.outside.is_safe();
        self.cut.step("save carried out").await;
        *self.outside.answered.lock().unwrap() = Some(save.position.clone());
        outcome
    }

    async fn delete(&self, id: &SubscriptionId, owner: Option<&Ownership>) -> Result<bool, StorageError> {
        self.outside.records.delete(id, owner).await
    }

    async fn list(&self) -> Result<Vec<String>, StorageError> {
        self.outside.records.list().await
    }

    async fn not_dead(&self, id: &SubscriptionId, superseded: &Ownership) -> Result<(), StorageError> {
        self.outside.records.not_dead(id, superseded).await
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

/// One life: subscribes, pushes what is left of the script, waits for all of it, ends. It is cut at a step or, with
/// `ticks`, after so many turns of the scheduler.
fn live(outside: &Outside, (mode, every): (SaveMode, u32), cut: &Cut, ticks: Option<usize>) -> bool {
    outside.began.lock().unwrap().push(Vec::new());
    let runtime = runtime();
    let life = async {
        let storage = CuttableStorage { cut: cut.clone(), outside: outside.clone() };
        let subscriptions = DurableSubscriptions::new(outside.model.clone(), storage);
        let handler = Cuttable { cut: cut.clone(), outside: outside.clone() };
        let action = subscriptions.subscribe(ID, handler).save_mode(mode).save_every(every);
        let subscription = action.await.unwrap();
        while let Some(wait) = outside.push_next() {
            millis(wait).await;
            cut.step("pushed").await;
        }
        subscription.caught_up().await.unwrap();
        cut.step("caught up").await;
        subscription.drained().await.unwrap();
        cut.step("drained").await;
        subscription.shutdown().await.unwrap();
    };
    let ticking = async {
        let Some(ticks) = ticks else { return std::future::pending().await };
        for tick in 0..ticks {
            // Every other turn lets time pass, so that cuts fall between the tasks of one moment as well.
            match tick % 2 {
                0 => tokio::task::yield_now().await,
                _ => millis(if tick % 40 == 39 { 10_000 } else { 1 }).await,
            }
        }
    };
    let whole = runtime.block_on(async {
        tokio::select! {
            biased;
            () = cut.fired() => false,
            () = ticking => false,
            () = life => true,
        }
    });
    // Everything is dropped where it stands.
    drop(runtime);
    outside.is_safe();
    whole
}

/// The runs so far were cut; one that is not follows, and then everything must be right.
fn survive(outside: &Outside, kind: (SaveMode, u32), what: &str) {
    let stored = outside.stored().and_then(|record| record.position);
    let answered = outside.answered.lock().unwrap().clone();
    let finished_before = outside.finished.lock().unwrap().clone();
    assert!(live(outside, kind, &Cut::at(usize::MAX), None), "{what}");
    let pushed = outside.pushed.lock().unwrap();
    let began = outside.began.lock().unwrap();
    let finished = outside.finished.lock().unwrap();

    // Nothing lost, and the first handling of each in feed order.
    assert_eq!(pushed.len(), 9, "{what}");
    let firsts = |all: &[Checkpoint]| {
        let mut firsts: Vec<Checkpoint> = Vec::new();
        for position in all {
            if !firsts.contains(position) {
                firsts.push(position.clone());
            }
        }
        firsts
    };
    assert_eq!(firsts(&finished), *pushed, "{what}");

    // The last run was handed exactly what lies behind the stored position, in order.
    let last: Vec<Checkpoint> = began.last().unwrap().iter().map(|(position, _)| position.clone()).collect();
    let behind = |from: &Checkpoint| pushed.iter().filter(|event| event.is_beyond(from)).cloned().collect::<Vec<_>>();
    let expected = stored.as_ref().map_or_else(|| pushed.clone(), behind);
    assert_eq!(firsts(&last), expected, "{what}");

    // What is repeated lies behind the last answered save, is marked, and is bounded.
    let mut repeats = 0;
    for (position, may_be_repeat) in began.last().unwrap() {
        if finished_before.contains(position) {
            repeats += 1;
            assert!(may_be_repeat, "{what}: {position} is repeated and not marked");
            assert!(answered.as_ref().is_none_or(|answered| position.is_beyond(answered)), "{what}");
        }
    }
    // Write-through: what one save covers. Write-behind: as much again while that save is under way.
    let (mode, every) = kind;
    let bound = if mode == SaveMode::WriteThrough { every } else { 2 * every };
    // An event that fails once is begun twice.
    assert!(repeats <= bound + 1, "{what}: {repeats} repeats");
    let record = outside.stored().unwrap();
    assert_eq!((record.position.as_ref(), record.clean), (Some(pushed.last().unwrap()), true), "{what}");
}

const KINDS: [(SaveMode, u32); 4] =
    [(SaveMode::WriteBehind, 1), (SaveMode::WriteBehind, 3), (SaveMode::WriteThrough, 1), (SaveMode::WriteThrough, 3)];

#[test]
fn a_run_cut_at_any_step_loses_nothing() {
    for kind in KINDS {
        let whole = Cut::at(usize::MAX);
        assert!(live(&Outside::new(), kind, &whole, None));
        let steps = whole.steps.lock().unwrap().clone();
        let wanted =
            ["read", "claim sent", "handler begins", "handler ends", "save sent", "save carried out", "drained"];
        assert!(wanted.iter().all(|step| steps.contains(step)), "{steps:?}");
        for at in 0..=steps.len() {
            let outside = Outside::new();
            let is_whole = live(&outside, kind, &Cut::at(at), None);
            assert_eq!(is_whole, at == steps.len(), "{kind:?} at {at}");
            if !is_whole {
                let what = format!("{kind:?} cut at step {at} of {}, {}", steps.len(), steps[at]);
                survive(&outside, kind, &what);
            }
        }
    }
}

#[test]
fn a_run_cut_at_any_turn_of_the_scheduler_loses_nothing() {
    for kind in KINDS {
        let mut ticks = 0;
        loop {
            let outside = Outside::new();
            if live(&outside, kind, &Cut::at(usize::MAX), Some(ticks)) {
                break;
            }
            survive(&outside, kind, &format!("{kind:?} cut at turn {ticks}"));
            ticks += 1;
        }
        assert!(ticks > 200, "{ticks} turns");
    }
}

#[test]
fn a_run_cut_twice_loses_nothing() {
    for kind in KINDS {
        for first in (3..40).step_by(3) {
            for second in (1..25).step_by(2) {
                let outside = Outside::new();
                if !live(&outside, kind, &Cut::at(first), None) && !live(&outside, kind, &Cut::at(second), None) {
                    survive(&outside, kind, &format!("{kind:?} cut at step {first}, then {second}"));
                }
            }
        }
    }
}
