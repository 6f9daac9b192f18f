//! A source that changes under a subscription, on real servers: what it watches is dropped, renamed and made anew, its
//! history is lost, or it is another one.

mod another;
mod ends;
mod history;
mod skip;

use libtest_mimic::Trial;

pub fn tests() -> Vec<Trial> {
    [ends::tests(), another::tests(), skip::tests()].into_iter().flatten().collect()
}

/// Those with an oplog of their own, which is rolled: a version's server bears on them no less, but they take long.
pub fn with_small_oplogs() -> Vec<Trial> {
    history::tests()
}
