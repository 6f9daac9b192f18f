//! One `mongod` in a container, on the host's network so that its port stays the same.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use testcontainers::{
    ContainerAsync, ContainerRequest, CopyTargetOptions, GenericImage, ImageExt,
    core::{WaitFor, client::docker_client_instance},
    runners::AsyncRunner,
};

use super::{choice, options::KEY, run, wait::wait_until};

const KEY_FILE: &str = "/mongosub-key";
const DATA: &str = "/data/db";
const ENDS_WITHIN: Duration = Duration::from_secs(30);

pub struct Container(ContainerAsync<GenericImage>);

impl Container {
    /// Returns when the server listens. Its data is a copy of what is there, if files are given.
    pub async fn start(mut arguments: Vec<String>, with_key: bool, files: Option<PathBuf>) -> anyhow::Result<Self> {
        arguments.push(format!("--dbpath={DATA}"));
        if with_key {
            arguments.push(format!("--keyFile={KEY_FILE}"));
        }
        let (name, tag) = choice::image().await?;
        // Said here because the official image's own would change the user, whom the key file does not belong to then.
        let mut request: ContainerRequest<_> = GenericImage::new(name, tag)
            .with_entrypoint("mongod")
            .with_wait_for(WaitFor::message_on_stdout("Waiting for connections"))
            .with_cmd(arguments)
            .with_network("host")
            .with_label(run::LABEL, run::current().id());
        if with_key {
            request = request.with_copy_to(CopyTargetOptions::new(KEY_FILE).with_mode(0o600), KEY.as_bytes().to_vec());
        }
        if let Some(files) = files {
            request = request.with_copy_to(DATA, files);
        }
        Ok(Self(request.start().await?))
    }

    pub async fn copy_files(&self, to: &Path) -> anyhow::Result<()> {
        // The engine's own command, as whoever made the image has it.
        let mut copy = tokio::process::Command::new("docker");
        let said = copy.arg("cp").arg(format!("{}:{DATA}", self.id())).arg(to).output().await?;
        anyhow::ensure!(said.status.success(), "docker cp: {}", String::from_utf8_lossy(&said.stderr));
        Ok(())
    }

    pub fn id(&self) -> &str {
        self.0.id()
    }

    pub async fn kill(&self) -> anyhow::Result<()> {
        docker_client_instance().await?.kill_container(self.id(), None).await?;
        self.ended().await;
        Ok(())
    }

    /// Waits for the server's end, which somebody has asked for.
    pub async fn ended(&self) {
        wait_until("the container has ended", ENDS_WITHIN, || async {
            self.0.is_running().await.is_ok_and(|running| !running)
        })
        .await;
    }

    /// Does not wait until the server listens.
    pub async fn start_again(&self) -> anyhow::Result<()> {
        self.0.start().await.context("the container starts again")
    }

    pub async fn pause(&self) -> anyhow::Result<()> {
        Ok(self.0.pause().await?)
    }

    pub async fn unpause(&self) -> anyhow::Result<()> {
        Ok(self.0.unpause().await?)
    }

    pub async fn remove(self) -> anyhow::Result<()> {
        Ok(self.0.rm().await?)
    }
}
