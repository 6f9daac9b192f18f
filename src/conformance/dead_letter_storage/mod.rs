//! The suite for [`DeadLetterStorage`]s: the laws of sequences, of who holds them, and of what races.

mod holds;
mod races;
mod sequences;

use std::time::Duration;

use bson::{Timestamp, doc};
use bytes::Bytes;

use super::report::{Failed, Report, same};
use super::suite::{self, Check, checks, fresh_id};
use crate::checkpoint::{Checkpoint, Token};
use crate::dead_letter::DeadLetterStorage;
use crate::ids::{Epoch, Namespace, Owner, SubscriptionId};
use crate::letter::{DocumentKey, HoldOutcome, Letter, NewLetter, PutOutcome};

/// Runs every check against a storage of its own, which `fresh` makes. Ids are fresh too, so it may be one with letters in
/// it, or the same one each time.
///
/// It fills a sequence and a subscription to their limits: some thousand writes. It waits a few hundred milliseconds where
/// a hold has to run out, and needs a tokio runtime with time enabled. A storage that works alone in its process may run
/// it with a paused clock.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_time().build()?.block_on(async {
/// # use mongosub::memory::MemoryDeadLetterStorage as MyStorage;
/// let report = mongosub::conformance::dead_letter_storage(|| async { MyStorage::new() }).await;
/// report.assert_passed();
/// # });
/// # Ok::<_, std::io::Error>(())
/// ```
///
/// # Cancel safety
/// Dropped, the letters it has made so far stay in the storage.
pub async fn dead_letter_storage<S, F, Fut>(fresh: F) -> Report
where
    S: DeadLetterStorage,
    F: Fn() -> Fut,
    Fut: Future<Output = S>,
{
    suite::run(all::<S>(), fresh).await
}

fn all<S: DeadLetterStorage>() -> Vec<(&'static str, Check<S>)> {
    checks![
        sequences::nothing_is_there_before_the_first_letter,
        sequences::a_letter_comes_back_as_it_was_stored,
        sequences::letters_stand_in_the_order_they_were_stored_in,
        sequences::an_append_begins_no_sequence,
        sequences::a_position_is_stored_once_also_when_its_letter_is_gone,
        sequences::a_later_epoch_stores_the_same_positions_again,
        sequences::documents_namespaces_and_subscriptions_are_kept_apart,
        sequences::events_of_no_document_have_a_sequence_too,
        sequences::events_of_any_size_come_back_byte_for_byte,
        sequences::text_is_taken_literally,
        sequences::times_are_the_storages_own,
        sequences::a_sequence_has_its_limit,
        sequences::a_subscription_has_its_limit,
        holds::one_owner_at_a_time_until_it_lets_go_or_its_time_is_over,
        holds::only_the_holder_removes_and_writes_down,
        holds::a_sequence_ends_with_its_last_letter_and_begins_anew,
        holds::a_removal_can_be_asked_for_again,
        holds::a_held_sequence_is_not_evicted_and_a_free_one_goes_as_a_whole,
        races::an_append_is_behind_the_last_letter_or_finds_no_sequence,
        races::one_of_many_holds_it,
        races::the_same_letter_from_many_sides_is_stored_once,
        races::many_sequences_begin_at_once,
    ]
}

fn key(n: i32) -> DocumentKey {
    DocumentKey::new(Namespace::new("shop", "orders"), n)
}

/// The position of the n-th event.
fn at(n: u32) -> Checkpoint {
    let hex = format!("826568B1F0{n:08X}2B022C0100296E5A1004B1C2D3E4F5061728394A5B6C7D8E9F0046645F69640064650001");
    // Of a time alone, if that should be no token.
    let time = Timestamp { time: 0x6568_B1F0, increment: n };
    Token::new(hex).map_or(time.into(), Checkpoint::Token)
}

/// An event of so many bytes of filling.
fn event(n: u32, filling: usize) -> Bytes {
    let event = doc! { "operationType": "insert", "n": i64::from(n), "filling": "x".repeat(filling) };
    event.to_vec().unwrap_or_default().into()
}

/// The n-th event of a document, as a letter.
fn letter(id: &SubscriptionId, key: &DocumentKey, n: u32) -> NewLetter {
    NewLetter::parked(id.clone(), key.clone(), Epoch(1), at(n), event(n, 10))
}

async fn put(storage: &impl DeadLetterStorage, letter: &NewLetter) -> Result<(), Failed> {
    same("the outcome of a put", &storage.put(letter).await?, &PutOutcome::Stored)
}

/// A sequence with these events.
async fn filled(
    storage: &impl DeadLetterStorage,
    id: &SubscriptionId,
    key: &DocumentKey,
    events: impl IntoIterator<Item = u32>,
) -> Result<(), Failed> {
    for n in events {
        put(storage, &letter(id, key, n)).await?;
    }
    Ok(())
}

async fn held(storage: &impl DeadLetterStorage, id: &SubscriptionId, key: &DocumentKey) -> Result<Owner, Failed> {
    let owner = Owner::fresh();
    let outcome = storage.hold(id, key, &owner, Duration::from_secs(60)).await?;
    same("the outcome of a hold", &outcome, &HoldOutcome::Held)?;
    Ok(owner)
}

async fn positions(
    storage: &impl DeadLetterStorage,
    id: &SubscriptionId,
    key: &DocumentKey,
) -> Result<Vec<Checkpoint>, Failed> {
    Ok(storage.letters(id, key).await?.into_iter().map(|letter| letter.position).collect())
}

async fn first(storage: &impl DeadLetterStorage, id: &SubscriptionId, key: &DocumentKey) -> Result<Letter, Failed> {
    let letters = storage.letters(id, key).await?;
    letters.into_iter().next().ok_or_else(|| Failed("there are no letters".into()))
}
