//! Records that cannot be read: refused with id and field named, and left byte for byte as they are.

use libtest_mimic::Trial;
use mongodb::Database;
use mongodb::bson::{Bson, DateTime, Document, RawDocumentBuf, Timestamp, doc, oid::ObjectId};
use mongosub::{
    Checkpoint, CheckpointStorage, Claim, Epoch, Fence, Hand, InHand, Owner, Ownership, Save, StartPosition,
    StorageError,
};

use super::{HEX, TIME, claimed, document, id, plain, raw, storage, token};

pub fn tests() -> Vec<Trial> {
    vec![
        plain("a record that cannot be read is refused and left byte for byte", refused_records),
        plain("a record that reads well is claimed and saved to, however odd it looks", odd_records),
        plain("ends and deaths are counted on from any number that can be read, and taken back", odd_counts),
        plain("a record that cannot be read is deleted by hand", deleted_by_hand),
    ]
}

const OWNER: &str = "host:1:abc";
const FENCE: i64 = 7;

/// Our part of a record, with something in it changed.
fn ours(change: Document) -> Document {
    let ours = doc! {
        "schema": 1_i64, "fence": FENCE, "owner": OWNER, "claimedAt": DateTime::from_millis(1), "epoch": 5_i64,
        "kind": "event", "clusterTime": TIME, "savedAt": DateTime::from_millis(2), "pipeline": "p",
        "source": { "scope": "collection", "db": "d", "collection": "c", "collectionUUID": "u", "setName": "s" },
        "clean": false, "over": FENCE,
    };
    changed(ours, change)
}

/// `Undefined` removes a field.
fn changed(mut document: Document, change: Document) -> Document {
    for (field, value) in change {
        if value == Bson::Undefined {
            document.remove(&field);
        } else {
            document.insert(field, value);
        }
    }
    document
}

/// A whole record with something in our part changed. `Undefined` removes a field.
fn record(change: Document) -> Document {
    doc! { "resumeToken": { "_data": HEX }, "mongosub": ours(change) }
}

/// What cannot be read, with the field at fault.
fn unreadable() -> Vec<(&'static str, Document)> {
    [wrong_positions(), wrong_texts(), wrong_parts_of_ours(), wrong_fields_of_ours(), wrong_notes()].concat()
}

/// Of the wrong type, or several at once.
fn wrong_positions() -> Vec<(&'static str, Document)> {
    vec![
        ("resumeToken", doc! { "resumeToken": HEX }),
        ("resumeToken", doc! { "resumeToken": null }),
        ("resumeToken", doc! { "resumeToken": [{ "_data": HEX }] }),
        ("resumeToken._data", doc! { "resumeToken": {} }),
        ("resumeToken._data", doc! { "resumeToken": { "_data": 7 } }),
        ("resumeToken._data", doc! { "resumeToken": { "_data": null } }),
        ("resumeToken._data", doc! { "resumeToken": { "_data": [HEX] } }),
        ("resumeToken._data", doc! { "resumeToken": { "_data": "" } }),
        ("resumeToken._data", doc! { "resumeToken": { "_data": "82" } }),
        ("resumeToken._data", doc! { "resumeToken": { "_data": &HEX[..HEX.len() - 1] } }),
        ("resumeToken._data", doc! { "resumeToken": { "_data": format!("{HEX}\n") } }),
        ("resumeToken._data", doc! { "resumeToken": { "_data": format!("{HEX}0G") } }),
        ("resumeToken._data", doc! { "resumeToken": { "_data": format!("81{}", &HEX[2..]) } }),
        ("resumeToken._data", doc! { "resumeToken": { "_data": format!("{HEX}ää") } }),
        ("operationTime", doc! { "operationTime": 7_i64 }),
        ("operationTime", doc! { "operationTime": DateTime::from_millis(1) }),
        ("operationTime", doc! { "operationTime": null }),
        ("operationTime", doc! { "operationTime": { "$timestamp": 1 } }),
        ("checkpoint", doc! { "checkpoint": 7 }),
        ("checkpoint", doc! { "checkpoint": null }),
        ("checkpoint", doc! { "checkpoint": {} }),
        ("subscriptionPosition", doc! { "subscriptionPosition": 7 }),
        ("operationTime", doc! { "resumeToken": { "_data": HEX }, "operationTime": TIME }),
        ("operationTime", doc! { "resumeToken": { "_data": HEX }, "operationTime": null }),
        ("checkpoint", doc! { "resumeToken": { "_data": HEX }, "checkpoint": HEX }),
        ("subscriptionPosition", doc! { "checkpoint": HEX, "subscriptionPosition": HEX }),
        ("checkpoint", doc! { "operationTime": TIME, "checkpoint": HEX }),
    ]
}

/// Text that holds neither a token nor a time.
fn wrong_texts() -> Vec<(&'static str, Document)> {
    let text = |text: &str| doc! { "checkpoint": text };
    vec![
        ("checkpoint", text("")),
        ("checkpoint", text("position:42")),
        ("checkpoint", text("2026-01-01T10:00:05.123Z")),
        ("checkpoint", text("1700000000.7")),
        ("checkpoint", text(&HEX[..HEX.len() - 1])),
        ("checkpoint", text(&format!("{HEX}\u{0}"))),
        ("checkpoint", text(&format!("\u{a0}{HEX}"))),
        ("checkpoint", text(&format!(r#"{{"resumeToken": {{"_data": "{}"}}}}"#, &HEX[..HEX.len() - 1]))),
        ("checkpoint", text(&format!(r#"{{"_data": "{HEX}0"}}"#))),
        ("checkpoint", text(&format!(r#"{{"resumeToken": {{"_data": "{HEX}"}}, "x": 1}}"#))),
        ("checkpoint", text(&format!(r#"{{"resumeToken": {{"_data": "{HEX}", "_typeBits": 1}}}}"#))),
        ("checkpoint", text(&format!(r#"{{"liveFrom": {{"resumeToken": {{"_data": "{HEX}"}}}}}}"#))),
        ("checkpoint", text(r#"{"operationTime": {"$timestamp": {"t": 4000000000, "i": 1}}}"#)),
        ("checkpoint", text(r#"{"operationTime": {"$timestamp": {"t": 00000000001, "i": 1}}}"#)),
        ("checkpoint", text(r#"{"operationTime": {"$timestamp": {"t": "1", "i": 1}}}"#)),
        ("checkpoint", text(r#"{"operationTime": {"$timestamp": {"t": , "i": 1}}}"#)),
        ("checkpoint", text("Timestamp{value=1, seconds=1, inc=1")),
        ("checkpoint", text("Timestamp{value=, seconds=1, inc=1}")),
        ("subscriptionPosition", doc! { "subscriptionPosition": "position:42" }),
        // Of Occurrent's catch-up: a start of the change stream from there would skip the rest of the replay.
        (
            "checkpoint",
            doc! {
                "checkpoint": "position:42", "catchupLiveFrom": { "operationTime": TIME }, "catchupReplayOrigin": 7_i64,
                "catchupReplayTo": 40_i64,
            },
        ),
    ]
}

fn wrong_parts_of_ours() -> Vec<(&'static str, Document)> {
    vec![
        ("mongosub", doc! { "mongosub": null }),
        ("mongosub", doc! { "mongosub": 1 }),
        ("mongosub", doc! { "mongosub": [ours(doc! {})] }),
        ("mongosub.schema", doc! { "mongosub": {} }),
        ("mongosub.source", record(doc! { "source": null })),
        ("mongosub.source", record(doc! { "source": "orders" })),
        ("mongosub.source", record(doc! { "source": [] })),
        // Text of ours in the field we never write to is another program's.
        ("subscriptionPosition", doc! { "subscriptionPosition": "line 17", "mongosub": ours(doc! {}) }),
        ("checkpoint", doc! { "checkpoint": "line 17", "mongosub": ours(doc! { "epoch": Bson::Undefined }) }),
    ]
}

fn wrong_fields_of_ours() -> Vec<(&'static str, Document)> {
    let gone = Bson::Undefined;
    let mut cases = Vec::new();
    let fields: [(&str, &[Bson]); 14] = [
        (
            "schema",
            &[
                gone.clone(),
                2.into(),
                2_i64.into(),
                0.into(),
                (-1).into(),
                1.0.into(),
                "1".into(),
                Bson::Null,
                true.into(),
            ],
        ),
        (
            "fence",
            &[
                gone.clone(),
                (-1).into(),
                i64::MAX.into(),
                ((1_i64 << 62) + 1).into(),
                7.0.into(),
                "7".into(),
                Bson::Null,
            ],
        ),
        ("owner", &[gone.clone(), 7.into(), Bson::Null, doc! {}.into()]),
        ("claimedAt", &[7_i64.into(), Bson::Null, "2026".into(), TIME.into()]),
        ("epoch", &[(-1).into(), i64::MAX.into(), 5.0.into(), "5".into(), Bson::Null]),
        ("kind", &["Event".into(), "".into(), 1.into(), Bson::Null, vec!["event"].into()]),
        ("clusterTime", &[7_i64.into(), Bson::Null, DateTime::from_millis(1).into()]),
        ("savedAt", &[7_i64.into(), Bson::Null, TIME.into()]),
        ("pipeline", &[7.into(), Bson::Null, doc! {}.into()]),
        ("clean", &[1.into(), Bson::Null, "true".into()]),
        ("clean", &[ObjectId::new().into()]),
        ("uncleanEnds", &[(-1).into(), i64::MAX.into(), 1.0.into(), "1".into(), Bson::Null, vec![1].into()]),
        (
            "over",
            &[(-1_i64).into(), ((1_i64 << 62) + 1).into(), 7.0.into(), "7".into(), Bson::Null, vec![FENCE].into()],
        ),
        ("inHand", &[Bson::Null, HEX.into(), 1.into(), vec![in_hand(doc! {})].into()]),
    ];
    for (field, values) in fields {
        let path: &'static str = Box::leak(format!("mongosub.{field}").into_boxed_str());
        cases.extend(values.iter().map(|value| (path, record(doc! { field: value.clone() }))));
    }
    let hands = [
        ("at", doc! { "at": gone.clone() }),
        ("at", doc! { "at": null }),
        ("at", doc! { "at": 7 }),
        ("at", doc! { "at": TIME }),
        ("at", doc! { "at": { "_data": HEX } }),
        ("deaths", doc! { "deaths": gone }),
        ("deaths", doc! { "deaths": null }),
        ("deaths", doc! { "deaths": -1 }),
        ("deaths", doc! { "deaths": i64::MAX }),
        ("deaths", doc! { "deaths": 1.0 }),
        ("deaths", doc! { "deaths": "1" }),
        ("deaths", doc! { "deaths": [1] }),
    ];
    for (field, change) in hands {
        let path: &'static str = Box::leak(format!("mongosub.inHand.{field}").into_boxed_str());
        cases.push((path, record(doc! { "inHand": in_hand(change) })));
    }
    let sources = [
        ("scope", doc! {}),
        ("scope", doc! { "scope": "cluster" }),
        ("scope", doc! { "scope": 1 }),
        ("db", doc! { "scope": "collection", "collection": "c" }),
        ("collection", doc! { "scope": "collection", "db": "d" }),
        ("collection", doc! { "scope": "collection", "db": "d", "collection": 1 }),
        ("db", doc! { "scope": "database" }),
        ("db", doc! { "scope": "database", "db": null }),
        ("collectionUUID", doc! { "scope": "deployment", "collectionUUID": 1 }),
        ("setName", doc! { "scope": "deployment", "setName": null }),
        ("lastEvent", doc! { "scope": "deployment", "lastEvent": { "_data": HEX } }),
    ];
    for (field, source) in sources {
        let path: &'static str = Box::leak(format!("mongosub.source.{field}").into_boxed_str());
        cases.push((path, record(doc! { "source": source })));
    }
    cases
}

/// An event in hand with something in it changed.
fn in_hand(change: Document) -> Document {
    changed(doc! { "at": HEX, "deaths": 1_i64 }, change)
}

fn gap(change: Document) -> Document {
    let at = DateTime::from_millis(3);
    changed(doc! { "from": HEX, "to": "17.1", "scope": "collection", "db": "d", "collection": "c", "at": at }, change)
}

fn skipped(change: Document) -> Document {
    let at = DateTime::from_millis(3);
    changed(doc! { "from": HEX, "through": "17.1", "reason": "r", "by": OWNER, "at": at }, change)
}

/// Lists of notes in which one entry is wrong.
fn wrong_notes() -> Vec<(&'static str, Document)> {
    let gone = Bson::Undefined;
    let mut cases = Vec::new();
    for list in ["gaps", "skips"] {
        let good = Bson::from(if list == "gaps" { gap(doc! {}) } else { skipped(doc! {}) });
        let path: &'static str = Box::leak(format!("mongosub.{list}").into_boxed_str());
        for wrong in [Bson::Null, good.clone(), "gaps".into(), vec![Bson::Null].into(), vec![good, 1.into()].into()] {
            cases.push((path, record(doc! { list: wrong })));
        }
        cases.push((path, record(doc! { list: [[]] })));
    }
    let gaps = [
        ("from", doc! { "from": gone.clone() }),
        ("from", doc! { "from": null }),
        ("from", doc! { "from": TIME }),
        ("to", doc! { "to": gone.clone() }),
        ("to", doc! { "to": 1 }),
        ("scope", doc! { "scope": gone.clone() }),
        ("scope", doc! { "scope": "cluster" }),
        ("db", doc! { "db": 1 }),
        ("collection", doc! { "collection": null }),
        ("at", doc! { "at": gone.clone() }),
        ("at", doc! { "at": 3_i64 }),
    ];
    for (field, change) in gaps {
        let path: &'static str = Box::leak(format!("mongosub.gaps.{field}").into_boxed_str());
        cases.push((path, record(doc! { "gaps": [gap(doc! {}), gap(change)] })));
    }
    let skips = [
        ("from", doc! { "from": gone.clone() }),
        ("from", doc! { "from": 1 }),
        ("through", doc! { "through": null }),
        ("through", doc! { "through": gone.clone() }),
        ("reason", doc! { "reason": gone.clone() }),
        ("reason", doc! { "reason": ["r"] }),
        ("by", doc! { "by": 1 }),
        ("at", doc! { "at": TIME }),
        ("at", doc! { "at": gone }),
    ];
    for (field, change) in skips {
        let path: &'static str = Box::leak(format!("mongosub.skips.{field}").into_boxed_str());
        cases.push((path, record(doc! { "skips": [skipped(change)] })));
    }
    cases
}

async fn refused_records(database: Database) {
    let (storage, collection) = storage(&database);
    let own = Ownership { fence: Fence(FENCE), owner: Owner::new(OWNER) };
    for (number, (field, mut stored)) in unreadable().into_iter().enumerate() {
        let name = format!("refused_{number}");
        stored.insert("_id", &name);
        stored.insert("note", "kept");
        collection.insert_one(&stored).await.unwrap();
        let before = raw(&collection, &name).await.unwrap();

        let refuses = |what: &str, error: StorageError| match error {
            StorageError::Unreadable { id, field: found, .. } => {
                assert_eq!((id.as_str(), found.as_str()), (name.as_str(), field), "{what} of {stored}");
            }
            other => panic!("{what} of {stored}: {other}"),
        };
        refuses("read", storage.read(&id(&name)).await.expect_err(&stored.to_string()));
        let mut claim = Claim::new(id(&name));
        refuses("claim", storage.claim(&claim).await.expect_err(&stored.to_string()));
        claim.start = Some(StartPosition::new(TIME.into()));
        refuses("claim with a start", storage.claim(&claim).await.expect_err(&stored.to_string()));
        claim.expect = Some(own.clone());
        refuses("claim that expects the owner", storage.claim(&claim).await.expect_err(&stored.to_string()));
        let far = Timestamp { time: u32::MAX, increment: 1 };
        for position in [Checkpoint::Time(far), token(HEX), Checkpoint::Text("line 18".into())] {
            let mut save = Save::new(id(&name), own.clone(), Epoch(6), position);
            refuses("save", storage.save(&save).await.expect_err(&stored.to_string()));
            save.hand = Hand::Holds(InHand::new(TIME.into(), 1));
            refuses("note of an event in hand", storage.save(&save).await.expect_err(&stored.to_string()));
        }
        // Nobody insists on this one, so it is not told.
        storage.not_dead(&id(&name), &own).await.unwrap();
        assert_eq!(raw(&collection, &name).await.unwrap(), before, "{stored}");
    }
}

/// What can be read, with the position that is in it.
fn odd() -> Vec<(Option<Checkpoint>, Document)> {
    let gone = Bson::Undefined;
    let ended = |ends: Bson, hand: Document| doc! { "mongosub": ours(doc! { "uncleanEnds": ends, "inHand": hand }) };
    vec![
        (None, doc! {}),
        (None, doc! { "note": 1 }),
        (Some(token(HEX)), doc! { "resumeToken": { "_data": HEX.to_lowercase() } }),
        (Some(token(HEX)), doc! { "resumeToken": { "_data": HEX, "_typeBits": 7 } }),
        (Some(token(&HEX[..18])), doc! { "resumeToken": { "_data": &HEX[..18] } }),
        (Some(token(&format!("{HEX}{}", "0A".repeat(40_000)))), {
            doc! { "resumeToken": { "_data": format!("{HEX}{}", "0A".repeat(40_000)) } }
        }),
        (Some(token(&format!("{HEX}{}", "0A".repeat(40_000)))), {
            doc! { "checkpoint": format!(r#"{{"resumeToken": {{"_data": "{HEX}{}"}}}}"#, "0A".repeat(40_000)) }
        }),
        (Some(TIME.into()), doc! { "operationTime": TIME }),
        (Some(token(HEX)), record(doc! {})),
        (Some(token(HEX)), record(doc! { "schema": 1, "fence": 7, "epoch": 5 })),
        (Some(token(HEX)), record(doc! { "fence": i64::from(i32::MAX), "epoch": i32::MAX })),
        (Some(token(HEX)), record(doc! { "fence": (1_i64 << 62) - 1, "epoch": 0 })),
        (Some(token(HEX)), record(doc! { "claimedAt": gone.clone(), "savedAt": gone.clone(), "clean": gone.clone() })),
        (Some(token(HEX)), record(doc! { "kind": gone.clone(), "pipeline": gone.clone(), "source": gone.clone() })),
        (Some(token(HEX)), record(doc! { "epoch": gone.clone(), "clusterTime": gone.clone() })),
        (Some(token(HEX)), record(doc! { "source": { "scope": "deployment", "db": 7, "x": 1 } })),
        (Some(token(HEX)), record(doc! { "source": { "scope": "database", "db": "" } })),
        (Some(token(HEX)), record(doc! { "unknown": [1], "clean": true })),
        (Some(Checkpoint::Text("line 17".into())), doc! { "checkpoint": "line 17", "mongosub": ours(doc! {}) }),
        // Our own text, whatever another program would mean by it.
        (Some(Checkpoint::Text(HEX.into())), doc! { "checkpoint": HEX, "mongosub": ours(doc! {}) }),
        (None, doc! { "mongosub": ours(doc! {}) }),
        (None, ended(0.into(), in_hand(doc! {}))),
        (None, ended(i32::MAX.into(), in_hand(doc! { "at": "", "deaths": i32::MAX, "x": 1 }))),
        (None, ended((1_i64 << 62).into(), in_hand(doc! { "at": "line 17", "deaths": 1_i64 << 62 }))),
        (None, doc! { "mongosub": ours(doc! { "over": gone.clone() }) }),
        (None, doc! { "mongosub": ours(doc! { "over": 0 }) }),
        (None, doc! { "mongosub": ours(doc! { "gaps": [], "skips": [] }) }),
        (None, doc! { "mongosub": ours(doc! { "gaps": [gap(doc! { "scope": "deployment", "db": 1, "x": 1 })] }) }),
        (None, doc! { "mongosub": ours(doc! { "gaps": vec![gap(doc! {}); 40], "skips": vec![skipped(doc! {}); 40] }) }),
        (None, doc! { "mongosub": ours(doc! { "skips": [skipped(doc! { "from": null, "reason": "" })] }) }),
    ]
}

async fn odd_records(database: Database) {
    let (storage, collection) = storage(&database);
    for (number, (position, mut stored)) in odd().into_iter().enumerate() {
        let name = format!("odd_{number}");
        stored.insert("_id", &name);
        stored.insert("note", "kept");
        collection.insert_one(&stored).await.unwrap();
        let read = storage.read(&id(&name)).await.unwrap().unwrap();
        assert_eq!(read.position, position, "{stored}");

        let (record, own) = claimed(&storage, &Claim::new(id(&name))).await;
        assert_eq!(record.position, position, "{stored}");
        assert!(Some(own.fence) > read.ownership.as_ref().map(|own| own.fence), "{stored}");
        let without_ours = |raw: RawDocumentBuf| {
            let mut document = Document::try_from(raw).unwrap();
            document.remove("mongosub");
            document
        };
        let mut expected = stored.clone();
        expected.remove("mongosub");
        let mut now = without_ours(raw(&collection, &name).await.unwrap());
        // The server moves `_id` to the front.
        expected.remove("_id");
        now.remove("_id");
        assert_eq!(now, expected, "{stored}");

        let epoch = Epoch(record.epoch.map_or(1, |epoch| epoch.0 + 1));
        let save = Save::new(id(&name), own, epoch, token(HEX));
        storage.save(&save).await.unwrap();
        let record = storage.read(&id(&name)).await.unwrap().unwrap();
        assert_eq!((record.position, record.epoch), (Some(token(HEX)), Some(epoch)), "{stored}");
    }
}

async fn odd_counts(database: Database) {
    const LARGEST: i64 = 1 << 62;
    let (storage, collection) = storage(&database);
    let numbers: [(Bson, i64); 5] = [
        (0.into(), 1),
        (7_i64.into(), 8),
        (i32::MAX.into(), i64::from(i32::MAX) + 1),
        ((LARGEST - 1).into(), LARGEST),
        // One more would be a record that cannot be read.
        (LARGEST.into(), LARGEST),
    ];
    for (number, (count, more)) in numbers.into_iter().enumerate() {
        let name = format!("counts_{number}");
        let hand = in_hand(doc! { "deaths": count.clone(), "unknown": "kept" });
        let ended = doc! { "uncleanEnds": count, "inHand": hand, "savedAt": Bson::Undefined, "over": 0 };
        let mut stored = record(ended);
        stored.insert("_id", &name);
        collection.insert_one(&stored).await.unwrap();
        let as_read = |count: i64| u32::try_from(count).unwrap_or(u32::MAX);
        let check = async |expected: i64, over: i64| {
            let ours = document(&collection, &name).await.get_document("mongosub").unwrap().clone();
            let number = |document: &Document, field: &str| match document.get(field) {
                Some(Bson::Int32(number)) => i64::from(*number),
                Some(Bson::Int64(number)) => *number,
                other => panic!("{other:?}"),
            };
            let hand = ours.get_document("inHand").unwrap();
            let found = (number(&ours, "uncleanEnds"), number(hand, "deaths"), number(&ours, "over"));
            assert_eq!(found, (expected, expected, over), "{stored}");
            assert_eq!((hand.get_str("at").unwrap(), hand.get_str("unknown").unwrap()), (HEX, "kept"), "{stored}");
            let read = storage.read(&id(&name)).await.unwrap().unwrap();
            assert_eq!(read.unclean_ends, as_read(expected), "{stored}");
            assert_eq!(read.in_hand, Some(InHand::new(token(HEX), as_read(expected))), "{stored}");
        };
        claimed(&storage, &Claim::new(id(&name))).await;
        check(more, FENCE).await;
        let own = Ownership { fence: Fence(FENCE), owner: Owner::new(OWNER) };
        for _ in 0..2 {
            storage.not_dead(&id(&name), &own).await.unwrap();
            check(more - 1, 0).await;
        }
    }
}

async fn deleted_by_hand(database: Database) {
    let (storage, collection) = storage(&database);
    let stored = doc! { "_id": "broken", "resumeToken": 7, "mongosub": ours(doc! { "schema": 2 }) };
    collection.insert_one(stored).await.unwrap();
    assert_eq!(storage.list().await.unwrap(), ["broken"]);
    assert!(storage.delete(&id("broken"), None).await.unwrap());
    assert_eq!(raw(&collection, "broken").await, None);
}
