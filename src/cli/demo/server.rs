//! The demo's replica set: the user's own, or one of the demo's own, with one node and a small oplog, which ends with
//! the demo. Where a `mongod` comes from is said by `process.rs` and `container.rs`.

use std::net::TcpListener;
use std::time::Duration;

use bson::doc;
use mongodb::Client;
use tokio::time::Instant;

use super::container::Container;
use super::process::{self, Process};
use super::story::Story;
use super::{Failed, container};
pub(super) use crate::mongo::short;
use crate::mongo::{self, Unless, Unusable};

const SET: &str = "mongosub-demo";
const START: Duration = Duration::from_secs(30);
/// How long a server may take to be found, unless the URI says otherwise.
const FOUND_WITHIN: Duration = Duration::from_secs(10);

/// A replica set for the demo. Dropped, one of the demo's own is killed and its files are removed.
pub(super) struct Server {
    uri: String,
    own: Option<Own>,
}

/// Each ends with whoever holds it.
enum Own {
    Process(Process),
    Container { _held: Container },
}

impl Server {
    /// The user's server, or one of the demo's own; says which.
    pub(super) async fn get(uri: Option<&str>, story: &Story) -> Result<Self, Failed> {
        let Some(uri) = uri else { return own(story).await };
        let client = connect(uri).await?;
        story.line("server", "your own, by its URI; its oplog is left alone");
        let hello = client.database("admin").run_command(doc! { "hello": 1 }).await.map_err(|error| short(&error))?;
        // A router of a sharded cluster names no set.
        if !hello.contains_key("setName") && !hello.get_str("msg").is_ok_and(|kind| kind == "isdbgrid") {
            return Err("the server is not a member of a replica set, and only those have change streams".into());
        }
        Ok(Self { uri: uri.into(), own: None })
    }

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
    pub(super) async fn end(self) {
        if let Some(Own::Process(process)) = self.own {
            process.end().await;
        }
    }
}

async fn own(story: &Story) -> Result<Server, Failed> {
    let port = free_port()?;
    let uri = format!("mongodb://127.0.0.1:{port}/?directConnection=true");
    let own = match process::find(story).await {
        Ok(mongod) => {
            let mut process = Process::start(&mongod, &arguments(port))?;
            tokio::select! {
                initiated = initiate(&uri, port) => initiated?,
                why = process.ended() => return Err(why),
            }
            Own::Process(process)
        }
        Err(why) => {
            let container = container::start(&arguments(port), port, story).await.map_err(|engine| {
                let (why, engine) = (why.text, engine.text);
                format!("there is no mongod on the PATH, none could be obtained ({why}), and {engine}; give --uri")
            })?;
            initiate(&uri, port).await?;
            Own::Container { _held: container }
        }
    };
    Ok(Server { uri, own: Some(own) })
}

/// A port that was free a moment ago.
fn free_port() -> Result<u16, Failed> {
    let listener = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    Ok(listener.map(|address| address.port()).map_err(|error| format!("no port is free: {error}"))?)
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
    Err(format!("the replica set did not come up within {} s: {last}", START.as_secs()).into())
}

async fn connect(uri: &str) -> Result<Client, Failed> {
    let unless = Unless { found_within: Some(FOUND_WITHIN), app_name: Some("mongosub demo") };
    mongo::connect(uri, unless)
        .await
        .map_err(|Unusable { text, usage }| if usage { Failed::usage(text) } else { text.into() })
}
