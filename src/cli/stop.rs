//! Being asked to stop: Ctrl-C, SIGTERM, or a terminal that was closed.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The exit code after Ctrl-C: 128 and the number of SIGINT.
pub(super) const INTERRUPTED: u8 = 130;

/// What asks this process to stop, listened for from the moment it is made.
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    /// # Errors
    /// When signals cannot be listened for.
    pub(super) fn listen() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// The name of the next one.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.hang_up.recv() => "SIGHUP",
        }
    }
}

/// Completes when this process is asked to stop.
///
/// # Errors
/// When signals cannot be listened for.
pub(super) async fn asked() -> std::io::Result<()> {
    Signals::listen()?.next().await;
    Ok(())
}
