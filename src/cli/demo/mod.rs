//! `mongosub demo`: a short true story on a real replica set, with real processes and a real kill. It owns everything
//! it starts and takes it away again, also when it is asked to stop; killed with SIGKILL it leaves its server behind.

mod account;
mod child;
mod container;
mod oplog;
mod orders;
mod process;
mod server;
mod story;
pub(super) mod subscriber;

use std::process::ExitCode;

use mongodb::Database;

use crate::cli::stop;
use orders::{Cleanup, Play};
use server::Server;
use story::Story;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A replica set of your own. Its oplog is left alone, and the demo's database is dropped at the end. Without it
    /// the demo brings a throwaway one.
    #[arg(long, env = "MONGODB_URI", hide_env_values = true)]
    uri: Option<String>,
    /// How many orders are written.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(100..=3000))]
    orders: u32,
}

/// Why the demo cannot go on, in one sentence, and the exit code that follows.
#[derive(Debug)]
pub(super) struct Failed {
    text: String,
    exit_code: u8,
}

impl Failed {
    /// What was typed cannot be used.
    fn usage(text: String) -> Self {
        Self { text, exit_code: 2 }
    }
}

impl<T: Into<String>> From<T> for Failed {
    fn from(text: T) -> Self {
        Self { text: text.into(), exit_code: 3 }
    }
}

/// Plays the demo. Exit code 0 only if nothing was lost.
pub(super) async fn run(args: Args) -> ExitCode {
    let story = Story::new();
    let played = tokio::select! {
        played = play(&args, &story) => played,
        asked = stop::asked() => match asked {
            Ok(()) => {
                story.end("stopped; nothing was left behind");
                return ExitCode::from(stop::INTERRUPTED);
            }
            Err(error) => Err(format!("signals cannot be listened for: {error}").into()),
        },
    };
    match played {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(Failed { text, exit_code }) => {
            eprintln!("mongosub demo: {text}");
            ExitCode::from(exit_code)
        }
    }
}

/// Gets a server, plays on it, and takes the demo's data away. Dropped half-way, it takes a server of its own away.
async fn play(args: &Args, story: &Story) -> Result<bool, Failed> {
    story.title("mongosub demo: a named subscription that loses nothing");
    let server = Server::get(args.uri.as_deref(), story).await?;
    let client = server.client().await?;
    let database = client.database(&format!("mongosub_demo_{:08x}", fastrand::u32(..)));
    // Ctrl-C drops this future: what is inside must then be taken away by who holds it.
    let cleanup = Cleanup::new(database.clone(), server.is_ours());
    let played = acts(args, story, &server, &database).await;
    cleanup.drop_database().await;
    server.end().await;
    played
}

async fn acts(args: &Args, story: &Story, server: &Server, database: &Database) -> Result<bool, Failed> {
    let mut play = Play::begin(server, database, story);
    play.kill_and_resume(args.orders).await?;
    play.quiet_and_resume().await?;
    let (verdict, nothing_lost) = play.verdict();
    story.end(&verdict);
    Ok(nothing_lost)
}
