//! The subscriber's process as the demo holds it: started, listened to, killed.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::Failed;
use super::account::Account;
use super::subscriber::READY;
use crate::checkpoint::Checkpoint;

const PATIENCE: Duration = Duration::from_secs(30);

/// The demo kills its subscriber on purpose, and gives it a small oplog on purpose: that the next one takes over at once
/// is no news, nor is that a second is half of what the oplog holds.
const LOGGED: &str = "warn,mongosub::run::start=error,mongosub::run::window=error";

pub(super) struct Subscriber {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// Its end tells the subscriber that the demo is gone.
    _stdin: Option<ChildStdin>,
}

impl Subscriber {
    /// Starts one, and waits until its cursor is open and its start recorded.
    pub(super) async fn start(uri: &str, db: &str) -> Result<Self, Failed> {
        let program = std::env::current_exe().map_err(|error| format!("this program cannot find itself: {error}"))?;
        let process = Command::new(program)
            .args(["demo-subscriber", "--db", db])
            .env("MONGOSUB_DEMO_URI", uri)
            .env("RUST_LOG", std::env::var("RUST_LOG").unwrap_or_else(|_| LOGGED.into()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn();
        let mut process = process.map_err(|error| format!("the subscriber cannot be started: {error}"))?;
        let stdout = process.stdout.take().ok_or("the subscriber has no output")?;
        let stdin = process.stdin.take();
        let mut subscriber = Self { process, lines: BufReader::new(stdout).lines(), _stdin: stdin };
        match subscriber.line().await? {
            Some(line) if line == READY => Ok(subscriber),
            _ => Err("the subscriber could not start; what it said is above".into()),
        }
    }

    /// Takes the next handled order into the account.
    pub(super) async fn handled(&mut self, account: &mut Account) -> Result<(), Failed> {
        match self.line().await? {
            Some(line) => take(&line, account),
            None => Err("the subscriber ended by itself".into()),
        }
    }

    /// Kills it with SIGKILL, and takes what it had handled by then into the account.
    pub(super) async fn kill(mut self, account: &mut Account) -> Result<(), Failed> {
        self.process.kill().await.map_err(|error| format!("the subscriber cannot be killed: {error}"))?;
        while let Some(line) = self.line().await? {
            take(&line, account)?;
        }
        Ok(())
    }

    async fn line(&mut self) -> Result<Option<String>, Failed> {
        let line = tokio::time::timeout(PATIENCE, self.lines.next_line()).await;
        let line = line.map_err(|_| format!("the subscriber has said nothing for {} s", PATIENCE.as_secs()))?;
        Ok(line.map_err(|error| format!("the subscriber cannot be read: {error}"))?)
    }
}

fn take(line: &str, account: &mut Account) -> Result<(), Failed> {
    let (order, position) = line.split_once(' ').ok_or_else(|| format!("the subscriber said {line:?}"))?;
    let order = order.parse().map_err(|_| format!("the subscriber said {line:?}"))?;
    let Ok(position) = position.parse::<Checkpoint>();
    account.take(order, position);
    Ok(())
}
