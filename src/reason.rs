//! The closed list of reasons why a subscription retries, stalls or stops. Values only.

use bson::DateTime;
use serde::{Serialize, Serializer};

use crate::checkpoint::Checkpoint;
use crate::ids::Owner;

/// Why a subscription retries, has stalled, has stopped or never started.
///
/// Its `Display` is one sentence that says what happened, at which position, and what to do. The
/// [runbook](crate::runbook) has a section for each: what is lost, what to look at, what to type.
///
/// ```no_run
/// # use mongosub::{Reason, Subscription};
/// # async fn example(subscription: Subscription) -> u8 {
/// let reason = subscription.stopped().await;
/// if let Reason::Superseded { owner, since } = &reason {
///     println!("{owner:?} runs it since {since:?}");
/// }
/// reason.exit_code()
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, thiserror::Error)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// The source does not answer. Goes on by itself.
    #[error("the source is not available ({message}); it is tried again until it answers")]
    SourceUnavailable {
        /// What the source or the network said.
        message: String,
    },
    /// The checkpoint storage does not answer. Goes on by itself.
    #[error("the checkpoint storage is not available ({message}); the save is tried again until it answers")]
    StorageUnavailable {
        /// What the storage or the network said.
        message: String,
    },
    /// The handler fails for the event in hand, or to flush. Goes on by itself, unless it has stalled: the process died of
    /// the event again and again, and the failure policy knows no end.
    #[error(
        "the handler has failed {attempts} times for the event at {position} ({error}); everything behind it waits until it \
         is handled, or stepped over with `skip(position, reason)`"
    )]
    HandlerFailing {
        /// The event in hand.
        position: Checkpoint,
        /// How many attempts have failed.
        attempts: u32,
        /// The last error.
        error: String,
    },
    /// The handler has been flushing for longer than 30 s. Goes on by itself, when it has.
    #[error("the handler has been flushing since {since}; it is waited for, and nothing is handled meanwhile")]
    Flushing {
        /// Since when, on this process's clock.
        #[serde(serialize_with = "as_plain_text")]
        since: DateTime,
    },
    /// A privilege is missing. Asked again slowly: a revoke and a grant happen.
    #[error("not authorised: grant {action} on {resource}")]
    Unauthorized {
        /// The action that was refused, as a role names it: `find, changeStream`.
        action: String,
        /// The resource it was refused on.
        resource: String,
    },
    /// The source no longer has the changes behind the position.
    #[error(
        "the changes behind {} are no longer in the oplog{}; they are lost to this subscription: build anew what depends \
         on them, and start it again with `StartAt::Always` where you accept the gap, or let it go on by itself with \
         `on_history_lost(OnHistoryLost::RestartAt(..))`",
        position.dated(), oldest.as_ref().map(|at| format!(", which begins at {}", at.dated())).unwrap_or_default()
    )]
    HistoryLost {
        /// Where the subscription stood.
        position: Checkpoint,
        /// The oldest position that can still be read, when it could be found out.
        oldest: Option<Checkpoint>,
    },
    /// The source is not the one the position was taken from.
    #[error("the source is not the one the stored position came from: it was {was}, it is {is}; nothing was delivered")]
    SourceChanged {
        /// What the record says.
        was: String,
        /// What the source says.
        is: String,
    },
    /// The source refuses the position itself.
    #[error("the source refuses the position (code {code}: {message}); store or start at another one")]
    BadPosition {
        /// The server's error code; 0 when it was refused before the server saw it.
        code: i32,
        /// The server's message.
        message: String,
    },
    /// The server refuses the subscription's options or filter.
    #[error("the server refuses the subscription (code {code}: {message}); change the filter or the option it names")]
    RefusedByServer {
        /// The server's error code.
        code: i32,
        /// The server's message.
        message: String,
    },
    /// An event is larger than a reply can hold (16 MB), and the server cannot split it.
    #[error(
        "the event at {position} is larger than the server can send; ask for less of it (no look-up, no image, a \
         projection), or step over it with `skip(position, reason)`"
    )]
    EventTooLarge {
        /// Its own position; everything before it has been read. When it could not be found out, the last one before it.
        position: Checkpoint,
    },
    /// An event lacks an image of the document that the stream requires.
    #[error(
        "the event at {position} has no {image}, which is required: the server does not keep it, or no longer; ask for it \
         `WhenAvailable`, or step over it with `skip(position, reason)`"
    )]
    ImageMissing {
        /// The event's own position; everything before it has been read. When it could not be found out, the last one
        /// before it.
        position: Checkpoint,
        /// The field that would hold it: `fullDocument` or `fullDocumentBeforeChange`.
        image: String,
    },
    /// The stored record cannot be read; it is left as it is.
    #[error("the stored record {id:?} cannot be read: field {field:?} {message}; it was left untouched")]
    UnreadableRecord {
        /// The record's `_id`.
        id: String,
        /// The field that is wrong.
        field: String,
        /// What is wrong with it.
        message: String,
    },
    /// The handler failed and the failure policy says stop.
    #[error("the handler failed for the event at {position} after {attempts} attempts ({error})")]
    HandlerFailed {
        /// The event in hand; it is unsettled and comes again.
        position: Checkpoint,
        /// How many attempts have failed.
        attempts: u32,
        /// The last error.
        error: String,
    },
    /// There is no room for another dead letter. Goes on after a `resume()` when there is.
    #[error(
        "there is no room in the dead letter storage for the event at {position} of {document} ({limit}); retry or evict \
         letters, then resume"
    )]
    ParkingFull {
        /// The event in hand; it is unsettled.
        position: Checkpoint,
        /// Its document.
        document: String,
        /// Which limit it is.
        limit: String,
    },
    /// Another owner has claimed the subscription id.
    #[error("the subscription was taken over by {}{}", owner.as_ref().map_or("another program that rewrote the record", Owner::as_str), since.map(|at| format!(" at {at}")).unwrap_or_default())]
    Superseded {
        /// The new owner; none when another program rewrote the record.
        owner: Option<Owner>,
        /// When it claimed the id, on the storage's clock.
        #[serde(serialize_with = "as_text")]
        since: Option<DateTime>,
    },
    /// The stored record was deleted under the running subscription.
    #[error("the stored checkpoint was deleted while the subscription ran; subscribe again to begin anew")]
    Deleted,
    /// The collection was dropped or renamed, or the database dropped.
    #[error(
        "the feed ended with an invalidate at {position}: what it watches was dropped or renamed; subscribe again to go on behind it, or let it go on by itself with `OnInvalidate::Continue`"
    )]
    Invalidated {
        /// The position of the `invalidate`.
        position: Checkpoint,
    },
    /// Somebody asked for it.
    #[error("it was asked to stop")]
    Requested,
    /// A finite feed has come to its end.
    #[error("the feed has ended")]
    Ended,
    /// No start position can be recorded.
    #[error(
        "the source tells no position to start from, so a failure before the first event could lose changes; allow \
         `hello`, name a start, or set start_when_no_start_position_can_be_recorded(true)"
    )]
    NoStartPosition,
    /// The server is not a member of a replica set.
    #[error(
        "the server is not a member of a replica set, and only those have change streams: start it with --replSet and initiate the set"
    )]
    NotAReplicaSet,
}

impl Reason {
    /// The source has not an event that was read of it.
    pub(crate) fn other_history(event: &Checkpoint) -> Self {
        let is = "one without it, as of an older state that was put back, or of a copy".to_owned();
        Self::SourceChanged { was: format!("a history with the event at {event}"), is }
    }

    /// The exit code of a program that ends for this reason.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Requested | Self::Ended => 0,
            _ => 3,
        }
    }

    /// Its section in the [runbook](crate::runbook): `docs/runbook.md#history_lost`. Log lines and errors that need a
    /// person name it at their end.
    ///
    /// ```
    /// # use mongosub::Reason;
    /// assert_eq!(Reason::Deleted.runbook(), "docs/runbook.md#deleted");
    /// ```
    pub fn runbook(&self) -> String {
        format!("docs/runbook.md#{}", self.name())
    }

    /// The sentence, with the section of the runbook at its end unless there is nothing to be done.
    pub(crate) fn pointing_to_runbook(&self) -> String {
        match self.exit_code() {
            0 => self.to_string(),
            _ => format!("{self} (runbook: {})", self.name()),
        }
    }

    /// The reason's name, in snake case: for metrics, logs and the runbook.
    pub fn name(&self) -> &'static str {
        match self {
            Self::SourceUnavailable { .. } => "source_unavailable",
            Self::StorageUnavailable { .. } => "storage_unavailable",
            Self::HandlerFailing { .. } => "handler_failing",
            Self::Flushing { .. } => "flushing",
            Self::Unauthorized { .. } => "unauthorized",
            Self::HistoryLost { .. } => "history_lost",
            Self::SourceChanged { .. } => "source_changed",
            Self::BadPosition { .. } => "bad_position",
            Self::RefusedByServer { .. } => "refused_by_server",
            Self::EventTooLarge { .. } => "event_too_large",
            Self::ImageMissing { .. } => "image_missing",
            Self::UnreadableRecord { .. } => "unreadable_record",
            Self::HandlerFailed { .. } => "handler_failed",
            Self::ParkingFull { .. } => "parking_full",
            Self::Superseded { .. } => "superseded",
            Self::Deleted => "deleted",
            Self::Invalidated { .. } => "invalidated",
            Self::Requested => "requested",
            Self::Ended => "ended",
            Self::NoStartPosition => "no_start_position",
            Self::NotAReplicaSet => "not_a_replica_set",
        }
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's serialize_with passes the field by reference")]
fn as_plain_text<S: Serializer>(at: &DateTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(at)
}

#[allow(clippy::ref_option, reason = "serde's serialize_with passes the field by reference")]
fn as_text<S: Serializer>(at: &Option<DateTime>, serializer: S) -> Result<S::Ok, S::Error> {
    at.map(|at| at.to_string()).serialize(serializer)
}
