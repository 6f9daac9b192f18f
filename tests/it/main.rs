//! Tests without a server: a scripted feed, a storage that fails on demand, paused time.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod filter;
mod main_path;
mod memory_model;
mod storage;
mod support;
