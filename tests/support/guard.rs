//! The guard: a process of its own that removes what a test run leaves behind, however the run ends.
//!
//! It holds the reading end of a pipe from the test process. The kernel closes that pipe when the test process ends, also by
//! SIGKILL; then the guard removes everything that carries the run's label and ends itself. It stands in a process group of
//! its own, so that Ctrl-C does not reach it.
//!
//! After an orderly end nothing can be under way any more, and the guard is done as soon as it finds nothing. After any other,
//! the engine may still be creating a container that was asked for, so it has to find nothing for a while.

use std::{
    env, fs,
    io::{self, BufRead, Write},
    os::unix::process::CommandExt,
    process::{Child, ChildStdin, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use mongodb::Client;

use super::{background, run};

/// The hidden argument, followed by the run's id.
pub const ARGUMENT: &str = "--mongosub-guard";

const PATIENCE: Duration = Duration::from_secs(60);
const BETWEEN_SWEEPS: Duration = Duration::from_millis(250);
const QUIET_SWEEPS_AFTER_A_CRASH: u32 = 6;

/// The test process's hold on its guard.
pub struct Guard {
    process: Child,
    pipe: ChildStdin,
}

impl Guard {
    pub fn start(run: &str) -> Self {
        let mut process = Command::new(env::current_exe().expect("the path of this binary"))
            .args([ARGUMENT, run])
            .env_remove(run::VARIABLE)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("the guard starts");
        let pipe = process.stdin.take().expect("the guard's stdin is a pipe");
        Self { process, pipe }
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.pipe, "{line}").expect("the guard is there");
    }

    /// An orderly end: returns when nothing of the run is left.
    pub fn finish(mut self) {
        self.tell("orderly");
        drop(self.pipe);
        let _ = self.process.wait();
    }
}

/// The guard's own `main`.
pub fn main(run: &str) {
    let mut quiet_sweeps = QUIET_SWEEPS_AFTER_A_CRASH;
    let mut uris = Vec::new();
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        match line.split_once(' ') {
            Some(("uri", uri)) => uris.push(uri.to_owned()),
            _ if line == "orderly" => quiet_sweeps = 1,
            _ => eprintln!("guard: what is {line:?}?"),
        }
    }

    let started = Instant::now();
    let mut quiet = 0;
    loop {
        let found = sweep(run);
        quiet = if found.is_empty() { quiet + 1 } else { 0 };
        if quiet >= quiet_sweeps {
            break;
        }
        if started.elapsed() > PATIENCE {
            eprintln!("guard: could not remove {}", found.join(", "));
            break;
        }
        // What was found is looked for again at once, what may still come after a while.
        thread::sleep(if found.is_empty() { BETWEEN_SWEEPS } else { Duration::from_millis(20) });
    }
    for uri in uris {
        if let Err(error) = background::block_on(drop_databases(&uri, run)) {
            eprintln!("guard: could not drop the run's databases: {error}");
        }
    }
}

/// Removes what there is of the run, and says what that was.
fn sweep(run: &str) -> Vec<String> {
    let mut found = Vec::new();
    for pid in processes(run) {
        let _ = signal("KILL", pid);
        found.push(format!("process {pid}"));
    }
    let containers = containers(run);
    if !containers.is_empty() {
        docker(["rm", "--force", "--volumes"].into_iter().chain(containers.iter().map(String::as_str)));
        found.extend(containers.iter().map(|id| format!("container {id}")));
    }
    let networks = networks(run);
    if !networks.is_empty() {
        docker(["network", "rm"].into_iter().chain(networks.iter().map(String::as_str)));
        found.extend(networks.iter().map(|id| format!("network {id}")));
    }
    let directory = run::directory_of(run);
    if directory.exists() {
        let _ = fs::remove_dir_all(&directory);
        found.push(format!("directory {}", directory.display()));
    }
    found
}

/// The processes that carry the run's label. On systems without `/proc` there is no telling.
pub fn processes(run: &str) -> Vec<u32> {
    let label = format!("{}={run}", run::VARIABLE);
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            fs::read(format!("/proc/{pid}/environ"))
                .is_ok_and(|environment| environment.split(|&byte| byte == 0).any(|entry| entry == label.as_bytes()))
        })
        .collect()
}

/// The containers that carry the run's label, running or not.
pub fn containers(run: &str) -> Vec<String> {
    docker(["ps", "--all", "--quiet", "--no-trunc", "--filter", &format!("label={}={run}", run::LABEL)])
}

/// The networks that carry the run's label.
pub fn networks(run: &str) -> Vec<String> {
    docker(["network", "ls", "--quiet", "--no-trunc", "--filter", &format!("label={}={run}", run::LABEL)])
}

/// The lines that the command prints; none when there is no engine.
fn docker<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let output = Command::new("docker").args(arguments).stdin(Stdio::null()).stderr(Stdio::null()).output();
    output
        .map_or_else(|_| Vec::new(), |output| String::from_utf8_lossy(&output.stdout).lines().map(Into::into).collect())
}

/// Sends a signal by name. The shell's own `kill` is there where the program is not.
pub fn signal(name: &str, pid: u32) -> io::Result<()> {
    let status = Command::new("sh")
        .args(["-c", &format!("kill -{name} {pid}")])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("no signal {name} for process {pid}"))) }
}

async fn drop_databases(uri: &str, run: &str) -> mongodb::error::Result<()> {
    let client = Client::with_uri_str(uri).await?;
    for name in client.list_database_names().await? {
        if name.starts_with(&run::database_prefix(run)) {
            client.database(&name).drop().await?;
        }
    }
    Ok(())
}
