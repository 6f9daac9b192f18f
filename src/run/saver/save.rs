//! What a saver's write says beside its position: where that comes from, what is noted with it, and which event is in hand;
//! and which of its writes were never answered for.

use std::sync::Arc;

use super::Saver;
use crate::checkpoint::{Checkpoint, Kind};
use crate::ids::Epoch;
use crate::model::Scope;
use crate::run::desk::View;
use crate::run::progress::Mark;
use crate::storage::{Hand, Record, Save};

/// So many of the newest are kept. A storage that fails for long gets few more before nothing is handed out any more.
const UNANSWERED: usize = 64;

impl<S> Saver<S> {
    /// The write that stores a position.
    pub(super) fn save(&mut self, mark: &Mark, view: &View, seen: Option<(u32, Arc<str>)>) -> Save {
        if let Some(resumed) = self.resumed.as_ref().filter(|_| mark.seq == 0) {
            return Save { clean: self.clean, hand: self.hand(view), ..resumed.clone() };
        }
        let jump = view.jumped.as_ref().filter(|(seq, _)| *seq <= mark.seq).map(|(_, jump)| jump);
        if let Some(jump) = jump {
            self.source_epoch = mark.epoch;
            self.template.source = jump.source.clone().or(self.template.source.take());
        }
        if let Some(source) = &mut self.template.source {
            // Behind an `invalidate` the collection is another one.
            if mark.epoch != self.source_epoch {
                (source.collection_uuid, self.source_epoch) = (None, mark.epoch);
            }
            source.see(&mark.position);
            if let (None, Some((epoch, uuid)), Scope::Collection(_)) = (&source.collection_uuid, seen, &source.scope)
                && epoch == mark.epoch
            {
                source.collection_uuid = Some(uuid.to_string());
            }
        }
        Save {
            epoch: Epoch(self.template.epoch.0 + i64::from(mark.epoch)),
            position: mark.position.clone(),
            kind: mark.kind,
            clean: self.clean,
            note: jump.map(|jump| jump.note.clone()),
            hand: self.hand(view),
            ..self.template.clone()
        }
    }

    /// Once the event that was noted is in hand no more, a save says so.
    fn hand(&self, view: &View) -> Hand {
        if self.noted && view.in_hand.is_none() { Hand::Empty } else { Hand::Unsaid }
    }

    /// A write failed, and may have been made all the same.
    pub(super) fn keep_unanswered(&mut self, mark: &Mark) {
        if self.unanswered.last() != Some(mark) {
            self.unanswered.push(mark.clone());
            self.unanswered.drain(..self.unanswered.len().saturating_sub(UNANSWERED));
        }
    }

    /// The mark of a position that was written and not answered for.
    pub(crate) fn unanswered(&self, position: &Checkpoint) -> Option<Mark> {
        self.unanswered.iter().find(|mark| mark.position == *position).cloned()
    }
}

/// The save that stores again what the record holds.
pub(super) fn as_stored(template: &Save, record: Record) -> Option<Save> {
    let position = record.position?;
    Some(Save {
        kind: record.kind.unwrap_or_else(|| Kind::of_event(&position)),
        epoch: record.epoch.unwrap_or(template.epoch),
        pipeline: record.pipeline,
        source: record.source,
        position,
        ..template.clone()
    })
}
