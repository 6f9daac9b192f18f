//! Where servers come from: containers, processes, or a server that is there already.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::LazyLock,
};

use anyhow::{Context as _, bail, ensure};
use tokio::sync::OnceCell;

/// How this process starts a server of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    Container,
    Process,
}

#[derive(Debug)]
pub struct Choice {
    /// The server that is there already, for the shared plain one.
    pub uri: Option<String>,
    pub launcher: Launcher,
    /// Why containers are not used although nobody said so.
    pub fallback: Option<String>,
    pub version: String,
}

static CHOICE: LazyLock<Choice> = LazyLock::new(|| match Choice::from_environment() {
    Ok(choice) => choice,
    Err(error) => {
        eprintln!("{error:#}");
        std::process::exit(2);
    }
});

/// Decided once.
pub fn choice() -> &'static Choice {
    &CHOICE
}

impl Choice {
    fn from_environment() -> anyhow::Result<Self> {
        let version = variable("MONGOSUB_MONGO_VERSION").unwrap_or_else(default_version);
        let made = |uri, launcher, fallback| Ok(Self { uri, launcher, fallback, version: version.clone() });
        match variable("MONGOSUB_TEST_SERVER").as_deref() {
            Some("container") => match engine() {
                Ok(()) => made(None, Launcher::Container, None),
                Err(why) => bail!("MONGOSUB_TEST_SERVER=container, but {why}"),
            },
            Some("process") => made(None, Launcher::Process, None),
            Some(uri) if !uri.starts_with("mongodb://") && !uri.starts_with("mongodb+srv://") => {
                bail!("MONGOSUB_TEST_SERVER is `container`, `process` or a mongodb:// URI, not {uri:?}")
            }
            uri => match engine() {
                Ok(()) => made(uri.map(Into::into), Launcher::Container, None),
                Err(why) => made(uri.map(Into::into), Launcher::Process, Some(why)),
            },
        }
    }

    /// The first line of output.
    pub fn announcement(&self) -> String {
        let own = match self.launcher {
            Launcher::Container => format!("mongod {} in containers", self.version),
            Launcher::Process => format!("mongod {} as processes", self.version),
        };
        let because = self.fallback.as_ref().map_or_else(String::new, |why| format!(", because {why}"));
        match &self.uri {
            Some(uri) => format!("Test servers: {}, and {own}{because}", without_password(uri)),
            None => format!("Test servers: {own}{because}"),
        }
    }
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// The scripts name it; here it is only read.
fn default_version() -> String {
    include_str!("../../docker/mongod.sh")
        .lines()
        .find_map(|line| line.strip_prefix("DEFAULT_VERSION="))
        .expect("docker/mongod.sh names a default version")
        .to_owned()
}

/// Whether a container engine answers, or why none does.
fn engine() -> Result<(), String> {
    let asked = Command::new("docker")
        .args(["version", "--format", "{{.Server.Version}}"])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("the docker command does not start: {error}"))?;
    if asked.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&asked.stderr);
    Err(format!("no container engine answers: {}", said.lines().last().unwrap_or("docker does not say why").trim()))
}

fn without_password(uri: &str) -> String {
    let Some((scheme, rest)) = uri.split_once("://") else { return "a server".into() };
    let hosts = rest.split(['/', '?']).next().unwrap_or_default();
    format!("{scheme}://{}", hosts.rsplit('@').next().unwrap_or_default())
}

/// The image to start containers from, `(name, tag)`. Built when first asked for.
pub async fn image() -> anyhow::Result<(String, String)> {
    static IMAGE: OnceCell<(String, String)> = OnceCell::const_new();
    let image = IMAGE.get_or_try_init(|| async {
        let image = script("mongo-image.sh").await?;
        let (name, tag) = image.rsplit_once(':').with_context(|| format!("no tag in {image:?}"))?;
        anyhow::Ok((name.to_owned(), tag.to_owned()))
    });
    image.await.cloned()
}

/// The `mongod` to start processes of. Fetched when first asked for.
pub async fn mongod() -> anyhow::Result<PathBuf> {
    static MONGOD: OnceCell<PathBuf> = OnceCell::const_new();
    MONGOD.get_or_try_init(|| async { Ok(script("mongod.sh").await?.into()) }).await.cloned()
}

async fn script(name: &str) -> anyhow::Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docker").join(name);
    let output = tokio::process::Command::new(&path)
        .arg(&choice().version)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .await
        .with_context(|| format!("{} does not start", path.display()))?;
    ensure!(output.status.success(), "{} ended with {}; it has said why", path.display(), output.status);
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
