//! The supervisor of rbd-nbd's daemons.

use std::{fs, ops::Deref};

use rustix::process::{Pid, Signal, kill_process};
use uring_csi::proto::holder::{Held, ListRequest, holder_client::HolderClient};

use super::{Agent, Sandbox, Volume, eventually};

pub struct Supervisor(Agent);

impl Deref for Supervisor {
    type Target = Agent;

    fn deref(&self) -> &Agent {
        &self.0
    }
}

impl Supervisor {
    /// One that is ready.
    pub async fn start(sandbox: &Sandbox) -> Self {
        Self::start_with(sandbox, &[]).await
    }

    /// One with further flags.
    pub async fn start_with(sandbox: &Sandbox, args: &[String]) -> Self {
        let run_dir = sandbox.dir().join("supervisor");
        let supervisor = Self(Agent::new(
            "uring-csi-holder",
            &run_dir.join("holder.sock"),
            sandbox.dir().join("supervisor.log"),
            [
                &["--run-dir".to_owned(), run_dir.display().to_string()],
                args,
            ]
            .concat(),
        ));
        fs::create_dir_all(run_dir).unwrap();
        supervisor.restart().await;
        supervisor
    }

    /// Starts it again after [`Agent::kill9`].
    pub async fn restart(&self) {
        self.restart_with(&[]).await;
    }

    /// Starts it again, to end by itself after `steps` of its steps (see
    /// `crash_point`).
    pub async fn restart_crashing_at(&self, steps: usize) {
        self.restart_with(&[("CRASH_AT", steps.to_string())]).await;
    }

    async fn restart_with(&self, environment: &[(&str, String)]) {
        self.spawn_with(environment);
        eventually("the supervisor answers", async || self.list().await).await;
    }

    async fn list(&self) -> Option<Vec<Held>> {
        let mut client = HolderClient::new(self.channel());
        let answer = client.list(ListRequest {}).await.ok()?;
        Some(answer.into_inner().volumes)
    }

    /// Its report on a volume; none if it has no such volume.
    pub async fn status(&self, volume: &Volume) -> Option<Held> {
        let mut volumes = self.list().await.expect("an answer").into_iter();
        volumes.find(|status| status.volume_id == volume.handle)
    }

    /// A volume's rbd-nbd.
    pub async fn daemon(&self, volume: &Volume) -> Pid {
        // One that has just ended is being replaced.
        eventually("it has a daemon", async || {
            let status = self.status(volume).await.expect("a volume that is kept");
            Pid::from_raw(status.pid)
        })
        .await
    }

    /// SIGKILL to a volume's rbd-nbd.
    pub async fn kill_daemon(&self, volume: &Volume) {
        kill_process(self.daemon(volume).await, Signal::KILL).expect("a signal");
    }
}
