//! Tests without a server: a scripted feed, a storage that fails on demand, paused time.

mod main_path;
mod support;
