//! The end of a feed: an `invalidate` is delivered, stored and named, and the next start goes on behind it.

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Filter, Kind, Operation, Reason,
    bson::{Document, doc},
};

use super::{plain, to};
use crate::{
    seen::{Seen, insert, record, subscriptions, things},
    support::Fixture,
};

pub fn tests() -> Vec<Trial> {
    vec![
        plain(
            "a dropped collection ends the feed, and the next start begins with the first insert of the new one",
            dropped,
        ),
        plain("a collection renamed away ends the feed, with a filter that names no such event, too", renamed),
        plain("a dropped database ends the feed of the database", database_dropped),
    ]
}

async fn dropped(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    use Operation::{Drop, Insert, Invalidate};
    let written = things(&database);
    let (subscriptions, seen) = (subscriptions(&database), Seen::default());
    for round in 0..3 {
        seen.clear();
        let subscription = subscriptions.subscribe("dropped", seen.handler()).await?;
        if round == 0 {
            insert(&written, [0]).await?;
        }
        seen.sees(10 * round).await;
        written.drop().await?;
        // Before the next start, and however early.
        insert(&written, [10 * (round + 1)]).await?;
        let reason = subscription.stopped().await;
        assert_eq!(seen.operations(), [Insert, Drop, Invalidate]);
        let position = seen.positions()[2].clone();
        assert_eq!(reason, Reason::Invalidated { position: position.clone() });
        let stored = record(&database, "dropped").await?.expect("a record");
        assert_eq!((stored.position, stored.kind, stored.clean), (Some(position), Some(Kind::Invalidate), true));
        assert!(subscriptions.get("dropped").is_none());
    }
    seen.clear();
    let subscription = subscriptions.subscribe("dropped", seen.handler()).await?;
    insert(&written, [31]).await?;
    seen.sees(31).await;
    assert_eq!(seen.ids(), [30, 31]);
    // Behind an invalidate a new position counts, however it compares.
    let stored = subscription.shutdown().await?;
    assert!(seen.is_covered_by(stored.as_ref()), "{stored:?}");
    assert_eq!(record(&database, "dropped").await?.and_then(|record| record.position), stored);
    Ok(())
}

async fn renamed(Fixture { database, .. }: Fixture) -> anyhow::Result<()> {
    let written = things(&database);
    let (subscriptions, seen) = (subscriptions(&database), Seen::default());
    let inserts = || Filter::operations([Operation::Insert]);
    let subscription = subscriptions.subscribe("renamed", seen.handler()).filter(inserts()).await?;
    insert(&written, [1]).await?;
    seen.sees(1).await;
    let to = format!("{}.others", database.name());
    let rename = doc! { "renameCollection": written.namespace().to_string(), "to": to };
    written.client().database("admin").run_command(rename).await?;
    let reason = subscription.stopped().await;
    assert!(matches!(reason, Reason::Invalidated { .. }), "{reason:?}");
    assert_eq!(seen.operations(), [Operation::Insert, Operation::Invalidate]);
    insert(&written, [2]).await?;
    subscriptions.subscribe("renamed", seen.handler()).filter(inserts()).await?;
    seen.sees(2).await;
    assert_eq!(seen.ids(), [1, -1, 2]);
    Ok(())
}

async fn database_dropped(Fixture { database, client, .. }: Fixture) -> anyhow::Result<()> {
    let gone = client.database(&format!("{}_gone", database.name()));
    let subscriptions = to(ChangeStreamModel::database(&gone), &database);
    let seen = Seen::default();
    let subscription = subscriptions.subscribe("gone", seen.handler()).await?;
    insert(&things(&gone), [1]).await?;
    seen.sees(1).await;
    gone.drop().await?;
    let reason = subscription.stopped().await;
    assert!(matches!(reason, Reason::Invalidated { .. }), "{reason:?}");
    let last = [Operation::Insert, Operation::Drop, Operation::DropDatabase, Operation::Invalidate];
    assert_eq!(seen.operations(), last);
    insert(&gone.collection::<Document>("others"), [2]).await?;
    subscriptions.subscribe("gone", seen.handler()).await?;
    seen.sees(2).await;
    gone.drop().await?;
    Ok(())
}
