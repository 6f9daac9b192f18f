//! One run of a test binary: its id, which labels everything it starts, its directory, and its guard.
//!
//! Containers and networks carry the id as a label, processes as an environment variable, which their children inherit,
//! directories and databases in their names. So what belongs to a run can be found without anybody having kept a list.

use std::{
    env, fs,
    path::PathBuf,
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use super::guard::Guard;

/// The label of containers and networks.
pub const LABEL: &str = "mongosub.test.run";
/// The label of processes: a variable in their environment.
pub const VARIABLE: &str = "MONGOSUB_TEST_RUN";

static RUN: OnceLock<Run> = OnceLock::new();

pub struct Run {
    id: String,
    guard: Mutex<Option<Guard>>,
    guard_pid: u32,
}

/// Starts the guard, and from then on servers can be started. Once per process.
pub fn begin() -> &'static Run {
    RUN.get_or_init(|| {
        let id = format!("{:016x}", fastrand::u64(..));
        let guard = Guard::start(&id);
        Run { id, guard_pid: guard.pid(), guard: Mutex::new(Some(guard)) }
    })
}

/// The run that this process has begun.
pub fn current() -> &'static Run {
    RUN.get().expect("run::begin() comes before anything that has to be removed again")
}

impl Run {
    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn guard_pid(&self) -> u32 {
        self.guard_pid
    }

    /// The run's own directory, made when first asked for.
    pub fn directory(&self) -> std::io::Result<PathBuf> {
        let path = directory_of(&self.id);
        fs::create_dir_all(&path)?;
        Ok(path)
    }

    /// A name that no other database of this run has.
    pub fn database_name(&self) -> String {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        format!("{}{}", database_prefix(&self.id), COUNT.fetch_add(1, Ordering::Relaxed))
    }

    /// Tells the guard of a server that is not ours but will hold databases of this run.
    pub fn databases_on(&self, uri: &str) {
        if let Some(guard) = &mut *self.guard.lock().unwrap_or_else(PoisonError::into_inner) {
            guard.tell(&format!("uri {uri}"));
        }
    }

    /// Waits until the guard has removed everything that carries the run's label.
    pub fn end(&self) {
        if let Some(guard) = self.guard.lock().unwrap_or_else(PoisonError::into_inner).take() {
            guard.finish();
        }
    }
}

pub fn directory_of(id: &str) -> PathBuf {
    env::temp_dir().join(format!("mongosub-test-{id}"))
}

/// How the names of all databases of a run begin.
pub fn database_prefix(id: &str) -> String {
    format!("mongosub_{id}_")
}
