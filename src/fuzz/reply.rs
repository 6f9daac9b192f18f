//! Replies of a server: no event of it is skipped, and no position handed out that does not stand there.

use bytes::Bytes;

use super::plain;
use crate::checkpoint::Token;
use crate::mongo::fuzz::{covers, read_reply};

/// The BSON of a reply.
///
/// # Panics
/// When an error has no name, when an event or a position comes that does not stand in the reply at that place, and when
/// one that stands there does not come and is no error.
pub fn reply(bytes: &[u8]) -> bool {
    let read = match read_reply(Bytes::copy_from_slice(bytes), None) {
        Ok(read) => read,
        Err(message) => return named(&message),
    };
    let stands = Plain::read(bytes).expect("a reply that was read");
    assert_eq!(read.last, stands.events.last().and_then(|event| token(event)), "the token of the last event");
    assert_eq!(read.post_batch, stands.post_batch, "the post-batch token");
    assert_eq!(read.closed, stands.id == Some(0), "whether the cursor is closed");
    let mut tokens = Vec::new();
    for (at, stands) in stands.events.iter().enumerate() {
        match read.events.get(at) {
            Some(Ok((event, position))) => {
                assert_eq!(event.bytes(), stands, "event {at}");
                assert_eq!(position.token().cloned(), token(stands), "the position of event {at}");
                tokens.extend(position.token().cloned());
            }
            Some(Err(message)) => {
                assert_eq!(at + 1, read.events.len(), "an error is the end");
                return named(message);
            }
            None => panic!("event {at} of {} was skipped", stands.len()),
        }
    }
    assert_eq!(read.events.len(), stands.events.len(), "events that do not stand there");
    // Behind a position of its own, only what it covers is left out, and only at the front.
    if let Some(position) = tokens.get(tokens.len() / 2) {
        let behind = read_reply(Bytes::copy_from_slice(bytes), Some(position)).expect("read before");
        let covered = tokens.iter().take_while(|token| covers(position, token)).count();
        assert_eq!(behind.events.len(), tokens.len() - covered, "behind {position}");
    }
    true
}

fn named(message: &str) -> bool {
    let of_what = ["a reply cannot be read: ", "an event ", "the resume token of an event: "];
    assert!(of_what.iter().any(|what| message.len() > what.len() && message.starts_with(what)), "{message:?}");
    false
}

fn token(event: &[u8]) -> Option<Token> {
    Token::new(plain::find(event, "_id")?.document().and_then(plain::data)?).ok()
}

/// A reply read plainly.
struct Plain<'a> {
    events: Vec<&'a [u8]>,
    post_batch: Option<Token>,
    id: Option<i64>,
}

impl<'a> Plain<'a> {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        let cursor = plain::find(bytes, "cursor")?.document()?;
        let mut batches = Vec::new();
        for field in plain::fields(cursor) {
            let field = field?;
            if [b"firstBatch".as_slice(), b"nextBatch"].contains(&field.name) && field.kind == plain::ARRAY {
                batches.push(field.value);
            }
        }
        let events = batches.into_iter().flat_map(plain::fields).map(|event| event?.document());
        let post_batch = plain::find(cursor, "postBatchResumeToken").and_then(plain::Field::document);
        Some(Self {
            events: events.collect::<Option<_>>()?,
            post_batch: post_batch.and_then(plain::data).and_then(|data| Token::new(data).ok()),
            id: plain::find(cursor, "id").filter(|id| id.kind == plain::INT64).and_then(plain::Field::integer),
        })
    }
}
