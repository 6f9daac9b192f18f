//! The desk of a careful run: the event that is to be noted in the record before it is handed out. The deliver task asks,
//! the saver's task answers through the gate.

use super::Desk;
use crate::storage::InHand;

impl Desk {
    /// The event is to be noted in the record; the number of the note.
    pub(crate) fn note_in_hand(&self, in_hand: InHand) -> u64 {
        let mut inner = self.inner();
        inner.notes += 1;
        let number = inner.notes;
        inner.to_note = Some((number, in_hand));
        drop(inner);
        self.news.notify_one();
        number
    }

    /// The note with this number is in the record.
    pub(crate) fn noted(&self, number: u64) {
        self.inner().to_note.take_if(|(noted, _)| *noted <= number);
        self.gate.send_modify(|gate| gate.noted = number);
    }
}
