//! The fault matrix: what can happen to servers while others write, and what a subscription makes of it.
//!
//! `writer` writes through every fault and knows what was acknowledged, `witness` is a subscription with everything that is
//! to be said of it afterwards, `verdict` compares the two with what the server has. Each fault prints one line of figures.

mod nodes;
pub mod verdict;
pub mod witness;
pub mod writer;

use libtest_mimic::Trial;

pub use self::nodes::long;

pub fn tests() -> Vec<Trial> {
    [verdict::tests(), nodes::tests()].into_iter().flatten().collect()
}
