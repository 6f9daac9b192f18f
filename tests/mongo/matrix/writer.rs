//! A writer that goes on through every fault: documents with ids from 0, one after the other, each acknowledged by a
//! majority before the next.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use mongosub::{
    bson::{Document, doc},
    mongodb::{
        Collection,
        error::{Error, ErrorKind, WriteFailure},
    },
};
use tokio::task::JoinHandle;

use super::witness::longest_gap;
use crate::{seen::PATIENCE, support::wait_until};

/// Between two writes: the machine has others to serve.
const PACE: Duration = Duration::from_millis(4);
const AFTER_A_FAILURE: Duration = Duration::from_millis(20);
const DUPLICATE_KEY: i32 = 11000;

pub struct Writer {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    acknowledged: Mutex<Vec<(i32, Instant)>>,
    doubtful: Mutex<Vec<i32>>,
    failures: AtomicU32,
    last_error: Mutex<String>,
    stop: AtomicBool,
}

/// What a writer knows in the end.
#[derive(Clone, Debug, Default)]
pub struct Written {
    pub acknowledged: Vec<i32>,
    /// Written, and the acknowledgement was lost: whether a majority has them is the server's to say.
    pub doubtful: Vec<i32>,
    /// Writes that failed, and were tried again.
    pub failures: u32,
    /// The longest time between two acknowledgements.
    pub silence: Duration,
}

impl Writer {
    /// `things` should be empty, and its write concern majority.
    pub fn start(things: Collection<Document>) -> Self {
        let shared = Arc::new(Shared::default());
        let task = tokio::spawn(write(things, shared.clone()));
        Self { shared, task }
    }

    /// The last acknowledged id; -1 before any.
    pub fn last(&self) -> i32 {
        lock(&self.shared.acknowledged).last().map_or(-1, |(id, _)| *id)
    }

    /// Writes that have failed so far.
    pub fn failures(&self) -> u32 {
        self.shared.failures.load(Ordering::Relaxed)
    }

    /// Waits until this id, or a later one, is acknowledged.
    pub async fn reaches(&self, id: i32) {
        let what = format!("write {id} is acknowledged");
        let reached = wait_until(&what, 2 * PATIENCE, || async { self.last() >= id });
        let in_time = tokio::time::timeout(PATIENCE, reached).await.is_ok();
        assert!(in_time, "{} of {id} writes; the last error: {}", self.last(), lock(&self.shared.last_error));
    }

    /// After the write in hand is acknowledged, or found.
    pub async fn stop(mut self) -> Written {
        self.shared.stop.store(true, Ordering::Relaxed);
        let ended = tokio::time::timeout(PATIENCE, &mut self.task).await;
        ended.unwrap_or_else(|_| panic!("a write for ever: {}", lock(&self.shared.last_error))).expect("a writer");
        let acknowledged = lock(&self.shared.acknowledged);
        Written {
            acknowledged: acknowledged.iter().map(|(id, _)| *id).collect(),
            doubtful: lock(&self.shared.doubtful).clone(),
            failures: self.shared.failures.load(Ordering::Relaxed),
            silence: longest_gap(acknowledged.iter().map(|(_, at)| *at)),
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

async fn write(things: Collection<Document>, shared: Arc<Shared>) {
    for id in 0.. {
        let mut tries = 0;
        while !shared.stop.load(Ordering::Relaxed) || tries > 0 {
            tries += 1;
            match things.insert_one(doc! { "_id": id }).await {
                Ok(_) => {
                    lock(&shared.acknowledged).push((id, Instant::now()));
                    break;
                }
                Err(error) if is_duplicate(&error) => {
                    assert!(tries > 1, "somebody else has written {id}");
                    lock(&shared.doubtful).push(id);
                    break;
                }
                Err(error) => {
                    *lock(&shared.last_error) = error.kind.to_string();
                    shared.failures.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(AFTER_A_FAILURE).await;
                }
            }
        }
        if shared.stop.load(Ordering::Relaxed) {
            break;
        }
        tokio::time::sleep(PACE).await;
    }
}

fn is_duplicate(error: &Error) -> bool {
    matches!(&*error.kind, ErrorKind::Write(WriteFailure::WriteError(error)) if error.code == DUPLICATE_KEY)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
