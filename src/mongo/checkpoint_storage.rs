//! Checkpoints in a MongoDB collection: one document per subscription id. What stands in it is `record.rs`'s, what a
//! write tests is `record_pipeline.rs`'s; this file runs the operations and says what their answers mean.

use std::fmt;
use std::time::Duration;

use bson::{Document, RawDocumentBuf, doc};
use futures::TryStreamExt;
use mongodb::options::{
    Acknowledgment, Collation, ReadConcern, ReadPreference, ReturnDocument, SelectionCriteria, WriteConcern,
};
use mongodb::{Client, Collection};

use super::call::{CallError, call};
use super::record::{OURS, decode};
use super::record_pipeline;
use super::storage_error::{Need, is_duplicate_key, storage_error};
use crate::error::StorageError;
use crate::ids::{Namespace, Ownership, SubscriptionId};
use crate::model::Deployment;
use crate::storage::{CheckpointStorage, Claim, ClaimOutcome, Hand, Record, Save, SaveOutcome};

/// How long one operation is waited for, and how long the server works at it.
pub(super) const DEADLINE: Duration = Duration::from_secs(10);
/// How often an upsert that met another one is tried: only a server before 5.0 does not try again by itself.
pub(super) const UPSERT_ATTEMPTS: usize = 10;

pub(super) const FIND: &str = "find";
pub(super) const WRITE: &str = "find, insert, update";
const REMOVE: &str = "remove";

/// Stores checkpoints in a MongoDB collection, one document per subscription id, `_id` = the id.
///
/// Every write is one atomic operation with write concern majority, every read one of the primary with read concern
/// majority, whatever the handle it was made of says; an operation that is not answered within ten seconds is
/// [`StorageError::Unavailable`], and goes on to its end nevertheless. Two processes that use one id never both store
/// a position: each write carries the fence and the owner of its claim.
///
/// Fields it does not know are kept. A record it cannot read is refused and left byte for byte as it is. A collection
/// written by the checkpoint storage of the Occurrent library is taken over as it is, and the other way round.
///
/// ```no_run
/// use mongosub::{CheckpointStorage, Claim, MongoCheckpointStorage, SubscriptionId};
///
/// # async fn example(db: mongosub::mongodb::Database) -> Result<(), Box<dyn std::error::Error>> {
/// let storage = MongoCheckpointStorage::new(&db.collection::<mongosub::bson::Document>("checkpoints"));
/// for id in storage.list().await? {
///     let record = storage.read(&SubscriptionId::new(id)?).await?;
///     println!("{record:?}");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct MongoCheckpointStorage {
    /// Raw, because a record of unknown fields need not be what serde takes for a document.
    pub(super) records: Collection<RawDocumentBuf>,
    name: String,
}

impl MongoCheckpointStorage {
    /// A storage in this collection, whatever type it is a handle for. It need not exist, and may hold other documents:
    /// their `_id`s must not be subscription ids.
    pub fn new<T: Send + Sync>(collection: &Collection<T>) -> Self {
        Self { records: collection.clone_with_type(), name: collection.namespace().to_string() }
    }

    /// Runs a pipeline on one record and gives the record as it is afterwards. It is big, so each attempt makes its own
    /// instead of keeping one for the next.
    async fn update(
        &self,
        id: &SubscriptionId,
        pipeline: impl Fn() -> Vec<Document>,
        upsert: bool,
    ) -> Result<Option<RawDocumentBuf>, StorageError> {
        let mut attempt = 1;
        loop {
            let (records, filter, pipeline) = (self.records.clone(), by_id(id), pipeline());
            let update = async move {
                records
                    .find_one_and_update(filter, pipeline)
                    .upsert(upsert)
                    .return_document(ReturnDocument::After)
                    .write_concern(majority())
                    .collation(simple())
                    .max_time(DEADLINE)
                    .await
            };
            match call(DEADLINE, update).await {
                Err(error) if upsert && attempt < UPSERT_ATTEMPTS && is_duplicate_key(&error) => attempt += 1,
                answer => return answer.map_err(|error| self.error(&error, WRITE)),
            }
        }
    }

    pub(super) fn error(&self, error: &CallError, action: &'static str) -> StorageError {
        storage_error(error, Need { action, resource: &self.name })
    }
}

impl CheckpointStorage for MongoCheckpointStorage {
    async fn read(&self, id: &SubscriptionId) -> Result<Option<Record>, StorageError> {
        let (records, filter) = (self.records.clone(), by_id(id));
        let find = async move {
            records
                .find_one(filter)
                .read_concern(ReadConcern::majority())
                .selection_criteria(primary())
                .collation(simple())
                .max_time(DEADLINE)
                .await
        };
        let stored = call(DEADLINE, find).await.map_err(|error| self.error(&error, FIND))?;
        stored.map(|stored| decode(id, &stored)).transpose()
    }

    async fn claim(&self, claim: &Claim) -> Result<ClaimOutcome, StorageError> {
        // Whoever is superseded by it may be gone, and the record locked by its transaction.
        self.end_session(&claim.id).await;
        let upsert = claim.expect.is_none();
        let Some(stored) = self.update(&claim.id, || record_pipeline::claim(claim), upsert).await? else {
            return Ok(ClaimOutcome::Gone);
        };
        let record = decode(&claim.id, &stored)?;
        match (&record.ownership, &claim.expect) {
            // Also when this very claim had been made before, and its answer was lost.
            (Some(now), _) if now.owner == claim.owner => Ok(ClaimOutcome::Claimed(record)),
            (_, Some(_)) => {
                let (owner, since) = (record.ownership.map(|now| now.owner), record.claimed_at);
                Ok(ClaimOutcome::Superseded { owner, since })
            }
            // The server refused what was read just now: the two ways to read a record differ.
            (_, None) => Err(StorageError::Unreadable {
                id: claim.id.to_string(),
                field: OURS.into(),
                message: "was refused by the server, for a reason this version cannot name".into(),
            }),
        }
    }

    async fn save(&self, save: &Save) -> Result<SaveOutcome, StorageError> {
        let Some(stored) = self.update(&save.id, || record_pipeline::save(save), false).await? else {
            return Ok(SaveOutcome::Gone);
        };
        outcome(save, &stored)
    }

    async fn delete(&self, id: &SubscriptionId, owner: Option<&Ownership>) -> Result<bool, StorageError> {
        let (records, mut filter) = (self.records.clone(), by_id(id));
        if let Some(Ownership { fence, owner }) = owner {
            filter.insert("mongosub.fence", fence.0);
            filter.insert("mongosub.owner", owner.as_str());
        }
        let delete = async move { records.delete_one(filter).write_concern(majority()).collation(simple()).await };
        let deleted = call(DEADLINE, delete).await.map_err(|error| self.error(&error, REMOVE))?;
        Ok(deleted.deleted_count > 0)
    }

    async fn not_dead(&self, id: &SubscriptionId, superseded: &Ownership) -> Result<(), StorageError> {
        let (records, mut filter) = (self.records.clone(), by_id(id));
        filter.insert("mongosub.over", superseded.fence.0);
        let update = async move {
            let update = records.update_one(filter, record_pipeline::not_dead());
            update.write_concern(majority()).collation(simple()).await
        };
        call(DEADLINE, update).await.map(|_| ()).map_err(|error| self.error(&error, WRITE))
    }

    async fn list(&self) -> Result<Vec<String>, StorageError> {
        let records = self.records.clone_with_type::<Id>();
        let find = async move {
            let found = records
                .find(doc! { "_id": { "$type": "string" } })
                .projection(doc! { "_id": 1 })
                .read_concern(ReadConcern::majority())
                .selection_criteria(primary())
                .max_time(DEADLINE)
                .await?;
            found.map_ok(|Id { id }| id).try_collect::<Vec<_>>().await
        };
        let mut ids = call(DEADLINE, find).await.map_err(|error| self.error(&error, FIND))?;
        ids.sort_unstable();
        Ok(ids)
    }

    fn namespaces(&self) -> Vec<Namespace> {
        let namespace = self.records.namespace();
        vec![Namespace::new(namespace.db, namespace.coll)]
    }

    async fn deployment(&self) -> Result<Option<Deployment>, StorageError> {
        deployment(self.records.client()).await.map_err(|error| self.error(&error, "hello"))
    }
}

/// The collection, and nothing of the connection: that may hold a password.
impl fmt::Debug for MongoCheckpointStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MongoCheckpointStorage").field("collection", &self.name).finish_non_exhaustive()
    }
}

/// The deployment that a client is one of, as far as it shows itself.
pub(super) async fn deployment(client: &Client) -> Result<Option<Deployment>, CallError> {
    let database = client.database("admin");
    let hello = async move { database.run_command(doc! { "hello": 1 }).selection_criteria(primary()).await };
    let hello = call(DEADLINE, hello).await?;
    let Ok(set_name) = hello.get_str("setName") else { return Ok(None) };
    let members = ["hosts", "passives"].into_iter().filter_map(|field| hello.get_array(field).ok()).flatten();
    let hosts = members.filter_map(|host| host.as_str().map(str::to_owned)).collect();
    Ok(Some(Deployment { set_name: set_name.to_owned(), hosts }))
}

/// What became of a save, by the record as it is behind it.
pub(super) fn outcome(save: &Save, stored: &RawDocumentBuf) -> Result<SaveOutcome, StorageError> {
    let record = decode(&save.id, stored)?;
    if record.ownership.as_ref() != Some(&save.ownership) {
        let (owner, since) = (record.ownership.map(|now| now.owner), record.claimed_at);
        return Ok(SaveOutcome::Superseded { owner, since });
    }
    let is_stored = match &save.hand {
        Hand::Holds(in_hand) => record.in_hand.as_ref() == Some(in_hand) && !record.is_beyond(save),
        _ => record.epoch == Some(save.epoch) && record.position.as_ref() == Some(&save.position),
    };
    Ok(if is_stored { SaveOutcome::Saved { at: record.saved_at } } else { SaveOutcome::NotAhead })
}

/// The `_id` of a document, and nothing else.
#[derive(serde::Deserialize)]
struct Id {
    #[serde(rename = "_id")]
    id: String,
}

pub(super) fn by_id(id: &SubscriptionId) -> Document {
    doc! { "_id": id.as_str() }
}

/// Ids, owners and tokens are compared byte for byte, whatever the collection's own collation is.
pub(super) fn simple() -> Collation {
    Collation::builder().locale("simple").build()
}

pub(super) fn primary() -> SelectionCriteria {
    SelectionCriteria::ReadPreference(ReadPreference::Primary)
}

/// With a limit, so that a write nobody waits for any longer does not keep its connection.
pub(super) fn majority() -> WriteConcern {
    WriteConcern::builder().w(Acknowledgment::Majority).w_timeout(DEADLINE).build()
}
