//! How deep a document is nested, found out without recursion: what is decoded recursively overflows the stack, and no
//! error comes of that but the end of the process. Called by the accessors of an event.

use bson::{RawBsonRef, RawDocument};

/// No server keeps a document that is nested deeper.
pub(super) const SERVERS_LIMIT: usize = 200;

/// A type, an empty name, a length and a closing zero.
const SMALLEST_LEVEL: usize = 7;

/// Whether documents and arrays stand in each other in more than so many levels. What cannot be read counts as flat.
pub(crate) fn is_deeper(document: &RawDocument, levels: usize) -> bool {
    // Most documents are too small for it, and are not looked at.
    if document.as_bytes().len() < levels * SMALLEST_LEVEL {
        return false;
    }
    let mut open = vec![document.iter_elements()];
    while let Some(elements) = open.last_mut() {
        let Some(Ok(element)) = elements.next() else {
            open.pop();
            continue;
        };
        let inner = match element.value() {
            Ok(RawBsonRef::Document(inner)) => Some(inner),
            Ok(RawBsonRef::Array(inner)) => RawDocument::from_bytes(inner.as_bytes()).ok(),
            Ok(RawBsonRef::JavaScriptCodeWithScope(code)) => Some(code.scope),
            _ => None,
        };
        if let Some(inner) = inner {
            if open.len() > levels {
                return true;
            }
            open.push(inner.iter_elements());
        }
    }
    false
}
