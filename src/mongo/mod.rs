//! The MongoDB backends.

mod call;
