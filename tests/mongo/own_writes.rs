//! A scope around the storage's own collection: it is left out where it is the storage's, and read where it is another's.

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, DurableSubscriptions, Namespace, SubscribeError,
    bson::{Document, doc},
    mongodb::Database,
};

use crate::{
    seen::{Seen, Subscriptions, insert, record, storage, things},
    support::{Options, Server, test},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("a subscription to a database does not feed on its own checkpoints", |ctx| async move {
            let database = ctx.plain().await.database;
            not_its_own(&database, ChangeStreamModel::database(&database)).await
        }),
        test("a subscription to a deployment does not feed on its own checkpoints", |_| async {
            // It sees what every test writes: not on a server that others use.
            let server = Server::own(Options::default()).await;
            let database = server.fresh_database().await;
            not_its_own(&database, ChangeStreamModel::deployment(database.client())).await
        }),
        test("a collection named like the storage's on another deployment is read", |ctx| async move {
            another_deployment(ctx.plain().await.database).await
        }),
        test("a subscription to the collection of its own checkpoints is refused", |ctx| async move {
            to_the_checkpoints(ctx.plain().await.database).await
        }),
    ]
}

async fn not_its_own(database: &Database, model: ChangeStreamModel) -> anyhow::Result<()> {
    let subscriptions = DurableSubscriptions::new(model, storage(database));
    let seen = Seen::default();
    let subscription = subscriptions.subscribe("own", seen.handler()).await?;
    let others = database.collection::<Document>("others");
    for id in 0..5 {
        insert(&things(database), [id]).await?;
        // Stored, so that the checkpoint of this event lies in the oplog before the next one.
        seen.sees(id).await;
        subscription.drained().await?;
    }
    insert(&others, [5]).await?;
    seen.sees(5).await;
    assert_eq!(seen.ids(), [0, 1, 2, 3, 4, 5]);
    let namespaces: Vec<_> = seen.all().iter().map(|delivery| delivery.event.namespace()).collect::<Result<_, _>>()?;
    let namespace = |name: &str| Some(Namespace::new(database.name(), name));
    assert_eq!(namespaces[..5], vec![namespace("things"); 5]);
    assert_eq!(namespaces[5..], [namespace("others")]);
    assert!(subscription.status().saves >= 5);
    Ok(())
}

async fn another_deployment(database: Database) -> anyhow::Result<()> {
    let keeper = Server::own(Options::default()).await;
    let kept = keeper.client().await.database(database.name());
    let subscriptions = DurableSubscriptions::new(ChangeStreamModel::database(&database), storage(&kept));
    let seen = Seen::default();
    let subscription = subscriptions.subscribe("another", seen.handler()).await?;
    insert(&things(&database), [1]).await?;
    insert(&database.collection("checkpoints"), [2]).await?;
    insert(&things(&database), [3]).await?;
    seen.sees(3).await;
    assert_eq!(seen.ids(), [1, 2, 3]);
    subscription.shutdown().await?;
    assert!(record(&kept, "another").await?.is_some_and(|record| seen.is_covered_by(record.position.as_ref())));
    // The collection alone, too.
    let model = ChangeStreamModel::collection(&database.collection::<Document>("checkpoints"));
    let there = DurableSubscriptions::new(model, storage(&kept));
    let seen = Seen::default();
    there.subscribe("there", seen.handler()).await?;
    insert(&database.collection("checkpoints"), [4]).await?;
    seen.sees(4).await;
    Ok(())
}

async fn to_the_checkpoints(database: Database) -> anyhow::Result<()> {
    let model = ChangeStreamModel::collection(&database.collection::<Document>("checkpoints"));
    let subscriptions: Subscriptions = DurableSubscriptions::new(model, storage(&database));
    let error = subscriptions.subscribe("checkpoints", Seen::default().handler()).await.err();
    let Some(SubscribeError::Config { field: "model", message }) = &error else { panic!("{error:?}") };
    assert!(message.contains(&format!("{}.checkpoints", database.name())), "{message}");
    assert!(subscriptions.running().is_empty());
    assert_eq!(database.collection::<Document>("checkpoints").find_one(doc! {}).await?, None);
    Ok(())
}
