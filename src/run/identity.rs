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

/// A position, and what is known of where it comes from.
pub(crate) struct Origin<'a> {
    pub(crate) position: &'a Checkpoint,
    /// None for a start that a user chose.
    pub(crate) source: Option<&'a Source>,
    /// It is the end of its feed: the collection behind it is another one.
    pub(crate) ends_feed: bool,
}

impl<'a> Origin<'a> {
    pub(crate) fn new(position: &'a Checkpoint, source: Option<&'a Source>) -> Self {
        Self { position, source, ends_feed: position.is_invalidate() }
    }

    /// The stored position of a record.
    pub(crate) fn stored(position: &'a Checkpoint, record: &'a Record) -> Self {
        Self { position, source: record.source.as_ref(), ends_feed: record.is_behind_invalidate() }
    }

    /// Refuses a position that came from another source, or lies ahead of this one. What is not known on both sides is
    /// not checked. `waits` is told what is waited for.
    ///
    /// # Errors
    /// [`Reason::SourceChanged`], or why it could not be found out; `HistoryLost` when only history could tell, and has
    /// gone.
    pub(crate) async fn verify<M: SubscriptionModel>(
        &self,
        model: &M,
        identity: &Identity,
        waits: impl Fn(String),
    ) -> Result<(), SourceError> {
        self.verify_source(model, identity, waits).await?;
        let Some(event) = self.known_event(&identity.scope) else { return Ok(()) };
        let has = match model.has_event(event).await {
            // The last one may be too old to be told, where the position is not.
            Err(SourceError::Refused(Reason::HistoryLost { .. })) if event != self.position => true,
            has => has?,
        };
        if has { Ok(()) } else { Err(SourceError::Refused(Reason::other_history(event))) }
    }

    /// The same without looking for an event.
    ///
    /// # Errors
    /// As [`verify`](Self::verify).
    pub(crate) async fn verify_source<M: SubscriptionModel>(
        &self,
        model: &M,
        identity: &Identity,
        waits: impl Fn(String),
    ) -> Result<(), SourceError> {
        self.check_names(identity).map_err(SourceError::Refused)?;
        self.not_ahead(model, waits).await?;
        self.check_collection(model, identity).await
    }

    /// The event that the source can be asked for, because the record says that it was read in this scope: the one at the
    /// position, or the last one before it.
    fn known_event(&self, scope: &Scope) -> Option<&Checkpoint> {
        let source = self.source.filter(|source| source.scope == *scope)?;
        if self.position.names_event() && !self.ends_feed {
            return Some(self.position);
        }
        source.last_event.as_ref().filter(|event| event.names_event())
    }

    /// Whether the source has the event at the position, if it can be asked for it.
    ///
    /// # Errors
    /// Why it could not be found out; `HistoryLost` too.
    pub(crate) async fn has_its_event<M: SubscriptionModel>(
        &self,
        model: &M,
        identity: &Identity,
    ) -> Result<bool, SourceError> {
        let is_known = self.known_event(&identity.scope) == Some(self.position);
        Ok(!is_known || model.has_event(self.position).await?)
    }

    async fn check_collection<M: SubscriptionModel>(&self, model: &M, identity: &Identity) -> Result<(), SourceError> {
        let Scope::Collection(collection) = &identity.scope else { return Ok(()) };
        if self.ends_feed || !identity.shows_collection {
            return Ok(());
        }
        let recorded = self.source.and_then(|source| source.collection_uuid.as_deref());
        let in_token = self.position.token().and_then(|token| token.collection_uuid());
        // The token's is that of the very event; the record's may be of the one behind it.
        let Some(was) = in_token.or(recorded).map(str::to_ascii_uppercase) else { return Ok(()) };
        let is = identity.collection_uuid.as_deref();
        if is.is_some_and(|is| is.eq_ignore_ascii_case(&was)) || model.ended_since(self.position, &was).await? {
            return Ok(());
        }
        let is = is.map_or_else(|| format!("no collection {collection}"), |is| format!("{collection} with UUID {is}"));
        Err(SourceError::Refused(changed(format!("{collection} with UUID {was}"), is)))
    }

    fn check_names(&self, identity: &Identity) -> Result<(), Reason> {
        let was = self.source.and_then(|source| source.set_name.as_ref());
        let is = identity.deployment.as_ref().map(|deployment| &deployment.set_name);
        if let (Some(was), Some(is)) = (was, is)
            && was != is
        {
            return Err(changed(format!("replica set {was}"), format!("replica set {is}")));
        }
        if let (Scope::Collection(is), Some(Scope::Collection(was))) =
            (&identity.scope, self.source.map(|source| &source.scope))
            && was != is
            && !self.ends_feed
        {
            return Err(changed(format!("collection {was}"), format!("collection {is}")));
        }
        Ok(())
    }

    /// Refuses a position that lies ahead of the deployment: a stream opened there would wait silently for ever. An idle
    /// set's own present is one increment ahead of its head, and that is fine.
    async fn not_ahead<M: SubscriptionModel>(&self, model: &M, waits: impl Fn(String)) -> Result<(), SourceError> {
        let Some(time) = self.position.cluster_time() else { return Ok(()) };
        let (deadline, position) = (Instant::now() + AHEAD_FOR, self.position);
        loop {
            let head = model.head().await?;
            if is_at_most(time, &head) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let is = format!("a deployment whose present is {head}");
                return Err(SourceError::Refused(if self.source.is_some() {
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
}

/// Whether a time is not ahead of a deployment with this head: its own present is one increment ahead of it.
pub(crate) fn is_at_most(time: Timestamp, head: &Checkpoint) -> bool {
    head.cluster_time()
        .is_none_or(|head| time <= Timestamp { time: head.time, increment: head.increment.saturating_add(1) })
}

fn changed(was: String, is: String) -> Reason {
    Reason::SourceChanged { was, is }
}

/// The source of the positions to come. What does not show now stays as the record of the resumed position has it, so
/// that a later start can still check it; until its end is read the collection is the record's, whatever bears the name
/// by now, and behind an `invalidate` it is another one.
pub(crate) fn source(identity: &Identity, resumed: Option<&Record>) -> Source {
    let mut source = Source::from(identity);
    if let Some(record) = resumed
        && let Some(was) = record.source.clone().filter(|was| was.scope == source.scope)
    {
        source.set_name = source.set_name.or(was.set_name);
        source.last_event = record.position.clone().filter(Checkpoint::names_event).or(was.last_event);
        if !record.is_behind_invalidate() {
            source.collection_uuid = was.collection_uuid.or(source.collection_uuid);
        }
    }
    source
}

/// Which checks a start can make, for its line.
pub(crate) fn active_checks(identity: &Identity, resumed: Option<&Record>) -> String {
    let mut checks = vec!["position not ahead"];
    if identity.deployment.is_some() {
        checks.push("replica set name");
    }
    if identity.shows_collection {
        checks.push("collection UUID");
    }
    let stored = resumed.and_then(|record| Some(Origin::stored(record.position.as_ref()?, record)));
    if let Some(stored) = stored
        && let Some(event) = stored.known_event(&identity.scope)
    {
        checks.push(if event == stored.position { "event at the position" } else { "last event" });
    }
    checks.join(", ")
}
