//! Real servers for tests, and the harness that runs the tests against them.
//!
//! `choice` says where a server comes from, `options` and `node` start one `mongod` as a container or as a process, `server`
//! makes a deployment of it, `pool` shares those that no test breaks. `faults` breaks them, `links` cuts the network between them. `run` and `guard` see to it that
//! nothing is left behind, `child` starts this binary again in another role, `harness` turns an async body into a trial.
//!
//! Environment:
//!
//! * `MONGOSUB_TEST_SERVER` = `container`, `process` or a `mongodb://` URI. Unset: containers when an engine answers,
//!   otherwise processes, which the first line of output says. With a URI the shared plain server is that one; tests that
//!   need a server of another kind, or one to break, start it as if the variable were not set.
//! * `MONGOSUB_MONGO_VERSION` = a version that `docker/mongod.sh` or the official image knows.
#![allow(dead_code, unused_imports, reason = "a vocabulary for tests; not every test binary uses all of it")]

pub mod background;
pub mod child;
pub mod choice;
pub mod container;
pub mod faults;
pub mod guard;
pub mod harness;
pub mod links;
pub mod node;
pub mod options;
pub mod pool;
pub mod process;
pub mod run;
pub mod server;
pub mod wait;

pub use child::Child;
pub use faults::{FailMode, FailPoint};
pub use harness::{Context, LIMIT, on_any_server, test, test_within};
pub use options::{ADMIN, Options, User, WRITER};
pub use pool::{Fixture, Kind};
pub use server::Server;
pub use wait::{wait_for, wait_until};
