//! Tests without a server: a scripted feed, a storage that fails on demand, paused time.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod barrier;
mod batches;
mod blocking;
mod careful;
mod changes;
mod crash;
mod dead_letter_storage;
mod dead_letters;
mod failure_policy;
mod fan_out;
mod filter;
mod handler_faults;
mod hold;
mod interleavings;
mod layering;
mod life;
mod main_path;
mod memory_model;
mod parking;
mod pulled;
mod quiet;
mod readme;
mod runbook;
mod saving;
mod source_faults;
mod start_checks;
mod start_order;
mod start_table;
mod status;
mod storage;
mod store_faults;
mod support;
mod takeover;
mod transactions;
