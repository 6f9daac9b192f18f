//! Tests without a server: a scripted feed, a storage that fails on demand, paused time.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod main_path;
mod start_checks;
mod start_order;
mod start_table;
mod support;
mod takeover;
