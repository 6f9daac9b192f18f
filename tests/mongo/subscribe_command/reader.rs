//! Whoever reads the command's lines: slowly, not at all, or no more.

use std::time::Duration;

use libtest_mimic::Trial;
use mongosub::bson::doc;

use super::{ID, Running, ids, insert, running::understood};
use crate::{
    seen::{record, stored, things},
    support::{Fixture, test},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("a reader that goes away ends the command with 0, and what it was given is stored", |ctx| async move {
            gone(ctx.plain().await).await
        }),
        test("a reader that goes away while nothing happens ends the command at once", |ctx| async move {
            gone_in_silence(ctx.plain().await).await
        }),
        test("a reader of the command that stands still gets everything once it goes on", |ctx| async move {
            still(ctx.plain().await).await
        }),
        test("the command whose reader stands still notices that it was taken over", |ctx| async move {
            still_and_superseded(ctx.plain().await).await
        }),
        test("the command whose reader stands still stops within seconds, between two lines", |ctx| async move {
            still_and_asked(ctx.plain().await).await
        }),
        test(
            "a half written line is finished before the command stops, or a second signal ends it",
            |ctx| async move { half_written(ctx.plain().await).await },
        ),
    ]
}

/// Where the next command begins, told by the first line that it writes.
async fn goes_on(fixture: &Fixture) -> i64 {
    let mut command = Running::on_things(fixture, &[]);
    let first = command.ids(1).await[0];
    command.signal("KILL");
    command.ends().await;
    first
}

/// As `| head -n 5` does.
async fn gone(fixture: Fixture) -> anyhow::Result<()> {
    let mut command = Running::on_things(&fixture, &["--every", "1000000"]).started().await;
    // More than a pipe holds.
    insert(&things(&fixture.database), 0..2000).await?;
    assert_eq!(command.ids(5).await, [0, 1, 2, 3, 4]);
    command.close();
    let ended = command.ends().await.with(0);
    assert!(ended.last_word().contains("whoever read its output has gone"), "{}", ended.said);
    let position = record(&fixture.database, ID).await?.and_then(|record| record.position).expect("a position");
    assert!(ended.last_word().contains(&position.to_string()), "{}", ended.said);
    let first = goes_on(&fixture).await;
    // Behind the five, and not behind what a pipe and two readers can have taken.
    assert!((5..1500).contains(&first), "{first}");
    Ok(())
}

async fn gone_in_silence(fixture: Fixture) -> anyhow::Result<()> {
    let mut command = Running::on_things(&fixture, &["--every", "1000000"]).started().await;
    insert(&things(&fixture.database), 0..5).await?;
    assert_eq!(command.ids(5).await, [0, 1, 2, 3, 4]);
    command.close();
    // Nothing is written any more that could tell it.
    let ended = command.ends().await.with(0);
    assert!(ended.last_word().contains("whoever read its output has gone"), "{}", ended.said);
    insert(&things(&fixture.database), [5]).await?;
    assert_eq!(goes_on(&fixture).await, 5, "nothing is repeated");
    Ok(())
}

/// Starts one whose pipe is full: nobody reads it, and more is there than fits. What is written together first fits.
async fn full(fixture: &Fixture, number: i32) -> anyhow::Result<Running> {
    let command = Running::on_things(fixture, &[]).started().await;
    let begin = record(&fixture.database, ID).await?.and_then(|record| record.position);
    for batch in 0..number / 1000 {
        things(&fixture.database).insert_many((batch * 1000..(batch + 1) * 1000).map(|id| doc! { "_id": id })).await?;
    }
    stored(&fixture.database, ID, "the first lines are stored", |record| (record.position != begin).then_some(()))
        .await;
    Ok(command)
}

async fn still(fixture: Fixture) -> anyhow::Result<()> {
    const ALL: i32 = 20_000;
    let mut command = full(&fixture, ALL).await?;
    assert!(command.is_running());
    // It takes a little, stands still, takes a little.
    let mut read = Vec::new();
    for _ in 0..3 {
        let before = record(&fixture.database, ID).await?.and_then(|record| record.position);
        read.extend(command.ids(500).await);
        stored(&fixture.database, ID, "what was taken is stored", |record| (record.position != before).then_some(()))
            .await;
    }
    read.extend(command.ids(usize::try_from(ALL)? - 1500).await);
    assert_eq!(read, (0..ALL.into()).collect::<Vec<i64>>());
    command.signal("TERM");
    assert_eq!(command.ends().await.with(0).rest, [""; 0]);
    Ok(())
}

async fn still_and_superseded(fixture: Fixture) -> anyhow::Result<()> {
    let first = full(&fixture, 2000).await?;
    let second = Running::on_things(&fixture, &[]).started().await;
    // It looks every 10 s, and waits 5 s more for its reader.
    let ended = first.ends_unread(Duration::from_secs(25)).await.with(3);
    assert!(ended.last_word().contains("taken over by"), "{}", ended.said);
    let read = ids(&ended.rest);
    assert_eq!(read, (0..i64::try_from(read.len())?).collect::<Vec<_>>(), "whole lines alone");
    second.signal("KILL");
    Ok(())
}

async fn still_and_asked(fixture: Fixture) -> anyhow::Result<()> {
    let command = full(&fixture, 2000).await?;
    command.signal("TERM");
    let ended = command.ends_unread(Duration::from_secs(12)).await.with(0);
    let read = ids(&ended.rest);
    let reached = i64::try_from(read.len())?;
    assert_eq!(read, (0..reached).collect::<Vec<_>>(), "whole lines alone");
    assert!(reached < 2000, "it did not fit");
    assert_eq!(goes_on(&fixture).await, reached, "what was taken is stored, and nothing else");
    Ok(())
}

async fn half_written(fixture: Fixture) -> anyhow::Result<()> {
    let things = things(&fixture.database);
    // Longer than a pipe holds, so that it is always half written.
    let long = |id: i32| doc! { "_id": id, "long": "x".repeat(300_000) };
    let mut command = Running::on_things(&fixture, &[]).started().await;
    things.insert_many([long(0), long(1)]).await?;
    command.begins_a_line().await;
    command.signal("TERM");
    command.says("a line is half written").await;
    command.signal("TERM");
    let ended = command.ends_unread(Duration::from_secs(5)).await;
    assert_eq!(ended.code, Some(130), "{}", ended.said);
    assert!(ended.last_word().contains("a second signal"), "{}", ended.said);
    assert!(ended.rest.len() == 1 && serde_json::from_str::<serde_json::Value>(&ended.rest[0]).is_err());

    let mut command = Running::on_things(&fixture, &[]);
    command.begins_a_line().await;
    command.signal("TERM");
    command.says("a line is half written").await;
    // Its reader goes on after all.
    assert_eq!(understood(&command.text().await)["documentKey"]["_id"], 0);
    let ended = command.ends().await.with(0);
    assert_eq!(ids(&ended.rest), [0_i64; 0], "nothing was begun behind it");
    assert!(goes_on(&fixture).await <= 1);
    Ok(())
}
