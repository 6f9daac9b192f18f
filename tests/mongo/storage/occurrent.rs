//! A collection that the Occurrent library writes to as well: its records are taken over, and ours are read by it.

use libtest_mimic::Trial;
use mongodb::bson::{Bson, Document, Timestamp, doc};
use mongodb::{Collection, Database};
use mongosub::{Checkpoint, CheckpointStorage, Claim, ClaimOutcome, Epoch, Kind, Save, SaveOutcome, StartPosition};

use super::{HEX, LATER_HEX, TIME, claimed, document, id, plain, raw, storage, token};

pub fn tests() -> Vec<Trial> {
    vec![
        plain("every form of Occurrent's is taken over, and read by it afterwards", taken_over),
        plain("a record that Occurrent rewrote under its owner is superseded by nobody", rewritten_under_its_owner),
        plain("a record of ours is taken over by Occurrent and taken back", there_and_back),
    ]
}

/// What Occurrent's storage finds in a document: its fields only, in the order it looks for them.
fn occurrent_reads(stored: &Document) -> Option<Checkpoint> {
    if let Some(found) = stored.get("resumeToken") {
        return Some(token(found.as_document()?.get_str("_data").ok()?));
    }
    if let Some(found) = stored.get("operationTime") {
        return Some(Checkpoint::Time(found.as_timestamp()?));
    }
    let text = ["checkpoint", "subscriptionPosition"].into_iter().find_map(|field| stored.get_str(field).ok())?;
    Some(Checkpoint::Text(text.into()))
}

/// Its conditional write: the whole document is replaced, and `version` carried on or set.
async fn occurrent_writes(collection: &Collection<Document>, id: &str, mut position: Document, version: Option<i64>) {
    position.insert("_id", id);
    let version = version.map_or(doc! { "$ifNull": ["$version", "$$REMOVE"] }, |version| doc! { "$literal": version });
    let new = doc! { "$mergeObjects": [{ "$literal": position }, { "version": version }] };
    let stages = vec![doc! { "$replaceWith": new }];
    collection.update_one(doc! { "_id": id }, stages).upsert(true).await.unwrap();
}

fn forms() -> Vec<(Checkpoint, Document)> {
    let text = [
        (token(HEX), format!(r#"{{"resumeToken": {{"_data": "{HEX}"}}}}"#)),
        (token(HEX), format!(r#"{{ "resumeToken" : {{ "_data" : "{HEX}" }} }}"#)),
        (
            token(HEX),
            format!(
                r#"{{"resumeToken": {{"_data": "{HEX}", "_typeBits": {{"$binary": {{"base64": "gkAB", "subType": "00"}}}}}}}}"#
            ),
        ),
        (token(HEX), format!(r#"{{"_data": "{HEX}"}}"#)),
        (token(HEX), HEX.to_owned()),
        (TIME.into(), r#"{"operationTime": {"$timestamp": {"t": 1701360112, "i": 3}}}"#.to_owned()),
        (TIME.into(), r#"{"$timestamp": {"t": 1701360112, "i": 3}}"#.to_owned()),
        (TIME.into(), "Timestamp{value=7307286042803240963, seconds=1701360112, inc=3}".to_owned()),
    ];
    let mut forms = vec![
        (token(HEX), doc! { "resumeToken": { "_data": HEX } }),
        (token(HEX), doc! { "resumeToken": { "_data": HEX, "_typeBits": { "a": 1 } } }),
        (TIME.into(), doc! { "operationTime": TIME }),
    ];
    for (position, text) in text {
        forms.push((position.clone(), doc! { "checkpoint": &text }));
        forms.push((position, doc! { "subscriptionPosition": text }));
    }
    forms
}

async fn taken_over(database: Database) {
    let (storage, collection) = storage(&database);
    let mut number = 0;
    for (position, form) in forms() {
        for version in [None, Some(Bson::Int64(7)), Some(Bson::Int32(7)), Some(Bson::Null)] {
            number += 1;
            let name = format!("taken_{number}");
            let mut before = doc! { "_id": &name };
            before.extend(form.clone());
            if let Some(version) = &version {
                before.insert("version", version.clone());
            }
            collection.insert_one(&before).await.unwrap();

            let read = storage.read(&id(&name)).await.unwrap().unwrap();
            assert_eq!(read.position.as_ref(), Some(&position), "{before}");
            assert_eq!((read.ownership, read.epoch, read.kind), (None, None, None), "{before}");

            let mut claim = Claim::new(id(&name));
            claim.start = Some(StartPosition::new(Timestamp { time: 1, increment: 1 }.into()));
            let (record, own) = claimed(&storage, &claim).await;
            assert_eq!(record.position.as_ref(), Some(&position), "{before}");
            assert_eq!((record.epoch, record.kind, record.saved_at), (None, None, None), "{before}");
            let mut stored = document(&collection, &name).await;
            stored.remove("mongosub").unwrap();
            assert_eq!(stored, before, "a claim leaves their fields alone");

            // Behind what they stored, but in an epoch of ours.
            let first = Timestamp { time: 2, increment: 1 };
            for (epoch, position) in [(1, first.into()), (2, token(LATER_HEX)), (3, first.into())] {
                let save = Save::new(id(&name), own.clone(), Epoch(epoch), position);
                let outcome = storage.save(&save).await.unwrap();
                assert!(matches!(outcome, SaveOutcome::Saved { .. }), "{outcome:?} for {before}");
                let mut stored = document(&collection, &name).await;
                assert_eq!(occurrent_reads(&stored).as_ref(), Some(&save.position), "{stored}");
                assert_eq!(stored.get("version"), version.as_ref());
                stored.remove("mongosub").unwrap();
                stored.remove("version");
                assert_eq!(stored.len(), 2, "{stored}");
            }
        }
    }
}

async fn rewritten_under_its_owner(database: Database) {
    let (storage, collection) = storage(&database);
    let id = id("rewritten");
    let (_, own) = claimed(&storage, &Claim::new(id.clone())).await;
    let mut save = Save::new(id.clone(), own.clone(), Epoch(1), token(HEX));
    storage.save(&save).await.unwrap();

    occurrent_writes(&collection, "rewritten", doc! { "resumeToken": { "_data": HEX } }, Some(3)).await;
    let before = raw(&collection, "rewritten").await.unwrap();
    let nobody = SaveOutcome::Superseded { owner: None, since: None };
    assert_eq!(storage.save(&save).await.unwrap(), nobody, "the same position");
    save.position = token(LATER_HEX);
    assert_eq!(storage.save(&save).await.unwrap(), nobody, "a later one");
    let mut claim = Claim::new(id.clone());
    claim.expect = Some(own.clone());
    let outcome = storage.claim(&claim).await.unwrap();
    assert_eq!(outcome, ClaimOutcome::Superseded { owner: None, since: None });
    assert!(!storage.delete(&id, Some(&own)).await.unwrap());
    assert_eq!(raw(&collection, "rewritten").await.unwrap(), before);
}

async fn there_and_back(database: Database) {
    let (storage, collection) = storage(&database);
    let id = id("back");
    let (_, first) = claimed(&storage, &Claim::new(id.clone())).await;
    let mut save = Save::new(id.clone(), first.clone(), Epoch(1), token(HEX));
    save.kind = Kind::Quiet;
    storage.save(&save).await.unwrap();
    assert_eq!(occurrent_reads(&document(&collection, "back").await), Some(token(HEX)));

    occurrent_writes(&collection, "back", doc! { "resumeToken": { "_data": LATER_HEX } }, None).await;
    let (record, second) = claimed(&storage, &Claim::new(id.clone())).await;
    assert_eq!((record.position, record.epoch, record.kind), (Some(token(LATER_HEX)), None, None));
    assert!(second.fence > first.fence, "{second:?} after {first:?}");
    let stored = document(&collection, "back").await;
    assert!(!stored.contains_key("version"), "{stored}");

    // Occurrent goes on by its version, which is where it left it.
    occurrent_writes(&collection, "back", doc! { "operationTime": TIME }, Some(9)).await;
    let (record, third) = claimed(&storage, &Claim::new(id.clone())).await;
    assert_eq!(record.position, Some(TIME.into()));
    storage.save(&Save::new(id.clone(), third, Epoch(1), token(HEX))).await.unwrap();
    let stored = document(&collection, "back").await;
    assert_eq!(stored.get_i64("version").unwrap(), 9);
    assert_eq!(occurrent_reads(&stored), Some(token(HEX)));
}
