//! The dyn twin of [`CheckpointStorage`]: the same calls, boxed. It stores nothing itself.

use std::pin::Pin;
use std::sync::Arc;

use super::{CheckpointStorage, Claim, ClaimOutcome, Record, Save, SaveOutcome};
use crate::error::StorageError;
use crate::ids::{Namespace, Ownership, SubscriptionId};
use crate::model::Deployment;

/// A boxed future, as the dyn twin of [`CheckpointStorage`] returns it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// [`CheckpointStorage`] for `Arc<dyn DynCheckpointStorage>`: the same calls, boxed. Every storage is one.
pub trait DynCheckpointStorage: Send + Sync + 'static {
    /// [`CheckpointStorage::read`], boxed.
    fn dyn_read<'a>(&'a self, id: &'a SubscriptionId) -> BoxFuture<'a, Result<Option<Record>, StorageError>>;
    /// [`CheckpointStorage::claim`], boxed.
    fn dyn_claim<'a>(&'a self, claim: &'a Claim) -> BoxFuture<'a, Result<ClaimOutcome, StorageError>>;
    /// [`CheckpointStorage::save`], boxed.
    fn dyn_save<'a>(&'a self, save: &'a Save) -> BoxFuture<'a, Result<SaveOutcome, StorageError>>;
    /// [`CheckpointStorage::delete`], boxed.
    fn dyn_delete<'a>(
        &'a self,
        id: &'a SubscriptionId,
        owner: Option<&'a Ownership>,
    ) -> BoxFuture<'a, Result<bool, StorageError>>;
    /// [`CheckpointStorage::list`], boxed.
    fn dyn_list(&self) -> BoxFuture<'_, Result<Vec<String>, StorageError>>;
    /// [`CheckpointStorage::not_dead`], boxed.
    fn dyn_not_dead<'a>(
        &'a self,
        id: &'a SubscriptionId,
        superseded: &'a Ownership,
    ) -> BoxFuture<'a, Result<(), StorageError>>;
    /// [`CheckpointStorage::namespaces`].
    fn dyn_namespaces(&self) -> Vec<Namespace>;
    /// [`CheckpointStorage::deployment`], boxed.
    fn dyn_deployment(&self) -> BoxFuture<'_, Result<Option<Deployment>, StorageError>>;
}

impl<S: CheckpointStorage> DynCheckpointStorage for S {
    fn dyn_read<'a>(&'a self, id: &'a SubscriptionId) -> BoxFuture<'a, Result<Option<Record>, StorageError>> {
        Box::pin(self.read(id))
    }
    fn dyn_claim<'a>(&'a self, claim: &'a Claim) -> BoxFuture<'a, Result<ClaimOutcome, StorageError>> {
        Box::pin(self.claim(claim))
    }
    fn dyn_save<'a>(&'a self, save: &'a Save) -> BoxFuture<'a, Result<SaveOutcome, StorageError>> {
        Box::pin(self.save(save))
    }
    fn dyn_delete<'a>(
        &'a self,
        id: &'a SubscriptionId,
        owner: Option<&'a Ownership>,
    ) -> BoxFuture<'a, Result<bool, StorageError>> {
        Box::pin(self.delete(id, owner))
    }
    fn dyn_list(&self) -> BoxFuture<'_, Result<Vec<String>, StorageError>> {
        Box::pin(self.list())
    }
    fn dyn_not_dead<'a>(
        &'a self,
        id: &'a SubscriptionId,
        superseded: &'a Ownership,
    ) -> BoxFuture<'a, Result<(), StorageError>> {
        Box::pin(self.not_dead(id, superseded))
    }
    fn dyn_namespaces(&self) -> Vec<Namespace> {
        self.namespaces()
    }
    fn dyn_deployment(&self) -> BoxFuture<'_, Result<Option<Deployment>, StorageError>> {
        Box::pin(self.deployment())
    }
}

impl CheckpointStorage for Arc<dyn DynCheckpointStorage> {
    async fn read(&self, id: &SubscriptionId) -> Result<Option<Record>, StorageError> {
        (**self).dyn_read(id).await
    }
    async fn claim(&self, claim: &Claim) -> Result<ClaimOutcome, StorageError> {
        (**self).dyn_claim(claim).await
    }
    async fn save(&self, save: &Save) -> Result<SaveOutcome, StorageError> {
        (**self).dyn_save(save).await
    }
    async fn delete(&self, id: &SubscriptionId, owner: Option<&Ownership>) -> Result<bool, StorageError> {
        (**self).dyn_delete(id, owner).await
    }
    async fn list(&self) -> Result<Vec<String>, StorageError> {
        (**self).dyn_list().await
    }
    async fn not_dead(&self, id: &SubscriptionId, superseded: &Ownership) -> Result<(), StorageError> {
        (**self).dyn_not_dead(id, superseded).await
    }
    fn namespaces(&self) -> Vec<Namespace> {
        (**self).dyn_namespaces()
    }
    async fn deployment(&self) -> Result<Option<Deployment>, StorageError> {
        (**self).dyn_deployment().await
    }
}
