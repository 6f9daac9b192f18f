//! Checkpoints in a real collection: the suite, and what only a collection can hold.

mod handles;
mod occurrent;
mod refused;

use std::collections::BTreeSet;

use libtest_mimic::Trial;
use mongodb::bson::{Document, RawDocumentBuf, Timestamp, doc};
use mongodb::{Collection, Database};
use mongosub::{
    Checkpoint, CheckpointStorage, Claim, ClaimOutcome, Epoch, Hand, InHand, Kind, MongoCheckpointStorage, Ownership,
    Record, Save, SaveOutcome, StartPosition, SubscriptionId, Token, conformance,
};

use crate::support::test;

pub fn tests() -> Vec<Trial> {
    let own = vec![
        plain("the storage in MongoDB passes the suite", passes_the_suite),
        plain("a storage in MongoDB behind a dyn handle passes the suite", passes_the_suite_as_dyn),
        plain("8 times 50 racing claims get a fence each, one start and one owner", racing_claims),
        plain("a record holds one position, whatever kind it was before, and keeps unknown fields", one_position),
        plain("a record is what the design says, field by field", record_by_field),
        plain("a start, a claim and a save of one id leave the other ids alone", other_ids),
        plain("documents that are no records are neither listed nor touched", other_documents),
    ];
    [own, refused::tests(), occurrent::tests(), handles::tests()].into_iter().flatten().collect()
}

/// A test that needs nothing but a database of its own.
fn plain<Fut: Future<Output = ()>>(name: &str, body: impl FnOnce(Database) -> Fut + Send + 'static) -> Trial {
    test(name, |ctx| async move { body(ctx.plain().await.database).await })
}

/// The storage, and the collection as it really is.
fn storage(database: &Database) -> (MongoCheckpointStorage, Collection<Document>) {
    let collection = database.collection("checkpoints");
    (MongoCheckpointStorage::new(&collection), collection)
}

fn id(text: &str) -> SubscriptionId {
    SubscriptionId::new(text).unwrap()
}

const HEX: &str = "826568B1F0000000032B022C0100296E5A1004B1C2D3E4F5061728394A5B6C7D8E9F0046645F69640064650001";
const LATER_HEX: &str = "826568B1F0000000042B022C0100296E5A1004B1C2D3E4F5061728394A5B6C7D8E9F0046645F69640064650001";
const TIME: Timestamp = Timestamp { time: 0x6568_B1F0, increment: 3 };

fn token(hex: &str) -> Checkpoint {
    Token::new(hex).unwrap().into()
}

async fn raw(collection: &Collection<Document>, id: &str) -> Option<RawDocumentBuf> {
    collection.clone_with_type().find_one(doc! { "_id": id }).await.unwrap()
}

async fn document(collection: &Collection<Document>, id: &str) -> Document {
    collection.find_one(doc! { "_id": id }).await.unwrap().unwrap()
}

async fn claimed(storage: &MongoCheckpointStorage, claim: &Claim) -> (Record, Ownership) {
    match storage.claim(claim).await.unwrap() {
        ClaimOutcome::Claimed(record) => {
            let ownership = record.ownership.clone().unwrap();
            (record, ownership)
        }
        other => panic!("{other:?}"),
    }
}

async fn passes_the_suite(database: Database) {
    let (storage, _) = storage(&database);
    conformance::checkpoint_storage(|| async { storage.clone() }).await.assert_passed();
}

async fn passes_the_suite_as_dyn(database: Database) {
    let storage: std::sync::Arc<dyn mongosub::DynCheckpointStorage> = std::sync::Arc::new(storage(&database).0);
    conformance::checkpoint_storage(|| async { storage.clone() }).await.assert_passed();
}

async fn racing_claims(database: Database) {
    let (storage, _) = storage(&database);
    let id = id("raced");
    let racers: Vec<_> = (1..=8)
        .map(|racer| {
            let (storage, id) = (storage.clone(), id.clone());
            tokio::spawn(async move {
                let mut records = Vec::new();
                for _ in 0..50 {
                    let mut claim = Claim::new(id.clone());
                    claim.start = Some(StartPosition::new(Timestamp { time: racer, increment: 1 }.into()));
                    records.push(claimed(&storage, &claim).await);
                }
                records
            })
        })
        .collect();
    let (mut owners, mut starts) = (Vec::new(), Vec::new());
    for racer in racers {
        for (record, ownership) in racer.await.unwrap() {
            owners.push(ownership);
            starts.push((record.position.unwrap(), record.epoch.unwrap()));
        }
    }
    let fences: BTreeSet<_> = owners.iter().map(|owner| owner.fence).collect();
    assert_eq!((owners.len(), fences.len()), (400, 400));
    assert!(starts.iter().all(|start| *start == starts[0]), "{starts:?}");
    owners.sort_by_key(|owner| owner.fence);
    let record = storage.read(&id).await.unwrap().unwrap();
    assert_eq!(record.ownership.as_ref(), owners.last());
    assert_eq!(record.position.as_ref(), Some(&starts[0].0));
}

async fn one_position(database: Database) {
    let (storage, collection) = storage(&database);
    let id = id("kinds");
    let (_, own) = claimed(&storage, &Claim::new(id.clone())).await;
    let unknown = doc! { "$set": { "note": "ours", "n": { "a": [1] }, "mongosub.future": { "b": 2 } } };
    collection.update_one(doc! { "_id": "kinds" }, unknown).await.unwrap();
    let positions: [(Checkpoint, &str); 4] = [
        (token(HEX), "resumeToken"),
        (TIME.into(), "operationTime"),
        (Checkpoint::Text("line 17".into()), "checkpoint"),
        (token(LATER_HEX), "resumeToken"),
    ];
    let mut epoch = 0;
    for (before, _) in &positions {
        for (after, field) in &positions {
            for position in [before, after] {
                epoch += 1;
                let save = Save::new(id.clone(), own.clone(), Epoch(epoch), position.clone());
                let outcome = storage.save(&save).await.unwrap();
                assert!(matches!(outcome, SaveOutcome::Saved { at: Some(_) }), "{outcome:?}");
            }
            let stored = document(&collection, "kinds").await;
            let fields: Vec<_> = ["resumeToken", "operationTime", "checkpoint", "subscriptionPosition"]
                .into_iter()
                .filter(|field| stored.contains_key(field))
                .collect();
            assert_eq!(fields, [*field], "{before} then {after}");
            assert_eq!(storage.read(&id).await.unwrap().unwrap().position.as_ref(), Some(after));
            assert_eq!(stored.get_str("note").unwrap(), "ours");
            assert_eq!(stored.get_document("n").unwrap(), &doc! { "a": [1] });
            let ours = stored.get_document("mongosub").unwrap();
            assert_eq!(ours.get_document("future").unwrap(), &doc! { "b": 2 });
        }
    }
    let (_, _) = claimed(&storage, &Claim::new(id.clone())).await;
    let stored = document(&collection, "kinds").await;
    assert_eq!(stored.get_str("note").unwrap(), "ours");
    assert_eq!(stored.get_document("mongosub").unwrap().get_document("future").unwrap(), &doc! { "b": 2 });
}

async fn record_by_field(database: Database) {
    let (storage, collection) = storage(&database);
    let mut claim = Claim::new(id("fields"));
    claimed(&storage, &claim).await;
    let stored = document(&collection, "fields").await;
    assert_eq!(stored.keys().collect::<Vec<_>>(), ["_id", "mongosub"]);
    let ours = stored.get_document("mongosub").unwrap();
    let keys: BTreeSet<_> = ours.keys().map(String::as_str).collect();
    assert_eq!(keys, BTreeSet::from(["schema", "fence", "owner", "claimedAt", "clean", "uncleanEnds", "over"]));
    assert_eq!((ours.get_i32("uncleanEnds").unwrap(), ours.get_i32("over").unwrap()), (0, 0));
    assert_eq!(ours.get_i64("schema").unwrap(), 1);
    let claimed_at = ours.get_datetime("claimedAt").unwrap();
    let first = ours.get_i64("fence").unwrap();
    assert_eq!(first, claimed_at.timestamp_millis());

    // The claim that stores the start: an epoch of the server's clock, a claim after a claim counts on.
    claim = Claim::new(claim.id);
    claim.start = Some(StartPosition::new(TIME.into()));
    let (record, own) = claimed(&storage, &claim).await;
    let stored = document(&collection, "fields").await;
    assert_eq!(stored.get_timestamp("operationTime").unwrap(), TIME);
    let ours = stored.get_document("mongosub").unwrap();
    assert_eq!(ours.get_str("kind").unwrap(), "start");
    assert_eq!(ours.get_timestamp("clusterTime").unwrap(), TIME);
    assert_eq!(ours.get_i64("epoch").unwrap(), record.claimed_at.unwrap().timestamp_millis());
    assert_eq!(ours.get_datetime("savedAt").unwrap(), &record.claimed_at.unwrap());

    let mut save = Save::new(claim.id.clone(), own.clone(), record.epoch.unwrap(), token(HEX));
    save.kind = Kind::Quiet;
    save.pipeline = Some(mongosub::Fingerprint("f".repeat(64)));
    let scope = mongosub::Scope::Collection(mongosub::Namespace::new("shop", "orders"));
    let mut source = mongosub::Source::new(scope, Some("AB".repeat(16)), Some("rs0".into()));
    source.last_event = Some(token(LATER_HEX));
    save.source = Some(source);
    save.clean = true;
    storage.save(&save).await.unwrap();
    let mut stored = document(&collection, "fields").await;
    assert_eq!(stored.remove("resumeToken"), Some(doc! { "_data": HEX }.into()));
    let mut ours = stored.get_document("mongosub").unwrap().clone();
    assert!(ours.remove("savedAt").unwrap().as_datetime().unwrap() >= &record.claimed_at.unwrap());
    let mut keys: Vec<_> = ours.keys().cloned().collect();
    keys.sort();
    let mut expected = doc! {
        "schema": 1_i64, "fence": own.fence.0, "owner": own.owner.as_str(), "claimedAt": record.claimed_at.unwrap(),
        "epoch": record.epoch.unwrap().0, "kind": "quiet", "clusterTime": TIME, "pipeline": "f".repeat(64),
        "source": {
            "scope": "collection", "db": "shop", "collection": "orders", "collectionUUID": "AB".repeat(16),
            "setName": "rs0", "lastEvent": LATER_HEX,
        },
        "clean": true, "uncleanEnds": 1, "over": first,
    };
    for key in keys {
        assert_eq!(ours.remove(&key), expected.remove(&key), "{key}");
    }
    assert_eq!(expected, doc! {});

    save.hand = Hand::Holds(InHand::new(token(LATER_HEX), 2));
    storage.save(&save).await.unwrap();
    let stored = document(&collection, "fields").await;
    let ours = stored.get_document("mongosub").unwrap();
    assert_eq!(ours.get_document("inHand").unwrap(), &doc! { "at": LATER_HEX, "deaths": 2_i64 });
    save.hand = Hand::Empty;
    storage.save(&save).await.unwrap();
    assert!(!document(&collection, "fields").await.get_document("mongosub").unwrap().contains_key("inHand"));
}

async fn other_ids(database: Database) {
    let (storage, collection) = storage(&database);
    let (_, other) = claimed(&storage, &Claim::new(id("other"))).await;
    storage.save(&Save::new(id("other"), other, Epoch(1), token(HEX))).await.unwrap();
    let before = raw(&collection, "other").await.unwrap();
    let mut claim = Claim::new(id("this"));
    claim.start = Some(StartPosition::new(TIME.into()));
    let (record, own) = claimed(&storage, &claim).await;
    storage.save(&Save::new(id("this"), own.clone(), record.epoch.unwrap(), token(HEX))).await.unwrap();
    storage.delete(&id("this"), Some(&own)).await.unwrap();
    assert_eq!(raw(&collection, "other").await.unwrap(), before);
    assert_eq!(storage.list().await.unwrap(), ["other"]);
}

async fn other_documents(database: Database) {
    let (storage, collection) = storage(&database);
    collection.insert_many([doc! { "_id": 1 }, doc! { "_id": { "a": 1 } }, doc! {}]).await.unwrap();
    claimed(&storage, &Claim::new(id("b"))).await;
    claimed(&storage, &Claim::new(id("a"))).await;
    assert_eq!(storage.list().await.unwrap(), ["a", "b"]);
    assert!(!storage.delete(&id("1"), None).await.unwrap());
    assert_eq!(collection.count_documents(doc! {}).await.unwrap(), 5);
}
