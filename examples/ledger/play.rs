//! Writes transfers while the process that keeps the ledgers is killed, lets it finish at last, and adds up.

use std::collections::{BTreeMap, HashSet};
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use futures::TryStreamExt;
use mongosub::bson::{Document, doc};
use mongosub::mongodb::options::{CollectionOptions, WriteConcern};
use mongosub::mongodb::{Collection, Database};
use serde::Deserialize;

use super::books::{BOOKS, Book, Life, Transfer, Word};
use crate::support::Child;

pub const ACCOUNTS: [&str; 6] = ["ann", "bob", "cid", "dora", "eve", "finn"];
/// One life: a process started, connected, and well under way.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a ledger says of an account.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct Total {
    pub total: i64,
    pub transfers: i64,
}

pub type Totals = BTreeMap<String, Total>;

#[derive(Debug)]
pub struct Outcome {
    pub kills: usize,
    pub truth: Totals,
    pub books: Vec<(Book, Totals)>,
}

impl Outcome {
    /// The plain ledger counts repeats, the others none.
    pub fn is_as_said(&self) -> bool {
        self.books.iter().all(|(book, totals)| match book {
            Book::Plain => self.is_too_high(totals),
            Book::Kept | Book::InTransaction => *totals == self.truth,
        })
    }

    /// No account has too little, and one at least too much.
    fn is_too_high(&self, totals: &Totals) -> bool {
        let all = self.truth.iter().map(|(account, truth)| (totals.get(account).copied().unwrap_or_default(), truth));
        let more = all.clone().any(|(total, truth)| total.total > truth.total);
        more && all.clone().all(|(total, truth)| total.total >= truth.total)
    }
}

/// The whole play. The database is empty.
pub async fn play(uri: &str, database: &Database, kills: usize) -> anyhow::Result<Outcome> {
    let majority = CollectionOptions::builder().write_concern(WriteConcern::majority()).build();
    let transfers = database.collection_with_options::<Transfer>("transfers", majority);
    for book in BOOKS {
        database.create_collection(book.totals(database).name()).await?;
    }
    // Their starts are stored before the first transfer is written.
    finish(Child::start("ledger", &life(uri, database, true))).await?;
    let mut outcome = Outcome { kills: 0, truth: Totals::new(), books: Vec::new() };
    // Again if it was right by luck: no transfer has come twice.
    while outcome.kills == 0 || (!outcome.is_as_said() && outcome.kills < 3 * kills) {
        let writer = Writer::start(transfers.clone(), sum(&outcome.truth).transfers);
        for kill in 1..=kills {
            let mut child = Child::start("ledger", &life(uri, database, false));
            under_way(&mut child).await?;
            tokio::time::sleep(Duration::from_micros(fastrand::u64(..100_000))).await;
            child.kill().await;
            outcome.kills += 1;
            progress(kill, kills);
        }
        writer.stop().await?;
        finish(Child::start("ledger", &life(uri, database, true))).await?;
        outcome.truth = truth(&transfers).await?;
        outcome.books.clear();
        for book in BOOKS {
            outcome.books.push((book, totals(&book.totals(database)).await?));
        }
    }
    Ok(outcome)
}

fn life(uri: &str, database: &Database, last: bool) -> Life {
    Life { uri: uri.to_owned(), database: database.name().to_owned(), last }
}

/// The last life: everything that was written is entered, and it ends by itself.
async fn finish(mut child: Child) -> anyhow::Result<()> {
    let ended = tokio::time::timeout(PATIENCE, async {
        while child.line().await.is_some() {}
        child.wait().await
    });
    anyhow::ensure!(ended.await.context("the last life does not end")?.success(), "the last life failed");
    Ok(())
}

/// Waits until every ledger has been written to in this life.
async fn under_way(child: &mut Child) -> anyhow::Result<()> {
    let begun = async {
        let mut begun = HashSet::new();
        while begun.len() < BOOKS.len() {
            let line = child.line().await.context("it ended by itself")?;
            let Word::Begun(book) = serde_json::from_str(&line)?;
            begun.insert(book);
        }
        Ok(())
    };
    tokio::time::timeout(PATIENCE, begun).await.context("nothing is handled")?
}

async fn totals(collection: &Collection<Document>) -> anyhow::Result<Totals> {
    let mut found = collection.find(doc! {}).await?;
    let mut totals = Totals::new();
    while let Some(total) = found.try_next().await? {
        let number = |field| total.get_i64(field).unwrap_or_default();
        let total_of = Total { total: number("total"), transfers: number("transfers") };
        totals.insert(total.get_str("_id")?.to_owned(), total_of);
    }
    Ok(totals)
}

/// What the transfers add up to.
async fn truth(transfers: &Collection<Transfer>) -> anyhow::Result<Totals> {
    let mut found = transfers.find(doc! {}).await?;
    let mut totals = Totals::new();
    while let Some(transfer) = found.try_next().await? {
        let total = totals.entry(transfer.to).or_default();
        total.total += transfer.amount;
        total.transfers += 1;
    }
    Ok(totals)
}

pub fn sum(totals: &Totals) -> Total {
    totals.values().fold(Total::default(), |sum, total| Total {
        total: sum.total + total.total,
        transfers: sum.transfers + total.transfers,
    })
}

fn progress(killed: usize, kills: usize) {
    let mut terminal = std::io::stderr();
    if terminal.is_terminal() {
        let end = if killed >= kills { "\n" } else { "" };
        // Whoever looked on may have gone.
        let _ = write!(terminal, "\rkilled {killed} of {kills} times{end}");
        let _ = terminal.flush();
    }
}

/// Writes one transfer after the other, each acknowledged by a majority before the next.
struct Writer {
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<anyhow::Result<()>>,
}

impl Writer {
    fn start(transfers: Collection<Transfer>, first: i64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let end = stop.clone();
        let task = tokio::spawn(async move {
            for id in first.. {
                if end.load(Ordering::Relaxed) {
                    break;
                }
                let to = ACCOUNTS[fastrand::usize(..ACCOUNTS.len())].to_owned();
                transfers.insert_one(Transfer { id, to, amount: fastrand::i64(1..100) }).await?;
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            Ok(())
        });
        Self { stop, task }
    }

    async fn stop(self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await?
    }
}
