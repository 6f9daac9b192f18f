//! Tests without a server: a scripted feed, a storage that fails on demand, paused time.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod filter;
mod layering;
mod main_path;
mod memory_model;
mod start_checks;
mod start_order;
mod start_table;
mod storage;
mod support;
mod takeover;
