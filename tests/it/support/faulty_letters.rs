//! A dead letter storage that fails, hangs or loses its reply when told to.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mongosub::bytes::Bytes;
use mongosub::memory::MemoryDeadLetterStorage;
use mongosub::{
    DeadLetterStorage, Deployment, DocumentKey, EvictOutcome, HoldOutcome, Letter, Namespace, NewLetter, Owner,
    PutOutcome, RemoveOutcome, Sequence, StorageError, SubscriptionId,
};

use super::{Fault, unavailable};

#[derive(Clone)]
pub struct FaultyLetters {
    inner: MemoryDeadLetterStorage,
    script: Arc<Mutex<Script>>,
}

#[derive(Default)]
struct Script {
    puts: VecDeque<Fault>,
    removals: VecDeque<Fault>,
    lists: VecDeque<StorageError>,
    /// How many letters were sent to be stored.
    sent: usize,
    /// How many of them were asked about behind another one.
    appends: usize,
    lives_in: Option<(Deployment, Namespace)>,
}

impl FaultyLetters {
    pub fn new(inner: MemoryDeadLetterStorage) -> Self {
        Self { inner, script: Arc::default() }
    }

    pub fn inner(&self) -> &MemoryDeadLetterStorage {
        &self.inner
    }

    fn script(&self) -> std::sync::MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }

    /// The next letters meet these, one each.
    pub fn next_puts(&self, faults: impl IntoIterator<Item = Fault>) {
        self.script().puts.extend(faults);
    }

    pub fn next_removals(&self, faults: impl IntoIterator<Item = Fault>) {
        self.script().removals.extend(faults);
    }

    pub fn next_lists_fail(&self, errors: impl IntoIterator<Item = StorageError>) {
        self.script().lists.extend(errors);
    }

    /// What was set and is not met yet.
    pub fn heal(&self) {
        let mut script = self.script();
        script.puts.clear();
        script.removals.clear();
    }

    pub fn sent(&self) -> usize {
        self.script().sent
    }

    pub fn appends(&self) -> usize {
        self.script().appends
    }

    pub fn lives_in(&self, deployment: Deployment, namespace: Namespace) {
        self.script().lives_in = Some((deployment, namespace));
    }

    async fn meet<T>(
        &self,
        fault: Option<Fault>,
        call: impl Future<Output = Result<T, StorageError>> + Send,
    ) -> Result<T, StorageError> {
        match fault {
            None => call.await,
            Some(Fault::Fail) => Err(unavailable()),
            Some(Fault::Error(error)) => Err(error),
            Some(Fault::Hang) => std::future::pending().await,
            // Carried out at once: whoever dies meanwhile dies between the two.
            Some(Fault::Late(late)) => {
                let answer = call.await;
                tokio::time::sleep(late).await;
                answer
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

impl DeadLetterStorage for FaultyLetters {
    async fn put(&self, letter: &NewLetter) -> Result<PutOutcome, StorageError> {
        let fault = {
            let mut script = self.script();
            script.sent += 1;
            script.puts.pop_front()
        };
        self.meet(fault, self.inner.put(letter)).await
    }

    async fn append(&self, letter: &NewLetter) -> Result<PutOutcome, StorageError> {
        let fault = {
            let mut script = self.script();
            script.sent += 1;
            script.appends += 1;
            script.puts.pop_front()
        };
        self.meet(fault, self.inner.append(letter)).await
    }

    async fn sequences(&self, id: &SubscriptionId) -> Result<Vec<Sequence>, StorageError> {
        let fault = self.script().lists.pop_front();
        match fault {
            Some(error) => Err(error),
            None => self.inner.sequences(id).await,
        }
    }

    async fn letters(&self, id: &SubscriptionId, key: &DocumentKey) -> Result<Vec<Letter>, StorageError> {
        self.inner.letters(id, key).await
    }

    async fn event(&self, letter: &Letter) -> Result<Option<Bytes>, StorageError> {
        self.inner.event(letter).await
    }

    async fn hold(
        &self,
        id: &SubscriptionId,
        key: &DocumentKey,
        owner: &Owner,
        lease: Duration,
    ) -> Result<HoldOutcome, StorageError> {
        self.inner.hold(id, key, owner, lease).await
    }

    async fn release(&self, id: &SubscriptionId, key: &DocumentKey, owner: &Owner) -> Result<(), StorageError> {
        self.inner.release(id, key, owner).await
    }

    async fn note_failure(&self, letter: &Letter, owner: &Owner, error: &[String]) -> Result<bool, StorageError> {
        self.inner.note_failure(letter, owner, error).await
    }

    async fn remove(&self, letter: &Letter, owner: &Owner) -> Result<RemoveOutcome, StorageError> {
        let fault = self.script().removals.pop_front();
        self.meet(fault, self.inner.remove(letter, owner)).await
    }

    async fn evict(&self, id: &SubscriptionId, key: &DocumentKey) -> Result<EvictOutcome, StorageError> {
        self.inner.evict(id, key).await
    }

    fn namespaces(&self) -> Vec<Namespace> {
        self.script().lives_in.iter().map(|(_, namespace)| namespace.clone()).collect()
    }

    async fn deployment(&self) -> Result<Option<Deployment>, StorageError> {
        Ok(self.script().lives_in.as_ref().map(|(deployment, _)| deployment.clone()))
    }
}
