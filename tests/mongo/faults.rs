//! The fault matrix of one node: what a server can do to a stream, and what a subscription makes of it. Each test prints
//! one line that begins with `faults:` and holds its counts.

mod broken;
mod codes;
mod ends;
mod hung;
mod looked_up;
mod lost;

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, future::BoxFuture};
use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Delivery, DurableSubscriptions, Failure, Reason, State, Subscription,
    bson::{Bson, Document, doc},
    mongodb::{Collection, Database},
};
use tokio::sync::Semaphore;

use crate::{
    seen::{PATIENCE, Seen, Subscriptions, insert, storage, things},
    support::{Server, on_any_server, wait_for, wait_until},
};

pub fn tests() -> Vec<Trial> {
    // What a server's version may bear on.
    let semantics = [ends::tests(), looked_up::tests(), lost::tests()].into_iter().map(on_any_server);
    semantics.chain([broken::tests(), codes::tests(), hung::tests()]).flatten().collect()
}

/// A handler that waits for its turn before each event, and notes it then.
pub fn held(
    seen: &Seen,
    turns: &Arc<Semaphore>,
) -> impl FnMut(Delivery) -> BoxFuture<'static, Result<(), Failure>> + Send + use<> {
    let (seen, turns) = (seen.clone(), turns.clone());
    move |delivery| {
        let (seen, turns) = (seen.clone(), turns.clone());
        async move {
            turns.acquire().await?.forget();
            seen.note(delivery);
            Ok(())
        }
        .boxed()
    }
}

/// One subscription that things happen to. Its stream belongs to a client that fail points can hit; what is written and
/// stored comes by another one.
struct Line {
    server: Server,
    database: Database,
    subscription: Subscription,
    seen: Seen,
    /// The `_id` of the next document.
    next: i32,
}

/// The name of that client.
const APP: &str = "faults";

/// Subscriptions by a client that fail points can hit, with their checkpoints by the other one.
async fn hit_by_faults(server: &Server, database: &Database) -> Subscriptions {
    let model = ChangeStreamModel::collection(&things(&server.client_named(APP).await.database(database.name())));
    // A fail point does not hit the request that waits already.
    let model = model.max_await_time(Duration::from_millis(100));
    // Without quiet positions nobody asks how far the oplog reaches back, which would meet the faults in the stream's stead.
    DurableSubscriptions::new(model, storage(database)).never_save_quiet_position()
}

impl Line {
    async fn start(server: Server, id: &str) -> anyhow::Result<Self> {
        let database = server.fresh_database().await;
        let subscriptions = hit_by_faults(&server, &database).await;
        let seen = Seen::default();
        let subscription = subscriptions.subscribe(id, seen.handler()).await?;
        Ok(Self { server, database, subscription, seen, next: 0 })
    }

    fn written(&self) -> Collection<Document> {
        things(&self.database)
    }

    async fn write(&mut self, documents: i32) -> anyhow::Result<()> {
        insert(&self.written(), self.next..self.next + documents).await?;
        self.next += documents;
        Ok(())
    }

    /// Waits for the last write, and finds everything there, once and in order.
    async fn has_all(&self) {
        if self.next > 0 {
            self.seen.sees(self.next - 1).await;
        }
        assert_eq!(self.seen.ids(), (0..self.next).collect::<Vec<_>>());
    }

    /// Waits until it retries for a reason that is expected.
    async fn retries(&self, what: &str, expected: impl Fn(&Reason) -> bool) -> Reason {
        wait_for(&format!("it retries: {what}; {:?}", self.subscription.status()), PATIENCE, || async {
            match self.subscription.status().state {
                State::Retrying(reason) if expected(&reason) => Some(reason),
                State::Stalled(reason) | State::Stopped(reason) => panic!("{what}: {reason:?}"),
                _ => None,
            }
        })
        .await
    }

    async fn stalls(&self, what: &str) -> Reason {
        stalls(&self.subscription, what).await
    }

    async fn reconnected(&self, times: u64) {
        wait_until("the stream is open again", PATIENCE, || async { self.subscription.status().reconnects >= times })
            .await;
    }

    /// Kills the stream's cursor on the server.
    async fn kill_cursor(&self) -> anyhow::Result<()> {
        kill_cursors(&self.server, &self.database).await
    }
}

async fn stalls(subscription: &Subscription, what: &str) -> Reason {
    wait_for(&format!("it stalls: {what}"), PATIENCE, || async {
        match subscription.status().state {
            State::Stalled(reason) => Some(reason),
            State::Stopped(reason) => panic!("{what}: {reason:?}"),
            _ => None,
        }
    })
    .await
}

/// Kills the cursors of all streams on the test's collection.
async fn kill_cursors(server: &Server, database: &Database) -> anyhow::Result<()> {
    let killed = wait_for("the stream's cursor is found", PATIENCE, || async {
        let ids: Vec<i64> =
            cursors(server, database).await.iter().filter_map(|it| it.get_i64("cursorId").ok()).collect();
        (!ids.is_empty()).then_some(ids)
    })
    .await;
    database.run_command(doc! { "killCursors": "things", "cursors": killed }).await?;
    Ok(())
}

/// What the server shows of the cursors of streams on the test's collection.
async fn cursors(server: &Server, database: &Database) -> Vec<Document> {
    let namespace = format!("{}.things", database.name());
    let pipeline = [
        doc! { "$currentOp": { "idleCursors": true, "localOps": true } },
        doc! { "$match": { "ns": namespace, "cursor.cursorId": { "$exists": true } } },
        doc! { "$replaceWith": { "$mergeObjects": ["$cursor", { "type": "$type" }] } },
    ];
    let command = doc! { "aggregate": 1, "pipeline": pipeline.to_vec(), "cursor": {} };
    let reply = server.admin_command(command).await.expect("what the server does");
    let found = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch")).expect("a batch");
    found.iter().filter_map(Bson::as_document).cloned().collect()
}
