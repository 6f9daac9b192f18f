//! Opens a reader again for a run that goes on: tries until it opens, or until the source refuses for good.

use std::time::Duration;

use tracing::warn;

use crate::backoff::Backoff;
use crate::checkpoint::Checkpoint;
use crate::error::SourceError;
use crate::ids::SubscriptionId;
use crate::model::{Plan, SubscriptionModel};
use crate::reason::Reason;
use crate::run::identity::Origin;
use crate::run::repeats::Repeats;
use crate::status::Board;
use crate::storage::Source;

/// How often a missing privilege is asked for again.
pub(crate) const UNAUTHORIZED_AGAIN: Duration = Duration::from_secs(10);

/// What a run opens.
#[derive(Debug, Clone)]
pub(crate) struct Opening<M> {
    pub(crate) id: SubscriptionId,
    pub(crate) model: M,
    pub(crate) plan: Plan,
}

impl<M: SubscriptionModel> Opening<M> {
    async fn open(
        &self,
        from: Option<&Checkpoint>,
        was: Option<&Source>,
        board: &Board,
    ) -> Result<M::Reader, SourceError> {
        if let (Some(position), Some(was)) = (from, was) {
            let waits = |message| {
                let reason = Reason::SourceUnavailable { message };
                board.set(|conditions| conditions.opening = Some(reason));
            };
            let identity = self.model.identity().await?;
            Origin::new(position, Some(was)).verify(&self.model, &identity, waits).await?;
        }
        self.model.open(from, &self.plan).await
    }
}

/// Opening again, with the patience it takes: a run keeps one, so that a source whose readers break at once is not
/// asked without a pause.
#[derive(Debug)]
pub(crate) struct Again {
    backoff: Backoff,
    repeats: Repeats,
    /// Why the last reader was left.
    broken: Option<SourceError>,
}

impl Default for Again {
    fn default() -> Self {
        let backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
        Self { backoff, repeats: Repeats::default(), broken: None }
    }
}

impl Again {
    /// A reader broke; `has_read` when it had read something before.
    pub(crate) fn broken(&mut self, error: SourceError, has_read: bool) {
        if has_read {
            self.backoff.reset();
            self.repeats.reset();
        }
        self.broken = Some(error);
    }

    /// Opens behind `from`, however often it takes. With `was`, where that position came from, it is verified first that
    /// the source is still the same.
    ///
    /// # Errors
    /// The reason, when the source refuses for good.
    pub(crate) async fn open<M: SubscriptionModel>(
        &mut self,
        opening: &Opening<M>,
        from: Option<&Checkpoint>,
        was: Option<&Source>,
        board: &Board,
    ) -> Result<M::Reader, Reason> {
        loop {
            let error = match self.broken.take() {
                Some(error) => error,
                None => match opening.open(from, was, board).await {
                    Ok(reader) => {
                        board.set(|conditions| conditions.opening = None);
                        return Ok(reader);
                    }
                    Err(SourceError::Refused(reason)) => return Err(reason),
                    Err(error) => error,
                },
            };
            if self.repeats.is_due() {
                let (id, failures) = (&opening.id, self.repeats.count());
                warn!(subscription = %id, failures, "subscription {id} has no cursor: {error}");
            }
            board.set(|conditions| conditions.opening = Some(error.reason()));
            let wait = match error {
                SourceError::Unauthorized { .. } => UNAUTHORIZED_AGAIN,
                _ => self.backoff.next_wait(),
            };
            tokio::time::sleep(wait).await;
        }
    }
}
