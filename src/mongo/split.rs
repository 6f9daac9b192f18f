//! Events that came in fragments, put together again. No I/O.
//!
//! An event over 16 MB is split by the server's last stage where it has one. A fragment bears the event's token with its
//! own number in it; the first has the first fields, the others nothing but theirs. Only the whole is handed out, at the
//! token that the event would bear had it not been split: a fragment's is refused by a stream without the stage, and by
//! one that looks the document up once that has shrunk.

use bson::{RawDocument, RawDocumentBuf, cstr, doc, rawdoc};
use bytes::Bytes;

use super::classify::Fault;
use super::token;
use crate::checkpoint::Token;
use crate::event::ChangeEvent;

/// The stage that splits. It must be the last one.
pub(super) const STAGE: &str = "$changeStreamSplitLargeEvent";

/// The stage, to be appended.
pub(super) fn stage() -> bson::Document {
    doc! { STAGE: {} }
}

/// The fragments of the one event that is being put together.
#[derive(Debug, Default)]
pub(super) struct Fragments {
    parts: Vec<Bytes>,
    /// The token of the whole.
    token: Option<Token>,
}

/// What became of an event that was sent.
#[derive(Debug)]
pub(super) enum Put {
    /// It was no fragment.
    Event,
    /// It was a fragment, and more of them are to come.
    More,
    /// It was the last fragment: here is the whole.
    Whole(Box<Whole>),
}

/// An event that was put together, and its token.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) raw: Bytes,
    pub(super) token: Token,
}

impl Fragments {
    /// Whether there are fragments of an event that is not whole yet.
    pub(super) fn pending(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Takes what was sent next.
    pub(super) fn put(&mut self, raw: &Bytes) -> Result<Put, Fault> {
        let broken = |error: &dyn std::fmt::Display| Fault::fatal(format!("a fragment cannot be read: {error}"));
        let event = ChangeEvent::new(raw.clone()).map_err(|error| broken(&error))?;
        let Some(split) = event.split_event().map_err(|error| broken(&error))? else {
            return if self.pending() { Err(self.out_of_order("a whole event")) } else { Ok(Put::Event) };
        };
        let token = token::of_whole(&token::of_event(event.raw())?, split.fragment);
        if split.fragment as usize != self.parts.len() + 1
            || split.fragment > split.of
            || self.token.as_ref().is_some_and(|first| *first != token)
        {
            return Err(self.out_of_order(&format!("fragment {} of {}", split.fragment, split.of)));
        }
        self.parts.push(raw.clone());
        if split.fragment < split.of {
            self.token = Some(token);
            return Ok(Put::More);
        }
        self.token = None;
        let raw = whole(&std::mem::take(&mut self.parts), &token)?;
        Ok(Put::Whole(Box::new(Whole { raw, token })))
    }

    fn out_of_order(&self, what: &str) -> Fault {
        Fault::fatal(format!("the fragments of an event are not in order: {what} behind {} of them", self.parts.len()))
    }
}

/// One document of the fields of all fragments, with the token of the whole.
fn whole(parts: &[Bytes], token: &Token) -> Result<Bytes, Fault> {
    let broken = |error: &dyn std::fmt::Display| Fault::fatal(format!("a fragment cannot be read: {error}"));
    let mut bytes = Vec::with_capacity(parts.iter().map(Bytes::len).sum());
    bytes.extend_from_slice(rawdoc! {}.as_bytes());
    let mut whole = RawDocumentBuf::from_bytes(bytes).map_err(|error| broken(&error))?;
    whole.append(cstr!("_id"), rawdoc! { "_data": token.as_str() });
    for part in parts {
        for element in RawDocument::from_bytes(part).map_err(|error| broken(&error))?.iter_elements() {
            let element = element.map_err(|error| broken(&error))?;
            if !matches!(element.key().as_str(), "_id" | "splitEvent") {
                whole.append(element.key(), element.value().map_err(|error| broken(&error))?);
            }
        }
    }
    Ok(whole.into_bytes().into())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::model::Read;
    use crate::mongo::reply::Reply;
    use crate::mongo::reply::tests::{of_events, sent};
    use proptest::prelude::*;

    /// The token of a whole event in the layout of a stream that splits, or of one of its fragments, counted from 1.
    pub(crate) fn token(time: u32, index: u8, fragment: Option<u32>) -> Token {
        let number = match fragment {
            None => String::new(),
            Some(1) => "29".into(),
            Some(fragment) => format!("2B{:02X}", 2 * (fragment - 1)),
        };
        let index = if index == 0 { "29".into() } else { format!("2B{:02X}", 2 * index) };
        let uuid = "AB".repeat(16);
        let key = format!(
            "463C6F7065726174696F6E54797065003C757064617465004664\
                           6F63756D656E744B657900461E5F6964002B{:02X}0000",
            time % 100
        );
        Token::new(format!("82{time:08X}000000012B042C0100{index}6E5A1004{uuid}{key}{number}04")).unwrap()
    }

    pub(crate) fn fragment(time: u32, number: u32, of: u32) -> RawDocumentBuf {
        let mut fragment = rawdoc! { "_id": { "_data": token(time, 0, Some(number)).as_str() } };
        if number == 1 {
            fragment.append(cstr!("operationType"), "update");
        }
        let name = format!("field{number}");
        fragment.append(<&bson::raw::CStr>::try_from(name.as_str()).unwrap(), i64::from(number));
        fragment.append(
            cstr!("splitEvent"),
            rawdoc! { "fragment": i32::try_from(number).unwrap(), "of": i32::try_from(of).unwrap() },
        );
        fragment
    }

    /// What a stream sends of one event.
    fn sent_of(time: u32, fragments: u32) -> Vec<RawDocumentBuf> {
        match fragments {
            1 => vec![
                rawdoc! { "_id": { "_data": token(time, 0, None).as_str() }, "operationType": "update", "field1": 1_i64 },
            ],
            of => (1..=of).map(|number| fragment(time, number, of)).collect(),
        }
    }

    /// Its reads, by the numbers of their fields; what a reading task does with replies is `task.rs`'s.
    fn read(replies: &[&[RawDocumentBuf]], behind: Option<&Token>) -> Vec<(Token, Vec<i64>)> {
        let (mut fragments, mut read, mut dropping) = (Fragments::default(), Vec::new(), behind);
        for events in replies {
            let mut reply = of_events(events);
            reply.assemble(&mut fragments).unwrap();
            if let Some(position) = dropping
                && reply.drop_through(position).unwrap()
            {
                dropping = None;
            }
            let last = reply.last.clone();
            let mut tokens = Vec::new();
            while let Some(event) = reply.next_event() {
                let Read::Event { event, position } = event.unwrap() else { panic!("an event") };
                assert_eq!(event.position().unwrap(), position);
                assert_eq!(event.split_event().unwrap(), None);
                assert_eq!(event.operation().unwrap(), crate::Operation::Update);
                let fields =
                    event.raw().iter_elements().filter_map(|element| element.unwrap().value().unwrap().as_i64());
                tokens.push(position.token().unwrap().clone());
                read.push((position.token().unwrap().clone(), fields.collect()));
            }
            assert!(tokens.is_empty() || tokens.last() == last.as_ref());
        }
        read
    }

    #[test]
    fn fragments_in_another_order_are_refused() {
        let bytes = |event: RawDocumentBuf| Bytes::from(event.into_bytes());
        for wrong in [
            vec![fragment(7, 2, 2)],
            vec![fragment(7, 1, 3), fragment(7, 3, 3)],
            vec![fragment(7, 1, 2), fragment(8, 2, 2)],
            vec![fragment(7, 1, 2), sent_of(8, 1).remove(0)],
            vec![fragment(7, 1, 2), fragment(7, 1, 2)],
        ] {
            let mut fragments = Fragments::default();
            let outcomes: Vec<_> = wrong.into_iter().map(|event| fragments.put(&bytes(event)).is_err()).collect();
            assert_eq!(outcomes.last(), Some(&true), "{outcomes:?}");
        }
    }

    #[test]
    fn the_end_of_the_oplog_is_not_told_from_a_fragment() {
        let reply = |tokens: &[Token], post_batch: &Token| sent(tokens, Some(post_batch));
        let (first, second) = (token(7, 0, Some(1)), token(7, 0, Some(2)));
        assert!(!reply(std::slice::from_ref(&first), &first).ends_at_the_end_of_the_oplog());
        assert!(!reply(std::slice::from_ref(&second), &second).ends_at_the_end_of_the_oplog());
    }

    proptest! {
        #[test]
        fn any_way_of_cutting_events_into_fragments_and_replies_gives_the_same_events(
            events in prop::collection::vec(1_u32..5, 1..6),
            cuts in prop::collection::vec(any::<bool>(), 0..24),
            behind in prop::option::of(0_usize..6),
        ) {
            let all: Vec<_> = (7..).zip(&events).flat_map(|(time, of)| sent_of(time, *of)).collect();
            let mut replies = Vec::new();
            let mut begin = 0;
            for end in 1..=all.len() {
                if end == all.len() || cuts.get(end).copied().unwrap_or(false) {
                    replies.push(&all[begin..end]);
                    begin = end;
                }
            }
            let whole: Vec<_> = (7..).zip(&events).map(|(time, of)| (token(time, 0, None), (1..=i64::from(*of)).collect())).collect();
            prop_assert_eq!(&read(&replies, None), &whole);
            // A reopen at any position gives what is behind it, neither less nor more.
            let at = behind.filter(|at| *at < whole.len());
            if let Some(at) = at {
                prop_assert_eq!(&read(&replies, Some(&whole[at].0)), &whole[at + 1..]);
            }
            // Cut off anywhere and read again from the last whole event, nothing is lost or comes twice.
            for cut in 0..=replies.len() {
                let mut before = read(&replies[..cut], None);
                let behind = before.last().map(|(token, _)| token.clone());
                before.extend(read(&replies, behind.as_ref()));
                prop_assert_eq!(&before, &whole);
            }
        }
    }

    #[test]
    fn what_is_held_is_the_reply_and_what_was_put_together() {
        let mut reply: Reply = of_events(&sent_of(7, 3));
        let sent = reply.size();
        reply.assemble(&mut Fragments::default()).unwrap();
        assert!(reply.size() > sent);
        assert_eq!((reply.left(), reply.came), (1, 3));
    }
}
