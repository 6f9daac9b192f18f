//! Which events a subscription reads: one value with an evaluation in memory and a pipeline for the server.

/// Which events a subscription reads. Default: every one.
#[derive(Debug, Clone, Default)]
pub struct Filter {}

/// A field of the full document.
#[derive(Debug, Clone)]
pub struct Field {}
