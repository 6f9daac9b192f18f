//! The scripted model: a feed that a test appends to while it is read, and faults that it sets.

use std::collections::VecDeque;
use std::sync::Arc;

use bson::Timestamp;
use tokio::sync::watch;

use crate::checkpoint::Checkpoint;
use crate::error::{SourceError, SubscribeError};
use crate::event::ChangeEvent;
use crate::memory::events::{MemoryEvent, event, without_bodies};
use crate::memory::feed::{Dropped, Entry, invalidate_token, next_time};
use crate::memory::reader::MemoryReader;
use crate::memory::script::{Call, Script, Shared};
use crate::model::{Fingerprint, Identity, Plan, Reopening, SourceState, SubscriptionModel};
use crate::reason::Reason;

/// A model without a server: its feed is what a test pushes, its faults are what a test sets.
///
/// Clones share one feed. Tokens are built like a server's and grow strictly; the cluster time moves by one increment
/// with each push, begins at `1700000000.1` and knows no clock, so a test under paused time is deterministic.
/// A reader evaluates the plan's filter in memory and hands out a quiet position where it passed over the last events;
/// an event that the filter cannot decode is handed out.
///
/// A position in the future is waited at for ever, as on a server.
///
/// ```
/// use mongosub::bson::doc;
/// use mongosub::memory::{self, MemoryCheckpointStorage, MemoryModel};
/// use mongosub::{Delivery, DurableSubscriptions, Reason, SourceError};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = MemoryModel::new();
/// let subscriptions = DurableSubscriptions::new(model.clone(), MemoryCheckpointStorage::new());
/// let subscription = subscriptions.subscribe("search_index_v3", |_: Delivery| async { Ok(()) }).await?;
/// let position = model.push(memory::insert(1, doc! { "status": "paid" }));
/// subscription.caught_up().await?;
///
/// model.break_reader(SourceError::Refused(Reason::EventTooLarge { position }));
/// let mut status = subscription.watch();
/// let stalled = status.wait_for(|status| status.state.name() == "stalled").await?;
/// assert_eq!(stalled.settled, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct MemoryModel {
    shared: Arc<Shared>,
}

/// The feed.
impl MemoryModel {
    /// A model with an empty feed of the collection `test.events`, whose every call answers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends an event at the next cluster time, and answers its position.
    pub fn push(&self, event: impl Into<MemoryEvent>) -> Checkpoint {
        let event = event.into();
        self.change(|script| {
            script.feed.advance_to(next_time(script.feed.time));
            script.append(event, 0)
        })
    }

    /// Appends an event at this cluster time.
    ///
    /// # Panics
    /// When the time is not after that of the last thing pushed.
    pub fn push_at(&self, time: Timestamp, event: impl Into<MemoryEvent>) -> Checkpoint {
        let event = event.into();
        self.change(|script| {
            script.feed.advance_to(time);
            script.append(event, 0)
        })
    }

    /// Appends the events of one transaction: all share the next cluster time. Answers their positions.
    pub fn push_transaction<E: Into<MemoryEvent>>(&self, events: impl IntoIterator<Item = E>) -> Vec<Checkpoint> {
        let events: Vec<MemoryEvent> = events.into_iter().map(Into::into).collect();
        self.change(|script| {
            script.feed.advance_to(next_time(script.feed.time));
            (0..).zip(events).map(|(index, event)| script.append(event.field("txnNumber", 1_i64), index)).collect()
        })
    }

    /// Appends these very bytes, whatever is in them, as an event at the next cluster time.
    pub fn push_raw(&self, event: ChangeEvent) -> Checkpoint {
        self.change(|script| {
            script.feed.advance_to(next_time(script.feed.time));
            let position = script.feed.token_now(0, &script.uuid);
            script.feed.push(Entry::Event { event, position: position.clone() });
            Checkpoint::Token(position)
        })
    }

    /// Appends a quiet position at the next cluster time, and answers it.
    pub fn push_quiet(&self) -> Checkpoint {
        self.change(|script| script.append_quiet(next_time(script.feed.time)))
    }

    /// Appends a quiet position at this cluster time.
    ///
    /// # Panics
    /// When the time is not after that of the last thing pushed.
    pub fn push_quiet_at(&self, time: Timestamp) -> Checkpoint {
        self.change(|script| script.append_quiet(time))
    }

    /// Appends an `invalidate`: it passes every filter, and readers end behind it. What is pushed afterwards is read by
    /// those that open at its position.
    pub fn invalidate(&self) -> Checkpoint {
        self.change(|script| {
            let time = next_time(script.feed.time);
            script.feed.advance_to(time);
            let position = invalidate_token(time, &script.uuid);
            let event = event(crate::Operation::Invalidate).without("ns").at(&position);
            script.feed.push(Entry::Event { event, position: position.clone() });
            Checkpoint::Token(position)
        })
    }

    /// The collection was made anew, behind an [`invalidate`](Self::invalidate): what is pushed from now on carries this
    /// UUID, 32 hex digits, and so does `identity`.
    pub fn recreate(&self, uuid: impl Into<String>) {
        let uuid = uuid.into();
        self.change(|script| {
            script.identity.collection_uuid = Some(uuid.clone());
            script.uuid = uuid;
        });
    }

    /// Ends the feed: readers that have handed out everything answer `None`.
    pub fn end(&self) {
        self.change(|script| script.feed.ended = true);
    }

    /// Forgets the history before a position, as an oplog does: an open at an older cluster time is `HistoryLost`, and
    /// so is the last item of a reader that had not read what is gone.
    ///
    /// # Panics
    /// When the position has no cluster time.
    pub fn drop_history_before(&self, position: &Checkpoint) {
        let oldest = position.cluster_time().expect("a position with a cluster time");
        self.change(|script| script.feed.drop_before(oldest));
    }
}

/// How it is set up.
impl MemoryModel {
    /// Whether updates are taken to carry a full document. Default: false, and a filter that needs one is refused.
    #[must_use]
    pub fn full_document(self, looked_up: bool) -> Self {
        self.change(|script| script.full_document = looked_up);
        self
    }
}

/// What can be seen.
impl MemoryModel {
    /// How often it was opened, failed and hanging opens included.
    pub fn opens(&self) -> usize {
        self.shared.lock().opened_from.len()
    }

    /// Where it was opened, one entry for each of [`opens`](Self::opens).
    pub fn opened_from(&self) -> Vec<Option<Checkpoint>> {
        self.shared.lock().opened_from.clone()
    }

    /// How many readers there are now.
    pub fn active_readers(&self) -> usize {
        self.shared.lock().readers.len()
    }

    /// How many reads, events and quiet ones, all readers together have handed out.
    pub fn reads(&self) -> u64 {
        self.shared.lock().reads
    }

    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Script) -> T) -> T {
        let changed = change(&mut self.shared.lock());
        self.shared.changed.send_replace(());
        changed
    }

    /// The answer of one call: the failure that was set for it, or what the script says.
    fn answer<T>(&self, call: Call, answer: impl FnOnce(&Script) -> T) -> Result<T, SourceError> {
        let mut script = self.shared.lock();
        match script.failures.get_mut(&call).and_then(VecDeque::pop_front) {
            Some(error) => Err(error),
            None => Ok(answer(&script)),
        }
    }
}

impl SubscriptionModel for MemoryModel {
    type Reader = MemoryReader;

    async fn open(&self, from: Option<&Checkpoint>, plan: &Plan) -> Result<MemoryReader, SourceError> {
        self.shared.lock().opened_from.push(from.cloned());
        let mut changed = self.shared.changed.subscribe();
        // The sender lives in `shared`.
        let _ = changed.wait_for(|()| !self.shared.lock().hanging).await;
        self.answer(Call::Open, |_| ())?;
        let mut script = self.shared.lock();
        let now = Checkpoint::Time(next_time(script.feed.time));
        let refused = |reason| Err(SourceError::Refused(reason));
        if plan.filter.is_raw_pipeline() {
            let message = "a raw pipeline needs a server".into();
            return refused(Reason::RefusedByServer { code: 0, message });
        }
        let next = match from {
            Some(Checkpoint::Text(_)) => {
                return refused(Reason::BadPosition { code: 0, message: "text is no position of this model".into() });
            }
            Some(from) => script.feed.after(from),
            None => Ok(script.feed.end()),
        };
        let last = from.unwrap_or(&now).clone();
        let Ok(next) = next.map_err(|Dropped| ()) else {
            return refused(Reason::HistoryLost { position: last, oldest: Some(Checkpoint::Time(script.feed.oldest)) });
        };
        script.last_reader += 1;
        let number = script.last_reader;
        let opened_at = (from.is_none() && script.tells_time).then_some(now);
        let state = SourceState { reopening: script.reopening.clone().map(Reopening::now), ..SourceState::default() };
        let state = watch::Sender::new(state);
        script.readers.insert(number, state.clone());
        let at_end = next == script.feed.end();
        drop(script);
        let shared = self.shared.clone();
        let plan = plan.clone();
        let reader =
            MemoryReader { shared, number, plan, next, last, opened_at, skipped: None, ended: false, changed, state };
        reader.note_end(at_end);
        Ok(reader)
    }

    fn check(&self, plan: &Plan) -> Result<Fingerprint, SubscribeError> {
        if plan.filter.is_raw_pipeline() {
            let message = "this model has no server, and only a server evaluates Filter::pipeline(..)".into();
            return Err(SubscribeError::Config { field: "filter", message });
        }
        plan.filter.validate()?;
        if plan.filter.needs_full_document() && !self.shared.lock().full_document {
            return Err(SubscribeError::FilterNeedsFullDocument);
        }
        Ok(Fingerprint::of(&plan.filter.stages()))
    }

    async fn global_checkpoint(&self) -> Result<Option<Checkpoint>, SourceError> {
        self.answer(Call::GlobalCheckpoint, |script| {
            script.tells_global_checkpoint.then(|| Checkpoint::Time(next_time(script.head())))
        })
    }

    async fn head(&self) -> Result<Checkpoint, SourceError> {
        self.answer(Call::Head, |script| Checkpoint::Time(script.head()))
    }

    async fn earliest(&self) -> Result<Checkpoint, SourceError> {
        self.answer(Call::Earliest, |script| Checkpoint::Time(script.feed.oldest))
    }

    async fn is_readable(&self, position: &Checkpoint) -> Result<bool, SourceError> {
        Ok(self.change(|script| script.feed.is_readable(position)))
    }

    async fn identity(&self) -> Result<Identity, SourceError> {
        self.answer(Call::Identity, |script| script.identity.clone())
    }

    async fn outline(&self, position: &Checkpoint) -> Result<Option<ChangeEvent>, SourceError> {
        self.answer(Call::Outline, |script| script.feed.at(position).map(without_bodies))
    }

    async fn has_event(&self, position: &Checkpoint) -> Result<bool, SourceError> {
        self.change(|script| {
            if !script.feed.is_readable(position) {
                let oldest = Some(Checkpoint::Time(script.feed.oldest));
                return Err(SourceError::Refused(Reason::HistoryLost { position: position.clone(), oldest }));
            }
            Ok(!script.undone.contains(position))
        })
    }

    async fn ended_since(&self, from: &Checkpoint, collection_uuid: &str) -> Result<bool, SourceError> {
        self.answer(Call::EndedSince, |script| match script.feed.shows_end_of(from, collection_uuid) {
            Ok(shows) => Ok(shows || script.ended.contains(collection_uuid)),
            Err(Dropped) => {
                let oldest = Some(Checkpoint::Time(script.feed.oldest));
                Err(SourceError::Refused(Reason::HistoryLost { position: from.clone(), oldest }))
            }
        })?
    }
}
