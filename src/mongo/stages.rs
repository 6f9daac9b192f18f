//! The pipeline of a stream: what is left out first, then the user's stages, rewritten so that an `invalidate` always
//! gets through; and what can be refused before a server sees it. No I/O.

use bson::{Bson, Document, doc};

use crate::ids::Namespace;
use crate::model::Scope;

/// Matches the token of an `invalidate`, which no stage can take away, where its `operationType` may be gone.
const INVALIDATE_TOKEN: &str = "^82.{16}2B0[24]2C0100(29|2B..|2C.{4}|2D.{6}|2E.{8})6F";

/// Everything behind the `$changeStream` stage.
pub(super) fn behind_the_source(scope: &Scope, leave_out: &[Namespace], stages: &[Document]) -> Vec<Document> {
    leave_out_stage(scope, leave_out).into_iter().chain(let_invalidates_through(stages)).collect()
}

/// Passes everything but changes of these collections; what has no namespace (an `invalidate`) passes too.
fn leave_out_stage(scope: &Scope, leave_out: &[Namespace]) -> Option<Document> {
    let mut databases: Vec<(&str, Vec<&str>)> = Vec::new();
    for Namespace { db, collection } in leave_out.iter().filter(|namespace| scope.contains(namespace)) {
        match databases.iter_mut().find(|(name, _)| name == db) {
            Some((_, collections)) => collections.push(collection),
            None => databases.push((db, vec![collection])),
        }
    }
    let conditions: Vec<_> = databases
        .into_iter()
        .map(|(db, collections)| {
            let elsewhere = doc! { "ns.coll": { "$nin": collections } };
            if *scope == Scope::Deployment {
                doc! { "$or": [ { "ns.db": { "$ne": db } }, elsewhere ] }
            } else {
                elsewhere
            }
        })
        .collect();
    match conditions.len() {
        0 => None,
        1 => conditions.into_iter().next().map(|condition| doc! { "$match": condition }),
        _ => Some(doc! { "$match": { "$and": conditions } }),
    }
}

/// Rewrites each `$match` so that it passes an `invalidate` as well: hidden, it would end the stream without a word.
///
/// Before any stage that changes events this is a condition on `operationType`, which the server can push down into
/// its scan; behind one, where that field may be gone, it is one on the token.
fn let_invalidates_through(stages: &[Document]) -> Vec<Document> {
    let mut untouched = true;
    let mut rewritten = Vec::with_capacity(stages.len());
    for stage in stages {
        let Some(condition) = stage.get("$match") else {
            untouched = false;
            rewritten.push(stage.clone());
            continue;
        };
        let invalidate = if untouched {
            doc! { "operationType": "invalidate" }
        } else {
            doc! { "_id._data": { "$regex": INVALIDATE_TOKEN } }
        };
        rewritten.push(doc! { "$match": { "$or": [ condition.clone(), invalidate ] } });
    }
    rewritten
}

/// Refuses stages that are no stages, and those that visibly take or change `_id`, without which no position is known.
pub(crate) fn check(stages: &[Document]) -> Result<(), String> {
    for (index, stage) in stages.iter().enumerate() {
        let refused = |why: &str| Err(format!("stage {} of the pipeline {why}", index + 1));
        let mut fields = stage.iter();
        let (Some((name, argument)), None) = (fields.next(), fields.next()) else {
            return refused("must have exactly one field, the operator");
        };
        if !name.starts_with('$') {
            return refused(&format!("is no stage: {name:?} does not begin with `$`"));
        }
        if changes_id(name, argument) {
            return refused(&format!(
                "({name}) takes `_id` away or changes it; that is the event's resume token, keep it as it is"
            ));
        }
        if matches!(name.as_str(), "$changeStream" | "$changeStreamSplitLargeEvent") {
            return refused(&format!("({name}) is the model's own to set"));
        }
    }
    Ok(())
}

fn changes_id(stage: &str, argument: &Bson) -> bool {
    let is_id = |name: &str| name == "_id" || name.starts_with("_id.");
    match (stage, argument) {
        ("$project", Bson::Document(fields)) => fields.iter().any(|(name, value)| is_id(name) && !keeps(value)),
        ("$set" | "$addFields", Bson::Document(fields)) => {
            fields.iter().any(|(name, value)| is_id(name) && *value != Bson::String("$_id".into()))
        }
        ("$unset", Bson::String(name)) => is_id(name),
        ("$unset", Bson::Array(names)) => names.iter().filter_map(Bson::as_str).any(is_id),
        ("$replaceRoot", Bson::Document(fields)) => fields.get("newRoot").is_some_and(replaces_id),
        ("$replaceWith", root) => replaces_id(root),
        _ => false,
    }
}

/// Whether a projection of `_id` keeps it.
fn keeps(value: &Bson) -> bool {
    match value {
        Bson::Boolean(yes) => *yes,
        Bson::Int32(number) => *number != 0,
        Bson::Int64(number) => *number != 0,
        Bson::Double(number) => *number != 0.0,
        Bson::String(path) => path == "$_id" || path == "$$ROOT._id",
        _ => false,
    }
}

/// Whether a new root visibly has another `_id`: the path of a part of the event, or fields without it.
fn replaces_id(root: &Bson) -> bool {
    match root {
        Bson::String(path) => !matches!(path.as_str(), "$$ROOT" | "$$CURRENT"),
        Bson::Document(fields) if fields.keys().any(|name| name.starts_with('$')) => false,
        Bson::Document(fields) => fields.get("_id").and_then(Bson::as_str) != Some("$_id"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders() -> Scope {
        Scope::Collection(Namespace::new("shop", "orders"))
    }

    #[test]
    fn nothing_to_leave_out_and_no_stages_is_no_pipeline() {
        assert!(behind_the_source(&orders(), &[], &[]).is_empty());
    }

    #[test]
    fn what_is_left_out_comes_first_and_only_where_the_scope_contains_it() {
        let out = [
            Namespace::new("shop", "checkpoints"),
            Namespace::new("other", "checkpoints"),
            Namespace::new("shop", "leases"),
        ];
        let user = [doc! { "$match": { "operationType": "insert" } }];
        let database = behind_the_source(&Scope::Database { db: "shop".into() }, &out, &user);
        assert_eq!(database[0], doc! { "$match": { "ns.coll": { "$nin": ["checkpoints", "leases"] } } });
        assert_eq!(database.len(), 2);
        let shop =
            doc! { "$or": [ { "ns.db": { "$ne": "shop" } }, { "ns.coll": { "$nin": ["checkpoints", "leases"] } } ] };
        let other = doc! { "$or": [ { "ns.db": { "$ne": "other" } }, { "ns.coll": { "$nin": ["checkpoints"] } } ] };
        let deployment = behind_the_source(&Scope::Deployment, &out, &[]);
        assert_eq!(deployment, [doc! { "$match": { "$and": [shop, other] } }]);
        assert!(behind_the_source(&orders(), &out, &[]).is_empty());
    }

    #[test]
    fn an_invalidate_gets_through_every_match() {
        let paid = doc! { "fullDocument.status": "paid" };
        let project = doc! { "$project": { "fullDocument": 1 } };
        let stages = [doc! { "$match": paid.clone() }, project.clone(), doc! { "$match": paid.clone() }];
        let by_token = doc! { "_id._data": { "$regex": INVALIDATE_TOKEN } };
        assert_eq!(
            behind_the_source(&orders(), &[], &stages),
            [
                doc! { "$match": { "$or": [paid.clone(), { "operationType": "invalidate" }] } },
                project,
                doc! { "$match": { "$or": [paid, by_token] } },
            ]
        );
    }

    #[test]
    fn a_stage_that_visibly_loses_the_token_is_refused() {
        for stage in [
            doc! { "$project": { "_id": 0 } },
            doc! { "$project": { "_id": false, "a": 1 } },
            doc! { "$project": { "_id": "$documentKey" } },
            doc! { "$unset": "_id" },
            doc! { "$unset": ["a", "_id"] },
            doc! { "$set": { "_id": 1 } },
            doc! { "$addFields": { "_id.x": 1 } },
            doc! { "$replaceRoot": { "newRoot": "$fullDocument" } },
            doc! { "$replaceWith": "$fullDocument" },
            doc! { "$replaceWith": { "a": 1 } },
            doc! { "$match": {}, "$project": {} },
            doc! { "operationType": "insert" },
            doc! { "$changeStreamSplitLargeEvent": {} },
            doc! {},
        ] {
            assert!(check(std::slice::from_ref(&stage)).is_err(), "{stage}");
        }
    }

    #[test]
    fn a_stage_that_keeps_the_token_or_may_keep_it_is_left_to_the_server() {
        for stage in [
            doc! { "$match": { "_id": 1 } },
            doc! { "$project": { "fullDocument": 1 } },
            doc! { "$project": { "_id": 1, "ns": 0 } },
            doc! { "$project": { "documentKey._id": 0 } },
            doc! { "$unset": ["fullDocument.secret"] },
            doc! { "$set": { "fullDocument._id": 1 } },
            doc! { "$replaceWith": { "_id": "$_id", "doc": "$fullDocument" } },
            doc! { "$replaceWith": { "$mergeObjects": ["$$ROOT", { "a": 1 }] } },
            doc! { "$replaceRoot": { "newRoot": "$$ROOT" } },
            doc! { "$redact": "$$KEEP" },
        ] {
            assert_eq!(check(std::slice::from_ref(&stage)), Ok(()), "{stage}");
        }
    }
}
