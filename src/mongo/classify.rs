//! What an error of the driver or the server means: one table of codes, and the errors of the seams it leads to.
//!
//! The default is to refuse: a code that nobody has looked at stops a subscription loudly, it is not tried for ever.
//! The driver's `Display` of an error holds the whole server reply, so code, name and message are taken out by hand.

use mongodb::error::{Error, ErrorKind, WriteFailure};

use super::call::CallError;
use super::split;
use crate::checkpoint::Checkpoint;
use crate::error::SourceError;
use crate::model::Scope;
use crate::reason::Reason;

/// What was being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The aggregate that opens a stream.
    Open,
    /// A later reply of an open stream.
    GetMore,
    /// Any other command.
    Command,
}

/// What follows from an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// It heals by itself: the same again from the last position read, and the open is the verdict.
    Retry,
    /// A privilege or a login is missing; it may come back.
    Unauthorized,
    /// The start was accepted, but the server did not get to the head within the limit of the open.
    Behind,
    /// The changes behind the position have left the oplog.
    HistoryLost,
    /// An event does not fit into a reply.
    TooLarge,
    /// An event lacks an image that the stream requires.
    ImageMissing,
    /// The server has no stage that splits large events.
    NoSplit,
    /// The server refuses the token. Without a token it is the pipeline or an option that is refused.
    BadToken,
    /// The server has no change streams because it is no member of a replica set.
    NotAReplicaSet,
    /// Everything else.
    Fatal,
}

/// The driver's word for an error that a change stream may resume after.
const RESUMABLE: &str = "ResumableChangeStreamError";
/// The driver's word for an error that any read may be tried again after.
const RETRYABLE: &str = "RetryableError";

/// What a server says that does not know a stage.
const UNKNOWN_STAGE: i32 = 40324;

/// The table.
fn class_of(phase: Phase, code: i32) -> Option<Class> {
    Some(match (phase, code) {
        // Stepdown, shutdown, network between members, stale routing, rate limits, killed operations and cursors.
        (
            _,
            6 | 7 | 24 | 43 | 63 | 89 | 91 | 112 | 133 | 134 | 150 | 175 | 189 | 202 | 234 | 237 | 246 | 262 | 365
            | 384 | 391 | 402 | 462 | 9001 | 10058 | 10107 | 11600 | 11601 | 11602 | 13388 | 13435 | 13436,
        )
        // The oplog overtook the scan: whether the position is still there, the next open says.
        | (Phase::Open | Phase::GetMore, 136)
        | (Phase::GetMore | Phase::Command, 50) => Class::Retry,
        (Phase::Open, 50) => Class::Behind,
        (_, 13 | 18) => Class::Unauthorized,
        (Phase::Open | Phase::GetMore, 286) => Class::HistoryLost,
        // The second: one field alone does not fit.
        (Phase::Open | Phase::GetMore, 10334 | 7_182_500) => Class::TooLarge,
        (Phase::Open | Phase::GetMore, 47) => Class::ImageMissing,
        // From 50810 on: what a token's hex holds is no key.
        (Phase::Open | Phase::GetMore, 9 | 15 | 260 | 280 | 40647 | 40649 | 50810..=50831) => Class::BadToken,
        (Phase::Open, 40573) => Class::NotAReplicaSet,
        _ => return None,
    })
}

/// An error, classified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) class: Class,
    /// The server's code; none when it did not come to an answer.
    pub(super) code: Option<i32>,
    pub(super) message: String,
}

/// Whose error it is: what the message of a [`SourceError`] is made of.
#[derive(Debug)]
pub(super) struct Circumstances<'a> {
    pub(super) scope: &'a Scope,
    /// What a user needs for what was being done.
    pub(super) action: &'a str,
    /// Where the stream stood or was to begin.
    pub(super) position: Option<&'a Checkpoint>,
}

impl Fault {
    pub(super) fn of(phase: Phase, error: &CallError) -> Self {
        match error {
            CallError::Driver(error) => Self::of_driver(phase, error),
            CallError::TimedOut(after) => {
                Self { class: Class::Retry, code: None, message: format!("no answer within {after:?}") }
            }
        }
    }

    pub(super) fn of_driver(phase: Phase, error: &Error) -> Self {
        let (code, message) = describe(error);
        let class = match code {
            Some(UNKNOWN_STAGE) if message.contains(split::STAGE) => Some(Class::NoSplit),
            Some(code) => class_of(phase, code),
            None => match &*error.kind {
                ErrorKind::Io(_)
                | ErrorKind::ConnectionPoolCleared { .. }
                | ErrorKind::ServerSelection { .. }
                | ErrorKind::DnsResolve { .. } => Some(Class::Retry),
                ErrorKind::Authentication { .. } => Some(Class::Unauthorized),
                _ => None,
            },
        };
        let resumable = error.contains_label(RESUMABLE) || error.contains_label(RETRYABLE);
        let class = class.unwrap_or(if resumable { Class::Retry } else { Class::Fatal });
        Self { class, code, message }
    }

    /// Nothing that a server said, but what a reply lacked or a stream did.
    pub(super) fn fatal(message: impl Into<String>) -> Self {
        Self { class: Class::Fatal, code: None, message: message.into() }
    }

    /// The same, where it heals by itself.
    pub(super) fn retry(message: impl Into<String>) -> Self {
        Self { class: Class::Retry, code: None, message: message.into() }
    }

    /// Whether the server answered, and refused.
    pub(super) fn is_refusal(&self) -> bool {
        self.code.is_some() && self.class != Class::Retry
    }

    /// The error of the seam. `HistoryLost` names no oldest position here: whoever can find it out adds it.
    pub(super) fn into_source_error(self, at: &Circumstances<'_>) -> SourceError {
        let code = self.code.unwrap_or(0);
        let message = self.message;
        SourceError::Refused(match (self.class, at.position) {
            (Class::Retry | Class::Behind, _) => return SourceError::Unavailable { message },
            (Class::Unauthorized, _) if self.code == Some(13) => {
                let resource = match at.scope {
                    Scope::Deployment => "every database (\"\", \"\")".to_owned(),
                    scope => scope.to_string(),
                };
                return SourceError::Unauthorized { action: at.action.to_owned(), resource };
            }
            (Class::Unauthorized, _) => {
                return SourceError::Unauthorized {
                    action: format!("a login that is accepted ({message})"),
                    resource: "the deployment".to_owned(),
                };
            }
            (Class::HistoryLost, Some(position)) => Reason::HistoryLost { position: position.clone(), oldest: None },
            (Class::TooLarge, Some(position)) => Reason::EventTooLarge { position: position.clone() },
            (Class::ImageMissing, Some(position)) => {
                Reason::ImageMissing { position: position.clone(), image: image_in(&message).to_owned() }
            }
            // Only an `invalidate` is opened by its token; everywhere else these codes speak of the pipeline.
            (Class::BadToken, Some(position)) if position.is_invalidate() || position.cluster_time().is_none() => {
                Reason::BadPosition { code, message }
            }
            (Class::NotAReplicaSet, _) => Reason::NotAReplicaSet,
            _ => Reason::RefusedByServer { code, message },
        })
    }
}

/// The field that the server says is missing.
pub(super) fn image_in(message: &str) -> &'static str {
    if message.contains("pre-image") { "fullDocumentBeforeChange" } else { "fullDocument" }
}

/// The code, and name and message in one, of an error; never the server's whole reply, never a password.
pub(crate) fn describe(error: &Error) -> (Option<i32>, String) {
    let named = |name: &str, message: &str| match (name, message) {
        ("", message) => message.to_owned(),
        (name, "") => name.to_owned(),
        (name, message) => format!("{name}: {message}"),
    };
    match &*error.kind {
        ErrorKind::Command(error) => (Some(error.code), named(&error.code_name, &error.message)),
        ErrorKind::Write(WriteFailure::WriteError(error)) => {
            (Some(error.code), named(error.code_name.as_deref().unwrap_or_default(), &error.message))
        }
        ErrorKind::Write(WriteFailure::WriteConcernError(error)) => {
            (Some(error.code), named(&error.code_name, &error.message))
        }
        ErrorKind::Io(error) => (None, error.to_string()),
        ErrorKind::ConnectionPoolCleared { .. } => {
            (None, "the connections to the server were given up after another operation had failed".to_owned())
        }
        ErrorKind::ServerSelection { message, .. } => (None, unselected(&without_replies(message))),
        ErrorKind::Authentication { message, .. }
        | ErrorKind::DnsResolve { message, .. }
        | ErrorKind::InvalidArgument { message, .. }
        | ErrorKind::InvalidResponse { message, .. }
        | ErrorKind::IncompatibleServer { message, .. }
        | ErrorKind::InvalidTlsConfig { message, .. }
        | ErrorKind::Internal { message, .. }
        | ErrorKind::Transaction { message, .. } => (None, without_replies(message)),
        ErrorKind::Bson(error) => (None, error.to_string()),
        ErrorKind::Shutdown => (None, "the client has been shut down".to_owned()),
        ErrorKind::SessionsNotSupported => (None, "the server does not support sessions".to_owned()),
        _ => (None, "an error of a kind that is not known here".to_owned()),
    }
}

/// What the driver says when no server could be selected, with the servers and what ails them instead of its description
/// of the whole topology: `.. Topology: { .., Servers: [ { Address: a:1, Type: Unknown, Error: .. }, .. ] }`.
fn unselected(message: &str) -> String {
    let Some((said, topology)) = message.split_once(" Topology: ") else { return message.to_owned() };
    let servers: Vec<String> = topology
        .split("{ Address: ")
        .skip(1)
        .map(|server| {
            let server = server.trim_end_matches([' ', ',', ']', '}']);
            let (address, facts) = server.split_once(", Type: ").unwrap_or((server, ""));
            let kind = facts.split(',').next().unwrap_or_default();
            let ails = facts.split_once(", Error: ").map_or(kind, |(_, error)| error.trim_start_matches("Kind: "));
            format!("{address}: {ails}")
        })
        .collect();
    let servers = if servers.is_empty() { "none is known".to_owned() } else { servers.join("; ") };
    format!("{} ({servers})", said.trim_end_matches('.'))
}

/// Takes out of a message what the driver's `Display` of the errors inside it puts there: labels, source and reply.
fn without_replies(message: &str) -> String {
    const BEGIN: &str = ", labels: {";
    const REPLY: &str = "server response: ";
    let mut out = String::with_capacity(message.len());
    let mut rest = message;
    while let Some((before, after)) = rest.split_once(BEGIN) {
        out.push_str(before);
        // `None`, or `Some(RawDocumentBuf { data: ".." })`; what looks otherwise is cut off.
        let reply = after.split_once(REPLY).map_or("", |(_, reply)| reply);
        rest = reply.strip_prefix("None").or_else(|| reply.split_once("})").map(|(_, rest)| rest)).unwrap_or_default();
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use bson::Timestamp;

    fn fault(phase: Phase, code: i32) -> Class {
        class_of(phase, code).unwrap_or(Class::Fatal)
    }

    #[test]
    fn servers_that_cannot_be_selected_are_named_with_what_ails_them() {
        let said = "Server selection timeout: No available servers. Topology: { Type: ReplicaSetNoPrimary, Set Name: rs0, \
                    Servers: [ { Address: a:1, Type: Unknown, Error: Kind: I/O error: Connection refused (os error 111) }, \
                    { Address: b:2, Type: RsSecondary, Average RTT: 1ms, Replica Set Name: rs0 } ] }";
        let named = "Server selection timeout: No available servers (a:1: I/O error: Connection refused (os error 111); b:2: \
                     RsSecondary)";
        assert_eq!(unselected(said), named);
        assert_eq!(unselected("No servers. Topology: { Type: Unknown }"), "No servers (none is known)");
        assert_eq!(unselected("something else"), "something else");
    }

    #[test]
    fn each_code_has_its_class() {
        use Class::{
            BadToken, Behind, Fatal, HistoryLost, ImageMissing, NotAReplicaSet, Retry, TooLarge, Unauthorized,
        };
        use Phase::{Command, GetMore, Open};
        for code in [43, 237, 91, 189, 10107, 11600, 11602, 13435, 13436, 6, 7, 89, 9001, 63, 133, 150, 234, 262, 13388]
        {
            for phase in [Open, GetMore, Command] {
                assert_eq!(fault(phase, code), Retry, "{phase:?} {code}");
            }
        }
        for (phase, code, class) in [
            (Open, 286, HistoryLost),
            (GetMore, 286, HistoryLost),
            (Command, 286, Fatal),
            (GetMore, 136, Retry),
            (Open, 50, Behind),
            (GetMore, 50, Retry),
            (Open, 280, BadToken),
            (GetMore, 280, BadToken),
            (Open, 9, BadToken),
            (Open, 15, BadToken),
            (Open, 260, BadToken),
            (Open, 40647, BadToken),
            (Open, 40649, BadToken),
            (Open, 50811, BadToken),
            (Open, 10334, TooLarge),
            (GetMore, 10334, TooLarge),
            (Open, 13, Unauthorized),
            (GetMore, 13, Unauthorized),
            (Open, 18, Unauthorized),
            (Open, 40573, NotAReplicaSet),
            (Open, 40324, Fatal),
            (Open, 40415, Fatal),
            (Open, 50795, Fatal),
            (GetMore, 47, ImageMissing),
            (Open, 47, ImageMissing),
            (Command, 47, Fatal),
            (GetMore, 7_182_500, TooLarge),
            (Open, 8000, Fatal),
            (Open, 999_999, Fatal),
            (GetMore, 999_999, Fatal),
        ] {
            assert_eq!(fault(phase, code), class, "{phase:?} {code}");
        }
    }

    #[test]
    fn a_fault_becomes_an_error_that_says_what_to_do() {
        let scope = Scope::Database { db: "shop".into() };
        let position = Checkpoint::Time(Timestamp { time: 7, increment: 1 });
        let at = Circumstances { scope: &scope, action: "find, changeStream", position: Some(&position) };
        let error = |class, code| Fault { class, code, message: "said so".into() }.into_source_error(&at);
        assert_eq!(error(Class::Retry, None), SourceError::Unavailable { message: "said so".into() });
        assert_eq!(
            error(Class::Unauthorized, Some(13)),
            SourceError::Unauthorized { action: "find, changeStream".into(), resource: "database shop".into() }
        );
        assert!(
            matches!(error(Class::Unauthorized, None), SourceError::Unauthorized { action, .. } if action.contains("said so"))
        );
        for (class, code, reason) in [
            (Class::HistoryLost, 286, Reason::HistoryLost { position: position.clone(), oldest: None }),
            (Class::TooLarge, 10334, Reason::EventTooLarge { position: position.clone() }),
            (Class::BadToken, 9, Reason::RefusedByServer { code: 9, message: "said so".into() }),
            (Class::NotAReplicaSet, 40573, Reason::NotAReplicaSet),
            (Class::Fatal, 40324, Reason::RefusedByServer { code: 40324, message: "said so".into() }),
        ] {
            assert_eq!(error(class, Some(code)), SourceError::Refused(reason));
        }
    }

    #[test]
    fn replies_are_taken_out_of_a_message() {
        let error = "Kind: I/O error: refused (os error 111), labels: {\"a\", \"b\"}, source: None, server response: ";
        for reply in ["None", "Some(RawDocumentBuf { data: \"6f00\" })"] {
            let message = format!("Topology: [ {{ Error: {error}{reply} }}, {{ Error: {error}{reply} }} ]");
            assert_eq!(
                without_replies(&message),
                "Topology: [ { Error: Kind: I/O error: refused (os error 111) }, { Error: Kind: I/O error: refused (os error 111) } ]"
            );
        }
    }
}
