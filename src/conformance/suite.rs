//! How a suite runs: every check by its name, each against a storage of its own.

use std::sync::atomic::{AtomicU32, Ordering};

use super::report::{Failed, Report};
use crate::ids::SubscriptionId;
use crate::storage::BoxFuture;

pub(super) type Check<S> = fn(S) -> BoxFuture<'static, Result<(), Failed>>;

/// The checks of these names, each with its module.
macro_rules! checks {
    ($($module:ident :: $name:ident,)*) => {
        vec![$((stringify!($name), |storage| Box::pin($module::$name(storage)))),*]
    };
}
pub(super) use checks;

pub(super) async fn run<S, F, Fut>(checks: Vec<(&'static str, Check<S>)>, fresh: F) -> Report
where
    F: Fn() -> Fut,
    Fut: Future<Output = S>,
{
    let mut report = Report::default();
    for (name, check) in checks {
        report.add(name, check(fresh().await).await);
    }
    report
}

/// An id that no other check and no other run uses.
pub(super) fn fresh_id(name: &str) -> Result<SubscriptionId, Failed> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    SubscriptionId::new(format!("conformance_{:016x}_{next}_{name}", fastrand::u64(..)))
        .map_err(|error| Failed(error.to_string()))
}
