//! Reads a stream in a task of its own: reply by reply, ahead of whoever takes the reads, across every error that heals.
//!
//! The task owns the cursor, remembers the last position read and opens again from there; what it does when something
//! happens is `step.rs`'s to decide.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tracing::Instrument;

use super::classify::{Class, Fault, Phase};
use super::open::{Around, Source, Stream};
use super::pool::OpenStream;
use super::present;
use super::probe;
use super::reader::{Batch, ChangeStreamReader, Holding, Item};
use super::reply::Reply;
use super::split::Fragments;
use super::step::{End, Happened, Next, Recovery, Replied, Wait};
use super::token;
use super::unsendable::{self, Found};
use crate::backoff::Backoff;
use crate::checkpoint::{Checkpoint, Token};
use crate::error::SourceError;
use crate::model::{Reopening, SourceState};
use crate::reason::Reason;

/// How long finding out the oldest position may take when history is lost.
const OLDEST_WITHIN: Duration = Duration::from_secs(5);
/// A server that takes part in its set has something new every ten seconds, if only a no-op. One that has had nothing for
/// twice as long may have been the primary, and not know that others write elsewhere.
const STILL: Duration = Duration::from_secs(20);
/// How often a missing right is asked for.
const SLOWLY: Duration = Duration::from_secs(10);

/// Opens, judges, and begins to read.
pub(super) async fn open(source: Source, from: Option<&Checkpoint>) -> Result<ChangeStreamReader, SourceError> {
    let splits = from.and_then(Checkpoint::token).is_some_and(token::is_of_a_splitting_stream);
    let mut recovery = Recovery::new(splits, source.cannot_split.load(Ordering::Relaxed));
    let mut around = None;
    let stream = loop {
        let how = around.clone().unwrap_or_default();
        let fault = match source.open(from, recovery.how(), &how).await {
            Ok(stream) => break stream,
            Err(fault) => fault,
        };
        // Only another way of opening is tried here; the caller decides about everything else.
        let error = match recovery.step(Happened::Failed(Phase::Open, fault.clone())) {
            Next::Open(Wait::No) => continue,
            Next::Unsendable(fault) => {
                match unsendable::find(&source, from, recovery.how().split, &fault, around.is_some()).await {
                    Ok(Found::Around(way)) => {
                        around = Some(way);
                        continue;
                    }
                    Ok(Found::Event(reason)) => SourceError::Refused(reason),
                    Err(fault) => source.error(fault, from),
                }
            }
            _ => source.error(fault, from),
        };
        return Err(name_the_oldest(&source, error).await);
    };
    recovery.step(Happened::Opened);
    let opened_at = match from {
        None => stream.operation_time().map(|time| Checkpoint::Time(present::after(time))),
        Some(_) => None,
    };
    let position = from.cloned().or_else(|| opened_at.clone());
    let (mut task, items, state) = Task::new(source, position, recovery);
    task.around = around;
    tokio::spawn(task.run(stream).in_current_span());
    Ok(ChangeStreamReader::new(items, opened_at, state))
}

/// Adds to lost history the oldest position there is, when that can be found out quickly.
pub(super) async fn name_the_oldest(source: &Source, error: SourceError) -> SourceError {
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
    /// The last event read. Not the one opened at: that may be a start of the user's own, which need not be there.
    last_event: Option<Token>,
    /// Events that the position covers may still come: none later than it has come since the open.
    dropping: bool,
    /// The fragments of an event that is not whole yet.
    fragments: Fragments,
    /// How the open gets past what is done at this very position and cannot be sent.
    around: Option<Around>,
    /// When the position last moved, the stream was opened, or there was more to read.
    moved: tokio::time::Instant,
    recovery: Recovery,
    backoff: Backoff,
    items: mpsc::Sender<Item>,
    state: watch::Sender<SourceState>,
    holding: Arc<Holding>,
    /// Since when there has been no good read.
    lost: Option<tokio::time::Instant>,
    /// Counted while it reads, and while it opens again.
    _counted: OpenStream,
}

impl Task {
    fn new(
        source: Source,
        position: Option<Checkpoint>,
        recovery: Recovery,
    ) -> (Self, mpsc::Receiver<Item>, watch::Receiver<SourceState>) {
        let (items, received) = mpsc::channel(1);
        let (state, watched) = watch::channel(SourceState::default());
        let backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
        let holding = Arc::default();
        let counted = source.pool.open();
        let task = Self {
            source,
            position,
            last_event: None,
            dropping: true,
            fragments: Fragments::default(),
            around: None,
            moved: tokio::time::Instant::now(),
            recovery,
            backoff,
            items,
            state,
            holding,
            lost: None,
            _counted: counted,
        };
        (task, received, watched)
    }

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
                            match Reply::of(batch).and_then(|reply| self.take(reply, first, blind)) {
                                Ok((replied, batch)) => {
                                    self.send(batch).await;
                                    Happened::Replied(replied)
                                }
                                Err(fault) => Happened::Failed(Phase::GetMore, fault),
                            }
                        }
                        Some((Err(error), _)) => {
                            Happened::Failed(Phase::GetMore, Fault::of_driver(Phase::GetMore, &error))
                        }
                        None => Happened::Ended,
                    }
                }
                None => match self.open().await {
                    Ok(Err(reason)) => return Item::Failed(SourceError::Refused(reason)),
                    Ok(Ok(open)) => {
                        stream = Some(open);
                        self.dropping = true;
                        self.fragments = Fragments::default();
                        self.moved = tokio::time::Instant::now();
                        Happened::Opened
                    }
                    Err(fault) => Happened::Failed(Phase::Open, fault),
                },
            };
            let mut why = self.why(&happened);
            let opened = happened == Happened::Opened;
            let mut next = self.recovery.step(happened);
            if let Next::Unsendable(fault) = next {
                stream = None;
                next = match self.find(&fault).await {
                    Ok(Found::Around(around)) => {
                        self.around = Some(around);
                        Next::Open(Wait::No)
                    }
                    Ok(Found::Event(reason)) => return Item::Failed(SourceError::Refused(reason)),
                    Err(fault) => {
                        let happened = Happened::Failed(Phase::Command, fault);
                        why = self.why(&happened);
                        self.recovery.step(happened)
                    }
                };
            }
            match next {
                Next::Read => self.reading(opened),
                Next::Open(wait) => {
                    stream = None;
                    self.wait(wait, why).await;
                }
                Next::End => return Item::Ended,
                Next::Fail(fault) | Next::Unsendable(fault) => {
                    let error = self.source.error(fault, self.position.as_ref());
                    return Item::Failed(name_the_oldest(&self.source, error).await);
                }
            }
        }
    }

    /// Opens again; or says that the server has not the last event that was read: what answers behind an outage may be an
    /// older state that was put back.
    async fn open(&self) -> Result<Result<Stream, Reason>, Fault> {
        let around = self.around.clone().unwrap_or_default();
        let open = self.source.open(self.position.as_ref(), self.recovery.how(), &around).await?;
        let Some(event) = self.last_event.as_ref().filter(|_| self.lost.is_some()) else { return Ok(Ok(open)) };
        let has = match probe::has_event(&self.source, event).await {
            // The position is in its history, or it would not be open.
            Err(Fault { class: Class::HistoryLost, .. }) => true,
            has => has?,
        };
        Ok(if has { Ok(open) } else { Err(Reason::other_history(&event.clone().into())) })
    }

    /// Which event it is that the server cannot send.
    async fn find(&self, fault: &Fault) -> Result<Found, Fault> {
        let split = self.recovery.how().split;
        unsendable::find(&self.source, self.position.as_ref(), split, fault, self.around.is_some()).await
    }

    /// Takes what is new out of a reply: its events, and the quiet position behind them. `blind`: it is empty because
    /// nothing was asked for.
    fn take(&mut self, mut reply: Reply, first: bool, blind: bool) -> Result<(Replied, Option<Batch>), Fault> {
        if self.recovery.how().split {
            reply.assemble(&mut self.fragments)?;
        }
        if self.dropping {
            self.dropping = match &self.position {
                Some(Checkpoint::Token(position)) => !reply.drop_through(position)?,
                _ => false,
            };
        }
        let dropped = reply.gone() as u64;
        let new = match &reply.last {
            Some(last) if reply.left() > 0 => Some(Checkpoint::Token(last.clone())),
            _ => None,
        };
        let mut replied = Replied {
            events: reply.came,
            bytes: reply.sent(),
            first,
            moved: new.is_some(),
            still: false,
            end: match &new {
                Some(position) if position.is_invalidate() => End::Invalidated,
                _ if reply.closed => End::Closed,
                _ => End::Open,
            },
        };
        if let Some(event) = new.as_ref().filter(|event| event.names_event()).and_then(Checkpoint::token) {
            self.last_event = Some(event.clone());
        }
        self.position = new.or(self.position.take());
        // A fragment's is no position.
        let quiet = reply.post_batch.clone().filter(|token| {
            !self.fragments.pending()
                && match &self.position {
                    Some(Checkpoint::Token(position)) => token::is_further(token, position),
                    Some(position) => Checkpoint::Token(token.clone()).is_beyond(position),
                    None => true,
                }
        });
        if let Some(token) = &quiet {
            replied.moved = true;
            // Hidden from the events, but the server has told where it is.
            if reply.closed && token.is_invalidate() {
                replied.end = End::Invalidated;
            }
            self.position = Some(Checkpoint::Token(token.clone()));
        }
        if replied.moved {
            self.around = None;
        }
        let at_end = !blind && !self.fragments.pending() && reply.ends_at_the_end_of_the_oplog();
        let now = tokio::time::Instant::now();
        if replied.moved || !at_end {
            self.moved = now;
        }
        replied.still = now >= self.moved + STILL;
        self.state.send_if_modified(|state| {
            let before = (state.at_end, state.end_at.clone());
            state.at_end = at_end;
            if at_end {
                state.end_at.clone_from(&self.position);
            }
            state.dropped += dropped;
            dropped > 0 || before != (state.at_end, state.end_at.clone())
        });
        let news = reply.left() > 0 || quiet.is_some();
        Ok((replied, news.then(|| Batch::new(reply, quiet, &self.holding))))
    }

    /// Waits until there is room. It fails only when nobody listens, which ends this task anyway.
    async fn send(&self, batch: Option<Batch>) {
        if let Some(batch) = batch {
            let _ = self.items.send(Item::Batch(batch)).await;
        }
    }

    /// What a status is to say while the stream is not open; nothing when nothing is wrong.
    fn why(&self, happened: &Happened) -> Option<Reason> {
        match happened {
            Happened::Failed(_, fault)
                if matches!(fault.class, Class::Behind | Class::TooLarge | Class::ImageMissing | Class::NoSplit) =>
            {
                None
            }
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
            // The first is a change of state, which whoever watches the state says.
            let every = if wait == Wait::Slowly { 6 } else { 10 };
            if failures.is_multiple_of(every) {
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

#[cfg(test)]
mod tests {
    use super::super::pool::ConnectionPool;
    use super::super::reply::tests::{made, quiet, reply, token};
    use super::super::split;
    use super::*;
    use crate::ids::Namespace;
    use crate::model::Scope;

    struct Bench {
        task: Task,
        state: watch::Receiver<SourceState>,
        _items: mpsc::Receiver<Item>,
    }

    /// A task that stands at a position; its client never connects.
    async fn at(position: Option<Checkpoint>) -> Bench {
        let client = mongodb::Client::with_uri_str("mongodb://localhost:1/").await.unwrap();
        let source = Source {
            scope: Scope::Collection(Namespace::new("shop", "orders")),
            database: client.database("shop"),
            stage: bson::Document::new(),
            pipeline: Vec::new(),
            comment: None,
            criteria: None,
            max_await_time: Duration::from_secs(1),
            pool: ConnectionPool::default(),
            cannot_split: Arc::default(),
        };
        let (task, items, state) = Task::new(source, position, Recovery::default());
        Bench { task, state, _items: items }
    }

    impl Bench {
        /// What a reply was like, and how many events of it and which quiet position are handed on.
        fn take(&mut self, reply: Reply, blind: bool) -> (Replied, usize, Option<Token>) {
            let (replied, batch) = self.task.take(reply, blind, blind).unwrap();
            let (events, quiet) = batch.map_or((0, None), |batch| batch.contents());
            (replied, events, quiet)
        }
    }

    #[tokio::test]
    async fn what_the_position_covers_is_dropped_until_something_new_has_come() {
        let mut bench = at(Some(token(7, 2).into())).await;
        let (replied, events, quiet_position) = bench.take(reply(&[token(7, 1)], Some(&token(7, 1)), 5), false);
        assert_eq!((replied.moved, events, quiet_position), (false, 0, None));
        let tokens = [token(7, 2), token(7, 3), token(8, 1)];
        let (replied, events, quiet_position) = bench.take(reply(&tokens, Some(&token(8, 1)), 5), false);
        assert_eq!((replied.moved, events, quiet_position), (true, 2, None));
        assert_eq!(bench.task.position, Some(token(8, 1).into()));
        assert!(!bench.task.dropping);
    }

    #[tokio::test]
    async fn a_fragment_is_no_position_and_no_end_of_the_oplog_and_the_whole_is_one() {
        let mut bench = at(Some(split::tests::token(6, 0, None).into())).await;
        bench.task.recovery = Recovery::new(true, false);
        let (first, second) = (split::tests::fragment(7, 1, 2), split::tests::fragment(7, 2, 2));
        let [mark, last] = [1, 2].map(|number| split::tests::token(7, 0, Some(number)));
        let whole = split::tests::token(7, 0, None);
        let (replied, events, quiet_position) = bench.take(made(&[first], Some(&mark), 5), false);
        assert_eq!((replied.events, replied.moved, events, quiet_position), (1, false, 0, None));
        assert_eq!(bench.task.position, Some(split::tests::token(6, 0, None).into()));
        assert_eq!(bench.take(made(&[], Some(&mark), 5), false).2, None);
        assert!(!bench.state.borrow().at_end);
        let (replied, events, quiet_position) = bench.take(made(&[second], Some(&last), 5), false);
        assert_eq!((replied.events, replied.moved, events, quiet_position), (1, true, 1, None));
        assert_eq!(bench.task.position, Some(whole.clone().into()));
        // The scan stands at the last fragment.
        assert_eq!(bench.take(made(&[], Some(&last), 5), false).2, None);
        assert_eq!(bench.state.borrow().end_at, Some(whole.into()));
        assert_eq!(bench.take(made(&[], Some(&quiet(8)), 5), false).2, Some(quiet(8)));
    }

    #[tokio::test]
    async fn what_is_dropped_is_counted() {
        let mut bench = at(Some(token(7, 2).into())).await;
        bench.take(reply(&[token(7, 1)], Some(&token(7, 1)), 5), false);
        bench.take(reply(&[token(7, 2), token(7, 3)], Some(&token(7, 3)), 5), false);
        assert_eq!(bench.state.borrow().dropped, 2);
    }

    #[tokio::test]
    async fn nothing_is_dropped_at_a_time() {
        let mut bench = at(Some(token(7, 1).cluster_time().into())).await;
        assert_eq!(bench.take(reply(&[token(7, 1), token(7, 2)], None, 5), false).1, 2);
    }

    #[tokio::test]
    async fn a_quiet_position_must_lie_beyond_everything_read() {
        let mut bench = at(Some(quiet(7).into())).await;
        assert_eq!(bench.take(reply(&[], Some(&quiet(7)), 5), false).2, None);
        assert_eq!(bench.take(reply(&[], Some(&quiet(8)), 5), false).2, Some(quiet(8)));
        assert_eq!(bench.take(reply(&[], Some(&quiet(8)), 5), false).2, None);
        assert_eq!(bench.take(reply(&[token(9, 1)], Some(&token(9, 1)), 5), false).2, None);
        assert_eq!(bench.take(reply(&[token(9, 2)], Some(&quiet(10)), 5), false).2, Some(quiet(10)));
        assert_eq!(bench.task.position, Some(quiet(10).into()));
    }

    #[tokio::test]
    async fn the_end_of_the_oplog_shows_in_the_state_with_the_position_read_there() {
        let mut bench = at(Some(quiet(7).into())).await;
        bench.take(reply(&[], Some(&quiet(7)), 5), true);
        assert!(!bench.state.borrow().at_end, "an open far behind asks for nothing and says nothing");
        bench.take(reply(&[token(8, 1)], Some(&token(8, 1)), 5), false);
        assert_eq!(*bench.state.borrow(), SourceState::default());
        bench.take(reply(&[token(8, 2)], Some(&quiet(9)), 5), false);
        assert!(bench.state.borrow().at_end);
        assert_eq!(bench.state.borrow().end_at, Some(quiet(9).into()));
        bench.take(reply(&[token(9, 1)], Some(&token(9, 1)), 5), false);
        assert!(!bench.state.borrow().at_end);
        assert_eq!(bench.state.borrow().end_at, Some(quiet(9).into()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_has_nothing_new_for_long_is_told_from_one_that_has_had_a_no_op() {
        let mut bench = at(Some(quiet(7).into())).await;
        let mut still = async |reply, seconds| {
            tokio::time::advance(Duration::from_secs(seconds)).await;
            bench.take(reply, false).0.still
        };
        assert!(!still(reply(&[], Some(&quiet(7)), 5), 19).await);
        assert!(!still(reply(&[], Some(&quiet(8)), 5), 1).await, "a no-op moves the position");
        assert!(!still(reply(&[], Some(&quiet(8)), 5), 19).await);
        assert!(still(reply(&[], Some(&quiet(8)), 5), 1).await);
    }

    #[tokio::test]
    async fn an_invalidate_is_handed_on_and_is_the_end_also_when_the_pipeline_hides_it() {
        let invalidate = Token::new(token(8, 1).as_str().replace("6E5A", "6F5A")).unwrap();
        for (events, handed_on) in [(vec![token(8, 1), invalidate.clone()], 2), (vec![], 0)] {
            let mut bench = at(Some(quiet(7).into())).await;
            let (replied, events, _) = bench.take(reply(&events, Some(&invalidate), 0), false);
            assert_eq!((replied.end, events), (End::Invalidated, handed_on));
            assert_eq!(bench.task.position, Some(invalidate.clone().into()));
        }
        let mut bench = at(Some(quiet(7).into())).await;
        assert_eq!(bench.take(reply(&[], None, 0), false).0.end, End::Closed);
        let mut bench = at(Some(invalidate.clone().into())).await;
        assert_eq!(bench.take(reply(&[], Some(&invalidate), 5), false).0.end, End::Open);
    }
}
