//! Events that are large, and fit into a reply.

use libtest_mimic::Trial;
use mongosub::{bson::doc, mongodb::Database};

use crate::{
    seen::{Seen, subscriptions, things},
    support::{Options, Server, test},
};

pub fn tests() -> Vec<Trial> {
    vec![test("large events among small ones come in order while the size of the replies follows them", |_| sizes())]
}

/// Much is written: not to an oplog that others use.
async fn roomy() -> (Server, Database) {
    let server = Server::own(Options { oplog_megabytes: 128, ..Options::default() }).await;
    let database = server.fresh_database().await;
    (server, database)
}

async fn sizes() -> anyhow::Result<()> {
    let (_server, database) = roomy().await;
    let written = things(&database);
    let (subscriptions, seen) = (subscriptions(&database), Seen::default());
    let subscription = subscriptions.subscribe("sizes", seen.handler()).await?;
    // Paused, so that it finds them all at once.
    subscription.pause().await?;
    let mut last = 0;
    for (count, bytes) in [(1500, 10), (60, 200_000), (1500, 10), (5, 3_000_000), (500, 10)] {
        let filler = "x".repeat(bytes);
        let documents = (last..last + count).map(|id| doc! { "_id": id, "filler": &filler });
        written.insert_many(documents).await?;
        last += count;
    }
    subscription.resume().await?;
    seen.sees(last - 1).await;
    assert_eq!(seen.ids(), (0..last).collect::<Vec<_>>());
    Ok(())
}
