//! Being asked to stop: Ctrl-C, SIGTERM, or a terminal that was closed.

use tokio::signal::unix::{SignalKind, signal};

/// The exit code after Ctrl-C: 128 and the number of SIGINT.
pub(super) const INTERRUPTED: u8 = 130;

/// Completes when this process is asked to stop.
///
/// # Errors
/// When signals cannot be listened for.
pub(super) async fn asked() -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    tokio::select! {
        asked = tokio::signal::ctrl_c() => asked,
        _ = terminate.recv() => Ok(()),
        _ = hang_up.recv() => Ok(()),
    }
}
