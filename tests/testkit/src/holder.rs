//! The holder of rbd-nbd's daemons.

use std::{fs, ops::Deref};

use rustix::process::{Pid, Signal, kill_process};
use uring_csi::proto::holder::{Held, ListRequest, holder_client::HolderClient};

use super::{Agent, Sandbox, Volume, eventually};

pub struct Holder(Agent);

impl Deref for Holder {
    type Target = Agent;

    fn deref(&self) -> &Agent {
        &self.0
    }
}

impl Holder {
    /// One that answers.
    pub async fn start(sandbox: &Sandbox) -> Self {
        let run_dir = sandbox.dir().join("holder");
        let holder = Self(Agent::new(
            "uring-csi-holder",
            &run_dir.join("holder.sock"),
            sandbox.dir().join("holder.log"),
            vec!["--run-dir".to_owned(), run_dir.display().to_string()],
        ));
        fs::create_dir_all(run_dir).unwrap();
        holder.restart().await;
        holder
    }

    /// Another life after [`Agent::kill9`].
    pub async fn restart(&self) {
        self.restart_with(&[]).await;
    }

    /// Another life, which ends by itself after `steps` of its steps (see
    /// `crash_point`).
    pub async fn restart_doomed(&self, steps: usize) {
        self.restart_with(&[("CRASH_AT", steps.to_string())]).await;
    }

    async fn restart_with(&self, environment: &[(&str, String)]) {
        self.spawn_with(environment);
        eventually("the holder answers", async || self.list().await).await;
    }

    async fn list(&self) -> Option<Vec<Held>> {
        let mut client = HolderClient::new(self.channel());
        let answer = client.list(ListRequest {}).await.ok()?;
        Some(answer.into_inner().volumes)
    }

    /// What it says of a volume; none where it does not keep it.
    pub async fn held(&self, volume: &Volume) -> Option<Held> {
        let mut volumes = self.list().await.expect("an answer").into_iter();
        volumes.find(|held| held.volume_id == volume.handle)
    }

    /// A volume's rbd-nbd.
    pub async fn daemon(&self, volume: &Volume) -> Pid {
        // One that has just ended is being replaced.
        eventually("it has a daemon", async || {
            let held = self.held(volume).await.expect("a volume that is kept");
            Pid::from_raw(held.pid)
        })
        .await
    }

    /// SIGKILL to a volume's rbd-nbd.
    pub async fn kill_daemon(&self, volume: &Volume) {
        kill_process(self.daemon(volume).await, Signal::KILL).expect("a signal");
    }
}
