//! Stored records, and the texts in which another program stores a position.

use bson::RawDocument;

use super::plain;
use crate::checkpoint::Checkpoint;
use crate::error::StorageError;
use crate::ids::SubscriptionId;
use crate::mongo::fuzz::{decode_record, encode_position, encode_source, position_in_text};
use crate::storage::Record;

/// The BSON of a stored record.
///
/// # Panics
/// When it is refused without naming a field, and when something else is read than stands in it.
pub fn record(bytes: &[u8]) -> bool {
    let Ok(raw) = RawDocument::from_bytes(bytes) else { return false };
    let id = SubscriptionId::new("fuzz_v1").expect("a valid id");
    match decode_record(&id, raw) {
        Ok(record) => {
            stands_in(&record, bytes);
            true
        }
        Err(StorageError::Unreadable { id: named, field, message }) => {
            assert!(named == id.as_str() && !field.is_empty() && !message.is_empty(), "{field:?} {message:?}");
            false
        }
        Err(other) => panic!("no name for what cannot be read: {other}"),
    }
}

/// Compares what was read with what stands in the bytes.
fn stands_in(record: &Record, bytes: &[u8]) {
    const POSITIONS: [&str; 4] = ["resumeToken", "operationTime", "checkpoint", "subscriptionPosition"];
    let stored: usize = POSITIONS.iter().map(|field| plain::count(bytes, field)).sum();
    assert_eq!(stored, usize::from(record.position.is_some()), "positions in the record");
    let ours = plain::find(bytes, "mongosub").and_then(plain::Field::document);
    assert_eq!(plain::count(bytes, "mongosub"), usize::from(record.ownership.is_some()), "parts of ours");
    let number = |field| ours.and_then(|ours| plain::find(ours, field)).and_then(plain::Field::integer);
    let word = |field| ours.and_then(|ours| plain::find(ours, field)).and_then(plain::Field::text);
    assert_eq!(record.ownership.as_ref().map(|ownership| ownership.fence.0), number("fence"), "the fence");
    assert_eq!(record.epoch.map(|epoch| epoch.0), number("epoch"), "the epoch");
    assert_eq!(record.ownership.as_ref().map(|ownership| ownership.owner.as_str()), word("owner"), "the owner");
    assert_eq!(record.kind.map(crate::checkpoint::Kind::as_str), word("kind"), "the kind");
    assert_eq!(record.pipeline.as_ref().map(|pipeline| pipeline.0.as_str()), word("pipeline"), "the pipeline");
    if let Some(source) = &record.source {
        let stored = ours.and_then(|ours| plain::find(ours, "source")).and_then(plain::Field::document);
        for (field, value) in encode_source(source) {
            let stands = stored.and_then(|source| plain::find(source, &field)).and_then(plain::Field::text);
            assert_eq!(value.as_str(), stands, "{field:?} of the source");
        }
    }
    let small = |number: i64| u32::try_from(number).unwrap_or(u32::MAX);
    assert_eq!(record.unclean_ends, number("uncleanEnds").map_or(0, small), "the unclean ends");
    let hand = ours.and_then(|ours| plain::find(ours, "inHand")).and_then(plain::Field::document);
    assert_eq!(record.in_hand.is_some(), hand.is_some(), "whether an event is in hand");
    if let (Some(in_hand), Some(hand)) = (&record.in_hand, hand) {
        let deaths = plain::find(hand, "deaths").and_then(plain::Field::integer);
        assert_eq!(Some(in_hand.deaths), deaths.map(small), "the deaths");
        let at = plain::find(hand, "at").and_then(plain::Field::text).map(str::parse);
        assert_eq!(Some(Ok(in_hand.position.clone())), at, "the event in hand");
    }
    let Some(position) = &record.position else { return };
    let (field, _) = encode_position(position);
    let stands = plain::find(bytes, field);
    match (position, stands) {
        (Checkpoint::Token(token), Some(stored)) => {
            let data = stored.document().and_then(plain::data).expect("a token");
            assert_eq!(data.to_ascii_uppercase(), token.as_str(), "the token");
        }
        (Checkpoint::Time(time), Some(stored)) => {
            assert_eq!(stored.timestamp(), Some((time.time, time.increment)), "the time");
        }
        (Checkpoint::Text(text), Some(stored)) => assert_eq!(stored.text(), Some(&**text), "the text"),
        (position, None) => {
            let texts = ["checkpoint", "subscriptionPosition"].map(|field| plain::find(bytes, field));
            let text = texts.into_iter().flatten().next().and_then(plain::Field::text).expect("a text");
            holds(text, position);
        }
    }
}

/// A text of another program.
///
/// # Panics
/// When a position is read in it that does not stand there, or stands there beside something else.
pub fn text(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let position = position_in_text(text);
    if let Some(position) = &position {
        holds(text, position);
    }
    position.is_some()
}

/// Whether the text, but for white space and leading zeros, is one of the forms around exactly this position.
fn holds(text: &str, position: &Checkpoint) {
    let plain = normal(text);
    match position {
        Checkpoint::Token(token) => {
            let at = plain.to_uppercase().find(token.as_str()).expect("the token stands in the text");
            let (before, behind) = (&plain[..at], &plain[at + token.as_str().len()..]);
            let closing = match before {
                "" => "",
                r#"{"_data":""# => r#""}"#,
                r#"{"resumeToken":{"_data":""# => r#""}}"#,
                other => panic!("{other:?} before a token"),
            };
            let type_bits =
                behind.starts_with(r#"","_typeBits":{"#) && behind.ends_with(&format!("}}{}", &closing[1..]));
            assert!(behind == closing || (!closing.is_empty() && type_bits), "{behind:?} behind a token");
        }
        Checkpoint::Time(time) => {
            let (time, increment) = (time.time, time.increment);
            let bare = format!(r#"{{"$timestamp":{{"t":{time},"i":{increment}}}}}"#);
            let printed = format!(",seconds={time},inc={increment}}}");
            let is_printed = plain.starts_with("Timestamp{value=") && plain.ends_with(&printed);
            let is_one = plain == bare || plain == format!(r#"{{"operationTime":{bare}}}"#) || is_printed;
            assert!(is_one, "{plain:?} is no form of {time}.{increment}");
        }
        Checkpoint::Text(text) => panic!("text was read as {text:?}"),
    }
}

/// Without white space, and without zeros before a number.
fn normal(text: &str) -> String {
    let mut plain = String::new();
    let mut letters = text.chars().filter(|c| !" \t\r\n".contains(*c)).peekable();
    while let Some(letter) = letters.next() {
        let begins = !plain.ends_with(|c: char| c.is_ascii_alphanumeric());
        let zero = begins && letter == '0' && letters.peek().is_some_and(char::is_ascii_digit);
        if !zero {
            plain.push(letter);
        }
    }
    plain
}
