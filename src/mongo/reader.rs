//! Reads a stream in a task of its own: reply by reply, ahead of whoever takes the reads, across every error that heals.
//!
//! The task owns the cursor and decides by `step.rs`; [`ChangeStreamReader`] is the other end of its channel. A reply
//! goes through the channel whole, so a read costs no channel operation. At most one reply is being handed out, one
//! waits and one is fetched, and nothing is fetched while 16 MB or more are held.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mongodb::raw_batch_cursor::RawBatch;
use tokio::sync::{Notify, mpsc, watch};
use tracing::Instrument;

use super::classify::{Class, Fault, Phase};
use super::open::{Source, Stream};
use super::present;
use super::reply::Reply;
use super::step::{End, Happened, Next, Recovery, Replied, Wait};
use crate::backoff::Backoff;
use crate::checkpoint::{Checkpoint, Token};
use crate::error::SourceError;
use crate::model::{Read, Reader, Reopening, SourceState};
use crate::reason::Reason;

/// Nothing is fetched while this many bytes are held.
const HELD_AT_MOST: usize = 16 << 20;
/// How long finding out the oldest position may take when history is lost.
const OLDEST_WITHIN: Duration = Duration::from_secs(5);
/// How often a missing right is asked for.
const SLOWLY: Duration = Duration::from_secs(10);

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

/// What goes through the channel.
#[derive(Debug)]
enum Item {
    Batch(Batch),
    /// The last item: it cannot be cured.
    Failed(SourceError),
    /// The last item: the feed has ended.
    Ended,
}

/// The reads of one reply.
#[derive(Debug)]
struct Batch {
    reply: Reply,
    quiet: Option<Token>,
    _held: Held,
}

/// The bytes of the replies that are not handed out yet. Events that a handler keeps do not count: they are its own,
/// and waiting for them could be for ever.
#[derive(Debug, Default)]
struct Holding {
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

    async fn room(&self) {
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

/// Opens, judges, and begins to read.
pub(super) async fn open(source: Source, from: Option<&Checkpoint>) -> Result<ChangeStreamReader, SourceError> {
    let mut recovery = Recovery::default();
    let stream = loop {
        let fault = match source.open(from, recovery.how()).await {
            Ok(stream) => break stream,
            Err(fault) => fault,
        };
        // Only another way of opening is tried here; the caller decides about everything else.
        if recovery.step(Happened::Failed(Phase::Open, fault.clone())) != Next::Open(Wait::No) {
            return Err(name_the_oldest(&source, source.error(fault, from)).await);
        }
    };
    recovery.step(Happened::Opened);
    let opened_at = match from {
        None => stream.operation_time().map(|time| Checkpoint::Time(present::after(time))),
        Some(_) => None,
    };
    let (items, received) = mpsc::channel(1);
    let (state, watched) = watch::channel(SourceState::default());
    let position = from.cloned().or_else(|| opened_at.clone());
    let holding = Arc::default();
    let backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
    let task = Task { source, position, dropping: true, recovery, backoff, items, state, holding, lost: None };
    tokio::spawn(task.run(stream).in_current_span());
    Ok(ChangeStreamReader { items: received, batch: None, ended: false, opened_at, state: watched })
}

/// Adds to lost history the oldest position there is, when that can be found out quickly.
async fn name_the_oldest(source: &Source, error: SourceError) -> SourceError {
    match error {
        SourceError::Refused(Reason::HistoryLost { position, .. }) => {
            // Safe to drop: the driver's futures in it run on their own tasks.
            let oldest = tokio::time::timeout(OLDEST_WITHIN, present::earliest(source)).await;
            let oldest = oldest.ok().and_then(Result::ok).map(Checkpoint::Time);
            SourceError::Refused(Reason::HistoryLost { position, oldest })
        }
        error => error,
    }
}

struct Task {
    source: Source,
    /// The last position read.
    position: Option<Checkpoint>,
    /// Events that the position covers may still come: none later than it has come since the open.
    dropping: bool,
    recovery: Recovery,
    backoff: Backoff,
    items: mpsc::Sender<Item>,
    state: watch::Sender<SourceState>,
    holding: Arc<Holding>,
    /// Since when there has been no good read.
    lost: Option<tokio::time::Instant>,
}

impl Task {
    /// Reads until it ends or nobody listens any more. Dropping `read` is safe: the only driver future in it is the
    /// cursor's `next`, everything else goes through `call`.
    async fn run(mut self, stream: Stream) {
        let items = self.items.clone();
        tokio::select! {
            () = items.closed() => {}
            last = self.read(stream) => drop(items.send(last).await),
        }
    }

    async fn read(&mut self, stream: Stream) -> Item {
        let mut stream = Some(stream);
        loop {
            let happened = match &mut stream {
                Some(open) => {
                    self.holding.room().await;
                    match open.next().await {
                        Some((Ok(batch), first)) => {
                            let blind = first && open.blind();
                            match self.take(batch, first, blind).await {
                                Ok(replied) => Happened::Replied(replied),
                                Err(fault) => Happened::Failed(Phase::GetMore, fault),
                            }
                        }
                        Some((Err(error), _)) => {
                            Happened::Failed(Phase::GetMore, Fault::of_driver(Phase::GetMore, &error))
                        }
                        None => Happened::Ended,
                    }
                }
                None => match self.source.open(self.position.as_ref(), self.recovery.how()).await {
                    Ok(open) => {
                        stream = Some(open);
                        self.dropping = true;
                        Happened::Opened
                    }
                    Err(fault) => Happened::Failed(Phase::Open, fault),
                },
            };
            let why = self.why(&happened);
            let opened = happened == Happened::Opened;
            match self.recovery.step(happened) {
                Next::Read => self.reading(opened),
                Next::Open(wait) => {
                    stream = None;
                    self.wait(wait, why).await;
                }
                Next::End => return Item::Ended,
                Next::Fail(fault) => {
                    let error = self.source.error(fault, self.position.as_ref());
                    return Item::Failed(name_the_oldest(&self.source, error).await);
                }
            }
        }
    }

    /// Takes what is new out of a reply, and sends it on.
    async fn take(&mut self, batch: RawBatch, first: bool, blind: bool) -> Result<Replied, Fault> {
        let mut reply = Reply::of(batch)?;
        if self.dropping {
            self.dropping = match &self.position {
                Some(Checkpoint::Token(position)) => !reply.drop_through(position)?,
                _ => false,
            };
        }
        let new = match &reply.last {
            Some(last) if reply.left() > 0 => Some(Checkpoint::Token(last.clone())),
            _ => None,
        };
        let mut replied = Replied {
            events: reply.total(),
            bytes: reply.size(),
            first,
            moved: new.is_some(),
            end: match &new {
                Some(position) if position.is_invalidate() => End::Invalidated,
                _ if reply.closed => End::Closed,
                _ => End::Open,
            },
        };
        self.position = new.or(self.position.take());
        let quiet = reply.post_batch.clone().filter(|token| {
            let token = Checkpoint::Token(token.clone());
            self.position.as_ref().is_none_or(|position| token.is_beyond(position))
        });
        if let Some(token) = &quiet {
            replied.moved = true;
            // Hidden from the events, but the server has told where it is.
            if reply.closed && token.is_invalidate() {
                replied.end = End::Invalidated;
            }
            self.position = Some(Checkpoint::Token(token.clone()));
        }
        let at_end = !blind && reply.ends_at_the_end_of_the_oplog();
        self.state.send_if_modified(|state| {
            let before = (state.at_end, state.end_at.clone());
            state.at_end = at_end;
            if at_end {
                state.end_at.clone_from(&self.position);
            }
            before != (state.at_end, state.end_at.clone())
        });
        if reply.left() > 0 || quiet.is_some() {
            let held = self.holding.hold(reply.size());
            // Fails only when nobody listens, which ends this task anyway.
            let _ = self.items.send(Item::Batch(Batch { reply, quiet, _held: held })).await;
        }
        Ok(replied)
    }

    /// What a status is to say while the stream is not open; nothing when nothing is wrong.
    fn why(&self, happened: &Happened) -> Option<Reason> {
        match happened {
            Happened::Failed(_, fault) if fault.class == Class::Behind => None,
            Happened::Failed(_, fault) => Some(self.source.error(fault.clone(), self.position.as_ref()).reason()),
            Happened::Ended | Happened::Replied(Replied { end: End::Closed, .. }) => {
                Some(Reason::SourceUnavailable { message: "the server has ended the stream".to_owned() })
            }
            Happened::Opened | Happened::Replied(_) => None,
        }
    }

    /// The stream is open.
    fn reading(&mut self, opened: bool) {
        if self.recovery.failures() == 0 {
            self.backoff.reset();
            self.lost = None;
        }
        if opened && self.state.borrow().reopening.is_some() {
            self.state.send_modify(|state| {
                state.reopening = None;
                state.reconnects += 1;
            });
            tracing::info!(scope = %self.source.scope, position = ?self.position, "the stream is open again");
        }
    }

    /// The stream is to be opened again.
    async fn wait(&mut self, wait: Wait, why: Option<Reason>) {
        if let (Some(reason), true) = (why, wait != Wait::No) {
            let since = *self.lost.get_or_insert_with(tokio::time::Instant::now);
            let failures = self.recovery.failures();
            let every = if wait == Wait::Slowly { 6 } else { 10 };
            if failures == 1 || failures.is_multiple_of(every) {
                tracing::warn!(scope = %self.source.scope, position = ?self.position, failures, %reason, "the stream is opened again");
            }
            self.state.send_modify(|state| {
                state.at_end = false;
                state.reopening = Some(Reopening { since, reason });
            });
        }
        match wait {
            Wait::No => {}
            Wait::Backoff => tokio::time::sleep(self.backoff.next_wait()).await,
            Wait::Slowly => tokio::time::sleep(SLOWLY).await,
        }
    }
}
