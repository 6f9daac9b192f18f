//! A change event: a slice of the reply it came in, decoded where it is asked for. No I/O.

use bson::RawDocument;
use bytes::Bytes;
use serde::Deserialize;

use crate::error::DecodeError;

/// One change. Cheap to clone: it shares the reply it came in.
#[derive(Debug, Clone)]
pub struct ChangeEvent {
    raw: Bytes,
}

/// What kind of change it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// A document was inserted.
    Insert,
    /// An operation this version does not know, by the server's name.
    Other(String),
}

/// What an update changed.
#[derive(Debug, Clone)]
pub struct UpdateDescription {}

/// Which part of a split event this is.
#[derive(Debug, Clone)]
pub struct SplitEvent {}

impl ChangeEvent {
    /// Takes the BSON of a change event.
    ///
    /// # Errors
    /// [`DecodeError`] when the bytes are no BSON document.
    pub fn new(raw: Bytes) -> Result<Self, DecodeError> {
        RawDocument::from_bytes(&raw).map_err(|error| DecodeError::new("", error))?;
        Ok(Self { raw })
    }

    /// The whole event.
    pub fn raw(&self) -> Result<&RawDocument, DecodeError> {
        RawDocument::from_bytes(&self.raw).map_err(|error| DecodeError::new("", error))
    }

    /// The full document, decoded.
    pub fn full_document<'a, T: Deserialize<'a>>(&'a self) -> Result<Option<T>, DecodeError> {
        Ok(None)
    }
    /// The document key.
    pub fn document_key(&self) -> Result<Option<&RawDocument>, DecodeError> {
        Ok(None)
    }
}
