//! The ids that are in use in one `DurableSubscriptions`, and what runs under them. It starts and stops nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::SubscribeError;
use crate::ids::SubscriptionId;
use crate::subscription::Subscription;

/// The ids in use here.
#[derive(Default)]
pub(crate) struct Registry {
    slots: Mutex<HashMap<SubscriptionId, Slot>>,
}

enum Slot {
    Starting,
    Running(Subscription),
}

impl Slot {
    fn running(&self) -> Option<Subscription> {
        match self {
            Self::Running(subscription) if !subscription.is_stopped() => Some(subscription.clone()),
            _ => None,
        }
    }
}

impl Registry {
    fn slots(&self) -> MutexGuard<'_, HashMap<SubscriptionId, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The subscription of this id, unless it has stopped.
    pub(crate) fn get(&self, id: &str) -> Option<Subscription> {
        self.slots().iter().find(|(known, _)| known.as_str() == id).and_then(|(_, slot)| slot.running())
    }

    /// Every subscription that has not stopped, by id.
    pub(crate) fn running(&self) -> Vec<Subscription> {
        let mut running: Vec<Subscription> = self.slots().values().filter_map(Slot::running).collect();
        running.sort_by(|a, b| a.id().cmp(b.id()));
        running
    }

    /// Takes the id, unless it is in use.
    pub(crate) fn reserve(self: &Arc<Self>, id: &SubscriptionId) -> Result<Reserved, SubscribeError> {
        let mut slots = self.slots();
        match slots.get(id) {
            Some(Slot::Running(subscription)) if subscription.is_stopped() => {}
            None => {}
            Some(_) => return Err(SubscribeError::AlreadyRunning { id: id.clone() }),
        }
        slots.insert(id.clone(), Slot::Starting);
        Ok(Reserved { registry: self.clone(), id: id.clone(), kept: false })
    }
}

/// An id taken by a start; a start that fails, or is dropped, frees it.
pub(crate) struct Reserved {
    registry: Arc<Registry>,
    id: SubscriptionId,
    kept: bool,
}

impl Reserved {
    pub(crate) fn keep(mut self, subscription: Subscription) {
        self.registry.slots().insert(self.id.clone(), Slot::Running(subscription));
        self.kept = true;
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if !self.kept {
            self.registry.slots().remove(&self.id);
        }
    }
}
