//! What a server is started with.

/// The shared secret of the members of a set with `auth`. It protects nothing but a test.
pub const KEY: &str = "bm90IGEgc2VjcmV0LCBhIHRlc3Q=";

/// A user that a server with `auth` has from the start.
#[derive(Clone, Copy, Debug)]
pub struct User {
    pub name: &'static str,
    pub password: &'static str,
}

/// May do anything.
pub const ADMIN: User = User { name: "admin", password: "admin" };
/// May read and write any database, and nothing else: `hostInfo` and `serverStatus` are refused.
pub const WRITER: User = User { name: "writer", password: "writer" };

/// Start from `Options::default()`: a replica set of one node with a 16 MB oplog and a no-op every second.
#[derive(Clone, Debug)]
pub struct Options {
    pub nodes: usize,
    pub standalone: bool,
    pub auth: bool,
    pub oplog_megabytes: u32,
    pub syncdelay_seconds: Option<u32>,
    pub noop_seconds: u32,
    /// What the server keeps in memory.
    pub cache_megabytes: u32,
    /// Whether members and clients reach each node over a link that can be cut.
    pub linked: bool,
    pub parameters: Vec<(String, String)>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nodes: 1,
            standalone: false,
            auth: false,
            oplog_megabytes: 16,
            syncdelay_seconds: None,
            noop_seconds: 1,
            cache_megabytes: 256,
            linked: false,
            parameters: Vec::new(),
        }
    }
}

impl Options {
    /// No replica set: a server that has no change streams.
    pub fn standalone() -> Self {
        Self { standalone: true, ..Self::default() }
    }

    /// A server whose oplog can be made to lose a position within a second or two: `Server::roll_oplog_past`.
    pub fn small_oplog() -> Self {
        Self { oplog_megabytes: 1, syncdelay_seconds: Some(1), ..Self::default() }
    }

    /// A server that asks who one is, with the users `ADMIN` and `WRITER`.
    pub fn auth() -> Self {
        Self { auth: true, ..Self::default() }
    }

    /// Members on one loopback. Primary in about two seconds, and after its end another one as fast.
    pub fn nodes(self, nodes: usize) -> Self {
        Self { nodes, ..self }
    }

    /// For `Server::cut_node` and `Server::cut_client`.
    pub fn linked(self) -> Self {
        Self { linked: true, ..self }
    }

    /// One more `--setParameter`.
    pub fn parameter(mut self, name: &str, value: &str) -> Self {
        self.parameters.push((name.into(), value.into()));
        self
    }

    /// The arguments of `mongod`, apart from where its files are.
    pub fn arguments(&self, port: u16, set: &str) -> Vec<String> {
        let mut arguments: Vec<String> = [
            "--bind_ip=127.0.0.1",
            "--nounixsocket",
            "--wiredTigerEngineConfigString=log=(file_max=8MB,prealloc=false)",
        ]
        .map(Into::into)
        .into();
        arguments.push(format!("--port={port}"));
        arguments.push(format!("--wiredTigerCacheSizeGB={}", f64::from(self.cache_megabytes) / 1024.0));
        if let Some(seconds) = self.syncdelay_seconds {
            arguments.push(format!("--syncdelay={seconds}"));
        }
        let mut parameter = |name: &str, value: &str| {
            arguments.push("--setParameter".into());
            arguments.push(format!("{name}={value}"));
        };
        parameter("enableTestCommands", "1");
        parameter("diagnosticDataCollectionEnabled", "false");
        if !self.standalone {
            parameter("periodicNoopIntervalSecs", &self.noop_seconds.to_string());
        }
        if self.auth {
            // The least it takes, because the client's half is computed in a debug build.
            parameter("scramSHA256IterationCount", "5000");
        }
        for (name, value) in &self.parameters {
            parameter(name, value);
        }
        if !self.standalone {
            arguments.push(format!("--replSet={set}"));
            arguments.push(format!("--oplogSize={}", self.oplog_megabytes));
        }
        if self.auth {
            arguments.push("--auth".into());
        }
        arguments
    }

    /// Whether the members have to know each other by a key file.
    pub fn needs_key(&self) -> bool {
        self.auth && !self.standalone
    }
}
