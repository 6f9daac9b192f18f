//! Events without their bodies: what can be had of one that the server cannot send whole.

use std::ops::ControlFlow;

use bson::{Document, doc};

use super::classify::Fault;
use super::open::Source;
use super::scan::scan;
use super::token;
use crate::checkpoint::Checkpoint;
use crate::event::ChangeEvent;

/// Keeps of an event what says which one it is; its `_id` is kept in any case.
pub(super) fn stage() -> Document {
    doc! { "$project": {
        "operationType": 1, "clusterTime": 1, "wallTime": 1, "ns": 1, "to": 1, "documentKey": 1, "txnNumber": 1, "lsid": 1,
    } }
}

/// The event at a position. A time, and the position of no event, has none.
pub(super) async fn at(source: &Source, position: &Checkpoint) -> Result<Option<ChangeEvent>, Fault> {
    let Checkpoint::Token(at) = position else { return Ok(None) };
    let mut source = source.bare();
    source.pipeline = vec![stage()];
    let mut found = None;
    scan(&source, position, at.cluster_time(), |event, token| {
        let is_it = token::is_same_event(at, &token);
        let passed = token.cluster_time() > at.cluster_time();
        found = (is_it && !passed).then_some(event);
        Ok(if is_it || passed { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })
    .await?;
    Ok(found)
}
