//! The stored record: what stands in which field, and how it is read. No I/O; called by `checkpoint_storage.rs`.
//!
//! Whatever is refused here must be refused by [`readable`](super::record_pipeline::readable) too, and the other way
//! round: a write leaves alone exactly what a read refuses. But what no expression of a server can tell is refused here
//! alone, before any write: a field that stands twice, and text that is not UTF-8.

use std::collections::HashSet;

use bson::raw::RawElement;
use bson::spec::ElementType;
use bson::{Bson, DateTime, Document, RawBsonRef, RawDocument, Timestamp, doc};

use super::occurrent;
use crate::audit::{Gap, Note, Skipped};
use crate::checkpoint::{Checkpoint, Kind, Token};
use crate::error::StorageError;
use crate::ids::{Epoch, Fence, Namespace, Owner, Ownership, SubscriptionId};
use crate::model::{Fingerprint, Scope};
use crate::storage::{InHand, Record, Source};

/// The field with everything that is ours alone.
pub(super) const OURS: &str = "mongosub";
/// The version of the record that is written, and the only one that is read.
pub(super) const SCHEMA: i64 = 1;
/// Fences and epochs lie between zero and this, so that one more is always a number.
pub(super) const LARGEST: i64 = 1 << 62;

/// How runs have ended: how many in a row without a word and without having stored anything; whose end the last claim
/// counted; and the event that a careful run had in hand.
pub(super) const UNCLEAN_ENDS: &str = "uncleanEnds";
pub(super) const OVER: &str = "over";
pub(super) const IN_HAND: &str = "inHand";
/// Of the source; as text, like the positions of notes.
const LAST_EVENT: &str = "lastEvent";

/// The fields of which a record has at most one.
pub(super) const RESUME_TOKEN: &str = "resumeToken";
pub(super) const OPERATION_TIME: &str = "operationTime";
pub(super) const CHECKPOINT: &str = "checkpoint";
pub(super) const LEGACY_CHECKPOINT: &str = "subscriptionPosition";
pub(super) const GAPS: &str = "gaps";
pub(super) const SKIPS: &str = "skips";
pub(super) const POSITIONS: [&str; 4] = [RESUME_TOKEN, OPERATION_TIME, CHECKPOINT, LEGACY_CHECKPOINT];

/// The field a position is stored in, and what is stored there.
pub(crate) fn encode_position(position: &Checkpoint) -> (&'static str, Bson) {
    match position {
        Checkpoint::Token(token) => (RESUME_TOKEN, doc! { "_data": token.as_str() }.into()),
        Checkpoint::Time(time) => (OPERATION_TIME, (*time).into()),
        Checkpoint::Text(text) => (CHECKPOINT, (&**text).into()),
    }
}

/// A source as it is stored.
pub(crate) fn encode_source(source: &Source) -> Document {
    let mut stored = encode_scope(&source.scope);
    if let Some(uuid) = &source.collection_uuid {
        stored.insert("collectionUUID", uuid);
    }
    if let Some(name) = &source.set_name {
        stored.insert("setName", name);
    }
    if let Some(event) = &source.last_event {
        stored.insert(LAST_EVENT, event.to_string());
    }
    stored
}

fn encode_scope(scope: &Scope) -> Document {
    match scope {
        Scope::Collection(namespace) => {
            doc! { "scope": "collection", "db": &namespace.db, "collection": &namespace.collection }
        }
        Scope::Database { db } => doc! { "scope": "database", "db": db },
        Scope::Deployment => doc! { "scope": "deployment" },
    }
}

/// An event in hand as it is stored; its position as text, like those of notes.
pub(super) fn encode_in_hand(in_hand: &InHand) -> Document {
    doc! { "at": in_hand.position.to_string(), "deaths": i64::from(in_hand.deaths) }
}

/// A note as it is stored, but for its time: the list it goes to, its fields, and which of them tell it from others.
/// Positions stand there as text, for people.
pub(crate) fn encode_note(note: &Note) -> (&'static str, Document, [&'static str; 2]) {
    match note {
        Note::Gap(gap) => {
            let mut stored = doc! { "from": gap.from.to_string(), "to": gap.to.to_string() };
            stored.extend(encode_scope(&gap.scope));
            (GAPS, stored, ["from", "to"])
        }
        Note::Skipped(skipped) => {
            let from = skipped.from.as_ref().map(ToString::to_string);
            let through = skipped.through.to_string();
            let (reason, by) = (&skipped.reason, skipped.by.as_str());
            (SKIPS, doc! { "from": from, "through": through, "reason": reason, "by": by }, ["from", "through"])
        }
    }
}

/// Reads a record.
///
/// # Errors
/// [`StorageError::Unreadable`] naming the field.
pub(crate) fn decode(id: &SubscriptionId, stored: &RawDocument) -> Result<Record, StorageError> {
    decode_fields(id, stored).map_err(|Wrong { field, message }| {
        let field = if field.is_empty() { "(the whole record)".to_owned() } else { field };
        StorageError::Unreadable { id: id.to_string(), field, message }
    })
}

/// A field that cannot be read, and what is wrong with it.
struct Wrong {
    field: String,
    message: String,
}

fn decode_fields(id: &SubscriptionId, stored: &RawDocument) -> Result<Record, Wrong> {
    let root = Fields::of(stored, "")?;
    let mut record = Record::empty(id.clone());
    if let Some(ours) = root.document(OURS)? {
        let ours = Fields::of(ours, "mongosub.")?;
        let schema = ours.required("schema", ours.number("schema")?)?;
        if schema != SCHEMA {
            return Err(ours.wrong("schema", format!("is {schema}, and this version reads {SCHEMA} only")));
        }
        record.ownership = Some(Ownership {
            fence: Fence(ours.required("fence", ours.number("fence")?)?),
            owner: Owner::new(ours.required("owner", ours.text("owner")?)?),
        });
        record.claimed_at = ours.date("claimedAt")?;
        record.epoch = ours.number("epoch")?.map(Epoch);
        record.kind = match ours.text("kind")? {
            Some(word) => {
                let kind = Kind::parse(word);
                Some(kind.ok_or_else(|| ours.wrong("kind", format!("is {word:?}, which this version does not know")))?)
            }
            None => None,
        };
        record.cluster_time = ours.timestamp("clusterTime")?;
        record.saved_at = ours.date("savedAt")?;
        record.pipeline = ours.text("pipeline")?.map(|pipeline| Fingerprint(pipeline.to_owned()));
        record.source = ours.document("source")?.map(decode_source).transpose()?;
        record.clean = ours.boolean("clean")?.unwrap_or(false);
        record.unclean_ends = ours.count(UNCLEAN_ENDS)?.unwrap_or(0);
        ours.number(OVER)?;
        record.in_hand = ours.document(IN_HAND)?.map(decode_in_hand).transpose()?;
        record.gaps = ours.list(GAPS, decode_gap)?;
        record.skips = ours.list(SKIPS, decode_skipped)?;
    }
    record.position = decode_position(&root, record.epoch.is_some())?;
    Ok(record)
}

/// A position we stored comes with an epoch; without one it is another program's, and its text one of that program's.
fn decode_position(root: &Fields<'_>, is_ours: bool) -> Result<Option<Checkpoint>, Wrong> {
    let mut found = POSITIONS.into_iter().filter(|field| root.get(field).is_some());
    let Some(field) = found.next() else { return Ok(None) };
    if let Some(second) = found.next() {
        return Err(root.wrong(second, format!("is a second position beside {field:?}")));
    }
    let position = match field {
        RESUME_TOKEN => {
            let token = Fields::of(root.required(field, root.document(field)?)?, "resumeToken.")?;
            let data = token.required("_data", token.text("_data")?)?;
            Token::new(data).map_err(|error| token.wrong("_data", format!("is {error}")))?.into()
        }
        OPERATION_TIME => root.required(field, root.timestamp(field)?)?.into(),
        _ => {
            let text = root.required(field, root.text(field)?)?;
            match (field, is_ours) {
                (CHECKPOINT, true) => Checkpoint::Text(text.into()),
                _ => occurrent::position(text).ok_or_else(|| {
                    root.wrong(
                        field,
                        format!("is text that holds neither a resume token nor an operation time: {text:?}"),
                    )
                })?,
            }
        }
    };
    Ok(Some(position))
}

fn decode_scope(source: &Fields<'_>) -> Result<Scope, Wrong> {
    let named = |field| source.required(field, source.text(field)?).map(str::to_owned);
    Ok(match named("scope")?.as_str() {
        "collection" => Scope::Collection(Namespace { db: named("db")?, collection: named("collection")? }),
        "database" => Scope::Database { db: named("db")? },
        "deployment" => Scope::Deployment,
        other => return Err(source.wrong("scope", format!("is {other:?}, which this version does not know"))),
    })
}

fn decode_gap(stored: &RawDocument) -> Result<Gap, Wrong> {
    let gap = Fields::of(stored, "mongosub.gaps.")?;
    let (from, to) = (gap.position("from")?, gap.position("to")?);
    let mut read = Gap::new(gap.required("from", from)?, gap.required("to", to)?, decode_scope(&gap)?);
    read.at = Some(gap.required("at", gap.date("at")?)?);
    Ok(read)
}

fn decode_skipped(stored: &RawDocument) -> Result<Skipped, Wrong> {
    let skipped = Fields::of(stored, "mongosub.skips.")?;
    let text = |field| skipped.required(field, skipped.text(field)?);
    let from = match skipped.get("from").map(RawElement::element_type) {
        Some(ElementType::Null) => None,
        _ => Some(skipped.required("from", skipped.position("from")?)?),
    };
    let through = skipped.required("through", skipped.position("through")?)?;
    let mut read = Skipped::new(from, through, text("reason")?, Owner::new(text("by")?));
    read.at = Some(skipped.required("at", skipped.date("at")?)?);
    Ok(read)
}

fn decode_in_hand(stored: &RawDocument) -> Result<InHand, Wrong> {
    let in_hand = Fields::of(stored, "mongosub.inHand.")?;
    let Ok(position) = in_hand.required("at", in_hand.text("at")?)?.parse();
    Ok(InHand::new(position, in_hand.required("deaths", in_hand.count("deaths")?)?))
}

fn decode_source(stored: &RawDocument) -> Result<Source, Wrong> {
    let source = Fields::of(stored, "mongosub.source.")?;
    let scope = decode_scope(&source)?;
    let optional = |field| source.text(field).map(|text| text.map(str::to_owned));
    let mut read = Source::new(scope, optional("collectionUUID")?, optional("setName")?);
    read.last_event = source.position(LAST_EVENT)?;
    Ok(read)
}

/// The fields of a document, read by type; absent is `None`, another type is wrong. What is not asked for is not decoded.
struct Fields<'a> {
    stored: Vec<RawElement<'a>>,
    path: &'static str,
}

impl<'a> Fields<'a> {
    /// Refuses a field that stands twice: readers differ about which of the two counts.
    fn of(stored: &'a RawDocument, path: &'static str) -> Result<Self, Wrong> {
        let mut fields = Self { stored: Vec::new(), path };
        let mut names = HashSet::new();
        for element in stored.iter_elements() {
            let element = element.map_err(|error| Wrong {
                field: path.trim_end_matches('.').to_owned(),
                message: format!("is no valid BSON: {error}"),
            })?;
            let name = element.key().as_str();
            if !names.insert(name) {
                return Err(fields.wrong(name, "stands there twice"));
            }
            fields.stored.push(element);
        }
        Ok(fields)
    }

    fn get(&self, field: &str) -> Option<&RawElement<'a>> {
        self.stored.iter().find(|element| element.key().as_str() == field)
    }

    fn wrong(&self, field: &str, message: impl Into<String>) -> Wrong {
        Wrong { field: format!("{}{field}", self.path), message: message.into() }
    }

    fn required<T>(&self, field: &str, value: Option<T>) -> Result<T, Wrong> {
        value.ok_or_else(|| self.wrong(field, "is missing"))
    }

    fn typed<T>(
        &self,
        field: &str,
        expected: &str,
        take: impl FnOnce(RawBsonRef<'a>) -> Option<T>,
    ) -> Result<Option<T>, Wrong> {
        let Some(element) = self.get(field) else { return Ok(None) };
        let value = element.value().map_err(|error| self.wrong(field, format!("is no valid BSON: {error}")))?;
        match take(value) {
            Some(taken) => Ok(Some(taken)),
            None => Err(self.wrong(field, format!("is not {expected} but {:?}", element.element_type()))),
        }
    }

    fn document(&self, field: &str) -> Result<Option<&'a RawDocument>, Wrong> {
        self.typed(field, "a document", RawBsonRef::as_document)
    }

    fn text(&self, field: &str) -> Result<Option<&'a str>, Wrong> {
        self.typed(field, "a string", RawBsonRef::as_str)
    }

    fn date(&self, field: &str) -> Result<Option<DateTime>, Wrong> {
        self.typed(field, "a date", RawBsonRef::as_datetime)
    }

    fn timestamp(&self, field: &str) -> Result<Option<Timestamp>, Wrong> {
        self.typed(field, "a timestamp", RawBsonRef::as_timestamp)
    }

    fn boolean(&self, field: &str) -> Result<Option<bool>, Wrong> {
        self.typed(field, "a boolean", RawBsonRef::as_bool)
    }

    /// A position by its text.
    fn position(&self, field: &str) -> Result<Option<Checkpoint>, Wrong> {
        let read = |text: &str| {
            let Ok(position) = text.parse();
            position
        };
        Ok(self.text(field)?.map(read))
    }

    /// An array of documents; absent is empty.
    fn list<T>(&self, field: &str, read: impl Fn(&RawDocument) -> Result<T, Wrong>) -> Result<Vec<T>, Wrong> {
        let Some(stored) = self.typed(field, "an array", RawBsonRef::as_array)? else { return Ok(Vec::new()) };
        let entries = stored.into_iter().map(|entry| {
            let entry = entry.map_err(|error| self.wrong(field, format!("is no valid BSON: {error}")))?;
            read(entry.as_document().ok_or_else(|| self.wrong(field, "holds something that is no document"))?)
        });
        entries.collect()
    }

    /// A number that is a small one by its meaning: what is larger counts as the largest.
    fn count(&self, field: &str) -> Result<Option<u32>, Wrong> {
        Ok(self.number(field)?.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
    }

    fn number(&self, field: &str) -> Result<Option<i64>, Wrong> {
        let number = self.typed(field, "an integer", |value| match value {
            RawBsonRef::Int32(number) => Some(i64::from(number)),
            RawBsonRef::Int64(number) => Some(number),
            _ => None,
        })?;
        match number {
            Some(number) if !(0..=LARGEST).contains(&number) => {
                Err(self.wrong(field, format!("is {number}, which is out of range")))
            }
            number => Ok(number),
        }
    }
}
