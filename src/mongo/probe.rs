//! What the deployment's own history says: whether it shows the end of a collection, by which a changed UUID is explained,
//! and whether it has the event at a position.
//!
//! A drop and a rename away carry the UUID in their token. A rename over the collection carries that of the one which
//! takes its name; what it replaced stands in the expanded event of a server 6.0, and before that is told only by an
//! earlier event of the collection. Measured on 4.4.2, 5.0.4 and 6.0.27.

use std::ops::ControlFlow;

use bson::{RawBsonRef, Timestamp, doc, spec::BinarySubtype};

use super::classify::{Class, Fault};
use super::open::Source;
use super::present;
use super::scan::{EVENTS, Over, scan, scan_by};
use super::token::{hex, is_maybe_same_event};
use crate::checkpoint::{Checkpoint, Token};
use crate::event::{ChangeEvent, Operation};
use crate::ids::Namespace;
use crate::model::Scope;

/// What a server says that knows no expanded events.
const UNKNOWN_OPTION: i32 = 40415;

/// What an event says of a collection with a UUID.
#[derive(Debug, PartialEq, Eq)]
enum Says {
    /// It has ended here.
    Ended,
    /// Something has taken its name here, and it is not said what bore it before.
    Replaced,
    /// Nothing.
    Nothing,
}

/// Reads from `from` to the head as it is now.
pub(super) async fn ended_since(source: &Source, from: &Checkpoint, uuid: &str) -> Result<bool, Fault> {
    let head = present::head(source).await?;
    let mut expanded = source.bare();
    expanded.pipeline = vec![doc! { "$match": { "operationType": { "$in": [
        Operation::Drop.as_str(), Operation::Rename.as_str(), Operation::DropDatabase.as_str(),
        Operation::Invalidate.as_str(),
    ] } } }];
    let plain = expanded.clone();
    expanded.stage.insert("showExpandedEvents", true);
    match ended(&expanded, from, head, uuid).await {
        Err(Fault { code: Some(UNKNOWN_OPTION), .. }) => ended(&plain, from, head, uuid).await,
        ended => ended,
    }
}

async fn ended(source: &Source, from: &Checkpoint, head: Timestamp, uuid: &str) -> Result<bool, Fault> {
    let own = match &source.scope {
        Scope::Collection(namespace) => Some(namespace),
        Scope::Database { .. } | Scope::Deployment => None,
    };
    let mut from = from.clone();
    // Only the first end of anything under this name can be that of what lived there at the position.
    let mut first = true;
    loop {
        let (mut ended, mut replaced) = (false, None);
        let over = scan(source, &from, head, |event, token| {
            match says(&event, &token, own, uuid)? {
                Says::Ended => ended = true,
                Says::Replaced if first => replaced = Some(token),
                Says::Replaced | Says::Nothing => {}
            }
            first = false;
            Ok(if ended { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        });
        let over = over.await?;
        if ended {
            return Ok(true);
        }
        if let Some(at) = replaced
            && lived_before(source, &at, uuid).await?
        {
            return Ok(true);
        }
        match over {
            Over::Closed(Some(token)) if token.is_invalidate() => from = token.into(),
            Over::Closed(_) => return Err(Fault::retry("the server has ended the stream and does not say where")),
            Over::Stopped | Over::Reached => return Ok(false),
        }
    }
}

/// Whether the event with this token is in the history of what is watched. One that cannot be sent is.
pub(super) async fn has_event(source: &Source, at: &Token) -> Result<bool, Fault> {
    // The member that is read has to have gone past the event's time: a primary that was elected just now may have a head
    // behind what was committed, and a member that lags does not show it yet. To miss it there would be wrong.
    let until = present::head(source).await?.max(present::after(at.cluster_time()));
    let mut expanded = source.bare();
    expanded.pipeline = vec![doc! { "$project": { "operationType": 1, "clusterTime": 1, "ns": 1 } }];
    let plain = expanded.clone();
    // It may be one that only a stream of expanded events has.
    expanded.stage.insert("showExpandedEvents", true);
    let has = match find(&expanded, at, until).await {
        Err(Fault { code: Some(UNKNOWN_OPTION), .. }) => find(&plain, at, until).await,
        has => has,
    };
    match has {
        Err(Fault { class: Class::TooLarge | Class::ImageMissing, .. }) => Ok(true),
        has => has,
    }
}

async fn find(events: &Source, at: &Token, until: Timestamp) -> Result<bool, Fault> {
    let from = Checkpoint::Token(at.clone());
    // It is the first one, unless it is one of a transaction.
    for most in [1, EVENTS] {
        let (mut has, mut more) = (false, false);
        let over = scan_by(events, most, &from, until, |_, token| {
            let is_of_its_time = token.cluster_time() == at.cluster_time();
            has = is_of_its_time && is_maybe_same_event(&token, at);
            more = is_of_its_time && most == 1;
            Ok(if has || more || !is_of_its_time { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        });
        over.await?;
        if has || !more {
            return Ok(has);
        }
    }
    Ok(false)
}

fn says(event: &ChangeEvent, token: &Token, own: Option<&Namespace>, uuid: &str) -> Result<Says, Fault> {
    let broken = |error: &dyn std::fmt::Display| Fault::fatal(format!("an event cannot be read: {error}"));
    let operation = event.operation().map_err(|error| broken(&error))?;
    let to = event.to().map_err(|error| broken(&error))?;
    let over = own.is_some() && to.as_ref() == own;
    match operation {
        Operation::Drop => return Ok(if token.collection_uuid() == Some(uuid) { Says::Ended } else { Says::Nothing }),
        Operation::Rename if !over && token.collection_uuid() == Some(uuid) => return Ok(Says::Ended),
        Operation::Rename => {}
        // An `invalidate` bears the UUID of whatever came before it.
        _ => return Ok(Says::Nothing),
    }
    let described = event.operation_description().map_err(|error| broken(&error))?;
    match described.and_then(|described| described.get("dropTarget").ok().flatten()) {
        Some(RawBsonRef::Binary(target)) if target.subtype == BinarySubtype::Uuid => {
            Ok(if hex(target.bytes) == uuid { Says::Ended } else { Says::Nothing })
        }
        Some(_) => Ok(Says::Nothing),
        None => Ok(if over { Says::Replaced } else { Says::Nothing }),
    }
}

/// Whether the history before a position has any event of a collection with this UUID, in what is watched.
async fn lived_before(source: &Source, at: &Token, uuid: &str) -> Result<bool, Fault> {
    let mut events = source.bare();
    events.pipeline = vec![
        doc! { "$match": { "$or": [
            { "_id._data": { "$regex": format!("5A1004{uuid}") } },
            { "operationType": Operation::Invalidate.as_str() },
        ] } },
        doc! { "$project": { "operationType": 1, "clusterTime": 1, "ns": 1 } },
    ];
    let mut from = Checkpoint::Time(present::earliest(source).await?);
    loop {
        let (mut lived, mut passed) = (false, false);
        let over = scan(&events, &from, at.cluster_time(), |_, token| {
            passed = token >= *at;
            lived = !passed && token.collection_uuid() == Some(uuid);
            Ok(if passed || lived { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        });
        let over = over.await?;
        match over {
            _ if lived || passed => return Ok(lived),
            Over::Closed(Some(token)) if token.is_invalidate() => from = token.into(),
            Over::Closed(_) => return Err(Fault::retry("the server has ended the stream and does not say where")),
            Over::Stopped | Over::Reached => return Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bson::{Document, Uuid};

    const OLD: &str = "0102030405060708090A0B0C0D0E0F10";
    const NEW: &str = "F102030405060708090A0B0C0D0E0F10";

    fn event(fields: Document, uuid: &str) -> (ChangeEvent, Token) {
        let token = Token::new(format!("826568B1F0000000032B022C0100296E5A1004{uuid}04")).unwrap();
        let mut event = doc! { "_id": { "_data": token.as_str() } };
        event.extend(fields);
        (ChangeEvent::from_document(&event), token)
    }

    #[test]
    fn the_end_of_a_collection_is_told_from_that_of_another_one() {
        let own = Namespace::new("shop", "orders");
        let ns = |collection: &str| doc! { "db": "shop", "coll": collection };
        let rename = |to: &str, target: Option<&str>| {
            let mut event = doc! { "operationType": "rename", "ns": ns("any"), "to": ns(to) };
            if let Some(target) = target {
                let bytes: Vec<u8> =
                    (0..16).map(|at| u8::from_str_radix(&target[2 * at..2 * at + 2], 16).unwrap()).collect();
                let target = Uuid::from_bytes(bytes.try_into().unwrap());
                event.insert("operationDescription", doc! { "to": ns(to), "dropTarget": target });
            }
            event
        };
        let drop = doc! { "operationType": "drop", "ns": ns("orders") };
        for (fields, uuid, expected) in [
            (drop.clone(), OLD, Says::Ended),
            (drop, NEW, Says::Nothing),
            (rename("elsewhere", None), OLD, Says::Ended),
            (rename("elsewhere", None), NEW, Says::Nothing),
            (rename("orders", None), NEW, Says::Replaced),
            (rename("orders", Some(OLD)), NEW, Says::Ended),
            (rename("orders", Some(NEW)), NEW, Says::Nothing),
            (rename("orders", None), OLD, Says::Replaced),
            (doc! { "operationType": "invalidate" }, OLD, Says::Nothing),
            (doc! { "operationType": "dropDatabase", "ns": { "db": "shop" } }, OLD, Says::Nothing),
        ] {
            let (event, token) = event(fields, uuid);
            assert_eq!(says(&event, &token, Some(&own), OLD), Ok(expected), "{event:?} {uuid}");
        }
        let (event, token) = event(rename("orders", None), NEW);
        assert_eq!(says(&event, &token, None, OLD), Ok(Says::Nothing), "no name is watched");
    }
}
