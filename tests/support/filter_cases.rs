//! One table of filters, changes and whether the filter passes them: the evaluation in memory and a server are both
//! held against it.
#![allow(dead_code, clippy::too_many_lines, reason = "a table; not every test binary reads all of it")]

use mongosub::Operation::{Delete, Insert, Replace, Update};
use mongosub::bson::{
    Binary, Bson, DateTime, Decimal128, Document, Regex, Timestamp, doc, oid::ObjectId, spec::BinarySubtype,
};
use mongosub::memory::{self, MemoryEvent};
use mongosub::{ChangeEvent, Filter, Namespace};

/// A filter, one change, and whether the filter passes it.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) filter: Filter,
    pub(crate) change: Change,
    pub(crate) expected: bool,
}

/// A change of one document. Its `_id` is the caller's; it is in none of the documents here.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    /// The document is inserted.
    Insert(Document),
    /// Another document is replaced by this one.
    Replace(Document),
    /// An update makes a document this one; the stream looks it up.
    LookedUp(Document),
    /// An update makes a document this one; the stream does not look it up.
    Update(Document),
    /// The document is deleted.
    Delete(Document),
}

/// The collection in which a case happens.
pub(crate) const DB: &str = "filters";
/// The collection in which a case happens.
pub(crate) const COLLECTION: &str = "cases";

impl Case {
    /// The event of the change, as a server would send it.
    pub(crate) fn event(&self) -> ChangeEvent {
        let event: MemoryEvent = match self.change.clone() {
            Change::Insert(document) => memory::insert(1, document),
            Change::Replace(document) => memory::replace(1, document),
            Change::LookedUp(document) => memory::update(1, document.clone()).full_document(document),
            Change::Update(document) => memory::update(1, document),
            Change::Delete(_) => memory::delete(1),
        };
        event.namespace(&Namespace::new(DB, COLLECTION)).into()
    }
}

/// Every case.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    of_events(&mut cases);
    of_equality(&mut cases);
    of_order(&mut cases);
    of_paths_and_arrays(&mut cases);
    of_events_without_a_document(&mut cases);
    of_combinations(&mut cases);
    cases
}

/// Inserts that pass a filter, and inserts that do not.
fn inserts(
    cases: &mut Vec<Case>,
    name: &'static str,
    filter: &Filter,
    pass: impl IntoIterator<Item = Document>,
    fail: impl IntoIterator<Item = Document>,
) {
    let pass = pass.into_iter().map(|document| (document, true));
    for (document, expected) in pass.chain(fail.into_iter().map(|document| (document, false))) {
        cases.push(Case { name, filter: filter.clone(), change: Change::Insert(document), expected });
    }
}

fn case(cases: &mut Vec<Case>, name: &'static str, filter: Filter, change: Change, expected: bool) {
    cases.push(Case { name, filter, change, expected });
}

fn here() -> Namespace {
    Namespace::new(DB, COLLECTION)
}

fn elsewhere() -> Namespace {
    Namespace::new(DB, "others")
}

fn document() -> Document {
    doc! { "status": "paid", "total": 12, "lines": [{ "sku": "a", "count": 2 }, { "sku": "b", "count": 5 }] }
}

fn decimal(text: &str) -> Decimal128 {
    text.parse().unwrap()
}

fn of_events(cases: &mut Vec<Case>) {
    let changes = [Change::Insert(document()), Change::Replace(document()), Change::Update(document())];
    for change in changes.into_iter().chain([Change::Delete(document())]) {
        let is_update = matches!(change, Change::Update(_));
        let is_write = !matches!(change, Change::Delete(_));
        case(cases, "the default passes everything", Filter::default(), change.clone(), true);
        case(cases, "nothing is not everything", Filter::default().not(), change.clone(), false);
        case(cases, "one operation", Filter::operations([Update]), change.clone(), is_update);
        case(cases, "not one operation", Filter::operations([Update]).not(), change.clone(), !is_update);
        case(cases, "some operations", Filter::operations([Insert, Update, Replace]), change.clone(), is_write);
        case(cases, "no operation", Filter::operations([]), change.clone(), false);
        case(cases, "not no operation", Filter::operations([]).not(), change.clone(), true);
        case(cases, "this collection", Filter::namespaces([elsewhere(), here()]), change.clone(), true);
        case(cases, "another collection", Filter::namespaces([elsewhere()]), change.clone(), false);
        case(cases, "not another collection", Filter::namespaces([elsewhere()]).not(), change.clone(), true);
        case(cases, "another database", Filter::namespaces([Namespace::new("d", COLLECTION)]), change.clone(), false);
        let two = [Namespace::new("d", "others"), here()];
        case(cases, "two databases", Filter::namespaces(two), change.clone(), true);
        let crossed = [Namespace::new("d", COLLECTION), elsewhere()];
        case(cases, "database and collection belong together", Filter::namespaces(crossed), change.clone(), false);
        case(cases, "no collection", Filter::namespaces([]), change.clone(), false);
        case(cases, "not no collection", Filter::namespaces([]).not(), change, true);
    }
}

fn of_equality(cases: &mut Vec<Case>) {
    let field = || Filter::field("a");
    inserts(
        cases,
        "text is equal to the same text",
        &field().eq("paid"),
        [doc! { "a": "paid" }],
        [doc! { "a": "Paid" }, doc! { "a": "" }, doc! { "a": 1 }, doc! { "a": Bson::Null }, doc! {}],
    );
    inserts(
        cases,
        "ne is what eq is not",
        &field().ne("paid"),
        [doc! { "a": "Paid" }, doc! { "a": 1 }, doc! { "a": Bson::Null }, doc! {}],
        [doc! { "a": "paid" }, doc! { "a": ["x", "paid"] }],
    );
    inserts(
        cases,
        "null is equal to what is missing",
        &field().eq(Bson::Null),
        [doc! { "a": Bson::Null }, doc! {}, doc! { "a": [Bson::Null] }],
        [doc! { "a": 0 }, doc! { "a": "" }, doc! { "a": [] }, doc! { "a": {} }],
    );
    inserts(
        cases,
        "null as one of several is equal to what is missing",
        &field().is_in([Bson::Null, 7.into()]),
        [doc! { "a": Bson::Null }, doc! {}, doc! { "a": 7.0 }, doc! { "a": [1, 7] }],
        [doc! { "a": 0 }, doc! { "a": [] }],
    );
    inserts(
        cases,
        "ne null wants a value",
        &field().ne(Bson::Null),
        [doc! { "a": 0 }, doc! { "a": [] }],
        [doc! { "a": Bson::Null }, doc! {}, doc! { "a": [1, Bson::Null] }],
    );
    inserts(cases, "one of none is none", &field().is_in(Vec::<Bson>::new()), [], [doc! { "a": 1 }, doc! {}]);
    inserts(
        cases,
        "numbers are one type",
        &field().eq(2_i64),
        [doc! { "a": 2 }, doc! { "a": 2.0 }, doc! { "a": 2_i64 }, doc! { "a": decimal("2.000") }],
        [doc! { "a": 2.5 }, doc! { "a": "2" }, doc! { "a": decimal("2.0000000001") }, doc! { "a": f64::NAN }],
    );
    inserts(
        cases,
        "a large integer is not the double next to it",
        &field().eq(9_007_199_254_740_993_i64),
        [doc! { "a": 9_007_199_254_740_993_i64 }, doc! { "a": decimal("9007199254740993") }],
        [doc! { "a": 9_007_199_254_740_992_f64 }, doc! { "a": 9_007_199_254_740_992_i64 }],
    );
    inserts(
        cases,
        "a decimal is not the double that is printed like it",
        &field().eq(0.1),
        [doc! { "a": 0.1 }],
        [doc! { "a": decimal("0.1") }],
    );
    inserts(
        cases,
        "NaN is equal to NaN",
        &field().eq(f64::NAN),
        [doc! { "a": f64::NAN }, doc! { "a": decimal("NaN") }],
        [doc! { "a": 0 }, doc! { "a": f64::INFINITY }, doc! {}],
    );
    inserts(
        cases,
        "a document is equal with its fields in order",
        &field().eq(doc! { "x": 1, "y": [1, { "z": Bson::Null }] }),
        [
            doc! { "a": { "x": 1.0, "y": [1_i64, { "z": Bson::Null }] } },
            doc! { "a": [{ "x": 1, "y": [1, { "z": Bson::Null }] }] },
        ],
        [
            doc! { "a": { "y": [1, { "z": Bson::Null }], "x": 1 } },
            doc! { "a": { "x": 1 } },
            doc! { "a": { "x": 1, "y": [1, {}] } },
            doc! { "a": { "x": 1, "y": [1, { "z": Bson::Null }], "w": 1 } },
        ],
    );
    inserts(
        cases,
        "an array is equal as a whole, or as an element",
        &field().eq(Bson::Array(vec![1.into(), 2.into()])),
        [doc! { "a": [1, 2] }, doc! { "a": [[1, 2], 3] }],
        [doc! { "a": [2, 1] }, doc! { "a": [1, 2, 3] }, doc! { "a": 1 }, doc! { "a": [[[1, 2]]] }],
    );
    let bytes = |subtype, bytes: &[u8]| Binary { subtype, bytes: bytes.to_vec() };
    inserts(
        cases,
        "bytes are equal with their subtype",
        &field().eq(bytes(BinarySubtype::Generic, &[1, 2])),
        [doc! { "a": bytes(BinarySubtype::Generic, &[1, 2]) }],
        [doc! { "a": bytes(BinarySubtype::UserDefined(0x80), &[1, 2]) }, doc! { "a": "\u{1}\u{2}" }],
    );
    let regex = Regex { pattern: "^p".try_into().unwrap(), options: "".try_into().unwrap() };
    inserts(
        cases,
        "a pattern in a document is no text",
        &field().eq("^p"),
        [doc! { "a": "^p" }],
        [doc! { "a": regex }],
    );
    inserts(
        cases,
        "exists asks whether it is there",
        &field().exists(true),
        [doc! { "a": 1 }, doc! { "a": Bson::Null }, doc! { "a": [] }],
        [doc! {}, doc! { "b": 1 }],
    );
    inserts(
        cases,
        "not exists asks whether it is not",
        &field().exists(false),
        [doc! {}, doc! { "b": 1 }],
        [doc! { "a": 1 }, doc! { "a": Bson::Null }],
    );
}

fn of_order(cases: &mut Vec<Case>) {
    let field = || Filter::field("a");
    inserts(
        cases,
        "greater, among numbers only",
        &field().gt(10),
        [
            doc! { "a": 11 },
            doc! { "a": 10.5 },
            doc! { "a": decimal("10.01") },
            doc! { "a": f64::INFINITY },
            doc! { "a": [1, 11] },
        ],
        [
            doc! { "a": 10 },
            doc! { "a": "11" },
            doc! { "a": DateTime::from_millis(11) },
            doc! { "a": true },
            doc! { "a": f64::NAN },
            doc! { "a": [] },
            doc! { "a": { "b": 11 } },
            doc! { "a": Bson::MaxKey },
            doc! {},
        ],
    );
    inserts(
        cases,
        "less or equal",
        &field().lte(10.0),
        [doc! { "a": 10 }, doc! { "a": -1_i64 }, doc! { "a": f64::NEG_INFINITY }, doc! { "a": decimal("-1E+6000") }],
        [doc! { "a": 10.1 }, doc! { "a": f64::NAN }, doc! { "a": Bson::Null }, doc! { "a": Bson::MinKey }, doc! {}],
    );
    inserts(
        cases,
        "not less is not greater or equal",
        &field().lt(10).not(),
        [doc! { "a": 10 }, doc! { "a": "text" }, doc! { "a": f64::NAN }, doc! {}],
        [doc! { "a": 9 }, doc! { "a": [20, 9] }],
    );
    inserts(
        cases,
        "NaN stands beside nothing but NaN",
        &field().gte(f64::NAN),
        [doc! { "a": f64::NAN }],
        [doc! { "a": 1 }, doc! { "a": f64::INFINITY }],
    );
    inserts(
        cases,
        "a double and a decimal, exactly",
        &field().gt(0.1),
        [doc! { "a": decimal("0.11") }],
        // The double lies a little above.
        [doc! { "a": decimal("0.1") }, doc! { "a": decimal("0.1000000000000000055") }],
    );
    inserts(
        cases,
        "text by its bytes",
        &field().gte("b"),
        [doc! { "a": "b" }, doc! { "a": "ba" }, doc! { "a": "é" }],
        [doc! { "a": "B" }, doc! { "a": "az" }, doc! { "a": "" }, doc! { "a": 1 }],
    );
    let at = DateTime::from_millis;
    inserts(
        cases,
        "dates, before 1970 too",
        &field().lt(at(0)),
        [doc! { "a": at(-1) }],
        [doc! { "a": at(0) }, doc! { "a": Timestamp { time: 0, increment: 1 } }, doc! { "a": -1 }],
    );
    inserts(
        cases,
        "timestamps by time, then increment, without a sign",
        &field().gt(Timestamp { time: 5, increment: 2 }),
        [doc! { "a": Timestamp { time: 5, increment: 3 } }, doc! { "a": Timestamp { time: u32::MAX, increment: 1 } }],
        [doc! { "a": Timestamp { time: 5, increment: 2 } }, doc! { "a": at(9_000_000) }],
    );
    inserts(
        cases,
        "false before true",
        &field().lt(true),
        [doc! { "a": false }],
        [doc! { "a": true }, doc! { "a": 0 }],
    );
    let id = |byte| ObjectId::from_bytes([byte; 12]);
    inserts(
        cases,
        "object ids",
        &field().gt(id(2)),
        [doc! { "a": id(0xFF) }],
        [doc! { "a": id(1) }, doc! { "a": id(2) }],
    );
    let bytes = |bytes: &[u8]| Binary { subtype: BinarySubtype::Generic, bytes: bytes.to_vec() };
    inserts(
        cases,
        "bytes by length first",
        &field().gt(bytes(&[9])),
        [doc! { "a": bytes(&[0, 0]) }, doc! { "a": bytes(&[10]) }],
        [doc! { "a": bytes(&[8]) }, doc! { "a": bytes(&[]) }],
    );
}

fn of_paths_and_arrays(cases: &mut Vec<Case>) {
    inserts(
        cases,
        "a dotted path goes into documents",
        &Filter::field("a.b.c").eq(1),
        [doc! { "a": { "b": { "c": 1 } } }],
        [doc! { "a": { "b": 1 } }, doc! { "a.b.c": 1 }, doc! { "a": { "b": { "d": 1 } } }, doc! {}],
    );
    inserts(
        cases,
        "a dotted path goes through arrays of documents",
        &Filter::field("lines.sku").eq("b"),
        [document()],
        [doc! { "lines": [{ "sku": "c" }] }, doc! { "lines": ["b"] }, doc! { "lines": [[{ "sku": "b" }]] }],
    );
    inserts(
        cases,
        "a dotted path goes to an element by its index",
        &Filter::field("lines.1.sku").eq("b"),
        [document(), doc! { "lines": { "1": { "sku": "b" } } }, doc! { "lines": [0, [{ "sku": "b" }]] }],
        [doc! { "lines": [{ "sku": "b" }] }],
    );
    inserts(
        cases,
        "an index at the end of a path is that element, not what is in it",
        &Filter::field("a.0").eq(1),
        [doc! { "a": [1, 2] }, doc! { "a": [{ "0": 1 }] }],
        [doc! { "a": [2, 1] }, doc! { "a": [[1]] }, doc! { "a": 1 }],
    );
    inserts(
        cases,
        "a missing field behind an array is missing only in documents",
        &Filter::field("a.b").eq(Bson::Null),
        [doc! { "a": [{ "b": 1 }, {}] }, doc! { "a": {} }, doc! { "a": 5 }, doc! {}],
        [doc! { "a": [] }, doc! { "a": [1, 2] }, doc! { "a": [{ "b": 1 }] }],
    );
    inserts(
        cases,
        "exists behind an array asks every document in it",
        &Filter::field("a.b").exists(true),
        [doc! { "a": [1, { "b": Bson::Null }] }],
        [doc! { "a": [] }, doc! { "a": [1] }, doc! { "a": [{}] }],
    );
    inserts(
        cases,
        "two conditions may be met by two elements",
        &Filter::field("a").gt(3).and(Filter::field("a").lt(2)),
        [doc! { "a": [1, 4] }],
        [doc! { "a": [2, 3] }, doc! { "a": 1 }],
    );
    inserts(
        cases,
        "nested arrays are gone into once",
        &Filter::field("a").eq(1),
        [doc! { "a": [1] }],
        [doc! { "a": [[1]] }],
    );
}

fn of_events_without_a_document(cases: &mut Vec<Case>) {
    let conditions = [
        Filter::field("status").eq("paid"),
        Filter::field("status").ne("open"),
        Filter::field("status").eq("open").not(),
        Filter::field("nothing").eq(Bson::Null),
        Filter::field("nothing").exists(false),
        Filter::field("nothing").exists(true).not(),
        Filter::field("total").gt(100).not(),
        Filter::field("total").is_in([12, 13]),
    ];
    for filter in conditions {
        for (change, expected) in [
            (Change::Insert(document()), true),
            (Change::Replace(document()), true),
            (Change::LookedUp(document()), true),
            (Change::Update(document()), false),
            (Change::Delete(document()), false),
        ] {
            case(cases, "a condition on a field wants a full document", filter.clone(), change, expected);
        }
    }
}

fn of_combinations(cases: &mut Vec<Case>) {
    let paid = || Filter::field("status").eq("paid");
    let large = || Filter::field("total").gte(100);
    let deletes = || Filter::operations([Delete]);
    for (name, filter, expected) in [
        ("and wants both", paid().and(large()), [false, false, false]),
        ("or wants one", paid().or(large()), [true, true, false]),
        ("not and is one of the opposites", paid().and(large()).not(), [true, true, false]),
        ("not or is both opposites", paid().or(large()).not(), [false, false, false]),
        ("not not", paid().not().not(), [true, true, false]),
        ("a delete or a condition", deletes().or(paid()), [true, true, true]),
        ("not a delete and a condition", deletes().not().and(paid()), [true, true, false]),
        ("neither a delete nor a condition", deletes().or(large()).not(), [true, true, false]),
        ("not both a delete and a condition", deletes().and(paid()).not(), [true, true, false]),
        ("everything and a condition", Filter::default().and(paid()), [true, true, false]),
        ("everything or a condition", Filter::default().or(large()), [true, true, true]),
        ("nothing or a condition", Filter::default().not().or(paid()), [true, true, false]),
        ("operations and condition", Filter::operations([Insert, Update]).and(paid()), [true, true, false]),
        ("operation and condition", Filter::operations([Insert]).and(paid()), [true, false, false]),
        ("collection and condition", Filter::namespaces([here()]).and(paid()), [true, true, false]),
        ("not both collection and condition", Filter::namespaces([here()]).and(large()).not(), [true, true, false]),
        (
            "three in a row",
            paid().and(Filter::operations([Insert])).and(Filter::field("total").lt(100)),
            [true, false, false],
        ),
        ("and under or", paid().and(large()).or(Filter::field("lines.count").gt(4)), [true, true, false]),
    ] {
        let changes = [Change::Insert(document()), Change::LookedUp(document()), Change::Delete(document())];
        for (change, expected) in changes.into_iter().zip(expected) {
            case(cases, name, filter.clone(), change, expected);
        }
    }
}
