//! `mongosub demo`, run as a user runs it: what it says, how it ends, and that nothing of it is left.

use std::{fs, os::unix::fs::symlink, path::Path, time::Duration};

use libtest_mimic::Trial;
use tempfile::TempDir;
use tokio::process::Command;

use crate::support::{
    Child, Fixture, Options, Server, choice,
    choice::{Launcher, choice},
    test, wait_until,
};

const LIMIT: Duration = Duration::from_secs(60);

pub fn tests() -> Vec<Trial> {
    let mut tests = vec![
        test("the demo loses nothing and leaves nothing behind", |_| async {
            let demo = Demo::start(&[]);
            demo.plays_to_its_end().await;
        }),
        test("the demo interrupted midway leaves nothing behind", |_| async {
            for (signal, after) in [("INT", "server"), ("TERM", "subscribed"), ("HUP", "killed"), ("INT", "oplog")] {
                let mut demo = Demo::start(&[]);
                demo.says(after).await;
                demo.ends_by(signal).await;
            }
        }),
        test("the demo on a server of one's own leaves its oplog alone and no database behind", |ctx| async move {
            let Fixture { server, client, .. } = ctx.plain().await;
            let demo = Demo::start(&["--uri", &server.uri()]);
            let said = demo.plays_to_its_end().await;
            assert!(said.contains("its oplog is left alone"), "{said}");
            assert!(said.contains("left alone, since the server is your own"), "{said}");
            let mut demo = Demo::start(&["--uri", &server.uri()]);
            demo.says("killed").await;
            demo.ends_by("INT").await;
            let left = client.list_database_names().await?;
            assert!(!left.iter().any(|name| name.starts_with("mongosub_demo_")), "{left:?}");
            Ok(())
        }),
        test(
            "the demo refuses a server without change streams and a URI that is none, and prints no password",
            |_| async {
                let server = Server::own(Options::standalone()).await;
                let (code, said) = refused(&server.uri()).await;
                assert_eq!(code, Some(3), "{said}");
                assert!(said.contains("not a member of a replica set"), "{said}");
                let (code, said) = refused("mongodb://user:s3?cret@127.0.0.1/").await;
                assert_eq!(code, Some(2), "{said}");
                assert!(said.contains("percent-encoded") && !said.contains("s3") && !said.contains("cret"), "{said}");
            },
        ),
    ];
    if choice().launcher == Launcher::Container {
        tests.push(test("the demo with docker alone runs in a container and removes it", |_| async {
            choice::image().await?;
            let path = docker_alone()?;
            let demo = Demo::start_in(Some(path.path()), &[]);
            let said = demo.plays_to_its_end().await;
            assert!(said.contains("in a container of"), "{said}");
            let mut demo = Demo::start_in(Some(path.path()), &[]);
            demo.says("server").await;
            demo.ends_by("INT").await;
            // Others may play it on this machine at the same moment; theirs end by themselves.
            for name in containers().await? {
                wait_until("the container is removed", LIMIT, || async {
                    containers().await.is_ok_and(|left| !left.contains(&name))
                })
                .await;
            }
            anyhow::Ok(())
        }));
    }
    tests
}

/// A demo under way. Everything it starts inherits its temporary folder by the environment.
struct Demo {
    child: Child,
    temporary: TempDir,
}

impl Demo {
    fn start(arguments: &[&str]) -> Self {
        Self::start_in(None, arguments)
    }

    fn start_in(path: Option<&Path>, arguments: &[&str]) -> Self {
        let temporary = tempfile::tempdir().expect("a temporary folder");
        let mut command = command(arguments);
        command.env("TMPDIR", temporary.path());
        if let Some(path) = path {
            command.env("PATH", path);
        }
        Self { child: Child::spawn(command), temporary }
    }

    /// Waits for a line with this label.
    async fn says(&mut self, label: &str) {
        let said = async {
            while let Some(line) = self.child.line().await {
                if line.trim_start().starts_with(label) {
                    return;
                }
            }
            panic!("the demo ended before it said {label:?}");
        };
        tokio::time::timeout(LIMIT, said).await.expect("the demo says it in time");
    }

    async fn plays_to_its_end(mut self) -> String {
        let mut said = String::new();
        let end = async {
            while let Some(line) = self.child.line().await {
                said.push_str(&line);
                said.push('\n');
            }
            self.child.wait().await
        };
        let status = tokio::time::timeout(LIMIT, end).await.expect("the demo ends in time");
        assert!(status.success(), "{status}\n{said}");
        assert!(said.contains("delivered 1010 of 1010, lost 0, ") && said.trim_end().ends_with("in order"), "{said}");
        self.nothing_is_left().await;
        said
    }

    async fn ends_by(mut self, signal: &str) {
        self.child.signal(signal);
        let status = tokio::time::timeout(LIMIT, self.child.wait()).await.expect("the demo ends in time");
        assert_eq!(status.code(), Some(130), "{signal}: {status}");
        self.nothing_is_left().await;
    }

    async fn nothing_is_left(&self) {
        let files: Vec<_> = fs::read_dir(self.temporary.path()).expect("it is there").flatten().collect();
        assert!(files.is_empty(), "{files:?}");
        // A killed subscriber may still be waited for by the system.
        wait_until("every process of the demo has ended", Duration::from_secs(5), || async {
            !has_processes(self.temporary.path())
        })
        .await;
    }
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mongosub"));
    command.arg("demo").args(arguments).env_remove("MONGODB_URI").env_remove("RUST_LOG");
    command
}

/// Whether a process has the folder in its environment. On systems without `/proc` there is no telling.
fn has_processes(folder: &Path) -> bool {
    let variable = format!("TMPDIR={}", folder.display());
    let Ok(entries) = fs::read_dir("/proc") else { return false };
    entries.flatten().any(|entry| {
        fs::read(entry.path().join("environ"))
            .is_ok_and(|environment| environment.split(|&byte| byte == 0).any(|one| one == variable.as_bytes()))
    })
}

/// How the demo ends with a URI it cannot use, and what it says on both outputs.
async fn refused(uri: &str) -> (Option<i32>, String) {
    let output = command(&["--uri", uri]).kill_on_drop(true).output();
    let output = tokio::time::timeout(LIMIT, output).await.expect("the demo ends in time").expect("the demo runs");
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    (output.status.code(), said.concat())
}

/// A folder for the PATH with the docker command and nothing else.
fn docker_alone() -> anyhow::Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let docker = std::env::split_paths(&path).map(|folder| folder.join("docker")).find(|file| file.is_file());
    symlink(docker.expect("there is an engine, so there is a command"), folder.path().join("docker"))?;
    Ok(folder)
}

async fn containers() -> anyhow::Result<Vec<String>> {
    let list = ["ps", "--all", "--filter", "name=mongosub-demo-", "--format", "{{.Names}}"];
    let output = Command::new("docker").args(list).output().await?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}
