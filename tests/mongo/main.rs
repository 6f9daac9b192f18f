//! Tests against real replica sets; `tests/support` says where those come from.
//!
//! `cargo test --test mongo -- part of a name` runs some of them. Four run at a time unless `--test-threads` says otherwise.
#![allow(unreachable_pub, reason = "a test binary exports nothing; `pub` here means: for the other modules")]
#![allow(clippy::unwrap_used, reason = "all of this is tests")]

mod bad_input;
mod demo;
mod filter;
mod fixture;
mod hole;
mod kill;
mod matrix;
mod model;
mod occurrent;
mod own_writes;
mod quiet;
mod reopen;
mod rights;
mod seen;
mod storage;
#[path = "../support/mod.rs"]
mod support;
mod two_processes;

use std::process::ExitCode;

/// What a child process of these tests can be told to do.
const ROLES: &[support::child::Role] = &[
    ("test-run", fixture::test_run),
    ("killed-subscriber", kill::play),
    ("talk", rights::talk),
    ("one-of-two", two_processes::play),
];

fn tests() -> Vec<libtest_mimic::Trial> {
    [
        // First, because they are long.
        matrix::long(),
        bad_input::tests(),
        demo::tests(),
        filter::tests(),
        fixture::tests(),
        hole::tests(),
        kill::tests(),
        matrix::tests(),
        model::tests(),
        occurrent::tests(),
        own_writes::tests(),
        quiet::tests(),
        reopen::tests(),
        rights::tests(),
        storage::tests(),
        two_processes::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn main() -> ExitCode {
    support::harness::main(tests, ROLES)
}
