//! Three nodes, one fault after the other, under writes by another client. Two subscriptions read through each: one on the
//! primary, one on a secondary; their checkpoints lie on the same set.

use std::time::{Duration, Instant};

use futures::future::join_all;
use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, MongoCheckpointStorage,
    bson::{Document, doc},
    mongodb::{
        Client, Collection,
        options::{Acknowledgment, ReadPreference, WriteConcern},
    },
};

use tokio::sync::{Semaphore, SemaphorePermit};

use super::{verdict::Truth, witness::Witness, writer::Writer};
use crate::{
    seen::PATIENCE,
    support::{Options, Server, run, server::takes_writes, test, wait_for, wait_until},
};

/// How many more writes show that everything flows.
const FLOWS: i32 = 10;
/// Sets at a time are enough for a small machine.
static SETS: Semaphore = Semaphore::const_new(2);
/// The client that is cut off alone.
const READER: &str = "reader";

pub fn tests() -> Vec<Trial> {
    vec![
        test("in the fault matrix, a primary of three that is lost loses, repeats and reorders nothing", |_| {
            primaries()
        }),
        test("in the fault matrix, the end of the node that is read loses, repeats and reorders nothing", |_| homes()),
    ]
}

/// The longer ones, to be listed apart, so that none has to wait for those above.
pub fn long() -> Vec<Trial> {
    vec![
        test("in the fault matrix, links that are cut lose, repeat and reorder nothing", |_| links()),
        test("in the fault matrix, restarts of each node and of all lose, repeat and reorder nothing", |_| restarts()),
    ]
}

async fn primaries() -> anyhow::Result<()> {
    let set = Set::start().await?;

    let scene = set.scene("the primary is killed").await?;
    let old = set.primary().await;
    set.server.kill_node(old).await;
    set.primary_but(Some(old)).await;
    scene.primary.retries().await;
    scene.flows().await;
    set.server.start_node(old).await;
    scene.ends(&set).await?;

    let scene = set.scene("the primary steps down").await?;
    let old = set.primary().await;
    set.step_down(old, 6).await?;
    set.primary_but(Some(old)).await;
    scene.ends(&set).await?;

    let scene = set.scene("the primary freezes").await?;
    let old = set.primary().await;
    set.server.pause_node(old).await;
    set.primary_but(Some(old)).await;
    scene.primary.retries().await;
    scene.flows().await;
    set.server.unpause_node(old).await;
    scene.ends(&set).await
}

async fn links() -> anyhow::Result<()> {
    let set = Set::start().await?;

    let scene = set.scene("the primary is cut from everybody").await?;
    let old = set.primary().await;
    set.server.cut_node(old);
    set.primary_but(Some(old)).await;
    scene.primary.retries().await;
    scene.flows().await;
    set.server.heal();
    scene.ends(&set).await?;

    let scene = set.scene("the primary is cut from the other nodes alone").await?;
    let old = set.primary().await;
    set.server.cut_peers(old);
    set.primary_but(Some(old)).await;
    // The cursor is on a node that answers, and has nothing new for ever.
    scene.flows().await;
    set.server.heal();
    scene.ends(&set).await?;

    let mut scene = set.scene("the primary is cut from the subscriber alone").await?;
    set.server.cut_client(READER, set.primary().await);
    scene.primary.retries().await;
    scene.secondary.says("storage_unavailable").await;
    // The set goes on, and so does what is read from a secondary.
    let goal = scene.writes().await;
    scene.secondary.reaches(goal).await;
    set.server.heal();
    scene.healed = Some(Instant::now());
    scene.ends(&set).await
}

async fn homes() -> anyhow::Result<()> {
    let set = Set::start().await?;

    let scene = set.scene("the server of the cursor becomes a secondary, and is killed").await?;
    let old = set.home(&scene.primary, &scene).await;
    set.step_down(old, 60).await?;
    set.primary_but(Some(old)).await;
    scene.flows().await;
    anyhow::ensure!(set.home(&scene.primary, &scene).await == old, "the cursor has gone");
    anyhow::ensure!(scene.primary.reconnects() == 0, "a cursor goes on when its server becomes a secondary");
    set.server.kill_node(old).await;
    scene.primary.retries().await;
    scene.flows().await;
    set.server.start_node(old).await;
    scene.ends(&set).await?;

    let scene = set.scene("the secondary that is read is killed").await?;
    let home = set.home(&scene.secondary, &scene).await;
    set.server.kill_node(home).await;
    // There is another one, so this may be too short to be seen as a state.
    scene.secondary.reopens(1).await;
    scene.flows().await;
    set.server.start_node(home).await;
    scene.ends(&set).await
}

async fn restarts() -> anyhow::Result<()> {
    let set = Set::start().await?;

    let scene = set.scene("all nodes are restarted one by one").await?;
    for node in 0..3 {
        set.server.stop_node(node).await;
        scene.flows().await;
        set.server.start_node(node).await;
        set.is_whole().await?;
        scene.flows().await;
    }
    scene.primary.reopens(1).await;
    scene.secondary.reopens(1).await;
    scene.ends(&set).await?;

    let mut scene = set.scene("all nodes are down for a while").await?;
    let failures = scene.writer.failures();
    join_all((0..3).map(|node| set.server.kill_node(node))).await;
    scene.primary.retries().await;
    scene.secondary.retries().await;
    // The driver has given up at least once.
    wait_until("writes fail", PATIENCE, || async { scene.writer.failures() > failures }).await;
    join_all((0..3).map(|node| set.server.start_node(node))).await;
    scene.healed = Some(Instant::now());
    scene.ends(&set).await
}

/// Three nodes, and the clients of a test.
struct Set {
    server: Server,
    nodes: Vec<Client>,
    reader: Client,
    writer: Client,
    _permit: SemaphorePermit<'static>,
}

impl Set {
    async fn start() -> anyhow::Result<Self> {
        let permit = SETS.acquire().await?;
        // A node that follows one that has fallen silent would wait five seconds for it, twice, and only then can another
        // one become primary: the server's affair, and no time of ours.
        let options = Options::default().nodes(3).linked().parameter("oplogNetworkTimeoutBufferSeconds", "1");
        let server = Server::own(Options { oplog_megabytes: 64, ..options }).await;
        let client = async |name: &str| {
            let mut options = server.client_options().await;
            options.app_name = Some(name.into());
            options.connect_timeout = Some(Duration::from_secs(1));
            options.server_selection_timeout = Some(Duration::from_secs(5));
            Client::with_options(options)
        };
        let (nodes, reader, writer) =
            (server.client_of_each_node().await, client(READER).await?, client("writer").await?);
        Ok(Self { server, nodes, reader, writer, _permit: permit })
    }

    async fn primary(&self) -> usize {
        self.primary_but(None).await
    }

    /// Waits until a node takes writes, another one than that, which is not asked.
    async fn primary_but(&self, old: Option<usize>) -> usize {
        wait_for("there is a primary", PATIENCE, || async {
            for (number, node) in self.nodes.iter().enumerate() {
                if Some(number) != old && takes_writes(&node.database("admin")).await {
                    return Some(number);
                }
            }
            None
        })
        .await
    }

    /// For so many seconds it does not come back.
    async fn step_down(&self, primary: usize, seconds: i32) -> anyhow::Result<()> {
        let command = doc! { "replSetStepDown": seconds, "secondaryCatchUpPeriodSecs": 4 };
        self.nodes[primary].database("admin").run_command(command).await?;
        Ok(())
    }

    /// Returns when all nodes take part and are up to date, so that each can lose any other.
    async fn is_whole(&self) -> anyhow::Result<()> {
        self.server.complete().await;
        let all = WriteConcern::builder().w(Acknowledgment::Nodes(3)).build();
        let whole = self.writer.database("mongosub_matrix").collection::<Document>("whole");
        wait_until("a write reaches all nodes", PATIENCE, || async {
            whole.insert_one(doc! {}).write_concern(all.clone()).await.is_ok()
        })
        .await;
        Ok(())
    }

    /// The node that the cursor of a subscription is on: where it was last asked for more. A cursor that was dropped may lie
    /// about elsewhere, for the driver has it killed on the primary wherever it is.
    async fn home(&self, witness: &Witness, scene: &Scene) -> usize {
        let shown = doc! { "$match": {
            "ns": scene.things.namespace().to_string(),
            "cursor.originatingCommand.comment": witness.name(),
        } };
        let latest = doc! { "$group": { "_id": null, "at": { "$max": "$cursor.lastAccessDate" } } };
        let pipeline = vec![doc! { "$currentOp": { "idleCursors": true, "localOps": true } }, shown, latest];
        let command = doc! { "aggregate": 1, "pipeline": pipeline, "cursor": {} };
        wait_for("the cursor is found", PATIENCE, || async {
            let mut last = None;
            for (number, node) in self.nodes.iter().enumerate() {
                let reply = node.database("admin").run_command(command.clone()).await.ok();
                let found =
                    reply.as_ref().and_then(|reply| reply.get_document("cursor").ok()?.get_array("firstBatch").ok());
                let at = found.and_then(|found| found.first()?.as_document()?.get_datetime("at").ok());
                last = last.max(at.map(|at| (*at, number)));
            }
            last.map(|(_, number)| number)
        })
        .await
    }

    /// Everything is whole, the subscriptions read, the writer writes.
    async fn scene(&self, fault: &'static str) -> anyhow::Result<Scene> {
        self.is_whole().await?;
        let database = run::current().database_name();
        let things = self.writer.database(&database).collection::<Document>("things");
        let read = self.reader.database(&database);
        let witness = async |name, preference| {
            let model = ChangeStreamModel::collection(&read.collection::<Document>("things"))
                .read_preference(preference)
                .comment(name);
            let storage = MongoCheckpointStorage::new(&read.collection::<Document>("checkpoints"));
            Witness::start(name, model, storage).await
        };
        let primary = witness("on the primary", ReadPreference::Primary).await?;
        let secondary = witness("on a secondary", ReadPreference::Secondary { options: None }).await?;
        let writer = Writer::start(things.clone());
        let scene = Scene { fault, began: Instant::now(), things, primary, secondary, writer, healed: None };
        scene.flows().await;
        Ok(scene)
    }
}

/// One fault: who writes, and who reads.
struct Scene {
    fault: &'static str,
    began: Instant,
    things: Collection<Document>,
    primary: Witness,
    secondary: Witness,
    writer: Writer,
    /// When the fault was over, where nothing can come before that.
    healed: Option<Instant>,
}

impl Scene {
    /// Some more is written. Gives the last of it.
    async fn writes(&self) -> i32 {
        let goal = self.writer.last() + FLOWS;
        self.writer.reaches(goal).await;
        goal
    }

    /// Some more is written, and delivered to both.
    async fn flows(&self) {
        let goal = self.writes().await;
        self.primary.reaches(goal).await;
        self.secondary.reaches(goal).await;
    }

    /// The set gets whole again, more is written, and everything is compared.
    async fn ends(self, set: &Set) -> anyhow::Result<()> {
        set.is_whole().await?;
        self.flows().await;
        let written = self.writer.stop().await;
        let truth = Truth::of(&self.things).await?;
        let mut line = format!(
            "matrix: {}, in {:.1} s: acknowledged {}, in doubt {}, failed writes {}, longest silence {} ms",
            self.fault,
            self.began.elapsed().as_secs_f64(),
            written.acknowledged.len(),
            written.doubtful.len(),
            written.failures,
            written.silence.as_millis(),
        );
        for witness in [self.primary, self.secondary] {
            let testimony = witness.testifies(&written, &truth, self.healed).await;
            line += "; ";
            line += &testimony.map_err(|error| error.context(self.fault))?;
        }
        println!("{line}");
        Ok(())
    }
}
