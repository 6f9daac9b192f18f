//! Opens a reader again for a run that goes on: tries until it opens, or until the source refuses for good.

use std::time::Duration;

use tracing::warn;

use crate::backoff::Backoff;
use crate::checkpoint::Checkpoint;
use crate::error::SourceError;
use crate::ids::SubscriptionId;
use crate::model::{Plan, SubscriptionModel};
use crate::reason::Reason;
use crate::run::repeats::Repeats;
use crate::status::Board;

/// How often a missing privilege is asked for again.
const UNAUTHORIZED_AGAIN: Duration = Duration::from_secs(10);

/// What a run opens.
#[derive(Debug, Clone)]
pub(crate) struct Opening<M> {
    pub(crate) id: SubscriptionId,
    pub(crate) model: M,
    pub(crate) plan: Plan,
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

    /// Opens behind `from`, however often it takes.
    ///
    /// # Errors
    /// The reason, when the source refuses for good.
    pub(crate) async fn open<M: SubscriptionModel>(
        &mut self,
        opening: &Opening<M>,
        from: Option<&Checkpoint>,
        board: &Board,
    ) -> Result<M::Reader, Reason> {
        loop {
            let error = match self.broken.take() {
                Some(error) => error,
                None => match opening.model.open(from, &opening.plan).await {
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
