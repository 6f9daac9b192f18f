//! `mongosub subscribe`: a durable subscription whose handler writes lines. It owns the order of things, from what was
//! typed to the last word; what a line is, how it is written and what the last word says is in the files here.

mod args;
mod ending;
mod extjson;
mod filter;
mod lines;
mod start;
mod stdout;
mod writer;

use std::future::IntoFuture;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bson::Document;
use tokio_util::sync::CancellationToken;

use crate::batch_handler::BatchLimits;
use crate::checkpoint::Checkpoint;
use crate::cli::stop::Signals;
use crate::durable::{DurableSubscriptions, Subscribe};
use crate::error::SubscriptionError;
use crate::mongo::{self, ChangeStreamModel, MongoCheckpointStorage, Unless};
use crate::reason::Reason;
use crate::run::changes::OnInvalidate;
use crate::start::StartAt;
use crate::status::State;
use crate::subscription::Subscription;
pub(super) use args::Args;
use ending::{Ending, Why};
use lines::Lines;
use writer::Writer;

/// How long the cursor may take to be closed at the server; it closes it itself then.
const GOODBYE: Duration = Duration::from_secs(2);

/// Subscribes and writes until there is a reason to end.
pub(super) async fn run(args: Args) -> ExitCode {
    let Ending { sentence, exit_code } = follow(&args).await;
    eprintln!("mongosub subscribe: {sentence}");
    // At once: taken down one by one, tasks of the driver can panic, and a thread that a reader blocks never ends.
    std::process::exit(exit_code.into())
}

async fn follow(args: &Args) -> Ending {
    let id = args.id.as_str();
    let start_at = match usable(args) {
        Ok(start_at) => start_at,
        Err(why) => return Ending::usage(why),
    };
    let signals = Signals::listen();
    let mut signals = match signals {
        Ok(signals) => signals,
        Err(error) => return Ending::failed(format!("signals cannot be listened for: {error}")),
    };
    let reader_gone = CancellationToken::new();
    let writer = stdout::open().and_then(|(out, whole)| Writer::start(out, whole));
    let writer = match writer {
        Ok(writer) => Arc::new(writer),
        Err(error) => return Ending::failed(format!("standard output cannot be written to: {error}")),
    };
    let gone = reader_gone.clone();
    tokio::spawn(async move {
        stdout::reader_gone().await;
        gone.cancel();
    });
    let unless = Unless { app_name: Some("mongosub subscribe"), ..Unless::default() };
    let client = tokio::select! {
        client = mongo::connect(&args.uri, unless) => client,
        signal = signals.next() => return Ending::before_start(id, Why::Signal(signal)),
    };
    let client = match client {
        Ok(client) => client,
        Err(unusable) if unusable.usage => return Ending::usage(format!("--uri: {}", unusable.text)),
        Err(unusable) => return Ending { sentence: unusable.text, exit_code: 3 },
    };

    let database = client.database(&args.db);
    let model = match &args.collection {
        Some(name) => ChangeStreamModel::collection(&database.collection::<Document>(name)),
        None => ChangeStreamModel::database(&database),
    };
    let model = model
        .full_document(args.full_document.into())
        .full_document_before_change(args.full_document_before_change.into());
    let checkpoints = client.database(&args.checkpoints.db).collection::<Document>(&args.checkpoints.collection);
    let subscriptions = DurableSubscriptions::new(model, MongoCheckpointStorage::new(&checkpoints));
    let lines = Lines::new(args.format, writer.clone(), reader_gone.clone());
    let action = subscriptions
        .subscribe_batches(id, BatchLimits::new(lines::TOGETHER), lines)
        .start_at(start_at)
        .on_invalidate(OnInvalidate::Stop);
    let started = tokio::select! {
        started = configured(action, args).into_future() => started,
        signal = signals.next() => return Ending::before_start(id, Why::Signal(signal)),
        () = reader_gone.cancelled() => return Ending::before_start(id, Why::ReaderGone),
    };
    let subscription = match started {
        Ok(subscription) => subscription,
        Err(error) => return Ending::not_started(&error),
    };
    let ended = tokio::select! {
        reason = ended(&subscription) => Err(reason),
        signal = signals.next() => Ok(Why::Signal(signal)),
        () = reader_gone.cancelled() => Ok(Why::ReaderGone),
    };
    let orderly = async {
        let ending = match ended {
            Ok(why) => Ending::shut_down(id, why, wind_down(&subscription, &writer).await),
            Err(reason) => {
                // A stalled one has stored what it could; this ends its run.
                let _ = wind_down(&subscription, &writer).await;
                Ending::of_itself(id, &reason, subscription.status().saved.as_ref())
            }
        };
        drop((subscription, subscriptions));
        mongo::disconnect(client, GOODBYE).await;
        ending
    };
    tokio::select! {
        ending = orderly => ending,
        signal = signals.next() => Ending::at_once(id, signal),
    }
}

/// What no single option can be blamed for.
fn usable(args: &Args) -> Result<StartAt, String> {
    let Args { db, collection, checkpoints, .. } = args;
    if collection.as_ref() == Some(&checkpoints.collection) && *db == checkpoints.db {
        return Err(format!(
            "--checkpoints: {checkpoints} is what is read; the positions need a collection of their own"
        ));
    }
    if let "admin" | "config" | "local" = db.as_str() {
        return Err(format!("--db: {db} is the server's own and has no change stream"));
    }
    start::start_at(&args.start, args.always)
}

fn configured<M, S>(action: Subscribe<M, S>, args: &Args) -> Subscribe<M, S> {
    let Args { filter, pipeline, full_document, .. } = args;
    if matches!(full_document, args::Document::Default)
        && filter::asks_about_full_document(filter.as_ref(), pipeline.as_ref())
    {
        tracing::warn!(
            "the filter asks about fullDocument, which updates do not carry: they are left out, unless --full-document is given"
        );
    }
    action
        .save_every(args.every)
        .save_quiet_position_every(args.quiet_interval)
        .start_when_no_start_position_can_be_recorded(args.allow_unrecorded_start)
        .filter(filter::filter(filter.as_ref(), pipeline.as_ref()))
}

/// Waits until it does not go on by itself.
async fn ended(subscription: &Subscription) -> Reason {
    let mut status = subscription.watch();
    let ended = status.wait_for(|status| matches!(status.state, State::Stalled(_) | State::Stopped(_))).await;
    // A run that has gone without a word was dropped by this process.
    ended.ok().and_then(|status| status.state.reason().cloned()).unwrap_or(Reason::Requested)
}

/// Stores what is written, and sees to it that no line is cut off by the end of the process.
async fn wind_down(subscription: &Subscription, writer: &Writer) -> Result<Option<Checkpoint>, SubscriptionError> {
    let stored = subscription.shutdown().await;
    writer.stop();
    if writer.is_midway() {
        tracing::warn!("a line is half written: its reader is waited for, a second signal ends at once");
        writer.between_lines().await;
    }
    stored
}
