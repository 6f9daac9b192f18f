//! The MongoDB backends.

mod call;
mod checkpoint_storage;
mod occurrent;
mod record;
mod record_pipeline;
mod storage_error;

pub use checkpoint_storage::MongoCheckpointStorage;
