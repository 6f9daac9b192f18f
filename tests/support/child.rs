//! This same test binary as a child process: it does what a role says, and can be killed as a whole.

use std::{
    env,
    io::{self, Write},
    process::{ExitStatus, Stdio},
};

use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{ChildStdout, Command},
};

use super::{guard, run};

/// The hidden argument, followed by the role and its input as JSON.
pub const ARGUMENT: &str = "--mongosub-child";

/// A role that a child can play: its name, and what it does with its input.
pub type Role = (&'static str, fn(serde_json::Value) -> anyhow::Result<()>);

/// A running child. Dropped, it is killed.
pub struct Child {
    process: tokio::process::Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Child {
    /// Starts this binary in a role, which `ROLES` in its `main.rs` names.
    pub fn start(role: &str, input: &impl Serialize) -> Self {
        Self::start_with(role, input, |_| {})
    }

    /// The same, with the command adjusted before.
    pub fn start_with(role: &str, input: &impl Serialize, adjust: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(env::current_exe().expect("the path of this binary"));
        command.args([ARGUMENT, role, &serde_json::to_string(input).expect("a role's input")]);
        adjust(&mut command);
        Self::spawn(command)
    }

    /// Any command, the `mongosub` one for instance, labelled so that the guard finds it.
    pub fn spawn(mut command: Command) -> Self {
        let mut process = command
            .env(run::VARIABLE, run::current().id())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the child starts");
        let stdout = process.stdout.take().expect("the child's stdout is a pipe");
        Self { process, lines: BufReader::new(stdout).lines() }
    }

    /// The next line that the child prints; `None` when it has ended.
    pub async fn line(&mut self) -> Option<String> {
        self.lines.next_line().await.expect("the child's output")
    }

    /// The next line, which has to be JSON.
    pub async fn json<T: DeserializeOwned>(&mut self) -> T {
        let line = self.line().await.expect("the child says something before it ends");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    /// `None` once it has been waited for.
    pub fn id(&self) -> Option<u32> {
        self.process.id()
    }

    /// Sends a signal by name: `KILL`, `TERM`, `STOP`, `CONT`.
    pub fn signal(&self, name: &str) {
        guard::signal(name, self.id().expect("the child has not ended")).expect("a signal");
    }

    pub async fn wait(&mut self) -> ExitStatus {
        self.process.wait().await.expect("the child's end")
    }

    /// SIGKILL; returns when it is gone.
    pub async fn kill(&mut self) {
        self.process.kill().await.expect("the child is killed");
    }
}

/// In a child: one line to the parent. An error when there is no parent any more.
pub fn say(message: &impl Serialize) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{}", serde_json::to_string(message)?)?;
    Ok(stdout.flush()?)
}

/// A child's own `main`.
pub fn main(roles: &[Role], role: &str, input: &str) -> anyhow::Result<()> {
    let (_, play) = roles.iter().find(|(name, _)| *name == role).ok_or_else(|| anyhow::anyhow!("no role {role:?}"))?;
    play(serde_json::from_str(input)?)
}
