//! Backends without a server: a scripted model and storages of the process's own, for tests of handlers and of what
//! runs them. They speak no network, keep nothing on disk and know nothing of what runs them.
//!
//! ```
//! use mongosub::bson::doc;
//! use mongosub::memory::{self, MemoryModel};
//!
//! let model = MemoryModel::new();
//! let first = model.push(memory::insert(1, doc! { "status": "paid" }));
//! let second = model.push(memory::delete(1));
//! assert!(second.is_beyond(&first));
//! ```

mod checkpoint_storage;
mod clock;
mod dead_letters;
mod events;
mod faults;
mod feed;
mod model;
mod reader;
mod script;
mod transaction;

pub use checkpoint_storage::MemoryCheckpointStorage;
pub use dead_letters::MemoryDeadLetterStorage;
pub use events::{MemoryEvent, delete, delivery, event, insert, replace, update};
pub use model::MemoryModel;
pub use reader::MemoryReader;
pub use transaction::{Conflict, MemorySession, MemoryTransaction};
