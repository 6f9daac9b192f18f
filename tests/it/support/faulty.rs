//! A checkpoint storage that fails, hangs, answers late or loses its reply when told to, and keeps a journal.

mod transactions;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mongosub::memory::MemoryCheckpointStorage;
use mongosub::{
    Checkpoint, CheckpointStorage, Claim, ClaimOutcome, Deployment, Hand, Kind, Namespace, Ownership, Record, Save,
    SaveOutcome, StorageError, SubscriptionId,
};
use tokio::sync::watch;
use tokio::time::Instant;

/// What happens to one save.
#[derive(Debug, Clone)]
pub enum Fault {
    /// Not stored, and said so.
    Fail,
    /// Not answered before `release`; then carried out.
    Hang,
    /// Carried out and answered after this long.
    Late(Duration),
    /// Not stored, and said so after this long.
    FailLate(Duration),
    /// Carried out, but the reply is lost: an error comes instead.
    LoseReply,
    /// Answered with this error, not stored.
    Error(StorageError),
}

/// A save as it was sent.
#[derive(Debug, Clone)]
pub struct Saved {
    pub at: Instant,
    pub position: Checkpoint,
    pub kind: Kind,
    pub clean: bool,
    pub hand: Hand,
}

#[derive(Clone)]
pub struct FaultyStorage {
    inner: MemoryCheckpointStorage,
    script: Arc<Mutex<Script>>,
    hanging: Arc<watch::Sender<bool>>,
}

#[derive(Default)]
struct Script {
    faults: VecDeque<Fault>,
    every: Option<Fault>,
    reads: VecDeque<StorageError>,
    claims: VecDeque<Fault>,
    deletes: VecDeque<StorageError>,
    sent: Vec<Saved>,
    reads_sent: usize,
    deployment: Option<Deployment>,
    namespaces: Vec<Namespace>,
    begins: VecDeque<Fault>,
    no_begins: bool,
    commits: VecDeque<Option<Fault>>,
    commits_sent: usize,
    roll_backs: u32,
}

pub fn unavailable() -> StorageError {
    StorageError::Unavailable { message: "scripted".into() }
}

impl FaultyStorage {
    pub fn new(inner: MemoryCheckpointStorage) -> Self {
        Self { inner, script: Arc::default(), hanging: Arc::new(watch::Sender::new(true)) }
    }

    /// The records, past all faults.
    pub fn inner(&self) -> &MemoryCheckpointStorage {
        &self.inner
    }

    fn script(&self) -> std::sync::MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }

    /// The next saves meet these, one each.
    pub fn next_saves(&self, faults: impl IntoIterator<Item = Fault>) {
        self.script().faults.extend(faults);
    }

    /// Every save meets this, until `heal`.
    pub fn every_save(&self, fault: Fault) {
        self.script().every = Some(fault);
    }

    pub fn heal(&self) {
        self.script().every = None;
    }

    /// What was set for the next saves and is not met yet.
    pub fn forget_faults(&self) {
        self.script().faults.clear();
    }

    pub fn next_reads_fail(&self, errors: impl IntoIterator<Item = StorageError>) {
        self.script().reads.extend(errors);
    }

    pub fn next_claims(&self, faults: impl IntoIterator<Item = Fault>) {
        self.script().claims.extend(faults);
    }

    pub fn next_deletes_fail(&self, errors: impl IntoIterator<Item = StorageError>) {
        self.script().deletes.extend(errors);
    }

    /// Lets everything that hangs, and will hang, go on.
    pub fn release(&self) {
        self.hanging.send_replace(false);
    }

    /// It lives in this deployment and writes to these collections.
    pub fn lives_in(&self, deployment: Deployment, namespaces: Vec<Namespace>) {
        let mut script = self.script();
        script.deployment = Some(deployment);
        script.namespaces = namespaces;
    }

    /// The saves sent so far.
    pub fn sent(&self) -> Vec<Saved> {
        self.script().sent.clone()
    }

    /// When they were sent, in milliseconds since `since`.
    pub fn sent_ms(&self, since: Instant) -> Vec<u128> {
        self.sent().iter().map(|save| (save.at - since).as_millis()).collect()
    }

    /// What was sent, positions alone.
    pub fn sent_positions(&self) -> Vec<Checkpoint> {
        self.sent().into_iter().map(|save| save.position).collect()
    }

    pub fn reads_sent(&self) -> usize {
        self.script().reads_sent
    }

    async fn released(&self) {
        let mut hanging = self.hanging.subscribe();
        hanging.wait_for(|hanging| !hanging).await.unwrap();
    }

    /// Carries a call out as the fault has it; the call is only polled when it is to be carried out.
    async fn meet<T>(
        &self,
        fault: Option<Fault>,
        call: impl Future<Output = Result<T, StorageError>> + Send,
    ) -> Result<T, StorageError> {
        match fault {
            None => call.await,
            Some(Fault::Fail) => Err(unavailable()),
            Some(Fault::Error(error)) => Err(error),
            Some(Fault::Hang) => {
                self.released().await;
                call.await
            }
            Some(Fault::Late(late)) => {
                tokio::time::sleep(late).await;
                call.await
            }
            Some(Fault::FailLate(late)) => {
                tokio::time::sleep(late).await;
                Err(unavailable())
            }
            Some(Fault::LoseReply) => {
                call.await?;
                Err(unavailable())
            }
        }
    }
}

impl CheckpointStorage for FaultyStorage {
    async fn read(&self, id: &SubscriptionId) -> Result<Option<Record>, StorageError> {
        let fault = {
            let mut script = self.script();
            script.reads_sent += 1;
            script.reads.pop_front()
        };
        match fault {
            Some(error) => Err(error),
            None => self.inner.read(id).await,
        }
    }

    async fn claim(&self, claim: &Claim) -> Result<ClaimOutcome, StorageError> {
        let fault = self.script().claims.pop_front();
        self.meet(fault, self.inner.claim(claim)).await
    }

    async fn save(&self, save: &Save) -> Result<SaveOutcome, StorageError> {
        let fault = {
            let mut script = self.script();
            let Save { position, kind, clean, hand, .. } = save.clone();
            script.sent.push(Saved { at: Instant::now(), position, kind, clean, hand });
            script.faults.pop_front().or_else(|| script.every.clone())
        };
        self.meet(fault, self.inner.save(save)).await
    }

    async fn delete(&self, id: &SubscriptionId, owner: Option<&Ownership>) -> Result<bool, StorageError> {
        let fault = self.script().deletes.pop_front();
        match fault {
            Some(error) => Err(error),
            None => self.inner.delete(id, owner).await,
        }
    }

    async fn list(&self) -> Result<Vec<String>, StorageError> {
        self.inner.list().await
    }

    async fn not_dead(&self, id: &SubscriptionId, superseded: &Ownership) -> Result<(), StorageError> {
        self.inner.not_dead(id, superseded).await
    }

    fn namespaces(&self) -> Vec<Namespace> {
        self.script().namespaces.clone()
    }

    async fn deployment(&self) -> Result<Option<Deployment>, StorageError> {
        Ok(self.script().deployment.clone())
    }
}
