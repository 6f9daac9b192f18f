//! [`ChangeStreamReader`]: hands out what the reading task (`task.rs`) has read. It does no I/O.
//!
//! A reply goes through the channel whole, so a read costs no channel operation. At most one reply is being handed out,
//! one waits and one is fetched, and nothing is fetched while 16 MB or more are held.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Notify, mpsc, watch};

use super::reply::Reply;
use crate::checkpoint::{Checkpoint, Token};
use crate::error::SourceError;
use crate::model::{Read, Reader, SourceState};
use crate::reason::Reason;

/// Nothing is fetched while this many bytes are held.
const HELD_AT_MOST: usize = 16 << 20;

/// Reads a change stream; what [`ChangeStreamModel`](crate::ChangeStreamModel) opens.
///
/// Dropping it closes the cursor.
#[derive(Debug)]
pub struct ChangeStreamReader {
    items: mpsc::Receiver<Item>,
    batch: Option<Batch>,
    ended: bool,
    opened_at: Option<Checkpoint>,
    state: watch::Receiver<SourceState>,
}

impl ChangeStreamReader {
    /// The taking end of the channel of a reading task.
    pub(super) fn new(
        items: mpsc::Receiver<Item>,
        opened_at: Option<Checkpoint>,
        state: watch::Receiver<SourceState>,
    ) -> Self {
        Self { items, batch: None, ended: false, opened_at, state }
    }
}

/// What goes through the channel.
#[derive(Debug)]
pub(super) enum Item {
    Batch(Batch),
    /// The last item: it cannot be cured.
    Failed(SourceError),
    /// The last item: the feed has ended.
    Ended,
}

/// The reads of one reply.
#[derive(Debug)]
pub(super) struct Batch {
    reply: Reply,
    quiet: Option<Token>,
    _held: Held,
}

impl Batch {
    pub(super) fn new(reply: Reply, quiet: Option<Token>, holding: &Arc<Holding>) -> Self {
        let held = holding.hold(reply.size());
        Self { reply, quiet, _held: held }
    }

    /// How many events it has left, and its quiet position.
    #[cfg(test)]
    pub(super) fn contents(&self) -> (usize, Option<Token>) {
        (self.reply.left(), self.quiet.clone())
    }
}

/// The bytes of the replies that are not handed out yet. Events that a handler keeps do not count: they are its own,
/// and waiting for them could be for ever.
#[derive(Debug, Default)]
pub(super) struct Holding {
    bytes: AtomicUsize,
    freed: Notify,
}

#[derive(Debug)]
struct Held(Arc<Holding>, usize);

impl Holding {
    fn hold(self: &Arc<Self>, bytes: usize) -> Held {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Held(Arc::clone(self), bytes)
    }

    /// Waits until the next reply may be fetched.
    pub(super) async fn room(&self) {
        while self.bytes.load(Ordering::Relaxed) >= HELD_AT_MOST {
            // Only one task waits, and a notification that comes before it does is kept.
            self.freed.notified().await;
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.bytes.fetch_sub(self.1, Ordering::Relaxed);
        self.0.freed.notify_one();
    }
}

impl Reader for ChangeStreamReader {
    async fn next(&mut self) -> Option<Result<Read, SourceError>> {
        loop {
            if let Some(batch) = &mut self.batch {
                match batch.reply.next_event() {
                    Some(Ok(read)) => return Some(Ok(read)),
                    Some(Err(fault)) => {
                        self.ended = true;
                        self.batch = None;
                        let reason = Reason::RefusedByServer { code: 0, message: fault.message };
                        return Some(Err(SourceError::Refused(reason)));
                    }
                    None => {
                        let quiet = batch.quiet.take();
                        self.batch = None;
                        if let Some(token) = quiet {
                            return Some(Ok(Read::Quiet(Checkpoint::Token(token))));
                        }
                    }
                }
            }
            if self.ended {
                return None;
            }
            match self.items.recv().await {
                Some(Item::Batch(batch)) => self.batch = Some(batch),
                Some(Item::Failed(error)) => {
                    self.ended = true;
                    return Some(Err(error));
                }
                Some(Item::Ended) => self.ended = true,
                None => {
                    self.ended = true;
                    return Some(Err(SourceError::Unavailable { message: "its reading task has died".to_owned() }));
                }
            }
        }
    }

    fn opened_at(&self) -> Option<Checkpoint> {
        self.opened_at.clone()
    }

    fn state(&self) -> watch::Receiver<SourceState> {
        self.state.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::super::reply::tests::{quiet, reply, token};
    use super::*;

    fn reader(items: Vec<Item>) -> (ChangeStreamReader, watch::Sender<SourceState>) {
        let (send, receive) = mpsc::channel(items.len().max(1));
        for item in items {
            send.try_send(item).unwrap();
        }
        let (state, watched) = watch::channel(SourceState::default());
        (ChangeStreamReader::new(receive, None, watched), state)
    }

    async fn positions(reader: &mut ChangeStreamReader) -> Vec<String> {
        let mut all = Vec::new();
        while let Some(read) = reader.next().await {
            all.push(match read {
                Ok(Read::Event { position, .. }) => format!("event {position}"),
                Ok(Read::Quiet(position)) => format!("quiet {position}"),
                Err(error) => format!("error {error}"),
            });
        }
        all
    }

    #[tokio::test]
    async fn the_events_of_a_reply_come_first_then_its_quiet_position_and_the_end_is_the_end() {
        let holding = Arc::default();
        let first = Batch::new(reply(&[token(7, 1), token(7, 2)], None, 5), Some(quiet(8)), &holding);
        let second = Batch::new(reply(&[], None, 5), Some(quiet(9)), &holding);
        let (mut reader, _state) = reader(vec![Item::Batch(first), Item::Batch(second), Item::Ended]);
        let expected = [
            format!("event {}", token(7, 1)),
            format!("event {}", token(7, 2)),
            format!("quiet {}", quiet(8)),
            format!("quiet {}", quiet(9)),
        ];
        assert_eq!(positions(&mut reader).await, expected);
        assert!(reader.next().await.is_none());
    }

    #[tokio::test]
    async fn an_error_comes_last_behind_everything_that_was_read() {
        let batch = Batch::new(reply(&[token(7, 1)], None, 5), None, &Arc::default());
        let error = SourceError::Unavailable { message: "gone".to_owned() };
        let (mut reader, _state) = reader(vec![Item::Batch(batch), Item::Failed(error.clone())]);
        assert_eq!(positions(&mut reader).await, [format!("event {}", token(7, 1)), format!("error {error}")]);
    }

    #[tokio::test]
    async fn a_task_that_died_is_an_error_and_not_an_end() {
        let (mut reader, _state) = reader(vec![]);
        assert!(matches!(reader.next().await, Some(Err(SourceError::Unavailable { .. }))));
        assert!(reader.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_fetched_while_too_much_is_held_and_events_that_are_kept_do_not_count() {
        let holding: Arc<Holding> = Arc::default();
        holding.room().await;
        let batch = Batch::new(reply(&[token(7, 1)], None, 5), None, &holding);
        let large = holding.hold(HELD_AT_MOST);
        let waiting = tokio::spawn({
            let holding = Arc::clone(&holding);
            async move { holding.room().await }
        });
        tokio::time::sleep(std::time::Duration::from_secs(60)).await;
        assert!(!waiting.is_finished());
        drop(large);
        waiting.await.unwrap();
        let (mut reader, _state) = reader(vec![Item::Batch(batch), Item::Ended]);
        let kept = reader.next().await;
        assert!(reader.next().await.is_none());
        assert_eq!(holding.bytes.load(Ordering::Relaxed), 0);
        drop(kept);
    }
}
