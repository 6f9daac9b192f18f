//! One `mongod`, wherever it runs, on a port that stays its own through every restart.

use std::{
    collections::HashSet,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    sync::{LazyLock, Mutex, PoisonError},
};

use super::{
    choice::{Launcher, choice},
    container::Container,
    links::{Links, Proxy},
    options::Options,
    process::Process,
    run,
};

const TRIES: u32 = 5;

pub struct Node {
    port: u16,
    host: Host,
    /// What the others reach it by, when that is not its own port.
    proxy: Option<Proxy>,
}

enum Host {
    Container(Box<Container>),
    Process(Process),
}

impl Node {
    /// Returns when the server listens. It is no replica set yet.
    pub async fn start(options: &Options, set: &str, links: &Links) -> anyhow::Result<Self> {
        let mut tries = 1;
        loop {
            // Between the look at the port and the server's own, somebody else may take it.
            let port = free_port();
            match Host::start(options, set, port, None).await {
                Ok(host) => {
                    let proxy = if options.linked { Some(Proxy::start(port, links).await?) } else { None };
                    return Ok(Self { port, host, proxy });
                }
                Err(error) if tries == TRIES => return Err(error),
                Err(error) => eprintln!("starting a server once more: {error:#}"),
            }
            tries += 1;
        }
    }

    /// A server over a copy of this one's files, on its port, which is free by now.
    pub async fn put_back(&self, options: &Options, set: &str, files: &Path) -> anyhow::Result<Self> {
        Ok(Self { port: self.port, host: Host::start(options, set, self.port, Some(files)).await?, proxy: None })
    }

    /// A copy of the files of a server that is down, in `db` of a directory of the run's.
    pub async fn copy_files(&self) -> anyhow::Result<PathBuf> {
        let copy = run::current().directory()?.join(format!("{}-{:08x}", self.port, fastrand::u32(..)));
        std::fs::create_dir_all(&copy)?;
        match &self.host {
            Host::Container(container) => container.copy_files(&copy.join("db")).await?,
            Host::Process(process) => process.copy_files(&copy.join("db"))?,
        }
        Ok(copy)
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.proxy.as_ref().map_or(self.port, Proxy::port))
    }

    /// The port that it listens on itself.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The container's id or the process's.
    pub fn id(&self) -> String {
        match &self.host {
            Host::Container(container) => container.id().to_owned(),
            Host::Process(process) => process.id().to_string(),
        }
    }

    /// SIGKILL; returns when the server is gone.
    pub async fn kill(&self) -> anyhow::Result<()> {
        match &self.host {
            Host::Container(container) => container.kill().await,
            Host::Process(process) => process.kill().await,
        }
    }

    /// Waits for an end that somebody has asked the server for.
    pub async fn ended(&self) {
        match &self.host {
            Host::Container(container) => container.ended().await,
            Host::Process(process) => process.ended().await,
        }
    }

    /// On the same data and the same port, after `kill` or an end. Does not wait until the server listens.
    pub async fn start_again(&self) -> anyhow::Result<()> {
        match &self.host {
            Host::Container(container) => container.start_again().await,
            Host::Process(process) => process.start_again(),
        }
    }

    /// Freezes the server: its connections stay open and nothing answers.
    pub async fn pause(&self) -> anyhow::Result<()> {
        match &self.host {
            Host::Container(container) => container.pause().await,
            Host::Process(process) => process.pause(),
        }
    }

    pub async fn unpause(&self) -> anyhow::Result<()> {
        match &self.host {
            Host::Container(container) => container.unpause().await,
            Host::Process(process) => process.unpause(),
        }
    }

    pub async fn remove(self) -> anyhow::Result<()> {
        match self.host {
            Host::Container(container) => container.remove().await,
            Host::Process(process) => process.remove().await,
        }
    }
}

impl Host {
    /// On files of its own, or on those in `db` of a directory.
    async fn start(options: &Options, set: &str, port: u16, files: Option<&Path>) -> anyhow::Result<Self> {
        let (arguments, with_key) = (options.arguments(port, set), options.needs_key());
        Ok(match choice().launcher {
            Launcher::Container => {
                let files = files.map(|files| files.join("db"));
                Self::Container(Box::new(Container::start(arguments, with_key, files).await?))
            }
            Launcher::Process => {
                let directory = run::current().directory()?.join(port.to_string());
                let directory = files.map_or(directory, Path::to_owned);
                Self::Process(Process::start(arguments, with_key, directory).await?)
            }
        })
    }
}

/// Below the range that systems take ports for outgoing connections from, so that none of those takes a port of a server
/// which is down for a moment. Never the same one twice in a process.
fn free_port() -> u16 {
    static TAKEN: LazyLock<Mutex<HashSet<u16>>> = LazyLock::new(Mutex::default);
    loop {
        let port = fastrand::u16(20_000..32_000);
        let fresh = TAKEN.lock().unwrap_or_else(PoisonError::into_inner).insert(port);
        if fresh && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}
