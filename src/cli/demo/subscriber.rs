//! The demo's subscriber: a process of its own, which the demo kills. It prints a line for each order it has handled,
//! and nothing is buffered: a line that was read is an order that was handled.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use bson::Document;
use mongodb::Client;
use tokio::io::AsyncReadExt;

use crate::delivery::Delivery;
use crate::durable::DurableSubscriptions;
use crate::handler::Failure;
use crate::mongo::{ChangeStreamModel, MongoCheckpointStorage};

/// The subscription's name, its version included.
pub(super) const ID: &str = "demo_orders_v1";
pub(super) const ORDERS: &str = "orders";
pub(super) const CHECKPOINTS: &str = "checkpoints";
/// What is printed once the cursor is open and the start recorded.
pub(super) const READY: &str = "ready";
/// Longer than a handler of this size needs, so that a kill comes in the middle of things.
const WORK: Duration = Duration::from_millis(1);

#[derive(Debug, clap::Args)]
pub(in crate::cli) struct Args {
    /// The replica set, and by this variable alone: a command line shows in the list of processes.
    #[arg(env = "MONGOSUB_DEMO_URI", hide_env_values = true)]
    uri: String,
    #[arg(long)]
    db: String,
}

/// Subscribes and prints until it is killed, or until whoever started it is gone.
pub(in crate::cli) async fn run(args: Args) -> ExitCode {
    match subscribe(&args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mongosub demo-subscriber: {error}");
            ExitCode::from(3)
        }
    }
}

async fn subscribe(args: &Args) -> Result<(), String> {
    let client = Client::with_uri_str(&args.uri).await.map_err(|error| super::server::short(&error))?;
    let database = client.database(&args.db);
    let model = ChangeStreamModel::collection(&database.collection::<Document>(ORDERS));
    let storage = MongoCheckpointStorage::new(&database.collection::<Document>(CHECKPOINTS));
    let subscriptions = DurableSubscriptions::new(model, storage).save_quiet_position_every(Duration::from_secs(1));
    let subscription = subscriptions.subscribe(ID, handle).await.map_err(|error| error.to_string())?;
    print(READY)?;
    let (mut stdin, mut nothing) = (tokio::io::stdin(), [0]);
    let reason = tokio::select! {
        reason = subscription.stopped() => reason,
        // The demo holds the other end, and closes it by ending, however it ends.
        _ = stdin.read(&mut nothing) => return Ok(()),
    };
    Err(reason.pointing_to_runbook())
}

async fn handle(delivery: Delivery) -> Result<(), Failure> {
    let order = delivery.event.full_document::<Document>()?.ok_or("an order without a document")?;
    tokio::time::sleep(WORK).await;
    print(&format!("{} {}", order.get_i32("_id")?, delivery.position))?;
    Ok(())
}

fn print(line: &str) -> Result<(), String> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).map_err(|error| format!("nobody listens: {error}"))
}
