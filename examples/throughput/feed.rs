//! What is replayed: order-like documents of a size, written once.

use mongosub::bson::{self, DateTime, Document, Timestamp, doc};
use mongosub::mongodb::{Client, Collection, Database};

/// What is read: where it lies, from when on, how many events.
#[derive(Clone)]
pub struct Feed {
    pub name: &'static str,
    pub database: Database,
    pub orders: Collection<Document>,
    pub start: Timestamp,
    pub events: u64,
}

impl Feed {
    /// Writes `events` documents of about `bytes`. Their keys count from 0 in the order of the feed.
    pub async fn write(client: &Client, name: &'static str, bytes: usize, events: u64) -> anyhow::Result<Self> {
        let database = client.database(&format!("throughput_{name}"));
        let orders = database.collection::<Document>("orders");
        database.create_collection("orders").await?;
        let start = now(client).await?;
        let mut key = 0;
        while key < i64::try_from(events)? {
            let batch: Vec<Document> = (key..key + 1000).map(|key| order(key, bytes)).collect();
            key += 1000;
            orders.insert_many(batch).await?;
        }
        Ok(Self { name, database, orders, start, events })
    }
}

/// An operation time that lies behind everything written until now.
pub async fn now(client: &Client) -> anyhow::Result<Timestamp> {
    let hello = client.database("admin").run_command(doc! { "hello": 1 }).await?;
    let majority = hello.get_document("lastWrite")?.get_document("majorityOpTime")?.get_timestamp("ts")?;
    Ok(Timestamp { time: majority.time, increment: majority.increment + 1 })
}

/// An order as shops have them: a head of a few fields, and as many lines as fit the size.
pub fn order(key: i64, bytes: usize) -> Document {
    let mut order =
        doc! { "_id": key, "status": "paid", "total": key * 10 + 99, "customer": format!("c-{}", key % 997) };
    if bytes > 300 {
        order.insert("created", DateTime::from_millis(1_767_225_600_000 + key));
        order.insert("currency", "EUR");
        order.insert(
            "address",
            doc! { "street": "Long Lane 12", "city": "Springfield", "zip": "12345", "country": "DE" },
        );
    }
    let line = |n: usize| {
        doc! { "sku": format!("sku-{:05}", n * 7), "name": "a thing to be sent", "quantity": 2, "price": 19.95, "gift": n.is_multiple_of(3) }
    };
    let size = |order: &Document| bson::serialize_to_vec(order).map_or(0, |bytes| bytes.len());
    let room = bytes.saturating_sub(size(&order));
    let lines: Vec<Document> = (0..room / 116).map(line).collect();
    if !lines.is_empty() {
        order.insert("lines", lines);
    }
    let room = bytes.saturating_sub(size(&order) + 12);
    order.insert("note", "x".repeat(room));
    order
}
