//! Durable subscriptions to MongoDB change streams.
//!
//! A named subscription receives every change of a collection (database, deployment) at least once, in order, across
//! crashes, failovers, pauses and quiet months; or it stops and says exactly why. It never loses a change silently.

// Values: no I/O.
mod backoff;
mod checkpoint;
mod delivery;
mod error;
mod event;
mod filter;
mod ids;
mod reason;
mod start;

// Seams: what a backend implements.
mod handler;
mod model;
mod storage;

// Backends.
pub mod memory;
mod mongo;

// The runtime and its faces.
#[cfg(feature = "cli")]
pub mod cli;
#[cfg(feature = "conformance")]
pub mod conformance;
mod durable;
mod metrics;
mod registry;
mod run;
mod status;
mod subscription;

pub use bson;
pub use bytes;
pub use mongodb;

pub use backoff::Backoff;
pub use checkpoint::{BadToken, Checkpoint, Kind, Token};
pub use delivery::Delivery;
pub use durable::{DurableSubscriptions, Subscribe};
pub use error::{DecodeError, SourceError, StorageError, SubscribeError, SubscriptionError};
pub use event::{ChangeEvent, Operation, SplitEvent, TruncatedArray, UpdateDescription};
pub use filter::{Field, Filter};
pub use handler::{Failure, Handler};
pub use ids::{Epoch, Fence, InvalidId, Namespace, Owner, Ownership, SubscriptionId};
pub use model::{
    Deployment, Fingerprint, Identity, Plan, Read, Reader, Reopening, Scope, SourceState, SubscriptionModel,
};
pub use mongo::{
    ChangeStreamModel, ChangeStreamReader, FullDocument, FullDocumentBeforeChange, GlobalCheckpointSource,
    MongoCheckpointStorage,
};
pub use reason::Reason;
pub use run::policy::{SaveMode, SavePolicy};
pub use run::settings::Options;
pub use start::{Start, StartAt};
pub use status::{State, Status};
pub use storage::{
    BoxFuture, CheckpointStorage, Claim, ClaimOutcome, DynCheckpointStorage, Record, Save, SaveOutcome, Source,
    StartPosition,
};
pub use subscription::Subscription;
