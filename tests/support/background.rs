//! One runtime that lives as long as the process.
//!
//! The clients of the container engine and of the driver belong to the runtime that made them, and every test has a runtime of
//! its own. Whatever outlives a test, the shared servers first of all, is made and used here.

use std::{panic, sync::LazyLock};

use tokio::runtime::{Builder, Runtime};

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("test servers")
        .enable_all()
        .build()
        .expect("a runtime for the test servers")
});

/// Runs a future to its end there, also when the caller stops waiting for it. A panic in it is the caller's.
pub async fn run<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> T {
    match RUNTIME.spawn(future).await {
        Ok(value) => value,
        Err(error) => panic::resume_unwind(error.into_panic()),
    }
}

/// Starts a future there and does not wait for it.
pub fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    RUNTIME.spawn(future);
}

/// For threads outside any runtime.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    RUNTIME.block_on(future)
}
