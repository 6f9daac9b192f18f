//! [`ChangeStreamModel`]: one scope of a MongoDB deployment as a sequence of reads. Its parts are the other files here.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bson::{Bson, Document};
use mongodb::options::{ReadPreference, SelectionCriteria};
use mongodb::{Client, Collection, Database};

use super::open::Source;
use super::pool::ConnectionPool;
use super::reader::ChangeStreamReader;
use super::{identity, outline, present, probe, stages, task};
use crate::checkpoint::Checkpoint;
use crate::error::{SourceError, SubscribeError};
use crate::event::ChangeEvent;
use crate::ids::Namespace;
use crate::model::{Fingerprint, Identity, Plan, Scope, SubscriptionModel};
use crate::reason::Reason;

/// The change stream of a collection, a database or a whole deployment. Cheap to clone.
///
/// It needs a replica set or a sharded cluster, and the actions `find` and `changeStream` on what it reads. It reads
/// with majority read concern, where the handle it is made of reads ([`read_preference`](Self::read_preference)).
///
/// An event over 16 MB comes whole where the server can split it: the stage for that is added when the first such event is
/// met, and stays for the positions behind it, whose tokens have another layout. Elsewhere it is
/// [`EventTooLarge`](Reason::EventTooLarge), behind everything before it; that a server has no such stage is remembered
/// for the life of the model and its clones.
///
/// Each open stream keeps one connection of its client busy: give the client a `max_pool_size` of at least the streams
/// plus 16, or the streams a client of their own, and name it ([`connection_pool`](Self::connection_pool)), so that a
/// pool that is too small is warned about.
///
/// ```no_run
/// use mongosub::{ChangeStreamModel, FullDocument};
///
/// # async fn example() -> mongosub::mongodb::error::Result<()> {
/// let client = mongosub::mongodb::Client::with_uri_str("mongodb://localhost").await?;
/// let orders = client.database("shop").collection::<mongosub::bson::Document>("orders");
/// let model = ChangeStreamModel::collection(&orders).full_document(FullDocument::UpdateLookup);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ChangeStreamModel {
    scope: Scope,
    database: Database,
    full_document: FullDocument,
    before_change: FullDocumentBeforeChange,
    expanded_events: bool,
    comment: Option<Bson>,
    criteria: Option<SelectionCriteria>,
    max_await_time: Duration,
    global_checkpoint: GlobalCheckpointSource,
    pool: ConnectionPool,
    /// A server has said that it cannot split events.
    cannot_split: Arc<AtomicBool>,
}

/// Which document an `update` event carries. Default: none, only what changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum FullDocument {
    /// None; `insert` and `replace` carry theirs in any case.
    #[default]
    Default,
    /// The document as it is when the event is read: later changes may be in it, and a document that was deleted in
    /// between is missing. One look-up on the server per update.
    UpdateLookup,
    /// The document as it was right after the change, if the collection keeps them (`changeStreamPreAndPostImages`,
    /// server 6.0) and it has not expired.
    WhenAvailable,
    /// As `WhenAvailable`, and the stream stops with `ImageMissing` where there is none.
    Required,
}

/// Whether an event carries the document as it was before the change. Default: it does not.
///
/// The collection must keep them (`changeStreamPreAndPostImages`, server 6.0).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum FullDocumentBeforeChange {
    /// It does not.
    #[default]
    Off,
    /// If there is one and it has not expired.
    WhenAvailable,
    /// Always, and the stream stops with `ImageMissing` where there is none.
    Required,
}

/// What is asked for the deployment's present. Default: `hostInfo`, and `hello` alone where that is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum GlobalCheckpointSource {
    /// `hostInfo`; where the server refuses that, `hello`, which needs no privilege.
    #[default]
    HostInfoThenHello,
    /// `hostInfo` alone; where the server refuses that, no start position can be told.
    HostInfoOnly,
}

impl FullDocument {
    fn option(self) -> Option<&'static str> {
        match self {
            Self::Default => None,
            Self::UpdateLookup => Some("updateLookup"),
            Self::WhenAvailable => Some("whenAvailable"),
            Self::Required => Some("required"),
        }
    }
}

impl FullDocumentBeforeChange {
    fn option(self) -> Option<&'static str> {
        match self {
            Self::Off => None,
            Self::WhenAvailable => Some("whenAvailable"),
            Self::Required => Some("required"),
        }
    }
}

impl ChangeStreamModel {
    /// The changes of one collection. It need not exist yet.
    pub fn collection<T: Send + Sync>(collection: &Collection<T>) -> Self {
        let namespace = collection.namespace();
        let database = collection.client().database(&namespace.db);
        let scope = Scope::Collection(Namespace::new(namespace.db, namespace.coll));
        Self::new(scope, database, collection.selection_criteria())
    }

    /// The changes of all collections of one database.
    pub fn database(database: &Database) -> Self {
        let scope = Scope::Database { db: database.name().to_owned() };
        Self::new(scope, database.clone(), database.selection_criteria())
    }

    /// The changes of all databases but `admin`, `config` and `local`.
    pub fn deployment(client: &Client) -> Self {
        Self::new(Scope::Deployment, client.database("admin"), client.selection_criteria())
    }

    fn new(scope: Scope, database: Database, criteria: Option<&SelectionCriteria>) -> Self {
        Self {
            scope,
            database,
            full_document: FullDocument::default(),
            before_change: FullDocumentBeforeChange::default(),
            expanded_events: false,
            comment: None,
            criteria: criteria.cloned(),
            max_await_time: Duration::from_secs(1),
            global_checkpoint: GlobalCheckpointSource::default(),
            pool: ConnectionPool::default(),
            cannot_split: Arc::default(),
        }
    }

    /// Which document an `update` event carries. Default: none.
    pub fn full_document(mut self, full_document: FullDocument) -> Self {
        self.full_document = full_document;
        self
    }

    /// Whether an event carries the document as it was before the change. Default: it does not.
    pub fn full_document_before_change(mut self, before_change: FullDocumentBeforeChange) -> Self {
        self.before_change = before_change;
        self
    }

    /// Whether there are events for indexes, `create`, `modify` and sharding too, and more fields in the others
    /// (server 6.0; older ones refuse it). Default: no.
    pub fn show_expanded_events(mut self, show: bool) -> Self {
        self.expanded_events = show;
        self
    }

    /// What the server's logs and `currentOp` show beside the stream. Default: nothing.
    pub fn comment(mut self, comment: impl Into<Bson>) -> Self {
        self.comment = Some(comment.into());
        self
    }

    /// Which members the stream is read from. Default: that of the handle the model is made of.
    ///
    /// From a secondary events come later, and the same ones. Positions are always asked of the primary.
    pub fn read_preference(mut self, preference: ReadPreference) -> Self {
        self.criteria = Some(SelectionCriteria::ReadPreference(preference));
        self
    }

    /// How long the server waits for a change before it answers that there is none. Default: 1 s.
    ///
    /// It bounds how old a quiet position is, and how long a closed stream lives on at the server; events come at once
    /// in any case.
    pub fn max_await_time(mut self, time: Duration) -> Self {
        self.max_await_time = time;
        self
    }

    /// What is asked for the deployment's present. Default: `hostInfo`, and `hello` alone where that is refused.
    pub fn global_checkpoint_source(mut self, source: GlobalCheckpointSource) -> Self {
        self.global_checkpoint = source;
        self
    }

    /// The pool of the client it is read by: its `max_pool_size` as a number, or a [`ConnectionPool`] that the models of
    /// one client share. Default: one of the driver's own default, 10, for this model and its clones.
    ///
    /// It changes nothing but the warning that too few connections are left over.
    pub fn connection_pool(mut self, pool: impl Into<ConnectionPool>) -> Self {
        self.pool = pool.into();
        self
    }

    /// What it reads.
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    fn source(&self, leave_out: &[Namespace], stages: &[Document]) -> Source {
        let mut stage = Document::new();
        if self.scope == Scope::Deployment {
            stage.insert("allChangesForCluster", true);
        }
        if let Some(option) = self.full_document.option() {
            stage.insert("fullDocument", option);
        }
        if let Some(option) = self.before_change.option() {
            stage.insert("fullDocumentBeforeChange", option);
        }
        if self.expanded_events {
            stage.insert("showExpandedEvents", true);
        }
        Source {
            scope: self.scope.clone(),
            database: self.database.clone(),
            stage,
            pipeline: stages::behind_the_source(&self.scope, leave_out, stages),
            comment: self.comment.clone(),
            criteria: self.criteria.clone(),
            max_await_time: self.max_await_time,
            pool: self.pool.clone(),
            cannot_split: Arc::clone(&self.cannot_split),
        }
    }
}

impl SubscriptionModel for ChangeStreamModel {
    type Reader = ChangeStreamReader;

    async fn open(&self, from: Option<&Checkpoint>, plan: &Plan) -> Result<ChangeStreamReader, SourceError> {
        let user = plan.filter.stages();
        stages::check(&user).map_err(|message| SourceError::Refused(Reason::RefusedByServer { code: 0, message }))?;
        task::open(self.source(&plan.leave_out, &user), from).await
    }

    fn check(&self, plan: &Plan) -> Result<Fingerprint, SubscribeError> {
        let config = |field, message| SubscribeError::Config { field, message };
        if self.max_await_time.is_zero() {
            return Err(config(
                "max_await_time",
                "must not be zero: an idle stream would ask without pause".to_owned(),
            ));
        }
        if let Scope::Collection(own) = &self.scope
            && plan.leave_out.contains(own)
        {
            let message = format!("{own} holds the checkpoints, and would feed on its own writes for ever");
            return Err(config("model", message));
        }
        if let Scope::Collection(own) = &self.scope
            && own.collection.contains('$')
        {
            // The server would open the stream and wait for ever.
            return Err(config("model", format!("no collection can be named {own}: `$` is not allowed in it")));
        }
        plan.filter.validate()?;
        if plan.filter.needs_full_document() && self.full_document == FullDocument::Default {
            return Err(SubscribeError::FilterNeedsFullDocument);
        }
        let user = plan.filter.stages();
        stages::check(&user).map_err(|message| config("filter", message))?;
        Ok(Fingerprint::of(&user))
    }

    async fn global_checkpoint(&self) -> Result<Option<Checkpoint>, SourceError> {
        let source = self.source(&[], &[]);
        let start = present::global_checkpoint(&source, self.global_checkpoint).await;
        start.map(|time| time.map(Checkpoint::Time)).map_err(|fault| source.error(fault, None))
    }

    async fn head(&self) -> Result<Checkpoint, SourceError> {
        let source = self.source(&[], &[]);
        let head = present::head(&source).await;
        head.map(Checkpoint::Time).map_err(|fault| source.error(fault, None))
    }

    async fn earliest(&self) -> Result<Checkpoint, SourceError> {
        let source = self.source(&[], &[]);
        let earliest = present::earliest(&source).await;
        earliest.map(Checkpoint::Time).map_err(|fault| source.error(fault, None))
    }

    async fn is_readable(&self, position: &Checkpoint) -> Result<bool, SourceError> {
        let source = self.source(&[], &[]);
        let readable = present::is_readable(&source, position).await;
        readable.map_err(|fault| source.error(fault, Some(position)))
    }

    async fn identity(&self) -> Result<Identity, SourceError> {
        let source = self.source(&[], &[]);
        identity::identity(&source).await.map_err(|fault| source.error(fault, None))
    }

    async fn outline(&self, position: &Checkpoint) -> Result<Option<ChangeEvent>, SourceError> {
        let source = self.source(&[], &[]);
        let event = outline::at(&source, position).await;
        match event.map_err(|fault| source.error(fault, Some(position))) {
            Err(error) => Err(task::name_the_oldest(&source, error).await),
            event => event,
        }
    }

    async fn has_event(&self, position: &Checkpoint) -> Result<bool, SourceError> {
        let Some(token) = position.token() else { return Ok(true) };
        let source = self.source(&[], &[]);
        match probe::has_event(&source, token).await.map_err(|fault| source.error(fault, Some(position))) {
            Err(error) => Err(task::name_the_oldest(&source, error).await),
            has => has,
        }
    }

    /// A rename over the collection is explained by the expanded event of a server 6.0; before that only when the oplog
    /// still has an event of the collection that was replaced.
    async fn ended_since(&self, from: &Checkpoint, collection_uuid: &str) -> Result<bool, SourceError> {
        let source = self.source(&[], &[]);
        let ended = probe::ended_since(&source, from, collection_uuid).await;
        match ended.map_err(|fault| source.error(fault, Some(from))) {
            Err(error) => Err(task::name_the_oldest(&source, error).await),
            ended => ended,
        }
    }
}

/// The scope, and nothing of the connection: that may hold a password.
impl fmt::Debug for ChangeStreamModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChangeStreamModel")
            .field("scope", &self.scope)
            .field("full_document", &self.full_document)
            .field("full_document_before_change", &self.before_change)
            .field("show_expanded_events", &self.expanded_events)
            .field("comment", &self.comment)
            .field("read", &self.criteria)
            .field("max_await_time", &self.max_await_time)
            .field("global_checkpoint", &self.global_checkpoint)
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filter::Filter;
    use bson::doc;

    async fn orders() -> Collection<Document> {
        let client = Client::with_uri_str("mongodb://user:secret@localhost:1/").await.unwrap();
        client.database("shop").collection("orders")
    }

    #[tokio::test]
    async fn options_become_those_of_the_stage_and_no_more() {
        let orders = orders().await;
        let stage = |model: &ChangeStreamModel| model.source(&[], &[]).stage;
        let model = ChangeStreamModel::collection(&orders);
        assert_eq!(stage(&model), doc! {});
        assert_eq!(stage(&ChangeStreamModel::deployment(orders.client())), doc! { "allChangesForCluster": true });
        let model = model
            .full_document(FullDocument::WhenAvailable)
            .full_document_before_change(FullDocumentBeforeChange::Required)
            .show_expanded_events(true);
        let all = doc! {
            "fullDocument": "whenAvailable", "fullDocumentBeforeChange": "required", "showExpandedEvents": true
        };
        assert_eq!(stage(&model), all);
    }

    #[tokio::test]
    async fn what_cannot_be_served_is_refused_without_asking_the_server() {
        let model = ChangeStreamModel::collection(&orders().await);
        let paid = Plan::new(Filter::field("status").eq("paid"));
        assert_eq!(model.check(&paid), Err(SubscribeError::FilterNeedsFullDocument));
        assert!(model.clone().full_document(FullDocument::UpdateLookup).check(&paid).is_ok());
        let field = |model: &ChangeStreamModel, plan: &Plan| match model.check(plan) {
            Err(SubscribeError::Config { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        let without_id = Plan::new(Filter::pipeline([doc! { "$project": { "_id": 0 } }]));
        assert_eq!(field(&model, &without_id), "filter");
        let mut own = Plan::default();
        own.leave_out.push(Namespace::new("shop", "orders"));
        assert_eq!(field(&model, &own), "model");
        assert_eq!(field(&model.max_await_time(Duration::ZERO), &Plan::default()), "max_await_time");
    }

    #[tokio::test]
    async fn the_fingerprint_is_of_the_users_stages_alone() {
        let model = ChangeStreamModel::collection(&orders().await);
        let mut plan = Plan::default();
        let print = model.check(&plan);
        plan.leave_out.push(Namespace::new("shop", "checkpoints"));
        assert_eq!(model.clone().full_document(FullDocument::UpdateLookup).check(&plan), print);
        assert_ne!(model.check(&Plan::new(Filter::pipeline([doc! { "$match": { "a": 1 } }]))), print);
    }

    #[tokio::test]
    async fn nothing_of_the_connection_is_printed() {
        let printed = format!("{:?}", ChangeStreamModel::collection(&orders().await));
        assert!(printed.contains("orders") && !printed.contains("secret"), "{printed}");
    }
}
