//! What a start says of itself, in the log: where it starts, with which settings, and what a person may want to know.

use tracing::{info, warn};

use crate::ids::SubscriptionId;
use crate::model::{Identity, SubscriptionModel};
use crate::run::identity;
use crate::run::start::{Started, Starting};
use crate::storage::{CheckpointStorage, Record};

impl<M: SubscriptionModel, S: CheckpointStorage> Starting<'_, M, S> {
    pub(crate) fn say(&self, started: &Started<M>, before: Option<&Record>, record: &Record, identity: &Identity) {
        let id = self.id;
        let position = started.from.as_ref().map_or_else(|| "the source's now".into(), ToString::to_string);
        let checks = identity::active_checks(identity, before.filter(|_| started.stored.is_some()));
        let left_out: Vec<String> = started.plan.leave_out.iter().map(ToString::to_string).collect();
        let left_out = if left_out.is_empty() { "nothing".into() } else { left_out.join(", ") };
        info!(
            subscription = %id, fence = started.ownership.fence.0, position,
            "subscription {id} to {} starts at {position}: {}; identity checks: {checks}; left out: {left_out}",
            identity.scope, self.described
        );
        if let Some(before) = before.filter(|before| !self.is_own(before)) {
            warn_of_takeover(id, before, record);
        }
        let produced = started.stored.as_ref().and_then(|stored| stored.pipeline.as_ref());
        if produced.is_some_and(|produced| *produced != started.pipeline) {
            warn!(
                subscription = %id, position,
                "the filter of subscription {id} has changed: a wider one has no history before {position}"
            );
        }
    }
}

/// A claim from an owner that saved a moment ago is likely two programs with one id.
pub(crate) fn warn_of_takeover(id: &SubscriptionId, before: &Record, record: &Record) {
    let (Some(previous), Some(saved_at), Some(now)) = (&before.ownership, before.saved_at, record.claimed_at) else {
        return;
    };
    let age = now.timestamp_millis() - saved_at.timestamp_millis();
    if !before.clean && age < 60_000 {
        let owner = &previous.owner;
        warn!(
            subscription = %id, %owner,
            "subscription {id} is taken over from {owner}, which saved {} s ago: if it still runs, it stops now", age / 1000
        );
    }
}
