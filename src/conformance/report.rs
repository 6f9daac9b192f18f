//! What became of a suite's checks, and how a check says what is wrong.

use std::fmt;

use crate::error::StorageError;

/// What became of each check of a suite.
#[derive(Debug, Clone, Default)]
#[must_use = "a report fails nothing by itself: call assert_passed"]
pub struct Report {
    results: Vec<(&'static str, Result<(), String>)>,
}

impl Report {
    pub(super) fn add(&mut self, check: &'static str, result: Result<(), Failed>) {
        self.results.push((check, result.map_err(|Failed(what)| what)));
    }

    /// Each check by its name, with what was wrong when it failed; in the order they ran.
    pub fn results(&self) -> &[(&'static str, Result<(), String>)] {
        &self.results
    }

    /// The names of the checks that failed.
    pub fn failed(&self) -> Vec<&'static str> {
        self.results.iter().filter(|(_, result)| result.is_err()).map(|(check, _)| *check).collect()
    }

    /// Panics when a check has failed, with the name of each that has and what was wrong.
    ///
    /// # Panics
    /// That is what it is for.
    #[track_caller]
    pub fn assert_passed(&self) {
        assert!(!self.results.is_empty(), "the suite ran no checks");
        assert!(self.failed().is_empty(), "{self}");
    }
}

/// One line for each check that failed, and one with the numbers.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (check, result) in &self.results {
            if let Err(what) = result {
                writeln!(f, "{check}: {what}")?;
            }
        }
        write!(f, "{} of {} checks failed", self.failed().len(), self.results.len())
    }
}

/// What is wrong with an implementation.
#[derive(Debug)]
pub(super) struct Failed(pub(super) String);

impl From<StorageError> for Failed {
    fn from(error: StorageError) -> Self {
        Self(format!("the storage fails: {error}"))
    }
}

/// Fails unless both are the same.
pub(super) fn same<T: PartialEq + fmt::Debug>(what: &str, found: &T, expected: &T) -> Result<(), Failed> {
    that(found == expected, || format!("{what}: expected {expected:?}, found {found:?}"))
}

/// Fails unless it is so.
pub(super) fn that(is_so: bool, otherwise: impl FnOnce() -> String) -> Result<(), Failed> {
    if is_so { Ok(()) } else { Err(Failed(otherwise())) }
}
