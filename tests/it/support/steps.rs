//! A model and a storage that write every call of their seams into one journal, can be cut at any of them, and do
//! what a test wants at any of them.

use std::collections::HashMap;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard};

use mongosub::memory::{MemoryModel, MemoryReader};
use mongosub::{
    ChangeEvent, Checkpoint, CheckpointStorage, Claim, ClaimOutcome, Deployment, DurableSubscriptions, Fingerprint,
    Identity, Namespace, Ownership, Plan, Record, Save, SaveOutcome, SourceError, StorageError, SubscribeError,
    SubscriptionId, SubscriptionModel,
};

use super::{FaultyStorage, World};

/// Where a call is cut: its caller never hears of it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Not carried out.
    Before,
    /// Carried out.
    After,
}

#[derive(Clone, Default)]
pub struct Steps {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    calls: Vec<&'static str>,
    cut: Option<(usize, Cut)>,
    then: HashMap<(&'static str, usize), Box<dyn FnOnce() + Send>>,
}

impl Steps {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    /// The n-th call of all, from 0, is cut.
    pub fn cut(&self, call: usize, cut: Cut) {
        self.inner().cut = Some((call, cut));
    }

    /// Behind the n-th call of this name, from 1, this is done.
    pub fn after(&self, name: &'static str, nth: usize, then: impl FnOnce() + Send + 'static) {
        self.inner().then.insert((name, nth), Box::new(then));
    }

    pub fn calls(&self) -> Vec<&'static str> {
        self.inner().calls.clone()
    }

    pub fn count(&self, name: &str) -> usize {
        self.inner().calls.iter().filter(|call| **call == name).count()
    }

    async fn step<T>(&self, name: &'static str, call: impl Future<Output = T> + Send) -> T {
        let cut = {
            let mut inner = self.inner();
            inner.calls.push(name);
            let number = inner.calls.len() - 1;
            inner.cut.and_then(|(at, cut)| (at == number).then_some(cut))
        };
        if cut == Some(Cut::Before) {
            return pending().await;
        }
        let answer = call.await;
        let nth = self.count(name);
        let then = self.inner().then.remove(&(name, nth));
        if let Some(then) = then {
            then();
        }
        if cut == Some(Cut::After) {
            return pending().await;
        }
        answer
    }
}

/// A process whose every step can be seen.
pub struct Stepped {
    pub steps: Steps,
    pub subscriptions: DurableSubscriptions<SteppedModel, SteppedStorage>,
}

impl World {
    /// Another process over the same feed and the same storage, faults included.
    pub fn stepped(&self) -> Stepped {
        let steps = Steps::default();
        let model = SteppedModel { inner: self.model.clone(), steps: steps.clone() };
        let storage = SteppedStorage { inner: self.storage.clone(), steps: steps.clone() };
        Stepped { steps, subscriptions: DurableSubscriptions::new(model, storage) }
    }
}

#[derive(Clone)]
pub struct SteppedModel {
    inner: MemoryModel,
    steps: Steps,
}

impl SubscriptionModel for SteppedModel {
    type Reader = MemoryReader;

    async fn open(&self, from: Option<&Checkpoint>, plan: &Plan) -> Result<MemoryReader, SourceError> {
        self.steps.step("open", self.inner.open(from, plan)).await
    }

    fn check(&self, plan: &Plan) -> Result<Fingerprint, SubscribeError> {
        self.inner.check(plan)
    }

    async fn global_checkpoint(&self) -> Result<Option<Checkpoint>, SourceError> {
        self.steps.step("global_checkpoint", self.inner.global_checkpoint()).await
    }

    async fn head(&self) -> Result<Checkpoint, SourceError> {
        self.steps.step("head", self.inner.head()).await
    }

    async fn earliest(&self) -> Result<Checkpoint, SourceError> {
        self.steps.step("earliest", self.inner.earliest()).await
    }

    async fn is_readable(&self, position: &Checkpoint) -> Result<bool, SourceError> {
        self.inner.is_readable(position).await
    }

    async fn identity(&self) -> Result<Identity, SourceError> {
        self.steps.step("identity", self.inner.identity()).await
    }

    async fn outline(&self, position: &Checkpoint) -> Result<Option<ChangeEvent>, SourceError> {
        self.inner.outline(position).await
    }

    async fn has_event(&self, position: &Checkpoint) -> Result<bool, SourceError> {
        self.steps.step("has_event", self.inner.has_event(position)).await
    }

    async fn ended_since(&self, from: &Checkpoint, collection_uuid: &str) -> Result<bool, SourceError> {
        self.steps.step("ended_since", self.inner.ended_since(from, collection_uuid)).await
    }
}

#[derive(Clone)]
pub struct SteppedStorage {
    inner: FaultyStorage,
    steps: Steps,
}

impl CheckpointStorage for SteppedStorage {
    async fn read(&self, id: &SubscriptionId) -> Result<Option<Record>, StorageError> {
        self.steps.step("read", self.inner.read(id)).await
    }

    async fn claim(&self, claim: &Claim) -> Result<ClaimOutcome, StorageError> {
        self.steps.step("claim", self.inner.claim(claim)).await
    }

    async fn save(&self, save: &Save) -> Result<SaveOutcome, StorageError> {
        self.steps.step("save", self.inner.save(save)).await
    }

    async fn delete(&self, id: &SubscriptionId, owner: Option<&Ownership>) -> Result<bool, StorageError> {
        self.inner.delete(id, owner).await
    }

    async fn list(&self) -> Result<Vec<String>, StorageError> {
        self.inner.list().await
    }

    async fn not_dead(&self, id: &SubscriptionId, superseded: &Ownership) -> Result<(), StorageError> {
        self.inner.not_dead(id, superseded).await
    }

    fn namespaces(&self) -> Vec<Namespace> {
        self.inner.namespaces()
    }

    async fn deployment(&self) -> Result<Option<Deployment>, StorageError> {
        self.steps.step("deployment", self.inner.deployment()).await
    }
}
