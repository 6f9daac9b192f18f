//! Backends without a server.

mod checkpoint_storage;

pub use checkpoint_storage::MemoryCheckpointStorage;
