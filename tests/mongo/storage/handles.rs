//! The handle, the rights and the server a storage is given: what it takes from them, and what it does not.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use libtest_mimic::Trial;
use mongodb::bson::{Document, doc};
use mongodb::event::EventHandler;
use mongodb::event::command::CommandEvent;
use mongodb::options::{
    Acknowledgment, CollectionOptions, ReadConcern, ReadPreference, SelectionCriteria, WriteConcern,
};
use mongodb::{Client, Database};
use mongosub::{
    CheckpointStorage, Claim, Epoch, MongoCheckpointStorage, Namespace, Ownership, Save, SaveOutcome, StartPosition,
    StorageError,
};

use super::{HEX, TIME, claimed, id, plain, storage, token};
use crate::support::{FailMode, Fixture, Kind, User, test};

pub fn tests() -> Vec<Trial> {
    vec![
        test("write concern, read concern and read preference of the user's handle are ignored", |ctx| async move {
            concerns(ctx.plain().await).await;
        }),
        plain("ids and owners are compared byte for byte in a collection that ignores case", collation),
        plain("a storage knows its collection and its deployment", whereabouts),
        plain("what the server refuses is told by code, name and message", refused_by_the_server),
        test("a missing right is named with its collection", |ctx| async move {
            rights(ctx.shared(Kind::Auth).await).await;
        }),
        test("a failing server is unavailable, and the next attempt is answered", |ctx| async move {
            failing(ctx.shared(Kind::Faulty).await).await;
        }),
        test("an operation without an answer is given up after ten seconds and can be made again", |ctx| async move {
            slow(ctx.shared(Kind::Faulty).await).await;
        }),
    ]
}

async fn concerns(Fixture { server, database, .. }: Fixture) {
    let seen: Arc<Mutex<Vec<Document>>> = Arc::default();
    let mut options = server.client_options().await;
    let sink = seen.clone();
    options.command_event_handler = Some(EventHandler::callback(move |event| {
        if let CommandEvent::Started(started) = event {
            sink.lock().unwrap().push(started.command);
        }
    }));
    let client = Client::with_options(options).unwrap();
    // On one node: no secondary to read from, and nobody else to confirm a write.
    let handle = CollectionOptions::builder()
        .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Secondary { options: None }))
        .read_concern(ReadConcern::local())
        .write_concern(WriteConcern::builder().w(Acknowledgment::Nodes(2)).journal(false).build())
        .build();
    let collection = client.database(database.name()).collection_with_options::<Document>("checkpoints", handle);
    let storage = MongoCheckpointStorage::new(&collection);

    let mut claim = Claim::new(id("handle"));
    claim.start = Some(StartPosition::new(TIME.into()));
    let (record, own) = claimed(&storage, &claim).await;
    let save = Save::new(claim.id.clone(), own.clone(), record.epoch.unwrap(), token(HEX));
    assert!(matches!(storage.save(&save).await.unwrap(), SaveOutcome::Saved { .. }));
    assert_eq!(storage.read(&claim.id).await.unwrap().unwrap().position, Some(token(HEX)));
    assert_eq!(storage.list().await.unwrap(), ["handle"]);
    assert!(storage.delete(&claim.id, Some(&own)).await.unwrap());

    let seen = seen.lock().unwrap();
    let of = |name: &str| seen.iter().filter(|command| command.contains_key(name)).collect::<Vec<_>>();
    let writes = [of("findAndModify"), of("delete")].concat();
    assert_eq!(writes.len(), 3, "one command each: {seen:?}");
    for write in writes {
        assert_eq!(write.get_document("writeConcern").unwrap().get_str("w").unwrap(), "majority", "{write}");
    }
    let reads = of("find");
    // A claim looks whose transaction may be open.
    assert_eq!(reads.len(), 3, "one command each: {seen:?}");
    for read in reads {
        let concern = read.get_document("readConcern").unwrap();
        assert_eq!(concern.get_str("level").unwrap(), "majority", "{read}");
        let preference = read.get_document("$readPreference").ok().and_then(|it| it.get_str("mode").ok());
        assert!(matches!(preference, None | Some("primary" | "primaryPreferred")), "{read}");
    }
}

async fn collation(database: Database) {
    let ignores_case = mongodb::options::Collation::builder()
        .locale("en")
        .strength(mongodb::options::CollationStrength::Secondary)
        .build();
    database.create_collection("checkpoints").collation(ignores_case).await.unwrap();
    let (storage, _) = storage(&database);
    let mut claim = Claim::new(id("abc"));
    claim.owner = mongosub::Owner::new("host:1:abc");
    let (record, own) = claimed(&storage, &claim).await;
    assert_eq!(storage.read(&id("ABC")).await.unwrap(), None);
    let mut other = own.clone();
    other.owner = mongosub::Owner::new("host:1:ABC");
    let mut save = Save::new(claim.id.clone(), other.clone(), Epoch(1), token(HEX));
    let superseded = SaveOutcome::Superseded { owner: Some(own.owner.clone()), since: record.claimed_at };
    assert_eq!(storage.save(&save).await.unwrap(), superseded);
    assert!(!storage.delete(&claim.id, Some(&other)).await.unwrap());
    save.ownership = own.clone();
    assert!(matches!(storage.save(&save).await.unwrap(), SaveOutcome::Saved { .. }));
    assert_eq!(storage.list().await.unwrap(), ["abc"]);
    // The collection itself takes them for the same.
    let error = storage.claim(&Claim::new(id("ABC"))).await.unwrap_err();
    assert!(matches!(error, StorageError::Refused { code: 11000, .. }), "{error}");
    assert!(storage.delete(&claim.id, Some(&own)).await.unwrap());
}

async fn whereabouts(database: Database) {
    let (storage, _) = storage(&database);
    assert_eq!(storage.namespaces(), [Namespace::new(database.name(), "checkpoints")]);
    let hello = database.run_command(doc! { "hello": 1 }).await.unwrap();
    let deployment = storage.deployment().await.unwrap().unwrap();
    assert_eq!(deployment.set_name, hello.get_str("setName").unwrap());
    let hosts: Vec<_> = hello.get_array("hosts").unwrap().iter().map(|host| host.as_str().unwrap()).collect();
    assert_eq!(deployment.hosts, hosts);
}

async fn refused_by_the_server(database: Database) {
    let validator = doc! { "mongosub.kind": { "$ne": "event" } };
    database.create_collection("checkpoints").validator(validator).await.unwrap();
    let (storage, _) = storage(&database);
    let (_, own) = claimed(&storage, &Claim::new(id("refused"))).await;
    let error = storage.save(&Save::new(id("refused"), own, Epoch(1), token(HEX))).await.unwrap_err();
    let StorageError::Refused { code: 121, message } = &error else { panic!("{error}") };
    // From 5.0 on the server says in between where it was.
    let told = message.starts_with("DocumentValidationFailure: ") && message.ends_with("Document failed validation");
    assert!(told, "{message}");
    assert_eq!(storage.read(&id("refused")).await.unwrap().unwrap().position, None);
}

async fn rights(Fixture { server, database, .. }: Fixture) {
    let reader = User { name: "storage_reader", password: "reader" };
    let nobody = User { name: "storage_nobody", password: "nobody" };
    server.add_user(reader, vec![doc! { "role": "read", "db": database.name() }]).await;
    server.add_user(nobody, Vec::new()).await;
    let of = |client: Client| {
        MongoCheckpointStorage::new(&client.database(database.name()).collection::<Document>("checkpoints"))
    };
    let (storage, id) = (of(server.client_as(reader).await), id("rights"));
    assert_eq!(storage.read(&id).await.unwrap(), None);
    let resource = format!("{}.checkpoints", database.name());
    let needs = |action: &str| StorageError::Unauthorized { action: action.into(), resource: resource.clone() };
    let own = Ownership { fence: mongosub::Fence(1), owner: mongosub::Owner::fresh() };
    let writes = "find, insert, update";
    assert_eq!(storage.claim(&Claim::new(id.clone())).await.unwrap_err(), needs(writes));
    assert_eq!(storage.save(&Save::new(id.clone(), own, Epoch(1), token(HEX))).await.unwrap_err(), needs(writes));
    assert_eq!(storage.delete(&id, None).await.unwrap_err(), needs("remove"));
    let storage = of(server.client_as(nobody).await);
    assert_eq!(storage.read(&id).await.unwrap_err(), needs("find"));
    assert_eq!(storage.list().await.unwrap_err(), needs("find"));
    assert!(storage.deployment().await.unwrap().is_some());
}

async fn failing(Fixture { server, database, .. }: Fixture) {
    let name = "storage_failing";
    let client = server.client_named(name).await;
    let storage = MongoCheckpointStorage::new(&client.database(database.name()).collection::<Document>("checkpoints"));
    let (_, own) = claimed(&storage, &Claim::new(id("failing"))).await;
    let save = Save::new(id("failing"), own, Epoch(1), token(HEX));
    let commands = ["findAndModify", "find", "delete"];
    for data in [
        doc! { "failCommands": &commands[..], "closeConnection": true },
        doc! { "failCommands": &commands[..], "errorCode": 91 },
        doc! { "failCommands": &commands[..], "errorCode": 10107 },
        doc! { "failCommands": &commands[..], "writeConcernError": { "code": 64, "errmsg": "waiting for replication timed out" } },
    ] {
        let is_write_concern = data.contains_key("writeConcernError");
        let point = server.fail_command(name, FailMode::Always, data.clone()).await;
        let error = storage.save(&save).await.expect_err(&data.to_string());
        assert!(error.is_retryable(), "{error} for {data}");
        assert!(!error.to_string().contains("operationTime"), "{error}");
        if !is_write_concern {
            let error = storage.read(&save.id).await.expect_err(&data.to_string());
            assert!(error.is_retryable(), "{error} for {data}");
        }
        drop(point);
        // Whether or not it was stored the first time, saying it again is fine.
        assert!(matches!(storage.save(&save).await.unwrap(), SaveOutcome::Saved { .. }));
    }
}

async fn slow(Fixture { server, database, .. }: Fixture) {
    let name = "storage_slow";
    let client = server.client_named(name).await;
    let storage = MongoCheckpointStorage::new(&client.database(database.name()).collection::<Document>("checkpoints"));
    let (_, own) = claimed(&storage, &Claim::new(id("slow"))).await;
    let save = Save::new(id("slow"), own, Epoch(1), token(HEX));
    // Longer than the deadline of a call, and than the server's own limit.
    let data = doc! { "failCommands": ["findAndModify"], "blockConnection": true, "blockTimeMS": 12_000 };
    let point = server.fail_command(name, FailMode::Times(1), data).await;
    let begun = Instant::now();
    let error = storage.save(&save).await.unwrap_err();
    assert_eq!(error, StorageError::Unavailable { message: "no answer within 10 s".into() });
    assert!((10..12).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    assert_eq!(storage.read(&save.id).await.unwrap().unwrap().position, None);
    assert!(matches!(storage.save(&save).await.unwrap(), SaveOutcome::Saved { .. }));
    drop(point);
}
