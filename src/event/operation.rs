//! The kinds of change, by the server's names.

use std::fmt;

use serde::{Serialize, Serializer};

/// What kind of change an event tells.
///
/// A name that this version does not know is kept, not refused; it equals the known one of the same name when made by
/// `from`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// A document was inserted.
    Insert,
    /// Fields of a document were changed.
    Update,
    /// A document was replaced by another with the same `_id`.
    Replace,
    /// A document was deleted.
    Delete,
    /// A collection was dropped.
    Drop,
    /// A collection was renamed.
    Rename,
    /// A database was dropped.
    DropDatabase,
    /// What the stream watches is gone; the stream ends.
    Invalidate,
    /// A collection was created (expanded events).
    Create,
    /// Indexes were created (expanded events).
    CreateIndexes,
    /// Indexes were dropped (expanded events).
    DropIndexes,
    /// A collection's options were changed (expanded events).
    Modify,
    /// A collection was sharded (expanded events).
    ShardCollection,
    /// A collection's shard key was changed (expanded events).
    ReshardCollection,
    /// A suffix was added to a collection's shard key (expanded events).
    RefineCollectionShardKey,
    /// An operation this version does not know, by the server's name.
    Other(String),
}

/// The operations that have a name here, beside it.
const NAMES: [(Operation, &str); 15] = [
    (Operation::Insert, "insert"),
    (Operation::Update, "update"),
    (Operation::Replace, "replace"),
    (Operation::Delete, "delete"),
    (Operation::Drop, "drop"),
    (Operation::Rename, "rename"),
    (Operation::DropDatabase, "dropDatabase"),
    (Operation::Invalidate, "invalidate"),
    (Operation::Create, "create"),
    (Operation::CreateIndexes, "createIndexes"),
    (Operation::DropIndexes, "dropIndexes"),
    (Operation::Modify, "modify"),
    (Operation::ShardCollection, "shardCollection"),
    (Operation::ReshardCollection, "reshardCollection"),
    (Operation::RefineCollectionShardKey, "refineCollectionShardKey"),
];

impl Operation {
    /// The server's name, as `operationType` holds it.
    pub fn as_str(&self) -> &str {
        if let Self::Other(name) = self {
            return name;
        }
        NAMES.iter().find(|(operation, _)| operation == self).map_or("", |(_, name)| name)
    }
}

impl From<&str> for Operation {
    fn from(name: &str) -> Self {
        let known = NAMES.iter().find(|(_, known)| *known == name);
        known.map_or_else(|| Self::Other(name.into()), |(operation, _)| operation.clone())
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for Operation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}
