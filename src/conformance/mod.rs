//! Suites that every implementation of a seam must pass. For whoever writes one: run the suite in a test of yours.
//!
//! ```
//! use mongosub::conformance;
//! use mongosub::memory::MemoryCheckpointStorage;
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().build()?.block_on(async {
//! let report = conformance::checkpoint_storage(|| async { MemoryCheckpointStorage::new() }).await;
//! report.assert_passed();
//! # });
//! # Ok::<_, std::io::Error>(())
//! ```

mod checkpoint_storage;
mod dead_letter_storage;
mod report;
mod suite;
mod transactional_storage;

pub use checkpoint_storage::checkpoint_storage;
pub use dead_letter_storage::dead_letter_storage;
pub use report::Report;
pub use transactional_storage::{Effects, transactional_storage};
