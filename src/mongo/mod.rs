//! The MongoDB backends.
