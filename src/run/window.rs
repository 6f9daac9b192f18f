//! Looks, beside a run, at how far back the source can be read, and warns when quiet positions are stored too seldom
//! for it.

use std::time::Duration;

use tracing::warn;

use crate::checkpoint::Checkpoint;
use crate::ids::SubscriptionId;
use crate::model::SubscriptionModel;
use crate::status;

/// Warns when the quiet interval is over half of the readable window. An oplog that is young and has dropped nothing
/// yet is short, too: so a short one is looked at twice, an interval apart, and only one that drops is warned about.
pub(crate) async fn warn_when_short<M: SubscriptionModel>(id: SubscriptionId, model: M, interval: Duration) {
    let Some((before, window)) = look(&model).await else { return };
    if interval <= window / 2 {
        return;
    }
    tokio::time::sleep(interval).await;
    let Some((now, window)) = look(&model).await else { return };
    if interval > window / 2 && now.is_beyond(&before) {
        let (interval, window) = (interval.as_secs(), window.as_secs());
        warn!(
            subscription = %id, window, interval,
            "subscription {id} stores a quiet position every {interval} s, and the oplog reaches back {window} s only: \
             when quiet for long it can lose its place; make the oplog larger or the interval shorter"
        );
    }
}

/// The oldest readable position and how far it lies back; nothing when the source does not tell.
async fn look<M: SubscriptionModel>(model: &M) -> Option<(Checkpoint, Duration)> {
    let (earliest, head) = (model.earliest().await.ok()?, model.head().await.ok()?);
    let window = status::lag(&earliest, &head)?;
    Some((earliest, window))
}
