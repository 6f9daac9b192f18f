//! Tests without a server: a scripted feed, a storage that fails on demand, paused time.

mod crash;
mod handler_faults;
mod interleavings;
mod life;
mod main_path;
mod memory_model;
mod quiet;
mod saving;
mod source_faults;
mod status;
mod store_faults;
mod support;
