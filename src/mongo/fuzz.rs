//! What this backend keeps to itself, for the fuzzing targets in `src/fuzz/`, and for them alone.

use bson::Document;
use bytes::Bytes;

use super::reply::Reply;
use super::stages;
use crate::checkpoint::{Checkpoint, Token};
use crate::event::ChangeEvent;
use crate::ids::Namespace;
use crate::model::{Read, Scope};

pub(crate) use super::occurrent::position as position_in_text;
pub(crate) use super::record::{decode as decode_record, encode_position, encode_source};
pub(crate) use super::stages::check as check_stages;
pub(crate) use super::token::covers;

/// What was read of a reply, up to the first event that could not be.
pub(crate) struct Taken {
    pub(crate) events: Vec<Result<(ChangeEvent, Checkpoint), String>>,
    pub(crate) last: Option<Token>,
    pub(crate) post_batch: Option<Token>,
    pub(crate) closed: bool,
}

/// Reads a reply as the reading task does, from behind a position when there is one.
pub(crate) fn read_reply(bytes: Bytes, behind: Option<&Token>) -> Result<Taken, String> {
    let mut reply = Reply::read(bytes).map_err(|fault| fault.message)?;
    if let Some(position) = behind {
        reply.drop_through(position).map_err(|fault| fault.message)?;
    }
    let mut events = Vec::new();
    while let Some(read) = reply.next_event() {
        events.push(match read {
            Ok(Read::Event { event, position }) => Ok((event, position)),
            Ok(Read::Quiet(position)) => panic!("a quiet position {position} among events"),
            Err(fault) => Err(fault.message),
        });
        if events.last().is_some_and(Result::is_err) {
            break;
        }
    }
    Ok(Taken { events, last: reply.last, post_batch: reply.post_batch, closed: reply.closed })
}

/// What is sent for the user's stages.
pub(crate) fn behind_the_source(own: &[Document]) -> Vec<Document> {
    stages::behind_the_source(&Scope::Collection(Namespace::new("shop", "orders")), &[], own)
}
