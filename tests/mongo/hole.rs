//! The hole in the oplog: a write that is being committed while a subscription starts, with later writes visible already.
//! What a server tells of its present then lies beyond a write that nobody can see yet, and that is acknowledged later.

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, GlobalCheckpointSource, Start, StartAt, Subscribe,
    bson::{Document, Timestamp, doc},
    memory::MemoryCheckpointStorage,
    mongodb::{
        Client, Collection, Database,
        options::{Acknowledgment, CollectionOptions, WriteConcern},
    },
};

use crate::{
    seen::{Seen, insert, things},
    support::{FailMode, Options, Server, test},
};

type Action = Subscribe<ChangeStreamModel, MemoryCheckpointStorage>;

pub fn tests() -> Vec<Trial> {
    vec![
        test("a write held in the oplog while a subscription starts is delivered", |_| async {
            held_write_is_delivered("granted", |model| model, |action| action).await
        }),
        test(
            "a write held in the oplog while a subscription starts at the present of its own is delivered",
            |_| async {
                held_write_is_delivered(
                    "granted",
                    |model| model,
                    |action| action.start_at(StartAt::Always(Start::Present)),
                )
                .await
            },
        ),
        test("a write held in the oplog while a subscription starts unrecorded is delivered", |_| async {
            held_write_is_delivered(
                REFUSED,
                |model| model.global_checkpoint_source(GlobalCheckpointSource::HostInfoOnly),
                |action| action.start_when_no_start_position_can_be_recorded(true),
            )
            .await
        }),
    ]
}

/// The app name of the client that is refused `hostInfo`.
const REFUSED: &str = "refused";

async fn held_write_is_delivered(
    app_name: &str,
    model: fn(ChangeStreamModel) -> ChangeStreamModel,
    with: fn(Action) -> Action,
) -> anyhow::Result<()> {
    // Nothing that waits for a majority gets past the hole: not on a server that others use.
    let server = Server::own(Options::default()).await;
    let database = server.fresh_database().await;
    let (written, elsewhere) = (things(&database), at_once(&database));
    insert(&written, [0]).await?;
    elsewhere.insert_one(doc! {}).await?;
    let refused = doc! { "failCommands": ["hostInfo"], "errorCode": 8000 };
    let _refused = server.fail_command(REFUSED, FailMode::Always, refused).await;

    let namespace = doc! { "collectionNS": written.namespace().to_string() };
    let hole = server.fail_point("hangAfterCollectionInserts", FailMode::Always, namespace).await;
    let held = written.clone();
    let held = tokio::spawn(async move { insert(&held, [1]).await });
    hole.entered(1).await;
    elsewhere.insert_one(doc! {}).await?;
    let told = operation_time(&database).await?;

    let client: Client = server.client_named(app_name).await;
    let model = model(ChangeStreamModel::collection(&things(&client.database(database.name()))));
    // Kept in memory: a claim waits for a majority, too, and would only come after the hole.
    let subscriptions = mongosub::DurableSubscriptions::new(model, MemoryCheckpointStorage::new());
    let seen = Seen::default();
    with(subscriptions.subscribe("hole", seen.handler())).await?;
    assert!(!held.is_finished(), "the subscription has started while the write was held");
    hole.off().await;
    held.await??;
    insert(&written, [2]).await?;
    seen.sees(2).await;
    assert_eq!(seen.ids(), [1, 2]);
    let time = seen.all()[0].event.cluster_time()?;
    assert!(time < told, "{time} is no hole: the server had told {told}");
    Ok(())
}

/// A collection whose writes do not wait for a majority.
fn at_once(database: &Database) -> Collection<Document> {
    let one = WriteConcern::builder().w(Acknowledgment::Nodes(1)).build();
    database.collection_with_options("elsewhere", CollectionOptions::builder().write_concern(one).build())
}

/// What the server takes for its present.
async fn operation_time(database: &Database) -> anyhow::Result<Timestamp> {
    Ok(database.run_command(doc! { "ping": 1 }).await?.get_timestamp("operationTime")?)
}
