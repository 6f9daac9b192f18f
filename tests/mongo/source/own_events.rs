//! Whether the event at a position is in the history of a deployment: each event that a stream has given is, and what is
//! made up, or was undone by an older state that was put back, is not.

use std::time::Duration;

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Checkpoint, Filter, Operation, Plan, Read, Reader, Reason, SourceError, SubscriptionModel,
    Token,
    bson::{Document, doc},
    mongodb::{Client, Database, options::ReadPreference},
};

use crate::{
    seen::{insert, things},
    support::{Context, Fixture, Kind, Options, Server, test},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("each event that a stream has given is in the history, whatever it watches", |ctx: Context| async move {
            given(ctx.plain().await.database).await
        }),
        test("an event that was never given is not in the history", |ctx: Context| async move {
            made_up(ctx.plain().await.database).await
        }),
        test("a member that lags is waited for before an event is missed in the history", |_| lagging()),
        test("a history that is gone says so when it is asked for an event", |ctx: Context| async move {
            lost(ctx.shared(Kind::SmallOplog).await).await
        }),
    ]
}

/// The positions of the events behind one, up to the insert of `{ last: true }`.
async fn positions(model: &ChangeStreamModel, from: &Checkpoint) -> anyhow::Result<Vec<(Operation, Checkpoint)>> {
    let mut reader = model.open(Some(from), &Plan::new(Filter::default())).await?;
    let mut positions = Vec::new();
    loop {
        let next = tokio::time::timeout(Duration::from_secs(30), reader.next()).await?;
        let Read::Event { event, position } = next.expect("more is to come")? else { continue };
        let is_last = event.full_document::<Document>()?.is_some_and(|full| full.contains_key("last"));
        positions.push((event.operation()?, position));
        if is_last {
            return Ok(positions);
        }
    }
}

async fn together(client: &Client, database: &Database) -> anyhow::Result<()> {
    let mut session = client.start_session().await?;
    session.start_transaction().await?;
    for id in 100..112 {
        things(database).insert_one(doc! { "_id": id }).session(&mut session).await?;
    }
    session.commit_transaction().await?;
    Ok(())
}

/// Changes of every kind.
async fn change(database: &Database) -> anyhow::Result<()> {
    let things = things(database);
    insert(&things, 1..=3).await?;
    things.update_one(doc! { "_id": 1 }, doc! { "$set": { "n": 1 } }).await?;
    things.replace_one(doc! { "_id": 2 }, doc! { "m": "x".repeat(1 << 20) }).await?;
    things.delete_one(doc! { "_id": 3 }).await?;
    together(database.client(), database).await?;
    database.run_command(doc! { "createIndexes": "things", "indexes": [{ "key": { "n": 1 }, "name": "n" }] }).await?;
    database.collection::<Document>("others").insert_one(doc! { "_id": "x" }).await?;
    things.insert_one(doc! { "last": true }).await?;
    Ok(())
}

async fn given(database: Database) -> anyhow::Result<()> {
    let collection = ChangeStreamModel::collection(&things(&database));
    let looked_up = collection.clone().full_document(mongosub::FullDocument::UpdateLookup);
    let watches_all = ChangeStreamModel::database(&database);
    insert(&things(&database), [0]).await?;
    let from = collection.head().await?;
    change(&database).await?;
    let mut seen = Vec::new();
    for model in [&collection, &looked_up, &watches_all] {
        let positions = positions(model, &from).await?;
        for (operation, position) in &positions {
            assert!(model.has_event(position).await?, "{operation:?} at {position}, by {model:?}");
        }
        seen.push(positions.len());
    }
    assert!(seen[0] >= 18 && seen[0] == seen[1] && seen[2] > seen[0], "{seen:?}");
    let last = positions(&collection, &from).await?.pop().expect("some").1;

    // Events of a server that has more of them than others; it does not matter whether they are asked for by now.
    let expanded = collection.clone().show_expanded_events(true);
    if let Ok(positions) = positions(&expanded, &from).await {
        assert!(positions.iter().any(|(operation, _)| operation.as_str() == "createIndexes"), "{positions:?}");
        for (operation, position) in &positions {
            assert!(collection.has_event(position).await?, "{operation:?} at {position}");
        }
    }

    // What has ended is still in the history of its name, and of the database; its end is too, whatever bears the name.
    let mut reader = collection.open(Some(&last), &Plan::new(Filter::default())).await?;
    things(&database).drop().await?;
    let dropped = loop {
        let next = tokio::time::timeout(Duration::from_secs(30), reader.next()).await?;
        let Read::Event { event, position } = next.expect("the end is to come")? else { continue };
        if event.operation()? == Operation::Drop {
            break position;
        }
    };
    for again in [false, true] {
        if again {
            insert(&things(&database), [5]).await?;
        }
        for position in [&last, &dropped] {
            assert!(collection.has_event(position).await?, "{position}, made again: {again}");
            assert!(watches_all.has_event(position).await?, "{position}, made again: {again}");
        }
    }
    Ok(())
}

async fn made_up(database: Database) -> anyhow::Result<()> {
    let (things, model) = (things(&database), ChangeStreamModel::collection(&things(&database)));
    insert(&things, [0]).await?;
    let from = model.head().await?;
    insert(&things, [1]).await?;
    together(database.client(), &database).await?;
    database.collection::<Document>("others").insert_one(doc! { "_id": "x" }).await?;
    things.insert_one(doc! { "last": true }).await?;
    let given = positions(&model, &from).await?;
    for behind in [false, true] {
        for (_, position) in &given {
            let token = position.token().expect("a token").as_str();
            // Another document at the same time; another time; both with the shape of a token.
            let (head, tail) = token.split_at(token.len() - 6);
            let key = if tail.starts_with("00") { "01" } else { "00" };
            let other_key = Token::new(format!("{head}{key}{}", &tail[2..]))?;
            let time = if &token[14..18] == "0FFF" { "0FFE" } else { "0FFF" };
            let other_time = Token::new(format!("{}{time}{}", &token[..14], &token[18..]))?;
            for token in [other_key, other_time] {
                assert!(!model.has_event(&token.clone().into()).await?, "{token}");
            }
        }
        if !behind {
            // With nothing behind it either.
            insert(&things, [2]).await?;
        }
    }
    // Of another collection, as a record moved there would ask; the times are in this history.
    let others = ChangeStreamModel::collection(&database.collection::<Document>("others"));
    assert!(!others.has_event(&given[0].1).await?);
    Ok(())
}

/// The event is the last one there is, and the member that is read has not got it yet.
async fn lagging() -> anyhow::Result<()> {
    const APP: &str = "lagging";
    let server = Server::own(Options::default().nodes(3).linked()).await;
    let database = server.fresh_database().await;
    insert(&things(&database), [0]).await?;
    server.complete().await;
    let primary = server.primary().await;
    let (lags, other) = ((primary + 1) % 3, (primary + 2) % 3);
    server.cut_client(APP, other);
    let read = things(&server.client_named(APP).await.database(database.name()));
    let model = ChangeStreamModel::collection(&read).read_preference(ReadPreference::Secondary { options: None });
    let everywhere = ChangeStreamModel::collection(&things(&database));
    let from = everywhere.head().await?;
    assert!(model.is_readable(&from).await?);
    server.cut_peers(lags);
    things(&database).insert_one(doc! { "last": true }).await?;
    let position = positions(&everywhere, &from).await?.pop().expect("one").1;
    let asked = tokio::spawn(async move { model.has_event(&position).await });
    // Long enough for an answer that does not wait; it is no later for it.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!asked.is_finished(), "{:?}", asked.await);
    server.heal();
    assert!(asked.await??);
    Ok(())
}

async fn lost(Fixture { server, database, .. }: Fixture) -> anyhow::Result<()> {
    let (things, model) = (things(&database), ChangeStreamModel::collection(&things(&database)));
    insert(&things, [0]).await?;
    let from = model.head().await?;
    things.insert_one(doc! { "last": true }).await?;
    let position = positions(&model, &from).await?.pop().expect("one").1;
    server.roll_oplog_past(position.cluster_time().expect("a time")).await;
    match model.has_event(&position).await {
        Err(SourceError::Refused(Reason::HistoryLost { position: lost, oldest })) => {
            assert_eq!(lost, position);
            assert!(oldest.is_some_and(|oldest| oldest.is_beyond(&position)));
        }
        other => panic!("{other:?}"),
    }
    Ok(())
}
