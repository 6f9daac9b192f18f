//! Reads a stream once, without recovery and without a task of its own: to look something up in the deployment's history.
//! Called by `probe.rs`, `outline.rs` and `unsendable.rs`.

use std::ops::ControlFlow;

use bson::Timestamp;

use super::classify::{Class, Fault, Phase};
use super::open::{Around, Source, Stream};
use super::reply::Reply;
use super::step::How;
use crate::checkpoint::{Checkpoint, Token};
use crate::event::ChangeEvent;
use crate::model::Read;

/// How many events a reply may hold, unless a single one is looked for.
pub(super) const EVENTS: u32 = 100;

/// Why a scan is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Over {
    /// It was told to stop.
    Stopped,
    /// Everything up to the time has been read.
    Reached,
    /// The stream has ended: with the last position of its last reply, which is that of an `invalidate` unless the server
    /// has lost its word.
    Closed(Option<Token>),
}

/// Hands every event from the position's cluster time on to `each`, those that the position covers too, until it breaks,
/// or everything up to `until` was read.
///
/// # Cancel safety
/// Nothing is lost by dropping it.
pub(super) async fn scan(
    source: &Source,
    from: &Checkpoint,
    until: Timestamp,
    each: impl FnMut(ChangeEvent, Token) -> Result<ControlFlow<()>, Fault>,
) -> Result<Over, Fault> {
    scan_by(source, EVENTS, from, until, each).await
}

/// The same with so many events in a reply at the most.
///
/// # Cancel safety
/// Nothing is lost by dropping it.
pub(super) async fn scan_by(
    source: &Source,
    most: u32,
    from: &Checkpoint,
    until: Timestamp,
    mut each: impl FnMut(ChangeEvent, Token) -> Result<ControlFlow<()>, Fault>,
) -> Result<Over, Fault> {
    let mut stream = open(source, most, from).await?;
    let mut last = None;
    while let Some((reply, first)) = stream.next().await {
        let reply = reply.map_err(|error| Fault::of_driver(Phase::GetMore, &error))?;
        let mut reply = Reply::of(reply)?;
        let (at_end, closed, post_batch) =
            (reply.ends_at_the_end_of_the_oplog(), reply.closed, reply.post_batch.clone());
        while let Some(read) = reply.next_event() {
            let Read::Event { event, position: Checkpoint::Token(token) } = read? else { continue };
            if each(event, token.clone())?.is_break() {
                return Ok(Over::Stopped);
            }
            last = Some(token);
        }
        last = post_batch.or(last);
        if closed {
            return Ok(Over::Closed(last));
        }
        let blind = first && stream.blind();
        if at_end && !blind && last.as_ref().is_some_and(|last| last.cluster_time() >= until) {
            return Ok(Over::Reached);
        }
    }
    Err(Fault::retry("the server has ended the stream"))
}

async fn open(source: &Source, most: u32, from: &Checkpoint) -> Result<Stream, Fault> {
    let how = |behind| How { first: if behind { 0 } else { most }, events: most, behind, split: false };
    match source.open(Some(from), how(false), &Around::default()).await {
        Err(Fault { class: Class::Behind, .. }) => source.open(Some(from), how(true), &Around::default()).await,
        opened => opened,
    }
}
