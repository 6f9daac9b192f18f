//! Events as servers send them, parts that are not, and bytes that are no BSON.

use bson::{Binary, Bson, Document, doc, oid::ObjectId, spec::BinarySubtype};
use proptest::prelude::*;
use serde::Deserialize;

use super::*;

const TOKEN: &str = "826568B1F0000000032B022C0100296E5A10045EED5EED5EED4EED8EED5EED5EED5EED46645F69640064000004";

fn event(document: &Document) -> ChangeEvent {
    ChangeEvent::new(document.to_vec().unwrap().into()).unwrap()
}

/// An update with everything that a server can send.
fn whole() -> Document {
    doc! {
        "_id": { "_data": TOKEN },
        "operationType": "update",
        "clusterTime": Timestamp { time: 0x6568_B1F0, increment: 3 },
        "wallTime": DateTime::from_millis(1_701_360_000_123),
        "collectionUUID": Binary { subtype: BinarySubtype::Uuid, bytes: vec![0x5E; 16] },
        "ns": { "db": "shop", "coll": "orders.open" },
        "documentKey": { "_id": ObjectId::from_bytes([7; 12]), "region": "eu" },
        "updateDescription": {
            "updatedFields": { "status": "paid", "total": 12.5, "lines.0.count": 3_i64 },
            "removedFields": ["note", "draft.by"],
            "truncatedArrays": [{ "field": "tags", "newSize": 2 }],
            "disambiguatedPaths": { "lines.0.count": ["lines", 0, "count"] },
        },
        "fullDocument": {
            "_id": ObjectId::from_bytes([7; 12]), "status": "paid", "total": 12.5, "tags": ["a", "b"], "note": Bson::Null,
            "code": Bson::JavaScriptCode("f()".into()), "blob": Binary { subtype: BinarySubtype::Generic, bytes: vec![1, 2] },
            "old": Binary { subtype: BinarySubtype::BinaryOld, bytes: vec![1, 2] },
            "scope": Bson::JavaScriptCodeWithScope(bson::JavaScriptCodeWithScope { code: "g".into(), scope: doc! { "x": 1 } }),
            "at": Timestamp { time: 9, increment: 9 }, "like": bson::Regex { pattern: "a".try_into().unwrap(), options: "i".try_into().unwrap() },
            "lines": [{ "sku": "x", "count": 3_i64 }], "price": "9.99".parse::<bson::Decimal128>().unwrap(),
        },
        "fullDocumentBeforeChange": { "status": "open" },
        "operationDescription": { "idIndex": { "v": 2 } },
        "lsid": { "id": Binary { subtype: BinarySubtype::Uuid, bytes: vec![1; 16] } },
        "txnNumber": 5_i64,
        "splitEvent": { "fragment": 1, "of": 3 },
    }
}

#[test]
fn every_part_of_an_event_can_be_asked_for() {
    #[derive(Debug, PartialEq, Deserialize)]
    struct Order<'a> {
        status: &'a str,
        total: f64,
    }
    let event = event(&whole());
    assert_eq!(event.operation(), Ok(Operation::Update));
    assert_eq!(event.token().unwrap().as_str(), TOKEN);
    assert_eq!(event.position(), Ok(Checkpoint::Token(Token::new(TOKEN).unwrap())));
    assert_eq!(event.cluster_time(), Ok(Timestamp { time: 0x6568_B1F0, increment: 3 }));
    assert_eq!(event.wall_time(), Ok(Some(DateTime::from_millis(1_701_360_000_123))));
    assert_eq!(event.namespace(), Ok(Some(Namespace::new("shop", "orders.open"))));
    assert_eq!((event.database(), event.to()), (Ok(Some("shop")), Ok(None)));
    assert_eq!(event.collection_uuid(), Ok(Some(Uuid::from_bytes([0x5E; 16]))));
    assert_eq!(event.document_id(), Ok(Some(ObjectId::from_bytes([7; 12]))));
    let key: Option<&RawDocument> = event.document_key().unwrap();
    assert_eq!(key.unwrap().get_str("region").unwrap(), "eu");
    // Text is borrowed from the reply, not copied.
    let order: Option<Order<'_>> = event.full_document().unwrap();
    assert_eq!(order, Some(Order { status: "paid", total: 12.5 }));
    assert_eq!(event.raw_full_document().unwrap().unwrap().get_str("status").unwrap(), "paid");
    let before: Option<Document> = event.full_document_before_change().unwrap();
    assert_eq!(before, Some(doc! { "status": "open" }));
    let update = event.update_description().unwrap().unwrap();
    assert_eq!(update.updated_fields.get_i64("lines.0.count").unwrap(), 3);
    assert_eq!(update.removed_fields, ["note", "draft.by"]);
    assert_eq!(update.truncated_arrays, [TruncatedArray { field: "tags", new_size: 2 }]);
    assert!(update.disambiguated_paths.is_some());
    assert_eq!(event.txn_number(), Ok(Some(5)));
    assert!(event.lsid().unwrap().is_some());
    assert!(event.operation_description().unwrap().is_some());
    assert_eq!(event.split_event(), Ok(Some(SplitEvent { fragment: 1, of: 3 })));
    assert_eq!(event.get("txnNumber").unwrap().and_then(RawBsonRef::as_i64), Some(5));
    assert_eq!(Document::try_from(event.raw()).unwrap(), whole());
}

#[test]
fn what_was_not_sent_is_none() {
    let event = event(&doc! { "_id": { "_data": TOKEN }, "operationType": "delete", "fullDocument": Bson::Null });
    assert_eq!(event.full_document::<Document>(), Ok(None));
    assert_eq!(event.full_document_before_change::<Document>(), Ok(None));
    assert_eq!(event.document_key::<Document>(), Ok(None));
    assert_eq!(event.document_id::<i32>(), Ok(None));
    assert_eq!((event.namespace(), event.database(), event.to()), (Ok(None), Ok(None), Ok(None)));
    assert_eq!((event.wall_time(), event.collection_uuid(), event.txn_number()), (Ok(None), Ok(None), Ok(None)));
    assert!(event.update_description().unwrap().is_none());
    assert_eq!(event.split_event(), Ok(None));
    assert_eq!(event.cluster_time(), Ok(Timestamp { time: 0x6568_B1F0, increment: 3 }), "the token's");
}

#[test]
fn a_document_that_was_gone_when_it_was_looked_up_is_told_from_one_that_was_not_asked_for() {
    let update = doc! { "operationType": "update", "documentKey": { "_id": 1 } };
    let with = |document: Bson| {
        let mut update = update.clone();
        update.insert("fullDocument", document);
        event(&update)
    };
    assert_eq!(event(&update).lookup_missing(), Ok(false));
    assert_eq!(with(doc! { "_id": 1 }.into()).lookup_missing(), Ok(false));
    let gone = with(Bson::Null);
    assert_eq!((gone.lookup_missing(), gone.full_document::<Document>()), (Ok(true), Ok(None)));
}

#[test]
fn a_dropped_database_has_no_collection_and_a_rename_has_two() {
    let dropped = event(&doc! { "operationType": "dropDatabase", "ns": { "db": "shop" } });
    assert_eq!((dropped.database(), dropped.namespace()), (Ok(Some("shop")), Ok(None)));
    let renamed = event(&doc! {
        "operationType": "rename", "ns": { "db": "shop", "coll": "a" }, "to": { "db": "shop", "coll": "b" },
    });
    assert_eq!(renamed.namespace(), Ok(Some(Namespace::new("shop", "a"))));
    assert_eq!(renamed.to(), Ok(Some(Namespace::new("shop", "b"))));
}

#[test]
fn an_unknown_operation_is_kept_and_a_known_one_is_known_by_its_name() {
    let names = [
        "insert",
        "update",
        "replace",
        "delete",
        "drop",
        "rename",
        "dropDatabase",
        "invalidate",
        "create",
        "createIndexes",
        "dropIndexes",
        "modify",
        "shardCollection",
        "reshardCollection",
        "refineCollectionShardKey",
    ];
    for name in names {
        let operation = event(&doc! { "operationType": name }).operation().unwrap();
        assert!(!matches!(operation, Operation::Other(_)), "{name}");
        assert_eq!((operation.as_str(), operation.to_string().as_str()), (name, name));
        assert_eq!(Operation::from(name), operation);
    }
    let unknown = event(&doc! { "operationType": "defragment" }).operation().unwrap();
    assert_eq!((&unknown, unknown.as_str()), (&Operation::Other("defragment".into()), "defragment"));
}

#[test]
fn broken_text_is_an_error_of_its_field_alone() {
    let mut raw = whole().to_vec().unwrap();
    for (start, text) in raw.clone().windows(4).enumerate() {
        if text == b"paid" || text == b"open" {
            raw[start] = 0xFF;
        }
    }
    // `orders.open` was hit as well: the namespace is broken, the database is not.
    let event = ChangeEvent::new(raw.into()).unwrap();
    assert_eq!(event.full_document::<Document>().unwrap_err().field(), "fullDocument");
    assert_eq!(event.full_document_before_change::<Document>().unwrap_err().field(), "fullDocumentBeforeChange");
    assert_eq!(event.namespace().unwrap_err().field(), "ns.coll");
    assert_eq!(event.database(), Ok(Some("shop")));
    assert_eq!(event.operation(), Ok(Operation::Update));
    assert_eq!(event.document_id(), Ok(Some(ObjectId::from_bytes([7; 12]))));
    assert!(event.position().is_ok());
    let update = event.update_description().unwrap().unwrap();
    assert!(update.updated_fields.get("status").is_err());
    assert_eq!(update.updated_fields.get_i64("lines.0.count").unwrap(), 3);
}

#[test]
fn an_error_names_the_field_and_what_was_there() {
    let of = |document: Document| event(&document);
    let error = of(doc! { "operationType": 5 }).operation().unwrap_err();
    assert_eq!(error.to_string(), "cannot decode \"operationType\" of the change event: expected text, found Int32");
    for (error, field) in [
        (of(doc! {}).operation().unwrap_err(), "operationType"),
        (of(doc! { "_id": 1 }).token().unwrap_err(), "_id"),
        (of(doc! { "_id": {} }).token().unwrap_err(), "_id._data"),
        (of(doc! { "_id": { "_data": "zz" } }).position().unwrap_err(), "_id._data"),
        (of(doc! { "clusterTime": 1 }).cluster_time().unwrap_err(), "clusterTime"),
        (of(doc! { "ns": { "db": 1, "coll": "c" } }).namespace().unwrap_err(), "ns.db"),
        (of(doc! { "to": { "db": "d", "coll": 1 } }).to().unwrap_err(), "to.coll"),
        (of(doc! { "documentKey": [] }).document_key::<Document>().unwrap_err(), "documentKey"),
        (of(doc! { "documentKey": { "_id": "x" } }).document_id::<i32>().unwrap_err(), "documentKey"),
        (of(doc! { "updateDescription": {} }).update_description().unwrap_err(), "updateDescription.updatedFields"),
        (
            of(doc! { "updateDescription": { "updatedFields": {}, "removedFields": [1] } })
                .update_description()
                .unwrap_err(),
            "updateDescription.removedFields",
        ),
        (
            of(doc! { "updateDescription": { "updatedFields": {}, "truncatedArrays": [{ "field": "a", "newSize": -1 }] } })
                .update_description()
                .unwrap_err(),
            "updateDescription.truncatedArrays.newSize",
        ),
        (of(doc! { "splitEvent": { "fragment": 1 } }).split_event().unwrap_err(), "splitEvent.of"),
        (of(doc! { "txnNumber": "1" }).txn_number().unwrap_err(), "txnNumber"),
    ] {
        assert_eq!(error.field(), field, "{error}");
    }
}

#[test]
fn debug_shows_operation_namespace_and_key_and_nothing_of_a_document() {
    let event = event(&whole());
    let debug = format!("{event:?} {:?}", event.update_description().unwrap().unwrap());
    for shown in ["update", "shop.orders.open", "eu", "draft.by", "total"] {
        assert!(debug.contains(shown), "{shown} is not in {debug}");
    }
    for hidden in ["paid", "12.5", "9.99"] {
        assert!(!debug.contains(hidden), "{hidden} is in {debug}");
    }
}

#[test]
fn an_event_is_a_slice_of_its_reply() {
    let mut reply = vec![1, 2, 3];
    let document = whole().to_vec().unwrap();
    reply.extend(&document);
    let reply = Bytes::from_owner(reply);
    let event = ChangeEvent::new(reply.slice(3..)).unwrap();
    assert_eq!(event.bytes().as_ptr(), reply[3..].as_ptr());
    assert_eq!(event.clone().raw().as_bytes().as_ptr(), reply[3..].as_ptr());
    assert!(ChangeEvent::new(reply.slice(..)).is_err());
    assert!(ChangeEvent::new(Bytes::new()).is_err());
}

/// Asks for everything; what comes of it is no matter, as long as it comes back.
fn ask(event: &ChangeEvent) {
    let _ = (event.operation(), event.token(), event.position(), event.cluster_time(), event.wall_time());
    let _ = (event.namespace(), event.database(), event.to(), event.collection_uuid(), event.txn_number());
    let _ = (event.document_key::<Document>(), event.document_id::<ObjectId>(), event.lsid());
    let _ = (event.full_document::<Document>(), event.full_document::<&RawDocument>());
    let _ = (event.full_document_before_change::<Document>(), event.operation_description(), event.split_event());
    let _ = (event.update_description().map(|update| format!("{update:?}")), event.get("fullDocument"));
    let _ = (format!("{event:?}"), event.raw_full_document(), event.raw_full_document_before_change());
    for path in ["status", "tags", "lines.sku", "scope.x", "old", "price", "like", "at"] {
        let field = || crate::Filter::field(path);
        let _ = (field().eq("paid").matches(event), field().gt(1).matches(event));
        let _ = (field().eq(doc! { "x": 1 }).matches(event), field().exists(false).matches(event));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn corrupt_bytes_are_errors_and_never_a_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut raw = whole().to_vec().unwrap();
        for (at, byte) in changes {
            // The length and the end are what `new` looks at.
            let at = 4 + at.index(raw.len() - 5);
            raw[at] = byte;
        }
        ask(&ChangeEvent::new(raw.into()).unwrap());
    }

    #[test]
    fn a_cut_event_is_refused_or_read_without_a_panic(length in 0_usize..1200, honest in any::<bool>()) {
        let mut raw = whole().to_vec().unwrap();
        raw.truncate(length);
        if honest && raw.len() > 5 {
            let length = i32::try_from(raw.len()).unwrap();
            raw[..4].copy_from_slice(&length.to_le_bytes());
            *raw.last_mut().unwrap() = 0;
        }
        if let Ok(event) = ChangeEvent::new(raw.into()) {
            ask(&event);
        }
    }

    #[test]
    fn noise_is_no_event(mut raw in prop::collection::vec(any::<u8>(), 5..200)) {
        let length = i32::try_from(raw.len()).unwrap();
        raw[..4].copy_from_slice(&length.to_le_bytes());
        *raw.last_mut().unwrap() = 0;
        ask(&ChangeEvent::new(raw.into()).unwrap());
    }
}
