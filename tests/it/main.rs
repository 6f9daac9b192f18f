//! Tests without a server: scripted feeds and paused time.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod filter;
mod memory_model;
