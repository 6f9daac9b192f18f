//! A record that came from somewhere else.

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, DurableSubscriptions, Kind, Reason, SubscribeError,
    bson::Document,
    mongodb::{Collection, Database},
};

use crate::{
    seen::{Seen, Subscriptions, insert, record, storage, stored, things},
    support::{Context, Options, Server, test},
};

pub fn tests() -> Vec<Trial> {
    vec![test("a record of another replica set is refused, whatever position it holds", |ctx: Context| async move {
        // It keeps the checkpoints, and has another name than the servers that are read.
        another_set(ctx.plain().await.database).await
    })]
}

fn at(things: &Collection<Document>, keeper: &Database) -> Subscriptions {
    DurableSubscriptions::new(ChangeStreamModel::collection(things), storage(keeper))
        .save_quiet_position_every(std::time::Duration::from_millis(200))
}

async fn another_set(keeper: Database) -> anyhow::Result<()> {
    let (one, other) = (Server::own(Options::default()).await, Server::own(Options::default()).await);
    let database = one.fresh_database().await;
    let here = things(&database);
    let there = things(&other.client().await.database(database.name()));
    insert(&here, [0]).await?;
    insert(&there, [0]).await?;
    for kind in [Kind::Start, Kind::Event, Kind::Quiet] {
        let id = kind.as_str();
        let seen = Seen::default();
        let subscription = at(&here, &keeper).subscribe(id, seen.handler()).await?;
        match kind {
            Kind::Start => {}
            Kind::Event => {
                insert(&here, [1]).await?;
                seen.sees(1).await;
            }
            _ => {
                // The no-op of each second moves it.
                stored(&keeper, id, "a quiet position", |record| (record.kind == Some(Kind::Quiet)).then_some(()))
                    .await;
            }
        }
        subscription.shutdown().await?;
        let before = record(&keeper, id).await?;
        insert(&there, [10]).await.ok();
        let seen = Seen::default();
        let refused = at(&there, &keeper).subscribe(id, seen.handler()).await.err();
        let reason = refused.as_ref().and_then(SubscribeError::reason);
        assert!(matches!(reason, Some(Reason::SourceChanged { .. })), "{id}: {refused:?}");
        assert!(seen.ids().is_empty(), "{id}: {seen:?}");
        assert_eq!(record(&keeper, id).await?, before, "{id}: the record is left as it was");
        // Where it came from it goes on.
        at(&here, &keeper).subscribe(id, seen.handler()).await?.shutdown().await?;
    }
    Ok(())
}
