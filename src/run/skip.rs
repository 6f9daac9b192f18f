//! Whether events may be stepped over by hand. It asks the source and changes nothing; the run, and
//! `DurableSubscriptions` where nothing runs, do the rest.

use std::cmp::Ordering;

use crate::audit::Skipped;
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::SourceError;
use crate::ids::Owner;
use crate::model::SubscriptionModel;
use crate::run::identity::{Origin, is_at_most};
use crate::storage::Source;

/// What somebody wants stepped over, and why.
#[derive(Debug, Clone)]
pub(crate) struct Skip {
    pub(crate) through: Checkpoint,
    pub(crate) reason: String,
}

/// Why nothing is skipped.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Unfit {
    /// What was asked for, by its field, and what is wrong with it.
    Asked(&'static str, String),
    /// The source could not be asked, or refuses the position.
    Source(SourceError),
}

impl From<SourceError> for Unfit {
    fn from(error: SourceError) -> Self {
        Self::Source(error)
    }
}

/// As many bytes may the reason have: it is kept in the record.
const REASON_BYTES: usize = 1000;

impl Skip {
    /// Whether there is a reason, and the position lies beyond `from`.
    pub(crate) fn is_ahead_of(&self, from: Option<&Checkpoint>) -> Result<(), Unfit> {
        let refuse = |field, message| Err(Unfit::Asked(field, message));
        if self.reason.trim().is_empty() {
            return refuse("reason", "must say why the events are skipped: it is kept in the record".into());
        }
        if self.reason.len() > REASON_BYTES {
            return refuse("reason", format!("is longer than {REASON_BYTES} bytes"));
        }
        let through = &self.through;
        match from.map(|from| (through.position_cmp(from), from)) {
            None | Some((Some(Ordering::Greater), _)) => Ok(()),
            Some((None, from)) => refuse("through", format!("{through} cannot be compared with the position, {from}")),
            Some((Some(_), from)) => refuse(
                "through",
                format!("{through} does not lie beyond the position, {from}: nothing is left to skip"),
            ),
        }
    }

    /// Whether the position is one of this source, and not ahead of it.
    pub(crate) async fn is_of<M: SubscriptionModel>(&self, model: &M, was: Option<&Source>) -> Result<(), Unfit> {
        let through = &self.through;
        let head = model.head().await?;
        if through.cluster_time().is_some_and(|time| !is_at_most(time, &head)) {
            let message =
                format!("{through} lies ahead of the source's present, {head}: what is to come cannot be skipped");
            return Err(Unfit::Asked("through", message));
        }
        let identity = model.identity().await?;
        let was = was.map(|was| self.source_behind(was));
        let origin = Origin::new(through, was.as_ref());
        origin.verify_source(model, &identity, |_| {}).await?;
        if !origin.has_its_event(model, &identity).await? {
            return Err(Unfit::Asked("through", format!("no event of the source is at {through}")));
        }
        Ok(())
    }

    /// Where positions come from behind it: an end of the collection may be among what is skipped.
    pub(crate) fn source_behind(&self, was: &Source) -> Source {
        let mut source = Source { collection_uuid: None, ..was.clone() };
        source.see(&self.through);
        source
    }

    /// What the position is the position of.
    pub(crate) fn kind(&self) -> Kind {
        match self.through.token() {
            Some(token) if token.is_invalidate() || token.collection_uuid().is_some() => Kind::of_event(&self.through),
            _ => Kind::Quiet,
        }
    }

    pub(crate) fn audit(&self, from: Option<Checkpoint>, by: Owner) -> Skipped {
        Skipped::new(from, self.through.clone(), self.reason.trim(), by)
    }
}
