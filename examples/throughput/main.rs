//! Measures the library against the driver on one server, interleaved in one process, and prints one line a figure
//! (`name value unit`, a median, with its spread and rounds behind it) and one line a ratio.
//!
//! `cargo run --release --example throughput`; it starts a server as the tests do. Figures of different runs or machines
//! do not compare; the ratios do.
#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a program that measures")]

mod feed;
mod figures;
mod kills;
mod latency;
#[path = "../../tests/support/mod.rs"]
mod support;
mod ways;

use std::process::ExitCode;

use mongosub::SaveMode;

use feed::Feed;
use figures::{Figures, ROUNDS, ROUNDS_AT_MOST, ratio};
use support::{Options, Server};

fn main() -> ExitCode {
    support::harness::program(measure, kills::ROLES)
}

async fn measure() -> anyhow::Result<()> {
    let options = Options { oplog_megabytes: 2048, cache_megabytes: 1024, ..Options::default() };
    let server = Server::own(options).await;
    let client = server.client().await;
    let mut figures = Figures::default();
    for (name, bytes, events) in [("150b", 150, 200_000), ("1k", 1024, 200_000), ("10k", 10 * 1024, 20_000)] {
        let feed = Feed::write(&client, name, bytes, events).await?;
        for round in 0..ROUNDS_AT_MOST {
            replay(&feed, round, &mut figures).await?;
            if round + 1 >= ROUNDS && figures.agree(name) {
                break;
            }
        }
        if name == "1k" {
            for kill in 0..ROUNDS_AT_MOST as u64 {
                kills::kill(&server, &feed, 10_000 + kill * 4321, &mut figures).await?;
            }
        }
        if name == "10k" {
            for _ in 0..ROUNDS {
                kills::peak(&server, &feed, &mut figures).await?;
            }
        }
        eprintln!("{name} is measured");
    }
    for round in 0..ROUNDS_AT_MOST {
        latency::round(&client, &mut figures).await?;
        if round + 1 >= ROUNDS && figures.agree("latency_ours") && figures.agree("latency_driver") {
            break;
        }
    }
    figures.print();
    let beside = |name: &str, one: &str, other: &str, goal: &str| ratio(name, figures.ratio(one, other), goal);
    beside("reader_vs_driver", "1k_reader", "1k_driver", ">= 2.2");
    beside("reader_vs_raw", "1k_reader", "1k_raw", ">= 0.97");
    beside("durable_vs_reader", "1k_durable", "1k_reader", ">= 0.90");
    beside("document_vs_driver", "1k_document", "1k_driver", ">= 1.5");
    beside("durable_vs_sequential", "1k_durable", "1k_sequential", ">= 80");
    beside("latency_p50", "latency_ours_p50", "latency_driver_p50", "<= 1.05");
    beside("latency_p99", "latency_ours_p99", "latency_driver_p99", "<= 1.2");
    ratio("peak_rss_10k_mb", figures.median("peak_rss_10k"), "<= 20");
    ratio("repeat_ms", figures.median("repeat_ms"), "<= 20");
    Ok(())
}

const WAYS: [&str; 6] = ["reader", "raw", "durable", "driver", "document", "sequential"];

/// One round of every way, one after the other, beginning with another one each time: whatever one leaves behind in the
/// server does not always meet the same.
async fn replay(feed: &Feed, round: usize, figures: &mut Figures) -> anyhow::Result<()> {
    let few = Feed { events: 1000, ..feed.clone() };
    for at in 0..WAYS.len() {
        let way = WAYS[(round + at) % WAYS.len()];
        let events = if way == "sequential" { few.events } else { feed.events };
        let before = ways::cpu();
        let took = match way {
            "reader" => ways::reader(feed).await?,
            "raw" => ways::raw(feed).await?,
            "durable" => ways::durable(feed, SaveMode::WriteBehind, ways::one_field).await?,
            "driver" => ways::driver(feed).await?,
            "document" => ways::durable(feed, SaveMode::WriteBehind, ways::document).await?,
            _ => ways::durable(&few, SaveMode::WriteThrough, ways::one_field).await?,
        };
        let (cpu, name) = (ways::cpu().saturating_sub(before), feed.name);
        figures.take(format!("{name}_{way}"), events as f64 / took.as_secs_f64() / 1000.0, "kevents/s");
        figures.take(format!("cpu_{name}_{way}"), cpu.as_secs_f64() * 1e6 / events as f64, "us/event");
    }
    Ok(())
}
