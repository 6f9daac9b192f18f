//! A careful run: processes have died before they had stored anything, so each event is noted in the record before it is
//! handed out, alone, and its position is stored behind it. So the record names the event that kills the process, and after
//! three more deaths the failure policy treats it as failed. Called by `hand_out`.

use tracing::{info, warn};

use crate::delivery::Delivery;
use crate::handler::Failure;
use crate::model::SubscriptionModel;
use crate::reason::Reason;
use crate::run::deliver::{Deliver, Ended};
use crate::run::failing::Patience;
use crate::run::hand_out::Batch;
use crate::storage::{InHand, Record};

/// So many runs in a row that ended without a word, and without having stored anything, make the next one careful.
const ENDS: u32 = 3;
/// So many deaths with it in hand make an event a failed one.
const DEATHS: u32 = 3;
/// A careful run that has handed out so many, and lives, is careful no more: what kills lies further on, and it has made
/// progress towards it.
const MOST: u32 = 10_000;

/// What a careful run is careful about.
#[derive(Debug)]
pub(crate) struct Careful {
    /// The event that an earlier careful run had in hand.
    suspect: Option<InHand>,
    handed_out: u32,
}

impl Careful {
    /// Whether a run behind this record has to be careful; if so, it is said.
    pub(crate) fn behind(record: &Record) -> Option<Self> {
        if record.unclean_ends < ENDS && record.in_hand.is_none() {
            return None;
        }
        let id = &record.id;
        warn!(
            subscription = %id,
            "subscription {id} is careful: its process has died again and again before anything was stored; each event is \
             noted in the record before it is handed out, and stored behind"
        );
        Some(Self { suspect: record.in_hand.clone(), handed_out: 0 })
    }

    /// Whether the next event is beyond what has to be feared.
    fn is_past(&self, next: &Delivery) -> bool {
        let beyond_suspect = self.suspect.as_ref().is_some_and(|suspect| next.position.is_beyond(&suspect.position));
        // No process before this one had it, nor anything behind it.
        !next.may_be_repeat || beyond_suspect || self.handed_out >= MOST
    }
}

impl<M: SubscriptionModel> Deliver<M> {
    /// Before the event at the front is handed out: notes it, or has the failure policy decide about it.
    pub(crate) async fn take_care(&mut self, batch: &mut Batch, patience: &mut Patience) -> Result<(), Ended> {
        let (Some(careful), Some(first)) = (&mut self.careful, batch.first().cloned()) else { return Ok(()) };
        let id = self.id.clone();
        if careful.is_past(&first) {
            self.careful = None;
            info!(subscription = %id, "subscription {id} is past what has killed its process, and careful no more");
            return Ok(());
        }
        careful.handed_out += 1;
        let position = first.position;
        let suspect = careful.suspect.as_mut().filter(|suspect| suspect.position == position);
        let deaths = suspect.as_ref().map_or(0, |suspect| suspect.deaths);
        let Some(suspect) = suspect.filter(|suspect| suspect.deaths >= DEATHS) else {
            return self.note_in_hand(InHand::new(position, deaths)).await;
        };
        // It is said once: whoever has the event handed out again, by a resume or a start, has it counted anew.
        suspect.deaths = 0;
        self.note_in_hand(InHand::new(position.clone(), 0)).await?;
        let error = format!("the process died {deaths} times while handling this event");
        warn!(subscription = %id, %position, deaths, "subscription {id}: {error}, the one at {position}; it is treated as failed");
        if self.settings.on_failure.cap().is_none() {
            let error = format!("{error}; resume() hands it out again");
            return Err(Ended::Stalled(Reason::HandlerFailing { position, attempts: deaths, error }));
        }
        self.count_deaths(batch.first_seq(), batch, deaths);
        self.failed(batch, 1, Failure::retry(error), patience).await?;
        self.store_with_care().await
    }

    /// Behind a settled event: its position is stored before the next one is handed out, as far as it may be.
    pub(crate) async fn store_with_care(&mut self) -> Result<(), Ended> {
        if self.careful.is_none() {
            return Ok(());
        }
        self.flush().await?;
        let Some(storable) = self.desk.view().storable else { return Ok(()) };
        self.hold().request_save();
        self.gate(|gate| gate.stored >= storable.seq).await
    }

    async fn note_in_hand(&mut self, in_hand: InHand) -> Result<(), Ended> {
        let number = self.desk.note_in_hand(in_hand);
        self.gate(|gate| gate.noted >= number).await
    }
}
