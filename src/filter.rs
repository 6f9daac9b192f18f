//! Which events a subscription reads: one value with an evaluation in memory and a pipeline for the server.

/// Which events a subscription reads. Default: every one.
#[derive(Debug, Clone, Default)]
pub struct Filter {}

impl Filter {
    /// The stages that the server evaluates; none when every event passes.
    pub fn stages(&self) -> Vec<bson::Document> {
        Vec::new()
    }

    /// Whether it is a pipeline that only a server evaluates.
    pub fn is_raw_pipeline(&self) -> bool {
        false
    }

    /// Whether a condition on a field of the full document can be reached with an update.
    pub fn needs_full_document(&self) -> bool {
        false
    }

    /// Whether an event passes.
    ///
    /// # Errors
    /// [`DecodeError`](crate::DecodeError) when a part that it asks for cannot be decoded.
    pub fn matches(&self, _event: &crate::ChangeEvent) -> Result<bool, crate::DecodeError> {
        Ok(true)
    }
}

/// A field of the full document.
#[derive(Debug, Clone)]
pub struct Field {}
