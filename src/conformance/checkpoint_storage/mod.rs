//! The suite for [`CheckpointStorage`]s: the laws of claims, saves and deletes.

mod claims;
mod ends;
mod notes;
mod positions;
mod saves;

use bson::Timestamp;

use super::report::{Failed, Report, same};
use super::suite::{self, Check, checks, fresh_id};
use crate::checkpoint::{Checkpoint, Token};
use crate::ids::{Ownership, SubscriptionId};
use crate::storage::{CheckpointStorage, Claim, ClaimOutcome, Record, Save, SaveOutcome};

/// Runs every check against a storage of its own, which `fresh` makes. Ids are fresh too, so it may be one with records
/// in it, or the same one each time.
///
/// It waits a few milliseconds where the storage's clock has to move on, and needs a tokio runtime with time enabled.
/// A storage that works alone in its process may run it with a paused clock.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_time().build()?.block_on(async {
/// # use mongosub::memory::MemoryCheckpointStorage as MyStorage;
/// let report = mongosub::conformance::checkpoint_storage(|| async { MyStorage::new() }).await;
/// report.assert_passed();
/// # });
/// # Ok::<_, std::io::Error>(())
/// ```
///
/// # Cancel safety
/// Dropped, the records it has made so far stay in the storage.
pub async fn checkpoint_storage<S, F, Fut>(fresh: F) -> Report
where
    S: CheckpointStorage,
    F: Fn() -> Fut,
    Fut: Future<Output = S>,
{
    suite::run(all::<S>(), fresh).await
}

fn all<S: CheckpointStorage>() -> Vec<(&'static str, Check<S>)> {
    checks![
        claims::an_unknown_id_has_no_record,
        claims::a_claim_makes_a_record_without_a_position,
        claims::the_first_start_is_stored_and_no_later_one,
        claims::a_start_is_stored_later_if_nothing_is_stored,
        claims::a_claim_leaves_the_position_and_what_stands_beside_it,
        claims::racing_claims_get_a_fence_each_and_one_start,
        claims::a_fence_is_never_given_twice_not_even_after_a_delete,
        claims::a_claim_may_expect_its_predecessor,
        claims::a_claim_whose_answer_was_lost_can_be_made_again,
        claims::an_owner_deletes_its_own_record_only_and_a_hand_any,
        claims::ids_are_listed_in_order,
        claims::ids_are_compared_exactly,
        saves::a_save_without_a_claim_is_gone_and_makes_nothing,
        saves::a_save_after_a_delete_is_gone_and_makes_nothing,
        saves::a_save_needs_the_fence_and_the_owner,
        saves::a_save_goes_forward_and_repeats_but_never_back,
        saves::a_save_says_whether_the_run_ended_cleanly_and_a_claim_forgets_it,
        saves::what_stands_beside_a_position_is_stored_with_it,
        saves::a_write_is_read_at_once,
        saves::values_are_taken_literally,
        positions::positions_of_one_epoch_are_in_order,
        positions::an_epoch_beats_every_position_of_an_older_one,
        positions::text_has_no_order,
        ends::an_end_without_a_word_and_without_progress_is_counted,
        ends::an_end_behind_progress_begins_the_count_anew,
        ends::a_clean_end_begins_the_count_anew,
        ends::the_same_claim_made_again_counts_nothing,
        ends::a_claim_that_expects_its_predecessor_counts_nothing,
        ends::an_event_in_hand_is_noted_and_nothing_else_changes,
        ends::an_event_in_hand_is_noted_by_the_owner_alone_and_never_behind,
        ends::an_event_in_hand_dies_once_with_each_end_without_a_word,
        ends::a_save_empties_the_hand_if_it_says_so_and_leaves_it_otherwise,
        ends::the_end_of_one_who_lives_is_taken_back_once,
        ends::nothing_is_taken_back_below_none_nor_of_a_clean_end,
        ends::what_is_taken_back_of_a_record_that_is_gone_makes_nothing,
        notes::a_note_is_stored_with_its_position_and_kept,
        notes::a_note_of_a_save_that_is_made_again_is_kept_once,
        notes::a_note_of_a_save_that_is_refused_is_not_kept,
        notes::the_newest_notes_are_kept,
    ]
}

fn id(text: &str) -> Result<SubscriptionId, Failed> {
    SubscriptionId::new(text).map_err(|error| Failed(error.to_string()))
}

/// A claim that must be granted.
async fn claimed(storage: &impl CheckpointStorage, claim: &Claim) -> Result<(Record, Ownership), Failed> {
    match storage.claim(claim).await? {
        ClaimOutcome::Claimed(record) => {
            let Some(ownership) = record.ownership.clone() else {
                return Err(Failed("the record of a granted claim has no owner".into()));
            };
            same("the owner of a granted claim", &ownership.owner, &claim.owner)?;
            Ok((record, ownership))
        }
        other => Err(Failed(format!("the claim should be granted, the answer was {other:?}"))),
    }
}

/// A record that must be there.
async fn stored(storage: &impl CheckpointStorage, id: &SubscriptionId) -> Result<Record, Failed> {
    storage.read(id).await?.ok_or_else(|| Failed("the record is not there".into()))
}

/// A save that must be stored.
async fn saved(storage: &impl CheckpointStorage, save: &Save) -> Result<(), Failed> {
    match storage.save(save).await? {
        SaveOutcome::Saved { .. } => Ok(()),
        other => Err(Failed(format!("{} should be stored, the answer was {other:?}", save.position))),
    }
}

/// A save that must be refused since what is stored covers it.
async fn not_ahead(storage: &impl CheckpointStorage, save: &Save) -> Result<(), Failed> {
    same(&format!("the answer to {}", save.position), &storage.save(save).await?, &SaveOutcome::NotAhead)
}

fn time(time: u32, increment: u32) -> Checkpoint {
    Checkpoint::Time(Timestamp { time, increment })
}

/// A token as the server makes it, of this time, with this behind it.
fn token(time: u32, increment: u32, rest: &str) -> Result<Checkpoint, Failed> {
    let token = Token::new(format!("82{time:08X}{increment:08X}{rest}"));
    token.map(Checkpoint::Token).map_err(|error| Failed(error.to_string()))
}

/// The rest of a quiet token.
const QUIET: &str = "2B0229296E04";
/// The rest of the first event's token of a transaction, or of an event outside of one.
const EVENT: &str = "2B022C0100296E5A1004B1C2D3E4F5061728394A5B6C7D8E9F0046645F6964006465ABCDEF0123456789ABCDEF0004";
/// The rest of a later event's token of the same transaction.
const LATER_EVENT: &str =
    "2B022C01002B046E5A1004B1C2D3E4F5061728394A5B6C7D8E9F0046645F69640064650000000123456789ABCDEF0004";
