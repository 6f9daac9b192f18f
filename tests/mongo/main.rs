//! Tests against real replica sets; `tests/support` says where those come from.
//!
//! `cargo test --test mongo -- part of a name` runs some of them, `-- '[any server]'` those that hold on every version of
//! the server and that its version may bear on: `on_any_server` marks them. Four run at a time unless `--test-threads`
//! says otherwise.
#![allow(unreachable_pub, reason = "a test binary exports nothing; `pub` here means: for the other modules")]
#![allow(clippy::unwrap_used, reason = "all of this is tests")]

mod aborting;
mod bad_input;
mod bounds;
mod changes;
mod dead_letters;
mod demo;
mod faults;
mod filter;
mod fixture;
mod hole;
mod kill;
mod ledger;
mod matrix;
mod model;
mod occurrent;
mod own_writes;
mod quiet;
mod reopen;
mod rights;
mod seen;
mod source;
mod storage;
mod subscribe_command;
#[path = "../support/mod.rs"]
mod support;
mod transactions;
mod two_processes;

use std::process::ExitCode;

use support::on_any_server;

/// What a child process of these tests can be told to do.
const ROLES: &[support::child::Role] = &[
    ("aborting", aborting::play),
    ("bounds", bounds::play),
    ("test-run", fixture::test_run),
    ("killed-subscriber", kill::play),
    ("killed-with-letters", dead_letters::play),
    ("talk", rights::talk),
    ("one-of-two", two_processes::play),
    ("ledger", ledger::keep),
    ("transfers", transactions::play),
];

fn tests() -> Vec<libtest_mimic::Trial> {
    [
        // First, because they are long.
        matrix::long(),
        aborting::tests(),
        on_any_server(bad_input::tests()),
        bounds::tests(),
        on_any_server(changes::tests()),
        changes::with_small_oplogs(),
        on_any_server(dead_letters::tests()),
        demo::tests(),
        faults::tests(),
        on_any_server(filter::tests()),
        fixture::tests(),
        on_any_server(hole::tests()),
        on_any_server(kill::tests()),
        on_any_server(ledger::tests()),
        matrix::tests(),
        model::tests(),
        on_any_server(occurrent::tests()),
        on_any_server(own_writes::tests()),
        on_any_server(quiet::tests()),
        on_any_server(reopen::tests()),
        on_any_server(rights::tests()),
        on_any_server(storage::tests()),
        source::tests(),
        subscribe_command::tests(),
        transactions::tests(),
        on_any_server(two_processes::tests()),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn main() -> ExitCode {
    support::harness::main(tests, ROLES)
}
