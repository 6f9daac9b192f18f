//! Whether a stored position is this source's own. Quiet tokens and times of another deployment are accepted by a
//! server without a word, and events are lost; so it is judged here, before anything is read.

use std::time::Duration;

use bson::Timestamp;
use tokio::time::Instant;

use crate::checkpoint::Checkpoint;
use crate::error::SourceError;
use crate::model::{Identity, Scope, SubscriptionModel};
use crate::reason::Reason;
use crate::storage::{Record, Source};

/// How long a position may look ahead of the deployment: a member that answers may lag.
const AHEAD_FOR: Duration = Duration::from_secs(30);
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// Refuses a position that came from another collection or another replica set. What is not known on both sides is
/// not checked; a position behind an `invalidate` may stand before a collection made anew.
pub(crate) fn check(position: &Checkpoint, record: Option<&Record>, identity: &Identity) -> Result<(), Reason> {
    let source = record.and_then(|record| record.source.as_ref());
    let was = source.and_then(|source| source.set_name.as_ref());
    let is = identity.deployment.as_ref().map(|deployment| &deployment.set_name);
    if let (Some(was), Some(is)) = (was, is)
        && was != is
    {
        return Err(changed(format!("replica set {was}"), format!("replica set {is}")));
    }
    let Scope::Collection(collection) = &identity.scope else { return Ok(()) };
    if position.is_invalidate() || record.is_some_and(Record::is_behind_invalidate) {
        return Ok(());
    }
    if let Some(Scope::Collection(was)) = source.map(|source| &source.scope)
        && was != collection
    {
        return Err(changed(format!("collection {was}"), format!("collection {collection}")));
    }
    let recorded = source.and_then(|source| source.collection_uuid.as_deref());
    let in_token = position.token().and_then(|token| token.collection_uuid());
    if let (Some(was), Some(is)) = (recorded.or(in_token), &identity.collection_uuid)
        && !was.eq_ignore_ascii_case(is)
    {
        return Err(changed(format!("{collection} with UUID {was}"), format!("{collection} with UUID {is}")));
    }
    Ok(())
}

fn changed(was: String, is: String) -> Reason {
    Reason::SourceChanged { was, is }
}

/// Refuses a position that lies ahead of the deployment: a stream opened there would wait silently for ever. An idle
/// set's own present is one increment ahead of its head, and that is fine.
pub(crate) async fn not_ahead<M: SubscriptionModel>(
    model: &M,
    position: &Checkpoint,
    resumed: bool,
    waits: impl Fn(String),
) -> Result<(), SourceError> {
    let Some(time) = position.cluster_time() else { return Ok(()) };
    let deadline = Instant::now() + AHEAD_FOR;
    loop {
        let head = model.head().await?;
        let Some(present) = head.cluster_time() else { return Ok(()) };
        let bound = Timestamp { time: present.time, increment: present.increment.saturating_add(1) };
        if time <= bound {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let is = format!("a deployment whose present is {head}");
            return Err(SourceError::Refused(if resumed {
                changed(format!("a deployment that had reached {position}"), is)
            } else {
                Reason::BadPosition {
                    code: 0,
                    message: format!("the start {position} lies ahead of the deployment's present, {head}"),
                }
            }));
        }
        waits(format!("its present, {head}, has not reached {position}"));
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

/// The source of the positions to come. What does not show now stays as the record of the resumed position has it, so
/// that a later start can still check it; behind an `invalidate` the collection is another one.
pub(crate) fn source(identity: &Identity, resumed: Option<&Record>) -> Source {
    let mut source = Source::from(identity);
    if let Some(record) = resumed
        && let Some(was) = record.source.clone().filter(|was| was.scope == source.scope)
    {
        source.set_name = source.set_name.or(was.set_name);
        if !record.is_behind_invalidate() {
            source.collection_uuid = source.collection_uuid.or(was.collection_uuid);
        }
    }
    source
}

/// Which checks a start can make, for its line.
pub(crate) fn active_checks(identity: &Identity) -> String {
    let mut checks = vec!["position not ahead"];
    if identity.deployment.is_some() {
        checks.push("replica set name");
    }
    if identity.collection_uuid.is_some() {
        checks.push("collection UUID");
    }
    checks.join(", ")
}
