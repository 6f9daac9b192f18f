//! `mongosub subscribe` under way, as a user runs it: a process of its own, its lines, its last word and its exit code.

use std::{fs, process::Stdio, time::Duration};

use mongosub::bson::Document;
use serde_json::Value;
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{ChildStdout, Command},
};

use crate::{
    seen::PATIENCE,
    support::{Fixture, guard, run, wait_until},
};

pub const ID: &str = "command_v1";

/// Dropped, it is killed.
pub struct Running {
    process: tokio::process::Child,
    lines: Option<Lines<BufReader<ChildStdout>>>,
    folder: TempDir,
}

/// How it ended.
pub struct Ended {
    pub code: Option<i32>,
    /// Everything it said on standard error.
    pub said: String,
    /// The lines that nobody had read before.
    pub rest: Vec<String>,
}

impl Ended {
    /// The sentence at the end.
    pub fn last_word(&self) -> &str {
        self.said.lines().last().unwrap_or_default()
    }

    #[track_caller]
    pub fn with(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{}", self.said);
        assert!(self.last_word().starts_with("mongosub subscribe: "), "{}", self.said);
        self
    }
}

impl Running {
    /// On the fixture's database, with its checkpoints beside what is read.
    pub fn start(fixture: &Fixture, arguments: &[&str]) -> Self {
        let checkpoints = format!("{}.checkpoints", fixture.database.name());
        let mut all = vec!["--db", fixture.database.name(), "--id", ID, "--checkpoints", &checkpoints];
        all.extend(arguments);
        Self::start_at(&fixture.server.uri(), &all)
    }

    /// On `things`.
    pub fn on_things(fixture: &Fixture, arguments: &[&str]) -> Self {
        Self::start(fixture, &[&["--collection", "things"], arguments].concat())
    }

    pub fn start_at(uri: &str, arguments: &[&str]) -> Self {
        Self::spawn(Some(uri), arguments)
    }

    pub fn spawn(uri: Option<&str>, arguments: &[&str]) -> Self {
        Self::spawn_by(Command::new(env!("CARGO_BIN_EXE_mongosub")), uri, arguments)
    }

    /// As `nohup` starts it.
    pub fn without_hang_up(uri: &str, arguments: &[&str]) -> Self {
        let mut shell = Command::new("sh");
        shell.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_mongosub")]);
        Self::spawn_by(shell, Some(uri), arguments)
    }

    fn spawn_by(mut command: Command, uri: Option<&str>, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let errors = fs::File::create(folder.path().join("stderr")).expect("a file for its errors");
        command.arg("subscribe").args(arguments).env_remove("RUST_LOG").env_remove("MONGODB_URI");
        if let Some(uri) = uri {
            command.env("MONGODB_URI", uri);
        }
        let process = command
            .env(run::VARIABLE, run::current().id())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors)
            .kill_on_drop(true)
            .spawn();
        let mut process = process.expect("the command starts");
        let stdout = process.stdout.take().expect("its stdout is a pipe");
        Self { process, lines: Some(BufReader::new(stdout).lines()), folder }
    }

    /// What it has said on standard error.
    pub fn said(&self) -> String {
        fs::read_to_string(self.folder.path().join("stderr")).expect("its errors")
    }

    /// Waits until it has said this.
    pub async fn says(&self, what: &str) {
        wait_until(&format!("it says {what:?}"), PATIENCE, || async { self.said().contains(what) }).await;
    }

    /// Waits until what is sent is delivered.
    pub async fn started(self) -> Self {
        self.says(" starts at ").await;
        self
    }

    /// The next line, as it is.
    pub async fn text(&mut self) -> String {
        let lines = self.lines.as_mut().expect("its output is open");
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        let line = line.unwrap_or_else(|_| {
            panic!("no line comes: {}", fs::read_to_string(self.folder.path().join("stderr")).unwrap_or_default())
        });
        line.expect("its output").unwrap_or_else(|| panic!("it has ended: {}", self.said()))
    }

    /// The next line, understood.
    pub async fn event(&mut self) -> Value {
        understood(&self.text().await)
    }

    /// The `_id`s of the next lines.
    pub async fn ids(&mut self, number: usize) -> Vec<i64> {
        let mut ids = Vec::with_capacity(number);
        while ids.len() < number {
            ids.push(id_of(&self.event().await));
        }
        ids
    }

    pub fn signal(&self, name: &str) {
        guard::signal(name, self.process.id().expect("it runs")).expect("a signal");
    }

    pub fn is_running(&mut self) -> bool {
        self.process.try_wait().expect("its state").is_none()
    }

    /// Waits until a line has been begun, and takes no more of it than a buffer holds.
    pub async fn begins_a_line(&mut self) {
        let lines = self.lines.as_mut().expect("its output is open");
        let begun = tokio::time::timeout(PATIENCE, lines.get_mut().fill_buf()).await;
        assert!(!begun.expect("a line is begun").expect("its output").is_empty(), "it has ended");
    }

    /// Reads no more, and lets it know.
    pub fn close(&mut self) {
        self.lines = None;
    }

    /// Reads what there is until it has ended.
    pub async fn ends(mut self) -> Ended {
        let mut rest = Vec::new();
        let end = async {
            if let Some(lines) = &mut self.lines {
                while let Some(line) = lines.next_line().await.expect("its output") {
                    rest.push(line);
                }
            }
            self.process.wait().await.expect("its end")
        };
        let status = tokio::time::timeout(PATIENCE, end).await;
        let status = status.unwrap_or_else(|_| panic!("it does not end"));
        Ended { code: status.code(), said: self.said(), rest }
    }

    /// Reads nothing until it has ended, and everything then.
    pub async fn ends_unread(mut self, within: Duration) -> Ended {
        let status = tokio::time::timeout(within, self.process.wait()).await;
        let status = status.unwrap_or_else(|_| panic!("it does not end: {}", self.said())).expect("its end");
        let code = status.code();
        Ended { code, ..self.ends().await }
    }
}

pub fn understood(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("not a whole line ({error}): {line}"))
}

/// The `_id` of the changed document, where that is a number; -1 elsewhere.
pub fn id_of(event: &Value) -> i64 {
    event["documentKey"]["_id"].as_i64().unwrap_or(-1)
}

/// The `_id`s of whole lines.
pub fn ids(lines: &[String]) -> Vec<i64> {
    lines.iter().map(|line| id_of(&understood(line))).collect()
}

/// What a server's event is in extended JSON, by the driver's way.
pub fn by_the_driver(event: &mongosub::ChangeEvent, canonical: bool) -> Value {
    let document = Document::try_from(event.raw()).expect("a whole event");
    let bson = mongosub::bson::Bson::Document(document);
    if canonical { bson.into_canonical_extjson() } else { bson.into_relaxed_extjson() }
}
