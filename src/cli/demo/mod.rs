//! `mongosub demo`: a short true story on a real replica set, with real processes and a real kill. It owns everything
//! it starts and takes it away again, also after Ctrl-C.

mod account;
mod child;
mod oplog;
mod orders;
mod server;
mod story;
pub(super) mod subscriber;

use std::process::ExitCode;

use mongodb::Database;

use crate::cli::stop;
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

/// What went wrong, in one sentence.
type Failed = String;

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
            Err(error) => Err(format!("signals cannot be listened for: {error}")),
        },
    };
    match played {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(failed) => {
            story.end(&format!("the demo could not go on: {failed}"));
            ExitCode::from(3)
        }
    }
}

/// Gets a server, plays on it, and takes the demo's data away. Dropped half-way, it takes a server of its own away.
async fn play(args: &Args, story: &Story) -> Result<bool, Failed> {
    story.title("mongosub demo: a named subscription that loses nothing");
    let server = server::get(args.uri.as_deref(), story).await?;
    let client = server.client().await?;
    let database = client.database(&format!("mongosub_demo_{:08x}", fastrand::u32(..)));
    // Ctrl-C drops this future: what is inside must then be taken away by who holds it.
    let cleanup = orders::Cleanup::new(database.clone(), server.is_ours());
    let played = acts(args, story, &server, &database).await;
    cleanup.drop_database().await;
    server.end().await;
    played
}

async fn acts(args: &Args, story: &Story, server: &server::Server, database: &Database) -> Result<bool, Failed> {
    let mut play = orders::Play::begin(server, database, story).await?;
    let killed = play.kill_and_resume(args.orders).await?;
    let quiet = play.quiet_and_resume().await?;
    let lost = killed + quiet;
    story.blank();
    let verdict = if lost == 0 { "lost 0: every order came, in order." } else { "ORDERS WERE LOST." };
    story.end(verdict);
    Ok(lost == 0)
}
