//! Dead letters in a MongoDB collection. What stands in which document is `letter_record.rs`'s; this file runs the
//! operations, in the order that leaves no half letter visible wherever they are cut.

use std::fmt;
use std::time::Duration;

use bson::{Document, RawDocumentBuf, doc};
use bytes::Bytes;
use futures::TryStreamExt;
use mongodb::Collection;
use mongodb::options::{ReadConcern, ReturnDocument};
use tracing::warn;

use super::call::{CallError, DEADLINE as LONG, call};
use super::checkpoint_storage::{DEADLINE, UPSERT_ATTEMPTS, deployment, majority, primary, simple};
use super::letter_record::{self as record, Head, Names};
use super::storage_error::{Need, is_duplicate_key, storage_error};
use crate::dead_letter::DeadLetterStorage;
use crate::error::StorageError;
use crate::ids::{Namespace, Owner, SubscriptionId};
use crate::letter::{
    DocumentKey, EvictOutcome, HoldOutcome, Letter, MAX_SEQUENCES, NewLetter, ParkingLimit, PutOutcome, RemoveOutcome,
    Sequence,
};
use crate::model::Deployment;

const FIND: &str = "find";
const WRITE: &str = "find, insert, update";
const REMOVE: &str = "find, remove";

/// Stores dead letters in a MongoDB collection, of all subscriptions that use it: one document for each sequence, one for
/// each letter, and more for an event above 4 MB.
///
/// Every write is made with write concern majority, every read is one of the primary with read concern majority, whatever
/// the handle it was made of says. No index is needed: everything is found by its `_id`, one by one or as a range. A
/// process killed in the middle of a write or a removal can leave a body behind that no sequence names; it takes room and
/// is never seen.
///
/// ```no_run
/// use mongosub::{ChangeStreamModel, DurableSubscriptions, MongoCheckpointStorage, MongoDeadLetterStorage};
/// use mongosub::{OnFailure, Then, bson::Document, mongodb::Database};
///
/// # fn example(db: Database) {
/// let subscriptions = DurableSubscriptions::new(
///     ChangeStreamModel::collection(&db.collection::<Document>("orders")),
///     MongoCheckpointStorage::new(&db.collection::<Document>("checkpoints")),
/// )
/// .dead_letters(MongoDeadLetterStorage::new(&db.collection::<Document>("dead_letters")))
/// .on_failure(OnFailure::retry(5).then(Then::DeadLetter));
/// # let _ = subscriptions;
/// # }
/// ```
#[derive(Clone)]
pub struct MongoDeadLetterStorage {
    stored: Collection<RawDocumentBuf>,
    name: String,
}

impl MongoDeadLetterStorage {
    /// A storage in this collection, whatever type it is a handle for. It need not exist. It may be that of the
    /// checkpoints, though then whoever looks at the one sees the other.
    pub fn new<T: Send + Sync>(collection: &Collection<T>) -> Self {
        Self { stored: collection.clone_with_type(), name: collection.namespace().to_string() }
    }

    fn error(&self, error: &CallError, action: &'static str) -> StorageError {
        storage_error(error, Need { action, resource: &self.name })
    }

    /// One document, without these fields.
    async fn find(&self, id: String, without: Document) -> Result<Option<RawDocumentBuf>, StorageError> {
        let stored = self.stored.clone();
        let find = async move {
            stored
                .find_one(doc! { "_id": id })
                .projection(without)
                .read_concern(ReadConcern::majority())
                .selection_criteria(primary())
                .collation(simple())
                .max_time(LONG)
                .await
        };
        call(LONG, find).await.map_err(|error| self.error(&error, FIND))
    }

    async fn find_head(&self, names: &Names) -> Result<Option<Head>, StorageError> {
        let id = names.head();
        let found = self.find(id.clone(), doc! { "key": 0 }).await?;
        found.map(|found| Head::decode(&id, &found)).transpose()
    }

    /// Runs a pipeline on one document and gives it as it is afterwards, without its key and its event.
    async fn update(
        &self,
        filter: Document,
        pipeline: Vec<Document>,
        upsert: bool,
    ) -> Result<Option<RawDocumentBuf>, StorageError> {
        let mut attempt = 1;
        loop {
            let (stored, filter, pipeline) = (self.stored.clone(), filter.clone(), pipeline.clone());
            let update = async move {
                stored
                    .find_one_and_update(filter, pipeline)
                    .upsert(upsert)
                    .projection(doc! { "key": 0, "event": 0 })
                    .return_document(ReturnDocument::After)
                    .write_concern(majority())
                    .collation(simple())
                    .max_time(LONG)
                    .await
            };
            match call(LONG, update).await {
                Err(error) if upsert && attempt < UPSERT_ATTEMPTS && is_duplicate_key(&error) => attempt += 1,
                answer => return answer.map_err(|error| self.error(&error, WRITE)),
            }
        }
    }

    async fn store(&self, letter: &NewLetter, begin: bool) -> Result<PutOutcome, StorageError> {
        let names = Names::of(&letter.subscription, &letter.key);
        match self.find_head(&names).await? {
            Some(head) => {
                if let Some(outcome) = head.outcome(letter) {
                    return Ok(outcome);
                }
            }
            None if !begin => return Ok(PutOutcome::NoSequence),
            None if self.count(&letter.subscription).await? >= MAX_SEQUENCES as u64 => {
                return Ok(PutOutcome::Full(ParkingLimit::Documents));
            }
            None => {}
        }
        for (at, part) in record::parts(&letter.event).enumerate() {
            let part = doc! { "$replaceWith": { "$mergeObjects": ["$$ROOT", { "event": record::binary(part) }] } };
            self.update(doc! { "_id": names.part(&letter.reference, at) }, vec![part], true).await?;
        }
        self.update(doc! { "_id": names.letter(&letter.reference) }, record::write_letter(letter), true).await?;
        let head = self.update(doc! { "_id": names.head() }, record::name_letter(letter), begin).await?;
        let outcome = match head {
            None => PutOutcome::NoSequence,
            Some(head) => {
                let outcome = Head::decode(&names.head(), &head)?.outcome(letter);
                outcome.ok_or_else(|| {
                    let message = "was left as it was by the server, for a reason this version cannot name";
                    record::unreadable(&names.head(), "letters", message.into())
                })?
            }
        };
        if outcome != PutOutcome::Stored {
            self.delete_bodies(&names, &[(&letter.reference, record::parts(&letter.event).len())]).await;
        }
        Ok(outcome)
    }

    /// How many sequences there are, as far as it matters.
    async fn count(&self, id: &SubscriptionId) -> Result<u64, StorageError> {
        let (stored, heads) = (self.stored.clone(), record::heads(id));
        let count = async move {
            stored
                .count_documents(heads)
                .limit(MAX_SEQUENCES as u64)
                .read_concern(ReadConcern::majority())
                .selection_criteria(primary())
                .collation(simple())
                .max_time(DEADLINE)
                .await
        };
        call(DEADLINE, count).await.map_err(|error| self.error(&error, FIND))
    }

    /// Deletes what no head names any more. What is left behind is never seen.
    async fn delete_bodies(&self, names: &Names, letters: &[(&str, usize)]) {
        let ids: Vec<_> =
            letters.iter().flat_map(|(reference, parts)| record::bodies(names, reference, *parts)).collect();
        let stored = self.stored.clone();
        let delete = async move {
            stored.delete_many(doc! { "_id": { "$in": ids } }).write_concern(majority()).collation(simple()).await
        };
        if let Err(error) = call(LONG, delete).await {
            let error = self.error(&error, REMOVE);
            warn!(collection = self.name, "the bodies of dead letters that are gone stay in {}: {error}", self.name);
        }
    }

    /// The letters of a head in their order, each with the parts of its event.
    async fn read_letters(
        &self,
        id: &SubscriptionId,
        key: &DocumentKey,
        names: &Names,
        head: &Head,
    ) -> Result<Vec<(Letter, usize)>, StorageError> {
        let ids: Vec<String> = head.references().into_iter().map(|reference| names.letter(reference)).collect();
        let (stored, wanted) = (self.stored.clone(), ids.clone());
        let find = async move {
            let found = stored
                .find(doc! { "_id": { "$in": wanted } })
                .projection(doc! { "event": 0 })
                .read_concern(ReadConcern::majority())
                .selection_criteria(primary())
                .collation(simple())
                .max_time(LONG)
                .await?;
            found.try_collect::<Vec<_>>().await
        };
        let found = call(LONG, find).await.map_err(|error| self.error(&error, FIND))?;
        let mut letters =
            found.iter().map(|letter| record::decode_letter(id, key, letter)).collect::<Result<Vec<_>, _>>()?;
        let mut ordered = Vec::with_capacity(letters.len());
        for (reference, id) in head.references().into_iter().zip(ids) {
            let at = letters.iter().position(|(letter, _)| letter.reference == reference);
            let at = at.ok_or_else(|| {
                record::unreadable(&id, "_id", "is missing: its letter is named and not there".into())
            })?;
            ordered.push(letters.swap_remove(at));
        }
        Ok(ordered)
    }
}

impl DeadLetterStorage for MongoDeadLetterStorage {
    async fn put(&self, letter: &NewLetter) -> Result<PutOutcome, StorageError> {
        self.store(letter, true).await
    }

    async fn append(&self, letter: &NewLetter) -> Result<PutOutcome, StorageError> {
        self.store(letter, false).await
    }

    async fn sequences(&self, id: &SubscriptionId) -> Result<Vec<Sequence>, StorageError> {
        let (stored, heads) = (self.stored.clone(), record::heads(id));
        let find = async move {
            let pipeline = [doc! { "$match": heads }, doc! { "$project": record::overview() }];
            let found = stored
                .aggregate(pipeline)
                .with_type::<RawDocumentBuf>()
                .read_concern(ReadConcern::majority())
                .selection_criteria(primary())
                .collation(simple())
                .max_time(LONG)
                .await?;
            found.try_collect::<Vec<_>>().await
        };
        let found = call(LONG, find).await.map_err(|error| self.error(&error, FIND))?;
        found.iter().map(|sequence| record::decode_sequence(sequence)).collect()
    }

    async fn letters(&self, id: &SubscriptionId, key: &DocumentKey) -> Result<Vec<Letter>, StorageError> {
        let names = Names::of(id, key);
        for _ in 0..UPSERT_ATTEMPTS {
            let Some(head) = self.find_head(&names).await? else { return Ok(Vec::new()) };
            match self.read_letters(id, key, &names, &head).await {
                Ok(letters) => return Ok(letters.into_iter().map(|(letter, _)| letter).collect()),
                // Removed since the head was read; a letter that is missing for good is missing again.
                Err(StorageError::Unreadable { field, .. }) if field == "_id" => {}
                Err(error) => return Err(error),
            }
        }
        let Some(head) = self.find_head(&names).await? else { return Ok(Vec::new()) };
        Ok(self.read_letters(id, key, &names, &head).await?.into_iter().map(|(letter, _)| letter).collect())
    }

    async fn event(&self, letter: &Letter) -> Result<Option<Bytes>, StorageError> {
        let names = Names::of(&letter.subscription, &letter.key);
        let id = names.letter(&letter.reference);
        let Some(found) = self.find(id.clone(), doc! { "none": 0 }).await? else { return Ok(None) };
        let (_, parts) = record::decode_letter(&letter.subscription, &letter.key, &found)?;
        if parts == 0 {
            return Ok(Some(record::decode_event(&id, &found)?.into()));
        }
        let mut event = Vec::with_capacity(usize::try_from(letter.bytes).unwrap_or(0));
        for part in 0..parts {
            let id = names.part(&letter.reference, part);
            let Some(found) = self.find(id.clone(), doc! { "none": 0 }).await? else { return Ok(None) };
            event.extend(record::decode_event(&id, &found)?);
        }
        Ok(Some(event.into()))
    }

    async fn hold(
        &self,
        id: &SubscriptionId,
        key: &DocumentKey,
        owner: &Owner,
        lease: Duration,
    ) -> Result<HoldOutcome, StorageError> {
        let head = Names::of(id, key).head();
        let Some(found) = self.update(doc! { "_id": &head }, record::hold(owner, lease), false).await? else {
            return Ok(HoldOutcome::NoSequence);
        };
        match Head::decode(&head, &found)?.lease {
            Some(lease) if lease.owner == owner.as_str() => Ok(HoldOutcome::Held),
            Some(lease) => Ok(HoldOutcome::HeldBy { owner: Owner::new(lease.owner), until: lease.until }),
            None => Err(record::unreadable(&head, "lease", "is missing after it was set".into())),
        }
    }

    async fn release(&self, id: &SubscriptionId, key: &DocumentKey, owner: &Owner) -> Result<(), StorageError> {
        let filter = record::owned(Names::of(id, key).head(), owner);
        self.update(filter, vec![doc! { "$unset": "lease" }], false).await?;
        Ok(())
    }

    async fn note_failure(&self, letter: &Letter, owner: &Owner, error: &[String]) -> Result<bool, StorageError> {
        let names = Names::of(&letter.subscription, &letter.key);
        let head = self.find_head(&names).await?;
        if head.and_then(|head| head.lease).is_none_or(|lease| lease.owner != owner.as_str()) {
            return Ok(false);
        }
        let filter = doc! { "_id": names.letter(&letter.reference) };
        self.update(filter, record::note_failure(error), false).await?;
        Ok(true)
    }

    async fn remove(&self, letter: &Letter, owner: &Owner) -> Result<RemoveOutcome, StorageError> {
        let names = Names::of(&letter.subscription, &letter.key);
        let Some(head) = self.find_head(&names).await? else { return Ok(RemoveOutcome::NoSequence) };
        if head.lease.as_ref().is_none_or(|lease| lease.owner != owner.as_str()) {
            return Ok(RemoveOutcome::NotHeld);
        }
        let Some(entry) = head.entry_of(&letter.reference) else { return Ok(RemoveOutcome::Removed) };
        let found = self.find(names.letter(&letter.reference), doc! { "event": 0 }).await?;
        let parts = match found {
            Some(found) => record::decode_letter(&letter.subscription, &letter.key, &found)?.1,
            None => 0,
        };
        let (stored, mut last) = (self.stored.clone(), record::owned(names.head(), owner));
        last.insert("letters", vec![entry]);
        let delete = async move { stored.delete_one(last).write_concern(majority()).collation(simple()).await };
        let ended = call(DEADLINE, delete).await.map_err(|error| self.error(&error, REMOVE))?.deleted_count > 0;
        if !ended {
            let others =
                doc! { "$filter": { "input": "$letters", "cond": { "$ne": ["$$this", { "$literal": entry }] } } };
            let without = vec![doc! { "$set": { "letters": others } }];
            if self.update(record::owned(names.head(), owner), without, false).await?.is_none() {
                return Ok(RemoveOutcome::NotHeld);
            }
        }
        self.delete_bodies(&names, &[(&letter.reference, parts)]).await;
        Ok(if ended { RemoveOutcome::Ended } else { RemoveOutcome::Removed })
    }

    async fn evict(&self, id: &SubscriptionId, key: &DocumentKey) -> Result<EvictOutcome, StorageError> {
        let names = Names::of(id, key);
        let (stored, head) = (self.stored.clone(), names.head());
        let delete = async move {
            let free = doc! { "_id": head, "$expr": record::is_free() };
            stored.find_one_and_delete(free).write_concern(majority()).collation(simple()).max_time(DEADLINE).await
        };
        let deleted = call(DEADLINE, delete).await.map_err(|error| self.error(&error, REMOVE))?;
        let Some(deleted) = deleted else {
            return Ok(match self.find_head(&names).await?.and_then(|head| head.lease) {
                Some(lease) => EvictOutcome::HeldBy { owner: Owner::new(lease.owner), until: lease.until },
                None => EvictOutcome::NoSequence,
            });
        };
        let head = Head::decode(&names.head(), &deleted)?;
        // They are gone already. What cannot be read of them is left behind.
        let parts = self.read_letters(id, key, &names, &head).await.unwrap_or_default();
        let of = |reference: &str| {
            parts.iter().find(|(letter, _)| letter.reference == reference).map_or(0, |(_, parts)| *parts)
        };
        let bodies: Vec<_> = head.references().into_iter().map(|reference| (reference, of(reference))).collect();
        self.delete_bodies(&names, &bodies).await;
        Ok(EvictOutcome::Evicted(bodies.len()))
    }

    fn namespaces(&self) -> Vec<Namespace> {
        let namespace = self.stored.namespace();
        vec![Namespace::new(namespace.db, namespace.coll)]
    }

    async fn deployment(&self) -> Result<Option<Deployment>, StorageError> {
        deployment(self.stored.client()).await.map_err(|error| self.error(&error, "hello"))
    }
}

/// The collection, and nothing of the connection: that may hold a password.
impl fmt::Debug for MongoDeadLetterStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MongoDeadLetterStorage").field("collection", &self.name).finish_non_exhaustive()
    }
}
