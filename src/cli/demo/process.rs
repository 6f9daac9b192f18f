//! A `mongod` as a process of the demo's own: the one on the PATH, or one that `docker/mongod.sh` obtains.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::Failed;
use super::story::Story;

/// Obtains a plain mongod, without a package manager or a registry of images.
const MONGOD_SH: &str = include_str!("../../../docker/mongod.sh");
/// How long something that was killed may take to be gone.
const GONE_WITHIN: Duration = Duration::from_secs(5);
const STDERR: &str = "mongod.stderr";

/// A `mongod` to start, and says which.
pub(super) async fn find(story: &Story) -> Result<PathBuf, Failed> {
    if let Some(mongod) = on_path("mongod") {
        story.line("server", &format!("a throwaway replica set of {} (on the PATH)", mongod.display()));
        return Ok(mongod);
    }
    let waiting = story.wait("getting a mongod (once)");
    let obtained = obtain().await;
    waiting.finish_and_clear();
    let mongod = obtained?;
    story.line("server", "a throwaway replica set of the mongod docker/mongod.sh got");
    Ok(mongod)
}

fn on_path(program: &str) -> Option<PathBuf> {
    let is_program =
        |file: &PathBuf| file.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0);
    std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(program)).find(is_program)
}

/// Runs the embedded script; the last line it prints is the mongod.
async fn obtain() -> Result<PathBuf, Failed> {
    let bash = std::process::Command::new("bash")
        .arg("-s")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A group of its own, so that it can be asked to stop with everything it has started.
        .process_group(0)
        .spawn();
    let mut script = Script { bash: bash.map_err(|error| format!("bash cannot be run: {error}"))? };
    let (stdin, stdout, stderr) = (script.bash.stdin.take(), script.bash.stdout.take(), script.bash.stderr.take());
    if let Some(mut stdin) = stdin {
        let written = stdin.write_all(MONGOD_SH.as_bytes());
        written.map_err(|error| format!("bash does not listen: {error}"))?;
    }
    let (stdout, stderr) = tokio::join!(last_line(stdout), last_line(stderr));
    let status = script.bash.wait().map_err(|error| format!("bash cannot be waited for: {error}"))?;
    if status.success() { Ok(stdout.into()) } else { Err(stderr.into()) }
}

/// The last line of what comes, once no more can come.
async fn last_line(output: Option<impl Read + Send + 'static>) -> String {
    let read = tokio::task::spawn_blocking(move || {
        let mut text = String::new();
        // What could be read until then is what there is.
        let _ = output.map(|mut output| output.read_to_string(&mut text));
        text.trim().lines().last().unwrap_or_default().to_owned()
    });
    read.await.unwrap_or_default()
}

/// Dropped half-way, the script is asked to stop: it then takes away what it has not finished.
struct Script {
    bash: std::process::Child,
}

impl Drop for Script {
    fn drop(&mut self) {
        if !matches!(self.bash.try_wait(), Ok(None)) {
            return;
        }
        let ask = format!("kill -TERM -{}", self.bash.id());
        let _ = std::process::Command::new("bash").args(["-c", &ask]).stderr(Stdio::null()).status();
        wait_briefly(|| !matches!(self.bash.try_wait(), Ok(None)));
        // What does not stop ends by itself, and the next run of the script takes away what it leaves.
        let _ = self.bash.kill();
        let _ = self.bash.wait();
    }
}

/// Dropped, it is killed and its files are removed.
pub(super) struct Process {
    mongod: Child,
    files: Option<TempDir>,
}

impl Process {
    pub(super) fn start(mongod: &Path, arguments: &[String]) -> Result<Self, Failed> {
        let files = TempDir::with_prefix("mongosub-demo-").map_err(|error| format!("no temporary folder: {error}"))?;
        let create = |name| std::fs::File::create(files.path().join(name));
        let log = create("mongod.log").and_then(|log| Ok((log, create(STDERR)?)));
        let (log, errors) = log.map_err(|error| format!("no log file: {error}"))?;
        let data = files.path().join("data");
        std::fs::create_dir(&data).map_err(|error| format!("no data folder: {error}"))?;
        let mongod = Command::new(mongod)
            .args(arguments)
            .args(["--bind_ip", "127.0.0.1", "--nounixsocket", "--dbpath"])
            .arg(&data)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            // Ctrl-C goes to the demo alone; it ends the server itself.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| format!("{} cannot be run: {error}", mongod.display()))?;
        Ok(Self { mongod, files: Some(files) })
    }

    /// Waits until it ends by itself, and says why it did.
    pub(super) async fn ended(&mut self) -> Failed {
        let status = match self.mongod.wait().await {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        let said = self.files.as_ref().and_then(|files| std::fs::read_to_string(files.path().join(STDERR)).ok());
        let said = said.as_deref().and_then(|said| said.trim().lines().last().map(|line| format!(": {line}")));
        format!("mongod ended at once ({status}){}", said.unwrap_or_default()).into()
    }

    /// Kills it, waits until it is gone, and removes its files.
    pub(super) async fn end(mut self) {
        // It has nothing worth keeping; an error means that it has ended already.
        let _ = self.mongod.kill().await;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.mongod.start_kill();
        wait_briefly(|| !matches!(self.mongod.try_wait(), Ok(None)));
        if let Some(Err(error)) = self.files.take().map(TempDir::close) {
            eprintln!("mongosub demo: the temporary folder could not be removed: {error}");
        }
    }
}

fn wait_briefly(mut until: impl FnMut() -> bool) {
    let deadline = Instant::now() + GONE_WITHIN;
    while !until() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
}
