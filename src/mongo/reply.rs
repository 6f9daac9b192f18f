//! One reply of the server: its events as slices of it, its post-batch token, and whether the cursor ended. No I/O.

use bson::{RawArray, RawBsonRef, RawDocument};
use bytes::Bytes;
use mongodb::raw_batch_cursor::RawBatch;

use super::classify::Fault;
use super::split::{Fragments, Put, Whole};
use super::token;
use crate::checkpoint::{Checkpoint, Token};
use crate::event::ChangeEvent;
use crate::model::Read;

/// A reply, taken apart but not decoded.
#[derive(Debug)]
pub(super) struct Reply {
    bytes: Bytes,
    /// The events; those before `next` have been dropped or handed out.
    events: Vec<Slot>,
    next: usize,
    /// How many events and fragments it came with.
    pub(super) came: usize,
    /// The token of the last event.
    pub(super) last: Option<Token>,
    /// The token of what was sent last, which may be a fragment.
    sent_last: Option<Token>,
    pub(super) post_batch: Option<Token>,
    /// No further reply comes from this cursor.
    pub(super) closed: bool,
}

/// An event of a reply.
#[derive(Debug)]
enum Slot {
    /// Where it lies.
    Sent(u32, u32),
    /// It was put together.
    Whole(Box<Whole>),
}

/// Makes a driver's reply the owner behind [`Bytes`].
struct Owned(RawBatch);

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        self.0.as_raw_document().as_bytes()
    }
}

impl Reply {
    pub(super) fn of(batch: RawBatch) -> Result<Self, Fault> {
        Self::read(Bytes::from_owner(Owned(batch)))
    }

    pub(super) fn read(bytes: Bytes) -> Result<Self, Fault> {
        let broken = |error: &dyn std::fmt::Display| Fault::fatal(format!("a reply cannot be read: {error}"));
        let reply = RawDocument::from_bytes(&bytes).map_err(|error| broken(&error))?;
        let (mut batch, mut post_batch, mut closed) = (None::<&RawArray>, None, false);
        for element in reply.get_document("cursor").map_err(|error| broken(&error))? {
            match element.map_err(|error| broken(&error))? {
                (key, RawBsonRef::Array(_)) if batch.is_some() && (key == "firstBatch" || key == "nextBatch") => {
                    return Err(broken(&"it has two batches"));
                }
                (key, RawBsonRef::Array(events)) if key == "firstBatch" || key == "nextBatch" => batch = Some(events),
                (key, RawBsonRef::Document(id)) if key == "postBatchResumeToken" => {
                    let data = id.get_str("_data").map_err(|error| broken(&error))?;
                    post_batch = Some(Token::new(data).map_err(|error| broken(&error))?);
                }
                (key, RawBsonRef::Int64(id)) if key == "id" => closed = id == 0,
                _ => {}
            }
        }
        let base = bytes.as_ptr() as usize;
        let mut events = Vec::new();
        let mut last = None;
        for event in batch.ok_or_else(|| broken(&"it has no batch"))? {
            let RawBsonRef::Document(event) = event.map_err(|error| broken(&error))? else {
                return Err(broken(&"an event is no document"));
            };
            let begin = event.as_bytes().as_ptr() as usize - base;
            let span = |at: usize| u32::try_from(at).map_err(|error| broken(&error));
            events.push(Slot::Sent(span(begin)?, span(begin + event.as_bytes().len())?));
            last = Some(event);
        }
        let last = last.map(token::of_event).transpose()?;
        Ok(Self { came: events.len(), events, next: 0, sent_last: last.clone(), last, post_batch, closed, bytes })
    }

    /// Puts fragments together: only whole events are left, and what lacks a fragment is kept for the next reply.
    pub(super) fn assemble(&mut self, fragments: &mut Fragments) -> Result<(), Fault> {
        let mut events = Vec::with_capacity(self.events.len());
        for slot in std::mem::take(&mut self.events) {
            match fragments.put(&self.raw(&slot))? {
                Put::Event => events.push(slot),
                Put::More => {}
                Put::Whole(whole) => events.push(Slot::Whole(whole)),
            }
        }
        self.events = events;
        self.last = self.events.last().map(|slot| self.token(slot)).transpose()?;
        Ok(())
    }

    fn raw(&self, slot: &Slot) -> Bytes {
        match slot {
            Slot::Sent(begin, end) => self.bytes.slice(*begin as usize..*end as usize),
            Slot::Whole(whole) => whole.raw.clone(),
        }
    }

    fn token(&self, slot: &Slot) -> Result<Token, Fault> {
        match slot {
            Slot::Sent(begin, end) => {
                let event = RawDocument::from_bytes(&self.bytes[*begin as usize..*end as usize]);
                token::of_event(event.map_err(|error| Fault::fatal(format!("an event cannot be read: {error}")))?)
            }
            Slot::Whole(whole) => Ok(whole.token.clone()),
        }
    }

    /// The bytes it keeps in memory.
    pub(super) fn size(&self) -> usize {
        let put_together = self.events.iter().map(|slot| match slot {
            Slot::Sent(..) => 0,
            Slot::Whole(whole) => whole.raw.len(),
        });
        self.bytes.len() + put_together.sum::<usize>()
    }

    /// How many bytes it came with.
    pub(super) fn sent(&self) -> usize {
        self.bytes.len()
    }

    /// How many events have been dropped or handed out.
    pub(super) fn gone(&self) -> usize {
        self.next
    }

    /// How many events have been neither dropped nor handed out.
    pub(super) fn left(&self) -> usize {
        self.events.len() - self.next
    }

    /// Whether there was nothing to read behind it when it was made: it is empty, or its post-batch token lies beyond
    /// its last event.
    pub(super) fn ends_at_the_end_of_the_oplog(&self) -> bool {
        match (&self.sent_last, &self.post_batch) {
            (None, _) => true,
            (Some(sent), Some(post_batch)) => post_batch > sent,
            (Some(_), None) => false,
        }
    }

    /// Drops the events at the front that `position` covers; `true` when there was one behind them.
    pub(super) fn drop_through(&mut self, position: &Token) -> Result<bool, Fault> {
        while let Some(slot) = self.events.get(self.next) {
            if !token::covers(position, &self.token(slot)?) {
                return Ok(true);
            }
            self.next += 1;
        }
        Ok(false)
    }

    /// The next event, as a slice of the reply.
    pub(super) fn next_event(&mut self) -> Option<Result<Read, Fault>> {
        let slot = self.events.get(self.next)?;
        self.next += 1;
        Some(self.event(slot))
    }

    fn event(&self, slot: &Slot) -> Result<Read, Fault> {
        let position = Checkpoint::Token(self.token(slot)?);
        let event = ChangeEvent::new(self.raw(slot));
        let event = event.map_err(|error| Fault::fatal(format!("an event cannot be read: {error}")))?;
        Ok(Read::Event { event, position })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use bson::{RawDocumentBuf, rawdoc};

    pub(crate) fn token(time: u32, index: u8) -> Token {
        Token::new(format!("82{time:08X}000000012B022C01002B{:02X}6E5A1004{}", index * 2, "AB".repeat(16))).unwrap()
    }

    pub(crate) fn quiet(time: u32) -> Token {
        Token::new(format!("82{time:08X}000000012B0229296E04")).unwrap()
    }

    pub(crate) fn reply(events: &[Token], post_batch: Option<&Token>, id: i64) -> Reply {
        let event = |token: &Token| rawdoc! { "_id": { "_data": token.as_str() }, "operationType": "insert" };
        let events: Vec<_> = events.iter().map(event).collect();
        made(&events, post_batch, id)
    }

    pub(crate) fn sent(events: &[Token], post_batch: Option<&Token>) -> Reply {
        reply(events, post_batch, 5)
    }

    pub(crate) fn of_events(events: &[RawDocumentBuf]) -> Reply {
        made(events, None, 5)
    }

    pub(crate) fn made(events: &[RawDocumentBuf], post_batch: Option<&Token>, id: i64) -> Reply {
        let mut batch = bson::RawArrayBuf::new();
        for event in events {
            batch.push(event.clone());
        }
        let mut cursor: RawDocumentBuf = rawdoc! { "nextBatch": batch, "id": id, "ns": "shop.orders" };
        if let Some(token) = post_batch {
            cursor.append(bson::cstr!("postBatchResumeToken"), rawdoc! { "_data": token.as_str() });
        }
        Reply::read(Bytes::from(rawdoc! { "cursor": cursor, "ok": 1.0 }.into_bytes())).unwrap()
    }

    #[test]
    fn its_events_are_slices_of_it_and_its_marks_are_read() {
        let tokens = [token(7, 1), token(7, 2), token(8, 1)];
        let mut reply = reply(&tokens, Some(&quiet(9)), 5);
        assert_eq!((reply.came, reply.left(), reply.closed), (3, 3, false));
        assert_eq!((reply.last.as_ref(), reply.post_batch.as_ref()), (Some(&tokens[2]), Some(&quiet(9))));
        let whole = reply.bytes.as_ptr_range();
        for token in tokens {
            let Some(Ok(Read::Event { event, position })) = reply.next_event() else { panic!("an event is missing") };
            assert_eq!(position, Checkpoint::Token(token));
            assert!(whole.contains(&event.raw().as_bytes().as_ptr()));
        }
        assert!(reply.next_event().is_none());
    }

    #[test]
    fn the_end_of_the_oplog_shows_in_an_empty_reply_and_in_a_later_post_batch_token() {
        assert!(reply(&[], Some(&quiet(9)), 5).ends_at_the_end_of_the_oplog());
        assert!(reply(&[token(7, 1)], Some(&quiet(9)), 5).ends_at_the_end_of_the_oplog());
        assert!(!reply(&[token(7, 1)], Some(&token(7, 1)), 5).ends_at_the_end_of_the_oplog());
        assert!(!reply(&[token(7, 1)], None, 0).ends_at_the_end_of_the_oplog());
    }

    #[test]
    fn what_a_position_covers_is_dropped_at_the_front_only() {
        let mut reply = reply(&[token(7, 1), token(7, 2), token(8, 1)], None, 5);
        assert_eq!(reply.drop_through(&token(7, 2)), Ok(true));
        assert_eq!(reply.left(), 1);
        assert_eq!(reply.drop_through(&token(8, 1)), Ok(false));
        assert_eq!(reply.left(), 0);
    }

    #[test]
    fn a_reply_without_a_batch_or_with_two_or_with_an_event_without_a_token_is_refused() {
        let read = |reply: RawDocumentBuf| Reply::read(Bytes::from(reply.into_bytes()));
        assert!(read(rawdoc! { "ok": 1 }).is_err());
        assert!(read(rawdoc! { "cursor": { "id": 1_i64 } }).is_err());
        assert!(read(rawdoc! { "cursor": { "id": 1_i64, "nextBatch": [ { "a": 1 } ] } }).is_err());
        assert!(read(rawdoc! { "cursor": { "firstBatch": [], "id": 1_i64, "nextBatch": [] } }).is_err());
        assert!(read(rawdoc! { "cursor": { "id": 0_i64, "nextBatch": [] } }).unwrap().closed);
    }
}
