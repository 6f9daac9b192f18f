//! Measures the library against the driver on one server, interleaved, and prints one line a figure and a ratio.
//!
//! `cargo run --release --example throughput`; it starts a server as the tests do. Figures of different runs or machines do
//! not compare; the ratios do.
#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a program that measures")]

mod figures;
#[path = "../../tests/support/mod.rs"]
mod support;
mod ways;

use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mongosub::SaveMode;
use mongosub::bson::{Document, doc};
use mongosub::mongodb::Client;

use figures::{Figures, ROUNDS, ROUNDS_AT_MOST, ratio};
use support::{Options, Server};
use ways::Feed;

fn main() -> ExitCode {
    support::harness::program(measure, &[])
}

async fn measure() -> anyhow::Result<()> {
    let server = Server::own(Options { oplog_megabytes: 2048, ..Options::default() }).await;
    let client = server.client().await;
    let mut figures = Figures::default();
    for (name, bytes, events) in [("150b", 150, 60_000), ("1k", 1024, 40_000), ("10k", 10 * 1024, 6_000)] {
        let feed = write(&client, name, bytes, events).await?;
        for round in 0..ROUNDS_AT_MOST {
            replay(&feed, name, &mut figures).await?;
            if round + 1 >= ROUNDS && figures.agree(name) {
                break;
            }
        }
        eprintln!("{name} is measured");
    }
    figures.print();
    let of = |name: &str| figures.median(name);
    ratio("reader_vs_driver", of("1k_reader") / of("1k_driver"), ">= 2.2");
    ratio("reader_vs_raw", of("1k_reader") / of("1k_raw"), ">= 0.97");
    ratio("durable_vs_reader", of("1k_durable") / of("1k_reader"), ">= 0.90");
    ratio("document_vs_driver", of("1k_document") / of("1k_driver"), ">= 1.5");
    ratio("durable_vs_sequential", of("1k_durable") / of("1k_sequential"), ">= 80");
    Ok(())
}

/// Writes the events to be replayed.
async fn write(client: &Client, name: &str, bytes: usize, events: u64) -> anyhow::Result<Feed> {
    let database = client.database(&format!("throughput_{name}"));
    let orders = database.collection::<Document>("orders");
    orders.insert_one(doc! { "_id": "before" }).await?;
    let hello = client.database("admin").run_command(doc! { "hello": 1 }).await?;
    let start = hello.get_document("lastWrite")?.get_document("majorityOpTime")?.get_timestamp("ts")?;
    let start = mongosub::bson::Timestamp { time: start.time, increment: start.increment + 1 };
    let mut id = 0_i64;
    // Fields as an order has them, and filling up to the size.
    let filling = "x".repeat(bytes.saturating_sub(120));
    while id < i64::try_from(events)? {
        let batch: Vec<Document> = (id..id + 1000)
            .map(|id| doc! { "_id": id, "status": "paid", "total": id * 10, "customer": "c-1234", "filling": &filling })
            .collect();
        id += 1000;
        orders.insert_many(batch).await?;
    }
    Ok(Feed { database, orders, start, events })
}

async fn replay(feed: &Feed, name: &str, figures: &mut Figures) -> anyhow::Result<()> {
    let rate = |events: u64, took: Duration| events as f64 / took.as_secs_f64() / 1000.0;
    macro_rules! way {
        ($way:literal, $feed:expr, $run:expr) => {{
            ways::ENDING.store(0, Ordering::Relaxed);
            let (begun, cpu) = (Instant::now(), ways::cpu());
            $run.await?;
            let ending = Duration::from_nanos(ways::ENDING.load(Ordering::Relaxed));
            let took = begun.elapsed() - ending;
            figures.take(format!("{name}_{}", $way), rate($feed.events, took), "kevents/s");
            let micros = (ways::cpu() - cpu).as_secs_f64() * 1e6 / $feed.events as f64;
            figures.take(format!("cpu_{name}_{}", $way), micros, "us/event");
        }};
    }
    way!("reader", feed, ways::reader(feed));
    way!("raw", feed, ways::raw(feed));
    way!("durable", feed, ways::durable(feed, SaveMode::WriteBehind, false));
    way!("driver", feed, ways::driver(feed));
    way!("document", feed, ways::durable(feed, SaveMode::WriteBehind, true));
    let few = Feed { events: 1000, ..feed.clone() };
    way!("sequential", few, ways::durable(&few, SaveMode::WriteThrough, false));
    Ok(())
}
