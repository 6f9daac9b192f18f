//! The seam to where dead letters are kept: sequences of events that were taken out of the way, one for each document.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::error::StorageError;
use crate::ids::{Namespace, Owner, SubscriptionId};
use crate::letter::{DocumentKey, EvictOutcome, HoldOutcome, Letter, NewLetter, PutOutcome, RemoveOutcome, Sequence};
use crate::model::Deployment;
use crate::storage::BoxFuture;

/// Keeps dead letters: for each subscription a sequence of letters for each document. Clones share their state.
///
/// A letter is durable when its write is answered, and there as a whole or not at all. A sequence exists from its first
/// letter on until its last one is removed; a removal of the last letter fails to end it if one was added meanwhile.
/// Whoever writes one runs the suite in `mongosub::conformance` (feature `conformance`) against it.
///
/// ```
/// use mongosub::memory::{self, MemoryDeadLetterStorage};
/// use mongosub::{ChangeEvent, DeadLetterStorage, DocumentKey, Epoch, NewLetter, PutOutcome, SubscriptionId, bson::doc};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (storage, id) = (MemoryDeadLetterStorage::new(), SubscriptionId::new("search_index_v3")?);
/// let event: ChangeEvent = memory::insert(7, doc! { "status": "paid" }).into();
/// let (key, position) = (DocumentKey::of(&event), event.position()?);
/// let letter = NewLetter::parked(id.clone(), key.clone(), Epoch(1), position, event.bytes().clone());
///
/// assert_eq!(storage.append(&letter).await?, PutOutcome::NoSequence); // nothing to wait behind
/// assert_eq!(storage.put(&letter).await?, PutOutcome::Stored);
/// assert_eq!(storage.put(&letter).await?, PutOutcome::AlreadyStored);
/// assert_eq!(storage.sequences(&id).await?[0].key, key);
/// # Ok(())
/// # }
/// ```
pub trait DeadLetterStorage: Clone + Send + Sync + 'static {
    /// Stores a letter at the end of its sequence, and begins the sequence if there is none. A position that the sequence
    /// has had already, also one whose letter was removed since, is not stored again.
    ///
    /// # Errors
    /// [`StorageError`]; after `Unavailable` the outcome is unknown, and putting the same again is harmless.
    ///
    /// # Cancel safety
    /// Dropped, the outcome is unknown, and putting the same again is harmless.
    fn put(&self, letter: &NewLetter) -> impl Future<Output = Result<PutOutcome, StorageError>> + Send;

    /// As [`put`](Self::put), if there is a sequence: whether there is one and the storing of it are one step.
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    ///
    /// # Cancel safety
    /// As for [`put`](Self::put).
    fn append(&self, letter: &NewLetter) -> impl Future<Output = Result<PutOutcome, StorageError>> + Send;

    /// The sequences of a subscription.
    ///
    /// # Errors
    /// [`StorageError`] when it could not be asked, or one cannot be read.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn sequences(&self, id: &SubscriptionId) -> impl Future<Output = Result<Vec<Sequence>, StorageError>> + Send;

    /// The letters of a sequence in feed order, without their events; none when there is no sequence.
    ///
    /// # Errors
    /// As for [`sequences`](Self::sequences).
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn letters(
        &self,
        id: &SubscriptionId,
        key: &DocumentKey,
    ) -> impl Future<Output = Result<Vec<Letter>, StorageError>> + Send;

    /// The BSON of a letter's event; `None` when the letter was removed meanwhile.
    ///
    /// # Errors
    /// As for [`sequences`](Self::sequences).
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn event(&self, letter: &Letter) -> impl Future<Output = Result<Option<Bytes>, StorageError>> + Send;

    /// Takes a sequence for so long, or keeps it for so long from now on if it is the owner's already.
    ///
    /// # Errors
    /// [`StorageError`]; after `Unavailable` the outcome is unknown, and taking it again is harmless.
    ///
    /// # Cancel safety
    /// Dropped, it may be held until the time has passed.
    fn hold(
        &self,
        id: &SubscriptionId,
        key: &DocumentKey,
        owner: &Owner,
        lease: Duration,
    ) -> impl Future<Output = Result<HoldOutcome, StorageError>> + Send;

    /// Lets a sequence go, if it is the owner's.
    ///
    /// # Errors
    /// [`StorageError`]; it is then let go when its time has passed.
    ///
    /// # Cancel safety
    /// Dropped, it may be held until its time has passed.
    fn release(
        &self,
        id: &SubscriptionId,
        key: &DocumentKey,
        owner: &Owner,
    ) -> impl Future<Output = Result<(), StorageError>> + Send;

    /// Writes down that one more attempt has failed, if the sequence is the owner's. Answers whether it is.
    ///
    /// # Errors
    /// [`StorageError`]; after `Unavailable` it may be written down, and again if it is asked again.
    ///
    /// # Cancel safety
    /// Dropped, it may or may not be written down.
    fn note_failure(
        &self,
        letter: &Letter,
        owner: &Owner,
        error: &[String],
    ) -> impl Future<Output = Result<bool, StorageError>> + Send;

    /// Removes a letter, if the sequence is the owner's; with the last one the sequence ends, if none was added
    /// meanwhile.
    ///
    /// # Errors
    /// [`StorageError`]; after `Unavailable` the outcome is unknown, and removing it again is harmless.
    ///
    /// # Cancel safety
    /// Dropped, the outcome is unknown, and removing it again is harmless.
    fn remove(
        &self,
        letter: &Letter,
        owner: &Owner,
    ) -> impl Future<Output = Result<RemoveOutcome, StorageError>> + Send;

    /// Deletes a sequence with all its letters, unless somebody holds it.
    ///
    /// # Errors
    /// [`StorageError`]; after `Unavailable` the outcome is unknown.
    ///
    /// # Cancel safety
    /// Dropped, the outcome is unknown.
    fn evict(
        &self,
        id: &SubscriptionId,
        key: &DocumentKey,
    ) -> impl Future<Output = Result<EvictOutcome, StorageError>> + Send;

    /// The collections this storage writes to, so that a scope around them can leave them out.
    fn namespaces(&self) -> Vec<Namespace> {
        Vec::new()
    }

    /// The deployment it writes to, as far as it shows itself. Default: none.
    ///
    /// # Errors
    /// [`StorageError`] when it could not be asked.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    fn deployment(&self) -> impl Future<Output = Result<Option<Deployment>, StorageError>> + Send {
        async { Ok(None) }
    }
}

/// A [`DeadLetterStorage`] whose type is not named: the same calls, boxed. Every storage is one.
pub trait DynDeadLetterStorage: Send + Sync + 'static {
    /// [`DeadLetterStorage::put`], boxed.
    fn dyn_put<'a>(&'a self, letter: &'a NewLetter) -> BoxFuture<'a, Result<PutOutcome, StorageError>>;
    /// [`DeadLetterStorage::append`], boxed.
    fn dyn_append<'a>(&'a self, letter: &'a NewLetter) -> BoxFuture<'a, Result<PutOutcome, StorageError>>;
    /// [`DeadLetterStorage::sequences`], boxed.
    fn dyn_sequences<'a>(&'a self, id: &'a SubscriptionId) -> BoxFuture<'a, Result<Vec<Sequence>, StorageError>>;
    /// [`DeadLetterStorage::letters`], boxed.
    fn dyn_letters<'a>(
        &'a self,
        id: &'a SubscriptionId,
        key: &'a DocumentKey,
    ) -> BoxFuture<'a, Result<Vec<Letter>, StorageError>>;
    /// [`DeadLetterStorage::event`], boxed.
    fn dyn_event<'a>(&'a self, letter: &'a Letter) -> BoxFuture<'a, Result<Option<Bytes>, StorageError>>;
    /// [`DeadLetterStorage::hold`], boxed.
    fn dyn_hold<'a>(
        &'a self,
        id: &'a SubscriptionId,
        key: &'a DocumentKey,
        owner: &'a Owner,
        lease: Duration,
    ) -> BoxFuture<'a, Result<HoldOutcome, StorageError>>;
    /// [`DeadLetterStorage::release`], boxed.
    fn dyn_release<'a>(
        &'a self,
        id: &'a SubscriptionId,
        key: &'a DocumentKey,
        owner: &'a Owner,
    ) -> BoxFuture<'a, Result<(), StorageError>>;
    /// [`DeadLetterStorage::note_failure`], boxed.
    fn dyn_note_failure<'a>(
        &'a self,
        letter: &'a Letter,
        owner: &'a Owner,
        error: &'a [String],
    ) -> BoxFuture<'a, Result<bool, StorageError>>;
    /// [`DeadLetterStorage::remove`], boxed.
    fn dyn_remove<'a>(
        &'a self,
        letter: &'a Letter,
        owner: &'a Owner,
    ) -> BoxFuture<'a, Result<RemoveOutcome, StorageError>>;
    /// [`DeadLetterStorage::evict`], boxed.
    fn dyn_evict<'a>(
        &'a self,
        id: &'a SubscriptionId,
        key: &'a DocumentKey,
    ) -> BoxFuture<'a, Result<EvictOutcome, StorageError>>;
    /// [`DeadLetterStorage::namespaces`].
    fn dyn_namespaces(&self) -> Vec<Namespace>;
    /// [`DeadLetterStorage::deployment`], boxed.
    fn dyn_deployment(&self) -> BoxFuture<'_, Result<Option<Deployment>, StorageError>>;
}

impl<S: DeadLetterStorage> DynDeadLetterStorage for S {
    fn dyn_put<'a>(&'a self, letter: &'a NewLetter) -> BoxFuture<'a, Result<PutOutcome, StorageError>> {
        Box::pin(self.put(letter))
    }
    fn dyn_append<'a>(&'a self, letter: &'a NewLetter) -> BoxFuture<'a, Result<PutOutcome, StorageError>> {
        Box::pin(self.append(letter))
    }
    fn dyn_sequences<'a>(&'a self, id: &'a SubscriptionId) -> BoxFuture<'a, Result<Vec<Sequence>, StorageError>> {
        Box::pin(self.sequences(id))
    }
    fn dyn_letters<'a>(
        &'a self,
        id: &'a SubscriptionId,
        key: &'a DocumentKey,
    ) -> BoxFuture<'a, Result<Vec<Letter>, StorageError>> {
        Box::pin(self.letters(id, key))
    }
    fn dyn_event<'a>(&'a self, letter: &'a Letter) -> BoxFuture<'a, Result<Option<Bytes>, StorageError>> {
        Box::pin(self.event(letter))
    }
    fn dyn_hold<'a>(
        &'a self,
        id: &'a SubscriptionId,
        key: &'a DocumentKey,
        owner: &'a Owner,
        lease: Duration,
    ) -> BoxFuture<'a, Result<HoldOutcome, StorageError>> {
        Box::pin(self.hold(id, key, owner, lease))
    }
    fn dyn_release<'a>(
        &'a self,
        id: &'a SubscriptionId,
        key: &'a DocumentKey,
        owner: &'a Owner,
    ) -> BoxFuture<'a, Result<(), StorageError>> {
        Box::pin(self.release(id, key, owner))
    }
    fn dyn_note_failure<'a>(
        &'a self,
        letter: &'a Letter,
        owner: &'a Owner,
        error: &'a [String],
    ) -> BoxFuture<'a, Result<bool, StorageError>> {
        Box::pin(self.note_failure(letter, owner, error))
    }
    fn dyn_remove<'a>(
        &'a self,
        letter: &'a Letter,
        owner: &'a Owner,
    ) -> BoxFuture<'a, Result<RemoveOutcome, StorageError>> {
        Box::pin(self.remove(letter, owner))
    }
    fn dyn_evict<'a>(
        &'a self,
        id: &'a SubscriptionId,
        key: &'a DocumentKey,
    ) -> BoxFuture<'a, Result<EvictOutcome, StorageError>> {
        Box::pin(self.evict(id, key))
    }
    fn dyn_namespaces(&self) -> Vec<Namespace> {
        self.namespaces()
    }
    fn dyn_deployment(&self) -> BoxFuture<'_, Result<Option<Deployment>, StorageError>> {
        Box::pin(self.deployment())
    }
}

impl DeadLetterStorage for Arc<dyn DynDeadLetterStorage> {
    async fn put(&self, letter: &NewLetter) -> Result<PutOutcome, StorageError> {
        (**self).dyn_put(letter).await
    }
    async fn append(&self, letter: &NewLetter) -> Result<PutOutcome, StorageError> {
        (**self).dyn_append(letter).await
    }
    async fn sequences(&self, id: &SubscriptionId) -> Result<Vec<Sequence>, StorageError> {
        (**self).dyn_sequences(id).await
    }
    async fn letters(&self, id: &SubscriptionId, key: &DocumentKey) -> Result<Vec<Letter>, StorageError> {
        (**self).dyn_letters(id, key).await
    }
    async fn event(&self, letter: &Letter) -> Result<Option<Bytes>, StorageError> {
        (**self).dyn_event(letter).await
    }
    async fn hold(
        &self,
        id: &SubscriptionId,
        key: &DocumentKey,
        owner: &Owner,
        lease: Duration,
    ) -> Result<HoldOutcome, StorageError> {
        (**self).dyn_hold(id, key, owner, lease).await
    }
    async fn release(&self, id: &SubscriptionId, key: &DocumentKey, owner: &Owner) -> Result<(), StorageError> {
        (**self).dyn_release(id, key, owner).await
    }
    async fn note_failure(&self, letter: &Letter, owner: &Owner, error: &[String]) -> Result<bool, StorageError> {
        (**self).dyn_note_failure(letter, owner, error).await
    }
    async fn remove(&self, letter: &Letter, owner: &Owner) -> Result<RemoveOutcome, StorageError> {
        (**self).dyn_remove(letter, owner).await
    }
    async fn evict(&self, id: &SubscriptionId, key: &DocumentKey) -> Result<EvictOutcome, StorageError> {
        (**self).dyn_evict(id, key).await
    }
    fn namespaces(&self) -> Vec<Namespace> {
        (**self).dyn_namespaces()
    }
    async fn deployment(&self) -> Result<Option<Deployment>, StorageError> {
        (**self).dyn_deployment().await
    }
}

/// Where it writes, as far as it says so.
impl fmt::Debug for dyn DynDeadLetterStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let namespaces: Vec<String> = self.dyn_namespaces().iter().map(ToString::to_string).collect();
        f.write_str(if namespaces.is_empty() { "somewhere" } else { "" })?;
        f.write_str(&namespaces.join(", "))
    }
}
