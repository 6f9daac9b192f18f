//! The two acts: a subscriber killed in the middle, and one that was quiet while the oplog moved on.

use std::time::Duration;

use bson::{Document, doc};
use mongodb::options::{CollectionOptions, WriteConcern};
use mongodb::{Collection, Database};
use tokio::time::Instant;

use super::Failed;
use super::account::Account;
use super::child::Subscriber;
use super::oplog;
use super::server::{Server, short};
use super::story::Story;
use super::subscriber::{CHECKPOINTS, ID, ORDERS};
use crate::checkpoint::{Checkpoint, Kind};
use crate::ids::SubscriptionId;
use crate::model::{Plan, SubscriptionModel};
use crate::mongo::{ChangeStreamModel, MongoCheckpointStorage};
use crate::storage::CheckpointStorage;

const PATIENCE: Duration = Duration::from_secs(30);

pub(super) struct Play<'a> {
    server: &'a Server,
    database: &'a Database,
    story: &'a Story,
    orders: Collection<Document>,
    account: Account,
    written: u32,
    subscriber: Option<Subscriber>,
}

impl<'a> Play<'a> {
    pub(super) fn begin(server: &'a Server, database: &'a Database, story: &'a Story) -> Self {
        let majority = CollectionOptions::builder().write_concern(WriteConcern::majority()).build();
        let orders = database.collection_with_options::<Document>(ORDERS, majority);
        let (account, written) = (Account::default(), 0);
        Self { server, database, story, orders, account, written, subscriber: None }
    }

    /// Everything in one line, and whether nothing was lost.
    pub(super) fn verdict(&self) -> (String, bool) {
        (self.account.line(self.written), self.account.lost(self.written) == 0)
    }

    /// Writes the next orders, all at once.
    async fn write(&mut self, number: u32) -> Result<(), Failed> {
        let last = self.written + number;
        let orders =
            (self.written + 1..=last).map(|id| doc! { "_id": id, "status": "paid", "total": i64::from(id) * 10 });
        let written = self.orders.insert_many(orders).await;
        written.map_err(|error| format!("the orders cannot be written: {}", short(&error)))?;
        self.written = last;
        Ok(())
    }

    async fn start_subscriber(&self) -> Result<Subscriber, Failed> {
        Subscriber::start(self.server.uri(), self.database.name()).await
    }

    /// The first act.
    pub(super) async fn kill_and_resume(&mut self, orders: u32) -> Result<(), Failed> {
        self.story.act("1. A subscriber is killed in the middle");
        let mut subscriber = self.start_subscriber().await?;
        self.story.line("subscribed", &format!("{ID}, in a process of its own"));
        let bar = self.story.bar(orders.into(), "orders");
        let (first, kill_at) = (orders * 6 / 10, orders * 3 / 10);
        self.write(first).await?;
        while self.account.delivered() < kill_at {
            subscriber.handled(&mut self.account).await?;
            bar.set_position(self.account.delivered().into());
        }
        subscriber.kill(&mut self.account).await?;
        let handled = self.account.delivered();
        bar.suspend(|| {
            self.story.line("killed", &format!("with SIGKILL after {handled} of {first} written orders"));
        });
        self.write(orders - first).await?;
        bar.suspend(|| self.story.line("written", &format!("{} more while nobody listened", orders - first)));
        let mut subscriber = self.start_subscriber().await?;
        while !self.account.has(self.written) {
            subscriber.handled(&mut self.account).await?;
            bar.set_position(self.account.delivered().into());
        }
        bar.finish_and_clear();
        self.story.line("resumed", &self.account.line(self.written));
        self.subscriber = Some(subscriber);
        Ok(())
    }

    /// The second act.
    pub(super) async fn quiet_and_resume(&mut self) -> Result<(), Failed> {
        self.story.act("2. Nothing happens for long, and the oplog moves on");
        let last = self.account.last().cloned().ok_or("no order was handled")?;
        let time = last.cluster_time().ok_or("an order's position has no time")?;
        if self.server.is_ours() {
            let waiting = self.story.wait("other collections are written to");
            let dropped = oplog::drop_past(self.database, time).await;
            waiting.finish_and_clear();
            dropped?;
            self.story.line("oplog", "it no longer holds the position of the last order");
        } else {
            self.story.line("oplog", "left alone, since the server is your own");
        }
        let quiet = self.quiet_position(&last).await?;
        self.story.line("stored", &format!("the quiet position {quiet}"));
        if let Some(subscriber) = self.subscriber.take() {
            subscriber.kill(&mut self.account).await?;
        }
        let (before, repeated) = (self.written, self.account.repeated());
        let new = 10;
        self.write(new).await?;
        self.story.line("killed", &format!("with SIGKILL; {new} orders written while nobody listened"));
        let mut subscriber = self.start_subscriber().await?;
        while !self.account.has(self.written) {
            subscriber.handled(&mut self.account).await?;
        }
        subscriber.kill(&mut self.account).await?;
        let line = self.account.line_since(before, repeated, self.written);
        self.story.line("resumed", &format!("from the quiet position: {line}"));
        if self.server.is_ours() {
            self.refused(&last).await?;
        }
        Ok(())
    }

    /// Waits until a quiet position beyond the last order is stored.
    async fn quiet_position(&self, last: &Checkpoint) -> Result<Checkpoint, Failed> {
        let storage = MongoCheckpointStorage::new(&self.database.collection::<Document>(CHECKPOINTS));
        let id = SubscriptionId::new(ID).map_err(|error| error.to_string())?;
        let model = ChangeStreamModel::collection(&self.orders);
        // The demo's own server has dropped the order by now: only a position that is still there will do.
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            let record = storage.read(&id).await.map_err(|error| error.to_string())?;
            if let Some((position, Kind::Quiet)) = record.and_then(|record| record.position.zip(record.kind))
                && position.is_beyond(last)
                && model.is_readable(&position).await.map_err(|error| error.to_string())?
            {
                return Ok(position);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Err(format!("no quiet position was stored within {} s", PATIENCE.as_secs()).into())
    }

    /// Without the quiet position the subscription would have ended here.
    async fn refused(&self, last: &Checkpoint) -> Result<(), Failed> {
        match ChangeStreamModel::collection(&self.orders).open(Some(last), &Plan::default()).await {
            Err(error) if error.reason().name() == "history_lost" => {
                self.story.line("without it", "the last order's own position is refused: its history is lost (286)");
                Ok(())
            }
            Err(error) => {
                Err(format!("the last order's position should be refused as lost history, but: {error}").into())
            }
            Ok(_) => Err("the last order's position should be refused, but the server took it".into()),
        }
    }
}

/// Drops the demo's database on a server of the user's own, also when the demo is dropped half-way.
pub(super) struct Cleanup {
    database: Option<Database>,
}

impl Cleanup {
    pub(super) fn new(database: Database, throwaway: bool) -> Self {
        Self { database: (!throwaway).then_some(database) }
    }

    pub(super) async fn drop_database(mut self) {
        if let Some(database) = self.database.take() {
            drop_it(database).await;
        }
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        if let Some(database) = self.database.take() {
            let runtime = tokio::runtime::Handle::current();
            tokio::task::block_in_place(|| runtime.block_on(drop_it(database)));
        }
    }
}

async fn drop_it(database: Database) {
    if let Err(error) = database.drop().await {
        let (name, error) = (database.name(), short(&error));
        eprintln!("mongosub: the demo's database {name} could not be dropped: {error}");
    }
}
