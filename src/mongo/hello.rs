//! What a deployment says of itself to anybody: `hello`, and single commands on the primary.

use bson::{Bson, Document, Timestamp, doc};
use mongodb::Client;
use mongodb::options::{ReadPreference, SelectionCriteria};

use super::call::{DEADLINE, call};
use super::classify::{Fault, Phase};
use crate::model::Deployment;

/// The answer to `hello`, as far as it is used.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Hello {
    /// The replica set, and none through a router or at a lone server.
    pub(super) deployment: Option<Deployment>,
    /// Up to and with it everything is majority-committed and can be read.
    pub(super) majority_time: Option<Timestamp>,
    /// It is a router of a sharded cluster.
    pub(super) router: bool,
    /// It is meant to be a member of a replica set that has not been initiated.
    pub(super) uninitiated: bool,
}

/// Asks the primary. It needs no privilege, not even a login.
pub(super) async fn hello(client: &Client) -> Result<Hello, Fault> {
    Ok(parse(&on_primary(client, "admin", doc! { "hello": 1 }).await?))
}

/// Runs one command on the primary.
pub(super) async fn on_primary(client: &Client, database: &str, command: Document) -> Result<Document, Fault> {
    let database = client.database(database);
    let primary = SelectionCriteria::ReadPreference(ReadPreference::Primary);
    let answer = call(DEADLINE, async move { database.run_command(command).selection_criteria(primary).await }).await;
    answer.map_err(|error| Fault::of(Phase::Command, &error))
}

fn parse(answer: &Document) -> Hello {
    let set_name = answer.get_str("setName").ok();
    let hosts =
        answer.get_array("hosts").map(|hosts| hosts.iter().filter_map(Bson::as_str).map(str::to_owned).collect());
    Hello {
        deployment: set_name.map(|name| Deployment { set_name: name.to_owned(), hosts: hosts.unwrap_or_default() }),
        majority_time: answer
            .get_document("lastWrite")
            .and_then(|last| last.get_document("majorityOpTime"))
            .and_then(|time| time.get_timestamp("ts"))
            .ok(),
        router: answer.get_str("msg").is_ok_and(|kind| kind == "isdbgrid"),
        uninitiated: answer.get_bool("isreplicaset").unwrap_or(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_a_router_and_a_lone_server_are_told_apart() {
        let ts = Timestamp { time: 7, increment: 2 };
        let member = parse(&doc! {
            "setName": "rs0", "hosts": ["a:1", "b:1"],
            "lastWrite": { "opTime": { "ts": Timestamp { time: 9, increment: 1 } }, "majorityOpTime": { "ts": ts, "t": 1_i64 } },
        });
        let set = Deployment { set_name: "rs0".into(), hosts: vec!["a:1".into(), "b:1".into()] };
        assert_eq!(member, Hello { deployment: Some(set), majority_time: Some(ts), ..Hello::default() });
        assert!(parse(&doc! { "msg": "isdbgrid" }).router);
        assert!(parse(&doc! { "isreplicaset": true }).uninitiated);
        assert_eq!(parse(&doc! { "isWritablePrimary": true }), Hello::default());
    }
}
