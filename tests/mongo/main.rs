//! Tests against real replica sets; `tests/support` says where those come from.
//!
//! `cargo test --test mongo -- part of a name` runs some of them. Four run at a time unless `--test-threads` says otherwise.
#![allow(unreachable_pub, reason = "a test binary exports nothing; `pub` here means: for the other modules")]
#![allow(clippy::unwrap_used, reason = "all of this is tests")]

mod fixture;
mod hole;
mod kill;
mod quiet;
mod reopen;
mod rights;
mod seen;
#[path = "../support/mod.rs"]
mod support;

use std::process::ExitCode;

/// What a child process of these tests can be told to do.
const ROLES: &[support::child::Role] =
    &[("test-run", fixture::test_run), ("killed-subscriber", kill::play), ("talk", rights::talk)];

fn tests() -> Vec<libtest_mimic::Trial> {
    [fixture::tests(), hole::tests(), kill::tests(), quiet::tests(), reopen::tests(), rights::tests()]
        .into_iter()
        .flatten()
        .collect()
}

fn main() -> ExitCode {
    support::harness::main(tests, ROLES)
}
