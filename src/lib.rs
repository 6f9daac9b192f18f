//! Durable subscriptions to MongoDB change streams.
//!
//! A named subscription receives every change of a collection (database, deployment) at least once, in order, across
//! crashes, failovers, pauses and quiet months; or it stops and says exactly why. It never loses a change silently.
//!
//! # A subscription
//!
//! [`DurableSubscriptions`] puts three things together: a **model**, which reads one scope ([`ChangeStreamModel`], or
//! [`memory::MemoryModel`] in tests); a **storage**, which keeps one record per subscription id
//! ([`MongoCheckpointStorage`], [`memory::MemoryCheckpointStorage`]); and a **handler** of yours, which is given one
//! [`Delivery`] at a time. An event is *settled* when the handler has returned `Ok`; until then it is tried again, for
//! ever by default, with the status saying so.
//!
//! ```
//! use mongosub::bson::doc;
//! use mongosub::memory::{self, MemoryCheckpointStorage, MemoryModel};
//! use mongosub::{Delivery, DurableSubscriptions};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (model, storage) = (MemoryModel::new(), MemoryCheckpointStorage::new());
//! let subscriptions = DurableSubscriptions::new(model.clone(), storage);
//! let subscription = subscriptions
//!     .subscribe("search_index_v3", |delivery: Delivery| async move {
//!         println!("{} {:?}", delivery.event.operation()?, delivery.event.document_id::<i32>()?);
//!         Ok(())
//!     })
//!     .await?;
//!
//! let paid = model.push(memory::insert(1, doc! { "status": "paid" }));
//! subscription.caught_up().await?;
//! assert_eq!(subscription.shutdown().await?, Some(paid));
//! # Ok(())
//! # }
//! ```
//!
//! The id is the consumer's stable name, version included: change it when what the handler builds has to be built anew.
//! One process at a time runs an id. Another one that subscribes with it takes over at once, and the first one stops:
//! at its next save or within 10 s, after the event in hand. Both may handle the same events meanwhile; an effect that
//! must not suffer that is fenced with [`Delivery::fence`].
//!
//! # How a position is kept
//!
//! * A new subscription's start is the deployment's present, pinned and stored before the cursor opens for delivery:
//!   what is sent after `subscribe` has returned is delivered, whatever happens to the process. [`StartAt`] has the
//!   other starts.
//! * Only the *safe position* is ever stored: the last one before which everything delivered is settled. After a crash,
//!   what was settled and not stored yet comes again ([`Delivery::may_be_repeat`]).
//! * Replies without events move it too: a subscription whose filter matches nothing for months keeps its place.
//! * A save is accepted only from the owner of the id's newest claim, and only forward.
//! * What heals by itself is retried for ever, visibly: [`State::Retrying`]. What needs a person stalls, what is over
//!   stops, each with a [`Reason`]. Nothing ever goes on at "now" instead, unless you chose that by
//!   [`StartAt::Always`].
//!
//! [The guide](guide) tells all of it: when the position is stored, what a kill costs, fences and epochs, what the record
//! holds; [handlers that keep something back](guide::handlers), fan-outs and streams; and
//! [what follows when a handler fails](guide::failures).
//! [The runbook](runbook) says what to do about each reason.
//!
//! # Where to look
//!
//! | for | see |
//! |---|---|
//! | subscribing, and every setting | [`DurableSubscriptions`], [`Subscribe`], [`StartAt`], [`Filter`] |
//! | handling | [`Handler`], [`BatchHandler`], [`Delivery`], [`ChangeEvent`] |
//! | a handler that buffers, or stores in the background | [`Handler::flush`], [`Subscribe::hold`], [`Hold`], [`Mark`], [the guide](guide::handlers) |
//! | several handlers as one, deliveries that are pulled | [`fan_out`](fan_out()), [`FanOut`], [`DurableSubscriptions::stream`], [`Deliveries`], [`Pulled`] |
//! | a handler that fails, or kills its process | [`Failure`], [`OnFailure`], [`Then`], [the guide](guide::failures) |
//! | stepping over events by hand | [`Subscription::skip`], [`DurableSubscriptions::skip`], [`Skipped`] |
//! | a source that changes | [`OnInvalidate`], [`OnHistoryLost`], [`Gap`] |
//! | dead letters | [`DurableSubscriptions::retry`], [`evict`](DurableSubscriptions::evict), [`DocumentKey`], [`Sequence`], [`Letter`], [`MongoDeadLetterStorage`] |
//! | a running subscription | [`Subscription`], [`Status`], [`State`], [`Reason`] |
//! | what failed | [`SubscribeError`], [`SubscriptionError`], [`DeadLetterError`], [`DecodeError`], [`SourceError`], [`StorageError`] |
//! | MongoDB | [`ChangeStreamModel`], [`ConnectionPool`], [`MongoCheckpointStorage`] |
//! | tests of a handler, without a server | [`memory`] |
//! | a model or a storage of your own | [`SubscriptionModel`], [`Reader`], [`CheckpointStorage`], [`DeadLetterStorage`], `conformance` |
//! | positions by hand | [`Checkpoint`], [`Token`], [`Claim`], [`Save`], [`Record`] |
//!
//! # Features
//!
//! * `cli` (default): the `mongosub` command. A library user turns it off: `default-features = false`.
//! * `conformance`: the suites that every implementation of a seam must pass.
//!
//! It needs a tokio runtime with time (and, for MongoDB, I/O) enabled. It logs with `tracing`, and counts with the
//! `metrics` facade: `mongosub_{events,filtered,delivered,settled,handled,skipped,dead_lettered,parked,replayed}_total`,
//! `mongosub_{reconnects,saves,saves_not_ahead,gaps}_total`,
//! `mongosub_lag_seconds`, `mongosub_state` and `mongosub_reason`, each labelled with its `subscription`.

// Values: no I/O.
mod backoff;
mod checkpoint;
mod delivery;
mod error;
mod event;
mod filter;
mod handover;
mod hold;
mod ids;
mod letter;
mod on_failure;
mod reason;
mod start;

// Seams: what a backend implements.
mod audit;
mod batch_handler;
mod dead_letter;
mod fan_out;
mod handler;
mod model;
mod pulled;
mod storage;
mod transaction_handler;
mod transactional_storage;

// Backends.
pub mod memory;
mod mongo;

// The runtime and its faces.
#[cfg(feature = "cli")]
pub mod cli;
#[cfg(feature = "conformance")]
pub mod conformance;
mod durable;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzz;
mod metrics;
mod registry;
mod run;
mod status;
mod subscription;

pub use bson;
pub use bytes;
pub use mongodb;

pub use audit::{AUDITED, Gap, Note, Skipped};
pub use backoff::Backoff;
pub use batch_handler::{BatchFailure, BatchHandler, BatchLimits};
pub use checkpoint::{BadToken, Checkpoint, Kind, Token};
pub use dead_letter::{DeadLetterStorage, DynDeadLetterStorage};
pub use delivery::Delivery;
pub use durable::{Deliveries, DurableSubscriptions, Retried, SkipEvents, Subscribe};
pub use error::{DeadLetterError, DecodeError, SourceError, StorageError, SubscribeError, SubscriptionError};
pub use event::{ChangeEvent, Operation, SplitEvent, TruncatedArray, UpdateDescription};
pub use fan_out::{FanOut, fan_out};
pub use filter::{Field, Filter};
pub use handler::{Failure, Handler, Verdict};
pub use hold::{Declared, Hold, Mark};
pub use ids::{Epoch, Fence, InvalidId, Namespace, Owner, Ownership, SubscriptionId};
pub use letter::{
    DocumentKey, EvictOutcome, HoldOutcome, Letter, LetterKind, MAX_LETTERS, MAX_SEQUENCES, NewLetter, ParkingLimit,
    PutOutcome, RemoveOutcome, Sequence,
};
pub use model::{
    Deployment, Fingerprint, Identity, Plan, Read, Reader, Reopening, Scope, SourceState, SubscriptionModel,
};
pub use mongo::{
    ChangeStreamModel, ChangeStreamReader, ConnectionPool, FullDocument, FullDocumentBeforeChange,
    GlobalCheckpointSource, MongoCheckpointStorage, MongoDeadLetterStorage, MongoSession, Transaction,
};
pub use on_failure::{OnFailure, Retries, Then};
pub use pulled::Pulled;
pub use reason::Reason;
pub use run::changes::{OnHistoryLost, OnInvalidate};
pub use run::policy::{SaveMode, SavePolicy};
pub use run::settings::Options;
pub use start::{Start, StartAt};
pub use status::{State, Status};
pub use storage::{
    BoxFuture, CheckpointStorage, Claim, ClaimOutcome, DynCheckpointStorage, Hand, InHand, Record, Save, SaveOutcome,
    Source, StartPosition,
};
pub use subscription::Subscription;
pub use transaction_handler::TransactionHandler;
pub use transactional_storage::{Begun, Committed, TransactionError, TransactionalStorage};

// Chapters of the documentation, and nothing else.
#[cfg(any(doc, doctest))]
#[doc = include_str!("guide/positions.md")]
pub mod guide {
    #[doc = include_str!("guide/handlers.md")]
    pub mod handlers {}
    #[doc = include_str!("guide/failures.md")]
    pub mod failures {}
}
#[cfg(any(doc, doctest))]
#[doc = include_str!("../docs/runbook.md")]
pub mod runbook {}

/// The examples in the README are compiled as tests of the documentation.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
