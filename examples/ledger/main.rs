//! Account totals, kept from a stream of transfers by a process that is killed again and again: with the position in
//! another place than the totals, with it kept beside them, and with both in one transaction. The first are too high, the
//! others exact.
//!
//! `cargo run --example ledger`; it starts a server as the tests do, and takes it away again. It ends with 0 only if the
//! ledgers are as said. `LEDGER_KILLS` is how often it kills, 30 by default.

#[path = "../../tests/support/mod.rs"]
mod support;

mod books;
mod play;
mod table;

use std::process::ExitCode;

use support::{Options, Server};

fn main() -> ExitCode {
    support::harness::program(ledger, &[("ledger", books::keep)])
}

async fn ledger() -> anyhow::Result<()> {
    let kills = match std::env::var("LEDGER_KILLS") {
        Ok(kills) => kills.parse()?,
        Err(_) => 30,
    };
    let server = Server::own(Options::default()).await;
    let client = server.client().await;
    let outcome = play::play(&server.uri(), &client.database("ledger"), kills).await?;
    // Else its tasks may find the runtime gone, and say so at length.
    client.shutdown().await;
    println!("{}", table::of(&outcome));
    anyhow::ensure!(outcome.is_as_said(), "the ledgers are not as said");
    Ok(())
}
