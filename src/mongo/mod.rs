//! The MongoDB backends.

mod call;
mod classify;
mod reply;
mod size;
mod step;
mod token;
