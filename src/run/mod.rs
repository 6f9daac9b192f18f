//! A run: reads, hands out, keeps the position, shows how it fares. It knows the seams alone.

pub(crate) mod anew;
pub(crate) mod barrier;
pub(crate) mod changes;
pub(crate) mod core;
pub(crate) mod deliver;
pub(crate) mod desk;
pub(crate) mod durable;
pub(crate) mod failing;
pub(crate) mod hand_out;
pub(crate) mod identity;
pub(crate) mod maybe_seen;
pub(crate) mod open;
pub(crate) mod policy;
pub(crate) mod progress;
pub(crate) mod repeats;
pub(crate) mod saver;
pub(crate) mod settings;
pub(crate) mod start;
pub(crate) mod waiters;
pub(crate) mod watchdog;
pub(crate) mod wind_down;
pub(crate) mod window;
pub(crate) mod work;
