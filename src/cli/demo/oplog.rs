//! Makes the oplog of a throwaway server drop a position. It needs the small oplog that the demo starts one with.

use std::time::Duration;

use bson::{Document, Timestamp, doc};
use mongodb::Database;
use tokio::time::Instant;

use super::Failed;
use super::server::short;

/// Documents of this size fill the oplog quickly.
const FILLER: usize = 60_000;
const PATIENCE: Duration = Duration::from_secs(30);

/// Writes to another collection until the oldest entry of the oplog is newer than `time`.
pub(super) async fn drop_past(database: &Database, time: Timestamp) -> Result<(), Failed> {
    let begun = Instant::now();
    let filler = database.collection::<Document>("other");
    let filling = "x".repeat(FILLER);
    // The oplog is cut at a checkpoint of the storage engine, and only where newer entries fill a whole part of it.
    let mut documents = 22;
    while begun.elapsed() < PATIENCE {
        let batch: Vec<Document> = (0..documents).map(|_| doc! { "filling": &filling }).collect();
        filler.insert_many(batch).await.map_err(|error| short(&error))?;
        let again = Instant::now() + Duration::from_millis(1100);
        while Instant::now() < again {
            if oldest(database).await? > time {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        documents = 5;
    }
    Err(format!("the oplog still holds the position after {} s", PATIENCE.as_secs()).into())
}

async fn oldest(database: &Database) -> Result<Timestamp, Failed> {
    let oplog = database.client().database("local").collection::<Document>("oplog.rs");
    let entry = oplog.find_one(doc! {}).sort(doc! { "$natural": 1 }).await.map_err(|error| short(&error))?;
    let time = entry.as_ref().and_then(|entry| entry.get_timestamp("ts").ok());
    time.ok_or_else(|| "the oplog cannot be read".into())
}
