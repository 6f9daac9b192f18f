//! Where a run begins again when the source has lost the history behind its position: found, opened and stored, with the
//! gap, before anything is read there.

use std::time::Duration;

use tracing::warn;

use crate::audit::{Gap, Note};
use crate::backoff::Backoff;
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::SourceError;
use crate::ids::SubscriptionId;
use crate::model::{Plan, SubscriptionModel};
use crate::reason::Reason;
use crate::run::changes::OnHistoryLost;
use crate::run::deliver::{Deliver, Ended};
use crate::run::desk::Jump;
use crate::run::identity::Origin;
use crate::run::open::{Opening, UNAUTHORIZED_AGAIN};
use crate::run::repeats::Repeats;
use crate::start::Start;
use crate::status::Board;
use crate::storage::Source;

/// How often the oldest position is asked for, when the oplog is cut faster than it can be opened.
pub(crate) const EARLIEST_TRIES: usize = 5;

/// The position of a start; none for a present that the source does not tell.
pub(crate) async fn position<M: SubscriptionModel>(
    model: &M,
    start: &Start,
) -> Result<Option<Checkpoint>, SourceError> {
    Ok(match start {
        Start::Present => model.global_checkpoint().await?,
        Start::Earliest => Some(model.earliest().await?),
        Start::Time(time) => Some(Checkpoint::Time(*time)),
        Start::After(position) => Some(position.clone()),
    })
}

/// A new start, opened and not read.
pub(crate) struct Begun<R> {
    pub(crate) position: Checkpoint,
    pub(crate) reader: R,
    pub(crate) source: Source,
}

/// Opens at a new start. `was` is where the positions before it came from. `tries` is how often the oldest position is
/// asked for.
pub(crate) async fn begin<M: SubscriptionModel>(
    model: &M,
    plan: &Plan,
    start: &Start,
    was: Option<&Source>,
    tries: usize,
) -> Result<Begun<M::Reader>, SourceError> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        let identity = model.identity().await?;
        let Some(position) = position(model, start).await? else {
            return Err(SourceError::Refused(Reason::NoStartPosition));
        };
        // It is a start of this source's own; but the source must still be the same replica set.
        let anywhere = was.map(|was| Source { collection_uuid: None, ..was.clone() });
        Origin::new(&position, anywhere.as_ref()).verify(model, &identity, |_| {}).await?;
        match model.open(Some(&position), plan).await {
            Err(SourceError::Refused(Reason::HistoryLost { .. })) if *start == Start::Earliest && attempt < tries => {}
            Err(error) => return Err(error),
            Ok(reader) => return Ok(Begun { position, reader, source: Source::from(&identity) }),
        }
    }
}

/// Says that changes are lost, and where it goes on.
pub(crate) fn say_restarts(id: &SubscriptionId, gap: &Gap) {
    let (from, to) = (gap.from.dated(), gap.to.dated());
    warn!(
        subscription = %id, from = %gap.from, to = %gap.to,
        "subscription {id} has lost the changes between {from} and {to}, which the source no longer has: it begins again \
         at the latter, and its record keeps the gap"
    );
}

impl<M: SubscriptionModel> Deliver<M> {
    /// Begins again where the policy says, unless it says to stall, or the last new start was lost before anything behind
    /// it was stored.
    pub(crate) async fn restart(&mut self, lost: Reason) -> Result<M::Reader, Ended> {
        let OnHistoryLost::RestartAt(start) = self.settings.on_history_lost.clone() else {
            return Err(Ended::Stalled(lost));
        };
        if self.restarted.is_some_and(|at| self.desk.gate_is(|gate| gate.stored <= at)) {
            return Err(Ended::Stalled(lost));
        }
        let stop = self.signals.stop.clone();
        let begun = tokio::select! {
            biased;
            () = stop.cancelled() => return Err(Ended::Asked),
            begun = find_start(&self.opening, &self.source, &self.board, &start) => begun.map_err(Ended::Stalled)?,
        };
        let Begun { position, reader, source } = begun;
        // What the handler can still make safe lies before the gap.
        self.flush().await?;
        // What was handled and held back comes no more either: the gap begins at what could be stored.
        let from = self.desk.view().storable.map(|mark| mark.position).or_else(|| self.desk.safe());
        let gap = Gap::new(from.unwrap_or_else(|| position.clone()), position.clone(), source.scope.clone());
        say_restarts(&self.id, &gap);
        let jump = Jump { kind: Kind::Start, new_epoch: true, note: Note::Gap(gap), source: Some(source.clone()) };
        let seq = self.desk.jump(position.clone(), jump);
        (self.restarted, self.source, self.taken) = (Some(seq), source, Some(position.clone()));
        self.show_safe(Some(position));
        self.gate(|gate| gate.stored >= seq).await?;
        Ok(reader)
    }
}

/// Tries until a new start is open, or the source refuses for good.
async fn find_start<M: SubscriptionModel>(
    opening: &Opening<M>,
    was: &Source,
    board: &Board,
    start: &Start,
) -> Result<Begun<M::Reader>, Reason> {
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
    let mut repeats = Repeats::default();
    loop {
        let begun = begin(&opening.model, &opening.plan, start, Some(was), EARLIEST_TRIES).await;
        let error = match begun {
            Ok(begun) => {
                board.set(|conditions| conditions.opening = None);
                return Ok(begun);
            }
            Err(SourceError::Refused(reason)) => return Err(reason),
            Err(error) => error,
        };
        if repeats.is_due() {
            let (id, failures) = (&opening.id, repeats.count());
            warn!(subscription = %id, failures, "subscription {id} finds no new start: {error}");
        }
        board.set(|conditions| conditions.opening = Some(error.reason()));
        let wait = match error {
            SourceError::Unauthorized { .. } => UNAUTHORIZED_AGAIN,
            _ => backoff.next_wait(),
        };
        tokio::time::sleep(wait).await;
    }
}
