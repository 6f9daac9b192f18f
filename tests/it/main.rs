//! Tests without a server: scripted feeds and paused time.

mod storage;
