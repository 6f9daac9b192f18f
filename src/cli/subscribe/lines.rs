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
        let broken = batch.iter().enumerate().find_map(|(at, delivery)| Some((at, self.push(delivery).err()?)));
        let flushed = self.flush(first.cancelled()).await;
        flushed.map_err(|Unwritten { written, cause }| BatchFailure::after(written, cause))?;
        broken.map_or(Ok(()), |(at, error)| Err(BatchFailure::after(at, error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::future::{pending, ready};
    use std::io::Write;
    use std::sync::{Mutex, mpsc};

    use bson::doc;

    use crate::memory;

    /// Takes what it is given; with a channel, one write a word. It has gone when nobody can give a word any more.
    #[derive(Default)]
    struct Out {
        taken: Arc<Mutex<Vec<u8>>>,
        words: Option<mpsc::Receiver<()>>,
    }

    impl Write for Out {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if let Some(words) = &self.words {
                words.recv().map_err(|_| ErrorKind::BrokenPipe)?;
            }
            self.taken.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Case {
        lines: Lines,
        taken: Arc<Mutex<Vec<u8>>>,
        gone: CancellationToken,
    }

    impl Case {
        /// Whose writes take a line each.
        fn with(words: Option<mpsc::Receiver<()>>) -> Self {
            let out = Out { words, ..Out::default() };
            let (taken, gone) = (out.taken.clone(), CancellationToken::new());
            let writer = Arc::new(Writer::start(out, 1).unwrap());
            Self { lines: Lines::new(Format::Relaxed, writer, gone.clone()), taken, gone }
        }

        fn ids(&self) -> Vec<i64> {
            let taken = String::from_utf8(self.taken.lock().unwrap().clone()).unwrap();
            assert!(taken.is_empty() || taken.ends_with('\n'), "{taken}");
            let id = |line| serde_json::from_str::<serde_json::Value>(line).unwrap()["documentKey"]["_id"].as_i64();
            taken.lines().map(|line| id(line).unwrap()).collect()
        }
    }

    fn good(id: i32) -> Delivery {
        memory::delivery(memory::insert(id, doc! { "a": "wxyz" }))
    }

    /// Its text is no UTF-8.
    fn broken() -> Delivery {
        let mut delivery = good(0);
        let mut bytes = delivery.event.bytes().to_vec();
        let at = bytes.windows(4).position(|four| four == b"wxyz").unwrap();
        bytes[at] = 0xff;
        delivery.event = crate::event::ChangeEvent::new(bytes.into()).unwrap();
        delivery
    }

    #[tokio::test]
    async fn a_batch_is_settled_when_its_lines_are_out() {
        let mut case = Case::with(None);
        for batch in [1..4, 4..5] {
            case.lines.handle_batch(&batch.map(good).collect::<Vec<_>>()).await.unwrap();
        }
        assert_eq!(case.ids(), [1, 2, 3, 4]);
    }

    #[tokio::test]
    async fn what_stands_before_an_event_that_is_no_bson_is_written_and_nothing_of_it_or_behind_it() {
        let mut case = Case::with(None);
        let batch = [good(1), good(2), broken(), good(3)];
        let failure = case.lines.handle_batch(&batch).await.unwrap_err();
        assert_eq!(failure.settled(), 2);
        assert!(failure.to_string().contains("fullDocument.a"), "{failure}");
        let failure = case.lines.handle_batch(&batch[2..]).await.unwrap_err();
        assert_eq!((failure.settled(), case.ids()), (0, vec![1, 2]));
    }

    #[tokio::test]
    async fn a_reader_that_has_gone_settles_what_it_took_and_ends_the_command() {
        let (word, words) = mpsc::channel();
        let mut case = Case::with(Some(words));
        word.send(()).unwrap();
        drop(word);
        for id in [1, 2] {
            case.lines.push(&good(id)).unwrap();
        }
        let asked = case.gone.clone();
        // It is not tried again before the command has heard of it.
        let flushed = tokio::time::timeout(PATIENCE, case.lines.flush(asked.cancelled())).await;
        let unwritten = flushed.expect("it tells the command").unwrap_err();
        assert!(case.gone.is_cancelled());
        assert_eq!((unwritten.written, unwritten.cause.kind()), (1, ErrorKind::BrokenPipe));
        assert_eq!(case.ids(), [1]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_nothing_is_waited_for_a_little_while_once_it_is_to_stop() {
        let (word, words) = mpsc::channel();
        let mut case = Case::with(Some(words));
        case.lines.push(&good(1)).unwrap();
        // Nobody has asked it to stop: it waits.
        let waits = tokio::time::timeout(PATIENCE * 100, case.lines.flush(pending())).await;
        assert!(waits.is_err());
        word.send(()).unwrap();
        case.lines.push(&good(2)).unwrap();
        let asked = tokio::time::Instant::now();
        let unwritten = case.lines.flush(ready(())).await.unwrap_err();
        assert_eq!((unwritten.written, asked.elapsed()), (0, PATIENCE));
        drop(word);
    }
}
