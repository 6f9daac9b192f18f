//! The event that a careful run has in hand, and what a save says of it. Values only.

use crate::checkpoint::Checkpoint;

/// An event that a careful run handed out and has not answered for.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct InHand {
    /// The event's position.
    pub position: Checkpoint,
    /// How often its process has died with it in hand.
    pub deaths: u32,
}

impl InHand {
    /// An event in hand, and how often its process has died of it.
    pub fn new(position: Checkpoint, deaths: u32) -> Self {
        Self { position, deaths }
    }
}

/// What a save says of the event in hand. Only careful runs say something.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub enum Hand {
    /// Nothing.
    #[default]
    Unsaid,
    /// This event is handed out now. Nothing else of the record changes: neither its position, which the save brings as it
    /// is stored, nor when it was stored.
    Holds(InHand),
    /// No event is.
    Empty,
}
