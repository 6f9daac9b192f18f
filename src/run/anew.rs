//! A run that begins anew: what was handled is lost with its handler, so it goes back to its stored checkpoint, with a
//! fresh handler and under a fresh fence that only its own owner can take. Part of `durable`'s `Run`.

use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use crate::backoff::Backoff;
use crate::error::StorageError;
use crate::ids::{Epoch, Owner};
use crate::model::SubscriptionModel;
use crate::reason::Reason;
use crate::run::barrier::Anew;
use crate::run::core::Turn;
use crate::run::durable::{Goal, LAST_SAVE, Run, no_answer};
use crate::run::progress::Mark;
use crate::run::saver::Lost;
use crate::status::Phase;
use crate::storage::{CheckpointStorage, Claim, ClaimOutcome, Record};

/// What a run remembers of beginning anew.
#[derive(Debug)]
pub(crate) struct Renewal {
    /// Longer after each time in a row.
    backoff: Backoff,
    /// When it is to begin.
    pub(crate) at: Option<Instant>,
    /// Who claims it: the same one until the storage has answered.
    owner: Owner,
    /// Where the run began, for one that has stored nothing.
    start: Option<Mark>,
    /// What was stored when it last began anew: beyond it there is progress.
    stored: Option<Mark>,
}

impl Renewal {
    pub(crate) fn new(start: Option<Mark>, stored: Option<Mark>) -> Self {
        let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        Self { backoff, at: None, owner: Owner::fresh(), start, stored }
    }

    /// The next wait: 1 s, doubling to 60 s. Without jitter, since only this run waits.
    fn wait(&mut self) -> Duration {
        let wait = self.backoff.bound();
        self.backoff.next_wait();
        wait
    }
}

impl<M: SubscriptionModel, S: CheckpointStorage> Run<M, S> {
    /// The delivering has lost its handler: sets the time to begin anew. Answers where the run is to go when it cannot.
    pub(crate) fn plan_anew(&mut self) -> Option<Goal> {
        let anew = self.core.at_rest.as_ref().and_then(|deliver| deliver.anew.as_ref())?;
        let Anew { position, error, has_handler } = anew;
        let (position, error) = (position.clone(), error.clone());
        if self.core.saver.stored() != self.renewal.stored.as_ref() {
            self.renewal.backoff.reset();
        }
        let attempts = self.renewal.backoff.failures() + 1;
        if !has_handler {
            return Some(Goal::Stop(Reason::HandlerFailed { position, attempts, error }));
        }
        let wait = self.renewal.wait();
        let id = &self.id;
        warn!(
            subscription = %id, %position, attempts,
            "subscription {id} begins anew at its stored checkpoint in {} s, with a fresh handler: {error}", wait.as_secs()
        );
        self.renewal.at = Some(Instant::now() + wait);
        self.core.renewing = true;
        let reason = Reason::HandlerFailing { position, attempts, error };
        self.core.board.set(|conditions| conditions.handler = Some(reason));
        None
    }

    /// Waits for the time to begin anew; without one, for ever.
    pub(crate) async fn anew_due(at: Option<Instant>) {
        match at {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// Begins anew. Answers where the run is to go when it cannot.
    pub(crate) async fn begin_anew(&mut self) -> Option<Goal> {
        self.renewal.at = None;
        // Nothing is written any more under the old fence, and what is in flight has ended.
        self.core.saver.freeze();
        while self.core.saver.is_writing() {
            if let Turn::Lost(lost) = self.core.step().await {
                return Some(self.lost(lost, None));
            }
        }
        let claim = Claim {
            owner: self.renewal.owner.clone(),
            expect: Some(self.ownership.clone()),
            ..Claim::new(self.id.clone())
        };
        let claimed = tokio::time::timeout(LAST_SAVE, self.storage.claim(&claim)).await;
        match claimed.unwrap_or_else(|_| Err(no_answer())) {
            Ok(ClaimOutcome::Claimed(record)) => {
                self.go_back(record);
                None
            }
            Ok(ClaimOutcome::Superseded { owner, since }) => {
                Some(self.lost(Lost::Stop(Reason::Superseded { owner, since }), None))
            }
            Ok(ClaimOutcome::Gone) => Some(Goal::Stop(Reason::Deleted)),
            Err(error @ (StorageError::Unreadable { .. } | StorageError::Refused { .. })) => {
                Some(self.lost(Lost::Stall(error.reason()), None))
            }
            Err(error) => {
                let (id, wait) = (&self.id, self.renewal.wait());
                warn!(subscription = %id, "subscription {id} could not be claimed anew: {error}");
                let reason = error.reason();
                self.core.board.set(|conditions| conditions.storage = Some(reason));
                self.renewal.at = Some(Instant::now() + wait);
                None
            }
        }
    }

    /// Everything stands at the stored checkpoint again, and is set to work.
    fn go_back(&mut self, record: Record) {
        let Some(ownership) = record.ownership.clone() else { return };
        let Some(deliver) = &mut self.core.at_rest else { return };
        let stored = self.core.saver.stored().cloned();
        // A write whose answer was lost may have been made: the record says how far.
        let begun = |epoch: Epoch| u32::try_from(epoch.0 - self.core.saver.epoch().0).ok();
        let own = record.epoch.and_then(begun).zip(record.position);
        let known = stored.clone().filter(|stored| stored.seq > 0).or_else(|| self.renewal.start.clone());
        let is_own = own.is_some();
        let from = match (own, known) {
            (Some((epoch, position)), known) => {
                let written = self.core.saver.unanswered(&position);
                let known = written.or(known).unwrap_or_else(|| Mark::start(position.clone()));
                Some(Mark { kind: record.kind.unwrap_or(known.kind), epoch, position, ..known })
            }
            (None, known) => known,
        };
        let events = |mark: Option<&Mark>| mark.map_or(0, |mark| mark.events);
        let undone = events(self.core.desk.view().safe.as_ref()).saturating_sub(events(from.as_ref()));
        let id = &self.id;
        let at = from.as_ref().map_or_else(|| "the source's now".into(), |from| from.position.to_string());
        info!(subscription = %id, fence = ownership.fence.0, position = at, "subscription {id} begins anew at {at}");
        self.core.desk.begin_anew(
            ownership.fence,
            from.clone(),
            deliver.settings.save.clone(),
            deliver.settings.quiet_interval.is_some(),
        );
        self.core.waiters.begin_anew(deliver.taken.as_ref());
        deliver.ownership = ownership.clone();
        deliver.anew = None;
        self.core.watchdog.begin_anew(ownership.clone());
        self.core.saver.begin_anew(&ownership, is_own.then(|| from.clone()).flatten().or(stored));
        self.renewal.stored = self.core.saver.stored().cloned();
        self.renewal.owner = Owner::fresh();
        self.ownership = ownership;
        let fence = self.ownership.fence;
        let to = from.as_ref().map_or(0, |from| from.seq);
        self.core.board.count(|status| {
            deliver.trouble.put_by.undo(to, undone, status);
            status.fence = fence;
            status.position = from.map(|from| from.position);
        });
        self.core.board.set(|conditions| {
            conditions.phase = Phase::Starting;
            (conditions.handler, conditions.storage) = (None, None);
        });
        self.core.set_to_work(None);
    }
}
