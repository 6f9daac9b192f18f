//! What can be kept of events that are skipped: they are read once more and put away as dead letters, before the position
//! moves. Called by a run that skips, at rest, and by `DurableSubscriptions` where nothing runs.

use std::sync::Arc;
use std::time::Duration;

use crate::checkpoint::Checkpoint;
use crate::dead_letter::DynDeadLetterStorage;
use crate::error::{SourceError, StorageError};
use crate::event::ChangeEvent;
use crate::ids::{Epoch, SubscriptionId};
use crate::letter::{DocumentKey, NewLetter, PutOutcome};
use crate::model::{Plan, Read, Reader, SubscriptionModel};
use crate::reason::Reason;
use crate::run::skip::{Skip, Unfit};

/// How long reading the skipped events once more, and keeping them, may take.
pub(crate) const KEPT_WITHIN: Duration = Duration::from_secs(60);
/// After so long without a read, at the end of the oplog, nothing more comes before a position that is not ahead of it.
const NOTHING_MORE: Duration = Duration::from_secs(1);

/// Where skipped events are kept.
pub(crate) struct Keeping<M> {
    pub(crate) model: M,
    pub(crate) plan: Plan,
    pub(crate) storage: Arc<dyn DynDeadLetterStorage>,
    pub(crate) id: SubscriptionId,
    pub(crate) epoch: Epoch,
}

impl<M: SubscriptionModel> Keeping<M> {
    /// Keeps the events behind `from`, up to and with that at the position skipped to. Of one that the source cannot send
    /// its outline is kept; of history that it no longer has, nothing. Made again, each is kept once.
    ///
    /// # Errors
    /// Why it could not be done; some may be kept then.
    pub(crate) async fn keep(&self, from: &Checkpoint, skip: &Skip) -> Result<(), Unfit> {
        let mut from = from.clone();
        while skip.through.is_beyond(&from) {
            let unsent = match self.keep_what_comes(&mut from, skip).await {
                Err(Unfit::Source(SourceError::Refused(
                    Reason::EventTooLarge { position } | Reason::ImageMissing { position, .. },
                ))) if position.is_beyond(&from) && !position.is_beyond(&skip.through) => position,
                Ok(true) | Err(Unfit::Source(SourceError::Refused(Reason::HistoryLost { .. }))) => return Ok(()),
                Err(unfit) => return Err(unfit),
                // A feed has ended, and goes on behind its end.
                Ok(false) => continue,
            };
            if let Some(outline) = self.model.outline(&unsent).await? {
                self.put(&outline, &unsent, skip).await?;
            }
            from = unsent;
        }
        Ok(())
    }

    /// Answers whether everything up to the position has come.
    async fn keep_what_comes(&self, from: &mut Checkpoint, skip: &Skip) -> Result<bool, Unfit> {
        let mut reader = self.model.open(Some(from), &self.plan).await?;
        let state = reader.state();
        let begun = from.clone();
        while skip.through.is_beyond(from) {
            let Ok(read) = tokio::time::timeout(NOTHING_MORE, reader.next()).await else {
                if state.borrow().at_end {
                    return Ok(true);
                }
                continue;
            };
            match read {
                Some(Ok(Read::Event { position, .. })) if position.is_beyond(&skip.through) => return Ok(true),
                Some(Ok(Read::Event { event, position })) => {
                    self.put(&event, &position, skip).await?;
                    *from = position;
                }
                Some(Ok(Read::Quiet(position))) => *from = position,
                Some(Err(error)) => return Err(error.into()),
                None => return Ok(*from == begun),
            }
        }
        Ok(true)
    }

    async fn put(&self, event: &ChangeEvent, position: &Checkpoint, skip: &Skip) -> Result<(), Unfit> {
        let key = DocumentKey::of(event);
        let letter = NewLetter::parked(self.id.clone(), key, self.epoch, position.clone(), event.bytes().clone());
        let error = vec![format!("skipped by hand: {}", skip.reason)];
        let letter = letter.failed(0, error, Duration::ZERO, Duration::ZERO);
        let refuse = |error: &dyn std::fmt::Display| {
            Unfit::Asked("through", format!("the event at {position} could not be kept as a dead letter: {error}"))
        };
        match self.storage.dyn_put(&letter).await.map_err(|error: StorageError| refuse(&error))? {
            PutOutcome::Full(_) => Err(refuse(&"there is no more room")),
            _ => Ok(()),
        }
    }
}
