//! Tests without a server: scripted feeds and paused time.

mod memory_model;
