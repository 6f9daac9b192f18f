//! A source that changes under a subscription: what the model sees of it, and that nothing is lost or comes twice.

mod ended;

use libtest_mimic::Trial;

use crate::support::on_any_server;

pub fn tests() -> Vec<Trial> {
    [on_any_server(ended::tests())].into_iter().flatten().collect()
}
