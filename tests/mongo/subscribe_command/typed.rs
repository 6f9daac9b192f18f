//! What is typed and cannot be used.

use std::net::TcpListener;

use libtest_mimic::Trial;

use super::{ID, Running, insert};
use crate::{
    seen::things,
    support::{Fixture, test},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("what is typed and cannot be used ends the command with 2, is named, and connects to nothing", |_| {
            unusable()
        }),
        test(
            "a stage that only the server refuses ends the command with 3, says why and stores nothing",
            |ctx| async move { refused_by_the_server(ctx.plain().await).await },
        ),
    ]
}

const USABLE: [&str; 8] = ["--db", "shop", "--collection", "orders", "--id", ID, "--checkpoints", "shop.checkpoints"];

/// The usable arguments, with these instead of what they have of the same name, or behind it.
fn with<'a>(others: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = Vec::new();
    for pair in USABLE.chunks(2) {
        if !others.contains(&pair[0]) {
            arguments.extend(pair);
        }
    }
    arguments.extend(others);
    arguments
}

async fn unusable() -> anyhow::Result<()> {
    // Whoever connects is seen.
    let server = TcpListener::bind("127.0.0.1:0")?;
    server.set_nonblocking(true)?;
    let uri = format!("mongodb://{}/", server.local_addr()?);
    for (option, others) in [
        ("--db", vec!["--db", "a b"]),
        ("--db", vec!["--db", ""]),
        ("--db", vec!["--db", "local"]),
        ("--collection", vec!["--collection", "$cmd"]),
        ("--collection", vec!["--collection", ""]),
        ("--id", vec!["--id", "a#b"]),
        ("--id", vec!["--id", ""]),
        ("--checkpoints", vec!["--checkpoints", "checkpoints"]),
        ("--checkpoints", vec!["--checkpoints", "shop."]),
        ("--checkpoints", vec!["--checkpoints", "shop.orders"]),
        ("--every", vec!["--every", "0"]),
        ("--every", vec!["--every", "many"]),
        ("--quiet-interval", vec!["--quiet-interval", "30"]),
        ("--quiet-interval", vec!["--quiet-interval", "0s"]),
        ("--filter", vec!["--filter", "{status: 1}"]),
        ("--filter", vec!["--filter", "[]"]),
        ("--filter", vec!["--filter", r#"{"a": {"$oid": "7"}}"#]),
        ("--pipeline", vec!["--pipeline", r#"{"$match": {}}"#]),
        ("--pipeline", vec!["--pipeline", r#"[{"$unset": "_id"}]"#]),
        ("--full-document", vec!["--full-document", "always"]),
        ("--full-document-before-change", vec!["--full-document-before-change", "default"]),
        ("--start", vec!["--start", "yesterday"]),
        ("--start", vec!["--start", "{\"_data\": \"zz\"}"]),
        ("--always", vec!["--always"]),
        ("--always", vec!["--always", "--start", "stored"]),
        ("--format", vec!["--format", "yaml"]),
        ("--bogus", vec!["--bogus"]),
    ] {
        let ended = Running::start_at(&uri, &with(&others)).ends().await;
        assert_eq!(ended.code, Some(2), "{others:?}: {}", ended.said);
        assert!(ended.said.contains(option) && ended.rest.is_empty(), "{others:?}: {}", ended.said);
    }
    for missing in ["--db", "--id", "--checkpoints"] {
        let others: Vec<&str> = USABLE.chunks(2).filter(|pair| pair[0] != missing).flatten().copied().collect();
        let ended = Running::start_at(&uri, &others).ends().await;
        assert!(ended.code == Some(2) && ended.said.contains(missing), "{missing}: {}", ended.said);
    }
    let ended = Running::spawn(None, &USABLE).ends().await;
    assert!(ended.code == Some(2) && ended.said.contains("--uri"), "{}", ended.said);
    for uri in ["localhost", "http://localhost/", "mongodb://", "mongodb://localhost/?connectTimeoutMS=soon"] {
        let ended = Running::start_at(uri, &USABLE).ends().await.with(2);
        assert!(ended.last_word().contains("--uri"), "{uri}: {}", ended.said);
    }
    assert!(server.accept().is_err(), "somebody has connected");
    // The listener sees those who do.
    let command = Running::start_at(&uri, &USABLE);
    crate::support::wait_until("a usable one connects", crate::seen::PATIENCE, || async { server.accept().is_ok() })
        .await;
    drop(command);
    Ok(())
}

async fn refused_by_the_server(fixture: Fixture) -> anyhow::Result<()> {
    insert(&things(&fixture.database), [1]).await?;
    for stage in [r#"[{"$group": {"_id": 1}}]"#, r#"[{"$match": {"$nonsense": 1}}]"#] {
        let ended = Running::on_things(&fixture, &["--pipeline", stage]).ends().await.with(3);
        assert!(ended.last_word().contains("the server refuses the subscription"), "{}", ended.said);
    }
    assert_eq!(fixture.database.list_collection_names().await?, ["things"]);
    Ok(())
}
