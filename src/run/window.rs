//! Asks, beside a run, whether the source can be read as far back as quiet positions need, and warns when it cannot.

use std::time::Duration;

use bson::Timestamp;
use tracing::warn;

use crate::checkpoint::Checkpoint;
use crate::error::SourceError;
use crate::ids::SubscriptionId;
use crate::model::SubscriptionModel;
use crate::status::{Board, State};

/// The beginning of time: a source that has never dropped anything can be opened there, however young it is.
const BEGINNING: Timestamp = Timestamp { time: 1, increment: 1 };

/// Looks beside a run, and ends with it, since its handles and tasks hold the other ends of its status.
pub(crate) fn look_beside<M: SubscriptionModel>(board: &Board, id: SubscriptionId, model: M, interval: Duration) {
    let mut status = board.subscribe();
    tokio::spawn(async move {
        tokio::select! {
            () = warn_when_short(id, model, interval) => {}
            _ = status.wait_for(|status| matches!(status.state, State::Stopped(_))) => {}
        }
    });
}

/// Warns when the quiet interval is over half of the readable oplog window. A source that does not tell is not warned
/// about: what ails it shows elsewhere.
async fn warn_when_short<M: SubscriptionModel>(id: SubscriptionId, model: M, interval: Duration) {
    if let Ok(true) = is_short(&model, interval).await {
        let interval = interval.as_secs();
        warn!(
            subscription = %id, interval,
            "subscription {id} stores a quiet position every {interval} s, and the oplog reaches back less than {} s: \
             when quiet for long it can lose its place; make the oplog larger or the interval shorter", interval * 2
        );
    }
}

/// Two cheap questions instead of a search for the oldest position.
async fn is_short<M: SubscriptionModel>(model: &M, interval: Duration) -> Result<bool, SourceError> {
    let Some(head) = model.head().await?.cluster_time() else { return Ok(false) };
    let twice = u32::try_from(interval.as_secs().saturating_mul(2)).unwrap_or(u32::MAX);
    let far_back = Timestamp { time: head.time.saturating_sub(twice).max(BEGINNING.time), increment: 1 };
    Ok(!model.is_readable(&Checkpoint::Time(far_back)).await?
        && !model.is_readable(&Checkpoint::Time(BEGINNING)).await?)
}
