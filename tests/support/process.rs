//! One `mongod` as a process, with its files in the run's directory.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    os::unix::{
        fs::PermissionsExt,
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, bail};

use super::{
    choice, guard,
    options::KEY,
    run,
    wait::{wait_for, wait_until},
};

const STARTS_WITHIN: Duration = Duration::from_secs(60);
const ENDS_WITHIN: Duration = Duration::from_secs(30);

pub struct Process {
    mongod: PathBuf,
    arguments: Vec<String>,
    directory: PathBuf,
    child: Mutex<Child>,
}

impl Process {
    /// Returns when the server listens. Its data is in `db` of the directory, and may be there already.
    pub async fn start(mut arguments: Vec<String>, with_key: bool, directory: PathBuf) -> anyhow::Result<Self> {
        let mongod = choice::mongod().await?;
        let data = directory.join("db");
        fs::create_dir_all(&data)?;
        arguments.push(format!("--dbpath={}", data.display()));
        if with_key {
            let key = directory.join("key");
            fs::write(&key, KEY)?;
            fs::set_permissions(&key, Permissions::from_mode(0o600))?;
            arguments.push(format!("--keyFile={}", key.display()));
        }
        let log = File::create(directory.join("log"))?;
        let child = Mutex::new(spawn(&mongod, &arguments, log)?);
        let process = Self { mongod, arguments, directory, child };
        process.listens().await?;
        Ok(process)
    }

    pub fn id(&self) -> u32 {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).id()
    }

    /// A port taken by somebody else ends the server, so this is never another one's answer.
    async fn listens(&self) -> anyhow::Result<()> {
        let log = wait_for("mongod listens", STARTS_WITHIN, || async {
            let log = fs::read_to_string(self.directory.join("log")).unwrap_or_default();
            (log.contains("Waiting for connections") || self.status().is_some()).then_some(log)
        });
        let log = log.await;
        if let Some(status) = self.status() {
            bail!("mongod ended at its start: {status}, {}", log.lines().last().unwrap_or("and said nothing"));
        }
        Ok(())
    }

    pub fn copy_files(&self, to: &Path) -> anyhow::Result<()> {
        let copied = Command::new("cp").arg("-a").arg(self.directory.join("db")).arg(to).status()?;
        anyhow::ensure!(copied.success(), "the files of the server were not copied: {copied}");
        Ok(())
    }

    fn status(&self) -> Option<ExitStatus> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        child.try_wait().unwrap_or_else(|_| Some(ExitStatus::from_raw(0)))
    }

    pub async fn kill(&self) -> anyhow::Result<()> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).kill()?;
        self.ended().await;
        Ok(())
    }

    /// Waits for the server's end, which somebody has asked for.
    pub async fn ended(&self) {
        wait_until("mongod has ended", ENDS_WITHIN, || async { self.status().is_some() }).await;
    }

    /// Does not wait until the server listens.
    pub fn start_again(&self) -> anyhow::Result<()> {
        let log = OpenOptions::new().append(true).open(self.directory.join("log"))?;
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        *child = spawn(&self.mongod, &self.arguments, log)?;
        Ok(())
    }

    /// Returns when all of its threads have stopped: on a busy machine one may go on for a while after the signal.
    pub fn pause(&self) -> anyhow::Result<()> {
        guard::signal("STOP", self.id())?;
        let threads = format!("/proc/{}/task", self.id());
        let stopped = |stat: &str| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'));
        while fs::read_dir(&threads)?.flatten().any(|thread| {
            // A thread that has ended meanwhile is not there to be read.
            fs::read_to_string(thread.path().join("stat")).is_ok_and(|stat| !stopped(&stat))
        }) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        Ok(())
    }

    pub fn unpause(&self) -> anyhow::Result<()> {
        Ok(guard::signal("CONT", self.id())?)
    }

    pub async fn remove(self) -> anyhow::Result<()> {
        if self.status().is_none() {
            self.kill().await?;
        }
        fs::remove_dir_all(&self.directory).context("the server's directory")
    }
}

fn spawn(mongod: &PathBuf, arguments: &[String], log: File) -> anyhow::Result<Child> {
    Command::new(mongod)
        .args(arguments)
        .env(run::VARIABLE, run::current().id())
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()
        .with_context(|| format!("{} does not start", mongod.display()))
}
