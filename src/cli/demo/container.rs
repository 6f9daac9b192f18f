//! A `mongod` in a container of the demo's own, for a machine that has neither a `mongod` nor what it takes to get one.

use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use tokio::process::Command;

use super::Failed;
use super::story::Story;

/// The image that is pulled when there is none built here.
const IMAGE: &str = "mongo:6.0.27";
/// The image that `docker/mongo-image.sh` builds.
const LOCAL_IMAGE: &str = "mongosub-mongod";
/// How long the engine may take to start a container of an image that is there.
const STARTED_WITHIN: Duration = Duration::from_secs(30);

/// Dropped, it is removed.
pub(super) struct Container {
    name: String,
    /// Starts it. Not to be left half-way: the engine could still make a container that nobody removes.
    run: Option<Child>,
}

/// Starts one that listens at this port of the machine alone; says of which image.
pub(super) async fn start(arguments: &[String], port: u16, story: &Story) -> Result<Container, Failed> {
    let image = image(story).await?;
    story.line("server", &format!("a throwaway replica set in a container of {image}"));
    let name = format!("mongosub-demo-{:08x}", fastrand::u32(..));
    // The same port inside, where the only member of the set has to find itself.
    let publish = format!("127.0.0.1:{port}:{port}");
    let run = std::process::Command::new("docker")
        .args(["run", "--detach", "--rm", "--pull", "never", "--publish", &publish, "--name", &name, &image])
        .args(arguments)
        .arg("--bind_ip_all")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        // Ctrl-C goes to the demo alone.
        .process_group(0)
        .spawn();
    let run = run.map_err(|error| format!("docker cannot be run ({error})"))?;
    let mut container = Container { name, run: Some(run) };
    container.started().await?;
    Ok(container)
}

/// One built here, or the official one, which is pulled.
async fn image(story: &Story) -> Result<String, Failed> {
    let reference = format!("reference={LOCAL_IMAGE}");
    let images = docker(&["images", "--filter", &reference, "--format", "{{.Repository}}:{{.Tag}}"]).await?;
    if let Some(image) = images.lines().next() {
        return Ok(image.to_owned());
    }
    if docker(&["image", "inspect", IMAGE]).await.is_err() {
        let waiting = story.wait("pulling an image (once)");
        let pulled = docker(&["pull", "--quiet", IMAGE]).await;
        waiting.finish_and_clear();
        pulled?;
    }
    Ok(IMAGE.to_owned())
}

async fn docker(arguments: &[&str]) -> Result<String, Failed> {
    let output = Command::new("docker").args(arguments).stdin(Stdio::null()).kill_on_drop(true).output().await;
    let output = output.map_err(|error| format!("docker cannot be run ({error})"))?;
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(refusal(arguments[0], &output.stderr))
}

fn refusal(command: &str, stderr: &[u8]) -> Failed {
    format!("docker {command} says: {}", text(stderr).lines().last().unwrap_or_default()).into()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_owned()
}

impl Container {
    async fn started(&mut self) -> Result<(), Failed> {
        let deadline = Instant::now() + STARTED_WITHIN;
        while self.is_starting() {
            if Instant::now() >= deadline {
                return Err(format!("docker has not started it within {} s", STARTED_WITHIN.as_secs()).into());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let Some(run) = self.run.take() else { return Ok(()) };
        let output = run.wait_with_output().map_err(|error| format!("docker cannot be waited for ({error})"))?;
        if output.status.success() { Ok(()) } else { Err(refusal("run", &output.stderr)) }
    }

    fn is_starting(&mut self) -> bool {
        self.run.as_mut().is_some_and(|run| matches!(run.try_wait(), Ok(None)))
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let deadline = Instant::now() + STARTED_WITHIN;
        while self.is_starting() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let name = &self.name;
        let removed = std::process::Command::new("docker")
            .args(["rm", "--force", "--volumes", name])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A second Ctrl-C must not reach it.
            .process_group(0)
            .status();
        if !removed.is_ok_and(|status| status.success()) {
            eprintln!("mongosub demo: the container {name} may be left; remove it with: docker rm --force {name}");
        }
    }
}
