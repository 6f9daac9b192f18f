//! The process that keeps the ledgers, each with a subscription of its own, until it is killed.

use std::collections::HashSet;
use std::sync::Mutex;

use anyhow::Context;
use futures::future::try_join_all;
use mongosub::bson::{Document, doc};
use mongosub::mongodb::{Client, Collection, Database};
use mongosub::{
    ChangeStreamModel, Checkpoint, Delivery, DurableSubscriptions, Failure, MongoCheckpointStorage, Subscription,
    Transaction,
};
use serde::{Deserialize, Serialize};

use crate::support::child;

/// A way to keep a total for each account.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Book {
    /// The amount is added, and the position stored somewhere else, some time later.
    Plain,
    /// The position is written with the total, in one update of one document.
    Kept,
    /// The total is written in the transaction that the position is committed in.
    InTransaction,
}

pub const BOOKS: [Book; 3] = [Book::Plain, Book::Kept, Book::InTransaction];

impl Book {
    pub fn totals(self, database: &Database) -> Collection<Document> {
        let name = match self {
            Self::Plain => "totals_plain",
            Self::Kept => "totals_kept",
            Self::InTransaction => "totals_in_transaction",
        };
        database.collection(name)
    }

    fn id(self) -> &'static str {
        match self {
            Self::Plain => "ledger_plain_v1",
            Self::Kept => "ledger_kept_v1",
            Self::InTransaction => "ledger_in_transaction_v1",
        }
    }
}

/// One transfer: so much to this account.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Transfer {
    #[serde(rename = "_id")]
    pub id: i64,
    pub to: String,
    pub amount: i64,
}

/// What the process is told.
#[derive(Debug, Serialize, Deserialize)]
pub struct Life {
    pub uri: String,
    pub database: String,
    /// It ends by itself once everything written before is handled. Otherwise it is killed.
    pub last: bool,
}

/// What it says.
#[derive(Debug, Serialize, Deserialize)]
pub enum Word {
    /// The first transfer of this life is in this ledger.
    Begun(Book),
}

pub fn keep(life: serde_json::Value) -> anyhow::Result<()> {
    let life: Life = serde_json::from_value(life)?;
    tokio::runtime::Runtime::new()?.block_on(live(life))
}

async fn live(life: Life) -> anyhow::Result<()> {
    let client = Client::with_uri_str(&life.uri).await?;
    let database = client.database(&life.database);
    let storage = MongoCheckpointStorage::new(&database.collection::<Document>("checkpoints"));
    let model = ChangeStreamModel::collection(&database.collection::<Document>("transfers"));
    // A position is stored every 20 transfers: after a kill, those behind it come again.
    let subscriptions = DurableSubscriptions::new(model, storage).save_every(20);
    let open = try_join_all(BOOKS.map(|book| subscribe(&subscriptions, &database, book))).await?;
    if !life.last {
        std::future::pending::<()>().await;
    }
    try_join_all(open.iter().map(Subscription::caught_up)).await?;
    for (id, ended) in subscriptions.shutdown_all().await {
        ended.with_context(|| id.to_string())?;
    }
    client.shutdown().await;
    Ok(())
}

async fn subscribe(
    subscriptions: &DurableSubscriptions<ChangeStreamModel, MongoCheckpointStorage>,
    database: &Database,
    book: Book,
) -> anyhow::Result<Subscription> {
    let totals = book.totals(database);
    let subscription = match book {
        Book::Plain => {
            let handler = move |delivery: Delivery| {
                let totals = totals.clone();
                async move { add(&totals, &delivery).await.inspect(|()| say_begun(book)) }
            };
            subscriptions.subscribe(book.id(), handler).await?
        }
        Book::Kept => {
            let handler = move |delivery: Delivery| {
                let totals = totals.clone();
                async move { add_once(&totals, &delivery).await.inspect(|()| say_begun(book)) }
            };
            subscriptions.subscribe(book.id(), handler).await?
        }
        Book::InTransaction => {
            let handler = move |mut transaction: Transaction, delivery: Delivery| {
                let totals = totals.clone();
                async move { add_in(&mut transaction, &totals, &delivery).await.inspect(|()| say_begun(book)) }
            };
            subscriptions.subscribe_in_transaction(book.id(), handler).await?
        }
    };
    Ok(subscription)
}

fn transfer(delivery: &Delivery) -> Result<Transfer, Failure> {
    Ok(delivery.event.full_document()?.ok_or("a transfer without a document")?)
}

/// Adds the amount; when the transfer comes again, once more.
async fn add(totals: &Collection<Document>, delivery: &Delivery) -> Result<(), Failure> {
    let Transfer { to, amount, .. } = transfer(delivery)?;
    let change = doc! { "$inc": { "total": amount, "transfers": 1_i64 } };
    totals.update_one(doc! { "_id": to }, change).upsert(true).await?;
    Ok(())
}

/// A total, and how far it has come.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Total {
    position: Option<String>,
    /// Which of the source's beginnings the position belongs to.
    epoch: Option<i64>,
}

/// Adds the amount, unless it is in the total already: the position stands beside it, written in the same update.
async fn add_once(totals: &Collection<Document>, delivery: &Delivery) -> Result<(), Failure> {
    let Transfer { to, amount, .. } = transfer(delivery)?;
    let kept = totals.clone_with_type::<Total>().find_one(doc! { "_id": &to }).await?.unwrap_or_default();
    let saved = kept.position.as_deref().map(|text| {
        let Ok(position) = text.parse::<Checkpoint>();
        position
    });
    let epoch = delivery.epoch().0;
    if delivery.already_applied(saved.as_ref().filter(|_| kept.epoch == Some(epoch))) {
        return Ok(());
    }
    let change = doc! {
        "$inc": { "total": amount, "transfers": 1_i64 },
        "$set": { "position": delivery.position.to_string(), "epoch": epoch },
    };
    // Only if nobody else has moved it meanwhile. If somebody has, the upsert meets his document (11000), and the next
    // attempt looks at the total again.
    let unmoved = doc! { "_id": to, "position": kept.position };
    totals.update_one(unmoved, change).upsert(true).await?;
    Ok(())
}

/// Adds the amount in the transaction: that is all there is to it.
async fn add_in(
    transaction: &mut Transaction,
    totals: &Collection<Document>,
    delivery: &Delivery,
) -> Result<(), Failure> {
    let Transfer { to, amount, .. } = transfer(delivery)?;
    let change = doc! { "$inc": { "total": amount, "transfers": 1_i64 } };
    totals.update_one(doc! { "_id": to }, change).upsert(true).session(transaction).await?;
    Ok(())
}

/// Tells the parent, once a life for each ledger. Without a parent there is nothing left to do.
fn say_begun(book: Book) {
    static BEGUN: Mutex<Option<HashSet<Book>>> = Mutex::new(None);
    let mut begun = BEGUN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let is_first = begun.get_or_insert_default().insert(book);
    if is_first && child::say(&Word::Begun(book)).is_err() {
        std::process::exit(1);
    }
}
