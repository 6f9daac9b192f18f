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

/// Opens behind `from`, however often it takes.
///
/// # Errors
/// The reason, when the source refuses for good.
pub(crate) async fn again<M: SubscriptionModel>(
    opening: &Opening<M>,
    from: Option<&Checkpoint>,
    board: &Board,
) -> Result<M::Reader, Reason> {
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
    let mut repeats = Repeats::default();
    loop {
        let error = match opening.model.open(from, &opening.plan).await {
            Ok(reader) => {
                board.set(|conditions| conditions.source = None);
                return Ok(reader);
            }
            Err(SourceError::Refused(reason)) => return Err(reason),
            Err(error) => error,
        };
        if repeats.is_due() {
            let (id, failures) = (&opening.id, repeats.count());
            warn!(subscription = %id, failures, "subscription {id} cannot open its cursor: {error}");
        }
        board.set(|conditions| conditions.source = Some(error.reason()));
        let wait = match error {
            SourceError::Unauthorized { .. } => UNAUTHORIZED_AGAIN,
            _ => backoff.next_wait(),
        };
        tokio::time::sleep(wait).await;
    }
}
