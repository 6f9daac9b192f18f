//! `--filter` and `--pipeline`: extended JSON as it is typed, made into stages. It refuses what can be refused without a
//! server; the rest the server judges as the cursor is opened.

use std::fmt;

use bson::{Bson, Document, doc};
use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};

use crate::filter::Filter;
use crate::mongo::check_stages;

/// The body of a `$match`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Condition(Document);

/// Stages of an aggregation.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Stages(Vec<Document>);

/// Reads `--filter`.
pub(super) fn condition(text: &str) -> Result<Condition, String> {
    let condition: Document = read(text, "one JSON object, as $match takes it")?;
    Ok(Condition(condition))
}

/// Reads `--pipeline`.
pub(super) fn stages(text: &str) -> Result<Stages, String> {
    let stages: Vec<Document> = read(text, "a JSON array of stages")?;
    check_stages(&stages)?;
    Ok(Stages(stages))
}

/// Both, the condition first.
pub(super) fn filter(condition: Option<&Condition>, stages: Option<&Stages>) -> Filter {
    let condition = condition.map(|Condition(condition)| doc! { "$match": condition.clone() });
    let all: Vec<Document> =
        condition.into_iter().chain(stages.into_iter().flat_map(|Stages(all)| all.clone())).collect();
    if all.is_empty() { Filter::default() } else { Filter::pipeline(all) }
}

/// Whether the condition, or a `$match` of the stages, asks about the full document.
pub(super) fn asks_about_full_document(condition: Option<&Condition>, stages: Option<&Stages>) -> bool {
    let matches = stages.into_iter().flat_map(|Stages(all)| all).filter_map(|stage| stage.get_document("$match").ok());
    condition.map(|Condition(condition)| condition).into_iter().chain(matches).any(names_it)
}

fn names_it(condition: &Document) -> bool {
    condition.iter().any(|(name, value)| {
        name == "fullDocument"
            || name.starts_with("fullDocument.")
            || match value {
                Bson::Array(values) if name.starts_with('$') => {
                    values.iter().filter_map(Bson::as_document).any(names_it)
                }
                Bson::Document(inner) if name.starts_with('$') => names_it(inner),
                _ => false,
            }
    })
}

fn read<T: DeserializeOwned>(text: &str, expected: &str) -> Result<T, String> {
    // A name that is there twice would win silently, so the text is read once for that.
    let read = serde_json::from_str::<Unambiguous>(text).and_then(|_| serde_json::from_str(text));
    read.map_err(|error| format!("expected {expected}, in extended JSON: {error}"))
}

/// JSON in which no object has a name twice. It keeps nothing.
struct Unambiguous;

impl<'de> Deserialize<'de> for Unambiguous {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Looking)
    }
}

struct Looking;

impl<'de> Visitor<'de> for Looking {
    type Value = Unambiguous;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Unambiguous, A::Error> {
        let mut names = std::collections::HashSet::new();
        while let Some(name) = fields.next_key::<String>()? {
            fields.next_value::<Unambiguous>()?;
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format!("{name:?} is there twice")));
            }
        }
        Ok(Unambiguous)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Unambiguous, A::Error> {
        while values.next_element::<Unambiguous>()?.is_some() {}
        Ok(Unambiguous)
    }

    fn visit_str<E: de::Error>(self, _: &str) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_unit<E: de::Error>(self) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bson::{DateTime, oid::ObjectId};

    #[test]
    fn a_condition_keeps_its_types_and_the_order_of_its_fields() {
        let text = r#"{"z": {"$oid": "5f0a000102030405060708ff"}, "a": {"$gte": {"$date": "2026-01-01T00:00:00Z"}},
            "n": 1, "l": {"$numberLong": "1"}, "d": 0.30000000000000004, "s": {"y": 1, "b": {"$regex": "^x"}}}"#;
        let Condition(read) = condition(text).unwrap();
        let expected = doc! {
            "z": ObjectId::parse_str("5f0a000102030405060708ff").unwrap(),
            "a": { "$gte": DateTime::from_millis(1_767_225_600_000) },
            "n": 1, "l": 1_i64, "d": 0.300_000_000_000_000_04, "s": { "y": 1, "b": { "$regex": "^x" } },
        };
        assert_eq!(read, expected);
        assert_eq!(read.keys().collect::<Vec<_>>(), ["z", "a", "n", "l", "d", "s"]);
    }

    #[test]
    fn the_condition_comes_before_the_stages() {
        let all = stages(r#"[{"$project": {"ns": 0}}]"#).unwrap();
        let only = condition(r#"{"operationType": "insert"}"#).unwrap();
        let both = [doc! { "$match": { "operationType": "insert" } }, doc! { "$project": { "ns": 0 } }];
        assert_eq!(filter(Some(&only), Some(&all)), Filter::pipeline(both));
        assert_eq!(filter(None, Some(&stages("[]").unwrap())), Filter::default());
        assert_eq!(filter(None, None), Filter::default());
    }

    #[test]
    fn what_is_no_condition_and_no_stages_is_refused_with_a_reason() {
        for (text, why) in [
            ("", "EOF"),
            ("[]", "one JSON object"),
            ("{a: 1}", "line 1"),
            (r#"{"a": 1} x"#, "trailing"),
            (r#"{"a": {"$oid": "xyz"}}"#, "hex"),
            (r#"{"a": 1, "b": {"c": 1, "c": 2}}"#, "\"c\" is there twice"),
        ] {
            let refused = condition(text).unwrap_err();
            assert!(refused.contains(why), "{text}: {refused}");
        }
        for (text, why) in [
            ("{}", "an array of stages"),
            (r#"[{"operationType": "insert"}]"#, "does not begin with `$`"),
            (r#"[{"$match": {}}, {"$unset": "_id"}]"#, "stage 2"),
        ] {
            let refused = stages(text).unwrap_err();
            assert!(refused.contains(why) || refused.contains("a JSON array"), "{text}: {refused}");
        }
    }

    #[test]
    fn a_question_about_the_full_document_is_seen_wherever_it_stands() {
        let asks = |text: &str| asks_about_full_document(Some(&condition(text).unwrap()), None);
        assert!(asks(r#"{"fullDocument.status": "paid"}"#));
        assert!(asks(r#"{"$or": [{"operationType": "insert"}, {"$and": [{"fullDocument.a": 1}]}]}"#));
        assert!(!asks(r#"{"operationType": "insert", "fullDocumentBeforeChange.a": 1, "ns.coll": "fullDocument"}"#));
        assert!(asks_about_full_document(None, Some(&stages(r#"[{"$match": {"fullDocument": null}}]"#).unwrap())));
        assert!(!asks_about_full_document(None, Some(&stages(r#"[{"$project": {"fullDocument": 0}}]"#).unwrap())));
    }
}
