//! The update pipelines of a claim and a save. No I/O; called by `checkpoint_storage.rs`.
//!
//! Each is one `$replaceWith` of a condition: the new record, or the record as it was. Everything that comes from
//! outside stands in `$literal`, or it would be read as an expression. Nothing compares positions by
//! `mongosub.clusterTime`: records of other programs have none, missing sorts lowest, and the record would go backwards.

use bson::{Bson, Document, Timestamp, doc};

use super::occurrent::PATTERN;
use super::record::{
    IN_HAND, LARGEST, OPERATION_TIME, OURS, OVER, POSITIONS, RESUME_TOKEN, SCHEMA, UNCLEAN_ENDS, encode_in_hand,
    encode_note, encode_position, encode_source,
};
use crate::audit::{AUDITED, Note};
use crate::checkpoint::{Checkpoint, Kind};
use crate::ids::{Epoch, Ownership};
use crate::model::Fingerprint;
use crate::storage::{Claim, Hand, Save, Source};

/// Takes the record for the claim's owner, and stores its start if no position is stored.
pub(super) fn claim(claim: &Claim) -> Vec<Document> {
    let mut accepted = vec![readable()];
    if let Some(expected) = &claim.expect {
        accepted.push(is_owned_by(expected));
    }
    let now = doc! { "$toLong": "$$NOW" };
    let next = |number: &str| doc! { "$toLong": { "$max": [{ "$add": [number, 1_i64] }, &now] } };
    let mut ours = vec![
        Bson::from("$mongosub"),
        literal(doc! { "schema": SCHEMA, "owner": claim.owner.as_str(), "clean": false }).into(),
        doc! { "fence": next("$mongosub.fence"), "claimedAt": "$$NOW" }.into(),
    ];
    if claim.expect.is_none() {
        ours.push(count_end(claim).into());
    }
    let mut record = vec![Bson::from("$$ROOT")];
    if let Some(start) = &claim.start {
        let has_none = all(POSITIONS.map(|field| is_missing(&format!("${field}"))));
        let only_then = |part: Document| doc! { "$cond": [&has_none, part, {}] };
        let (field, value) = encode_position(&start.position);
        record.push(only_then(literal(doc! { field: value })).into());
        let facts = facts(&start.position, Kind::Start, start.pipeline.as_ref(), start.source.as_ref());
        ours.push(only_then(literal(facts)).into());
        ours.push(only_then(doc! { "epoch": next("$mongosub.epoch"), "savedAt": "$$NOW" }).into());
    }
    record.push(doc! { OURS: { "$mergeObjects": ours } }.into());
    vec![replace_if(accepted, doc! { "$mergeObjects": record })]
}

/// How the owner of the record ended, counted before another one takes it; by the very claim made again, nothing is.
fn count_end(claim: &Claim) -> Document {
    let is_own = doc! { "$eq": ["$mongosub.owner", literal(claim.owner.as_str())] };
    let is_well = any([is_missing("$mongosub.fence"), doc! { "$eq": ["$mongosub.clean", true] }]);
    let has_stored = doc! { "$gt": ["$mongosub.savedAt", "$mongosub.claimedAt"] };
    // Never so many that the record could not be read any more.
    let one_more = |path: &str| doc! { "$min": [{ "$add": [{ "$ifNull": [path, 0] }, 1] }, LARGEST] };
    let died = doc! { "$mergeObjects": ["$mongosub.inHand", { "deaths": one_more("$mongosub.inHand.deaths") }] };
    let counted = doc! { "$mergeObjects": [
        { UNCLEAN_ENDS: { "$cond": [has_stored, 0, one_more("$mongosub.uncleanEnds")] }, OVER: "$mongosub.fence" },
        { "$cond": [has("$mongosub.inHand"), { IN_HAND: died }, {}] },
    ] };
    let well = literal(doc! { UNCLEAN_ENDS: 0, OVER: 0 });
    doc! { "$cond": [is_own, {}, { "$cond": [is_well, well, counted] }] }
}

/// Takes back what a claim has counted against the owner with this fence, if it was the last to count.
pub(super) fn not_dead() -> Vec<Document> {
    let one_less = |path: &str| doc! { "$max": [{ "$subtract": [{ "$ifNull": [path, 0] }, 1] }, 0] };
    let lives = doc! { "$mergeObjects": ["$mongosub.inHand", { "deaths": one_less("$mongosub.inHand.deaths") }] };
    let ours = doc! { "$mergeObjects": [
        "$mongosub",
        { UNCLEAN_ENDS: one_less("$mongosub.uncleanEnds"), OVER: 0 },
        { "$cond": [has("$mongosub.inHand"), { IN_HAND: lives }, {}] },
    ] };
    vec![replace_if(vec![readable()], doc! { "$mergeObjects": ["$$ROOT", { OURS: ours }] })]
}

/// Stores a position, if the record is still the owner's and what is stored is not beyond it.
pub(super) fn save(save: &Save) -> Vec<Document> {
    let accepted = vec![readable(), is_owned_by(&save.ownership), stored_is_not_beyond(save.epoch, &save.position)];
    if let Hand::Holds(in_hand) = &save.hand {
        let ours = doc! { "$mergeObjects": ["$mongosub", literal(doc! { IN_HAND: encode_in_hand(in_hand) })] };
        return vec![replace_if(accepted, doc! { "$mergeObjects": ["$$ROOT", { OURS: ours }] })];
    }
    let (field, value) = encode_position(&save.position);

    let mut facts = facts(&save.position, save.kind, save.pipeline.as_ref(), save.source.as_ref());
    facts.insert("epoch", save.epoch.0);
    facts.insert("clean", save.clean);
    let mut unknown: Vec<_> =
        ["clusterTime", "pipeline", "source"].into_iter().filter(|fact| !facts.contains_key(fact)).collect();
    if save.hand == Hand::Empty {
        unknown.push(IN_HAND);
    }
    let kept = if unknown.is_empty() { "$mongosub".into() } else { Bson::from(without("$mongosub", &unknown)) };
    let mut ours = vec![kept, literal(facts).into(), doc! { "savedAt": "$$NOW" }.into()];
    ours.extend(save.note.as_ref().map(|note| Bson::from(with_note(note))));
    let ours = doc! { "$mergeObjects": ours };

    let others: Vec<_> = POSITIONS.into_iter().filter(|other| *other != field).collect();
    // A record holds one position at most: if this field is there already, no other one is.
    let kept = doc! { "$cond": [is_missing(&format!("${field}")), without("$$ROOT", &others), "$$ROOT"] };
    let record = doc! { "$mergeObjects": [kept, literal(doc! { field: value }), { OURS: ours }] };
    vec![replace_if(accepted, record)]
}

/// The list that a note goes to, with the note at its end, unless it stands there: a write is made again when its answer
/// was lost.
fn with_note(note: &Note) -> Document {
    let (list, stored, identity) = encode_note(note);
    let path = format!("$mongosub.{list}");
    let same = identity.map(|field| {
        let value = stored.get(field).cloned().unwrap_or(Bson::Null);
        doc! { "$eq": [format!("$$last.{field}"), literal(value)] }
    });
    let kept = doc! { "$ifNull": [&path, []] };
    let note = doc! { "$mergeObjects": [literal(stored), { "at": "$$NOW" }] };
    let newest = -i32::try_from(AUDITED).unwrap_or(i32::MAX);
    doc! { list: { "$let": {
        "vars": { "last": { "$arrayElemAt": [&kept, -1] } },
        "in": { "$cond": [
            all(same),
            &kept,
            { "$slice": [{ "$concatArrays": [&kept, [note]] }, newest] },
        ] },
    } } }
}

/// What is stored beside a position, as far as it is known.
fn facts(position: &Checkpoint, kind: Kind, pipeline: Option<&Fingerprint>, source: Option<&Source>) -> Document {
    let mut facts = doc! { "kind": kind.as_str() };
    if let Some(time) = position.cluster_time() {
        facts.insert("clusterTime", time);
    }
    if let Some(pipeline) = pipeline {
        facts.insert("pipeline", &pipeline.0);
    }
    if let Some(source) = source {
        facts.insert("source", encode_source(source));
    }
    facts
}

/// Whether `record::decode` reads the record. It goes with every save and is taken apart by the server each time, so it is
/// kept short: types are compared several at once.
pub(super) fn readable() -> Document {
    let numbers =
        ["fence", "epoch", "uncleanEnds", "over", "inHand.deaths"].map(|number| format!("$mongosub.{number}")).to_vec();
    let is_own_position = have_types(&["$mongosub.epoch"], &["int", "long"]);
    let ours = all([
        are_types(&["$mongosub", "$mongosub.owner"], &[&["object", "string"]]),
        have_types(&["$mongosub.schema", "$mongosub.fence"], &["int", "long"]),
        doc! { "$eq": ["$mongosub.schema", SCHEMA] },
        have_types(&["$mongosub.epoch", "$mongosub.uncleanEnds", "$mongosub.over"], &["missing", "int", "long"]),
        are_types(
            &["$mongosub.inHand", "$mongosub.inHand.at", "$mongosub.inHand.deaths"],
            &[&["missing", "missing", "missing"], &["object", "string", "int"], &["object", "string", "long"]],
        ),
        // What is missing counts for neither; a fence there is.
        doc! { "$gte": [{ "$min": &numbers }, 0_i64] },
        doc! { "$lte": [{ "$max": numbers }, LARGEST] },
        have_types(&["$mongosub.claimedAt", "$mongosub.savedAt"], &["missing", "date"]),
        any([is_missing("$mongosub.kind"), is_kind("$mongosub.kind")]),
        have_types(&["$mongosub.clusterTime"], &["missing", "timestamp"]),
        have_types(&["$mongosub.pipeline"], &["missing", "string"]),
        any([is_missing("$mongosub.source"), is_source()]),
        have_types(&["$mongosub.clean"], &["missing", "bool"]),
        is_list(
            "$mongosub.gaps",
            all([
                are_types(
                    &["$$this", "$$this.at", "$$this.to", "$$this.from"],
                    &[&["object", "date", "string", "string"]],
                ),
                is_scope("$$this"),
            ]),
        ),
        is_list(
            "$mongosub.skips",
            are_types(
                &["$$this", "$$this.at", "$$this.through", "$$this.reason", "$$this.by", "$$this.from"],
                &[
                    &["object", "date", "string", "string", "string", "string"],
                    &["object", "date", "string", "string", "string", "null"],
                ],
            ),
        ),
    ]);
    // One branch for each position field, in which the other fields have to be missing.
    let alone = |field: &str, holds: Document| {
        let mut tests: Vec<_> = POSITIONS
            .into_iter()
            .filter(|other| *other != field)
            .map(|other| is_missing(&format!("${other}")))
            .collect();
        tests.push(holds);
        doc! { "case": has(&format!("${field}")), "then": all(tests) }
    };
    let position = doc! { "$switch": {
        "branches": [
            alone(RESUME_TOKEN, is_token()),
            alone(OPERATION_TIME, is_type("$operationTime", "timestamp")),
            // Both texts in one branch, so that the server compiles the pattern once: that is what costs.
            {
                "case": any([has("$checkpoint"), has("$subscriptionPosition")]),
                "then": { "$let": {
                    "vars": { "text": { "$cond": [has("$checkpoint"), "$checkpoint", "$subscriptionPosition"] } },
                    "in": all([
                        any([is_missing("$checkpoint"), is_missing("$subscriptionPosition")]),
                        is_type("$$text", "string"),
                        any([all([has("$checkpoint"), is_own_position]), is_position_text("$$text")]),
                    ]),
                } },
            },
        ],
        "default": true,
    } };
    all([any([is_missing("$mongosub"), ours]), position])
}

fn is_owned_by(ownership: &Ownership) -> Document {
    all([
        doc! { "$eq": ["$mongosub.fence", ownership.fence.0] },
        doc! { "$eq": ["$mongosub.owner", literal(ownership.owner.as_str())] },
    ])
}

/// (epoch, position) of what is stored ≤ the new one. A position of another program has no epoch: any one is newer.
/// Text has no order: any is an advance.
fn stored_is_not_beyond(epoch: Epoch, position: &Checkpoint) -> Document {
    let same_epoch = match position {
        Checkpoint::Text(_) => Bson::Boolean(true),
        Checkpoint::Token(token) => by_stored(
            doc! { "$lte": [{ "$toUpper": "$resumeToken._data" }, token.as_str()] },
            doc! { "$lte": ["$operationTime", literal(token.cluster_time())] },
        ),
        Checkpoint::Time(time) => by_stored(
            // The hex begins with the time, so a token of that time or a later one is not below its first digits.
            doc! { "$lt": [{ "$toUpper": "$resumeToken._data" }, first_digits(*time)] },
            doc! { "$lte": ["$operationTime", literal(*time)] },
        ),
    };
    doc! { "$switch": {
        "branches": [
            { "case": is_missing("$mongosub.epoch"), "then": true },
            { "case": { "$lt": ["$mongosub.epoch", epoch.0] }, "then": true },
            { "case": { "$eq": ["$mongosub.epoch", epoch.0] }, "then": same_epoch },
        ],
        "default": false,
    } }
}

/// A test by the kind of position that is stored; text and nothing are passed.
fn by_stored(token: Document, time: Document) -> Bson {
    doc! { "$switch": {
        "branches": [
            { "case": has("$resumeToken"), "then": token },
            { "case": has("$operationTime"), "then": time },
        ],
        "default": true,
    } }
    .into()
}

/// The hex digits that every token of a cluster time begins with.
fn first_digits(Timestamp { time, increment }: Timestamp) -> String {
    format!("82{time:08X}{increment:08X}")
}

/// `{_data}` with the hex of a token; a test of its type comes first, or the string functions would fail. No regular
/// expression: the server would compile it at every save.
fn is_token() -> Document {
    let data = "$resumeToken._data";
    let hex = doc! { "$eq": [{ "$trim": { "input": data, "chars": "0123456789ABCDEFabcdef" } }, ""] };
    let length = doc! { "$strLenBytes": data };
    doc! { "$cond": [
        all([is_type("$resumeToken", "object"), is_type(data, "string")]),
        all([
            doc! { "$gte": [data, "82"] },
            doc! { "$lt": [data, "83"] },
            hex,
            doc! { "$gte": [&length, 18] },
            is_even(length),
        ]),
        false,
    ] }
}

/// A string that `occurrent::position` reads.
fn is_position_text(path: &str) -> Document {
    // What is made of the text is compiled where the server gets there, not at every save.
    let pattern = doc! { "$concat": [literal(PATTERN), { "$substrCP": [path, 0, 0] }] };
    doc! { "$cond": [
        is_type(path, "string"),
        { "$let": {
            "vars": { "found": { "$regexFind": { "input": path, "regex": pattern } } },
            "in": { "$cond": [
                is_type("$$found", "object"),
                // A time has no hex.
                is_even(doc! { "$strLenBytes": { "$ifNull": [{ "$arrayElemAt": ["$$found.captures", 0] }, ""] } }),
                false,
            ] },
        } },
        false,
    ] }
}

/// A list of notes, or none.
fn is_list(path: &str, is_note: Document) -> Document {
    let each = doc! { "$map": { "input": path, "in": is_note } };
    doc! { "$cond": [is_type(path, "array"), { "$allElementsTrue": [each] }, is_missing(path)] }
}

/// The fields of a document that say what is read.
fn is_scope(path: &str) -> Document {
    let scope = format!("{path}.scope");
    let kind = |field: &str| doc! { "$type": format!("{path}.{field}") };
    any([
        doc! { "$eq": [[&scope, kind("db"), kind("collection")], ["collection", "string", "string"]] },
        doc! { "$eq": [[&scope, kind("db")], ["database", "string"]] },
        doc! { "$eq": [scope, "deployment"] },
    ])
}

fn is_source() -> Document {
    all([
        is_type("$mongosub.source", "object"),
        is_scope("$mongosub.source"),
        have_types(
            &["$mongosub.source.collectionUUID", "$mongosub.source.setName", "$mongosub.source.lastEvent"],
            &["missing", "string"],
        ),
    ])
}

fn is_kind(path: &str) -> Document {
    let kinds = [Kind::Start, Kind::Event, Kind::Quiet, Kind::Invalidate].map(Kind::as_str);
    doc! { "$in": [path, kinds.to_vec()] }
}

fn is_even(number: Document) -> Document {
    doc! { "$eq": [{ "$mod": [number, 2] }, 0] }
}

fn has(path: &str) -> Document {
    doc! { "$ne": [{ "$type": path }, "missing"] }
}

fn is_missing(path: &str) -> Document {
    is_type(path, "missing")
}

fn is_type(path: &str, kind: &str) -> Document {
    doc! { "$eq": [{ "$type": path }, kind] }
}

/// Whether each of these has one of the types.
fn have_types(paths: &[&str], kinds: &[&str]) -> Document {
    let types: Vec<_> = paths.iter().map(|path| doc! { "$type": *path }).collect();
    doc! { "$setIsSubset": [types, kinds.to_vec()] }
}

/// Whether these have the types of one of the rows.
fn are_types(paths: &[&str], rows: &[&[&str]]) -> Document {
    let types: Vec<_> = paths.iter().map(|path| doc! { "$type": *path }).collect();
    match rows {
        [row] => doc! { "$eq": [types, row.to_vec()] },
        rows => doc! { "$in": [types, rows.iter().map(|row| row.to_vec()).collect::<Vec<_>>()] },
    }
}

fn all(tests: impl IntoIterator<Item = Document>) -> Document {
    doc! { "$and": tests.into_iter().collect::<Vec<_>>() }
}

fn any(tests: impl IntoIterator<Item = Document>) -> Document {
    doc! { "$or": tests.into_iter().collect::<Vec<_>>() }
}

fn literal(value: impl Into<Bson>) -> Document {
    doc! { "$literal": value.into() }
}

/// A document without some of its fields. (`$$REMOVE` inside `$mergeObjects` removes nothing.)
fn without(document: &str, fields: &[&str]) -> Document {
    doc! { "$arrayToObject": { "$filter": {
        "input": { "$objectToArray": document },
        "cond": { "$not": [{ "$in": ["$$this.k", fields.to_vec()] }] },
    } } }
}

fn replace_if(accepted: Vec<Document>, record: Document) -> Document {
    doc! { "$replaceWith": { "$cond": [all(accepted), record, "$$ROOT"] } }
}
