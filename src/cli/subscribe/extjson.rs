//! Raw BSON as MongoDB extended JSON v2, straight into bytes: no `Document` is built, and nothing is renamed or left
//! out. `lines.rs` calls it.
//!
//! It differs from the driver's `into_relaxed_extjson` and `into_canonical_extjson` where those leave the specification:
//! a NaN has no sign; a date beyond the year 9999 is its milliseconds, also beyond what the driver's clock can hold;
//! milliseconds have three digits or none; a subnormal double is canonical like any other. Fields that a document has
//! twice are written twice.

use std::fmt::Write as _;
use std::io::Write as _;

use bson::{RawBsonRef, RawDocument, Timestamp};
use data_encoding::{BASE64, Encoding, HEXLOWER};
use jiff::{SignedDuration, civil};
use serde::Serialize;

use crate::error::DecodeError;
use crate::event::decode_error;

/// The two forms of extended JSON v2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    /// Numbers and dates as JSON has them, where it has.
    Relaxed,
    /// Every value with its type.
    Canonical,
}

/// More than a server lets through (180 by default, 250 at most) and than its event adds.
const DEEPEST: usize = 300;
/// The end of the year 9999; from there on a date has no ISO 8601 text.
const YEAR_10000: i64 = 253_402_300_800_000;

/// Appends a document. On an error something may have been appended.
///
/// # Errors
/// [`DecodeError`] naming the field, by its dotted path, that is no BSON, or nested deeper than a server sends.
pub(super) fn append(document: &RawDocument, format: Format, out: &mut Vec<u8>) -> Result<(), DecodeError> {
    Writer { format, out }.document(document, 0).map_err(|broken| {
        let path = broken.path.into_iter().rev().collect::<Vec<_>>().join(".");
        match broken.error {
            Some(error) => decode_error(&path, &error),
            None => DecodeError::new(path, format!("it is nested deeper than {DEEPEST}")),
        }
    })
}

/// What could not be read, and the names that lead to it, innermost first.
struct Broken {
    path: Vec<String>,
    error: Option<bson::error::Error>,
}

impl Broken {
    fn new(error: bson::error::Error) -> Self {
        Self { path: Vec::new(), error: Some(error) }
    }

    fn within(mut self, name: impl Into<String>) -> Self {
        self.path.push(name.into());
        self
    }
}

struct Writer<'a> {
    format: Format,
    out: &'a mut Vec<u8>,
}

impl Writer<'_> {
    fn document(&mut self, document: &RawDocument, depth: usize) -> Result<(), Broken> {
        if depth == DEEPEST {
            return Err(Broken { path: Vec::new(), error: None });
        }
        self.text("{");
        for (number, element) in document.iter_elements().enumerate() {
            let element = element.map_err(|mut error| {
                let name = error.key.take();
                let broken = Broken::new(error);
                if let Some(name) = name { broken.within(name) } else { broken }
            })?;
            self.text(if number == 0 { "" } else { "," });
            let name = element.key().as_str();
            self.json(name);
            self.text(":");
            let value = element.value().map_err(|error| Broken::new(error).within(name))?;
            self.value(value, depth).map_err(|broken| broken.within(name))?;
        }
        self.text("}");
        Ok(())
    }

    fn array(&mut self, array: &bson::RawArray, depth: usize) -> Result<(), Broken> {
        if depth == DEEPEST {
            return Err(Broken { path: Vec::new(), error: None });
        }
        self.text("[");
        for (number, value) in array.into_iter().enumerate() {
            self.text(if number == 0 { "" } else { "," });
            let value = value.map_err(|error| Broken::new(error).within(number.to_string()))?;
            self.value(value, depth).map_err(|broken| broken.within(number.to_string()))?;
        }
        self.text("]");
        Ok(())
    }

    fn value(&mut self, value: RawBsonRef<'_>, depth: usize) -> Result<(), Broken> {
        match value {
            RawBsonRef::Document(document) => self.document(document, depth + 1)?,
            RawBsonRef::Array(array) => self.array(array, depth + 1)?,
            RawBsonRef::JavaScriptCodeWithScope(code) => {
                self.wrapped("$code", code.code);
                self.out.pop();
                self.text(",\"$scope\":");
                self.document(code.scope, depth + 1).map_err(|broken| broken.within("$scope"))?;
                self.text("}");
            }
            value => self.scalar(value),
        }
        Ok(())
    }

    fn scalar(&mut self, value: RawBsonRef<'_>) {
        match value {
            RawBsonRef::String(text) => self.json(text),
            RawBsonRef::Boolean(yes) => self.json(&yes),
            RawBsonRef::Null => self.text("null"),
            RawBsonRef::Int32(number) if self.is_relaxed() => self.json(&number),
            RawBsonRef::Int32(number) => self.quoted("$numberInt", &number),
            RawBsonRef::Int64(number) if self.is_relaxed() => self.json(&number),
            RawBsonRef::Int64(number) => self.quoted("$numberLong", &number),
            RawBsonRef::Double(number) => self.double(number),
            RawBsonRef::DateTime(date) => self.date(date.timestamp_millis()),
            RawBsonRef::ObjectId(id) => {
                self.text("{\"$oid\":");
                self.encoded(&HEXLOWER, &id.bytes());
                self.text("}");
            }
            RawBsonRef::Timestamp(Timestamp { time, increment }) => {
                self.text("{\"$timestamp\":{\"t\":");
                self.json(&time);
                self.text(",\"i\":");
                self.json(&increment);
                self.text("}}");
            }
            RawBsonRef::Binary(binary) => {
                self.text("{\"$binary\":{\"base64\":");
                self.encoded(&BASE64, binary.bytes);
                self.text(",\"subType\":");
                self.encoded(&HEXLOWER, &[binary.subtype.into()]);
                self.text("}}");
            }
            RawBsonRef::RegularExpression(regex) => {
                let mut options: Vec<char> = regex.options.as_str().chars().collect();
                options.sort_unstable();
                self.text("{\"$regularExpression\":{\"pattern\":");
                self.json(regex.pattern.as_str());
                self.text(",\"options\":");
                self.json(&options.into_iter().collect::<String>());
                self.text("}}");
            }
            RawBsonRef::Decimal128(number) => self.wrapped("$numberDecimal", &number.to_string()),
            RawBsonRef::JavaScriptCode(code) => self.wrapped("$code", code),
            RawBsonRef::Symbol(symbol) => self.wrapped("$symbol", symbol),
            RawBsonRef::Undefined => self.wrapped("$undefined", &true),
            RawBsonRef::MinKey => self.wrapped("$minKey", &1),
            RawBsonRef::MaxKey => self.wrapped("$maxKey", &1),
            // Its parts are private; written for people it is extended JSON.
            RawBsonRef::DbPointer(pointer) => self.json(&pointer),
            // Dealt with by whoever called.
            RawBsonRef::Document(_) | RawBsonRef::Array(_) | RawBsonRef::JavaScriptCodeWithScope(_) => {}
        }
    }

    fn is_relaxed(&self) -> bool {
        self.format == Format::Relaxed
    }

    fn double(&mut self, number: f64) {
        if number.is_nan() {
            self.wrapped("$numberDouble", "NaN");
        } else if number.is_infinite() {
            self.wrapped("$numberDouble", if number > 0.0 { "Infinity" } else { "-Infinity" });
        } else if self.is_relaxed() {
            self.json(&number);
        } else {
            self.quoted("$numberDouble", &number);
        }
    }

    fn date(&mut self, millis: i64) {
        self.text("{\"$date\":");
        if self.is_relaxed() && (0..YEAR_10000).contains(&millis) {
            let at = civil::date(1970, 1, 1).at(0, 0, 0, 0).saturating_add(SignedDuration::from_millis(millis));
            let mut text = String::with_capacity(24);
            // Writing to a String cannot fail.
            let _ = if millis % 1000 == 0 { write!(text, "{at:.0}Z") } else { write!(text, "{at:.3}Z") };
            self.json(&text);
        } else {
            self.quoted("$numberLong", &millis);
        }
        self.text("}");
    }

    fn text(&mut self, text: &str) {
        self.out.extend_from_slice(text.as_bytes());
    }

    /// `{"$name": value}`.
    fn wrapped<T: Serialize + ?Sized>(&mut self, name: &str, value: &T) {
        self.text("{");
        self.json(name);
        self.text(":");
        self.json(value);
        self.text("}");
    }

    /// `{"$name": "number"}`.
    fn quoted<T: Serialize>(&mut self, name: &str, number: &T) {
        self.text("{");
        self.json(name);
        self.text(":\"");
        self.json(number);
        self.text("\"}");
    }

    fn json<T: Serialize + ?Sized>(&mut self, value: &T) {
        // Writing to a Vec cannot fail, nor can the text, number or pointer that is all this is given.
        let _ = serde_json::to_writer(self.out.by_ref(), value);
    }

    fn encoded(&mut self, encoding: &Encoding, bytes: &[u8]) {
        self.out.push(b'"');
        let start = self.out.len();
        self.out.resize(start + encoding.encode_len(bytes.len()), 0);
        encoding.encode_mut(bytes, &mut self.out[start..]);
        self.out.push(b'"');
    }
}

#[cfg(test)]
mod tests;
