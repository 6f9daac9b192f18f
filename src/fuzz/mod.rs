//! Targets for fuzzing: what any bytes must come to, wherever bytes from outside are read. Each takes bytes, panics when a
//! property is broken, and tells whether it took the bytes for something valid.
//!
//! `cargo test` runs them over mutations of valid inputs, a bounded number of them (`tests.rs`); `fuzz/` hands the same
//! functions to `cargo fuzz`. What they compare with is read by a reader of its own (`plain.rs`), never by what is tested.
//! Not a part of the crate's face: it is there in its own tests and with the feature `fuzzing` only.

mod draw;
mod event;
mod filter;
mod plain;
mod record;
mod reply;
mod seeds;
#[cfg(test)]
mod tests;
mod token;

pub use self::event::event;
pub use self::filter::{filter, pipeline};
pub use self::record::{record, text};
pub use self::reply::reply;
pub use self::seeds::seeds;
pub use self::token::token;

/// One target: bytes in, whether they were taken for something valid out.
pub type Target = fn(&[u8]) -> bool;

/// Every target by its name, which is that of its file in `fuzz/fuzz_targets`.
pub const TARGETS: [(&str, Target); 7] = [
    ("record", record),
    ("text", text),
    ("token", token),
    ("reply", reply),
    ("event", event),
    ("filter", filter),
    ("pipeline", pipeline),
];
