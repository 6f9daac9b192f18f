//! Opens a stream: builds the aggregate, and takes what the server answers as the verdict on position, plan and rights.
//!
//! Opened by time, and what a position covers is dropped by token afterwards (`reader.rs`): `startAfter` with the token
//! of an event is refused as soon as the pipeline does not pass that very event any more. Only an `invalidate` is
//! opened by its token.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bson::{Bson, Document, Timestamp, doc};
use futures::StreamExt;
use mongodb::Database;
use mongodb::options::SelectionCriteria;
use mongodb::raw_batch_cursor::{RawBatch, RawBatchCursor};

use super::call::{DEADLINE, call};
use super::classify::{Circumstances, Class, Fault, Phase};
use super::pool::ConnectionPool;
use super::split;
use super::step::How;
use crate::checkpoint::Checkpoint;
use crate::error::SourceError;
use crate::model::Scope;

/// How long the server may take for the first reply before the start counts as accepted and far behind.
const VERDICT_MS: i64 = 200;
/// What a user needs to read a stream.
pub(super) const STREAM_ACTIONS: &str = "find, changeStream";

/// Everything that stays the same from one open to the next.
#[derive(Debug, Clone)]
pub(super) struct Source {
    pub(super) scope: Scope,
    /// The database the aggregate runs in: `admin` for the whole deployment.
    pub(super) database: Database,
    /// The options of the `$changeStream` stage, but where to start.
    pub(super) stage: Document,
    /// What follows it.
    pub(super) pipeline: Vec<Document>,
    pub(super) comment: Option<Bson>,
    pub(super) criteria: Option<SelectionCriteria>,
    pub(super) max_await_time: Duration,
    /// The pool of the client it is read by.
    pub(super) pool: ConnectionPool,
    /// Set once a server has said that it cannot split events; shared by the clones of a model.
    pub(super) cannot_split: Arc<AtomicBool>,
}

/// How to get past events at the position that are done and that the server cannot send: how else than usual to open.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Around {
    /// Begin here.
    pub(super) start: Option<Timestamp>,
    /// The first stages behind the source.
    pub(super) stages: Vec<Document>,
}

/// A cursor whose first reply has not been read yet.
pub(super) struct Stream {
    cursor: RawBatchCursor,
    first: Option<RawBatch>,
    /// Its first reply is empty because nothing was asked for, not because there is nothing.
    blind: bool,
}

impl Stream {
    /// The next reply, and whether it is the one that came with the aggregate.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub(super) async fn next(&mut self) -> Option<(mongodb::error::Result<RawBatch>, bool)> {
        match self.first.take() {
            Some(first) => Some((Ok(first), true)),
            None => self.cursor.next().await.map(|reply| (reply, false)),
        }
    }

    /// The operation time of the opening reply.
    pub(super) fn operation_time(&self) -> Option<Timestamp> {
        self.first.as_ref()?.as_raw_document().get_timestamp("operationTime").ok()
    }

    pub(super) fn blind(&self) -> bool {
        self.blind
    }
}

impl Source {
    /// Opens at a position, or at the server's own now. One attempt.
    pub(super) async fn open(&self, from: Option<&Checkpoint>, how: How, around: &Around) -> Result<Stream, Fault> {
        let start = match around.start {
            Some(time) => doc! { "startAtOperationTime": time },
            None => start_of(from)?,
        };
        let limit = if how.behind { None } else { Some(VERDICT_MS) };
        let mut source = self.clone();
        source.pipeline = around.stages.iter().chain(&self.pipeline).cloned().collect();
        if how.split {
            source.pipeline.push(split::stage());
        }
        let opened = source.run(source.command(start, how.first, limit), how).await;
        if matches!(opened, Err(Fault { class: Class::NoSplit, .. })) {
            self.cannot_split.store(true, Ordering::Relaxed);
        }
        opened
    }

    /// The same scope without anything that costs the server: to ask whether it can be opened.
    pub(super) fn bare(&self) -> Self {
        let mut stage = Document::new();
        if self.scope == Scope::Deployment {
            stage.insert("allChangesForCluster", true);
        }
        Self { stage, pipeline: Vec::new(), ..self.clone() }
    }

    /// Whether the server has the changes from a time on. Asked by opening there.
    pub(super) async fn has_history(&self, from: Timestamp, limit: Duration) -> Result<bool, Fault> {
        let limit = i64::try_from(limit.as_millis()).unwrap_or(VERDICT_MS);
        let start = doc! { "startAtOperationTime": from };
        match self
            .run(self.command(start, 1, Some(limit)), How { first: 1, events: 1, behind: false, split: false })
            .await
        {
            Ok(_) | Err(Fault { class: Class::Behind | Class::TooLarge | Class::ImageMissing, .. }) => Ok(true),
            Err(Fault { class: Class::HistoryLost, .. }) => Ok(false),
            Err(fault) => Err(fault),
        }
    }

    async fn run(&self, command: Document, how: How) -> Result<Stream, Fault> {
        let source = self.clone();
        let opened = call(DEADLINE, async move {
            let mut open =
                source.database.run_cursor_command(command).batch_size(how.events).max_time(source.max_await_time);
            if let Some(criteria) = source.criteria {
                open = open.selection_criteria(criteria);
            }
            if let Some(comment) = source.comment {
                open = open.comment(comment);
            }
            open.batch().await
        });
        let mut cursor = opened.await.map_err(|error| Fault::of(Phase::Open, &error))?;
        // The reply of the aggregate lies in the cursor already.
        let first = match cursor.next().await {
            Some(first) => Some(first.map_err(|error| Fault::of_driver(Phase::Open, &error))?),
            None => None,
        };
        Ok(Stream { cursor, first, blind: how.behind })
    }

    fn command(&self, start: Document, first_events: u32, limit_ms: Option<i64>) -> Document {
        let mut stage = self.stage.clone();
        stage.extend(start);
        let mut pipeline = vec![doc! { "$changeStream": stage }];
        pipeline.extend(self.pipeline.iter().cloned());
        let target = match &self.scope {
            Scope::Collection(namespace) => Bson::String(namespace.collection.clone()),
            Scope::Database { .. } | Scope::Deployment => Bson::Int32(1),
        };
        let mut command = doc! {
            "aggregate": target,
            "pipeline": pipeline,
            "cursor": { "batchSize": i64::from(first_events) },
            "readConcern": { "level": "majority" },
        };
        if let Some(limit) = limit_ms {
            command.insert("maxTimeMS", limit);
        }
        if let Some(comment) = &self.comment {
            command.insert("comment", comment.clone());
        }
        command
    }

    /// The error of the seam for a fault of the stream, at a position.
    pub(super) fn error(&self, fault: Fault, position: Option<&Checkpoint>) -> SourceError {
        fault.into_source_error(&Circumstances { scope: &self.scope, action: STREAM_ACTIONS, position })
    }
}

/// The option of the `$changeStream` stage that starts at a position.
fn start_of(from: Option<&Checkpoint>) -> Result<Document, Fault> {
    Ok(match from {
        None => Document::new(),
        Some(Checkpoint::Time(time)) => doc! { "startAtOperationTime": *time },
        Some(Checkpoint::Token(token)) if token.is_invalidate() => doc! { "startAfter": { "_data": token.as_str() } },
        Some(Checkpoint::Token(token)) => doc! { "startAtOperationTime": token.cluster_time() },
        Some(Checkpoint::Text(text)) => {
            return Err(Fault {
                class: Class::BadToken,
                code: None,
                message: format!("{text:?} is neither a resume token nor an operation time"),
            });
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::reply::tests::{quiet, token};
    use super::*;

    #[test]
    fn every_position_but_an_invalidate_is_opened_by_its_time() {
        let time = Timestamp { time: 7, increment: 1 };
        let by_time = doc! { "startAtOperationTime": time };
        assert_eq!(start_of(None), Ok(doc! {}));
        assert_eq!(start_of(Some(&time.into())), Ok(by_time.clone()));
        assert_eq!(start_of(Some(&token(7, 3).into())), Ok(by_time.clone()));
        assert_eq!(start_of(Some(&quiet(7).into())), Ok(by_time));
        let invalidate = crate::checkpoint::Token::new(token(7, 3).as_str().replace("6E5A", "6F5A")).unwrap();
        let by_token = doc! { "startAfter": { "_data": invalidate.as_str() } };
        assert_eq!(start_of(Some(&invalidate.into())), Ok(by_token));
        assert!(start_of(Some(&Checkpoint::Text("line 17".into()))).is_err());
    }
}
