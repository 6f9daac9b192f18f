//! Dead letters as they are stored: what stands in which document, the updates, and how they are read. No I/O; called by
//! `dead_letters.rs`.
//!
//! One *head* for each sequence names its letters in their order; a letter that no head names does not exist. So a letter
//! is written first, whole, under a name of its own, and one update of the head makes it visible; one update, or the
//! deletion of the head, takes it away again, and then its body is deleted. The `_id`s are `ID#h#KEY` of a head,
//! `ID#l#KEY#REFERENCE` of a letter and `ID#l#KEY#REFERENCE#N` of a part of a large event, KEY being a hash.

use std::time::Duration;

use bson::spec::BinarySubtype;
use bson::{Binary, Bson, DateTime, Document, RawDocument, Timestamp, doc};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::record::encode_position;
use crate::checkpoint::{Checkpoint, Token};

use crate::error::StorageError;
use crate::ids::{Epoch, Namespace, Owner, SubscriptionId};
use crate::letter::{DocumentKey, Letter, LetterKind, MAX_LETTERS, NewLetter, ParkingLimit, PutOutcome, Sequence};

/// The version of what is written, and the only one that is read.
const SCHEMA: i64 = 1;
/// A larger event is stored in parts: beside it, its letter needs room in a document of 16 MB too.
const WHOLE: usize = 4 << 20;
const PART: usize = 8 << 20;
/// How much of a document's key is shown to whoever looks at a head.
const SHOWN: usize = 1024;
/// The hex digits of an event's place in the list of a head.
const PLACE: u8 = 32;

/// The names of everything that belongs to one document.
#[derive(Debug, Clone)]
pub(super) struct Names {
    id: String,
    key: String,
}

impl Names {
    pub(super) fn of(id: &SubscriptionId, key: &DocumentKey) -> Self {
        let mut hash = Sha256::new();
        let namespace = key.namespace().map(ToString::to_string).unwrap_or_default();
        hash.update((namespace.len() as u64).to_le_bytes());
        hash.update([u8::from(key.namespace().is_some()), u8::from(key.key().is_some())]);
        hash.update(namespace);
        hash.update(key.key().map_or(&[][..], RawDocument::as_bytes));
        Self { id: id.to_string(), key: hex(&hash.finalize(), 32) }
    }

    pub(super) fn head(&self) -> String {
        format!("{}#h#{}", self.id, self.key)
    }

    pub(super) fn letter(&self, reference: &str) -> String {
        format!("{}#l#{}#{reference}", self.id, self.key)
    }

    pub(super) fn part(&self, reference: &str, part: usize) -> String {
        format!("{}#{part}", self.letter(reference))
    }
}

/// The heads of a subscription: a range of the `_id`.
pub(super) fn heads(id: &SubscriptionId) -> Document {
    doc! { "_id": { "$gte": format!("{id}#h#"), "$lt": format!("{id}#h$") } }
}

fn hex(bytes: &[u8], digits: usize) -> String {
    use std::fmt::Write as _;
    bytes.iter().take(digits / 2).fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Where an event stands: text that is the same for the same place, and text in the order of places, where they have one.
fn place(epoch: Epoch, position: &Checkpoint) -> (String, Option<String>) {
    let (kind, order) = match position {
        Checkpoint::Token(token) => ("token", Some(token.as_str().to_owned())),
        // Before every token of its time: those begin with it and go on.
        Checkpoint::Time(time) => ("time", Some(format!("82{:08X}{:08X}", time.time, time.increment))),
        Checkpoint::Text(_) => ("text", None),
    };
    let mut hash = Sha256::new();
    hash.update(epoch.0.to_le_bytes());
    hash.update(kind);
    hash.update(position.to_string());
    (hex(&hash.finalize(), PLACE.into()), order)
}

fn entry(letter: &NewLetter) -> String {
    format!("{}{}", place(letter.epoch, &letter.position).0, letter.reference)
}

pub(super) fn parts(event: &[u8]) -> std::slice::Chunks<'_, u8> {
    let parts = if event.len() > WHOLE { event } else { &[] };
    parts.chunks(PART)
}

pub(super) fn binary(bytes: &[u8]) -> Binary {
    Binary { subtype: BinarySubtype::Generic, bytes: bytes.to_vec() }
}

/// Writes a letter, but for the parts of its event.
pub(super) fn write_letter(letter: &NewLetter) -> Vec<Document> {
    let (field, value) = encode_position(&letter.position);
    let parts = i64::try_from(parts(&letter.event).len()).unwrap_or(i64::MAX);
    let mut facts = doc! {
        "schema": SCHEMA, "subscription": letter.subscription.as_str(), "kind": letter.kind.name(),
        "position": { field: value }, "epoch": letter.epoch.0, "attempts": i64::from(letter.attempts),
        "error": &letter.error, "bytes": i64::try_from(letter.event.len()).unwrap_or(i64::MAX), "parts": parts,
    };
    if parts == 0 {
        facts.insert("event", binary(&letter.event));
    }
    let mut times = doc! { "storedAt": "$$NOW" };
    for (field, ago) in [("firstFailedAt", letter.first_failed), ("lastFailedAt", letter.last_failed)] {
        if let Some(ago) = ago {
            times.insert(field, doc! { "$subtract": ["$$NOW", millis(ago)] });
        }
    }
    vec![doc! { "$replaceWith": { "$mergeObjects": ["$$ROOT", { "$literal": facts }, times] } }]
}

fn millis(time: Duration) -> i64 {
    // As far back or ahead as a date can lie.
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX).min(1 << 45)
}

/// Names a letter in its head, as the last one, unless it was there before or there is no room.
pub(super) fn name_letter(letter: &NewLetter) -> Vec<Document> {
    let (at, order) = place(letter.epoch, &letter.position);
    let letters = doc! { "$ifNull": ["$letters", []] };
    let places = doc! { "$map": { "input": &letters, "in": { "$substrBytes": ["$$this", 0, i32::from(PLACE)] } } };
    let mut has_had = vec![
        doc! { "$gt": ["$newest.epoch", letter.epoch.0] },
        doc! { "$eq": ["$newest.at", &at] },
        doc! { "$in": [&at, places] },
    ];
    if let Some(order) = &order {
        // Null, which text has, lies before every string.
        let same = doc! { "$eq": ["$newest.epoch", letter.epoch.0] };
        has_had.push(doc! { "$and": [same, { "$gte": ["$newest.order", order] }] });
    }
    let full = doc! { "$gte": [{ "$size": &letters }, i64::try_from(MAX_LETTERS).unwrap_or(i64::MAX)] };
    has_had.push(full);

    let mut shown = letter.key.to_string();
    shown.truncate((0..=SHOWN.min(shown.len())).rev().find(|at| shown.is_char_boundary(*at)).unwrap_or(0));
    let mut facts = doc! { "schema": SCHEMA, "subscription": letter.subscription.as_str(), "document": shown };
    if let Some(Namespace { db, collection }) = letter.key.namespace() {
        facts.insert("namespace", doc! { "db": db, "collection": collection });
    }
    if let Some(key) = letter.key.key() {
        facts.insert("key", binary(key.as_bytes()));
    }
    let added = doc! {
        "letters": { "$concatArrays": [letters, [{ "$literal": entry(letter) }]] },
        "newest": { "$literal": { "epoch": letter.epoch.0, "at": at, "order": order } },
        "begunAt": { "$ifNull": ["$begunAt", "$$NOW"] },
    };
    let head = doc! { "$mergeObjects": ["$$ROOT", { "$literal": facts }, added] };
    vec![doc! { "$replaceWith": { "$cond": [{ "$or": has_had }, "$$ROOT", head] } }]
}

/// Takes a sequence for its owner, if nobody else has it.
pub(super) fn hold(owner: &Owner, lease: Duration) -> Vec<Document> {
    let mine = doc! { "$eq": ["$lease.owner", { "$literal": owner.as_str() }] };
    let until = doc! { "$add": ["$$NOW", millis(lease)] };
    let lease = doc! { "owner": { "$literal": owner.as_str() }, "until": until };
    vec![doc! { "$set": { "lease": { "$cond": [{ "$or": [mine, is_free()] }, lease, "$lease"] } } }]
}

/// Whether nobody has a sequence: an expression.
pub(super) fn is_free() -> Document {
    // Missing lies before every date.
    doc! { "$lte": ["$lease.until", "$$NOW"] }
}

pub(super) fn note_failure(error: &[String]) -> Vec<Document> {
    vec![doc! { "$set": {
        "attempts": { "$add": ["$attempts", 1_i64] },
        "error": { "$literal": error },
        "lastFailedAt": "$$NOW",
        "firstFailedAt": { "$ifNull": ["$firstFailedAt", "$$NOW"] },
    } }]
}

/// What there is to see of heads without their lists.
pub(super) fn overview() -> Document {
    doc! {
        "schema": 1, "namespace": 1, "key": 1, "count": { "$size": "$letters" },
        "lease": { "$cond": [is_free(), "$$REMOVE", "$lease"] },
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct Head {
    schema: i64,
    letters: Vec<String>,
    newest: Newest,
    pub(super) lease: Option<Lease>,
}

#[derive(Debug, Deserialize)]
struct Newest {
    epoch: i64,
    at: String,
    order: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Lease {
    pub(super) owner: String,
    pub(super) until: DateTime,
}

impl Head {
    pub(super) fn decode(id: &str, stored: &RawDocument) -> Result<Self, StorageError> {
        let head: Self = decode(id, stored)?;
        known(id, head.schema)?;
        Ok(head)
    }

    /// What becomes of a letter, or has become of one that was to be named: none when there is room for it.
    pub(super) fn outcome(&self, letter: &NewLetter) -> Option<PutOutcome> {
        if self.letters.contains(&entry(letter)) {
            return Some(PutOutcome::Stored);
        }
        let (at, order) = place(letter.epoch, &letter.position);
        let newest = &self.newest;
        let passed = newest.epoch == letter.epoch.0 && order.is_some() && newest.order >= order;
        let named = self.letters.iter().any(|entry| entry.starts_with(&at));
        if newest.epoch > letter.epoch.0 || newest.at == at || passed || named {
            return Some(PutOutcome::AlreadyStored);
        }
        (self.letters.len() >= MAX_LETTERS).then_some(PutOutcome::Full(ParkingLimit::Events))
    }

    /// The references of its letters, in order.
    pub(super) fn references(&self) -> Vec<&str> {
        self.letters.iter().map(|entry| entry.get(usize::from(PLACE)..).unwrap_or_default()).collect()
    }

    /// The entry of a letter in its list.
    pub(super) fn entry_of(&self, reference: &str) -> Option<&str> {
        self.letters.iter().map(String::as_str).find(|entry| entry.get(usize::from(PLACE)..) == Some(reference))
    }
}

/// A sequence without its letters.
pub(super) fn decode_sequence(stored: &RawDocument) -> Result<Sequence, StorageError> {
    #[derive(Deserialize)]
    struct Overview {
        #[serde(rename = "_id")]
        id: String,
        schema: i64,
        namespace: Option<Namespace>,
        key: Option<Binary>,
        count: i64,
        lease: Option<Lease>,
    }
    let found: Overview = decode("(a sequence of dead letters)", stored)?;
    known(&found.id, found.schema)?;
    let key = DocumentKey::from_parts(found.namespace, found.key.as_ref().map(|key| &key.bytes[..]));
    let held = found.lease.map(|lease| (Owner::new(lease.owner), lease.until));
    Ok(Sequence::new(key, usize::try_from(found.count).unwrap_or(0), held))
}

/// A letter without its event, and in how many parts that is stored.
pub(super) fn decode_letter(
    id: &SubscriptionId,
    key: &DocumentKey,
    stored: &RawDocument,
) -> Result<(Letter, usize), StorageError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Body {
        #[serde(rename = "_id")]
        id: String,
        schema: i64,
        kind: String,
        position: Position,
        epoch: i64,
        attempts: i64,
        error: Vec<String>,
        bytes: i64,
        parts: i64,
        first_failed_at: Option<DateTime>,
        last_failed_at: Option<DateTime>,
        stored_at: DateTime,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Position {
        resume_token: Option<TokenDocument>,
        operation_time: Option<Timestamp>,
        checkpoint: Option<String>,
    }
    #[derive(Deserialize)]
    struct TokenDocument {
        #[serde(rename = "_data")]
        data: String,
    }
    let found: Body = decode("(a dead letter)", stored)?;
    known(&found.id, found.schema)?;
    let wrong = |field: &str, message: String| unreadable(&found.id, field, message);
    let position = match found.position {
        Position { resume_token: Some(token), operation_time: None, checkpoint: None } => {
            Token::new(token.data).map_err(|error| wrong("position.resumeToken", error.to_string()))?.into()
        }
        Position { resume_token: None, operation_time: Some(time), checkpoint: None } => time.into(),
        Position { resume_token: None, operation_time: None, checkpoint: Some(text) } => Checkpoint::Text(text.into()),
        _ => return Err(wrong("position", "is not exactly one".into())),
    };
    let kind = LetterKind::parse(&found.kind)
        .ok_or_else(|| wrong("kind", format!("is {:?}, which this version does not know", found.kind)))?;
    let letter = Letter {
        subscription: id.clone(),
        key: key.clone(),
        position,
        epoch: Epoch(found.epoch),
        kind,
        error: found.error,
        attempts: u32::try_from(found.attempts).unwrap_or(u32::MAX),
        first_failed_at: found.first_failed_at,
        last_failed_at: found.last_failed_at,
        stored_at: found.stored_at,
        bytes: u64::try_from(found.bytes).unwrap_or(0),
        reference: found.id.rsplit('#').next().unwrap_or_default().to_owned(),
    };
    Ok((letter, usize::try_from(found.parts).unwrap_or(0)))
}

/// The event of a letter, or a part of one.
pub(super) fn decode_event(id: &str, stored: &RawDocument) -> Result<Vec<u8>, StorageError> {
    match stored.get("event") {
        Ok(Some(bson::RawBsonRef::Binary(event))) => Ok(event.bytes.to_vec()),
        _ => Err(unreadable(id, "event", "is missing or no binary".into())),
    }
}

pub(super) fn unreadable(id: &str, field: &str, message: String) -> StorageError {
    StorageError::Unreadable { id: id.to_owned(), field: field.to_owned(), message }
}

fn known(id: &str, schema: i64) -> Result<(), StorageError> {
    match schema {
        SCHEMA => Ok(()),
        _ => Err(unreadable(id, "schema", format!("is {schema}, and this version reads {SCHEMA} only"))),
    }
}

fn decode<'a, T: Deserialize<'a>>(what: &str, stored: &'a RawDocument) -> Result<T, StorageError> {
    bson::deserialize_from_slice(stored.as_bytes()).map_err(|error| {
        let id = stored.get_str("_id").unwrap_or(what);
        let field = error.key.clone().unwrap_or_else(|| "(the whole document)".into());
        unreadable(id, &field, error.message.clone().unwrap_or_else(|| error.kind.to_string()))
    })
}

/// A condition on a head's owner.
pub(super) fn owned(head: String, owner: &Owner) -> Document {
    doc! { "_id": head, "lease.owner": owner.as_str() }
}

/// The ids of everything a letter was stored in.
pub(super) fn bodies(names: &Names, reference: &str, parts: usize) -> Vec<Bson> {
    let parts = (0..parts).map(|part| names.part(reference, part));
    std::iter::once(names.letter(reference)).chain(parts).map(Bson::from).collect()
}
