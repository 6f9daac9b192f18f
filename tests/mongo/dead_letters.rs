//! Dead letters in a real collection: the suite, what stands in it, large events, and what survives a kill.

mod killed;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libtest_mimic::Trial;
use mongodb::{
    Collection, Database,
    bson::{Bson, Document, doc},
};
use mongosub::{
    ChangeEvent, ChangeStreamModel, DeadLetterStorage, Delivery, DocumentKey, Epoch, Failure, HoldOutcome,
    MongoDeadLetterStorage, Namespace, NewLetter, OnFailure, Owner, StorageError, SubscribeError, SubscriptionId, Then,
    conformance, memory,
};

pub use self::killed::play;
use crate::{
    seen::{Seen, Subscriptions, insert, storage, subscriptions, things},
    support::{Options, Server, test},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("the dead letters in MongoDB pass the suite", |ctx| async move {
            let storage = letters(&ctx.plain().await.database);
            conformance::dead_letter_storage(|| async { storage.clone() }).await.assert_passed();
        }),
        test("a dead letter is what the record says, field by field, and nothing is left of it", |ctx| async move {
            by_field(ctx.plain().await.database).await
        }),
        test("dead letters that cannot be read are refused with their field", |ctx| async move {
            unreadable(ctx.plain().await.database).await
        }),
        test("a collection with a collation of its own keeps dead letters apart by their bytes", |ctx| async move {
            with_a_collation(ctx.plain().await.database).await
        }),
        test("the body of a dead letter that no sequence names is not seen, and not in the way", |ctx| async move {
            half_written(ctx.plain().await.database).await
        }),
        test("dead letters of 15.9 MB are parked behind each other and retried whole", |_| large()),
        test("a subscription to a database does not feed on its own dead letters", |ctx| async move {
            not_its_own(ctx.plain().await.database).await
        }),
        killed::test(),
    ]
}

pub fn letters(database: &Database) -> MongoDeadLetterStorage {
    MongoDeadLetterStorage::new(&collection(database))
}

fn collection(database: &Database) -> Collection<Document> {
    database.collection("dead_letters")
}

fn id() -> SubscriptionId {
    SubscriptionId::new("letters_v1").unwrap()
}

fn key(database: &Database, id: impl Into<Bson>) -> DocumentKey {
    DocumentKey::new(Namespace::new(database.name(), "things"), id)
}

fn letter(key: &DocumentKey) -> NewLetter {
    let event: ChangeEvent = memory::insert(1, doc! { "n": 1 }).into();
    let position = event.position().unwrap();
    NewLetter::parked(id(), key.clone(), Epoch(7), position, event.bytes().clone())
}

async fn by_field(database: Database) -> anyhow::Result<()> {
    let (storage, stored, key) = (letters(&database), collection(&database), key(&database, 1));
    let second = Duration::from_secs(1);
    let letter = letter(&key).failed(3, vec!["no".into(), "because".into()], 2 * second, second);
    storage.put(&letter).await?;
    let head = stored.find_one(doc! { "letters": { "$exists": true } }).await?.unwrap();
    let hash = head.get_str("_id")?.strip_prefix("letters_v1#h#").unwrap().to_owned();
    assert_eq!(hash.len(), 32);
    let fields: BTreeSet<_> = head.keys().map(String::as_str).collect();
    let expected = ["_id", "schema", "subscription", "document", "namespace", "key", "letters", "newest", "begunAt"];
    assert_eq!(fields, BTreeSet::from(expected));
    assert_eq!(head.get_str("document")?, format!(r#"{}.things {{ "_id": 1 }}"#, database.name()));
    assert!(head.get_array("letters")?[0].as_str().unwrap().ends_with(&letter.reference));

    let body = stored.find_one(doc! { "_id": format!("letters_v1#l#{hash}#{}", letter.reference) }).await?.unwrap();
    let fields: BTreeSet<_> = body.keys().map(String::as_str).collect();
    let expected = [
        "_id",
        "schema",
        "subscription",
        "kind",
        "position",
        "epoch",
        "attempts",
        "error",
        "bytes",
        "parts",
        "event",
        "storedAt",
        "firstFailedAt",
        "lastFailedAt",
    ];
    assert_eq!(fields, BTreeSet::from(expected));
    let token = letter.position.token().unwrap().as_str();
    assert_eq!(body.get_document("position")?, &doc! { "resumeToken": { "_data": token } });
    assert_eq!((body.get_str("kind")?, body.get_i64("attempts")?, body.get_i64("epoch")?), ("failed", 3, 7));
    assert_eq!(body.get_array("error")?, &vec![Bson::from("no"), Bson::from("because")]);
    assert_eq!(body.get_binary_generic("event")?, &letter.event.to_vec());

    // In parts, and nothing is left of any of them.
    let filler = "x".repeat(15 << 20);
    let large: ChangeEvent = memory::insert(1, doc! { "filler": filler }).into();
    let mut letter = self::letter(&self::key(&database, 2));
    letter.event = large.bytes().clone();
    storage.put(&letter).await?;
    let parts = stored.count_documents(doc! { "_id": { "$regex": "#[01]$" }, "event": { "$exists": true } }).await?;
    assert_eq!(parts, 2);
    storage.evict(&id(), &letter.key).await?;
    let owner = Owner::fresh();
    assert_eq!(storage.hold(&id(), &key, &owner, second).await?, HoldOutcome::Held);
    storage.remove(&storage.letters(&id(), &key).await?[0], &owner).await?;
    assert_eq!(stored.count_documents(doc! {}).await?, 0);
    Ok(())
}

async fn unreadable(database: Database) -> anyhow::Result<()> {
    let (storage, stored, key) = (letters(&database), collection(&database), key(&database, 1));
    storage.put(&letter(&key)).await?;
    let head = doc! { "letters": { "$exists": true } };
    let body = doc! { "kind": { "$exists": true } };
    let field = |error: StorageError| match error {
        StorageError::Unreadable { id, field, .. } => {
            assert!(id.starts_with("letters_v1#"), "{id}");
            field
        }
        error => panic!("{error:?}"),
    };
    let newer = doc! { "$set": { "schema": 2_i64 } };
    stored.update_one(head.clone(), newer.clone()).await?;
    assert_eq!(field(storage.sequences(&id()).await.unwrap_err()), "schema");
    assert_eq!(field(storage.put(&letter(&key)).await.unwrap_err()), "schema");
    stored.update_one(head, doc! { "$set": { "schema": 1_i64 } }).await?;
    stored.update_one(body.clone(), newer).await?;
    assert_eq!(field(storage.letters(&id(), &key).await.unwrap_err()), "schema");
    let odd = doc! { "$set": { "schema": 1_i64, "position": {} } };
    stored.update_one(body.clone(), odd).await?;
    assert_eq!(field(storage.letters(&id(), &key).await.unwrap_err()), "position");
    stored.delete_one(body).await?;
    assert_eq!(field(storage.letters(&id(), &key).await.unwrap_err()), "_id");
    // And the way out.
    storage.evict(&id(), &key).await?;
    assert_eq!(stored.count_documents(doc! {}).await?, 0);
    Ok(())
}

async fn with_a_collation(database: Database) -> anyhow::Result<()> {
    let strength = mongodb::options::CollationStrength::Secondary;
    let collation = mongodb::options::Collation::builder().locale("en").strength(strength).build();
    database.create_collection("dead_letters").collation(collation).await?;
    let storage = letters(&database);
    for text in ["a", "A", "á"] {
        storage.put(&letter(&key(&database, text))).await?;
    }
    assert_eq!(storage.sequences(&id()).await?.len(), 3);
    for text in ["a", "A", "á"] {
        let letters = storage.letters(&id(), &key(&database, text)).await?;
        assert_eq!(letters.len(), 1, "{text}");
        assert!(storage.event(&letters[0]).await?.is_some());
    }
    Ok(())
}

/// As a process leaves it that is killed between the letter and its sequence.
async fn half_written(database: Database) -> anyhow::Result<()> {
    let (storage, stored, key) = (letters(&database), collection(&database), key(&database, 1));
    storage.put(&letter(&key)).await?;
    stored.delete_one(doc! { "letters": { "$exists": true } }).await?;
    assert_eq!(storage.sequences(&id()).await?, []);
    assert_eq!(storage.letters(&id(), &key).await?, []);
    storage.put(&letter(&key)).await?;
    assert_eq!(storage.letters(&id(), &key).await?.len(), 1);
    Ok(())
}

async fn large() -> anyhow::Result<()> {
    // Much is written: not to an oplog that others use.
    let server = Server::own(Options { oplog_megabytes: 256, ..Options::default() }).await;
    let database = server.fresh_database().await;
    let wrapper = subscriptions(&database).dead_letters(letters(&database));
    let handler = |_: Delivery| async { Err(Failure::dead_letter("too much for it")) };
    let subscription = wrapper.subscribe("letters_v1", handler).await?;
    let document = |text: &str| doc! { "_id": 1, "filler": text.repeat(16_690_000) };
    things(&database).insert_one(document("a")).await?;
    things(&database).replace_one(doc! { "_id": 1 }, document("b")).await?;
    things(&database).delete_one(doc! { "_id": 1 }).await?;
    crate::support::wait_for("three letters", crate::seen::PATIENCE, || async {
        (subscription.status().settled == 3).then_some(())
    })
    .await;
    let status = subscription.status();
    assert_eq!((status.dead_lettered, status.parked), (1, 2));
    let sizes: Vec<_> =
        wrapper.dead_letters_of("letters_v1", &key(&database, 1)).await?.iter().map(|letter| letter.bytes).collect();
    assert!(sizes[0] > 15_900 << 10 && sizes[1] > 15_900 << 10, "{sizes:?}");
    let got = Arc::new(Mutex::new(Vec::new()));
    let notes = got.clone();
    let handler = move |delivery: Delivery| {
        let notes = notes.clone();
        async move {
            let full = delivery.event.full_document::<Document>()?;
            let first =
                full.as_ref().and_then(|full| full.get_str("filler").ok()).map(|text| (text.len(), text.as_bytes()[0]));
            notes.lock().unwrap().push((delivery.event.operation()?.as_str().to_owned(), first));
            Ok(())
        }
    };
    let retried = wrapper.retry("letters_v1", &key(&database, 1), handler).await?;
    assert_eq!((retried.handled, retried.failed), (3, None));
    let whole = |byte| Some((16_690_000, byte));
    let expected = [("insert".to_owned(), whole(b'a')), ("replace".into(), whole(b'b')), ("delete".into(), None)];
    assert_eq!(*got.lock().unwrap(), expected);
    assert_eq!(collection(&database).count_documents(doc! {}).await?, 0);
    Ok(())
}

async fn not_its_own(database: Database) -> anyhow::Result<()> {
    let model = ChangeStreamModel::database(&database);
    let wrapper = Subscriptions::new(model, storage(&database)).dead_letters(letters(&database));
    let wrapper = wrapper.on_failure(OnFailure::retry(0).then(Then::DeadLetter));
    let (seen, notes) = (Seen::default(), Seen::default());
    let noting = notes.clone();
    let handler = move |delivery: Delivery| {
        noting.note(delivery.clone());
        async move { if delivery.event.document_id::<i32>()? == Some(1) { Err("poisoned".into()) } else { Ok(()) } }
    };
    let subscription = wrapper.subscribe("letters_v1", handler).await?;
    insert(&things(&database), [1, 2]).await?;
    things(&database).update_one(doc! { "_id": 1 }, doc! { "$set": { "n": 1 } }).await?;
    insert(&things(&database), [3]).await?;
    notes.sees(3).await;
    assert_eq!(notes.ids(), [1, 2, 3]);
    subscription.drained().await?;
    wrapper.retry("letters_v1", &key(&database, 1), seen.handler()).await?;
    insert(&things(&database), [4]).await?;
    notes.sees(4).await;
    assert_eq!((notes.ids(), seen.ids()), (vec![1, 2, 3, 4], vec![1, 1]));
    let to_letters = ChangeStreamModel::collection(&collection(&database));
    let refused = Subscriptions::new(to_letters, storage(&database)).dead_letters(letters(&database));
    let refused = refused.subscribe("refused", Seen::default().handler()).await;
    assert!(matches!(refused, Err(SubscribeError::Config { field: "model", .. })), "{refused:?}");
    Ok(())
}
