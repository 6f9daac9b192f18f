//! A handler's notes: which events came, in which order, as which attempt.

use std::sync::{Arc, Mutex};

use mongosub::bson::Document;
use mongosub::{Checkpoint, Delivery, Failure, Handler};

/// One delivery as the handler got it.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    pub key: i32,
    pub position: Checkpoint,
    pub attempt: u32,
    pub may_be_repeat: bool,
}

#[derive(Clone, Default)]
pub struct Recorder {
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Recorder {
    /// Writes a delivery down.
    pub fn note(&self, delivery: &Delivery) {
        let key = delivery.event.document_key::<Document>().unwrap();
        let key = key.and_then(|key| key.get_i32("_id").ok()).unwrap_or(-1);
        let Delivery { position, attempt, may_be_repeat, .. } = delivery.clone();
        self.seen.lock().unwrap().push(Seen { key, position, attempt, may_be_repeat });
    }

    /// A handler that writes down and is done.
    pub fn handler(&self) -> impl Handler + use<> {
        let recorder = self.clone();
        move |delivery: Delivery| {
            recorder.note(&delivery);
            async { Ok(()) }
        }
    }

    /// A handler that writes down, then does this.
    pub fn then<F, Fut>(&self, mut then: F) -> impl Handler + use<F, Fut>
    where
        F: FnMut(Delivery) -> Fut + Send + 'static,
        Fut: Future<Output = Result<(), Failure>> + Send + 'static,
    {
        let recorder = self.clone();
        move |delivery: Delivery| {
            recorder.note(&delivery);
            then(delivery)
        }
    }

    pub fn all(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub fn keys(&self) -> Vec<i32> {
        self.all().into_iter().map(|seen| seen.key).collect()
    }
}
