//! Whether the history of a deployment shows the end of a collection: what another UUID is explained by.

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Checkpoint, Reason, SourceError, SubscriptionModel,
    bson::{Document, doc},
    mongodb::Database,
};

use crate::{
    seen::{insert, things},
    support::{Context, Fixture, Kind, test},
};

pub fn tests() -> Vec<Trial> {
    vec![
        ending("a drop explains another collection", End::Drop),
        ending("two drops explain the collections before them", End::DropTwice),
        ending("a rename away explains another collection", End::RenamedAway),
        ending("a rename over it explains another collection", End::RenamedOver),
        ending("a dropped database explains another collection", End::DatabaseDropped),
        test("a rename over it explains nothing that never lived under that name", |ctx: Context| async move {
            never_lived(ctx.plain().await).await
        }),
        test("nothing explains a collection that lives, or is unknown", |ctx: Context| async move {
            lives(ctx.plain().await).await
        }),
        test("lost history explains nothing and says so", |ctx: Context| async move {
            lost(ctx.shared(Kind::SmallOplog).await).await
        }),
    ]
}

#[derive(Clone, Copy)]
enum End {
    Drop,
    DropTwice,
    RenamedAway,
    RenamedOver,
    DatabaseDropped,
}

fn ending(name: &str, end: End) -> Trial {
    test(name, move |ctx: Context| async move { ends(ctx.plain().await.database, end).await })
}

async fn uuid(model: &ChangeStreamModel) -> anyhow::Result<String> {
    Ok(model.identity().await?.collection_uuid.expect("a UUID"))
}

async fn ends(database: Database, end: End) -> anyhow::Result<()> {
    let (written, model) = (things(&database), ChangeStreamModel::collection(&things(&database)));
    insert(&written, [0]).await?;
    let (before, from) = (uuid(&model).await?, model.head().await?);
    insert(&written, [1]).await?;
    let mut between = None;
    match end {
        End::Drop => written.drop().await?,
        End::DropTwice => {
            written.drop().await?;
            insert(&written, [2]).await?;
            between = Some(uuid(&model).await?);
            written.drop().await?;
        }
        End::RenamedAway => rename(&database, "things", "elsewhere").await?,
        End::RenamedOver => {
            database.collection("new").insert_one(doc! { "_id": 7 }).await?;
            rename(&database, "new", "things").await?;
        }
        End::DatabaseDropped => database.drop().await?,
    }
    // It is made anew by that, unless another one is there.
    insert(&written, [3]).await?;
    let now = uuid(&model).await?;
    assert_ne!(now, before);
    assert!(model.ended_since(&from, &before).await?, "its end lies behind the position");
    if let Some(between) = between {
        assert!(model.ended_since(&from, &between).await?, "behind the first end comes the second");
    }
    assert!(!model.ended_since(&from, &now).await?, "what is there now has not ended");
    let behind = model.head().await?;
    assert!(!model.ended_since(&behind, &before).await?, "nothing has ended since");
    Ok(())
}

async fn rename(database: &Database, from: &str, to: &str) -> anyhow::Result<()> {
    let full = |name: &str| format!("{}.{name}", database.name());
    let command = doc! { "renameCollection": full(from), "to": full(to), "dropTarget": true };
    database.client().database("admin").run_command(command).await?;
    Ok(())
}

const UNKNOWN: &str = "0102030405060708090A0B0C0D0E0F10";

async fn never_lived(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    let (written, model) = (things(&database), ChangeStreamModel::collection(&things(&database)));
    insert(&written, [0]).await?;
    let from = model.head().await?;
    database.collection("new").insert_one(doc! { "_id": 7 }).await?;
    rename(&database, "new", "things").await?;
    assert!(!model.ended_since(&from, UNKNOWN).await?);
    Ok(())
}

async fn lives(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    let (written, model) = (things(&database), ChangeStreamModel::collection(&things(&database)));
    insert(&written, 0..3).await?;
    let from = model.head().await?;
    insert(&written, 3..6).await?;
    database.collection::<Document>("other").insert_one(doc! {}).await?;
    database.collection::<Document>("other").drop().await?;
    assert!(!model.ended_since(&from, &uuid(&model).await?).await?);
    assert!(!model.ended_since(&from, UNKNOWN).await?);
    Ok(())
}

async fn lost(Fixture { server, database, .. }: Fixture) -> anyhow::Result<()> {
    let (written, model) = (things(&database), ChangeStreamModel::collection(&things(&database)));
    insert(&written, [0]).await?;
    let (from, before) = (model.head().await?, uuid(&model).await?);
    written.drop().await?;
    server.roll_oplog_past(from.cluster_time().expect("a time")).await;
    let refused = model.ended_since(&from, &before).await;
    let Err(SourceError::Refused(Reason::HistoryLost { position, oldest: Some(Checkpoint::Time(_)) })) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(position, from);
    Ok(())
}
