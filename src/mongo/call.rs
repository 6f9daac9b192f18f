//! Runs one driver operation to its end, whatever becomes of whoever waits for it. Called by everything in `mongo/`.
//!
//! Driver futures must not be dropped half-way, so no `select!` and no `timeout` is put around them: the operation has
//! a task of its own, and only the waiting for it has a deadline. (`RawBatchCursor::next` is the one exception.)

use std::time::Duration;

use tracing::Instrument;

/// How long a short command may take in all: server selection with its default of 30 s, and a connection.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);

/// Why an operation gave nothing.
#[derive(Debug)]
pub(super) enum CallError {
    /// The driver or the server said no.
    Driver(mongodb::error::Error),
    /// No answer within the deadline. The operation goes on, and its outcome is unknown.
    TimedOut(Duration),
}

/// Runs `operation` on its own task and waits for it, at most for `deadline`.
///
/// Operations borrow the handle they are made of: hand over an `async move` block that owns a clone of it.
///
/// # Cancel safety
/// Dropping it ends the waiting, never the operation; its outcome is then unknown.
pub(super) async fn call<T: Send + 'static>(
    deadline: Duration,
    operation: impl Future<Output = mongodb::error::Result<T>> + Send + 'static,
) -> Result<T, CallError> {
    let task = tokio::spawn(operation.in_current_span());
    match tokio::time::timeout(deadline, task).await {
        Ok(Ok(outcome)) => outcome.map_err(CallError::Driver),
        Ok(Err(gone)) if gone.is_panic() => std::panic::resume_unwind(gone.into_panic()),
        // Cancelled: the runtime is shutting down, and this task with it.
        Ok(Err(_)) | Err(_) => Err(CallError::TimedOut(deadline)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_operation_goes_on_after_its_deadline_and_after_its_caller() {
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        let slow = |tell: tokio::sync::mpsc::UnboundedSender<u8>, word| async move {
            tokio::time::sleep(Duration::from_secs(5)).await;
            tell.send(word).unwrap();
            Ok(word)
        };
        let late = call(Duration::from_secs(1), slow(tell.clone(), 1)).await;
        assert!(matches!(late, Err(CallError::TimedOut(deadline)) if deadline == Duration::from_secs(1)));
        drop(tokio::time::timeout(Duration::from_secs(1), call(Duration::from_secs(60), slow(tell.clone(), 2))).await);
        assert!(matches!(call(Duration::from_secs(60), slow(tell, 3)).await, Ok(3)));
        assert_eq!((told.recv().await, told.recv().await, told.recv().await), (Some(1), Some(2), Some(3)));
    }

    #[tokio::test]
    async fn the_error_of_the_driver_comes_through() {
        let refused = call(Duration::from_secs(5), async { Err::<(), _>(mongodb::error::Error::custom("no")) }).await;
        assert!(matches!(refused, Err(CallError::Driver(error)) if error.get_custom::<&str>() == Some(&"no")));
    }
}
