//! The start of a run, in the order that loses nothing when it is cut anywhere: validate, read the record, settle the
//! position, open the cursor there, claim, open again if another position was stored first. Delivery begins after it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use crate::audit::Gap;
use crate::backoff::Backoff;
use crate::checkpoint::Checkpoint;
use crate::error::{SourceError, StorageError, SubscribeError};
use crate::ids::{Epoch, Owner, Ownership, SubscriptionId};
use crate::model::{Fingerprint, Identity, Plan, Reader, Scope, SubscriptionModel};
use crate::reason::Reason;
use crate::run::identity::{self, Origin};
use crate::run::own_namespaces::own_namespaces;
use crate::run::restart;
use crate::run::settings::Settings;
use crate::start::StartAt;
use crate::storage::{CheckpointStorage, Claim, ClaimOutcome, Record, Source, StartPosition};

/// What a start needs to know.
pub(crate) struct Starting<'a, M, S> {
    pub(crate) id: &'a SubscriptionId,
    pub(crate) model: &'a M,
    pub(crate) storage: &'a S,
    pub(crate) plan: Plan,
    pub(crate) start_at: &'a StartAt,
    pub(crate) settings: &'a Settings,
    /// The line that lists the settings.
    pub(crate) described: &'a str,
    /// One for every try: a claim whose reply was lost is made again by the same owner.
    pub(crate) owner: Owner,
    pub(crate) in_the_way: InTheWay,
    /// Positions are to be stored in transactions with the handler's effects.
    pub(crate) transactional: bool,
}

/// What a start waits for at the moment: the reason when its time is over.
pub(crate) struct InTheWay(Mutex<Reason>);

impl Default for InTheWay {
    fn default() -> Self {
        Self(Mutex::new(Reason::SourceUnavailable { message: NO_ANSWER.into() }))
    }
}

impl InTheWay {
    fn set(&self, reason: Reason) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = reason;
    }

    fn get(&self) -> Reason {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

const NO_ANSWER: &str = "no answer yet";

/// What a start has done: the cursor is open, the id claimed, the start stored if it was to be.
pub(crate) struct Started<M: SubscriptionModel> {
    pub(crate) reader: M::Reader,
    pub(crate) plan: Plan,
    pub(crate) ownership: Ownership,
    pub(crate) epoch: Epoch,
    /// Where the reader stands; none only for a source that tells no time.
    pub(crate) from: Option<Checkpoint>,
    /// The record, if its position is where the reader stands.
    pub(crate) stored: Option<Record>,
    pub(crate) pipeline: Fingerprint,
    pub(crate) source: Source,
    /// Events up to this head may have been handled before.
    pub(crate) repeats_until: Option<Checkpoint>,
    /// The gaps that its record has.
    pub(crate) gaps: Vec<Gap>,
    /// This start has recorded the last of them.
    pub(crate) has_gap: bool,
}

/// Why one try failed.
pub(crate) enum Failed {
    /// It may heal; tried again until the start's time is over.
    Retry(Reason),
    Refused(Reason),
    Config(SubscribeError),
}

impl From<SourceError> for Failed {
    fn from(error: SourceError) -> Self {
        if error.is_retryable() { Self::Retry(error.reason()) } else { Self::Refused(error.reason()) }
    }
}

impl From<StorageError> for Failed {
    fn from(error: StorageError) -> Self {
        if error.is_retryable() { Self::Retry(error.reason()) } else { Self::Refused(error.reason()) }
    }
}

impl From<Reason> for Failed {
    fn from(reason: Reason) -> Self {
        Self::Refused(reason)
    }
}

/// The position a start settled on, before anything is opened.
pub(crate) struct Settled {
    pub(crate) position: Option<Checkpoint>,
    /// It is the stored one.
    pub(crate) resumed: bool,
    /// It is to be stored by the claim.
    record: bool,
    /// It is a new start behind lost history: to be stored behind the claim, before anything is read.
    pub(crate) gap: Option<Gap>,
}

impl<M: SubscriptionModel, S: CheckpointStorage> Starting<'_, M, S> {
    /// Tries until it has started, is refused, or its time is over.
    pub(crate) async fn run(self) -> Result<Started<M>, SubscribeError> {
        let pipeline = self.model.check(&self.plan)?;
        let deadline = Instant::now() + self.settings.start_timeout;
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
        loop {
            match tokio::time::timeout_at(deadline, self.once(&pipeline)).await {
                Ok(Ok(started)) => return Ok(started),
                Ok(Err(Failed::Refused(reason))) => {
                    return Err(SubscribeError::Refused { id: self.id.clone(), reason });
                }
                Ok(Err(Failed::Config(error))) => return Err(error),
                Ok(Err(Failed::Retry(reason))) => {
                    let id = self.id;
                    warn!(subscription = %id, reason = reason.name(), "subscription {id} is not started yet: {reason}");
                    self.in_the_way.set(reason);
                }
                Err(_) => return Err(self.timed_out()),
            }
            let next = Instant::now() + backoff.next_wait();
            if next >= deadline {
                tokio::time::sleep_until(deadline).await;
                return Err(self.timed_out());
            }
            tokio::time::sleep_until(next).await;
        }
    }

    fn timed_out(&self) -> SubscribeError {
        SubscribeError::TimedOut { id: self.id.clone(), last: self.in_the_way.get() }
    }

    pub(crate) async fn ask_source<T>(&self, call: impl Future<Output = Result<T, SourceError>>) -> Result<T, Failed> {
        self.in_the_way.set(Reason::SourceUnavailable { message: NO_ANSWER.into() });
        Ok(call.await?)
    }

    pub(crate) async fn ask_storage<T>(
        &self,
        call: impl Future<Output = Result<T, StorageError>>,
    ) -> Result<T, Failed> {
        self.in_the_way.set(Reason::StorageUnavailable { message: NO_ANSWER.into() });
        Ok(call.await?)
    }

    async fn once(&self, pipeline: &Fingerprint) -> Result<Started<M>, Failed> {
        let before = self.ask_storage(self.storage.read(self.id)).await?;
        let identity = self.ask_source(self.model.identity()).await?;
        if self.transactional {
            self.is_one_deployment(&identity).await?;
        }
        let plan = self.leave_out(&identity).await?;
        let mut settled = self.settle(before.as_ref()).await?;
        let (reader, opened_at) = match self.verify_and_open(&settled, before.as_ref(), &identity, &plan).await {
            Err(Failed::Refused(lost @ Reason::HistoryLost { .. })) => {
                let begun = self.begin_again(lost, &mut settled, before.as_ref(), &plan).await?;
                settled.position = Some(begun.position);
                (begun.reader, None)
            }
            opened => opened?,
        };
        let from = settled.position.clone().or(opened_at);
        // Asked before the claim: an error must leave the record and its owner as they are.
        let head = self.ask_source(self.model.head()).await?;
        let mut record = self.claim(&settled, from.as_ref(), pipeline, &identity).await?;
        let ownership = record.ownership.clone().ok_or_else(|| unowned(self.id))?;
        let (reader, from) = self.agree(reader, from, &settled, &record, &plan).await?;
        let follows_clean_end = self.follows_clean_end(before.as_ref(), &record);
        let epoch = epoch(&record, from.as_ref(), &settled);
        if let (Some(gap), Some(position)) = (&settled.gap, &from) {
            self.store_gap(gap, position, epoch, pipeline, &identity, before.as_ref(), &mut record).await?;
        }
        let is_stored = record.position.is_some() && record.position == from && self.is_stored_or();
        let stored = is_stored.then(|| record.clone());
        let started = Started {
            epoch,
            repeats_until: (!follows_clean_end).then_some(head),
            gaps: record.gaps.clone(),
            has_gap: settled.gap.is_some(),
            source: identity::source(&identity, stored.as_ref()),
            pipeline: pipeline.clone(),
            stored,
            reader,
            plan,
            ownership,
            from,
        };
        self.say(&started, before.as_ref(), &record, &identity);
        Ok(started)
    }

    fn is_stored_or(&self) -> bool {
        matches!(self.start_at, StartAt::StoredOr(_))
    }

    /// A scope around the storages' own collections leaves them out, or it would feed on its own writes for ever.
    async fn leave_out(&self, identity: &Identity) -> Result<Plan, Failed> {
        let mut plan = self.plan.clone();
        let own = own_namespaces(self.storage, self.settings.dead_letters.as_deref(), identity);
        plan.leave_out.extend(self.ask_storage(own).await?);
        match (&identity.scope, plan.leave_out.len() > self.plan.leave_out.len()) {
            (Scope::Collection(collection), true) => Err(Failed::Config(SubscribeError::Config {
                field: "model",
                message: format!(
                    "{collection} holds the checkpoints or dead letters: a subscription to it would feed on its own writes"
                ),
            })),
            _ => Ok(plan),
        }
    }

    /// Which position to open at, by the start table.
    async fn settle(&self, record: Option<&Record>) -> Result<Settled, Failed> {
        let (start, record_it) = match self.start_at {
            StartAt::StoredOr(start) => {
                if let Some(position) = record.and_then(|record| record.position.clone()) {
                    return Ok(Settled { position: Some(position), resumed: true, record: false, gap: None });
                }
                (start, true)
            }
            StartAt::Always(start) => (start, false),
        };
        let position = self.ask_source(restart::position(self.model, start)).await?;
        // A start of the user's own is not recorded in any case, so that it cannot be is no reason to refuse.
        if position.is_none() && record_it && !self.settings.start_unrecorded {
            return Err(Reason::NoStartPosition.into());
        }
        Ok(Settled { position, resumed: false, record: record_it, gap: None })
    }

    async fn verify_and_open(
        &self,
        settled: &Settled,
        before: Option<&Record>,
        identity: &Identity,
        plan: &Plan,
    ) -> Result<(M::Reader, Option<Checkpoint>), Failed> {
        if let Some(position) = &settled.position {
            let record = before.filter(|_| settled.resumed);
            let origin = record.map_or_else(|| Origin::new(position, None), |record| Origin::stored(position, record));
            let ahead = |message| self.in_the_way.set(Reason::SourceUnavailable { message });
            self.ask_source(origin.verify(self.model, identity, ahead)).await?;
        }
        self.open(settled, plan).await
    }

    /// The open is the verdict on filter, rights and history. Opened at the server's now, the opening's own time is
    /// the position, and the cursor is opened once more there, so that nothing in between can slide away.
    async fn open(&self, settled: &Settled, plan: &Plan) -> Result<(M::Reader, Option<Checkpoint>), Failed> {
        let reader = self.ask_source(self.model.open(settled.position.as_ref(), plan)).await?;
        if settled.position.is_some() {
            return Ok((reader, None));
        }
        let Some(at) = reader.opened_at() else {
            let id = self.id;
            warn!(
                subscription = %id,
                "subscription {id} starts with nothing stored: the source sends no time, and what changes before its \
                 first settled event is lost if it pauses or ends before"
            );
            return Ok((reader, None));
        };
        Ok((self.ask_source(self.model.open(Some(&at), plan)).await?, Some(at)))
    }

    async fn claim(
        &self,
        settled: &Settled,
        from: Option<&Checkpoint>,
        pipeline: &Fingerprint,
        identity: &Identity,
    ) -> Result<Record, Failed> {
        let start = from.filter(|_| settled.record).map(|position| StartPosition {
            position: position.clone(),
            pipeline: Some(pipeline.clone()),
            source: Some(Source::from(identity)),
        });
        let claim = Claim { id: self.id.clone(), owner: self.owner.clone(), expect: None, start };
        match self.ask_storage(self.storage.claim(&claim)).await? {
            // Deleted since it was read: a new start, which is to be stored like any other.
            ClaimOutcome::Claimed(record) if settled.resumed && record.position.is_none() => {
                Err(Failed::Retry(Reason::Deleted))
            }
            ClaimOutcome::Claimed(record) => Ok(record),
            ClaimOutcome::Superseded { owner, since } => Err(Reason::Superseded { owner, since }.into()),
            ClaimOutcome::Gone => Err(Reason::Deleted.into()),
        }
    }

    /// The one stored first wins: if another position than ours is stored, the cursor is opened there.
    async fn agree(
        &self,
        reader: M::Reader,
        from: Option<Checkpoint>,
        settled: &Settled,
        record: &Record,
        plan: &Plan,
    ) -> Result<(M::Reader, Option<Checkpoint>), Failed> {
        match &record.position {
            Some(stored) if (settled.record || settled.resumed) && Some(stored) != from.as_ref() => {
                drop(reader);
                match self.ask_source(self.model.open(Some(stored), plan)).await {
                    // The next try meets it as the stored position, and does as the policy says.
                    Err(Failed::Refused(lost @ Reason::HistoryLost { .. })) => Err(Failed::Retry(lost)),
                    reader => Ok((reader?, Some(stored.clone()))),
                }
            }
            _ => Ok((reader, from)),
        }
    }

    /// Whether no earlier or other run can have handed out what this one reads. `before` is what the record was when
    /// the start began; another process may have claimed it since.
    fn follows_clean_end(&self, before: Option<&Record>, record: &Record) -> bool {
        match before {
            // A start that this claim did not store tells of another run.
            None => record.saved_at.is_none() || record.saved_at == record.claimed_at,
            Some(before) => {
                let unmoved = before.position == record.position && before.saved_at == record.saved_at;
                before.clean && unmoved && self.is_stored_or()
            }
        }
    }

    /// Whether an earlier try of this start claimed the record, and its reply was lost.
    pub(crate) fn is_own(&self, record: &Record) -> bool {
        record.ownership.as_ref().is_some_and(|ownership| ownership.owner == self.owner)
    }
}

/// The epoch of the positions this run will store: the record's for a resume, a new one for every other start.
fn epoch(record: &Record, from: Option<&Checkpoint>, settled: &Settled) -> Epoch {
    let stored = record.epoch.map_or(0, |epoch| epoch.0);
    let resumes = (settled.resumed || settled.record) && record.position.is_some() && record.position.as_ref() == from;
    match record.epoch {
        Some(epoch) if resumes && record.is_behind_invalidate() => Epoch(epoch.0 + 1),
        Some(epoch) if resumes => epoch,
        _ => Epoch((stored + 1).max(record.claimed_at.map_or(0, bson::DateTime::timestamp_millis))),
    }
}

/// A storage that answers a claim without naming its owner breaks its contract.
pub(crate) fn unowned(id: &SubscriptionId) -> Reason {
    Reason::UnreadableRecord {
        id: id.to_string(),
        field: "mongosub.owner".into(),
        message: "is missing after a claim".into(),
    }
}
