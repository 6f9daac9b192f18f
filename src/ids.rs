//! Names and numbers that identify: subscription ids, owners, fences, epochs, namespaces. Values only, no I/O.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The stable name of one logical consumer, version included: `search_index_v3`. It keys the stored record.
///
/// 1–255 bytes, no `#`, no control characters.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct SubscriptionId(Arc<str>);

/// A subscription id that cannot be used, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidId {
    /// The id is empty.
    #[error("a subscription id must not be empty")]
    Empty,
    /// The id is longer than 255 bytes.
    #[error("a subscription id has at most 255 bytes, this one has {0}")]
    TooLong(usize),
    /// The id contains `#` or a control character.
    #[error("a subscription id must not contain {found:?}")]
    Forbidden {
        /// The first character that is not allowed.
        found: char,
    },
}

impl SubscriptionId {
    /// Checks and takes a name.
    ///
    /// # Errors
    /// [`InvalidId`] when the name is empty, longer than 255 bytes, or has a `#` or a control character in it.
    pub fn new(id: impl Into<String>) -> Result<Self, InvalidId> {
        let id = id.into();
        if id.is_empty() {
            return Err(InvalidId::Empty);
        }
        if id.len() > 255 {
            return Err(InvalidId::TooLong(id.len()));
        }
        if let Some(found) = id.chars().find(|c| *c == '#' || c.is_control()) {
            return Err(InvalidId::Forbidden { found });
        }
        Ok(Self(id.into()))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SubscriptionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for SubscriptionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// One number per ownership of an id, growing for ever; it identifies the run, its marks and its writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fence(pub i64);

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One number per position space, growing; positions of different epochs are not comparable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Epoch(pub i64);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Who holds a subscription: `host:pid:random`, fresh for every claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Owner(Arc<str>);

impl Owner {
    /// A new owner for this process: host name, process id and 64 random bits.
    pub fn fresh() -> Self {
        let host = gethostname::gethostname();
        let host = host.to_string_lossy();
        Self(format!("{host}:{}:{:016x}", std::process::id(), fastrand::u64(..)).into())
    }

    /// An owner by its text, as a record holds it.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into().into())
    }

    /// The owner as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a claim gives and every save must show: the fence and the owner that took it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct Ownership {
    /// The fence taken by the claim.
    pub fence: Fence,
    /// Who took it.
    pub owner: Owner,
}

/// A collection by its full name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Namespace {
    /// The database.
    pub db: String,
    /// The collection; it may contain dots.
    pub collection: String,
}

impl Namespace {
    /// A collection by database and name.
    pub fn new(db: impl Into<String>, collection: impl Into<String>) -> Self {
        Self { db: db.into(), collection: collection.into() }
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.db, self.collection)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_checked_and_the_error_says_what_is_wrong() {
        assert!(SubscriptionId::new("search_index_v3").is_ok());
        assert!(SubscriptionId::new("ü".repeat(127)).is_ok());
        assert_eq!(SubscriptionId::new(""), Err(InvalidId::Empty));
        assert_eq!(SubscriptionId::new("x".repeat(256)), Err(InvalidId::TooLong(256)));
        assert_eq!(SubscriptionId::new("a#b"), Err(InvalidId::Forbidden { found: '#' }));
        assert_eq!(SubscriptionId::new("a\nb"), Err(InvalidId::Forbidden { found: '\n' }));
    }

    #[test]
    fn two_fresh_owners_differ() {
        assert_ne!(Owner::fresh(), Owner::fresh());
    }
}
