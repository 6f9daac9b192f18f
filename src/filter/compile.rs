//! A filter as the stages that a server evaluates, and what it asks of the stream.

use bson::{Bson, Document, doc};

use super::field::Test;
use super::{Filter, Node};
use crate::event::Operation;
use crate::ids::Namespace;

impl Filter {
    /// The stages that a server evaluates; none when every event passes. They do not let `invalidate` through: the
    /// model that sends them does.
    pub fn stages(&self) -> Vec<Document> {
        let parts = match &self.node {
            Node::And(parts) => parts.as_slice(),
            node => std::slice::from_ref(node),
        };
        let mut stages = Vec::new();
        let mut conditions = Vec::new();
        for part in parts {
            if let Node::Pipeline(own) = part {
                stages.extend(match_stage(std::mem::take(&mut conditions)));
                stages.extend(own.iter().cloned());
            } else {
                conditions.extend(part.condition(false));
            }
        }
        stages.extend(match_stage(conditions));
        stages
    }

    /// Whether a condition on a field can decide about an update. Without a look-up of the full document such a filter
    /// would drop every update, and is refused.
    pub fn needs_full_document(&self) -> bool {
        self.node.for_update(false) == ForUpdate::Asks
    }
}

fn match_stage(conditions: Vec<Document>) -> Option<Document> {
    all_of(conditions).map(|condition| doc! { "$match": condition })
}

/// `None` for no condition: everything passes.
fn all_of(mut conditions: Vec<Document>) -> Option<Document> {
    match conditions.len() {
        0 | 1 => conditions.pop(),
        _ => Some(doc! { "$and": conditions }),
    }
}

fn nothing() -> Document {
    doc! { "operationType": { "$in": [] } }
}

impl Node {
    /// The condition of a `$match`, negated at the leaves; `None` when everything passes.
    fn condition(&self, negated: bool) -> Option<Document> {
        match self {
            Self::All => negated.then(nothing),
            Self::Operations(operations) => {
                let names: Vec<&str> = operations.iter().map(Operation::as_str).collect();
                Some(doc! { "operationType": { if negated { "$nin" } else { "$in" }: names } })
            }
            Self::Namespaces(namespaces) => {
                let condition = in_namespaces(namespaces);
                Some(if negated {
                    doc! { "$nor": [condition] }
                } else {
                    condition
                })
            }
            Self::Field { path, test } => {
                let condition = test.condition();
                let condition = match (negated, test) {
                    (false, _) => condition,
                    (true, Test::Exists) => doc! { "$exists": false },
                    (true, _) => doc! { "$not": condition },
                };
                // Without the first part a negated condition would pass every event without a full document.
                Some(doc! { "fullDocument": { "$type": "object" }, format!("fullDocument.{path}"): condition })
            }
            Self::And(nodes) if !negated => all_of(nodes.iter().filter_map(|node| node.condition(false)).collect()),
            Self::Or(nodes) if negated => all_of(nodes.iter().filter_map(|node| node.condition(true)).collect()),
            Self::And(nodes) | Self::Or(nodes) => {
                let conditions: Option<Vec<Document>> = nodes.iter().map(|node| node.condition(negated)).collect();
                Some(doc! { "$or": conditions? })
            }
            Self::Not(node) => node.condition(!negated),
            // Refused by `validate` wherever it is not a stage of its own.
            Self::Pipeline(_) => Some(nothing()),
        }
    }

    /// What becomes of the filter when the operation is known to be `update`.
    fn for_update(&self, negated: bool) -> ForUpdate {
        let decided = |passes: bool| if passes == negated { ForUpdate::Fails } else { ForUpdate::Passes };
        match self {
            Self::All | Self::Pipeline(_) => decided(true),
            Self::Operations(operations) => decided(operations.contains(&Operation::Update)),
            Self::Namespaces(_) => ForUpdate::AsksOther,
            Self::Field { .. } => ForUpdate::Asks,
            Self::Not(node) => node.for_update(!negated),
            Self::And(nodes) | Self::Or(nodes) => {
                let all = matches!(self, Self::And(_)) != negated;
                let (deciding, neutral) =
                    if all { (ForUpdate::Fails, ForUpdate::Passes) } else { (ForUpdate::Passes, ForUpdate::Fails) };
                let mut outcome = neutral;
                for node in nodes {
                    match node.for_update(negated) {
                        part if part == deciding => return deciding,
                        part if part == neutral => {}
                        ForUpdate::Asks => outcome = ForUpdate::Asks,
                        _ if outcome == ForUpdate::Asks => {}
                        part => outcome = part,
                    }
                }
                outcome
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum ForUpdate {
    Passes,
    Fails,
    /// A condition on a field decides.
    Asks,
    /// Something else decides, no condition on a field.
    AsksOther,
}

/// By database, with the collections in a list: a server evaluates it faster than a list of whole namespaces.
fn in_namespaces(namespaces: &[Namespace]) -> Document {
    let mut databases: Vec<(&str, Vec<&str>)> = Vec::new();
    for Namespace { db, collection } in namespaces {
        match databases.iter_mut().find(|(known, _)| known == db) {
            Some((_, collections)) => collections.push(collection),
            None => databases.push((db, vec![collection])),
        }
    }
    let mut conditions: Vec<Document> = databases
        .into_iter()
        .map(|(db, collections)| doc! { "ns.db": db, "ns.coll": { "$in": collections } })
        .collect();
    match conditions.len() {
        0 => nothing(),
        1 => conditions.swap_remove(0),
        _ => doc! { "$or": conditions },
    }
}

impl Test {
    fn condition(&self) -> Document {
        let (operator, value) = match self {
            Self::Eq(value) => ("$eq", value.clone()),
            Self::In(values) => ("$in", Bson::Array(values.clone())),
            Self::Exists => ("$exists", Bson::Boolean(true)),
            Self::Gt(value) => ("$gt", value.clone()),
            Self::Gte(value) => ("$gte", value.clone()),
            Self::Lt(value) => ("$lt", value.clone()),
            Self::Lte(value) => ("$lte", value.clone()),
        };
        doc! { operator: value }
    }
}
