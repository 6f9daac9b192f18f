//! The suite for dead letter storages: it passes for the one in memory.
#![allow(clippy::unwrap_used, reason = "all of this is tests")]

use std::sync::Arc;

use mongosub::memory::MemoryDeadLetterStorage;
use mongosub::{DynDeadLetterStorage, conformance};

#[tokio::test(start_paused = true)]
async fn the_dead_letters_in_memory_pass_the_suite_with_one_store_for_all_checks() {
    let storage = MemoryDeadLetterStorage::new();
    conformance::dead_letter_storage(|| async { storage.clone() }).await.assert_passed();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_dead_letters_in_memory_pass_the_suite_on_many_threads() {
    conformance::dead_letter_storage(|| async { MemoryDeadLetterStorage::new() }).await.assert_passed();
}

#[tokio::test(start_paused = true)]
async fn a_dyn_dead_letter_storage_passes_the_suite() {
    conformance::dead_letter_storage(|| async {
        Arc::new(MemoryDeadLetterStorage::new()) as Arc<dyn DynDeadLetterStorage>
    })
    .await
    .assert_passed();
}
