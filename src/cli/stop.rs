//! Being asked to stop: Ctrl-C, SIGTERM, or a terminal that was closed.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The exit code after Ctrl-C: 128 and the number of SIGINT.
pub(super) const INTERRUPTED: u8 = 130;

/// What asks this process to stop, listened for from the moment it is made. A hang-up that was ignored before stays so:
/// that is what `nohup` means.
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Option<Signal>,
}

impl Signals {
    /// # Errors
    /// When signals cannot be listened for.
    pub(super) fn listen() -> std::io::Result<Self> {
        let hang_up = SignalKind::hangup();
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: if is_ignored(hang_up) { None } else { Some(signal(hang_up)?) },
        })
    }

    /// The name of the next one.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub(super) async fn next(&mut self) -> &'static str {
        let hang_up = async {
            match &mut self.hang_up {
                Some(hang_up) => hang_up.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
            _ = hang_up => "SIGHUP",
        }
    }
}

/// Whether this process was started to ignore it; where there is no telling, it was not.
fn is_ignored(kind: SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    // One bit a signal, from the first.
    mask >> (kind.as_raw_value() - 1) & 1 == 1
}

/// Completes when this process is asked to stop.
///
/// # Errors
/// When signals cannot be listened for.
pub(super) async fn asked() -> std::io::Result<()> {
    Signals::listen()?.next().await;
    Ok(())
}
