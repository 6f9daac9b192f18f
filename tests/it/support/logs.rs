//! What a test's thread logs, to be read back line by line.

use std::cell::RefCell;
use std::io;
use std::marker::PhantomData;
use std::sync::Once;

use tracing::Level;

thread_local! {
    static TEXT: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
}

static GLOBAL: Once = Once::new();

/// Captures the log of this thread, and so of a test's whole runtime, until it is dropped.
///
/// There is one subscriber for all threads: with one for each, a line whose first thread has none is never logged.
pub struct Logs {
    _this_thread: PhantomData<*const ()>,
}

struct ToThread;

impl io::Write for ToThread {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        TEXT.with_borrow_mut(|text| text.iter_mut().for_each(|text| text.extend_from_slice(bytes)));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Logs {
    pub fn capture() -> Self {
        GLOBAL.call_once(|| {
            let subscriber = tracing_subscriber::fmt().with_max_level(Level::INFO).with_ansi(false).without_time();
            subscriber.with_writer(|| ToThread).init();
        });
        TEXT.set(Some(Vec::new()));
        Self { _this_thread: PhantomData }
    }

    /// The lines of this level in which this stands.
    #[allow(clippy::unused_self, reason = "whoever reads a log has captured it")]
    pub fn lines(&self, level: &str, part: &str) -> Vec<String> {
        let text = TEXT.with_borrow(|text| String::from_utf8(text.clone().unwrap()).unwrap());
        let wanted = |line: &&str| line.trim_start().starts_with(level) && line.contains(part);
        text.lines().filter(wanted).map(ToString::to_string).collect()
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        TEXT.set(None);
    }
}
