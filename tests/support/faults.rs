//! Breaking a server on purpose: fail points, signals, and an oplog that forgets.

use std::{sync::mpsc, time::Duration};

use anyhow::Context as _;
use mongodb::{
    Client,
    bson::{Bson, Document, Timestamp, doc},
};
use tokio::sync::OwnedMutexGuard;

use super::{background, links::Cut, server::Server};

const DISARMED_WITHIN: Duration = Duration::from_secs(10);
const OPLOG_ROLLS_WITHIN: Duration = Duration::from_secs(60);

/// How often a fail point does its work.
#[derive(Clone, Copy, Debug)]
pub enum FailMode {
    Always,
    Times(i32),
    /// Not the first `n` times.
    Skip(i32),
}

/// A fail point that is set; dropped, it is off again. It is one per server and name, so other tests wait for its end.
#[must_use = "a fail point is off again as soon as this is dropped"]
pub struct FailPoint {
    server: Server,
    name: String,
    /// How often it had been entered when it was set.
    entered_before: i64,
    on: bool,
    _held: OwnedMutexGuard<()>,
}

impl Server {
    /// Makes commands fail: `data` is `{failCommands: [..], errorCode | closeConnection | blockConnection + blockTimeMS,
    /// errorLabels}`. With `app_name`, those of `client_named(app_name)` only, which a test on a shared server wants.
    pub async fn fail_command(
        &self,
        app_name: impl Into<Option<&str>>,
        mode: FailMode,
        mut data: Document,
    ) -> FailPoint {
        if let Some(app_name) = app_name.into() {
            data.insert("appName", app_name);
        }
        self.fail_point("failCommand", mode, data).await
    }

    pub async fn fail_point(&self, name: &str, mode: FailMode, data: Document) -> FailPoint {
        let held = self.hold_fail_point(name).await;
        let mut point = FailPoint { server: self.clone(), name: name.into(), entered_before: 0, on: true, _held: held };
        point.again(mode, data).await;
        point
    }

    /// SIGKILL; returns when the server is gone.
    pub async fn kill(&self) {
        self.kill_node(0).await;
    }

    pub async fn kill_node(&self, number: usize) {
        self.with_node(number, move |server| async move { server.node(number).kill().await }).await;
    }

    /// An orderly shutdown; returns when the server is gone.
    pub async fn stop(&self) {
        // The answer to this command is the end of the connection.
        let _ = self.admin_command(doc! { "shutdown": 1, "force": true, "timeoutSecs": 0 }).await;
        self.with_node(0, |server| async move {
            server.node(0).ended().await;
            Ok(())
        })
        .await;
    }

    /// After `kill` or `stop`: the same data, the same port. Returns when the server takes writes.
    pub async fn start(&self) {
        self.start_node(0).await;
        self.ready().await;
    }

    /// Does not wait until the node takes part.
    pub async fn start_node(&self, number: usize) {
        self.with_node(number, move |server| async move { server.node(number).start_again().await }).await;
    }

    pub async fn restart(&self) {
        self.stop().await;
        self.start().await;
    }

    /// Freezes the server: its connections stay open and nothing answers.
    pub async fn pause(&self) {
        self.pause_node(0).await;
    }

    pub async fn pause_node(&self, number: usize) {
        self.with_node(number, move |server| async move { server.node(number).pause().await }).await;
    }

    pub async fn unpause(&self) {
        self.unpause_node(0).await;
    }

    pub async fn unpause_node(&self, number: usize) {
        self.with_node(number, move |server| async move { server.node(number).unpause().await }).await;
    }

    /// An orderly shutdown of one node, which first tells its clients for a second that it will go; returns when it is gone.
    pub async fn stop_node(&self, number: usize) {
        let clients = self.client_of_each_node().await;
        let shutdown = doc! { "shutdown": 1, "force": true, "timeoutSecs": 1 };
        // The answer to this command is the end of the connection.
        let _ = clients[number].database("admin").run_command(shutdown).await;
        self.with_node(number, move |server| async move {
            server.node(number).ended().await;
            Ok(())
        })
        .await;
    }

    /// Cuts a node from the other nodes and from all clients: nothing arrives any more, and nobody is told.
    pub fn cut_node(&self, number: usize) {
        self.links().cut(Cut::Node(self.node(number).port()));
    }

    /// Cuts a node from the other nodes, and from no client.
    pub fn cut_peers(&self, number: usize) {
        self.links().cut(Cut::Peers(self.node(number).port()));
    }

    /// Cuts a node from the clients of `client_named(app_name)`, and from nobody else.
    pub fn cut_client(&self, app_name: &str, number: usize) {
        self.links().cut(Cut::Client { app_name: app_name.into(), node: self.node(number).port() });
    }

    /// Everything arrives again, also what was sent meanwhile.
    pub fn heal(&self) {
        self.links().heal();
    }

    /// The number of the node that is primary, to be given to `kill_node` and the like.
    pub async fn primary(&self) -> usize {
        let hello = self.admin_command(doc! { "hello": 1 }).await.expect("a primary");
        let address = hello.get_str("primary").expect("a primary");
        self.addresses().iter().position(|node| node == address).expect("a primary of ours")
    }

    /// The time of the oldest entry in the oplog.
    pub async fn oldest_oplog_time(&self) -> Timestamp {
        self.with_admin(|client| async move { oldest(&client).await }).await.expect("the oplog's first entry")
    }

    /// Writes elsewhere until the oplog no longer holds what happened at `time`. Needs `Options::small_oplog()`, and on a
    /// shared server takes the older positions of every test with it.
    ///
    /// The oplog is cut only behind a checkpoint (every second, by `syncdelay`), and only when a portion of it has newly
    /// been filled: hence twice a portion, with a second in between.
    pub async fn roll_oplog_past(&self, time: Timestamp) {
        let rolled = self.with_admin(move |client| async move {
            let filler = client.database("mongosub_filler").collection::<Document>("filler");
            let rolling = async {
                while oldest(&client).await? <= time {
                    fill(&filler, 22).await?;
                    tokio::time::sleep(Duration::from_millis(1100)).await;
                    fill(&filler, 5).await?;
                    filler.drop().await?;
                }
                anyhow::Ok(())
            };
            tokio::time::timeout(OPLOG_ROLLS_WITHIN, rolling).await.context("the oplog still holds it")?
        });
        rolled.await.expect("an oplog that forgets");
    }
}

async fn oldest(client: &Client) -> anyhow::Result<Timestamp> {
    let oplog = client.database("local").collection::<Document>("oplog.rs");
    let entry = oplog.find_one(doc! {}).sort(doc! { "$natural": 1 }).projection(doc! { "ts": 1 }).await?;
    Ok(entry.context("an empty oplog")?.get_timestamp("ts")?)
}

async fn fill(filler: &mongodb::Collection<Document>, count: usize) -> mongodb::error::Result<()> {
    for _ in 0..count {
        filler.insert_one(doc! { "filler": "x".repeat(60_000) }).await?;
    }
    Ok(())
}

impl FailPoint {
    /// Sets it anew, with another mode or other data.
    pub async fn again(&mut self, mode: FailMode, data: Document) {
        let mode = match mode {
            FailMode::Always => Bson::from("alwaysOn"),
            FailMode::Times(times) => doc! { "times": times }.into(),
            FailMode::Skip(times) => doc! { "skip": times }.into(),
        };
        let set = doc! { "configureFailPoint": &self.name, "mode": mode, "data": data };
        let reply =
            self.server.admin_command(set).await.expect("a fail point, for which the server has enableTestCommands");
        self.entered_before = number(&reply);
    }

    /// Returns when it has done its work `times` times since it was set.
    pub async fn entered(&self, times: i64) {
        let wait = doc! {
            "waitForFailPoint": &self.name,
            "timesEntered": self.entered_before + times,
            "maxTimeMS": 60_000,
        };
        self.server.admin_command(wait).await.expect("the fail point is entered");
    }

    /// Turns it off and returns when it is.
    pub async fn off(mut self) {
        self.on = false;
        let off = doc! { "configureFailPoint": &self.name, "mode": "off" };
        self.server.admin_command(off).await.expect("the fail point is turned off");
    }
}

impl Drop for FailPoint {
    fn drop(&mut self) {
        if !self.on {
            return;
        }
        // The test runs on another runtime, so waiting for this one cannot hold it up.
        let (server, off) = (self.server.clone(), doc! { "configureFailPoint": &self.name, "mode": "off" });
        let (done, end) = mpsc::channel();
        background::spawn(async move {
            let _ = server.admin_command(off).await;
            let _ = done.send(());
        });
        let _ = end.recv_timeout(DISARMED_WITHIN);
    }
}

fn number(reply: &Document) -> i64 {
    match reply.get("count") {
        Some(Bson::Int64(count)) => *count,
        Some(Bson::Int32(count)) => i64::from(*count),
        _ => 0,
    }
}
