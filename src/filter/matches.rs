//! A filter evaluated in memory, with the server's outcome for every event.

use super::value::{any_at, compare, is_equal};
use super::{Filter, Node, field::Test};
use crate::error::DecodeError;
use crate::event::{ChangeEvent, Operation, decode_error};

impl Filter {
    /// Whether an event passes. Only what the filter asks about is decoded, from left to right until it is decided.
    ///
    /// # Errors
    /// [`DecodeError`] when a part that it asks about cannot be decoded, and for a filter with a
    /// [`pipeline`](Self::pipeline) in it, which a server alone evaluates.
    pub fn matches(&self, event: &ChangeEvent) -> Result<bool, DecodeError> {
        if self.node == Node::All || event.operation()? == Operation::Invalidate {
            return Ok(true);
        }
        self.node.matches(event, false)
    }
}

impl Node {
    fn matches(&self, event: &ChangeEvent, negated: bool) -> Result<bool, DecodeError> {
        match self {
            Self::All => Ok(!negated),
            Self::Operations(operations) => Ok(operations.contains(&event.operation()?) != negated),
            Self::Namespaces(namespaces) => {
                let within = event.namespace()?.is_some_and(|namespace| namespaces.contains(&namespace));
                Ok(within != negated)
            }
            Self::Field { path, test } => match event.raw_full_document()? {
                Some(document) => match test.matches(document, path) {
                    Ok(holds) => Ok(holds != negated),
                    Err(error) => Err(decode_error(&format!("fullDocument.{path}"), &error)),
                },
                None => Ok(false),
            },
            Self::Not(node) => node.matches(event, !negated),
            Self::And(nodes) | Self::Or(nodes) => {
                let all = matches!(self, Self::And(_)) != negated;
                for node in nodes {
                    if node.matches(event, negated)? != all {
                        return Ok(!all);
                    }
                }
                Ok(all)
            }
            Self::Pipeline(_) => Err(DecodeError::new("", "a pipeline is evaluated by a server alone")),
        }
    }
}

impl Test {
    fn matches(&self, document: &bson::RawDocument, path: &str) -> Result<bool, bson::error::Error> {
        let names: Vec<&str> = path.split('.').collect();
        let ordered = |value, holds: fn(std::cmp::Ordering) -> bool| {
            any_at(document, &names, true, &mut |found| {
                Ok(found.and_then(|found| compare(found, value)).is_some_and(holds))
            })
        };
        match self {
            Self::Eq(value) => any_at(document, &names, true, &mut |found| is_equal(found, value)),
            Self::In(values) => any_at(document, &names, true, &mut |found| {
                for value in values {
                    if is_equal(found, value)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }),
            Self::Exists => any_at(document, &names, false, &mut |found| Ok(found.is_some())),
            Self::Gt(value) => ordered(value, std::cmp::Ordering::is_gt),
            Self::Gte(value) => ordered(value, std::cmp::Ordering::is_ge),
            Self::Lt(value) => ordered(value, std::cmp::Ordering::is_lt),
            Self::Lte(value) => ordered(value, std::cmp::Ordering::is_le),
        }
    }
}
