//! A change event: a slice of the reply it came in, decoded where it is asked for. No I/O, no copy; nothing of an event
//! is looked at before somebody asks.

mod depth;
mod operation;
mod parts;

use std::fmt;

use bson::{DateTime, Document, RawBsonRef, RawDocument, Timestamp, Uuid};
use bytes::Bytes;
use serde::Deserialize;

pub(crate) use self::depth::is_deeper as is_nested_deeper;
pub use self::operation::Operation;
pub use self::parts::{SplitEvent, TruncatedArray, UpdateDescription};
use crate::checkpoint::{Checkpoint, Token};
use crate::error::DecodeError;
use crate::ids::Namespace;

/// One change. Cheap to clone: it shares the reply it came in, and keeps it in memory.
///
/// Each accessor looks for its field when it is called, and fails alone when that field cannot be decoded: an event
/// with broken text in its document still tells its operation, its key and its position.
///
/// ```
/// use mongosub::{ChangeEvent, Operation, bson::doc, memory};
/// use serde::Deserialize;
///
/// #[derive(Deserialize)]
/// struct Order { status: String }
///
/// let event: ChangeEvent = memory::insert(7, doc! { "status": "paid" }).into();
/// assert_eq!(event.operation()?, Operation::Insert);
/// assert_eq!(event.document_id::<i32>()?, Some(7));
/// let order: Option<Order> = event.full_document()?;
/// assert_eq!(order.unwrap().status, "paid");
/// # Ok::<(), mongosub::DecodeError>(())
/// ```
#[derive(Clone)]
pub struct ChangeEvent {
    raw: Bytes,
}

impl ChangeEvent {
    /// Takes the BSON of a change event. It looks at the outermost length alone: what is inside is found out by the
    /// accessors.
    ///
    /// # Errors
    /// [`DecodeError`] when the bytes are not as long as they say.
    pub fn new(raw: Bytes) -> Result<Self, DecodeError> {
        RawDocument::from_bytes(&raw).map_err(|error| decode_error("", &error))?;
        Ok(Self { raw })
    }

    /// The event of a document. A document that BSON cannot hold gives an empty event.
    pub(crate) fn from_document(document: &Document) -> Self {
        let raw = document.to_vec().unwrap_or_else(|_| vec![5, 0, 0, 0, 0]);
        Self { raw: raw.into() }
    }

    /// The whole event, as the server sent it.
    #[allow(clippy::missing_panics_doc, reason = "`new` has checked what `from_bytes` checks")]
    pub fn raw(&self) -> &RawDocument {
        RawDocument::from_bytes(&self.raw).expect("checked when the event was made")
    }

    /// The bytes of the whole event.
    pub fn bytes(&self) -> &Bytes {
        &self.raw
    }

    /// Any field of the event by its name; `None` when it was not sent.
    ///
    /// # Errors
    /// [`DecodeError`] when the field, or one before it, is no BSON.
    pub fn get(&self, field: &str) -> Result<Option<RawBsonRef<'_>>, DecodeError> {
        get(self.raw(), field, "")
    }

    /// What kind of change it is.
    ///
    /// # Errors
    /// [`DecodeError`] when it was not sent as text; so it is for all but the first fragment of a split event.
    pub fn operation(&self) -> Result<Operation, DecodeError> {
        const FIELD: &str = "operationType";
        match self.get(FIELD)? {
            Some(RawBsonRef::String(name)) => Ok(name.into()),
            found => Err(unexpected(FIELD, found, "text")),
        }
    }

    /// The event's resume token.
    ///
    /// # Errors
    /// [`DecodeError`] when there is none, or none of a replica set.
    pub fn token(&self) -> Result<Token, DecodeError> {
        const FIELD: &str = "_id._data";
        match self.document("_id")?.map(|id| get(id, "_data", "_id")).transpose()?.flatten() {
            Some(RawBsonRef::String(data)) => {
                Token::new(data).map_err(|error| DecodeError::new(FIELD, error.to_string()))
            }
            found => Err(unexpected(FIELD, found, "text")),
        }
    }

    /// The event's position: its token.
    ///
    /// # Errors
    /// [`DecodeError`] as for [`token`](Self::token).
    pub fn position(&self) -> Result<Checkpoint, DecodeError> {
        self.token().map(Checkpoint::Token)
    }

    /// The cluster time of the change; of an event that was sent without one, that of its token.
    ///
    /// # Errors
    /// [`DecodeError`] when it is no timestamp, or there is neither.
    pub fn cluster_time(&self) -> Result<Timestamp, DecodeError> {
        const FIELD: &str = "clusterTime";
        match self.get(FIELD)? {
            Some(RawBsonRef::Timestamp(time)) => Ok(time),
            None => self.token().map(|token| token.cluster_time()),
            found => Err(unexpected(FIELD, found, "a timestamp")),
        }
    }

    /// The server's wall clock at the change; `None` from a server older than 6.0.
    ///
    /// # Errors
    /// [`DecodeError`] when it is no date.
    pub fn wall_time(&self) -> Result<Option<DateTime>, DecodeError> {
        const FIELD: &str = "wallTime";
        match self.get(FIELD)? {
            None => Ok(None),
            Some(RawBsonRef::DateTime(time)) => Ok(Some(time)),
            found => Err(unexpected(FIELD, found, "a date")),
        }
    }

    /// The database of the change; `None` for an `invalidate`.
    ///
    /// # Errors
    /// [`DecodeError`] when it is no text.
    pub fn database(&self) -> Result<Option<&str>, DecodeError> {
        Ok(self.document("ns")?.map(|ns| text(ns, "db", "ns")).transpose()?.flatten())
    }

    /// The collection of the change; `None` for an `invalidate` and for a dropped database, which has only a
    /// [`database`](Self::database).
    ///
    /// # Errors
    /// [`DecodeError`] when it is no text.
    pub fn namespace(&self) -> Result<Option<Namespace>, DecodeError> {
        self.namespace_in("ns")
    }

    /// Where a renamed collection went; `None` for every other change.
    ///
    /// # Errors
    /// [`DecodeError`] when it is no text.
    pub fn to(&self) -> Result<Option<Namespace>, DecodeError> {
        self.namespace_in("to")
    }

    /// The key of the changed document: its `_id`, and in a sharded collection its shard key. `T` is a struct, a
    /// `Document` or a borrowed `&RawDocument`; `None` for a change of no single document.
    ///
    /// # Errors
    /// [`DecodeError`] when it is not a `T`.
    pub fn document_key<'a, T: Deserialize<'a>>(&'a self) -> Result<Option<T>, DecodeError> {
        self.typed("documentKey")
    }

    /// The `_id` of the changed document; `None` for a change of no single document.
    ///
    /// # Errors
    /// [`DecodeError`] when it is not a `T`.
    pub fn document_id<'a, T: Deserialize<'a>>(&'a self) -> Result<Option<T>, DecodeError> {
        #[derive(Deserialize)]
        struct Key<T> {
            #[serde(rename = "_id")]
            id: T,
        }
        Ok(self.document_key::<Key<T>>()?.map(|key| key.id))
    }

    /// The document after the change, decoded. `None` for a delete, for an update without a look-up, and for a look-up
    /// that found nothing any more; a looked-up document is newer than its update when others followed.
    ///
    /// # Errors
    /// [`DecodeError`] when it is not a `T`.
    pub fn full_document<'a, T: Deserialize<'a>>(&'a self) -> Result<Option<T>, DecodeError> {
        self.typed("fullDocument")
    }

    /// The document after the change, as it was sent; `None` as for [`full_document`](Self::full_document).
    ///
    /// # Errors
    /// [`DecodeError`] when it is no document.
    pub fn raw_full_document(&self) -> Result<Option<&RawDocument>, DecodeError> {
        self.document("fullDocument")
    }

    /// Whether the document was looked up and was gone by then (or was looked for in another collection, renamed since): the
    /// change is whole but for that, and another event tells what became of the document. With `WhenAvailable`, whether
    /// the server no longer had the document as it was after the change.
    ///
    /// # Errors
    /// [`DecodeError`] when what stands before the field is no BSON.
    pub fn lookup_missing(&self) -> Result<bool, DecodeError> {
        Ok(matches!(self.get("fullDocument")?, Some(RawBsonRef::Null)))
    }

    /// The document before the change, decoded; `None` unless the stream asks for it and the server kept it.
    ///
    /// # Errors
    /// [`DecodeError`] when it is not a `T`.
    pub fn full_document_before_change<'a, T: Deserialize<'a>>(&'a self) -> Result<Option<T>, DecodeError> {
        self.typed("fullDocumentBeforeChange")
    }

    /// The document before the change, as it was sent; `None` as for
    /// [`full_document_before_change`](Self::full_document_before_change).
    ///
    /// # Errors
    /// [`DecodeError`] when it is no document.
    pub fn raw_full_document_before_change(&self) -> Result<Option<&RawDocument>, DecodeError> {
        self.document("fullDocumentBeforeChange")
    }

    /// What an update changed; `None` for every other change.
    ///
    /// # Errors
    /// [`DecodeError`] naming the part that is not as a server sends it.
    pub fn update_description(&self) -> Result<Option<UpdateDescription<'_>>, DecodeError> {
        self.document("updateDescription")?.map(UpdateDescription::parse).transpose()
    }

    /// The number of the transaction in its session; `None` outside transactions.
    ///
    /// # Errors
    /// [`DecodeError`] when it is no 64-bit integer.
    pub fn txn_number(&self) -> Result<Option<i64>, DecodeError> {
        const FIELD: &str = "txnNumber";
        match self.get(FIELD)? {
            None => Ok(None),
            Some(RawBsonRef::Int64(number)) => Ok(Some(number)),
            found => Err(unexpected(FIELD, found, "a 64-bit integer")),
        }
    }

    /// The session of the transaction; `None` outside transactions.
    ///
    /// # Errors
    /// [`DecodeError`] when it is no document.
    pub fn lsid(&self) -> Result<Option<&RawDocument>, DecodeError> {
        self.document("lsid")
    }

    /// The UUID of the collection, when the server sent it (from 6.0, with expanded events).
    ///
    /// # Errors
    /// [`DecodeError`] when it is no UUID.
    pub fn collection_uuid(&self) -> Result<Option<Uuid>, DecodeError> {
        const FIELD: &str = "collectionUUID";
        match self.get(FIELD)? {
            None => Ok(None),
            Some(RawBsonRef::Binary(binary)) => {
                binary.to_binary().to_uuid().map(Some).map_err(|error| decode_error(FIELD, &error))
            }
            found => Err(unexpected(FIELD, found, "a UUID")),
        }
    }

    /// What a change of a collection or an index was in detail, when the server sent it (from 6.0, with expanded
    /// events).
    ///
    /// # Errors
    /// [`DecodeError`] when it is no document.
    pub fn operation_description(&self) -> Result<Option<&RawDocument>, DecodeError> {
        self.document("operationDescription")
    }

    /// Which fragment of a split event this is; `None` for a whole event.
    ///
    /// # Errors
    /// [`DecodeError`] when it is not as a server sends it.
    pub fn split_event(&self) -> Result<Option<SplitEvent>, DecodeError> {
        self.document("splitEvent")?.map(SplitEvent::parse).transpose()
    }

    fn document(&self, field: &str) -> Result<Option<&RawDocument>, DecodeError> {
        match self.get(field)? {
            None | Some(RawBsonRef::Null) => Ok(None),
            Some(RawBsonRef::Document(document)) => Ok(Some(document)),
            found => Err(unexpected(field, found, "a document")),
        }
    }

    fn typed<'a, T: Deserialize<'a>>(&'a self, field: &str) -> Result<Option<T>, DecodeError> {
        let Some(document) = self.document(field)? else { return Ok(None) };
        if depth::is_deeper(document, depth::SERVERS_LIMIT) {
            return Err(DecodeError::new(
                field,
                format!("it is nested more than {} levels deep", depth::SERVERS_LIMIT),
            ));
        }
        bson::deserialize_from_slice(document.as_bytes()).map(Some).map_err(|error| decode_error(field, &error))
    }

    fn namespace_in(&self, field: &str) -> Result<Option<Namespace>, DecodeError> {
        let Some(ns) = self.document(field)? else { return Ok(None) };
        let names = (text(ns, "db", field)?, text(ns, "coll", field)?);
        Ok(if let (Some(db), Some(collection)) = names { Some(Namespace::new(db, collection)) } else { None })
    }
}

/// What is formatted recursively, wherever there happens to be little stack left.
const DEEPEST_SHOWN: usize = 32;

/// Operation, namespace and key; never what is in a document.
impl fmt::Debug for ChangeEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("ChangeEvent");
        if let Ok(operation) = self.operation() {
            debug.field("operation", &format_args!("{operation}"));
        }
        match (self.namespace(), self.database()) {
            (Ok(Some(namespace)), _) => debug.field("namespace", &format_args!("{namespace}")),
            (_, Ok(Some(db))) => debug.field("database", &format_args!("{db}")),
            _ => &mut debug,
        };
        if let Ok(Some(key)) = self.document("documentKey")
            && !depth::is_deeper(key, DEEPEST_SHOWN)
            && let Ok(key) = Document::try_from(key)
        {
            debug.field("key", &format_args!("{key}"));
        }
        debug.field("bytes", &self.raw.len()).finish()
    }
}

/// A field of a document, `within` being where the document stands in the event.
fn get<'a>(document: &'a RawDocument, field: &str, within: &str) -> Result<Option<RawBsonRef<'a>>, DecodeError> {
    document.get(field).map_err(|error| decode_error(&path(within, field), &error))
}

fn text<'a>(document: &'a RawDocument, field: &str, within: &str) -> Result<Option<&'a str>, DecodeError> {
    match get(document, field, within)? {
        None => Ok(None),
        Some(RawBsonRef::String(text)) => Ok(Some(text)),
        found => Err(unexpected(&path(within, field), found, "text")),
    }
}

fn path(within: &str, field: &str) -> String {
    if within.is_empty() { field.into() } else { format!("{within}.{field}") }
}

pub(crate) fn decode_error(field: &str, error: &bson::error::Error) -> DecodeError {
    let at = error.key.as_deref().filter(|key| *key != field).map(|key| format!(" at {key:?}")).unwrap_or_default();
    let message = error.message.as_deref().map(|message| format!(": {message}")).unwrap_or_default();
    DecodeError::new(field, format!("{}{at}{message}", error.kind))
}

fn unexpected(field: &str, found: Option<RawBsonRef<'_>>, expected: &str) -> DecodeError {
    match found {
        Some(found) => DecodeError::new(field, format!("expected {expected}, found {:?}", found.element_type())),
        None => DecodeError::new(field, "it was not sent"),
    }
}

#[cfg(test)]
mod tests;
