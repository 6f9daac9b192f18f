//! What is stored against what is to be saved: no I/O, the same in every storage that reads records whole.

use std::cmp::Ordering;

use super::{Record, Save};

impl Record {
    /// Whether what is stored lies beyond what is to be saved.
    pub(crate) fn is_beyond(&self, save: &Save) -> bool {
        match self.epoch {
            Some(epoch) if epoch == save.epoch => self.position.as_ref().is_some_and(|stored| {
                // Text has no order: any is an advance.
                stored.position_cmp(&save.position).is_some_and(Ordering::is_gt)
            }),
            Some(epoch) => epoch > save.epoch,
            None => false,
        }
    }
}
