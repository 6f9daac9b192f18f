//! Tests without a server: a scripted feed, a storage that fails on demand, paused time.

mod main_path;
mod start_checks;
mod start_order;
mod start_table;
mod support;
mod takeover;
