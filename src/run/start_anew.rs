//! A start whose stored position is lost with the history behind it: where it begins instead, and how that is stored.

use crate::audit::{Gap, Note};
use crate::checkpoint::{Checkpoint, Kind};
use crate::ids::Epoch;
use crate::model::{Fingerprint, Identity, Plan, SubscriptionModel};
use crate::reason::Reason;
use crate::run::changes::OnHistoryLost;
use crate::run::restart::{self, Begun, EARLIEST_TRIES, say_restarts};
use crate::run::start::{Failed, Settled, Starting, unowned};
use crate::start::{Start, StartAt};
use crate::storage::{CheckpointStorage, Record, Save, SaveOutcome, Source};

impl<M: SubscriptionModel, S: CheckpointStorage> Starting<'_, M, S> {
    /// The history behind the position is lost. Opens at another start, if that may be.
    pub(crate) async fn begin_again(
        &self,
        lost: Reason,
        settled: &mut Settled,
        before: Option<&Record>,
        plan: &Plan,
    ) -> Result<Begun<M::Reader>, Failed> {
        let (StartAt::StoredOr(chosen) | StartAt::Always(chosen)) = self.start_at;
        let try_at = |start, was, tries| self.ask_source(restart::begin(self.model, plan, start, was, tries));
        match (&self.settings.on_history_lost, before, &settled.position) {
            // The oplog was cut between asking and opening.
            (_, _, _) if !settled.resumed && *chosen == Start::Earliest => {
                try_at(&Start::Earliest, None, EARLIEST_TRIES - 1).await
            }
            (OnHistoryLost::RestartAt(start), Some(record), Some(from)) if settled.resumed && !record.is_at_gap() => {
                let begun = try_at(start, record.source.as_ref(), EARLIEST_TRIES).await?;
                let scope = begun.source.scope.clone();
                settled.gap = Some(Gap::new(from.clone(), begun.position.clone(), scope));
                settled.resumed = false;
                Ok(begun)
            }
            _ => Err(lost.into()),
        }
    }

    /// Stores a new start behind lost history, and takes it into the record.
    #[allow(clippy::too_many_arguments, reason = "everything that is stored, and what it is compared with")]
    pub(crate) async fn store_gap(
        &self,
        gap: &Gap,
        position: &Checkpoint,
        epoch: Epoch,
        pipeline: &Fingerprint,
        identity: &Identity,
        before: Option<&Record>,
        record: &mut Record,
    ) -> Result<(), Failed> {
        let place = |record: &Record| (record.position.clone(), record.epoch);
        if before.map(place) != Some(place(record)) {
            let message = "another process has moved its stored position".into();
            return Err(Failed::Retry(Reason::StorageUnavailable { message }));
        }
        say_restarts(self.id, gap);
        let ownership = record.ownership.clone().ok_or_else(|| unowned(self.id))?;
        let save = Save {
            kind: Kind::Start,
            pipeline: Some(pipeline.clone()),
            source: Some(Source::from(identity)),
            note: Some(Note::Gap(gap.clone())),
            ..Save::new(self.id.clone(), ownership, epoch, position.clone())
        };
        match self.ask_storage(self.storage.save(&save)).await? {
            SaveOutcome::Saved { at } => {
                record.note(&Note::Gap(gap.clone()), at.unwrap_or_else(bson::DateTime::now));
                (record.position, record.kind, record.epoch) = (Some(save.position), Some(save.kind), Some(epoch));
                (record.pipeline, record.source, record.saved_at) = (save.pipeline, save.source, at);
                record.cluster_time = position.cluster_time();
                Ok(())
            }
            SaveOutcome::NotAhead => {
                let message = "its stored position is of a later epoch".into();
                Err(Failed::Retry(Reason::StorageUnavailable { message }))
            }
            SaveOutcome::Superseded { owner, since } => Err(Reason::Superseded { owner, since }.into()),
            SaveOutcome::Gone => Err(Failed::Retry(Reason::Deleted)),
        }
    }
}
