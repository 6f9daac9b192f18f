//! A subscription that notes what it was given and when, and every state it was in.

use std::{
    fmt::Write as _,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use futures::future::ready;
use mongosub::{ChangeStreamModel, Delivery, DurableSubscriptions, MongoCheckpointStorage, State, Subscription};
use tokio::task::JoinHandle;

use super::{
    verdict::{Truth, judge},
    writer::Written,
};
use crate::{
    seen::{PATIENCE, Seen},
    support::wait_until,
};

/// What heals by itself.
const UNAVAILABLE: [&str; 2] = ["source_unavailable", "storage_unavailable"];

pub struct Witness {
    name: &'static str,
    pub subscription: Subscription,
    seen: Seen,
    notes: Arc<Mutex<Notes>>,
    watching: JoinHandle<()>,
}

#[derive(Default)]
struct Notes {
    /// When something came.
    times: Vec<Instant>,
    last: Option<i32>,
    /// In their order; retries by their reason.
    states: Vec<&'static str>,
    /// What it must never be.
    ended: Option<State>,
}

impl Witness {
    /// The name is that of the subscription, too.
    pub async fn start(
        name: &'static str,
        model: ChangeStreamModel,
        storage: MongoCheckpointStorage,
    ) -> anyhow::Result<Self> {
        let (seen, notes) = (Seen::default(), Arc::new(Mutex::new(Notes::default())));
        let (all, mine) = (seen.clone(), notes.clone());
        let handler = move |delivery: Delivery| {
            {
                let mut notes = mine.lock().unwrap_or_else(PoisonError::into_inner);
                notes.times.push(Instant::now());
                notes.last = notes.last.max(Some(crate::seen::id_of(&delivery)));
            }
            all.note(delivery);
            ready(Ok(()))
        };
        let subscription = DurableSubscriptions::new(model, storage).subscribe(name, handler).await?;
        let (mut status, mine) = (subscription.watch(), notes.clone());
        let watching = tokio::spawn(async move {
            loop {
                let state = status.borrow_and_update().state.clone();
                mine.lock().unwrap_or_else(PoisonError::into_inner).enters(state);
                if status.changed().await.is_err() {
                    break;
                }
            }
        });
        Ok(Self { name, subscription, seen, notes, watching })
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    pub fn reconnects(&self) -> u64 {
        self.subscription.status().reconnects
    }

    fn notes(&self) -> std::sync::MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until this id, or a later one, has come.
    pub async fn reaches(&self, id: i32) {
        let what = format!("{}: {id} is delivered", self.name);
        wait_until(&what, PATIENCE, || async { self.notes().last >= Some(id) }).await;
    }

    /// Waits until it has said, since its start, that its source or its storage is not available. Where both are not, which
    /// of them it says is a matter of which it finds out first.
    pub async fn retries(&self) {
        let what = format!("{}: it says that it retries", self.name);
        let said = || async { UNAVAILABLE.iter().any(|reason| self.notes().states.contains(reason)) };
        wait_until(&what, PATIENCE, said).await;
    }

    /// Waits until it has said, since its start, that it retries for a reason of that name.
    pub async fn says(&self, reason: &str) {
        let what = format!("{}: it retries, {reason}", self.name);
        wait_until(&what, PATIENCE, || async { self.notes().states.contains(&reason) }).await;
    }

    /// Waits until its cursor has been opened again so often.
    pub async fn reopens(&self, times: u64) {
        let what = format!("{}: its cursor is opened again", self.name);
        wait_until(&what, PATIENCE, || async { self.reconnects() >= times }).await;
    }

    /// When nobody writes any more: everything is delivered, stored, and right. It ends the subscription and gives the
    /// figures of a line. `healed` is when the fault was over, if that is to be one of them.
    ///
    /// # Errors
    ///
    /// What is wrong.
    pub async fn testifies(self, written: &Written, truth: &Truth, healed: Option<Instant>) -> anyhow::Result<String> {
        let name = self.name;
        let last = *truth.inserted.last().context("nothing was written")?;
        self.reaches(last).await;
        let stored = self.subscription.drained().await.context(name)?;
        ensure!(self.seen.is_covered_by(stored.as_ref()), "{name}: stored is {stored:?}");
        let reconnects = self.reconnects();
        // Nothing may come behind the end, either.
        self.subscription.caught_up().await.context(name)?;
        let notes = std::mem::take(&mut *self.notes());
        self.watching.abort();
        ensure!(notes.ended.is_none(), "{name}: it ended by itself: {:?}", notes.ended);
        let delivered = self.seen.ids();
        judge(written, truth, &delivered).context(name)?;
        self.subscription.shutdown().await.context(name)?;
        let back = healed.and_then(|healed| Some(notes.times.iter().find(|at| **at > healed)?.duration_since(healed)));
        let mut line = format!(
            "{name}: delivered {}, repeated 0, longest silence {} ms, reconnects {reconnects}",
            delivered.len(),
            longest_gap(notes.times).as_millis(),
        );
        if let Some(back) = back {
            write!(line, ", back after {} ms", back.as_millis())?;
        }
        for reason in UNAVAILABLE {
            let times = notes.states.iter().filter(|said| **said == reason).count();
            if times > 0 {
                write!(line, ", {reason} {times}x")?;
            }
        }
        Ok(line)
    }
}

impl Notes {
    fn enters(&mut self, state: State) {
        let name = match &state {
            State::Retrying(reason) => reason.name(),
            other => other.name(),
        };
        if matches!(state, State::Stalled(_) | State::Stopped(_)) {
            self.ended.get_or_insert(state);
        }
        if self.states.last() != Some(&name) {
            self.states.push(name);
        }
    }
}

/// The longest time between two that follow each other.
pub fn longest_gap(times: impl IntoIterator<Item = Instant>) -> Duration {
    let mut times = times.into_iter();
    let mut longest = Duration::ZERO;
    let Some(mut before) = times.next() else { return longest };
    for time in times {
        longest = longest.max(time - before);
        before = time;
    }
    longest
}
