//! What a run does for each event, function by function: progress, the order of positions, and the fields of an event.
//!
//! `cargo bench`. Whole subscriptions are measured by `cargo run --release --example throughput`.
#![allow(missing_docs, clippy::unwrap_used, reason = "a program that measures")]

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use mongosub::bson::{Document, Timestamp, doc};
use mongosub::{ChangeEvent, Checkpoint, Kind, Token, memory};

/// What `progress` knows of the crate.
mod checkpoint {
    pub use mongosub::{Checkpoint, Kind, Token};
}
mod hold {
    /// As the crate has it.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Place {
        pub seq: u64,
        pub events: u64,
        pub epoch: u32,
        pub position: super::Checkpoint,
        pub kind: super::Kind,
    }
}
/// Not a part of the public face, so its source is compiled here once more.
#[allow(dead_code, reason = "only what each event meets is measured")]
#[path = "../src/run/progress.rs"]
mod progress;

use progress::Progress;

const READS: u32 = 1000;

/// The position of an event as a server makes it.
fn token(time: u32, index: u32) -> Checkpoint {
    let uuid = "5EED5EED5EED4EED8EED5EED5EED5EED";
    let data =
        format!("82{time:08X}{index:08X}2B042C0100296E5A1004{uuid}463C6F7065726174696F6E547970650046696E73657274");
    Checkpoint::Token(Token::new(data).unwrap())
}

fn progress(criterion: &mut Criterion) {
    let positions: Vec<Checkpoint> = (0..READS).map(|n| token(1_767_225_600, n)).collect();
    let mut group = criterion.benchmark_group("progress");
    group.throughput(Throughput::Elements(READS.into()));
    let fresh = || Progress::new(Some(token(1, 1)));
    group.bench_function("one event at a time", |bencher| {
        bencher.iter_batched_ref(
            fresh,
            |progress| {
                for position in &positions {
                    let seq = progress.event(position.clone(), Kind::Event);
                    black_box(progress.settle(seq));
                }
            },
            BatchSize::SmallInput,
        );
    });
    group.bench_function("a thousand in hand, each with a quiet read behind it", |bencher| {
        bencher.iter_batched_ref(
            fresh,
            |progress| {
                let mut seqs = Vec::with_capacity(positions.len());
                for position in &positions {
                    seqs.push(progress.event(position.clone(), Kind::Event));
                    progress.quiet(position.clone());
                }
                for seq in seqs {
                    black_box(progress.settle(seq));
                }
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

fn order(criterion: &mut Criterion) {
    let time = Checkpoint::Time(Timestamp { time: 1_767_225_600, increment: 7 });
    let (first, second) = (token(1_767_225_600, 7), token(1_767_225_600, 8));
    let mut group = criterion.benchmark_group("position order");
    group.bench_function("token and token", |bencher| bencher.iter(|| black_box(&second).is_beyond(black_box(&first))));
    group.bench_function("time and token", |bencher| bencher.iter(|| black_box(&first).is_beyond(black_box(&time))));
    group.finish();
}

fn event(criterion: &mut Criterion) {
    let lines: Vec<Document> =
        (0..7).map(|n| doc! { "sku": format!("sku-{n:05}"), "name": "a thing to be sent", "price": 19.95 }).collect();
    let order = doc! { "status": "paid", "total": 1099, "customer": "c-12", "lines": lines, "note": "x".repeat(300) };
    let event: ChangeEvent = memory::insert(7, order).into();
    let mut group = criterion.benchmark_group("event");
    group.bench_function("token", |bencher| bencher.iter(|| black_box(&event).token().unwrap()));
    group.bench_function("operation", |bencher| bencher.iter(|| black_box(&event).operation().unwrap()));
    group.bench_function("cluster time", |bencher| bencher.iter(|| black_box(&event).cluster_time().unwrap()));
    group.bench_function("document id", |bencher| {
        bencher.iter(|| black_box(&event).document_id::<i32>().unwrap());
    });
    group.bench_function("one field of the full document", |bencher| {
        bencher.iter(|| {
            let document = black_box(&event).raw_full_document().unwrap().unwrap();
            document.get_str("status").unwrap().len()
        });
    });
    group.bench_function("the full document decoded", |bencher| {
        bencher.iter(|| black_box(&event).full_document::<Document>().unwrap());
    });
    group.finish();
}

criterion_group!(functions, progress, order, event);
criterion_main!(functions);
