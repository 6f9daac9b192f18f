//! Handlers that finish when a test says so, and what was logged meanwhile.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::sync::{Arc, Mutex, OnceLock};

use tokio::sync::Semaphore;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Dispatch, Event, Level, Metadata, Subscriber};

/// Holds whoever waits until as many have been let go.
#[derive(Clone)]
pub struct Hold(Arc<Semaphore>);

impl Default for Hold {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(0)))
    }
}

impl Hold {
    pub fn let_go(&self, how_many: usize) {
        self.0.add_permits(how_many);
    }

    pub async fn wait(&self) {
        self.0.acquire().await.unwrap().forget();
    }
}

/// One line that was logged: its level, its message, its other fields.
#[derive(Debug, Clone)]
pub struct Line {
    pub level: Level,
    pub message: String,
    pub fields: BTreeMap<String, String>,
}

/// Writes down what this thread logs, as long as the guard lives. A test under paused time has one thread.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<Line>>>);

impl Log {
    #[must_use]
    pub fn begin(&self) -> tracing::subscriber::DefaultGuard {
        // With a single dispatcher alive, tracing judges a new callsite by the thread that meets it first, which may
        // belong to a test that logs nothing.
        static SECOND: OnceLock<Dispatch> = OnceLock::new();
        SECOND.get_or_init(|| Dispatch::new(Self::default()));
        tracing::subscriber::set_default(self.clone())
    }

    /// The messages at a level that contain a text.
    pub fn messages(&self, level: Level, text: &str) -> Vec<String> {
        let lines = self.0.lock().unwrap();
        let wanted = lines.iter().filter(|line| line.level == level && line.message.contains(text));
        wanted.map(|line| line.message.clone()).collect()
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("mongosub")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line { level: *event.metadata().level(), message: String::new(), fields: BTreeMap::new() };
        event.record(&mut line);
        self.0.lock().unwrap().push(line);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            write!(self.message, "{value:?}").unwrap();
        } else {
            self.fields.insert(field.name().into(), format!("{value:?}"));
        }
    }
}
