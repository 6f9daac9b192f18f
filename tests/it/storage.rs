//! The suite for checkpoint storages: it passes for the one in memory, and fails for each broken one by name.
#![allow(clippy::unwrap_used, reason = "all of this is tests")]

mod broken;
mod position_order;

use broken::{Broken, Fault};
use mongosub::conformance::{self, Report};
use mongosub::memory::MemoryCheckpointStorage;
use mongosub::{Checkpoint, CheckpointStorage, Claim, Save, SubscriptionId};
use std::time::Duration;

async fn suite(fault: Option<Fault>) -> Report {
    conformance::checkpoint_storage(|| async { Broken::new(fault) }).await
}

#[tokio::test]
async fn the_storage_in_memory_passes_the_suite() {
    conformance::checkpoint_storage(|| async { MemoryCheckpointStorage::new() }).await.assert_passed();
}

#[tokio::test(start_paused = true)]
async fn the_storage_in_memory_passes_the_suite_with_a_paused_clock_and_one_store_for_all_checks() {
    let storage = MemoryCheckpointStorage::new();
    conformance::checkpoint_storage(|| async { storage.clone() }).await.assert_passed();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_storage_in_memory_passes_the_suite_on_many_threads() {
    conformance::checkpoint_storage(|| async { MemoryCheckpointStorage::new() }).await.assert_passed();
}

#[tokio::test]
async fn a_dyn_storage_passes_the_suite() {
    conformance::checkpoint_storage(|| async {
        std::sync::Arc::new(MemoryCheckpointStorage::new()) as std::sync::Arc<dyn mongosub::DynCheckpointStorage>
    })
    .await
    .assert_passed();
}

#[tokio::test(start_paused = true)]
async fn the_storage_that_is_to_be_broken_passes_the_suite_while_it_is_whole() {
    suite(None).await.assert_passed();
}

#[tokio::test(start_paused = true)]
async fn every_broken_storage_fails_the_check_that_is_about_it() {
    let found = [
        (Fault::DoesNothing, "a_claim_makes_a_record_without_a_position"),
        (Fault::ForgetsTheFence, "a_save_needs_the_fence_and_the_owner"),
        (Fault::ForgetsTheOwner, "a_save_needs_the_fence_and_the_owner"),
        (Fault::GoesBackwards, "a_save_goes_forward_and_repeats_but_never_back"),
        (Fault::ForgetsTheEpoch, "an_epoch_beats_every_position_of_an_older_one"),
        (Fault::UpsertsOnSave, "a_save_without_a_claim_is_gone_and_makes_nothing"),
        (Fault::DeletesForAnybody, "an_owner_deletes_its_own_record_only_and_a_hand_any"),
        (Fault::CountsAnewAfterADelete, "a_fence_is_never_given_twice_not_even_after_a_delete"),
        (Fault::LastStartWins, "the_first_start_is_stored_and_no_later_one"),
        (Fault::KeepsClean, "a_save_says_whether_the_run_ended_cleanly_and_a_claim_forgets_it"),
        (Fault::ForgetsNotes, "a_note_is_stored_with_its_position_and_kept"),
        (Fault::NotesTwice, "a_note_of_a_save_that_is_made_again_is_kept_once"),
        (Fault::NotesInVain, "a_note_of_a_save_that_is_refused_is_not_kept"),
        (Fault::KeepsEveryNote, "the_newest_notes_are_kept"),
        (Fault::CountsNoEnds, "an_end_without_a_word_and_without_progress_is_counted"),
        (Fault::TakesOldProgressForNew, "an_end_without_a_word_and_without_progress_is_counted"),
        (Fault::TakesOldProgressForNew, "an_end_behind_progress_begins_the_count_anew"),
        (Fault::ForgetsProgress, "an_end_behind_progress_begins_the_count_anew"),
        (Fault::CountsCleanEnds, "a_clean_end_begins_the_count_anew"),
        (Fault::CountsItsOwnEnd, "the_same_claim_made_again_counts_nothing"),
        (Fault::CountsExpectedEnds, "a_claim_that_expects_its_predecessor_counts_nothing"),
        (Fault::HoldingStores, "an_event_in_hand_is_noted_and_nothing_else_changes"),
        (Fault::HoldsForAnybody, "an_event_in_hand_is_noted_by_the_owner_alone_and_never_behind"),
        (Fault::HoldsBehind, "an_event_in_hand_is_noted_by_the_owner_alone_and_never_behind"),
        (Fault::ForgetsDeaths, "an_event_in_hand_dies_once_with_each_end_without_a_word"),
        (Fault::CountsCleanEnds, "an_event_in_hand_dies_once_with_each_end_without_a_word"),
        (Fault::EmptiesUnsaid, "a_save_empties_the_hand_if_it_says_so_and_leaves_it_otherwise"),
        (Fault::NeverEmpties, "a_save_empties_the_hand_if_it_says_so_and_leaves_it_otherwise"),
        (Fault::TakesNothingBack, "the_end_of_one_who_lives_is_taken_back_once"),
        (Fault::TakesBackTwice, "the_end_of_one_who_lives_is_taken_back_once"),
        (Fault::TakesBackForAnybody, "the_end_of_one_who_lives_is_taken_back_once"),
        (Fault::TakesBackBelowNone, "nothing_is_taken_back_below_none_nor_of_a_clean_end"),
        (Fault::TakesBackCleanEnds, "nothing_is_taken_back_below_none_nor_of_a_clean_end"),
        (Fault::TakingBackMakesARecord, "what_is_taken_back_of_a_record_that_is_gone_makes_nothing"),
    ];
    for (fault, check) in found {
        let report = suite(Some(fault)).await;
        assert!(report.failed().contains(&check), "{fault:?} fails {:?}, but not {check}", report.failed());
        let shown = report.to_string();
        assert!(shown.contains(&format!("{check}: ")), "{shown}");
    }
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "a_save_goes_forward_and_repeats_but_never_back: ")]
async fn a_report_with_a_failed_check_panics_with_its_name() {
    suite(Some(Fault::GoesBackwards)).await.assert_passed();
}

#[tokio::test(start_paused = true)]
async fn the_clock_in_memory_is_tokios_and_the_same_in_every_run() {
    let mut seen = Vec::new();
    for _ in 0..2 {
        let storage = MemoryCheckpointStorage::new();
        let id = SubscriptionId::new("clock").unwrap();
        let mongosub::ClaimOutcome::Claimed(record) = storage.claim(&Claim::new(id.clone())).await.unwrap() else {
            panic!("not claimed")
        };
        tokio::time::sleep(Duration::from_secs(5)).await;
        let save =
            Save::new(id, record.ownership.clone().unwrap(), mongosub::Epoch(1), Checkpoint::Text("line 17".into()));
        let outcome = storage.save(&save).await.unwrap();
        let mongosub::SaveOutcome::Saved { at } = outcome else { panic!("{outcome:?}") };
        let (claimed, saved) = (record.claimed_at.unwrap(), at.unwrap());
        assert_eq!(saved.timestamp_millis() - claimed.timestamp_millis(), 5000);
        seen.push((claimed, record.ownership.unwrap().fence));
    }
    assert_eq!(seen[0], seen[1]);
}
