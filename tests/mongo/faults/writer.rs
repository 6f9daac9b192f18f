//! Writes one document after the other, each acknowledged by a majority before the next, through every error.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI32, Ordering},
    },
    time::Duration,
};

use mongosub::{
    bson::{Document, doc},
    mongodb::{
        Collection,
        error::{Error, ErrorKind, WriteFailure},
    },
};
use tokio::task::JoinHandle;

use crate::{seen::PATIENCE, support::wait_until};

/// Documents 0, 1, 2 and so on: one that may have been written is written until the server says that it is there.
pub struct Writer {
    acknowledged: Arc<AtomicI32>,
    stop: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Writer {
    pub fn start(collection: Collection<Document>) -> Self {
        let (acknowledged, stop) = (Arc::new(AtomicI32::new(-1)), Arc::new(AtomicBool::new(false)));
        let (count, end) = (acknowledged.clone(), stop.clone());
        let task = tokio::spawn(async move {
            for id in 0.. {
                if end.load(Ordering::Relaxed) {
                    return;
                }
                while let Err(error) = collection.insert_one(doc! { "_id": id }).await {
                    if is_there(&error) {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                count.store(id, Ordering::Relaxed);
            }
        });
        Self { acknowledged, stop, task }
    }

    /// Waits until so many more are acknowledged, and gives the last one.
    pub async fn writes(&self, more: i32) -> i32 {
        let from = self.acknowledged.load(Ordering::Relaxed);
        let acknowledged = || async { self.acknowledged.load(Ordering::Relaxed) >= from + more };
        wait_until(&format!("{more} writes are acknowledged"), PATIENCE, acknowledged).await;
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// The last acknowledged write.
    pub async fn stop(self) -> i32 {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.expect("a writer that writes");
        self.acknowledged.load(Ordering::Relaxed)
    }
}

fn is_there(error: &Error) -> bool {
    matches!(&*error.kind, ErrorKind::Write(WriteFailure::WriteError(error)) if error.code == 11000)
}
