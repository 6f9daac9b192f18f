//! A source that changes under a subscription: what the model sees of it, and that nothing is lost or comes twice.

mod elsewhere;
mod ended;
mod filters;
mod images;
mod large;
mod lookups;
mod own_events;

use libtest_mimic::Trial;
use mongosub::{ChangeStreamModel, DurableSubscriptions, Reason, State, Subscription, mongodb::Database};

use crate::{
    seen::{PATIENCE, Subscriptions, storage},
    support::{Options, Server, on_any_server, wait_for},
};

pub fn tests() -> Vec<Trial> {
    [
        on_any_server(elsewhere::tests()),
        on_any_server(ended::tests()),
        on_any_server(filters::tests()),
        images::tests(),
        on_any_server(large::tests()),
        on_any_server(lookups::tests()),
        on_any_server(own_events::tests()),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Much is written: not to an oplog that others use.
async fn roomy() -> (Server, Database) {
    let server = Server::own(Options { oplog_megabytes: 256, ..Options::default() }).await;
    let database = server.fresh_database().await;
    (server, database)
}

fn to(model: ChangeStreamModel, database: &Database) -> Subscriptions {
    DurableSubscriptions::new(model, storage(database))
}

async fn stalls(subscription: &Subscription) -> Reason {
    wait_for("it stalls", PATIENCE, || async {
        match subscription.status().state {
            State::Stalled(reason) => Some(reason),
            _ => None,
        }
    })
    .await
}
