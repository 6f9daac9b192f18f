//! Writes lines on a thread of its own: whoever reads them slowly, or not at all, holds up nothing but the lines. It
//! knows at every moment whether a line is half written, and stops between lines. `lines.rs` hands it what to write.

use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use tokio::sync::{oneshot, watch};

/// How much is written at once where a write is not whole or nothing.
const PIECE: usize = 256 * 1024;
/// How often a full pipe that somebody has made non-blocking is tried again.
const AGAIN: Duration = Duration::from_millis(5);

/// The writing end of a thread that writes.
pub(super) struct Writer {
    jobs: mpsc::Sender<Job>,
    state: Arc<watch::Sender<State>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    /// A write is under way that could leave a half line behind if the process ended now. After an error it is over.
    midway: bool,
    /// Nothing is begun any more.
    stopped: bool,
}

struct Job {
    lines: Vec<u8>,
    written: Arc<AtomicUsize>,
    done: oneshot::Sender<Done>,
}

/// How a job ended, with its buffer.
pub(super) struct Done {
    pub(super) buffer: Vec<u8>,
    pub(super) result: io::Result<()>,
}

/// Lines that are being written. Dropped, they go on being written.
pub(super) struct Writing {
    pub(super) done: oneshot::Receiver<Done>,
    written: Arc<AtomicUsize>,
}

impl Writing {
    /// How many whole lines are out by now.
    pub(super) fn written(&self) -> usize {
        self.written.load(Ordering::Acquire)
    }
}

impl Writer {
    /// Starts the thread. A write of at most `whole` bytes to `out` is done as a whole or not at all.
    pub(super) fn start(out: impl Write + Send + 'static, whole: usize) -> io::Result<Self> {
        let state = Arc::new(watch::Sender::default());
        let (jobs, queue) = mpsc::channel::<Job>();
        let mut thread = Thread { out, whole, state: state.clone(), torn: Vec::new() };
        thread::Builder::new().name("stdout".into()).spawn(move || {
            for Job { lines, written, done } in queue {
                let result = thread.write(&lines, &written);
                // Who asked may have gone.
                let _ = done.send(Done { buffer: lines, result });
            }
        })?;
        Ok(Self { jobs, state })
    }

    /// Writes lines, each with its end.
    pub(super) fn write(&self, lines: Vec<u8>) -> Writing {
        let (sender, done) = oneshot::channel();
        let written = Arc::new(AtomicUsize::new(0));
        // The thread lives as long as this end; were it gone, the answer would never come and say so.
        let _ = self.jobs.send(Job { lines, written: written.clone(), done: sender });
        Writing { done, written }
    }

    /// Begins no further line. A line that is half written is finished.
    pub(super) fn stop(&self) {
        self.state.send_modify(|state| state.stopped = true);
    }

    /// Whether ending the process now could leave a half line behind.
    pub(super) fn is_midway(&self) -> bool {
        self.state.borrow().midway
    }

    /// Waits until no line is half written. Stopped before, it stays so.
    pub(super) async fn between_lines(&self) {
        // The sender is here, so it cannot be gone.
        let _ = self.state.subscribe().wait_for(|state| !state.midway).await;
    }
}

struct Thread<W> {
    out: W,
    whole: usize,
    state: Arc<watch::Sender<State>>,
    /// The rest of a line that an error has cut off: it comes before anything else.
    torn: Vec<u8>,
}

impl<W: Write> Thread<W> {
    fn write(&mut self, lines: &[u8], written: &AtomicUsize) -> io::Result<()> {
        self.midway(!self.torn.is_empty());
        let ended = self.finish_torn().and_then(|()| self.write_whole(lines, written));
        self.midway(false);
        ended
    }

    fn finish_torn(&mut self) -> io::Result<()> {
        while !self.torn.is_empty() {
            let number = write_some(&mut self.out, &self.torn)?;
            self.torn.drain(..number);
        }
        Ok(())
    }

    fn write_whole(&mut self, lines: &[u8], written: &AtomicUsize) -> io::Result<()> {
        let mut at = 0;
        while at < lines.len() {
            let begins_line = at == 0 || lines[at - 1] == b'\n';
            let end = at + if begins_line { self.piece(&lines[at..]) } else { line(&lines[at..]) };
            if begins_line && !self.begin(end - at) {
                return Err(io::Error::other("it was asked to stop before it was written"));
            }
            let number = match write_some(&mut self.out, &lines[at..end]) {
                Ok(number) => number,
                Err(error) => {
                    if !begins_line {
                        self.torn.extend_from_slice(&lines[at..at + line(&lines[at..])]);
                    }
                    return Err(error);
                }
            };
            let ends = lines[at..at + number].split(|byte| *byte == b'\n').count() - 1;
            at += number;
            written.fetch_add(ends, Ordering::Release);
            self.midway(lines[at - 1] != b'\n');
        }
        Ok(())
    }

    /// How much to write at once, from the beginning of a line: whole lines, one at least.
    fn piece(&self, lines: &[u8]) -> usize {
        let most = if self.whole > 0 { self.whole } else { PIECE };
        let fits = lines
            .get(..most)
            .map_or(lines.len(), |fits| fits.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1));
        if fits == 0 { line(lines) } else { fits }
    }

    /// Whether lines of so many bytes may be begun.
    fn begin(&self, bytes: usize) -> bool {
        let mut may = false;
        self.state.send_if_modified(|state| {
            may = !state.stopped;
            state.midway = may && bytes > self.whole;
            false
        });
        may
    }

    fn midway(&self, midway: bool) {
        self.state.send_if_modified(|state| std::mem::replace(&mut state.midway, midway) != midway);
    }
}

/// The length of the first line, its end included.
fn line(lines: &[u8]) -> usize {
    lines.iter().position(|byte| *byte == b'\n').map_or(lines.len(), |end| end + 1)
}

/// One write that writes something.
fn write_some(out: &mut impl Write, bytes: &[u8]) -> io::Result<usize> {
    loop {
        match out.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(number) => return Ok(number),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(AGAIN),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests;
