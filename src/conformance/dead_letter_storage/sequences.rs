//! What is stored, in which order, how often, and how much of it.

use std::time::Duration;

use bson::{DateTime, doc};

use super::{Failed, at, event, filled, first, fresh_id, held, key, letter, positions, put, same};
use crate::conformance::report::that;
use crate::dead_letter::DeadLetterStorage;
use crate::ids::{Epoch, Namespace, Owner};
use crate::letter::{
    DocumentKey, EvictOutcome, HoldOutcome, LetterKind, MAX_LETTERS, MAX_SEQUENCES, NewLetter, ParkingLimit,
    PutOutcome, RemoveOutcome, Sequence,
};

const MB: usize = 1 << 20;

pub(super) async fn nothing_is_there_before_the_first_letter(storage: impl DeadLetterStorage) -> Result<(), Failed> {
    let (id, key) = (fresh_id("none")?, key(1));
    same("sequences", &storage.sequences(&id).await?, &Vec::new())?;
    same("letters", &storage.letters(&id, &key).await?, &Vec::new())?;
    let held = storage.hold(&id, &key, &Owner::fresh(), Duration::from_secs(1)).await?;
    same("a hold", &held, &HoldOutcome::NoSequence)?;
    same("an eviction", &storage.evict(&id, &key).await?, &EvictOutcome::NoSequence)?;
    storage.release(&id, &key, &Owner::fresh()).await?;
    same("sequences after it", &storage.sequences(&id).await?, &Vec::new())
}

pub(super) async fn a_letter_comes_back_as_it_was_stored(storage: impl DeadLetterStorage) -> Result<(), Failed> {
    let (id, key) = (fresh_id("whole")?, key(1));
    let error = vec!["the index is closed".to_owned(), "connection refused".to_owned()];
    let second = Duration::from_secs(1);
    let failed = letter(&id, &key, 1).failed(4, error.clone(), 60 * second, second);
    let text = NewLetter::parked(
        id.clone(),
        key.clone(),
        Epoch(1),
        crate::checkpoint::Checkpoint::Text("line 17".into()),
        event(2, 0),
    );
    let time = NewLetter::parked(
        id.clone(),
        super::key(2),
        Epoch(7),
        bson::Timestamp { time: 9, increment: 3 }.into(),
        event(3, 0),
    );
    let mut skipped = letter(&id, &key, 3);
    skipped.kind = LetterKind::Skipped;
    for letter in [&failed, &text, &time, &skipped] {
        put(&storage, letter).await?;
    }
    let found = storage.letters(&id, &key).await?;
    same("the number of letters", &found.len(), &3)?;
    for (found, stored) in found.iter().zip([&failed, &text, &skipped]) {
        same("subscription", &found.subscription, &id)?;
        same("key", &found.key, &key)?;
        same("position", &found.position, &stored.position)?;
        same("epoch", &found.epoch, &stored.epoch)?;
        same("kind", &found.kind, &stored.kind)?;
        same("error", &found.error, &stored.error)?;
        same("attempts", &found.attempts, &stored.attempts)?;
        same("size", &found.bytes, &(stored.event.len() as u64))?;
        same("event", &storage.event(found).await?, &Some(stored.event.clone()))?;
    }
    same("an operation time", &first(&storage, &id, &time.key).await?.position, &time.position)?;
    same("its epoch", &first(&storage, &id, &time.key).await?.epoch, &Epoch(7))
}

pub(super) async fn letters_stand_in_the_order_they_were_stored_in(
    storage: impl DeadLetterStorage,
) -> Result<(), Failed> {
    let (id, key) = (fresh_id("order")?, key(1));
    filled(&storage, &id, &key, 1..=20).await?;
    same("positions", &positions(&storage, &id, &key).await?, &(1..=20).map(at).collect())?;
    same("sequences", &storage.sequences(&id).await?, &vec![Sequence::new(key, 20, None)])
}

pub(super) async fn an_append_begins_no_sequence(storage: impl DeadLetterStorage) -> Result<(), Failed> {
    let (id, key) = (fresh_id("append")?, key(1));
    same("an append to nothing", &storage.append(&letter(&id, &key, 1)).await?, &PutOutcome::NoSequence)?;
    same("sequences", &storage.sequences(&id).await?, &Vec::new())?;
    filled(&storage, &id, &key, [1]).await?;
    same("an append", &storage.append(&letter(&id, &key, 2)).await?, &PutOutcome::Stored)?;
    same("positions", &positions(&storage, &id, &key).await?, &vec![at(1), at(2)])
}

pub(super) async fn a_position_is_stored_once_also_when_its_letter_is_gone(
    storage: impl DeadLetterStorage,
) -> Result<(), Failed> {
    let (id, key) = (fresh_id("once")?, key(1));
    filled(&storage, &id, &key, 1..=3).await?;
    let owner = held(&storage, &id, &key).await?;
    storage.remove(&first(&storage, &id, &key).await?, &owner).await?;
    for n in 1..=3 {
        let again = letter(&id, &key, n);
        same("a put again", &storage.put(&again).await?, &PutOutcome::AlreadyStored)?;
        same("an append again", &storage.append(&again).await?, &PutOutcome::AlreadyStored)?;
    }
    same("positions", &positions(&storage, &id, &key).await?, &vec![at(2), at(3)])
}

pub(super) async fn a_later_epoch_stores_the_same_positions_again(
    storage: impl DeadLetterStorage,
) -> Result<(), Failed> {
    let (id, key) = (fresh_id("epoch")?, key(1));
    filled(&storage, &id, &key, 1..=2).await?;
    let later = |epoch, n| NewLetter { epoch: Epoch(epoch), ..letter(&id, &key, n) };
    put(&storage, &later(2, 1)).await?;
    same("the same again", &storage.put(&later(2, 1)).await?, &PutOutcome::AlreadyStored)?;
    same("an earlier epoch", &storage.put(&later(1, 9)).await?, &PutOutcome::AlreadyStored)?;
    same("positions", &positions(&storage, &id, &key).await?, &vec![at(1), at(2), at(1)])
}

pub(super) async fn documents_namespaces_and_subscriptions_are_kept_apart(
    storage: impl DeadLetterStorage,
) -> Result<(), Failed> {
    let (id, other) = (fresh_id("apart")?, fresh_id("apart_too")?);
    let in_other = |id: i32| DocumentKey::new(Namespace::new("shop", "refunds"), id);
    let text = DocumentKey::new(Namespace::new("shop", "orders"), "1");
    let sharded = DocumentKey::with_key(Namespace::new("shop", "orders"), &doc! { "shard": 1, "_id": 1 });
    let keys = [key(1), key(2), in_other(1), text, sharded];
    for key in &keys {
        filled(&storage, &id, key, [1]).await?;
    }
    filled(&storage, &other, &keys[0], 1..=2).await?;
    let mut found: Vec<_> = storage.sequences(&id).await?.into_iter().map(|sequence| sequence.key).collect();
    let mut expected = keys.to_vec();
    found.sort();
    expected.sort();
    same("keys", &found, &expected)?;
    same("an eviction", &storage.evict(&id, &keys[0]).await?, &EvictOutcome::Evicted(1))?;
    same("sequences after it", &storage.sequences(&id).await?.len(), &4)?;
    same("those of the other subscription", &storage.letters(&other, &keys[0]).await?.len(), &2)
}

pub(super) async fn events_of_no_document_have_a_sequence_too(storage: impl DeadLetterStorage) -> Result<(), Failed> {
    let id = fresh_id("no_document")?;
    let of_orders = DocumentKey::without_document(Some(Namespace::new("shop", "orders")));
    let of_nothing = DocumentKey::without_document(None);
    filled(&storage, &id, &of_orders, 1..=2).await?;
    filled(&storage, &id, &of_nothing, 3..=3).await?;
    same("of a collection", &positions(&storage, &id, &of_orders).await?, &vec![at(1), at(2)])?;
    same("of none", &positions(&storage, &id, &of_nothing).await?, &vec![at(3)])?;
    let mut found: Vec<_> = storage.sequences(&id).await?.into_iter().map(|sequence| sequence.key).collect();
    found.sort();
    same("keys", &found, &vec![of_nothing, of_orders])
}

pub(super) async fn events_of_any_size_come_back_byte_for_byte(storage: impl DeadLetterStorage) -> Result<(), Failed> {
    let (id, key) = (fresh_id("sizes")?, key(1));
    // The largest event a server sends is 16 MB; the sizes around the powers of two are those at which storages cut.
    let sizes = [0, MB, 4 * MB - 200, 4 * MB, 8 * MB, 8 * MB + 1, 16 * MB - 1000];
    for (n, size) in (1..).zip(sizes) {
        let large = NewLetter { event: event(n, size), ..letter(&id, &key, n) };
        put(&storage, &large).await?;
    }
    let owner = held(&storage, &id, &key).await?;
    for (n, size) in (1..).zip(sizes) {
        let found = first(&storage, &id, &key).await?;
        let expected = event(n, size);
        let stored = storage.event(&found).await?;
        that(stored.as_ref() == Some(&expected), || {
            format!("an event of {} bytes came back otherwise", expected.len())
        })?;
        let removed = storage.remove(&found, &owner).await?;
        let last = if n as usize == sizes.len() { RemoveOutcome::Ended } else { RemoveOutcome::Removed };
        same("a removal", &removed, &last)?;
        same("the event of a letter that is gone", &storage.event(&found).await?, &None)?;
    }
    Ok(())
}

pub(super) async fn text_is_taken_literally(storage: impl DeadLetterStorage) -> Result<(), Failed> {
    let id = fresh_id("literal")?;
    let key = DocumentKey::with_key(Namespace::new("$shop", "a.b$c"), &doc! { "_id": "$$NOW", "$x": { "a.b": "$y" } });
    let error = vec!["$$ROOT".to_owned(), "{ $set: 1 }\u{0}".to_owned()];
    let odd = letter(&id, &key, 1).failed(1, error.clone(), Duration::ZERO, Duration::ZERO);
    put(&storage, &odd).await?;
    let found = first(&storage, &id, &key).await?;
    same("error", &found.error, &error)?;
    same("key", &storage.sequences(&id).await?[0].key, &key)?;
    let owner = Owner::new("$$ROOT");
    let outcome = storage.hold(&id, &key, &owner, Duration::from_secs(60)).await?;
    same("a hold", &outcome, &HoldOutcome::Held)?;
    let error = vec!["$_id".to_owned()];
    same("a failure", &storage.note_failure(&found, &owner, &error).await?, &true)?;
    same("the new error", &first(&storage, &id, &key).await?.error, &error)
}

pub(super) async fn times_are_the_storages_own(storage: impl DeadLetterStorage) -> Result<(), Failed> {
    let (id, key) = (fresh_id("times")?, key(1));
    let hour = Duration::from_secs(3600);
    put(&storage, &letter(&id, &key, 1).failed(2, Vec::new(), 2 * hour, hour)).await?;
    put(&storage, &letter(&id, &key, 2)).await?;
    let letters = storage.letters(&id, &key).await?;
    let stored = letters[0].stored_at.timestamp_millis();
    let before = |at: Option<DateTime>| at.map(|at| stored - at.timestamp_millis());
    same("the first failure", &before(letters[0].first_failed_at), &Some(7_200_000))?;
    same("the last failure", &before(letters[0].last_failed_at), &Some(3_600_000))?;
    same("failures of a parked one", &(letters[1].first_failed_at, letters[1].last_failed_at), &(None, None))?;
    let owner = held(&storage, &id, &key).await?;
    for letter in &letters {
        storage.note_failure(letter, &owner, &["again".to_owned()]).await?;
    }
    let letters = storage.letters(&id, &key).await?;
    same("the first failure stays", &before(letters[0].first_failed_at), &Some(7_200_000))?;
    that(letters[0].last_failed_at >= Some(letters[0].stored_at), || "the last failure is not new".into())?;
    that(letters[1].first_failed_at >= Some(letters[1].stored_at), || "a first failure has no time".into())?;
    same("attempts", &(letters[0].attempts, letters[1].attempts), &(3, 1))
}

pub(super) async fn a_sequence_has_its_limit(storage: impl DeadLetterStorage) -> Result<(), Failed> {
    let (id, key) = (fresh_id("events")?, key(1));
    let most = u32::try_from(MAX_LETTERS).unwrap_or(u32::MAX);
    filled(&storage, &id, &key, 1..=most).await?;
    let next = letter(&id, &key, most + 1);
    let full = PutOutcome::Full(ParkingLimit::Events);
    same("a put to a full one", &storage.put(&next).await?, &full)?;
    same("an append to a full one", &storage.append(&next).await?, &full)?;
    same("one it has had", &storage.append(&letter(&id, &key, 1)).await?, &PutOutcome::AlreadyStored)?;
    same("letters", &storage.letters(&id, &key).await?.len(), &MAX_LETTERS)?;
    same("another document", &storage.put(&letter(&id, &super::key(2), most + 2)).await?, &PutOutcome::Stored)?;
    let owner = held(&storage, &id, &key).await?;
    storage.remove(&first(&storage, &id, &key).await?, &owner).await?;
    same("an append when there is room", &storage.append(&next).await?, &PutOutcome::Stored)
}

pub(super) async fn a_subscription_has_its_limit(storage: impl DeadLetterStorage) -> Result<(), Failed> {
    let (id, other) = (fresh_id("documents")?, fresh_id("others")?);
    let most = i32::try_from(MAX_SEQUENCES).unwrap_or(i32::MAX);
    for n in 1..=most {
        filled(&storage, &id, &key(n), [1]).await?;
    }
    let full = PutOutcome::Full(ParkingLimit::Documents);
    same("one more document", &storage.put(&letter(&id, &key(0), 1)).await?, &full)?;
    same("its letters", &storage.letters(&id, &key(0)).await?, &Vec::new())?;
    same("one more event", &storage.put(&letter(&id, &key(1), 2)).await?, &PutOutcome::Stored)?;
    same("another subscription", &storage.put(&letter(&other, &key(0), 1)).await?, &PutOutcome::Stored)?;
    same("an eviction", &storage.evict(&id, &key(1)).await?, &EvictOutcome::Evicted(2))?;
    same("a document when there is room", &storage.put(&letter(&id, &key(0), 1)).await?, &PutOutcome::Stored)?;
    same("sequences", &storage.sequences(&id).await?.len(), &MAX_SEQUENCES)
}
