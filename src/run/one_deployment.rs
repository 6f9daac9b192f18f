//! Whether source and storage are one deployment, where positions are stored in transactions with the handler's effects.

use crate::error::SubscribeError;
use crate::model::{Identity, SubscriptionModel};
use crate::run::start::{Failed, Starting};
use crate::storage::CheckpointStorage;

impl<M: SubscriptionModel, S: CheckpointStorage> Starting<'_, M, S> {
    /// Refuses another deployment, and one that does not show itself.
    pub(crate) async fn is_one_deployment(&self, identity: &Identity) -> Result<(), Failed> {
        let storage = self.ask_storage(self.storage.deployment()).await?;
        let message = match (storage, &identity.deployment) {
            (Some(storage), Some(source)) if storage.is_same_as(source) => return Ok(()),
            (Some(storage), Some(source)) => format!(
                "it is in replica set {} and the source in {}, which are not the same: a transaction needs both in one",
                storage.set_name, source.set_name
            ),
            (None, _) => "which deployment it is in does not show, and a transaction needs the source's".to_owned(),
            (_, None) => "which deployment the source is does not show, and a transaction needs it to be the storage's"
                .to_owned(),
        };
        Err(Failed::Config(SubscribeError::Config { field: "storage", message }))
    }
}
