//! `mongosub subscribe`, run as a user runs it.

mod ends;
mod reader;
mod running;
mod typed;

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, DurableSubscriptions, FullDocument,
    bson::{
        Binary, Bson, DateTime, Decimal128, Document, JavaScriptCodeWithScope, RawDocumentBuf, Regex, Timestamp, doc,
        oid::ObjectId, raw::cstr, spec::BinarySubtype,
    },
    mongodb::{Collection, Database},
};
use serde_json::Value;

use self::running::{ID, Running, by_the_driver, id_of, ids};
use crate::{
    seen::{Seen, record, storage, things},
    support::{Fixture, Kind, WRITER, test},
};

pub fn tests() -> Vec<Trial> {
    let here = vec![
        test("the command writes every change as one line, in order and as the server sent it", |ctx| async move {
            as_sent(ctx.plain().await, false).await
        }),
        test("the command writes canonical extended JSON when asked to", |ctx| async move {
            as_sent(ctx.plain().await, true).await
        }),
        test("the command reads a whole database, and leaves out its own checkpoints", |ctx| async move {
            whole_database(ctx.plain().await).await
        }),
        test("the command writes what its filter and its pipeline let through, the filter first", |ctx| async move {
            filtered(ctx.plain().await).await
        }),
        test("the command begins at a time of its user's, and with always at each start", |ctx| async move {
            begins_at_a_time(ctx.plain().await).await
        }),
        test("the command writes null for a document that was gone when it was looked up", |ctx| async move {
            gone(ctx.plain().await).await
        }),
        test(
            "the command starts where hostInfo is refused, and an unrecorded start can be allowed",
            |ctx| async move { unrecorded(ctx.shared(Kind::Auth).await).await },
        ),
        test(
            "an event that is no BSON is named by the command and tried again, and no half line comes out",
            |ctx| async move { no_bson(ctx.plain().await).await },
        ),
    ];
    [here, ends::tests(), reader::tests(), typed::tests()].into_iter().flatten().collect()
}

/// Writes documents with these ids, all at once.
async fn insert(collection: &Collection<Document>, ids: impl IntoIterator<Item = i32>) -> anyhow::Result<()> {
    let padding = "x".repeat(200);
    collection.insert_many(ids.into_iter().map(|id| doc! { "_id": id, "padding": &padding })).await?;
    Ok(())
}

/// A document with a value of every type that a server stores.
fn of_every_type() -> Document {
    doc! {
        "double": [1.0, -0.0, 0.1, 1e300, f64::NAN, f64::INFINITY, f64::NEG_INFINITY],
        "text": "a \"b\"\n\u{1f}\u{2028} ü 漢 𝄞",
        "document": { "": {}, "a.b": { "$x": [] } },
        "array": [[], [1, "x", Bson::Null]],
        "binary": Binary { subtype: BinarySubtype::Uuid, bytes: vec![7; 16] },
        "undefined": Bson::Undefined,
        "oid": ObjectId::from_bytes([1; 12]),
        "bool": [true, false],
        "date": [DateTime::from_millis(0), DateTime::from_millis(-1), DateTime::from_millis(1_700_000_000_123)],
        "regex": Regex { pattern: cstr!("^a/b").into(), options: cstr!("ix").into() },
        "code": Bson::JavaScriptCode("return \"x\"".into()),
        "scoped": JavaScriptCodeWithScope { code: "x".into(), scope: doc! { "y": 1 } },
        "symbol": Bson::Symbol("s".into()),
        "int": [i32::MIN, i32::MAX],
        "long": [i64::MIN, i64::MAX, 5_i64],
        "timestamp": Timestamp { time: 5, increment: 6 },
        "decimal": "1.50E-7".parse::<Decimal128>().expect("a decimal"),
        "min": Bson::MinKey,
        "max": Bson::MaxKey,
    }
}

async fn as_sent(fixture: Fixture, canonical: bool) -> anyhow::Result<()> {
    let format: &[&str] = if canonical { &["--format", "canonical"] } else { &[] };
    let arguments = [&["--full-document", "update-lookup", "--every", "2"], format].concat();
    let mut command = Running::on_things(&fixture, &arguments).started().await;
    // Beside it a subscription of the library, which says what the server sends.
    let model = ChangeStreamModel::collection(&things(&fixture.database)).full_document(FullDocument::UpdateLookup);
    let seen = Seen::default();
    let _beside =
        DurableSubscriptions::new(model, storage(&fixture.database)).subscribe("beside", seen.handler()).await?;
    let things = things(&fixture.database);
    let mut every_type = of_every_type();
    every_type.insert("_id", 1);
    things.insert_one(every_type).await?;
    things.update_one(doc! { "_id": 1 }, doc! { "$set": { "array.0": "new" }, "$unset": { "double": 1 } }).await?;
    // Both have looked the document up before it changes again: a look-up is of its own moment.
    let mut lines = vec![command.event().await, command.event().await];
    seen.counts(2).await;
    things.replace_one(doc! { "_id": 1 }, doc! { "replaced": true }).await?;
    things.delete_one(doc! { "_id": 1 }).await?;
    let mut session = fixture.client.start_session().await?;
    session.start_transaction().await?;
    for id in 2..5 {
        things.insert_one(doc! { "_id": id }).session(&mut session).await?;
    }
    session.commit_transaction().await?;
    seen.counts(7).await;
    let operations: Vec<String> = seen.operations().iter().map(ToString::to_string).collect();
    assert_eq!(operations, ["insert", "update", "replace", "delete", "insert", "insert", "insert"]);
    for _ in lines.len()..7 {
        lines.push(command.event().await);
    }
    for (delivery, line) in seen.all().into_iter().zip(lines) {
        // Read back, since one number or date can be written in several ways; and as text, since no NaN is like another.
        let read = |value: Value| Bson::try_from(value).map(|bson| format!("{bson:?}"));
        assert_eq!(read(line)?, read(by_the_driver(&delivery.event, canonical))?);
    }
    command.signal("TERM");
    let ended = command.ends().await.with(0);
    assert_eq!(ended.rest, [""; 0], "nothing but changes is written");
    Ok(())
}

async fn whole_database(fixture: Fixture) -> anyhow::Result<()> {
    let mut command = Running::start(&fixture, &[]).started().await;
    assert!(command.said().contains("left out: "), "{}", command.said());
    let other = fixture.database.collection::<Document>("others");
    for id in 0..20 {
        let collection = if id % 2 == 0 { &things(&fixture.database) } else { &other };
        insert(collection, [id]).await?;
    }
    let lines: Vec<(String, i64)> = {
        let mut lines = Vec::new();
        for _ in 0..20 {
            let event = command.event().await;
            lines.push((event["ns"]["coll"].as_str().unwrap_or_default().to_owned(), id_of(&event)));
        }
        lines
    };
    let expected: Vec<_> = (0..20).map(|id| (if id % 2 == 0 { "things" } else { "others" }.to_owned(), id)).collect();
    assert_eq!(lines, expected);
    command.signal("INT");
    let ended = command.ends().await.with(0);
    assert_eq!(ended.rest, [""; 0], "the writes of its checkpoints are not among the changes");
    Ok(())
}

async fn filtered(fixture: Fixture) -> anyhow::Result<()> {
    let filter =
        r#"{"operationType": {"$in": ["insert", "update"]}, "fullDocument.n": {"$gte": {"$numberLong": "5"}}}"#;
    let pipeline =
        r#"[{"$set": {"was": "$fullDocument.n"}}, {"$project": {"fullDocument": 0}}, {"$match": {"was": {"$ne": 7}}}]"#;
    let mut command = Running::on_things(&fixture, &["--filter", filter, "--pipeline", pipeline]).started().await;
    assert!(command.said().contains("asks about fullDocument"), "{}", command.said());
    let things = things(&fixture.database);
    for n in 0..10 {
        things.insert_one(doc! { "_id": n, "n": n }).await?;
    }
    things.delete_one(doc! { "_id": 9 }).await?;
    things.insert_one(doc! { "_id": 10, "n": 10 }).await?;
    for id in [5, 6, 8, 9, 10] {
        let event = command.event().await;
        assert_eq!((id_of(&event), &event["was"]), (id, &Value::from(id)));
        assert!(event.get("fullDocument").is_none(), "{event}");
    }
    command.signal("TERM");
    assert_eq!(command.ends().await.with(0).rest, [""; 0]);
    Ok(())
}

async fn gone(fixture: Fixture) -> anyhow::Result<()> {
    let things = things(&fixture.database);
    let seen = Seen::default();
    let beside = crate::seen::subscriptions(&fixture.database);
    beside.subscribe("beside", seen.handler()).await?;
    insert(&things, [1]).await?;
    things.update_one(doc! { "_id": 1 }, doc! { "$set": { "n": 1 } }).await?;
    things.delete_one(doc! { "_id": 1 }).await?;
    seen.counts(3).await;
    let at = seen.all()[1].event.cluster_time()?;
    let time = format!("{}:{}", at.time, at.increment);
    let mut command = Running::on_things(&fixture, &["--start", &time, "--full-document", "update-lookup"]);
    let (update, delete) = (command.event().await, command.event().await);
    assert_eq!((update["operationType"].as_str(), update.get("fullDocument")), (Some("update"), Some(&Value::Null)));
    assert_eq!((delete["operationType"].as_str(), delete.get("fullDocument")), (Some("delete"), None));
    command.signal("TERM");
    command.ends().await.with(0);
    Ok(())
}

async fn begins_at_a_time(fixture: Fixture) -> anyhow::Result<()> {
    let things = things(&fixture.database);
    let seen = Seen::default();
    let beside = crate::seen::subscriptions(&fixture.database);
    beside.subscribe("beside", seen.handler()).await?;
    insert(&things, [0]).await?;
    insert(&things, [1]).await?;
    insert(&things, [2]).await?;
    seen.counts(3).await;
    let at = seen.all()[1].event.cluster_time()?;
    let time = format!("{}:{}", at.time, at.increment);
    let token = seen.positions()[1].to_string();
    // A new subscription begins there, and goes on from what it has stored the next time.
    let mut command = Running::on_things(&fixture, &["--start", &time]);
    assert_eq!(command.ids(2).await, [1, 2]);
    command.signal("TERM");
    assert_eq!(command.ends().await.with(0).rest, [""; 0]);
    let mut command = Running::on_things(&fixture, &["--start", &time]).started().await;
    insert(&things, [3]).await?;
    assert_eq!(command.ids(1).await, [3]);
    command.signal("TERM");
    command.ends().await.with(0);
    // With `--always` it begins there each time.
    for start in [time.as_str(), token.as_str(), &format!("{{\"_data\": \"{token}\"}}")] {
        let mut command = Running::on_things(&fixture, &["--always", "--start", start]);
        let first = if start == time { 1 } else { 2 };
        assert_eq!(command.ids(4 - first).await, (i64::try_from(first)?..4).collect::<Vec<_>>(), "{start}");
        command.signal("TERM");
        assert_eq!(command.ends().await.with(0).rest, [""; 0]);
    }
    Ok(())
}

async fn unrecorded(fixture: Fixture) -> anyhow::Result<()> {
    let name = fixture.database.name().to_owned();
    let checkpoints = format!("{name}.checkpoints");
    let arguments = ["--db", &name, "--collection", "things", "--id", ID, "--checkpoints", &checkpoints];
    let arguments = [arguments.as_slice(), &["--allow-unrecorded-start"]].concat();
    let mut command = Running::start_at(&fixture.server.uri_as(WRITER), &arguments).started().await;
    let said = command.said();
    assert!(said.contains("start_when_no_start_position_can_be_recorded=true,"), "{said}");
    insert(&things(&fixture.database), [1]).await?;
    assert_eq!(command.ids(1).await, [1]);
    command.signal("TERM");
    command.ends().await.with(0);
    Ok(())
}

/// Inserts a document whose text is no UTF-8, which a server takes.
async fn insert_no_text(database: &Database, id: i32) -> anyhow::Result<()> {
    let mut bytes = doc! { "insert": "things", "documents": [{ "_id": id, "lines": [{ "sku": "abcd" }] }] }.to_vec()?;
    let at = bytes.windows(4).position(|four| four == b"abcd").expect("the text");
    bytes[at] = 0xff;
    let command = RawDocumentBuf::from_bytes(bytes)?;
    database.run_raw_command(command).await?;
    Ok(())
}

async fn no_bson(fixture: Fixture) -> anyhow::Result<()> {
    let mut command = Running::on_things(&fixture, &[]).started().await;
    insert(&things(&fixture.database), 0..3).await?;
    insert_no_text(&fixture.database, 3).await?;
    insert(&things(&fixture.database), [4]).await?;
    assert_eq!(command.ids(3).await, [0, 1, 2]);
    command.says("cannot decode \"fullDocument.lines.0.sku\"").await;
    command.says("is retrying").await;
    let said = command.said();
    let line = said.lines().find(|line| line.contains("failed for the event at 82")).unwrap_or_default();
    assert!(line.contains("is no BSON") || line.contains("cannot decode"), "{said}");
    command.signal("TERM");
    let ended = command.ends().await.with(0);
    assert_eq!(ids(&ended.rest), [0_i64; 0]);
    // It stands before the broken one, and comes to it again; whoever passes it by name goes on behind it.
    let stored = record(&fixture.database, ID).await?.and_then(|record| record.position).expect("a position");
    assert!(ended.last_word().contains(&stored.to_string()), "{}", ended.said);
    let past = r#"{"documentKey._id": {"$ne": 3}}"#;
    let mut command = Running::on_things(&fixture, &["--filter", past]);
    assert_eq!(command.ids(1).await, [4]);
    command.signal("TERM");
    command.ends().await.with(0);
    Ok(())
}
