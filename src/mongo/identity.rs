//! What identifies a source: the collection's UUID and the replica set, as far as the user's rights show them.

use bson::{Bson, doc, spec::BinarySubtype};

use super::classify::Fault;
use super::hello::{hello, on_primary};
use super::open::Source;
use super::token::hex;
use crate::ids::Namespace;
use crate::model::{Identity, Scope};

/// Asks for it. What is refused is not known; what could not be asked is an error.
pub(super) async fn identity(source: &Source) -> Result<Identity, Fault> {
    let mut identity = Identity::new(source.scope.clone());
    identity.deployment = match hello(source.database.client()).await {
        Ok(hello) => hello.deployment,
        Err(fault) if fault.is_refusal() => None,
        Err(fault) => return Err(fault),
    };
    if let Scope::Collection(namespace) = &source.scope {
        (identity.collection_uuid, identity.shows_collection) = match uuid(source, namespace).await {
            Ok(uuid) => (uuid, true),
            Err(fault) if fault.is_refusal() => (None, false),
            Err(fault) => return Err(fault),
        };
    }
    Ok(identity)
}

/// The UUID of a collection, as a token holds it: 32 upper-case hex digits. None while it does not exist.
async fn uuid(source: &Source, namespace: &Namespace) -> Result<Option<String>, Fault> {
    let list = doc! { "listCollections": 1, "filter": { "name": &namespace.collection }, "cursor": {} };
    let reply = on_primary(source.database.client(), &namespace.db, list).await?;
    let found = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch"));
    let info = found.ok().and_then(|found| found.first()).and_then(Bson::as_document);
    let uuid = info.and_then(|collection| collection.get_document("info").ok()).and_then(|info| info.get("uuid"));
    Ok(match uuid {
        Some(Bson::Binary(uuid)) if uuid.subtype == BinarySubtype::Uuid => Some(hex(&uuid.bytes)),
        _ => None,
    })
}
