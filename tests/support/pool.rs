//! The servers that tests share, each started when the first test asks for it, and kept until the process ends.

use std::sync::Arc;

use mongodb::{Client, Database};
use tokio::sync::OnceCell;

use super::{choice::choice, options::Options, run, server::Server};

/// What tests share. They share only servers: each has a database of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A replica set of one node; the server of `MONGOSUB_TEST_SERVER` when that is a URI.
    Plain,
    /// The same, but always one of ours, so that fail points can be set.
    Faulty,
    /// For `Server::roll_oplog_past`. Any test's position may be lost here at any moment.
    SmallOplog,
    /// With the users `ADMIN` and `WRITER`.
    Auth,
}

/// A server, a client that belongs to the test's runtime, and a database that no other test has.
pub struct Fixture {
    pub server: Server,
    pub client: Client,
    pub database: Database,
}

/// # Panics
///
/// When the server does not start.
pub async fn shared(kind: Kind) -> Fixture {
    let server = server(kind).await.unwrap_or_else(|error| panic!("the shared {kind:?} server: {error:#}"));
    let client = server.client().await;
    let database = client.database(&run::current().database_name());
    Fixture { server, client, database }
}

async fn server(kind: Kind) -> Result<Server, Arc<anyhow::Error>> {
    // A failure is kept as well: the next test would wait as long for the same.
    type Slot = OnceCell<Result<Server, Arc<anyhow::Error>>>;
    static PLAIN: Slot = OnceCell::const_new();
    static FAULTY: Slot = OnceCell::const_new();
    static SMALL_OPLOG: Slot = OnceCell::const_new();
    static AUTH: Slot = OnceCell::const_new();

    let given = choice().uri.as_ref();
    let (slot, options) = match kind {
        Kind::Faulty if given.is_some() => (&FAULTY, Options::default()),
        Kind::Plain | Kind::Faulty => (&PLAIN, Options::default()),
        Kind::SmallOplog => (&SMALL_OPLOG, Options::small_oplog()),
        Kind::Auth => (&AUTH, Options::auth()),
    };
    let start = || async move {
        let started = match given {
            Some(uri) if kind == Kind::Plain => Server::given(uri).await,
            _ => Server::launch(options, true).await,
        };
        started.map_err(Arc::new)
    };
    slot.get_or_init(start).await.clone()
}
