//! The storages' own collections in what a subscription watches: left out of it, or it would feed on its own writes for
//! ever. It only asks; whoever reads leaves them out.

use crate::dead_letter::DynDeadLetterStorage;
use crate::error::StorageError;
use crate::ids::Namespace;
use crate::model::{Deployment, Identity};
use crate::storage::CheckpointStorage;

/// The collections of the checkpoints and the dead letters that are in the scope and in the same deployment.
pub(crate) async fn own_namespaces<S: CheckpointStorage>(
    storage: &S,
    letters: Option<&dyn DynDeadLetterStorage>,
    identity: &Identity,
) -> Result<Vec<Namespace>, StorageError> {
    let mut own = of_one(storage.namespaces(), identity, || storage.deployment()).await?;
    if let Some(letters) = letters {
        own.extend(of_one(letters.dyn_namespaces(), identity, || letters.dyn_deployment()).await?);
    }
    Ok(own)
}

async fn of_one<D: Future<Output = Result<Option<Deployment>, StorageError>>>(
    namespaces: Vec<Namespace>,
    identity: &Identity,
    deployment: impl FnOnce() -> D,
) -> Result<Vec<Namespace>, StorageError> {
    let own: Vec<_> = namespaces.into_iter().filter(|own| identity.scope.contains(own)).collect();
    if own.is_empty() {
        return Ok(own);
    }
    let same = deployment().await?.zip(identity.deployment.as_ref());
    Ok(if same.is_some_and(|(storage, source)| storage.is_same_as(source)) { own } else { Vec::new() })
}
