//! Valid inputs, to mutate.

use bson::{Binary, DateTime, Document, Timestamp, Uuid, doc, spec::BinarySubtype};

const TOKEN: &str = "826568B1F0000000032B022C0100296E5A1004ABABABABABABABABABABABABABABABAB46645F69640064";
const LATER: &str = "826568B1F0000000032B022C01002B026E5A1004ABABABABABABABABABABABABABABABAB46645F69640064";
const INVALIDATE: &str = "826568B1F0000000042B042C0100296F5A1004ABABABABABABABABABABABABABABABAB46645F69640064";
const QUIET: &str = "826568B1F0000000052B0229296E04";

/// Valid inputs for a target of [`TARGETS`](super::TARGETS); none for a name that is no target's.
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    let all = |documents: Vec<Document>| {
        documents.iter().map(|document| document.to_vec().expect("a document that BSON can hold")).collect()
    };
    match target {
        "record" => all(records()),
        "text" => texts().into_iter().map(String::into_bytes).collect(),
        "token" => {
            // The last two of the first one are one event in both layouts.
            [
                [QUIET, INVALIDATE, LATER, &LATER.replacen("2B02", "2B04", 1)],
                [TOKEN, LATER, INVALIDATE, QUIET],
                [LATER, "826568B1F000000003", &QUIET.to_lowercase(), INVALIDATE],
            ]
            .map(|tokens| tokens.join("\n").into_bytes())
            .into()
        }
        "reply" => all(replies()),
        "event" => all(events()),
        "filter" | "pipeline" => (0..24_u32)
            .map(|seed| (0..96_u32).map(|at| (seed * 131 + at * at * 29 + at * 7).to_le_bytes()[0]).collect())
            .collect(),
        _ => Vec::new(),
    }
}

fn records() -> Vec<Document> {
    let time = Timestamp { time: 0x6568_B1F0, increment: 3 };
    let source =
        doc! { "scope": "collection", "db": "shop", "collection": "orders", "collectionUUID": "AB", "setName": "rs0" };
    let ours = doc! {
        "schema": 1_i64, "fence": 7_i64, "owner": "host:1:a", "claimedAt": DateTime::from_millis(1), "epoch": 3,
        "kind": "event", "clusterTime": time, "savedAt": DateTime::from_millis(2), "pipeline": "ab12", "source": source,
        "clean": true,
    };
    let mut noted = ours.clone();
    let at = DateTime::from_millis(3);
    noted.insert("gaps", vec![doc! { "from": TOKEN, "to": "17.1", "scope": "database", "db": "shop", "at": at }]);
    noted.insert(
        "skips",
        vec![
            doc! { "from": "17.1", "through": LATER, "reason": "bad", "by": "host:1:a", "at": at },
            doc! { "from": null, "through": QUIET, "reason": "worse", "by": "host:1:b", "at": at },
        ],
    );
    let mut ended = ours.clone();
    ended.extend(doc! { "uncleanEnds": 3, "over": 6_i64, "inHand": { "at": LATER, "deaths": 2_i64 } });
    let claimed = doc! { "schema": 1, "fence": 7, "owner": "host:1:a", "source": { "scope": "deployment" } };
    vec![
        doc! { "_id": "a", "resumeToken": { "_data": TOKEN }, "version": 2_i64, "mongosub": ours.clone() },
        doc! { "_id": "a", "operationTime": time, "mongosub": ours.clone() },
        doc! { "_id": "a", "checkpoint": "line 17", "mongosub": ours.clone() },
        doc! { "_id": "a", "operationTime": time, "mongosub": noted },
        doc! { "_id": "a", "resumeToken": { "_data": TOKEN }, "mongosub": ended },
        doc! { "_id": "a", "mongosub": claimed },
        doc! { "_id": "a", "resumeToken": { "_data": TOKEN.to_lowercase(), "_typeBits": 1 } },
        doc! { "_id": "a", "checkpoint": &texts()[0] },
        doc! { "_id": "a", "subscriptionPosition": &texts()[5] },
    ]
}

fn texts() -> Vec<String> {
    vec![
        format!(r#"{{"resumeToken": {{"_data": "{TOKEN}"}}}}"#),
        format!(
            r#"{{"resumeToken": {{"_data": "{TOKEN}", "_typeBits": {{"$binary": {{"base64": "gkAB", "subType": "00"}}}}}}}}"#
        ),
        format!("{{ \"_data\" : \"{}\" }}\n", QUIET.to_lowercase()),
        QUIET.to_owned(),
        r#"{"operationTime": {"$timestamp": {"t": 1700000000, "i": 7}}}"#.to_owned(),
        r#"{"$timestamp": {"t": 1700000000, "i": 07}}"#.to_owned(),
        "Timestamp{value=7301444403200000007, seconds=1700000000, inc=7}".to_owned(),
    ]
}

fn replies() -> Vec<Document> {
    let reply = |batch: &str, events: Vec<Document>, post_batch: &str, id: i64| {
        let cursor =
            doc! { batch: events, "postBatchResumeToken": { "_data": post_batch }, "id": id, "ns": "shop.orders" };
        doc! { "cursor": cursor, "ok": 1.0, "operationTime": Timestamp { time: 0x6568_B1F0, increment: 5 } }
    };
    let small = |token: &str| doc! { "_id": { "_data": token }, "operationType": "insert" };
    vec![
        reply("firstBatch", vec![], QUIET, 5),
        reply("nextBatch", vec![small(TOKEN), small(LATER)], LATER, 5),
        reply("nextBatch", [events(), vec![small(INVALIDATE)]].concat(), INVALIDATE, 0),
        doc! { "cursor": { "nextBatch": [small(TOKEN)], "id": 0_i64 }, "ok": 1.0 },
    ]
}

fn events() -> Vec<Document> {
    let uuid = Binary { subtype: BinarySubtype::Uuid, bytes: Uuid::from_bytes([0xAB; 16]).bytes().into() };
    let common = |token: &str, operation: &str| {
        doc! {
            "_id": { "_data": token }, "operationType": operation,
            "clusterTime": Timestamp { time: 0x6568_B1F0, increment: 3 }, "wallTime": DateTime::from_millis(1),
            "collectionUUID": uuid.clone(), "ns": { "db": "shop", "coll": "orders" },
        }
    };
    let with = |mut event: Document, rest: Document| {
        event.extend(rest);
        event
    };
    let document = doc! { "_id": 7, "status": "paid", "lines": [ { "sku": "a", "n": 1.5 }, [1, 2] ], "note": "ä" };
    let changed = doc! {
        "updatedFields": { "status": "paid", "lines.0.n": 2 }, "removedFields": ["note", "old"],
        "truncatedArrays": [ { "field": "lines", "newSize": 1 } ], "disambiguatedPaths": { "lines.0.n": ["lines", 0, "n"] },
    };
    vec![
        with(common(TOKEN, "insert"), doc! { "documentKey": { "_id": 7 }, "fullDocument": document.clone() }),
        with(
            common(TOKEN, "update"),
            doc! {
                "documentKey": { "_id": { "a": [1, "b"] } }, "updateDescription": changed, "fullDocument": document.clone(),
                "fullDocumentBeforeChange": document, "txnNumber": 3_i64, "lsid": { "id": uuid.clone() },
                "splitEvent": { "fragment": 1, "of": 2 },
            },
        ),
        with(common(LATER, "rename"), doc! { "to": { "db": "shop", "coll": "old" }, "operationDescription": {} }),
    ]
}
