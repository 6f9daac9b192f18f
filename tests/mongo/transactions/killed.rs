//! Transfers between accounts, entered in transactions by a process that is killed with SIGKILL again and again: in the end
//! every balance is exact, and at every moment the balances add up.

use std::{env, time::Duration};

use futures::TryStreamExt;
use libtest_mimic::Trial;
use mongosub::{
    Delivery, Failure, Transaction,
    bson::{Document, doc},
    mongodb::{Client, Collection, Database},
};
use serde::{Deserialize, Serialize};

use crate::seen::{PATIENCE, subscriptions, things};
use crate::support::{Child, Fixture, LIMIT, child, test_within};

/// How often it is killed, unless `MONGOSUB_KILLS` says otherwise.
const KILLS: usize = 50;
const ACCOUNTS: i32 = 5;

pub fn tests() -> Vec<Trial> {
    let kills = env::var("MONGOSUB_KILLS").ok().map_or(KILLS, |kills| kills.parse().expect("a number of kills"));
    let within = Duration::from_secs(5) * u32::try_from(kills).unwrap_or(u32::MAX);
    vec![test_within(
        within.max(LIMIT),
        "transfers entered in transactions by a process killed again and again add up exactly",
        move |ctx| async move { killed(ctx.plain().await, kills).await },
    )]
}

#[derive(Serialize, Deserialize)]
struct Life {
    uri: String,
    database: String,
    every: u32,
    last: bool,
}

/// The role: enters transfers until it is killed, or everything is entered.
pub fn play(input: serde_json::Value) -> anyhow::Result<()> {
    let life: Life = serde_json::from_value(input)?;
    tokio::runtime::Runtime::new()?.block_on(async {
        let client = Client::with_uri_str(&life.uri).await?;
        let database = client.database(&life.database);
        let accounts = database.collection::<Document>("accounts");
        let handler =
            move |transaction: Transaction, delivery: Delivery| enter(transaction, delivery, accounts.clone());
        let action = subscriptions(&database).subscribe_in_transaction("transfers_v1", handler);
        let subscription = action.save_every(life.every).await?;
        if life.last {
            subscription.caught_up().await?;
            subscription.shutdown().await?;
            return Ok(());
        }
        anyhow::bail!("stopped: {}", subscription.stopped().await)
    })
}

async fn enter(
    mut transaction: Transaction,
    delivery: Delivery,
    accounts: Collection<Document>,
) -> Result<(), Failure> {
    let transfer: Document = delivery.event.full_document()?.ok_or("a transfer without a document")?;
    let amount = transfer.get_i32("amount")?;
    for (account, change) in [("from", -amount), ("to", amount)] {
        let account = doc! { "_id": transfer.get_i32(account)? };
        let change = doc! { "$inc": { "balance": change, "entries": 1 } };
        accounts.update_one(account, change).session(&mut *transaction).await?;
    }
    // Without a parent there is nothing left to do.
    child::say(&transfer.get_i32("_id")?).unwrap_or_else(|_| std::process::exit(1));
    Ok(())
}

async fn killed(Fixture { server, database, .. }: Fixture, kills: usize) -> anyhow::Result<()> {
    let seed = fastrand::u64(..);
    println!("transactions: {kills} kills, seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let accounts = database.collection::<Document>("accounts");
    accounts.insert_many((0..ACCOUNTS).map(|id| doc! { "_id": id, "balance": 0, "entries": 0 })).await?;
    database.create_collection("things").await?;
    let life = |every, last| Life { uri: server.uri(), database: database.name().into(), every, last };
    // Its start is stored before the first transfer.
    finish(Child::start("transfers", &life(1, true))).await?;
    let (mut written, mut entered) = (0, 0);
    for kill in 0..kills {
        let mut child = Child::start("transfers", &life(random.u32(1..=5), false));
        let batch: Vec<Document> = (0..30).map(|at| transfer(written + at, &mut random)).collect();
        written += 30;
        things(&database).insert_many(batch).await?;
        let first = tokio::time::timeout(PATIENCE, child.json::<i32>()).await;
        let first = first.unwrap_or_else(|_| panic!("kill {kill} (seed {seed}): nothing is entered"));
        entered += 1;
        assert!(first < written);
        tokio::time::sleep(Duration::from_micros(random.u64(..40_000))).await;
        child.kill().await;
        while let Some(line) = child.line().await {
            entered += i32::from(line.parse::<i32>().is_ok());
        }
        assert_eq!(balances(&database).await?.iter().sum::<i32>(), 0, "kill {kill} (seed {seed}): half a transfer");
    }
    finish(Child::start("transfers", &life(1, true))).await?;
    let mut expected = vec![0; usize::try_from(ACCOUNTS)?];
    let mut found = things(&database).find(doc! {}).await?;
    while let Some(transfer) = found.try_next().await? {
        let amount = transfer.get_i32("amount")?;
        expected[usize::try_from(transfer.get_i32("from")?)?] -= amount;
        expected[usize::try_from(transfer.get_i32("to")?)?] += amount;
    }
    assert_eq!(balances(&database).await?, expected, "seed {seed}");
    let entries = accounts.aggregate([doc! { "$group": { "_id": null, "all": { "$sum": "$entries" } } }]).await?;
    let entries: Vec<Document> = entries.try_collect().await?;
    assert_eq!(entries[0].get_i32("all")?, 2 * written, "seed {seed}");
    println!("transactions: {kills} kills over {written} transfers, every balance exact; at least {entered} calls");
    Ok(())
}

fn transfer(id: i32, random: &mut fastrand::Rng) -> Document {
    let from = random.i32(0..ACCOUNTS);
    let to = (from + random.i32(1..ACCOUNTS)) % ACCOUNTS;
    doc! { "_id": id, "from": from, "to": to, "amount": random.i32(1..100) }
}

async fn balances(database: &Database) -> anyhow::Result<Vec<i32>> {
    let accounts = database.collection::<Document>("accounts").find(doc! {}).sort(doc! { "_id": 1 }).await?;
    let accounts: Vec<Document> = accounts.try_collect().await?;
    Ok(accounts.iter().map(|account| account.get_i32("balance")).collect::<Result<_, _>>()?)
}

async fn finish(mut child: Child) -> anyhow::Result<()> {
    let ended = tokio::time::timeout(PATIENCE, async {
        while child.line().await.is_some() {}
        child.wait().await
    });
    anyhow::ensure!(ended.await?.success(), "the last life failed");
    Ok(())
}
