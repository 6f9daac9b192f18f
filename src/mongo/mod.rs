//! The MongoDB backends.

mod call;
mod classify;
mod hello;
mod identity;
mod model;
mod open;
mod present;
mod reader;
mod reply;
mod size;
mod stages;
mod step;
mod token;

pub use model::{ChangeStreamModel, FullDocument, FullDocumentBeforeChange, GlobalCheckpointSource};
pub use reader::ChangeStreamReader;
