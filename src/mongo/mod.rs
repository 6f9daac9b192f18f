//! The MongoDB backends: the model that reads change streams, and the storages of checkpoints and dead letters. The driver's operations are
//! named here alone.

mod call;
mod checkpoint_storage;
mod classify;
#[cfg(feature = "cli")]
mod connect;
mod dead_letters;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
mod hello;
mod identity;
mod letter_record;
mod model;
mod occurrent;
mod open;
mod outline;
mod pool;
mod present;
mod probe;
mod reader;
mod record;
mod record_pipeline;
mod reply;
mod scan;
mod size;
mod split;
mod stages;
mod step;
mod storage_error;
mod task;
mod token;
mod transaction;
mod unsendable;

pub use checkpoint_storage::MongoCheckpointStorage;
#[cfg(feature = "cli")]
pub(crate) use connect::{Unless, Unusable, connect, disconnect, short};
pub use dead_letters::MongoDeadLetterStorage;
pub use model::{ChangeStreamModel, FullDocument, FullDocumentBeforeChange, GlobalCheckpointSource};
pub use pool::ConnectionPool;
pub use reader::ChangeStreamReader;
#[cfg(feature = "cli")]
pub(crate) use stages::check as check_stages;
pub use transaction::{MongoSession, Transaction};
