//! Events as lines: collected, then written and flushed together, which settles them. The subscription's handler.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::extjson::{self, Format};
use super::writer::{Done, Writer};
use crate::batch_handler::{BatchFailure, BatchHandler};
use crate::delivery::Delivery;
use crate::error::DecodeError;

/// How long a reader that takes nothing is waited for once the command has been asked to stop.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many events are written and flushed together at most. After a kill they come again as a whole, and more would
/// make nothing faster.
pub(super) const TOGETHER: usize = 128;
/// How much memory is kept for lines in between.
const KEPT: usize = 1 << 20;

/// Lines on their way out.
pub(super) struct Lines {
    format: Format,
    buffer: Vec<u8>,
    writer: Arc<Writer>,
    /// Cancelled here when whoever reads the lines has gone.
    reader_gone: CancellationToken,
}

/// Lines of which not all could be written.
#[derive(Debug)]
pub(super) struct Unwritten {
    /// How many were, from the first.
    pub(super) written: usize,
    pub(super) cause: io::Error,
}

impl Lines {
    pub(super) fn new(format: Format, writer: Arc<Writer>, reader_gone: CancellationToken) -> Self {
        Self { format, buffer: Vec::new(), writer, reader_gone }
    }

    /// Adds the line of an event.
    ///
    /// # Errors
    /// [`DecodeError`] when the event is no BSON; nothing is added then.
    pub(super) fn push(&mut self, delivery: &Delivery) -> Result<(), DecodeError> {
        let before = self.buffer.len();
        let appended = extjson::append(delivery.event.raw(), self.format, &mut self.buffer);
        match appended {
            Ok(()) => self.buffer.push(b'\n'),
            Err(_) => self.buffer.truncate(before),
        }
        appended
    }

    /// Writes what was added. Once `stop` has completed a reader that takes nothing is waited for a little while only.
    ///
    /// # Cancel safety
    /// Dropped, the lines are written all the same, as far as they are taken.
    pub(super) async fn flush(&mut self, stop: impl Future<Output = ()>) -> Result<(), Unwritten> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        tokio::pin!(stop);
        let mut stopped = false;
        let mut writing = self.writer.write(std::mem::take(&mut self.buffer));
        let done = tokio::select! {
            done = &mut writing.done => done,
            () = async { stop.as_mut().await; stopped = true; tokio::time::sleep(PATIENCE).await } => {
                self.writer.stop();
                let cause = format!("nobody took it within {} s of being asked to stop", PATIENCE.as_secs());
                return Err(Unwritten { written: writing.written(), cause: io::Error::other(cause) });
            }
        };
        let gone = || Done { buffer: Vec::new(), result: Err(io::Error::other("the writing thread has ended")) };
        let Done { mut buffer, result } = done.unwrap_or_else(|_| gone());
        buffer.clear();
        buffer.shrink_to(KEPT);
        self.buffer = buffer;
        let Err(cause) = result else { return Ok(()) };
        if cause.kind() == ErrorKind::BrokenPipe {
            self.reader_gone.cancel();
            // Trying again is no use: the command ends by this.
            if !stopped {
                stop.await;
            }
        }
        Err(Unwritten { written: writing.written(), cause })
    }
}

impl BatchHandler for Lines {
    /// Writes what can be written, up to an event that is no BSON.
    async fn handle_batch(&mut self, batch: &[Delivery]) -> Result<(), BatchFailure> {
        // What an earlier call had added and not written comes again.
        self.buffer.clear();
        let Some(first) = batch.first() else { return Ok(()) };
        let pushed = batch.iter().map(|delivery| self.push(delivery)).enumerate();
        let broken = pushed.filter_map(|(at, pushed)| Some((at, pushed.err()?))).next();
        let flushed = self.flush(first.cancelled()).await;
        flushed.map_err(|Unwritten { written, cause }| BatchFailure::after(written, cause))?;
        broken.map_or(Ok(()), |(at, error)| Err(BatchFailure::after(at, error)))
    }
}
