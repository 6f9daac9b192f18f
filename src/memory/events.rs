//! Builders of change events as a server sends them, and the delivery of one, for a handler's own tests.

use std::sync::Arc;

use bson::{Bson, DateTime, Document, doc};
use tokio_util::sync::CancellationToken;

use crate::checkpoint::Token;
use crate::delivery::{Context, Delivery};
use crate::event::{ChangeEvent, Operation};
use crate::hold::Hold;
use crate::ids::{Epoch, Fence, Namespace, SubscriptionId};
use crate::memory::feed;

/// A change event in the making; [`MemoryModel::push`](crate::memory::MemoryModel::push) takes it and gives it its
/// position. As a [`ChangeEvent`] of its own (`into()`) it stands at the beginning of a feed.
///
/// Default namespace: `test.events`.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryEvent {
    document: Document,
}

/// An event of this operation, with a namespace and nothing else in it.
#[allow(clippy::needless_pass_by_value, reason = "it is typed as a literal")]
pub fn event(operation: Operation) -> MemoryEvent {
    let document = doc! { "operationType": operation.as_str(), "ns": { "db": "test", "coll": "events" } };
    MemoryEvent { document }
}

/// An insert of a document under this `_id`.
pub fn insert(id: impl Into<Bson>, document: Document) -> MemoryEvent {
    let id = id.into();
    event(Operation::Insert).full_document(with_id(&id, document)).id(id)
}

/// An update of these fields, as `$set` makes it: without a full document, as a stream without a look-up sends it.
pub fn update(id: impl Into<Bson>, updated: Document) -> MemoryEvent {
    let description = doc! { "updatedFields": updated, "removedFields": [], "truncatedArrays": [] };
    event(Operation::Update).id(id).field("updateDescription", description)
}

/// A replacement by a document under this `_id`.
pub fn replace(id: impl Into<Bson>, document: Document) -> MemoryEvent {
    let id = id.into();
    event(Operation::Replace).full_document(with_id(&id, document)).id(id)
}

/// A delete of the document under this `_id`.
pub fn delete(id: impl Into<Bson>) -> MemoryEvent {
    event(Operation::Delete).id(id)
}

fn with_id(id: &Bson, document: Document) -> Document {
    let mut whole = doc! { "_id": id };
    whole.extend(document.into_iter().filter(|(name, _)| name != "_id"));
    whole
}

impl MemoryEvent {
    /// Where it happened. Default: `test.events`.
    pub fn namespace(self, namespace: &Namespace) -> Self {
        self.field("ns", doc! { "db": &namespace.db, "coll": &namespace.collection })
    }

    /// The document's key: `{ _id: id }`.
    pub fn id(self, id: impl Into<Bson>) -> Self {
        self.key(doc! { "_id": id.into() })
    }

    /// The document's key, of a sharded collection for instance.
    pub fn key(self, key: Document) -> Self {
        self.field("documentKey", key)
    }

    /// The document after the change: of an update what a look-up found.
    pub fn full_document(self, document: Document) -> Self {
        self.field("fullDocument", document)
    }

    /// The document before the change.
    pub fn full_document_before_change(self, document: Document) -> Self {
        self.field("fullDocumentBeforeChange", document)
    }

    /// Where a renamed collection went.
    pub fn to(self, namespace: &Namespace) -> Self {
        self.field("to", doc! { "db": &namespace.db, "coll": &namespace.collection })
    }

    /// Sets any field of the event; `_id` and `clusterTime` are set anew when it is pushed.
    pub fn field(mut self, name: impl Into<String>, value: impl Into<Bson>) -> Self {
        self.document.insert(name.into(), value.into());
        self
    }

    /// Takes a field of the event away.
    pub fn without(mut self, name: &str) -> Self {
        self.document.remove(name);
        self
    }

    /// The event as it stands at a position, with the fields a server puts first.
    pub(crate) fn at(self, token: &Token) -> ChangeEvent {
        let time = token.cluster_time();
        let mut whole = doc! { "_id": { "_data": token.as_str() } };
        whole.insert("operationType", self.document.get("operationType").cloned().unwrap_or(Bson::Null));
        whole.insert("clusterTime", time);
        whole.insert("wallTime", DateTime::from_millis(i64::from(time.time) * 1000));
        for (name, value) in self.document {
            if name != "_id" && name != "clusterTime" {
                whole.insert(name, value);
            }
        }
        ChangeEvent::from_document(&whole)
    }
}

/// What can be had of an event that cannot be sent whole.
pub(super) fn without_bodies(event: &ChangeEvent) -> ChangeEvent {
    let mut outline = Document::try_from(event.raw()).unwrap_or_default();
    for body in ["fullDocument", "fullDocumentBeforeChange", "updateDescription"] {
        outline.remove(body);
    }
    ChangeEvent::from_document(&outline)
}

impl From<MemoryEvent> for ChangeEvent {
    fn from(event: MemoryEvent) -> Self {
        event.at(&feed::event_token(feed::BEGINNING, 0, feed::UUID, 0))
    }
}

/// A delivery of this event, for a handler's own tests: the first attempt, no repeat, fence 1, never cancelled.
///
/// ```
/// # use mongosub::{Delivery, Failure, Handler, bson::doc, memory};
/// struct Count { seen: u64 }
///
/// impl Handler for Count {
///     async fn handle(&mut self, _: Delivery) -> Result<(), Failure> {
///         self.seen += 1;
///         Ok(())
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let mut handler = Count { seen: 0 };
/// handler.handle(memory::delivery(memory::insert(1, doc! { "status": "paid" }))).await.unwrap();
/// assert_eq!(handler.seen, 1);
/// # }
/// ```
///
/// # Panics
/// When the event carries no token; every event made by this module carries one.
pub fn delivery(event: impl Into<ChangeEvent>) -> Delivery {
    let event = event.into();
    let position = event.position().expect("an event with a token");
    let subscription = SubscriptionId::new("memory").expect("a valid id");
    let hold = Hold::of_nobody(Fence(1));
    let context = Context { subscription, fence: Fence(1), epoch: Epoch(1), hold, cancelled: CancellationToken::new() };
    Delivery::new(event, position, false, Arc::new(context))
}
