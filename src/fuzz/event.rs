//! Change events: whatever their bytes are, every accessor answers or fails alone.

use bson::{Bson, Document, RawDocument};
use bytes::Bytes;

use super::plain;
use crate::checkpoint::Checkpoint;
use crate::error::DecodeError;
use crate::event::ChangeEvent;

/// The BSON of a change event.
///
/// # Panics
/// When an accessor does, when its error names no field, and when what it answers does not stand in the bytes.
pub fn event(bytes: &[u8]) -> bool {
    let event = match ChangeEvent::new(Bytes::copy_from_slice(bytes)) {
        Ok(event) => event,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    assert_eq!(event.raw().as_bytes(), bytes);
    let fields: [bool; 21] = [
        ok(event.operation().map(|operation| operation.to_string())),
        ok(event.token()),
        ok(event.position()),
        ok(event.cluster_time()),
        ok(event.wall_time()),
        ok(event.database()),
        ok(event.namespace()),
        ok(event.to()),
        ok(event.document_key::<Document>()),
        ok(event.document_key::<&RawDocument>()),
        ok(event.document_id::<Bson>()),
        ok(event.full_document::<Document>()),
        ok(event.raw_full_document()),
        ok(event.full_document_before_change::<Document>()),
        ok(event.raw_full_document_before_change()),
        ok(event.update_description().map(|update| format!("{update:?}"))),
        ok(event.txn_number()),
        ok(event.lsid()),
        ok(event.collection_uuid()),
        ok(event.operation_description()),
        ok(event.split_event()),
    ];
    assert!(format!("{event:?}").starts_with("ChangeEvent"));
    stands_in(&event, bytes);
    fields.iter().all(|ok| *ok)
}

/// Whether it answered.
#[allow(clippy::needless_pass_by_value, reason = "it is typed as a literal")]
fn ok<T>(answer: Result<T, DecodeError>) -> bool {
    if let Err(error) = &answer {
        assert!(!error.field().is_empty() && error.to_string().contains(error.field()), "{error:?}");
    }
    answer.is_ok()
}

fn stands_in(event: &ChangeEvent, bytes: &[u8]) {
    if let Ok(Checkpoint::Token(token)) = event.position() {
        let data = plain::find(bytes, "_id").and_then(plain::Field::document).and_then(plain::data);
        assert_eq!(data.map(str::to_ascii_uppercase).as_deref(), Some(token.as_str()), "the position");
    }
    if let Ok(operation) = event.operation() {
        let stands = plain::find(bytes, "operationType").and_then(plain::Field::text);
        assert_eq!(stands, Some(operation.as_str()), "the operation");
    }
    if let Ok(Some(document)) = event.raw_full_document() {
        let stands = plain::find(bytes, "fullDocument").and_then(plain::Field::document);
        assert_eq!(stands, Some(document.as_bytes()), "the document");
    }
}
