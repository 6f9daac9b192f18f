//! How the command ends, and where the next one goes on.

use std::time::Duration;

use libtest_mimic::Trial;
use mongosub::bson::doc;

use super::{ID, Running, ids, insert};
use crate::{
    seen::{record, stored, things},
    support::{Fixture, Kind, Options, Server, User, test, wait_until},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("the command killed in the middle loses nothing and keeps the order", |ctx| async move {
            killed(ctx.plain().await).await
        }),
        test("the command asked to stop ends with 0, and the next one repeats nothing", |ctx| async move {
            asked(ctx.plain().await).await
        }),
        test("the command that was started to ignore a hang-up does so", |ctx| async move {
            hang_up_ignored(ctx.plain().await).await
        }),
        test("the command asked to stop before it has started ends with 0", |_| not_started()),
        test("the command whose history is lost ends with 3 and says what to do", |ctx| async move {
            history_lost(ctx.shared(Kind::SmallOplog).await).await
        }),
        test("of two commands with one id the first ends with 3 and names the second", |ctx| async move {
            superseded(ctx.plain().await).await
        }),
        test("the command whose record is deleted under it ends with 3", |ctx| async move {
            deleted(ctx.plain().await).await
        }),
        test("the command whose collection is dropped writes the invalidate and ends with 3", |ctx| async move {
            dropped(ctx.plain().await).await
        }),
        test("the command refuses a server without change streams with 3", |_| standalone()),
        test("the command prints no password, right or wrong", |ctx| async move {
            no_password(ctx.shared(Kind::Auth).await).await
        }),
    ]
}

async fn killed(fixture: Fixture) -> anyhow::Result<()> {
    const ALL: i32 = 6000;
    let mut command = Running::on_things(&fixture, &["--every", "50"]).started().await;
    for batch in 0..ALL / 1000 {
        insert(&things(&fixture.database), batch * 1000..(batch + 1) * 1000).await?;
    }
    // Nobody has read anything so far: a command that took for written what it had only read would be far ahead.
    let mut reached = 0;
    for number in [200, 2500] {
        let mut written = command.ids(number).await;
        command.signal("KILL");
        let ended = command.ends().await;
        assert_eq!(ended.code, None, "it was killed");
        written.extend(ids(&ended.rest));
        let begins = written[0];
        assert!(begins <= reached && (reached == 0 || begins > 0), "{begins} follows 0..{reached}");
        reached = begins + i64::try_from(written.len())?;
        assert_eq!(written, (begins..reached).collect::<Vec<_>>());
        assert!(reached < ALL.into(), "killed in the middle");
        command = Running::on_things(&fixture, &["--every", "50"]);
    }
    let begins = command.ids(1).await[0];
    assert!(begins > 0 && begins <= reached, "{begins} follows 0..{reached}");
    let rest = command.ids(usize::try_from(i64::from(ALL) - begins - 1)?).await;
    assert_eq!(rest, (begins + 1..ALL.into()).collect::<Vec<_>>());
    command.signal("TERM");
    assert_eq!(command.ends().await.with(0).rest, [""; 0]);
    Ok(())
}

async fn asked(fixture: Fixture) -> anyhow::Result<()> {
    let things = things(&fixture.database);
    let mut next = 0;
    // Without a save of its own: what is stored, the end has stored.
    for signal in ["TERM", "INT", "HUP", "TERM"] {
        let mut command = Running::on_things(&fixture, &["--every", "1000000"]).started().await;
        insert(&things, next..next + 700).await?;
        let all: Vec<i64> = (next..next + 700).map(Into::into).collect();
        assert_eq!(command.ids(700).await, all);
        command.signal(signal);
        let ended = command.ends().await.with(0);
        assert_eq!(ended.rest, [""; 0]);
        let stored = record(&fixture.database, ID).await?.expect("a record");
        let position = stored.position.expect("a position").to_string();
        assert!(stored.clean, "it was a clean end");
        assert!(ended.last_word().contains(&format!("SIG{signal}")), "{}", ended.said);
        assert!(ended.last_word().contains(&position), "{}", ended.said);
        next += 700;
    }
    Ok(())
}

async fn hang_up_ignored(fixture: Fixture) -> anyhow::Result<()> {
    let name = fixture.database.name();
    let checkpoints = format!("{name}.checkpoints");
    let arguments = ["--db", name, "--collection", "things", "--id", ID, "--checkpoints", &checkpoints];
    let mut command = Running::without_hang_up(&fixture.server.uri(), &arguments).started().await;
    command.signal("HUP");
    insert(&things(&fixture.database), [1]).await?;
    assert_eq!(command.ids(1).await, [1]);
    command.signal("TERM");
    let ended = command.ends().await.with(0);
    assert!(ended.last_word().contains("SIGTERM"), "{}", ended.said);
    Ok(())
}

/// A server that is not there is waited for, and a signal ends the waiting.
async fn not_started() -> anyhow::Result<()> {
    let nowhere = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=500";
    let arguments = ["--db", "shop", "--id", ID, "--checkpoints", "shop.checkpoints"];
    let command = Running::start_at(nowhere, &arguments);
    command.says("is not started yet").await;
    command.signal("TERM");
    let ended = command.ends().await.with(0);
    assert!(ended.last_word().contains("before it had started"), "{}", ended.said);
    Ok(())
}

async fn history_lost(fixture: Fixture) -> anyhow::Result<()> {
    let mut command = Running::on_things(&fixture, &[]).started().await;
    insert(&things(&fixture.database), [0]).await?;
    assert_eq!(command.ids(1).await, [0]);
    command.signal("TERM");
    command.ends().await.with(0);
    let position = record(&fixture.database, ID).await?.and_then(|record| record.position).expect("a position");
    fixture.server.roll_oplog_past(position.cluster_time().expect("a time")).await;
    let ended = Running::on_things(&fixture, &[]).ends().await.with(3);
    let word = ended.last_word();
    assert!(word.contains("no longer in the oplog") && word.contains(&position.to_string()), "{}", ended.said);
    assert!(word.contains("--always --start now"), "{}", ended.said);
    let after = record(&fixture.database, ID).await?.and_then(|record| record.position);
    assert_eq!(after, Some(position), "the record is left as it is");
    // And so it goes on.
    let mut command = Running::on_things(&fixture, &["--always", "--start", "now"]).started().await;
    insert(&things(&fixture.database), [1]).await?;
    assert_eq!(command.ids(1).await, [1]);
    command.signal("TERM");
    command.ends().await.with(0);
    Ok(())
}

async fn superseded(fixture: Fixture) -> anyhow::Result<()> {
    let first = Running::on_things(&fixture, &[]).started().await;
    let mut second = Running::on_things(&fixture, &[]).started().await;
    let owner = record(&fixture.database, ID).await?.and_then(|record| record.ownership).expect("an owner").owner;
    let ended = first.ends().await.with(3);
    let word = ended.last_word();
    assert!(word.contains("taken over by") && word.contains(owner.as_str()), "{}", ended.said);
    insert(&things(&fixture.database), [1]).await?;
    assert_eq!(second.ids(1).await, [1]);
    second.signal("TERM");
    second.ends().await.with(0);
    Ok(())
}

async fn deleted(fixture: Fixture) -> anyhow::Result<()> {
    let command = Running::on_things(&fixture, &[]).started().await;
    fixture.database.collection::<mongosub::bson::Document>("checkpoints").delete_one(doc! { "_id": ID }).await?;
    insert(&things(&fixture.database), [1]).await?;
    let ended = command.ends().await.with(3);
    assert!(ended.last_word().contains("deleted"), "{}", ended.said);
    assert_eq!(record(&fixture.database, ID).await?, None, "it is not made again");
    Ok(())
}

async fn dropped(fixture: Fixture) -> anyhow::Result<()> {
    let things = things(&fixture.database);
    insert(&things, [0]).await?;
    let mut command = Running::on_things(&fixture, &[]).started().await;
    insert(&things, [1]).await?;
    things.drop().await?;
    assert_eq!(command.ids(1).await, [1]);
    for operation in ["drop", "invalidate"] {
        assert_eq!(command.event().await["operationType"], operation);
    }
    let ended = command.ends().await.with(3);
    assert!(ended.rest.is_empty() && ended.last_word().contains("invalidate"), "{}", ended.said);
    insert(&things, [2]).await?;
    let mut command = Running::on_things(&fixture, &[]);
    assert_eq!(command.ids(1).await, [2]);
    command.signal("TERM");
    command.ends().await.with(0);
    Ok(())
}

async fn standalone() -> anyhow::Result<()> {
    let server = Server::own(Options::standalone()).await;
    let arguments = ["--db", "shop", "--id", ID, "--checkpoints", "shop.checkpoints"];
    let ended = Running::start_at(&server.uri(), &arguments).ends().await.with(3);
    assert!(ended.last_word().contains("not a member of a replica set"), "{}", ended.said);
    assert_eq!(server.client().await.database("shop").list_collection_names().await?, Vec::<String>::new());
    Ok(())
}

async fn no_password(fixture: Fixture) -> anyhow::Result<()> {
    const SECRET: User = User { name: "command", password: "Unutterable-7" };
    let written = doc! { "role": "readWrite", "db": fixture.database.name() };
    fixture.server.add_user(SECRET, vec![written]).await;
    let uri = fixture.server.uri_as(SECRET);
    let wrong = uri.replace(SECRET.password, "Unspeakable-8");
    let checkpoints = format!("{}.checkpoints", fixture.database.name());
    let arguments =
        ["--db", fixture.database.name(), "--collection", "things", "--id", ID, "--checkpoints", &checkpoints];
    let mut said = String::new();
    for (uri, code) in [(&wrong, 3), (&uri.replace("Unutterable-7@", "Unutterable/7@"), 2)] {
        let typed = [&["--uri", uri.as_str()], arguments.as_slice()].concat();
        let ended = Running::spawn(None, &typed).ends().await.with(code);
        said.push_str(&ended.said);
    }
    assert_eq!(record(&fixture.database, ID).await?, None, "nobody was let in");
    let mut command = Running::start_at(&uri, &arguments).started().await;
    insert(&things(&fixture.database), [1]).await?;
    assert_eq!(command.ids(1).await, [1]);
    stored(&fixture.database, ID, "the event is stored", |record| record.position).await;
    wait_until("it says how it fares", Duration::from_secs(10), || async { command.said().lines().count() > 1 }).await;
    command.signal("TERM");
    said.push_str(&command.ends().await.with(0).said);
    // Named by what is wrong, and by nothing of the secret.
    assert!(said.contains("a login that is accepted") && said.contains("--uri"), "{said}");
    for secret in ["Unutterable", "Unspeakable", "able-", "able/7"] {
        assert_eq!(said.lines().find(|line| line.contains(secret)), None);
    }
    Ok(())
}
