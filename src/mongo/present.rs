//! Where a deployment is now, where a new subscription may start so that it misses nothing, and how far back it can read.

use std::time::Duration;

use bson::{Timestamp, doc};

use super::classify::{Class, Fault};
use super::hello::{Hello, hello, on_primary};
use super::model::GlobalCheckpointSource;
use super::open::Source;
use crate::checkpoint::Checkpoint;
use crate::model::Scope;

/// How long one question for the oldest position may keep the server.
const PROBE: Duration = Duration::from_millis(50);

/// The first time after `time`.
pub(super) fn after(time: Timestamp) -> Timestamp {
    match time.increment.checked_add(1) {
        Some(increment) => Timestamp { time: time.time, increment },
        None => Timestamp { time: time.time.saturating_add(1), increment: 0 },
    }
}

/// A start that misses no change that is not majority-committed yet: behind the smaller of the operation time of
/// `hostInfo` and the majority time. `None` when the server refused, or sent no time.
pub(super) async fn global_checkpoint(
    source: &Source,
    asked: GlobalCheckpointSource,
) -> Result<Option<Timestamp>, Fault> {
    let host_info = match on_primary(source.database.client(), "admin", doc! { "hostInfo": 1 }).await {
        Ok(reply) => reply.get_timestamp("operationTime").ok(),
        Err(fault) if fault.is_refusal() && asked == GlobalCheckpointSource::HostInfoOnly => return Ok(None),
        Err(fault) if fault.is_refusal() => None,
        Err(fault) => return Err(fault),
    };
    let majority = match majority_time(source).await {
        Ok(time) => time,
        Err(fault) if fault.is_refusal() => None,
        Err(fault) => return Err(fault),
    };
    // The operation time alone may lie beyond a write that is still being committed: it starts nothing by itself.
    Ok(majority.map(|majority| after(host_info.map_or(majority, |time| time.min(majority)))))
}

/// The majority time of the primary, as one that must be there.
pub(super) async fn head(source: &Source) -> Result<Timestamp, Fault> {
    majority_time(source).await?.ok_or_else(|| Fault::retry("the primary sent no majority time"))
}

/// The majority time of the primary; behind a router, which has none, the time of a majority read.
async fn majority_time(source: &Source) -> Result<Option<Timestamp>, Fault> {
    let client = source.database.client();
    match hello(client).await? {
        Hello { majority_time: Some(time), .. } => Ok(Some(time)),
        Hello { router: true, .. } => {
            // Any collection in the scope does, also one that does not exist.
            let (database, collection) = match &source.scope {
                Scope::Collection(namespace) => (namespace.db.as_str(), namespace.collection.as_str()),
                Scope::Database { db } => (db.as_str(), "mongosub"),
                Scope::Deployment => ("admin", "mongosub"),
            };
            let find = doc! {
                "find": collection,
                "limit": 1,
                "singleBatch": true,
                "projection": { "_id": 1 },
                "readConcern": { "level": "majority" },
            };
            Ok(on_primary(client, database, find).await?.get_timestamp("operationTime").ok())
        }
        Hello { deployment: Some(_), .. } => Ok(None),
        Hello { uninitiated: true, .. } => Err(Fault::retry("the replica set has not been initiated yet")),
        Hello { .. } => Err(Fault { class: Class::NotAReplicaSet, code: None, message: String::new() }),
    }
}

/// Whether a position can still be opened. Text is of another kind of model and cannot.
pub(super) async fn is_readable(source: &Source, position: &Checkpoint) -> Result<bool, Fault> {
    match position.cluster_time() {
        Some(time) => source.bare().has_history(time, PROBE).await,
        None => Ok(false),
    }
}

/// The oldest time that can be opened at, found by opening: it needs no privilege but those of the stream.
///
/// On a deployment whose oplog has never lost an entry, that is the beginning of time.
pub(super) async fn earliest(source: &Source) -> Result<Timestamp, Fault> {
    let head = head(source).await?;
    oldest(head, &source.bare()).await
}

/// What has a history with a beginning.
trait History: Sync {
    fn serves(&self, time: Timestamp) -> impl Future<Output = Result<bool, Fault>> + Send;
}

impl History for Source {
    async fn serves(&self, time: Timestamp) -> Result<bool, Fault> {
        self.has_history(time, PROBE).await
    }
}

/// How often the oldest time is looked for when the history loses what was just found.
const SEARCHES: u32 = 5;

async fn oldest(head: Timestamp, history: &impl History) -> Result<Timestamp, Fault> {
    let mut searches = 1;
    loop {
        let found = search(head, history).await?;
        // A history that lost something meanwhile has told of two beginnings, and what was found may be neither.
        if searches == SEARCHES || history.serves(found).await? {
            return Ok(found);
        }
        searches += 1;
    }
}

async fn search(head: Timestamp, history: &impl History) -> Result<Timestamp, Fault> {
    let served = async |time: u32, increment: u32| history.serves(Timestamp { time, increment }).await;
    if served(1, 1).await? {
        return Ok(Timestamp { time: 1, increment: 1 });
    }
    // Back from the head in growing steps, then halving: first to the second, then inside it.
    let (mut gone, mut there) = (1, head.time.saturating_add(1));
    let mut back = 1_u32;
    while let Some(time) = there.checked_sub(back).filter(|time| *time > gone) {
        if !served(time, 0).await? {
            gone = time;
            break;
        }
        there = time;
        back = back.saturating_mul(2);
    }
    while there - gone > 1 {
        let time = gone + (there - gone) / 2;
        if served(time, 0).await? { there = time } else { gone = time }
    }
    // The oldest entry lies in the second `gone`, and increments count up from 1.
    let second = gone;
    let (mut gone, mut there) = (0, 1_u32);
    while !served(second, there).await? {
        gone = there;
        there = match there.checked_mul(2) {
            Some(next) => next,
            None => return Ok(Timestamp { time: second.saturating_add(1), increment: 0 }),
        };
    }
    while there - gone > 1 {
        let increment = gone + (there - gone) / 2;
        if served(second, increment).await? { there = increment } else { gone = increment }
    }
    Ok(Timestamp { time: second, increment: there })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn the_time_after_counts_on_and_carries() {
        let time = |time, increment| Timestamp { time, increment };
        assert_eq!(after(time(7, 1)), time(7, 2));
        assert_eq!(after(time(7, u32::MAX)), time(8, 0));
    }

    /// One that begins later once it has been asked so many times.
    struct Moving {
        first: Timestamp,
        then: Timestamp,
        from: u32,
        asked: AtomicU32,
    }

    impl Moving {
        fn beginning(&self) -> Timestamp {
            if self.asked.load(Ordering::Relaxed) < self.from { self.first } else { self.then }
        }
    }

    impl History for Moving {
        async fn serves(&self, time: Timestamp) -> Result<bool, Fault> {
            let served = time >= self.beginning();
            self.asked.fetch_add(1, Ordering::Relaxed);
            Ok(served)
        }
    }

    #[tokio::test]
    async fn the_oldest_time_is_found_and_found_again_when_the_oplog_has_moved_on_meanwhile() {
        let time = |time, increment| Timestamp { time, increment };
        let head = time(1_700_000_000, 3);
        for (first, then) in [
            (time(1_699_990_000, 7), time(1_699_990_000, 90)),
            (time(1_699_990_000, 1), time(1_699_990_002, 4)),
            (time(1_699_990_000, 7), time(1_699_999_999, 1)),
            (time(1, 1), time(1_699_990_000, 7)),
        ] {
            for from in 0..80 {
                let history = Moving { first, then, from, asked: AtomicU32::new(0) };
                let found = oldest(head, &history).await.unwrap();
                // What it began with when it was asked last.
                let beginning = if history.asked.load(Ordering::Relaxed) <= from { first } else { then };
                assert_eq!(found, beginning, "{first}, and {then} after {from} questions");
            }
        }
    }
}
