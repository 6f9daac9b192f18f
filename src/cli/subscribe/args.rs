//! What can be typed behind `mongosub subscribe`. Whatever cannot be used is refused here, by the option's name and before
//! any connection is made.

use std::time::Duration;

use clap::ValueEnum;
use jiff::SignedDuration;

use super::extjson::Format;
use super::filter::{self, Condition, Stages};
use super::start::{self, From};
use crate::ids::{Namespace, SubscriptionId};
use crate::mongo::{FullDocument, FullDocumentBeforeChange};

/// A subscription's output on standard output, one line of MongoDB extended JSON v2 an event.
#[derive(Debug, clap::Args)]
#[command(after_long_help = AFTER)]
pub(in crate::cli) struct Args {
    /// The replica set, as a `mongodb://` or `mongodb+srv://` URI. Better by the variable: a command line shows in the
    /// list of processes.
    #[arg(long, env = "MONGODB_URI", hide_env_values = true)]
    pub(super) uri: String,
    /// The database to read.
    #[arg(long, value_parser = database)]
    pub(super) db: String,
    /// The collection to read; it need not exist yet. Without it, every collection of the database.
    #[arg(long, value_parser = collection)]
    pub(super) collection: Option<String>,
    /// The subscription's stable name, version included: 1 to 255 bytes, no `#`. One process at a time runs it; another
    /// one that starts with it takes over, and the first ends with 3 within 10 s.
    #[arg(long, value_parser = id, value_name = "NAME_V1")]
    pub(super) id: SubscriptionId,
    /// Where positions are kept, one document per id: a database and a collection, split at the first dot.
    #[arg(long, value_parser = namespace, value_name = "DB.COLLECTION")]
    pub(super) checkpoints: Namespace,
    /// Store the position after every N events. What is not stored is written again after a kill, not after a clean end.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) every: u32,
    /// How often the position is stored while no event stores it: `30s`, `5m`, `1h 30m`. Much shorter than the oplog
    /// reaches back, or a filter that lets nothing through for long loses its place.
    #[arg(long, default_value = "60s", value_parser = interval, value_name = "DURATION")]
    pub(super) quiet_interval: Duration,
    /// A condition on the change event, in extended JSON, as `$match` takes it: `{"operationType": "insert"}`,
    /// `{"fullDocument.status": "paid"}`. An `invalidate` gets through in any case. What is left out is passed over for
    /// good: a wider filter later has no history before the stored position.
    #[arg(long, value_parser = filter::condition, value_name = "JSON")]
    pub(super) filter: Option<Condition>,
    /// Stages of an aggregation on the change event, a JSON array of extended JSON; behind `--filter` where both are
    /// given. They must leave `_id` as it is: it is the event's position.
    #[arg(long, value_parser = filter::stages, value_name = "JSON")]
    pub(super) pipeline: Option<Stages>,
    /// Which document an update carries.
    #[arg(long, value_enum, default_value_t = Document::Default, value_name = "WHICH")]
    pub(super) full_document: Document,
    /// Whether a change carries the document as it was before (server 6.0, and the collection has to keep them).
    #[arg(long, value_enum, default_value_t = Before::Off, value_name = "WHICH")]
    pub(super) full_document_before_change: Before,
    /// Where a new subscription begins; one with a stored position goes on there, unless `--always`.
    ///
    /// `stored` and `now`: at the present, which is stored before anything is read. `earliest`: at the oldest change the
    /// oplog has. A time, its own changes included: `2026-01-31T12:00:00Z`, or `SECONDS[:INCREMENT]` since 1970. Behind a
    /// resume token: its hex, or `{"_data": ".."}`.
    #[arg(long, default_value = "stored", value_parser = start::from, value_name = "stored|now|earliest|TIME|TOKEN")]
    pub(super) start: From,
    /// Begin at `--start` whatever is stored, at each start of the command. The changes in between are passed over, or
    /// written again: yours to choose. Take it out again before the command is restarted by anything but you.
    #[arg(long)]
    pub(super) always: bool,
    /// Begin though the server tells no position to begin at. If it sends no time either, what changes before the first
    /// event is lost when the command ends before.
    #[arg(long)]
    pub(super) allow_unrecorded_start: bool,
    /// Numbers and dates as JSON has them, or every value with its type. Many readers of JSON round whole numbers beyond
    /// 2^53: `canonical` has them as text.
    #[arg(long, value_enum, default_value_t = Format::Relaxed, value_name = "FORM")]
    pub(super) format: Format,
}

const AFTER: &str = "\
Every change is written at least once and in order, up to the pipe: an event is done when its line has been handed to \
the system, not when it is on a disk or when a program behind the pipe has handled it. After a crash the events behind \
the stored position are written again: usually less than 20 ms of them, and up to 128 that a slow reader had not taken; after SIGKILL the last line can be cut off, and \
comes again whole.

SIGTERM, SIGINT (Ctrl-C), SIGHUP and a closed pipe end it cleanly: what is written is stored, and the next start repeats \
nothing. A reader that takes nothing is waited for 5 s then; its lines come again. A second signal ends it at once.

Exit codes: 0 asked to stop or the pipe closed; 2 unusable arguments; 3 it cannot start or go on, and the last line on \
standard error says why and what to do; 1 asked to stop, and the last position could not be stored; 130 a second signal.

Logs go to standard error; RUST_LOG sets what is logged (default: warn,mongosub=info).";

/// As the library's, with the names that are typed.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum Document {
    /// None; inserts and replaces carry theirs in any case.
    Default,
    /// As it is when the event is read: later changes may be in it, and it is missing when it was deleted meanwhile.
    UpdateLookup,
    /// As it was right after the change, where the collection keeps them (server 6.0).
    WhenAvailable,
    /// The same, and the command ends with 3 where it is missing.
    Required,
}

impl std::convert::From<Document> for FullDocument {
    fn from(typed: Document) -> Self {
        match typed {
            Document::Default => Self::Default,
            Document::UpdateLookup => Self::UpdateLookup,
            Document::WhenAvailable => Self::WhenAvailable,
            Document::Required => Self::Required,
        }
    }
}

/// As the library's, with the names that are typed.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum Before {
    /// It does not.
    Off,
    /// Where there is one.
    WhenAvailable,
    /// Always, and the command ends with 3 where it is missing.
    Required,
}

impl std::convert::From<Before> for FullDocumentBeforeChange {
    fn from(typed: Before) -> Self {
        match typed {
            Before::Off => Self::Off,
            Before::WhenAvailable => Self::WhenAvailable,
            Before::Required => Self::Required,
        }
    }
}

fn id(text: &str) -> Result<SubscriptionId, String> {
    SubscriptionId::new(text).map_err(|error| error.to_string())
}

fn interval(text: &str) -> Result<Duration, String> {
    let duration: SignedDuration =
        text.parse().map_err(|_| "expected a duration with its unit: 30s, 5m, 1h 30m".to_owned())?;
    let duration = Duration::try_from(duration).map_err(|_| "it must not be negative".to_owned())?;
    if duration.is_zero() {
        return Err("it must be above 0 s".to_owned());
    }
    Ok(duration)
}

fn database(text: &str) -> Result<String, String> {
    if let Some(found) = text.chars().find(|c| "/\\. \"$\0".contains(*c)) {
        return Err(format!("no database has {found:?} in its name"));
    }
    if text.is_empty() || text.len() > 63 {
        return Err("the name of a database has 1 to 63 bytes".to_owned());
    }
    Ok(text.to_owned())
}

fn collection(text: &str) -> Result<String, String> {
    if let Some(found) = text.chars().find(|c| "$\0".contains(*c)) {
        return Err(format!("no collection has {found:?} in its name"));
    }
    if text.is_empty() || text.starts_with('.') {
        return Err("the name of a collection must not be empty, nor begin with a dot".to_owned());
    }
    Ok(text.to_owned())
}

fn namespace(text: &str) -> Result<Namespace, String> {
    let (db, name) = text.split_once('.').ok_or("expected DB.COLLECTION, with a dot between them")?;
    Ok(Namespace::new(database(db)?, collection(name)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_people_write_them() {
        for (text, seconds) in [("30s", 30), ("5m", 300), ("1h 30m", 5400), ("2 minutes", 120), ("24h", 86_400)] {
            assert_eq!(interval(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        assert_eq!(interval("250ms"), Ok(Duration::from_millis(250)));
        for text in ["", "30", "0s", "-5s", "soon", "5x"] {
            assert!(interval(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_namespace_is_split_at_its_first_dot() {
        assert_eq!(namespace("shop.check.points"), Ok(Namespace::new("shop", "check.points")));
        for text in ["shop", "shop.", ".points", "a b.c", "a.$b", "shop..points", ""] {
            assert!(namespace(text).is_err(), "{text}");
        }
    }
}
