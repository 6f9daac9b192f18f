//! The example `ledger`, played with fewer kills: it is as it says, and leaves nothing behind.

#[path = "../../examples/ledger/books.rs"]
mod books;
#[path = "../../examples/ledger/play.rs"]
mod play;
#[path = "../../examples/ledger/table.rs"]
mod table;

use libtest_mimic::Trial;

pub use self::books::keep;
use crate::support::{Fixture, test};

pub fn tests() -> Vec<Trial> {
    vec![test(
        "the ledger without its position is too high after kills, and exact with it and in transactions",
        |ctx| async move {
            let Fixture { server, database, .. } = ctx.plain().await;
            let outcome = play::play(&server.uri(), &database, 5).await?;
            let said = table::of(&outcome);
            assert!(outcome.is_as_said(), "{said}");
            let plain = said.contains("(a) $inc alone: too high");
            let exact = said.matches(": exact").count();
            assert!(plain && exact == 2, "{said}");
            anyhow::Ok(())
        },
    )]
}
