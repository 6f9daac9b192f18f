//! What a failed operation means for a checkpoint storage. Called by `checkpoint_storage.rs`.
//!
//! The driver's own text of an error is never used: it holds the server's whole reply.

use mongodb::error::{ErrorKind, WriteFailure};

use super::call::CallError;
use super::classify::describe;
use crate::error::StorageError;

/// Codes that heal by themselves: elections, stepdowns, network, time limits, a full disk.
const PASSING: [i32; 27] = [
    6, 7, 24, 50, 63, 64, 79, 89, 91, 100, 112, 133, 134, 150, 189, 202, 234, 262, 9001, 10107, 11600, 11601, 11602,
    13388, 13435, 13436, 14031,
];
/// A privilege is missing.
const UNAUTHORIZED: i32 = 13;
/// A unique index has the value already.
const DUPLICATE_KEY: i32 = 11000;

/// What the operation needed, for the error that says it was refused.
#[derive(Debug, Clone, Copy)]
pub(super) struct Need<'a> {
    /// The actions, as a role names them.
    pub(super) action: &'static str,
    /// The collection they are needed on.
    pub(super) resource: &'a str,
}

/// Whether another writer made the record first.
pub(super) fn is_duplicate_key(error: &CallError) -> bool {
    matches!(error, CallError::Driver(error) if describe(error).0 == Some(DUPLICATE_KEY))
}

/// The error a caller of the storage gets.
pub(super) fn storage_error(error: &CallError, need: Need<'_>) -> StorageError {
    let error = match error {
        CallError::Driver(error) => error,
        CallError::TimedOut(deadline) => {
            let message = format!("no answer within {} s", deadline.as_secs());
            return StorageError::Unavailable { message };
        }
    };
    let (code, message) = describe(error);
    if let Some(code) = code {
        let passing = PASSING.contains(&code)
            || ["RetryableWriteError", "RetryableError", "SystemOverloadedError"].iter().any(|l| error.contains_label(l))
            // The write was made, and a majority has not confirmed it yet.
            || matches!(*error.kind, ErrorKind::Write(WriteFailure::WriteConcernError(_)));
        return match code {
            UNAUTHORIZED => StorageError::Unauthorized { action: need.action.into(), resource: need.resource.into() },
            _ if passing => StorageError::Unavailable { message: format!("code {code} {message}") },
            _ => StorageError::Refused { code, message },
        };
    }
    match &*error.kind {
        ErrorKind::Io(_) => StorageError::Unavailable { message: format!("network: {message}") },
        ErrorKind::Authentication { .. } => StorageError::Unauthorized {
            action: format!("a login that is accepted ({message})"),
            resource: "the deployment".into(),
        },
        ErrorKind::ServerSelection { .. }
        | ErrorKind::ConnectionPoolCleared { .. }
        | ErrorKind::DnsResolve { .. }
        | ErrorKind::InvalidResponse { .. } => StorageError::Unavailable { message },
        _ => StorageError::Refused { code: 0, message },
    }
}
