//! An event that the server cannot send, because it is too large or lacks an image that is required: which one it is, and
//! how a stream is opened behind it once it is done.
//!
//! The server fails the reply and does not say at which event, and it fails again for one that is done already, because a
//! stream is opened by time and reads the events of its position's time once more. Measured on 4.4.2, 5.0.4, 6.0.5 and
//! 6.0.27: a `$match` on the token in front keeps the server from building a large event and from looking for an image.

use std::ops::ControlFlow;

use bson::{RawBsonRef, Timestamp, doc};

use super::classify::{Class, Fault, image_in};
use super::open::{Around, Source};
use super::outline;
use super::present;
use super::scan::scan;
use super::split;
use super::token;
use crate::checkpoint::{Checkpoint, Token};
use crate::event::ChangeEvent;
use crate::reason::Reason;

/// What was found out.
#[derive(Debug)]
pub(super) enum Found {
    /// It may be one that is done: this is a way around it.
    Around(Around),
    /// It is not done.
    Event(Reason),
}

/// Finds the event at which a stream from the position fails with one event to a reply. `went_around`: what is done there
/// has been excluded already.
pub(super) async fn find(
    source: &Source,
    position: Option<&Checkpoint>,
    split: bool,
    fault: &Fault,
    went_around: bool,
) -> Result<Found, Fault> {
    let Some(position) = position else { return Err(fault.clone()) };
    if let (Checkpoint::Token(token), false) = (position, went_around)
        && !token.is_invalidate()
        && let Some(around) = around(source, token, split).await?
    {
        return Ok(Found::Around(around));
    }
    let event = match fault.class {
        Class::ImageMissing => lacking(source, position, split, fault).await?,
        _ => first(source, position, split).await?,
    };
    let position = match event {
        Some(token) => Checkpoint::Token(token),
        // What is looked up can have changed since.
        None if !went_around => return Ok(Found::Around(Around::default())),
        None => position.clone(),
    };
    Ok(Found::Event(match fault.class {
        Class::ImageMissing => Reason::ImageMissing { position, image: image_in(&fault.message).to_owned() },
        _ => Reason::EventTooLarge { position },
    }))
}

/// A way around the events at the position's time that it covers; none when there are none.
async fn around(source: &Source, position: &Token, split: bool) -> Result<Option<Around>, Fault> {
    let mut events = source.bare();
    events.pipeline = vec![outline::stage()];
    if split {
        events.pipeline.push(split::stage());
    }
    let time = position.cluster_time();
    let (mut done, mut left) = (None, false);
    let from = Checkpoint::Time(time);
    scan(&events, &from, time, |_, token| {
        if token.cluster_time() > time {
            return Ok(ControlFlow::Break(()));
        }
        if !token::covers(position, &token) {
            left = true;
            return Ok(ControlFlow::Break(()));
        }
        done = Some(token);
        Ok(ControlFlow::Continue(()))
    })
    .await?;
    // The token as this stream gives it.
    Ok(done.map(|last| {
        if left {
            Around { start: None, stages: vec![doc! { "$match": { "_id._data": { "$gt": last.as_str() } } }] }
        } else {
            Around { start: Some(present::after(time)), stages: Vec::new() }
        }
    }))
}

/// The first event behind a position that the stream's own pipeline passes. Its token is one of the stream's own layout:
/// another one would not compare with the positions that the stream gives.
async fn first(source: &Source, position: &Checkpoint, split: bool) -> Result<Option<Token>, Fault> {
    let mut events = source.clone();
    events.pipeline.push(outline::stage());
    if split {
        events.pipeline.push(split::stage());
    }
    behind(&events, position, |_| true).await
}

/// The first event behind a position that lacks the image.
async fn lacking(source: &Source, position: &Checkpoint, split: bool, fault: &Fault) -> Result<Option<Token>, Fault> {
    let image = image_in(&fault.message);
    let mut events = source.bare();
    events.stage.insert(image, "whenAvailable");
    let mut stage = outline::stage();
    if let Ok(fields) = stage.get_document_mut("$project") {
        fields.insert("missing", doc! { "$eq": [{ "$type": format!("${image}") }, "null"] });
    }
    events.pipeline = vec![stage];
    if split {
        events.pipeline.push(split::stage());
    }
    let told = told_time(&fault.message);
    behind(&events, position, |event| {
        let missing = matches!(event.get("missing"), Ok(Some(RawBsonRef::Boolean(true))));
        // The user's stages may keep an earlier one from being looked at.
        missing && told.is_none_or(|told| event.cluster_time().is_ok_and(|time| time >= told))
    })
    .await
}

/// The first event behind a position of which that holds.
async fn behind(
    source: &Source,
    position: &Checkpoint,
    is_it: impl Fn(&ChangeEvent) -> bool,
) -> Result<Option<Token>, Fault> {
    let head = present::head(source).await?;
    let mut found = None;
    scan(source, position, head, |event, token| {
        let done = matches!(position, Checkpoint::Token(position) if token::covers(position, &token));
        found = (!done && is_it(&event)).then_some(token);
        Ok(if found.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })
    .await?;
    Ok(found)
}

/// The cluster time that the server names in its message, where it does.
fn told_time(message: &str) -> Option<Timestamp> {
    let (_, rest) = message.split_once("clusterTime: Timestamp(")?;
    let (time, rest) = rest.split_once(", ")?;
    let (increment, _) = rest.split_once(')')?;
    Some(Timestamp { time: time.parse().ok()?, increment: increment.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_read_out_of_what_the_server_says() {
        let said = "the post-image was not found for event: {operationType: \"update\", ns: {db: \"t2\", coll: \"things\"}, \
                    clusterTime: Timestamp(1796091728, 5)}";
        assert_eq!(told_time(said), Some(Timestamp { time: 1_796_091_728, increment: 5 }));
        assert_eq!(told_time("the post-image was not found"), None);
    }
}
