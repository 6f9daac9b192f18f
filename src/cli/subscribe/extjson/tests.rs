use super::*;

use bson::oid::ObjectId;
use bson::raw::CString;
use bson::{Binary, Bson, DateTime, Decimal128, Document, JavaScriptCodeWithScope, RawDocumentBuf, Regex, doc};
use proptest::prelude::*;
use serde_json::{Value, json};

fn written(document: &Document, format: Format) -> String {
    written_raw(RawDocument::from_bytes(&document.to_vec().unwrap()).unwrap(), format).unwrap()
}

fn written_raw(document: &RawDocument, format: Format) -> Result<String, DecodeError> {
    let mut out = Vec::new();
    append(document, format, &mut out)?;
    Ok(String::from_utf8(out).unwrap())
}

/// Both forms of one value.
fn forms(value: impl Into<Bson>) -> (String, String) {
    let document = doc! { "v": value.into() };
    let inner = |text: String| text.strip_prefix("{\"v\":").and_then(|text| text.strip_suffix('}')).unwrap().to_owned();
    (inner(written(&document, Format::Relaxed)), inner(written(&document, Format::Canonical)))
}

fn same(value: impl Into<Bson>, text: &str) {
    assert_eq!(forms(value), (text.to_owned(), text.to_owned()));
}

fn differ(value: impl Into<Bson>, relaxed: &str, canonical: &str) {
    assert_eq!(forms(value), (relaxed.to_owned(), canonical.to_owned()));
}

/// `{"$dbPointer": ..}` can be made from its extended JSON alone.
fn db_pointer() -> Bson {
    serde_json::from_value(json!({ "$dbPointer": { "$ref": "db.c\"", "$id": { "$oid": "5f0a000102030405060708ff" } } }))
        .unwrap()
}

fn regex(pattern: &str, options: &str) -> Bson {
    let text = |text: &str| CString::try_from(text.to_owned()).unwrap();
    // By its fields: the constructor sorts the options.
    Bson::RegularExpression(Regex { pattern: text(pattern), options: text(options) })
}

#[test]
fn numbers_are_as_the_specification_has_them() {
    differ(7, "7", r#"{"$numberInt":"7"}"#);
    differ(i32::MIN, "-2147483648", r#"{"$numberInt":"-2147483648"}"#);
    differ(i64::MAX, "9223372036854775807", r#"{"$numberLong":"9223372036854775807"}"#);
    differ(5_i64, "5", r#"{"$numberLong":"5"}"#);
    differ(1.0, "1.0", r#"{"$numberDouble":"1.0"}"#);
    differ(-0.0, "-0.0", r#"{"$numberDouble":"-0.0"}"#);
    differ(0.1, "0.1", r#"{"$numberDouble":"0.1"}"#);
    // The driver's canonical form of this is a bare number.
    differ(5e-324, "5e-324", r#"{"$numberDouble":"5e-324"}"#);
    same(f64::NAN, r#"{"$numberDouble":"NaN"}"#);
    same(-f64::NAN, r#"{"$numberDouble":"NaN"}"#);
    same(f64::INFINITY, r#"{"$numberDouble":"Infinity"}"#);
    same(f64::NEG_INFINITY, r#"{"$numberDouble":"-Infinity"}"#);
    for text in ["1.5", "-0", "0E-6176", "9.999999999999999999999999999999999E+6144", "NaN", "Infinity", "-Infinity"] {
        let decimal: Decimal128 = text.parse().unwrap();
        same(decimal, &format!(r#"{{"$numberDecimal":"{text}"}}"#));
    }
}

#[test]
fn dates_are_text_from_1970_to_9999_and_milliseconds_elsewhere() {
    let number = |millis: i64| format!(r#"{{"$date":{{"$numberLong":"{millis}"}}}}"#);
    for (millis, text) in [
        (0, "1970-01-01T00:00:00Z"),
        (1, "1970-01-01T00:00:00.001Z"),
        (1_700_000_000_120, "2023-11-14T22:13:20.120Z"),
        (951_782_400_000, "2000-02-29T00:00:00Z"),
        (253_402_300_799_999, "9999-12-31T23:59:59.999Z"),
    ] {
        differ(DateTime::from_millis(millis), &format!(r#"{{"$date":"{text}"}}"#), &number(millis));
    }
    for millis in [-1, i64::MIN, 253_402_300_800_000, i64::MAX] {
        same(DateTime::from_millis(millis), &number(millis));
    }
}

#[test]
fn text_and_names_are_escaped_and_stay_on_one_line() {
    same("a\"\\\n\r\t\u{0}\u{1f}\u{2028}ü𝄞", "\"a\\\"\\\\\\n\\r\\t\\u0000\\u001f\u{2028}ü𝄞\"");
    let named = doc! { "a\n\"b": { "": [1, { "$oid": "no" }] } };
    assert_eq!(written(&named, Format::Relaxed), r#"{"a\n\"b":{"":[1,{"$oid":"no"}]}}"#);
}

#[test]
fn every_other_type_is_as_the_specification_has_it() {
    same(Bson::Null, "null");
    same(true, "true");
    same(ObjectId::from_bytes([0x5f, 10, 0, 1, 2, 3, 4, 5, 6, 7, 8, 255]), r#"{"$oid":"5f0a000102030405060708ff"}"#);
    same(Timestamp { time: 4_294_967_295, increment: 7 }, r#"{"$timestamp":{"t":4294967295,"i":7}}"#);
    for (subtype, text) in [(0, "00"), (2, "02"), (4, "04"), (0x80, "80"), (255, "ff")] {
        let binary = Binary { subtype: subtype.into(), bytes: vec![255, 254, 253, 252] };
        same(binary, &format!(r#"{{"$binary":{{"base64":"//79/A==","subType":"{text}"}}}}"#));
    }
    same(regex("a/\"b", "xmi"), r#"{"$regularExpression":{"pattern":"a/\"b","options":"imx"}}"#);
    same(Bson::JavaScriptCode("a = \"b\"".into()), r#"{"$code":"a = \"b\""}"#);
    let code = JavaScriptCodeWithScope { code: "c".into(), scope: doc! { "n": 1 } };
    differ(code, r#"{"$code":"c","$scope":{"n":1}}"#, r#"{"$code":"c","$scope":{"n":{"$numberInt":"1"}}}"#);
    same(Bson::Symbol("s\"".into()), r#"{"$symbol":"s\""}"#);
    same(Bson::Undefined, r#"{"$undefined":true}"#);
    same(Bson::MinKey, r#"{"$minKey":1}"#);
    same(Bson::MaxKey, r#"{"$maxKey":1}"#);
    same(db_pointer(), r#"{"$dbPointer":{"$ref":"db.c\"","$id":{"$oid":"5f0a000102030405060708ff"}}}"#);
}

#[test]
fn a_field_that_is_there_twice_is_written_twice() {
    let mut raw = doc! { "a": 1, "b": 2 }.to_vec().unwrap();
    let at = raw.iter().position(|byte| *byte == b'b').unwrap();
    raw[at] = b'a';
    let raw = RawDocument::from_bytes(&raw).unwrap();
    assert_eq!(written_raw(raw, Format::Relaxed).unwrap(), r#"{"a":1,"a":2}"#);
}

#[test]
fn what_is_no_bson_is_named_by_its_path() {
    let broken = |document: &Document, find: &[u8], replace: &[u8]| {
        let mut raw = document.to_vec().unwrap();
        let at = raw.windows(find.len()).position(|window| window == find).unwrap();
        raw[at..at + replace.len()].copy_from_slice(replace);
        let error = written_raw(RawDocument::from_bytes(&raw).unwrap(), Format::Relaxed).unwrap_err();
        error.field().to_owned()
    };
    let document = doc! { "fullDocument": { "lines": [{ "sku": "abcd" }, "wxyz"] } };
    assert_eq!(broken(&document, b"abcd", b"ab\xff\xfe"), "fullDocument.lines.0.sku");
    assert_eq!(broken(&document, b"wxyz", b"\xff"), "fullDocument.lines.1");
    // The length of the text.
    assert_eq!(broken(&document, b"\x05\0\0\0abcd", b"\x7f"), "fullDocument.lines.0.sku");
    // A type that does not exist.
    assert_eq!(broken(&document, b"\x02sku", b"\x66"), "fullDocument.lines.0.sku");
}

#[test]
fn what_is_nested_deeper_than_a_server_sends_is_refused_and_does_not_overflow_the_stack() {
    let nested = |depth: usize| {
        let mut raw = RawDocumentBuf::new();
        for _ in 1..depth {
            let mut outer = RawDocumentBuf::new();
            outer.append(bson::raw::cstr!("d"), raw);
            raw = outer;
        }
        written_raw(&raw, Format::Relaxed)
    };
    assert!(nested(DEEPEST).is_ok());
    let error = nested(DEEPEST + 1).unwrap_err();
    assert!(error.to_string().contains("nested deeper than 300"), "{error}");
    assert!(nested(20_000).is_err());
}

/// Values of every type, with the awkward ones among them.
fn bson() -> impl Strategy<Value = Bson> {
    let name = prop_oneof!["[a-c]{1,3}", any::<String>().prop_map(|name| name.replace('\0', ""))];
    let cstring = || any::<String>().prop_map(|text| text.replace('\0', ""));
    let date = prop_oneof![
        Just(0),
        Just(-1),
        // The driver puts everything behind the year 9999 at its end, so the property stays before it.
        0..YEAR_10000,
        (0..YEAR_10000 / 1000).prop_map(|seconds| seconds * 1000),
        i64::MIN..0,
    ];
    let double = prop_oneof![any::<f64>(), Just(-0.0), Just(1e21), Just(1e-7), Just(f64::INFINITY), Just(f64::MAX)];
    let leaf = prop_oneof![
        // A NaN's sign and a subnormal's canonical form are where the driver is not followed.
        double.prop_filter("followed", |number| !number.is_nan() && !number.is_subnormal()).prop_map(Bson::Double),
        any::<String>().prop_map(Bson::String),
        any::<bool>().prop_map(Bson::Boolean),
        Just(Bson::Null),
        (cstring(), "[ilmsux]{0,6}").prop_map(|(pattern, options)| regex(&pattern, &options)),
        any::<String>().prop_map(Bson::JavaScriptCode),
        any::<i32>().prop_map(Bson::Int32),
        any::<i64>().prop_map(Bson::Int64),
        any::<(u32, u32)>().prop_map(|(time, increment)| Bson::Timestamp(Timestamp { time, increment })),
        (any::<u8>(), any::<Vec<u8>>())
            .prop_map(|(subtype, bytes)| Bson::Binary(Binary { subtype: subtype.into(), bytes })),
        any::<[u8; 12]>().prop_map(|bytes| Bson::ObjectId(ObjectId::from_bytes(bytes))),
        date.prop_map(|millis| Bson::DateTime(DateTime::from_millis(millis))),
        any::<String>().prop_map(Bson::Symbol),
        any::<[u8; 16]>().prop_map(|bytes| Bson::Decimal128(Decimal128::from_bytes(bytes))),
        Just(Bson::Undefined),
        Just(Bson::MinKey),
        Just(Bson::MaxKey),
        Just(db_pointer()),
    ];
    leaf.prop_recursive(4, 64, 6, move |inner| {
        let fields = prop::collection::vec((name.clone(), inner.clone()), 0..6);
        let document = fields.prop_map(|fields| fields.into_iter().collect::<Document>());
        prop_oneof![
            prop::collection::vec(inner, 0..6).prop_map(Bson::Array),
            document.clone().prop_map(Bson::Document),
            (any::<String>(), document).prop_map(|(code, scope)| JavaScriptCodeWithScope { code, scope }.into()),
        ]
    })
}

/// Text that stands for a number or a date, as that number or date: both sides may write it in several ways.
fn understood(value: Value) -> Value {
    match value {
        Value::Array(values) => values.into_iter().map(understood).collect(),
        Value::Object(fields) => {
            let only = (fields.len() == 1).then(|| fields.iter().next()).flatten();
            match only {
                Some((name, Value::String(text))) if name == "$numberDouble" => {
                    json!({ "$numberDouble": text.parse::<f64>().unwrap().to_bits() })
                }
                Some((name, Value::String(text))) if name == "$date" => {
                    json!({ "$date": DateTime::parse_rfc3339_str(text).unwrap().timestamp_millis() })
                }
                _ => fields.into_iter().map(|(name, value)| (name, understood(value))).collect(),
            }
        }
        value => value,
    }
}

fn is_wrapper(value: &Bson) -> bool {
    match value {
        Bson::Document(document) => is_awkward(document),
        Bson::Array(values) => values.iter().any(is_wrapper),
        Bson::JavaScriptCodeWithScope(code) => is_awkward(&code.scope),
        _ => false,
    }
}

/// A document that itself looks like extended JSON of a number or a date, whose text need not be one.
fn is_awkward(document: &Document) -> bool {
    document.iter().any(|(name, value)| name == "$numberDouble" || name == "$date" || is_wrapper(value))
}

proptest! {
    #[test]
    fn what_is_written_is_what_the_driver_would_write(value in bson()) {
        let document = doc! { "v": value };
        prop_assume!(!is_awkward(&document));
        for (format, drivers) in [
            (Format::Relaxed, Bson::Document(document.clone()).into_relaxed_extjson()),
            (Format::Canonical, Bson::Document(document.clone()).into_canonical_extjson()),
        ] {
            let line = written(&document, format);
            prop_assert!(!line.contains('\n'));
            let ours: Value = serde_json::from_str(&line).unwrap();
            prop_assert_eq!(understood(ours), understood(drivers), "{:?}", format);
        }
    }

    #[test]
    fn bytes_that_are_no_bson_end_in_an_error_or_in_one_line(value in bson(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut raw = doc! { "v": value }.to_vec().unwrap();
        for (at, byte) in changes {
            // The outermost length is looked at when an event is made.
            let at = 4 + at.index(raw.len() - 4);
            raw[at] = byte;
        }
        let Ok(document) = RawDocument::from_bytes(&raw) else { return Ok(()) };
        for format in [Format::Relaxed, Format::Canonical] {
            if let Ok(line) = written_raw(document, format) {
                prop_assert!(!line.contains('\n'));
                serde_json::from_str::<Value>(&line).unwrap();
            }
        }
    }
}
