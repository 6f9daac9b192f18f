//! Where a path leads in a document, and how the values there compare: the rules of a server's `$match`.

use std::cmp::Ordering;

use bson::error::Error;
use bson::{Bson, RawArray, RawBsonRef, RawDocument};

use super::number;

type Visit<'v> = dyn FnMut(Option<RawBsonRef<'_>>) -> Result<bool, Error> + 'v;

/// Whether any value that a path leads to meets a test; a place where there is nothing is tested as `None`.
///
/// An array on the way is gone through; at the end of the path its elements are tested and then itself, or with
/// `into_arrays` false itself alone.
pub(super) fn any_at(
    document: &RawDocument,
    path: &[&str],
    into_arrays: bool,
    test: &mut Visit<'_>,
) -> Result<bool, Error> {
    let mut within = document;
    for (index, name) in path.iter().enumerate() {
        let rest = &path[index + 1..];
        match within.get(name)? {
            Some(RawBsonRef::Array(array)) => return any_in(array, rest, into_arrays, test),
            Some(RawBsonRef::Document(inner)) if !rest.is_empty() => within = inner,
            Some(value) if rest.is_empty() => return test(Some(value)),
            _ => break,
        }
    }
    test(None)
}

/// The same for the rest of a path behind an array. Elements that the path cannot enter are nothing, not even missing.
fn any_in(array: &RawArray, path: &[&str], into_arrays: bool, test: &mut Visit<'_>) -> Result<bool, Error> {
    let Some((name, rest)) = path.split_first() else {
        if into_arrays {
            for element in array {
                if test(Some(element?))? {
                    return Ok(true);
                }
            }
        }
        return test(Some(RawBsonRef::Array(array)));
    };
    for (index, element) in array.into_iter().enumerate() {
        let element = element?;
        if let RawBsonRef::Document(inner) = element
            && any_at(inner, path, into_arrays, test)?
        {
            return Ok(true);
        }
        if *name != index.to_string() {
            continue;
        }
        let met = match element {
            element if rest.is_empty() => test(Some(element))?,
            RawBsonRef::Document(inner) => any_at(inner, rest, into_arrays, test)?,
            RawBsonRef::Array(inner) => any_in(inner, rest, into_arrays, test)?,
            _ => false,
        };
        if met {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a value of a document equals a value of a condition; `null` equals what is not there.
///
/// The old type `undefined` is nothing too, as on 6.0; versions differ about it.
pub(super) fn is_equal(found: Option<RawBsonRef<'_>>, value: &Bson) -> Result<bool, Error> {
    match (found, value) {
        (None | Some(RawBsonRef::Undefined), Bson::Null) => Ok(true),
        (None, _) => Ok(false),
        (Some(found), value) => is_same(found, value),
    }
}

fn is_same(found: RawBsonRef<'_>, value: &Bson) -> Result<bool, Error> {
    match (found, value) {
        (RawBsonRef::Null, Bson::Null) => Ok(true),
        (RawBsonRef::Array(found), Bson::Array(values)) => {
            let mut values = values.iter();
            for found in found {
                match values.next() {
                    Some(value) if is_same(found?, value)? => {}
                    _ => return Ok(false),
                }
            }
            Ok(values.next().is_none())
        }
        (RawBsonRef::Document(found), Bson::Document(document)) => {
            let mut fields = document.iter();
            for element in found.iter_elements() {
                let element = element?;
                match fields.next() {
                    Some((name, value)) if element.key().as_str() == name && is_same(element.value()?, value)? => {}
                    _ => return Ok(false),
                }
            }
            Ok(fields.next().is_none())
        }
        _ => Ok(compare(found, value).is_some_and(Ordering::is_eq)),
    }
}

/// The order of two values of one type, numbers being one type; `None` when they have none.
pub(super) fn compare(found: RawBsonRef<'_>, value: &Bson) -> Option<Ordering> {
    match (found, value) {
        (RawBsonRef::String(found) | RawBsonRef::Symbol(found), Bson::String(value)) => Some(found.cmp(value.as_str())),
        (RawBsonRef::Boolean(found), Bson::Boolean(value)) => Some(found.cmp(value)),
        (RawBsonRef::DateTime(found), Bson::DateTime(value)) => Some(found.cmp(value)),
        (RawBsonRef::Timestamp(found), Bson::Timestamp(value)) => Some(found.cmp(value)),
        (RawBsonRef::ObjectId(found), Bson::ObjectId(value)) => Some(found.cmp(value)),
        (RawBsonRef::Binary(found), Bson::Binary(value)) => {
            let key = |bytes: &[u8], subtype| (bytes.len(), u8::from(subtype));
            let order = key(found.bytes, found.subtype).cmp(&key(&value.bytes, value.subtype));
            Some(order.then_with(|| found.bytes.cmp(&value.bytes)))
        }
        (found, value) => number::compare(number::Number::of_raw(found), number::Number::of(value)),
    }
}
