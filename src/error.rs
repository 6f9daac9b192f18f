//! Errors, by meaning. Values only; what a server's code means is decided in `mongo/classify.rs`.

use bson::DateTime;

use crate::checkpoint::Checkpoint;
use crate::ids::{InvalidId, Owner, SubscriptionId};
use crate::letter::DocumentKey;
use crate::reason::Reason;

/// Why a source could not be opened, asked or read on.
///
/// Handling: [`is_retryable`](Self::is_retryable) heals by itself and is tried again; the rest needs a person.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The source does not answer, or not now. Handling: try again.
    #[error("the source is not available ({message})")]
    Unavailable {
        /// What the source or the network said.
        message: String,
    },
    /// A privilege is missing. Handling: grant it; a run asks again slowly.
    #[error("not authorised: grant {action} on {resource}")]
    Unauthorized {
        /// The action, as a role names it.
        action: String,
        /// The resource.
        resource: String,
    },
    /// It cannot be served, now or later. Handling: the reason says what to do.
    #[error("{0}")]
    Refused(Reason),
}

impl SourceError {
    /// Whether the same call can succeed later without anyone's doing.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }

    /// The reason that a status shows for this error.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Unavailable { message } => Reason::SourceUnavailable { message: message.clone() },
            Self::Unauthorized { action, resource } => {
                Reason::Unauthorized { action: action.clone(), resource: resource.clone() }
            }
            Self::Refused(reason) => reason.clone(),
        }
    }
}

/// Why a checkpoint storage could not do what it was asked.
///
/// Handling: [`is_retryable`](Self::is_retryable) is tried again; the outcome of a write may then be unknown, and
/// writing the same again is harmless.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The storage does not answer, or not in time. Handling: try again.
    #[error("the storage is not available ({message})")]
    Unavailable {
        /// What the storage or the network said.
        message: String,
    },
    /// A privilege is missing. Handling: grant it.
    #[error("not authorised: grant {action} on {resource}")]
    Unauthorized {
        /// The action, as a role names it.
        action: String,
        /// The resource.
        resource: String,
    },
    /// The record cannot be read and was left untouched. Handling: repair or delete it.
    #[error("the stored record {id:?} cannot be read: field {field:?} {message}; it was left untouched")]
    Unreadable {
        /// The record's `_id`.
        id: String,
        /// The field that is wrong.
        field: String,
        /// What is wrong with it.
        message: String,
    },
    /// The storage refuses the command. Handling: the message says what it refuses.
    #[error("the storage refuses the command (code {code}: {message})")]
    Refused {
        /// The server's error code.
        code: i32,
        /// The server's message.
        message: String,
    },
}

impl StorageError {
    /// Whether the same call can succeed later without anyone's doing.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }

    /// The reason that a status shows for this error.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Unavailable { message } => Reason::StorageUnavailable { message: message.clone() },
            Self::Unauthorized { action, resource } => {
                Reason::Unauthorized { action: action.clone(), resource: resource.clone() }
            }
            Self::Unreadable { id, field, message } => {
                Reason::UnreadableRecord { id: id.clone(), field: field.clone(), message: message.clone() }
            }
            Self::Refused { code, message } => Reason::RefusedByServer { code: *code, message: message.clone() },
        }
    }
}

/// Why `subscribe` failed. Nothing is registered then, and the id is free.
///
/// ```
/// # use mongosub::memory::{MemoryCheckpointStorage, MemoryModel};
/// use mongosub::{Delivery, DurableSubscriptions, Reason, SubscribeError};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// # let model = MemoryModel::new();
/// # model.refuse_global_checkpoint();
/// # let subscriptions = DurableSubscriptions::new(model, MemoryCheckpointStorage::new());
/// let started = subscriptions.subscribe("search_index_v3", |_: Delivery| async { Ok(()) }).await;
/// match started {
///     Ok(subscription) => println!("{} runs", subscription.id()),
///     Err(SubscribeError::Refused { reason: Reason::HistoryLost { oldest, .. }, .. }) => {
///         println!("to be built anew, from {oldest:?} on");
///     }
///     Err(error) => {
///         eprintln!("{error}"); // .. (runbook: no_start_position)
/// #       assert!(error.to_string().ends_with("(runbook: no_start_position)"));
/// #       let exit = |code: u8| assert_eq!(code, 3);
///         exit(error.exit_code());
///     }
/// }
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SubscribeError {
    /// A setting cannot be used. Handling: correct it.
    #[error("{field}: {message}")]
    Config {
        /// The setting.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The filter asks about the full document, and updates carry none. Handling: set
    /// [`full_document`](crate::ChangeStreamModel::full_document) on the model, or leave updates out of the filter.
    #[error(
        "filter: it asks for a field of the full document, which updates do not carry, and would drop every update; \
         set .full_document(FullDocument::UpdateLookup) on the model or leave updates out of the filter"
    )]
    FilterNeedsFullDocument,
    /// The id already runs here. Handling: use the running one (`get`), or shut it down first.
    #[error("subscription {id} is already running here; get it, or shut it down first")]
    AlreadyRunning {
        /// The id.
        id: SubscriptionId,
    },
    /// The source or the storage refuses it for good. Handling: the reason says what to do.
    #[error("subscription {id} cannot start: {}", reason.pointing_to_runbook())]
    Refused {
        /// The id.
        id: SubscriptionId,
        /// Why.
        reason: Reason,
    },
    /// It could not be started within `start_timeout`. Handling: the last reason says what was in the way.
    #[error("subscription {id} could not start in time: {}", last.pointing_to_runbook())]
    TimedOut {
        /// The id.
        id: SubscriptionId,
        /// What was last in the way.
        last: Reason,
    },
}

impl SubscribeError {
    /// The exit code of a program that ends with this error: 2 for usage, 3 for the rest.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config { .. } | Self::FilterNeedsFullDocument | Self::AlreadyRunning { .. } => 2,
            Self::Refused { .. } | Self::TimedOut { .. } => 3,
        }
    }

    /// The reason, when the source or the storage gave one.
    pub fn reason(&self) -> Option<&Reason> {
        match self {
            Self::Refused { reason, .. } | Self::TimedOut { last: reason, .. } => Some(reason),
            _ => None,
        }
    }
}

/// Why something asked of a running subscription was not done.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SubscriptionError {
    /// The run has stopped or stalled. Handling: the reason says what to do.
    #[error("subscription {id} does not run: {}", reason.pointing_to_runbook())]
    Ended {
        /// The id.
        id: SubscriptionId,
        /// Why.
        reason: Reason,
    },
    /// The last position could not be stored in time. Handling: nothing is lost; what was settled behind the stored
    /// checkpoint is delivered again at the next start.
    #[error("subscription {id} could not store {position} in time: {last}")]
    NotSaved {
        /// The id.
        id: SubscriptionId,
        /// The position that is not stored.
        position: Checkpoint,
        /// What was in the way.
        last: Reason,
    },
    /// What was asked cannot be done. Handling: the message says what is wrong with it; nothing has changed.
    #[error("subscription {id}: {message}")]
    Refused {
        /// The id.
        id: SubscriptionId,
        /// What is wrong with it.
        message: String,
    },
    /// The source could not be asked, or refuses. Handling: try again, unless it refuses.
    #[error("subscription {id}: {source}")]
    Source {
        /// The id.
        id: SubscriptionId,
        /// What the source said.
        source: SourceError,
    },
    /// The storage could not be asked. Handling: try again.
    #[error("subscription {id}: {source}")]
    Storage {
        /// The id.
        id: SubscriptionId,
        /// What the storage said.
        source: StorageError,
    },
}

/// Why something asked about dead letters was not done.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DeadLetterError {
    /// The id cannot be one. Handling: correct it.
    #[error(transparent)]
    Id(#[from] InvalidId),
    /// No storage is set. Handling: set the one that the subscription uses.
    #[error("no dead letter storage is set: set .dead_letters(storage) on the DurableSubscriptions")]
    NoStorage,
    /// An eviction needs a reason. Handling: say why these changes may be lost.
    #[error("an eviction deletes changes for good and needs a reason")]
    NoReason,
    /// The document has no dead letters. Handling: list those that have.
    #[error("{key} of subscription {id} has no dead letters")]
    NoLetters {
        /// The subscription.
        id: SubscriptionId,
        /// The document.
        key: DocumentKey,
    },
    /// Somebody is retrying them. Handling: try again behind that.
    #[error("the dead letters of {key} of subscription {id} are being retried by {owner}, until {until} at least")]
    HeldBy {
        /// The subscription.
        id: SubscriptionId,
        /// The document.
        key: DocumentKey,
        /// Who.
        owner: Owner,
        /// Until when at least, on the storage's clock.
        until: DateTime,
    },
    /// The retry held them no longer: it was away for too long, and another one has them. Handling: look what is left; the
    /// letter in hand may be handled twice.
    #[error(
        "a retry of {key} of subscription {id} was overtaken by another one; the letter in hand may be handled twice"
    )]
    HoldLost {
        /// The subscription.
        id: SubscriptionId,
        /// The document.
        key: DocumentKey,
    },
    /// A storage could not be asked. Handling: try again; the letter in hand may be handled twice.
    #[error("dead letters of subscription {id}: {source}")]
    Storage {
        /// The id.
        id: SubscriptionId,
        /// What the storage said.
        source: StorageError,
    },
}

/// A part of an event that could not be decoded. The event's position is not affected.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("cannot decode {field:?} of the change event: {message}")]
pub struct DecodeError {
    pub(crate) field: String,
    pub(crate) message: String,
}

impl DecodeError {
    pub(crate) fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), message: message.into() }
    }

    /// The field that could not be decoded.
    pub fn field(&self) -> &str {
        &self.field
    }
}
