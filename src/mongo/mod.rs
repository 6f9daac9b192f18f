//! The MongoDB backends.

mod call;
mod classify;
