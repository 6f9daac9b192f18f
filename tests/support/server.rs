//! A deployment to test against: a replica set of one node or more, or a standalone server.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, bail};
use futures::future::try_join_all;
use mongodb::{
    Client, Database,
    bson::{Bson, Document, Timestamp, doc},
    error::ErrorKind,
    options::{Acknowledgment, ClientOptions, WriteConcern},
};
use tokio::sync::{Mutex, OnceCell, OwnedMutexGuard};

use super::{
    background,
    links::Links,
    node::Node,
    options::{ADMIN, Options, User, WRITER},
    run,
    wait::{wait_for, wait_until},
};

const READY_WITHIN: Duration = Duration::from_secs(60);
const SETTINGS: &str = "heartbeatFrequencyMS=500&connectTimeoutMS=2000&serverSelectionTimeoutMS=10000&w=majority";

/// A cheap clone. One that is our own and not shared is removed with its last clone.
#[derive(Clone)]
pub struct Server(Arc<Inner>);

struct Inner {
    uri: Uri,
    nodes: Vec<Node>,
    links: Links,
    options: Options,
    shared: bool,
    /// For the fixture's own commands; lives on the background runtime.
    admin: OnceCell<Client>,
    /// A fail point is one per server: whoever sets one holds its lock.
    fail_points: Mutex<HashMap<String, Arc<Mutex<()>>>>,
}

enum Uri {
    Given(String),
    Own { hosts: String, set: Option<String> },
}

impl Server {
    /// A server of the test's own, which it may break.
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub async fn own(options: Options) -> Self {
        Self::launch(options, false).await.expect("a server of the test's own")
    }

    /// Starts a server and waits until it takes writes.
    pub async fn launch(options: Options, shared: bool) -> anyhow::Result<Self> {
        background::run(async move {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let set = format!("rs{}", COUNT.fetch_add(1, Ordering::Relaxed));
            let links = Links::default();
            let nodes = try_join_all((0..options.nodes).map(|_| Node::start(&options, &set, &links))).await?;
            let hosts = nodes.iter().map(Node::address).collect::<Vec<_>>();
            if !options.standalone {
                initiate(&hosts, &set).await?;
            }
            let primary = writable(&hosts).await?;
            if options.auth {
                add_first_users(primary).await?;
            }
            let set = (!options.standalone).then_some(set);
            let server = Self::new(Uri::Own { hosts: hosts.join(","), set }, nodes, links, options, shared);
            server.ready().await;
            server.complete().await;
            server.outlives_a_kill().await?;
            Ok(server)
        })
        .await
    }

    /// A copy of the files of a server of one node, which is stopped for it and starts again.
    pub async fn copy_files(&self) -> PathBuf {
        self.stop().await;
        let server = self.clone();
        let copy = background::run(async move { server.node(0).copy_files().await }).await;
        self.start().await;
        copy.expect("a copy of the server's files")
    }

    /// The older state of a copy: a server over it, at this one's address and of its name. This one is stopped for good.
    pub async fn put_back(&self, files: PathBuf) -> Self {
        assert!(!self.0.options.linked && self.0.nodes.len() == 1, "one node without links");
        self.stop().await;
        let (server, options) = (self.clone(), self.0.options.clone());
        let older = background::run(async move {
            let Uri::Own { hosts, set } = &server.0.uri else { unreachable!("it is the test's own") };
            let node = server.node(0).put_back(&options, set.as_deref().unwrap_or_default(), &files).await?;
            let uri = Uri::Own { hosts: hosts.clone(), set: set.clone() };
            anyhow::Ok(Self::new(uri, vec![node], Links::default(), options, false))
        });
        let older = older.await.expect("a server over the copy");
        older.ready().await;
        older
    }

    /// The server that `MONGOSUB_TEST_SERVER` names.
    pub async fn given(uri: &str) -> anyhow::Result<Self> {
        let server = Self::new(Uri::Given(uri.to_owned()), Vec::new(), Links::default(), Options::default(), true);
        let hello = server.admin_command(doc! { "hello": 1 }).await.context("the server of MONGOSUB_TEST_SERVER")?;
        if !hello.contains_key("setName") {
            bail!("the server of MONGOSUB_TEST_SERVER is not a member of a replica set, so it has no change streams");
        }
        run::current().databases_on(uri);
        Ok(server)
    }

    fn new(uri: Uri, nodes: Vec<Node>, links: Links, options: Options, shared: bool) -> Self {
        let (admin, fail_points) = (OnceCell::new(), Mutex::default());
        Self(Arc::new(Inner { uri, nodes, links, options, shared, admin, fail_points }))
    }

    /// With the settings of `client`, and with auth as `ADMIN`. For child processes and the command.
    pub fn uri(&self) -> String {
        self.uri_as(ADMIN)
    }

    pub fn uri_as(&self, user: User) -> String {
        match &self.0.uri {
            Uri::Given(uri) => uri.clone(),
            Uri::Own { hosts, set } => {
                let (user, source) = if self.0.options.auth {
                    (format!("{}:{}@", user.name, user.password), "&authSource=admin")
                } else {
                    (String::new(), "")
                };
                let how = set.as_ref().map_or("directConnection=true".into(), |set| format!("replicaSet={set}"));
                format!("mongodb://{user}{hosts}/?{how}&{SETTINGS}{source}")
            }
        }
    }

    /// `host:port` of every node.
    pub fn addresses(&self) -> Vec<String> {
        self.0.nodes.iter().map(Node::address).collect()
    }

    /// Container or process ids of the nodes.
    pub fn ids(&self) -> Vec<String> {
        self.0.nodes.iter().map(Node::id).collect()
    }

    /// What `client` is made with: majority writes, and a dead server is noticed within two seconds.
    pub async fn client_options(&self) -> ClientOptions {
        self.client_options_as(ADMIN).await
    }

    pub async fn client_options_as(&self, user: User) -> ClientOptions {
        let mut options = ClientOptions::parse(self.uri_as(user)).await.expect("the server's URI");
        options.heartbeat_freq.get_or_insert(Duration::from_millis(500));
        options.connect_timeout.get_or_insert(Duration::from_secs(2));
        options.server_selection_timeout.get_or_insert(Duration::from_secs(10));
        options.write_concern.get_or_insert(WriteConcern::builder().w(Acknowledgment::Majority).build());
        options.max_pool_size.get_or_insert(64);
        options
    }

    /// A client that belongs to the caller's runtime.
    pub async fn client(&self) -> Client {
        Client::with_options(self.client_options().await).expect("the options of a client")
    }

    pub async fn client_as(&self, user: User) -> Client {
        Client::with_options(self.client_options_as(user).await).expect("the options of a client")
    }

    /// With an `appName`, for fail points that are to hit this client alone.
    pub async fn client_named(&self, app_name: &str) -> Client {
        let mut options = self.client_options().await;
        options.app_name = Some(app_name.into());
        Client::with_options(options).expect("the options of a client")
    }

    /// A client for each node alone, whatever part that plays in the set.
    pub async fn client_of_each_node(&self) -> Vec<Client> {
        let clients = self.addresses().into_iter().map(|address| async move { direct(&address).await });
        try_join_all(clients).await.expect("a client for each node")
    }

    /// A database that no other test has, by a new client.
    pub async fn fresh_database(&self) -> Database {
        self.client().await.database(&run::current().database_name())
    }

    /// Adds a user with the given roles, for instance `[{role: "read", db: "x"}]`.
    pub async fn add_user(&self, user: User, roles: Vec<Document>) {
        let create = doc! { "createUser": user.name, "pwd": user.password, "roles": roles };
        self.admin_command(create).await.expect("a new user");
    }

    /// A command to database `admin`, as `ADMIN`, by a client that no fail point with an `appName` hits.
    pub async fn admin_command(&self, command: Document) -> mongodb::error::Result<Document> {
        self.with_admin(move |client| async move { client.database("admin").run_command(command).await }).await
    }

    /// Runs something with the fixture's own client.
    pub(super) async fn with_admin<T, F, Fut>(&self, work: F) -> T
    where
        T: Send + 'static,
        F: FnOnce(Client) -> Fut + Send + 'static,
        Fut: Future<Output = T> + Send + 'static,
    {
        let server = self.clone();
        background::run(async move { work(server.0.admin.get_or_init(|| server.client()).await.clone()).await }).await
    }

    pub(super) async fn hold_fail_point(&self, name: &str) -> OwnedMutexGuard<()> {
        let lock = self.0.fail_points.lock().await.entry(name.to_owned()).or_default().clone();
        tokio::time::timeout(READY_WITHIN, lock.lock_owned()).await.unwrap_or_else(|_| {
            panic!("fail point {name} is still set by another test, or by this one: use FailPoint::again")
        })
    }

    /// A node to break. Only of a server of the test's own.
    pub(super) fn node(&self, number: usize) -> &Node {
        assert!(!self.0.shared, "this server is shared with other tests; break one of your own: Server::own");
        &self.0.nodes[number]
    }

    pub(super) fn links(&self) -> &Links {
        assert!(self.0.options.linked, "the links of this server cannot be cut: Options::linked");
        &self.0.links
    }

    /// Runs something with a node on the runtime that its container belongs to.
    pub(super) async fn with_node<Fut>(&self, number: usize, work: impl FnOnce(Self) -> Fut)
    where
        Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        self.node(number);
        background::run(work(self.clone())).await.expect("the server does what it is told");
    }

    /// Returns when the server takes writes.
    pub async fn ready(&self) {
        let server = self.clone();
        background::run(async move {
            let admin = server.0.admin.get_or_init(|| server.client()).await.database("admin");
            wait_until("the server takes writes", READY_WITHIN, || takes_writes(&admin)).await;
        })
        .await;
    }
}

impl Server {
    /// Returns when every node takes part, and what was written until then is majority-committed: a node that is still
    /// copying the data cannot replace a primary, and one that has just copied it has no oplog of earlier times.
    pub async fn complete(&self) {
        if self.0.nodes.len() < 2 {
            return;
        }
        let status = || async { self.admin_command(doc! { "replSetGetStatus": 1 }).await.ok() };
        let applied = wait_for("every node is primary or secondary", READY_WITHIN, || async {
            let status = status().await?;
            let state = |member: &Bson| member.as_document().and_then(|member| member.get_i32("state").ok());
            let all = status.get_array("members").ok()?.iter().all(|member| matches!(state(member), Some(1 | 2)));
            all.then(|| optime(&status, "appliedOpTime")).flatten()
        })
        .await;
        wait_until("what was written is majority-committed", READY_WITHIN, || async {
            status().await.and_then(|status| optime(&status, "lastCommittedOpTime")).is_some_and(|at| at >= applied)
        })
        .await;
    }
}

impl Server {
    /// Returns when every node has its first stable checkpoint: a member that is killed while it is being made comes back
    /// as no member of anything, with no data (seen on 4.4.2, a third of a second after the first write).
    async fn outlives_a_kill(&self) -> anyhow::Result<()> {
        if self.0.options.standalone {
            return Ok(());
        }
        for host in self.addresses() {
            let mut options = self.client_options().await;
            options.hosts = vec![host.parse()?];
            options.direct_connection = Some(true);
            options.repl_set_name = None;
            let admin = Client::with_options(options)?.database("admin");
            wait_until("the server has a stable checkpoint", READY_WITHIN, || async {
                let status = admin.run_command(doc! { "replSetGetStatus": 1 }).await.unwrap_or_default();
                status.get_timestamp("lastStableRecoveryTimestamp").is_ok_and(|time| time.time > 0)
            })
            .await;
        }
        Ok(())
    }
}

/// A time in the reply to `replSetGetStatus`.
fn optime(status: &Document, name: &str) -> Option<Timestamp> {
    status.get_document("optimes").ok()?.get_document(name).ok()?.get_timestamp("ts").ok()
}

impl Drop for Inner {
    fn drop(&mut self) {
        let admin = self.admin.take();
        let nodes = std::mem::take(&mut self.nodes);
        // What fails here, the guard does.
        background::spawn(async move {
            drop(admin);
            for node in nodes {
                let _ = node.remove().await;
            }
        });
    }
}

/// A client for a node that is not a member of anything yet.
async fn direct(address: &str) -> mongodb::error::Result<Client> {
    Client::with_uri_str(format!("mongodb://{address}/?directConnection=true&{SETTINGS}")).await
}

async fn initiate(hosts: &[String], set: &str) -> anyhow::Result<()> {
    let members: Vec<_> = (0..).zip(hosts).map(|(id, host): (i32, _)| doc! { "_id": id, "host": host }).collect();
    let configuration = doc! {
        "_id": set,
        "members": members,
        "settings": { "electionTimeoutMillis": 1000, "heartbeatIntervalMillis": 200 },
    };
    direct(&hosts[0]).await?.database("admin").run_command(doc! { "replSetInitiate": configuration }).await?;
    Ok(())
}

/// The address of the node that takes writes, once there is one.
async fn writable(hosts: &[String]) -> anyhow::Result<&String> {
    // Other clients than before: those have seen the nodes when they were nothing, and look again only later.
    let mut clients = Vec::new();
    for host in hosts {
        clients.push((host, direct(host).await?.database("admin")));
    }
    let clients = &clients;
    let writable = wait_for("a node takes writes", READY_WITHIN, || async move {
        for (host, admin) in clients {
            if takes_writes(admin).await {
                return Some(*host);
            }
        }
        None
    });
    Ok(writable.await)
}

pub async fn takes_writes(admin: &Database) -> bool {
    let hello = admin.run_command(doc! { "hello": 1 }).await;
    hello.is_ok_and(|hello| hello.get_bool("isWritablePrimary").unwrap_or(false))
}

/// By the localhost exception: as long as there is no user, whoever comes from the same machine may make the first one.
async fn add_first_users(primary: &str) -> anyhow::Result<()> {
    let create = |user: User, role: &str| doc! { "createUser": user.name, "pwd": user.password, "roles": [role] };
    direct(primary).await?.database("admin").run_command(create(ADMIN, "root")).await?;
    let User { name, password } = ADMIN;
    let uri = format!("mongodb://{name}:{password}@{primary}/?authSource=admin&directConnection=true&{SETTINGS}");
    Client::with_uri_str(uri).await?.database("admin").run_command(create(WRITER, "readWriteAnyDatabase")).await?;
    Ok(())
}

/// The code of a refused command.
pub fn code(error: &mongodb::error::Error) -> Option<i32> {
    match error.kind.as_ref() {
        ErrorKind::Command(command) => Some(command.code),
        _ => None,
    }
}
