//! A small storage that can be broken in one way at a time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use mongosub::bson::DateTime;
use mongosub::{
    CheckpointStorage, Claim, ClaimOutcome, Epoch, Fence, Hand, Kind, Owner, Ownership, Record, Save, SaveOutcome,
    StorageError, SubscriptionId,
};

/// What is wrong with it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Fault {
    /// It answers that all is well, and stores nothing.
    DoesNothing,
    /// Anybody saves.
    ForgetsTheFence,
    /// Whoever has the fence saves.
    ForgetsTheOwner,
    /// Any position is stored.
    GoesBackwards,
    /// Positions are compared across epochs.
    ForgetsTheEpoch,
    /// A save makes the record.
    UpsertsOnSave,
    /// An owner deletes another one's record.
    DeletesForAnybody,
    /// With the record goes the memory of its fence.
    CountsAnewAfterADelete,
    /// A claim overwrites the stored position with its start.
    LastStartWins,
    /// A claim leaves `clean` set.
    KeepsClean,
    /// A save forgets the notes before it.
    ForgetsNotes,
    /// A note of a save that is made again is there twice.
    NotesTwice,
    /// A note is kept though the save is refused.
    NotesInVain,
    /// Every note is kept for ever.
    KeepsEveryNote,
    /// A claim does not count how the owner before it ended.
    CountsNoEnds,
    /// What an owner has stored does not matter to how it ended.
    ForgetsProgress,
    /// What was stored before an owner's claim is its own too.
    TakesOldProgressForNew,
    /// A clean end is one like others.
    CountsCleanEnds,
    /// A claim made again counts the end of its own owner.
    CountsItsOwnEnd,
    /// A claim that expects its predecessor counts its end.
    CountsExpectedEnds,
    /// With a note of an event in hand its position is stored.
    HoldingStores,
    /// Anybody notes an event in hand.
    HoldsForAnybody,
    /// An event in hand is noted beside any position.
    HoldsBehind,
    /// The event in hand has no death.
    ForgetsDeaths,
    /// A save that says nothing of the event in hand removes it.
    EmptiesUnsaid,
    /// A save does not remove the event in hand.
    NeverEmpties,
    /// Nothing is ever taken back.
    TakesNothingBack,
    /// Of one end more than one is taken back.
    TakesBackTwice,
    /// Whoever lives, one end is taken back.
    TakesBackForAnybody,
    /// One less than none is the most.
    TakesBackBelowNone,
    /// A clean end is taken back.
    TakesBackCleanEnds,
    /// Who lives has a record again.
    TakingBackMakesARecord,
}

#[derive(Debug, Clone)]
pub(super) struct Broken {
    fault: Option<Fault>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    records: BTreeMap<SubscriptionId, Record>,
    /// Counts claims and saves, and serves as the clock too.
    count: i64,
    /// Whose end the last claim has counted.
    accused: BTreeMap<SubscriptionId, Fence>,
}

impl Broken {
    pub(super) fn new(fault: Option<Fault>) -> Self {
        Self { fault, state: Arc::default() }
    }

    fn is(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// Counts how the owner of the record ended. Answers whose end may be taken back.
    fn count_end(&self, record: &mut Record) -> Option<Fence> {
        let before = record.ownership.as_ref()?.fence;
        if record.clean && !self.is(Fault::CountsCleanEnds) {
            record.unclean_ends = 0;
            return self.is(Fault::TakesBackCleanEnds).then_some(before);
        }
        let has_stored = match self.fault {
            Some(Fault::ForgetsProgress | Fault::CountsCleanEnds) => false,
            Some(Fault::TakesOldProgressForNew) => record.saved_at.is_some(),
            _ => record.saved_at > record.claimed_at,
        };
        record.unclean_ends = if has_stored { 0 } else { record.unclean_ends + 1 };
        if let Some(in_hand) = record.in_hand.as_mut().filter(|_| !self.is(Fault::ForgetsDeaths)) {
            in_hand.deaths += 1;
        }
        Some(before)
    }

    fn one_less(&self, count: u32) -> u32 {
        if self.is(Fault::TakesBackBelowNone) { count.wrapping_sub(1) } else { count.saturating_sub(1) }
    }
}

fn owner_of(record: &Record) -> Option<Owner> {
    record.ownership.as_ref().map(|ownership| ownership.owner.clone())
}

impl CheckpointStorage for Broken {
    async fn read(&self, id: &SubscriptionId) -> Result<Option<Record>, StorageError> {
        Ok(self.state.lock().unwrap().records.get(id).cloned())
    }

    async fn claim(&self, claim: &Claim) -> Result<ClaimOutcome, StorageError> {
        let State { records, count, accused } = &mut *self.state.lock().unwrap();
        *count += 1;
        let ownership = Ownership { fence: Fence(*count), owner: claim.owner.clone() };
        if self.is(Fault::DoesNothing) {
            let mut record = Record::empty(claim.id.clone());
            record.ownership = Some(ownership);
            return Ok(ClaimOutcome::Claimed(record));
        }
        if let Some(expected) = &claim.expect {
            let Some(record) = records.get(&claim.id) else { return Ok(ClaimOutcome::Gone) };
            if owner_of(record).as_ref() == Some(&claim.owner) {
                return Ok(ClaimOutcome::Claimed(record.clone()));
            }
            if record.ownership.as_ref() != Some(expected) {
                return Ok(ClaimOutcome::Superseded { owner: owner_of(record), since: record.claimed_at });
            }
        }
        let record = records.entry(claim.id.clone()).or_insert_with(|| Record::empty(claim.id.clone()));
        let is_own = owner_of(record).as_ref() == Some(&claim.owner);
        let counts = (claim.expect.is_none() || self.is(Fault::CountsExpectedEnds))
            && (!is_own || self.is(Fault::CountsItsOwnEnd))
            && !self.is(Fault::CountsNoEnds);
        if counts {
            accused.remove(&claim.id);
            accused.extend(self.count_end(record).map(|over| (claim.id.clone(), over)));
        }
        record.ownership = Some(ownership);
        record.claimed_at = Some(DateTime::from_millis(*count));
        record.clean &= self.is(Fault::KeepsClean);
        if let Some(start) = &claim.start
            && (record.position.is_none() || self.is(Fault::LastStartWins))
        {
            record.position = Some(start.position.clone());
            record.kind = Some(Kind::Start);
            record.epoch = Some(Epoch(*count));
            record.cluster_time = start.position.cluster_time();
            record.saved_at = record.claimed_at;
            record.pipeline.clone_from(&start.pipeline);
            record.source.clone_from(&start.source);
        }
        Ok(ClaimOutcome::Claimed(record.clone()))
    }

    async fn save(&self, save: &Save) -> Result<SaveOutcome, StorageError> {
        let State { records, count, .. } = &mut *self.state.lock().unwrap();
        *count += 1;
        let at = Some(DateTime::from_millis(*count));
        if self.is(Fault::DoesNothing) {
            return Ok(SaveOutcome::Saved { at });
        }
        if self.is(Fault::UpsertsOnSave) {
            records.entry(save.id.clone()).or_insert_with(|| {
                let mut record = Record::empty(save.id.clone());
                record.ownership = Some(save.ownership.clone());
                record
            });
        }
        let Some(record) = records.get_mut(&save.id) else { return Ok(SaveOutcome::Gone) };
        let holds = matches!(save.hand, Hand::Holds(_));
        let may = match self.fault {
            Some(Fault::ForgetsTheFence) => true,
            Some(Fault::HoldsForAnybody) if holds => true,
            Some(Fault::ForgetsTheOwner) => record.ownership.as_ref().is_some_and(|own| own.fence == save.fence()),
            _ => record.ownership.as_ref() == Some(&save.ownership),
        };
        if !may {
            return Ok(SaveOutcome::Superseded { owner: owner_of(record), since: record.claimed_at });
        }
        let forward = |stored: &Record| {
            stored
                .position
                .as_ref()
                .is_none_or(|position| position.position_cmp(&save.position).is_none_or(std::cmp::Ordering::is_le))
        };
        let ahead = match record.epoch {
            _ if self.is(Fault::GoesBackwards) || (holds && self.is(Fault::HoldsBehind)) => true,
            Some(epoch) if epoch == save.epoch || self.is(Fault::ForgetsTheEpoch) => forward(record),
            Some(epoch) => epoch < save.epoch,
            None => true,
        };
        if !ahead {
            if let Some(note) = save.note.as_ref().filter(|_| self.is(Fault::NotesInVain)) {
                record.note(note, DateTime::from_millis(*count));
            }
            return Ok(SaveOutcome::NotAhead);
        }
        match &save.hand {
            Hand::Holds(in_hand) => {
                record.in_hand = Some(in_hand.clone());
                if !self.is(Fault::HoldingStores) {
                    return Ok(SaveOutcome::Saved { at: record.saved_at });
                }
            }
            Hand::Empty if !self.is(Fault::NeverEmpties) => record.in_hand = None,
            Hand::Unsaid if self.is(Fault::EmptiesUnsaid) => record.in_hand = None,
            _ => {}
        }
        if self.is(Fault::ForgetsNotes) {
            (record.gaps, record.skips) = (Vec::new(), Vec::new());
        }
        if let Some(note) = &save.note {
            let before = (record.gaps.clone(), record.skips.clone());
            record.note(note, DateTime::from_millis(*count));
            let is_new = (&record.gaps, &record.skips) != (&before.0, &before.1);
            if self.is(Fault::NotesTwice) || (self.is(Fault::KeepsEveryNote) && is_new) {
                let mut alone = Record::empty(save.id.clone());
                alone.note(note, DateTime::from_millis(*count));
                record.gaps = before.0.into_iter().chain(alone.gaps).collect();
                record.skips = before.1.into_iter().chain(alone.skips).collect();
            }
        }
        record.position = Some(save.position.clone());
        record.kind = Some(save.kind);
        record.epoch = Some(save.epoch);
        record.cluster_time = save.position.cluster_time();
        record.saved_at = at;
        record.pipeline.clone_from(&save.pipeline);
        record.source.clone_from(&save.source);
        record.clean = save.clean;
        Ok(SaveOutcome::Saved { at })
    }

    async fn delete(&self, id: &SubscriptionId, owner: Option<&Ownership>) -> Result<bool, StorageError> {
        let State { records, count, .. } = &mut *self.state.lock().unwrap();
        let Some(record) = records.get(id) else { return Ok(false) };
        if owner.is_some() && record.ownership.as_ref() != owner && !self.is(Fault::DeletesForAnybody) {
            return Ok(false);
        }
        records.remove(id);
        if self.is(Fault::CountsAnewAfterADelete) {
            *count = 0;
        }
        Ok(true)
    }

    async fn list(&self) -> Result<Vec<String>, StorageError> {
        Ok(self.state.lock().unwrap().records.keys().map(ToString::to_string).collect())
    }

    async fn not_dead(&self, id: &SubscriptionId, superseded: &Ownership) -> Result<(), StorageError> {
        let State { records, accused, .. } = &mut *self.state.lock().unwrap();
        if self.is(Fault::TakingBackMakesARecord) {
            records.entry(id.clone()).or_insert_with(|| Record::empty(id.clone()));
        }
        let Some(record) = records.get_mut(id) else { return Ok(()) };
        let may = accused.get(id).is_some_and(|over| *over == superseded.fence || self.is(Fault::TakesBackForAnybody));
        if may && !self.is(Fault::TakesNothingBack) {
            record.unclean_ends = self.one_less(record.unclean_ends);
            if let Some(in_hand) = &mut record.in_hand {
                in_hand.deaths = self.one_less(in_hand.deaths);
            }
            if !self.is(Fault::TakesBackTwice) {
                accused.remove(id);
            }
        }
        Ok(())
    }
}
