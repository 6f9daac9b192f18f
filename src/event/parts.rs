//! The parts of an event that have parts of their own.

use std::fmt;

use bson::{RawArray, RawBsonRef, RawDocument};

use super::{get, path, unexpected};
use crate::error::DecodeError;

/// What an update changed. It borrows from its event.
#[derive(Clone)]
#[non_exhaustive]
pub struct UpdateDescription<'a> {
    /// The fields that were set, by dotted path, with their new values.
    pub updated_fields: &'a RawDocument,
    /// The fields that were removed, by dotted path.
    pub removed_fields: Vec<&'a str>,
    /// The arrays that were cut off.
    pub truncated_arrays: Vec<TruncatedArray<'a>>,
    /// Which parts the dotted paths consist of where a field's own name has a dot or is a number; `None` when the
    /// server did not send it (before 6.1, or without expanded events).
    pub disambiguated_paths: Option<&'a RawDocument>,
}

/// An array that an update cut off.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TruncatedArray<'a> {
    /// The array, by dotted path.
    pub field: &'a str,
    /// How many elements are left.
    pub new_size: u32,
}

const UPDATE: &str = "updateDescription";

impl<'a> UpdateDescription<'a> {
    pub(super) fn parse(raw: &'a RawDocument) -> Result<Self, DecodeError> {
        let Some(updated_fields) = document(raw, "updatedFields")? else {
            return Err(unexpected(&path(UPDATE, "updatedFields"), None, "a document"));
        };
        let removed_fields = elements(raw, "removedFields", |value, name| match value {
            RawBsonRef::String(field) => Ok(field),
            other => Err(unexpected(name, Some(other), "text")),
        })?;
        let truncated_arrays = elements(raw, "truncatedArrays", |value, name| match value {
            RawBsonRef::Document(array) => Ok(TruncatedArray {
                field: super::text(array, "field", name)?
                    .ok_or_else(|| unexpected(&path(name, "field"), None, "text"))?,
                new_size: number(array, "newSize", name)?,
            }),
            other => Err(unexpected(name, Some(other), "a document")),
        })?;
        let disambiguated_paths = document(raw, "disambiguatedPaths")?;
        Ok(Self { updated_fields, removed_fields, truncated_arrays, disambiguated_paths })
    }
}

/// The names of what was changed; never a value.
impl fmt::Debug for UpdateDescription<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let updated: Vec<&str> =
            self.updated_fields.iter_elements().map_while(Result::ok).map(|element| element.key().as_str()).collect();
        f.debug_struct("UpdateDescription")
            .field("updated_fields", &updated)
            .field("removed_fields", &self.removed_fields)
            .field("truncated_arrays", &self.truncated_arrays)
            .finish_non_exhaustive()
    }
}

/// Which fragment of a split event this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SplitEvent {
    /// The number of this fragment, from 1.
    pub fragment: u32,
    /// How many fragments the event has.
    pub of: u32,
}

impl SplitEvent {
    pub(super) fn parse(raw: &RawDocument) -> Result<Self, DecodeError> {
        Ok(Self { fragment: number(raw, "fragment", "splitEvent")?, of: number(raw, "of", "splitEvent")? })
    }
}

fn document<'a>(raw: &'a RawDocument, field: &str) -> Result<Option<&'a RawDocument>, DecodeError> {
    match get(raw, field, UPDATE)? {
        None | Some(RawBsonRef::Null) => Ok(None),
        Some(RawBsonRef::Document(document)) => Ok(Some(document)),
        found => Err(unexpected(&path(UPDATE, field), found, "a document")),
    }
}

fn elements<'a, T>(
    raw: &'a RawDocument,
    field: &str,
    each: impl Fn(RawBsonRef<'a>, &str) -> Result<T, DecodeError>,
) -> Result<Vec<T>, DecodeError> {
    let name = path(UPDATE, field);
    let array: &RawArray = match get(raw, field, UPDATE)? {
        None | Some(RawBsonRef::Null) => return Ok(Vec::new()),
        Some(RawBsonRef::Array(array)) => array,
        found => return Err(unexpected(&name, found, "an array")),
    };
    array.into_iter().map(|value| each(value.map_err(|error| super::decode_error(&name, &error))?, &name)).collect()
}

fn number(raw: &RawDocument, field: &str, within: &str) -> Result<u32, DecodeError> {
    let found = get(raw, field, within)?;
    let number = match found {
        Some(RawBsonRef::Int32(number)) => u32::try_from(number).ok(),
        Some(RawBsonRef::Int64(number)) => u32::try_from(number).ok(),
        _ => None,
    };
    number.ok_or_else(|| unexpected(&path(within, field), found, "a count"))
}
