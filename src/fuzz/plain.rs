//! BSON read a second time, plainly: names, types and where values lie. It knows nothing of the library's reader.

/// One field of a document.
#[derive(Clone, Copy)]
pub(super) struct Field<'a> {
    pub(super) name: &'a [u8],
    pub(super) kind: u8,
    pub(super) value: &'a [u8],
}

pub(super) const STRING: u8 = 0x02;
pub(super) const DOCUMENT: u8 = 0x03;
pub(super) const ARRAY: u8 = 0x04;
pub(super) const INT32: u8 = 0x10;
pub(super) const TIMESTAMP: u8 = 0x11;
pub(super) const INT64: u8 = 0x12;

/// The fields of a document, in order; `None`, and nothing behind it, where the bytes are no field.
///
/// A field that takes the closing zero of its document for its own last byte is one, and nothing can follow it: so the
/// library reads it.
pub(super) fn fields(bytes: &[u8]) -> impl Iterator<Item = Option<Field<'_>>> {
    let whole = length(bytes) == Some(bytes.len()) && bytes.len() >= 5 && bytes.ends_with(&[0]);
    let mut rest = Some(if whole { &bytes[4..] } else { &[] });
    std::iter::from_fn(move || {
        let here = rest.take()?;
        if here == [0] {
            return None;
        }
        let taken = take(here);
        rest = taken.map(|(_, rest)| rest);
        Some(taken.map(|(field, _)| field))
    })
}

fn take(bytes: &[u8]) -> Option<(Field<'_>, &[u8])> {
    let (&kind, rest) = bytes.split_first()?;
    let (name, rest) = word(rest)?;
    let size = match kind {
        0x06 | 0x0A | 0x7F | 0xFF => 0,
        0x08 => 1,
        INT32 => 4,
        0x01 | 0x09 | TIMESTAMP | INT64 => 8,
        0x07 => 12,
        0x13 => 16,
        STRING | 0x0D | 0x0E => length(rest)?.checked_add(4)?,
        DOCUMENT | ARRAY | 0x0F => length(rest)?,
        0x05 => length(rest)?.checked_add(5)?,
        0x0B => {
            let (pattern, options) = word(rest)?;
            pattern.len() + word(options)?.0.len() + 2
        }
        0x0C => length(rest)?.checked_add(16)?,
        _ => return None,
    };
    Some((Field { name, kind, value: rest.get(..size)? }, &rest[size..]))
}

/// Up to a zero, and what follows it.
fn word(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = bytes.iter().position(|byte| *byte == 0)?;
    Some((&bytes[..end], &bytes[end + 1..]))
}

fn length(bytes: &[u8]) -> Option<usize> {
    usize::try_from(i32::from_le_bytes(bytes.get(..4)?.try_into().ok()?)).ok()
}

/// The first field of this name.
pub(super) fn find<'a>(document: &'a [u8], name: &str) -> Option<Field<'a>> {
    fields(document).map_while(|field| field).find(|field| field.name == name.as_bytes())
}

/// How many fields bear this name.
pub(super) fn count(document: &[u8], name: &str) -> usize {
    fields(document).map_while(|field| field).filter(|field| field.name == name.as_bytes()).count()
}

impl<'a> Field<'a> {
    pub(super) fn text(self) -> Option<&'a str> {
        let (end, text) = (self.kind == STRING).then_some(self.value)?.get(4..)?.split_last()?;
        (*end == 0).then(|| std::str::from_utf8(text).ok()).flatten()
    }

    pub(super) fn document(self) -> Option<&'a [u8]> {
        (self.kind == DOCUMENT).then_some(self.value)
    }

    /// A number of either size of integer.
    pub(super) fn integer(self) -> Option<i64> {
        match self.kind {
            INT32 => Some(i32::from_le_bytes(self.value.try_into().ok()?).into()),
            INT64 => Some(i64::from_le_bytes(self.value.try_into().ok()?)),
            _ => None,
        }
    }

    /// `(seconds, increment)`
    pub(super) fn timestamp(self) -> Option<(u32, u32)> {
        let word = |at: usize| Some(u32::from_le_bytes(self.value.get(at..at + 4)?.try_into().ok()?));
        (self.kind == TIMESTAMP).then(|| Some((word(4)?, word(0)?))).flatten()
    }
}

/// The text of a token document: `{ _data: text }`.
pub(super) fn data(token: &[u8]) -> Option<&str> {
    find(token, "_data")?.text()
}

/// Two upper-case digits a byte, as a server writes tokens.
pub(super) fn hex(bytes: &[u8]) -> String {
    let digit = |digit: u8| char::from(b"0123456789ABCDEF"[usize::from(digit)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}
