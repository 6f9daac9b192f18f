//! The `mongosub` command: a front end to the library, one file or folder per command.

mod demo;
mod stop;
mod subscribe;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Durable subscriptions to MongoDB change streams.
#[derive(Debug, Parser)]
#[command(name = "mongosub", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Shows the promise kept: a subscription that loses nothing through kill -9 and an oplog that moved on.
    Demo(demo::Args),
    /// Writes every change of a collection or a database as a line of JSON, at least once and in order.
    Subscribe(Box<subscribe::Args>),
    /// The demo's subscriber, which the demo kills.
    #[command(hide = true)]
    DemoSubscriber(demo::subscriber::Args),
}

/// Runs the command line of this process; the answer is its exit code: 0 for success, 2 for usage, 3 for a
/// subscription or a demo that cannot go on, 130 after Ctrl-C, SIGTERM or SIGHUP, 1 for everything else: that the demo
/// lost something, for instance. `subscribe` takes the first signal as a wish and ends with 0 when it is fulfilled.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    // The demo tells its story itself; a subscription's log says where it starts and how it fares.
    let logged = if matches!(cli.command, Command::Subscribe(_)) { "warn,mongosub=info" } else { "warn" };
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(logged)))
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("mongosub: the runtime cannot start: {error}");
            return ExitCode::from(1);
        }
    };
    runtime.block_on(async {
        match cli.command {
            Command::Demo(args) => demo::run(args).await,
            Command::Subscribe(args) => subscribe::run(*args).await,
            Command::DemoSubscriber(args) => demo::subscriber::run(args).await,
        }
    })
}
