//! Standard output as a file of its own, without the buffer of `std::io::stdout`, and who reads it. It writes nothing.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;

use tokio::io::Interest;
use tokio::net::unix::pipe::Sender;

/// What is written to a pipe in one go comes out as a whole or not at all, up to this (`PIPE_BUF`; 512 by POSIX, 4096
/// on Linux).
const WHOLE_IN_A_PIPE: usize = if cfg!(target_os = "linux") { 4096 } else { 512 };

/// Standard output, and how many bytes of one write are taken as a whole or not at all.
pub(super) fn open() -> io::Result<(File, usize)> {
    let file = File::from(duplicate()?);
    let whole = if file.metadata()?.file_type().is_fifo() { WHOLE_IN_A_PIPE } else { 0 };
    Ok((file, whole))
}

fn duplicate() -> io::Result<OwnedFd> {
    io::stdout().as_fd().try_clone_to_owned()
}

/// Completes when whoever reads the pipe has gone, also while nothing is written; never for what is no pipe.
///
/// # Cancel safety
/// Nothing is lost by dropping it.
pub(super) async fn reader_gone() {
    if is_closed().await.is_none() {
        std::future::pending::<()>().await;
    }
}

/// `None` when it cannot be watched.
async fn is_closed() -> Option<()> {
    open().ok().filter(|(_, whole)| *whole > 0)?;
    // Nothing is written by this one, so the pipe is left as it is: others may share it, who expect it to block.
    let pipe = Sender::from_owned_fd_unchecked(duplicate().ok()?).ok()?;
    pipe.ready(Interest::ERROR).await.ok().map(|_| ())
}
