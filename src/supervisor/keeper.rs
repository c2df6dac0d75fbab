//! All volumes, each with its task.

use std::{
    io,
    panic::AssertUnwindSafe,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::{
    sync::{Semaphore, mpsc, oneshot},
    time::{sleep, timeout},
};

use super::{
    Spec, SupervisorError,
    records::SpecRecords,
    shared::{Kept, Reply, Shared, Status, VolumeCommand},
    volume::ServedVolume,
};
use crate::{
    Done,
    kernel::nbd::{self, NbdDevice},
    lane::Lanes,
    observe::metrics,
    secret::Secret,
};

/// The time after a panic of a volume's task until it is taken up again.
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// Threads that wait for a next call.
const IDLE_LANES: usize = 2;
/// How many volumes may have dead clients blocklisted at a time, each by a process with
/// librados.
const BLOCKLIST_ROUNDS: usize = 4;

/// All volumes of the supervisor. Clones share them. Must be used on a runtime of tokio,
/// on which the volumes' tasks run.
#[derive(Clone, Debug)]
pub struct Keeper(Arc<Shared>);

impl Keeper {
    /// Recovers the volumes on record in that directory; `program` is rbd-nbd, by its
    /// path or looked up in the system's directories.
    pub fn open(program: &str, dir: PathBuf, boot_id: String) -> io::Result<Self> {
        if nbd::reads_partitions() {
            tracing::warn!(
                "the kernel module nbd was not loaded with max_part=0: if an rbd-nbd dies while the kernel reads the partitions of a resized device, no other can replace it, and all I/O of that device waits; add `options nbd max_part=0` to /etc/modprobe.d and reboot the node"
            );
        }
        let keeper = Self(Arc::new(Shared {
            program: program.to_owned(),
            records: SpecRecords::open(dir, boot_id)?,
            lanes: Lanes::new(IDLE_LANES),
            blocklist_rounds: Arc::new(Semaphore::new(BLOCKLIST_ROUNDS)),
            volumes: Mutex::default(),
        }));
        for spec in keeper.0.records.all()? {
            let volume_id = spec.volume_id.clone();
            let kept = keeper.begin(&volume_id, Some(spec));
            keeper.0.lock().insert(volume_id, kept);
        }
        Ok(keeper)
    }

    /// Maps an image, or finds it mapped; restarts its daemon if that has ended.
    pub async fn map(&self, spec: Spec, key: Secret) -> Result<(NbdDevice, Done), SupervisorError> {
        let volume_id = spec.volume_id.clone();
        self.ask(&volume_id, |reply| {
            VolumeCommand::Map(Box::new(spec), key, reply)
        })
        .await
    }

    /// Takes the key of a mapped volume, and restarts its daemon.
    pub async fn reattach(
        &self,
        volume_id: &str,
        user: Option<String>,
        key: Secret,
    ) -> Result<NbdDevice, SupervisorError> {
        self.ask(volume_id, |reply| VolumeCommand::Reattach(user, key, reply))
            .await
    }

    /// Grows the device to its image's size, unless it has `bytes` already. Returns
    /// the device's size in bytes.
    pub async fn grow(&self, volume_id: &str, bytes: u64) -> Result<u64, SupervisorError> {
        self.ask(volume_id, |reply| VolumeCommand::Grow(bytes, reply))
            .await
    }

    /// Unmaps it, unless the device is open.
    pub async fn unmap(&self, volume_id: &str) -> Result<Done, SupervisorError> {
        self.ask(volume_id, VolumeCommand::Unmap).await
    }

    /// Every volume with its state; a volume that was not examined yet has an empty one.
    pub fn list(&self) -> Vec<(String, Status)> {
        let volumes = self.0.lock();
        let entry = |kept: &Kept| {
            let status = kept.status.lock();
            status.unwrap_or_else(PoisonError::into_inner).clone()
        };
        volumes
            .iter()
            .map(|(id, kept)| (id.clone(), entry(kept)))
            .collect()
    }

    /// Updates the metrics of the volumes.
    pub fn report(&self) {
        let volumes = self.list();
        for state in Status::STATES {
            let its = volumes.iter().filter(|(_, status)| status.state() == state);
            metrics::supervised_volumes(state, its.count());
        }
    }

    /// The threads for calls that a device can block.
    pub fn lanes(&self) -> &Lanes {
        &self.0.lanes
    }

    async fn ask<T>(
        &self,
        volume_id: &str,
        command: impl FnOnce(Reply<T>) -> VolumeCommand,
    ) -> Result<T, SupervisorError> {
        let (reply, answer) = oneshot::channel();
        {
            let mut volumes = self.0.lock();
            let kept = volumes
                .entry(volume_id.to_owned())
                .or_insert_with(|| self.begin(volume_id, None));
            // A task removes its entry, under this lock, before it ends.
            let sent = kept.commands.send(command(reply));
            debug_assert!(sent.is_ok(), "a listed volume has a task");
        }
        let answer = timeout(super::ANSWERS_WITHIN, answer).await;
        let answer = answer.map_err(|_| SupervisorError::UnderWay(volume_id.to_owned()))?;
        answer.unwrap_or_else(|_| {
            Err(SupervisorError::Io {
                what: "finish the call on",
                subject: volume_id.to_owned(),
                source: io::Error::other("its task has ended"),
            })
        })
    }

    fn begin(&self, volume_id: &str, spec: Option<Spec>) -> Kept {
        let (commands, taken) = mpsc::unbounded_channel();
        let status = Arc::<Mutex<Status>>::default();
        let volume = ServedVolume::new(volume_id, self.0.clone(), status.clone(), spec);
        tokio::spawn(live(volume, taken));
        Kept { commands, status }
    }
}

/// A volume's task. One that panics, by a defect, leaves its call without an answer, which
/// the caller repeats; then the task begins anew, with what the kernel shows.
async fn live(mut volume: ServedVolume, mut commands: mpsc::UnboundedReceiver<VolumeCommand>) {
    loop {
        let lived = AssertUnwindSafe(volume.live(&mut commands)).catch_unwind();
        if lived.await.is_ok() {
            return;
        }
        sleep(AFTER_PANIC).await;
        volume = volume.after_panic();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_volume_whose_task_panicked_is_taken_up_again() {
        let dir = tempfile::tempdir().unwrap();
        let keeper = Keeper::open("rbd-nbd", dir.path().to_owned(), "boot".to_owned()).unwrap();
        let lost = keeper.ask("a volume", VolumeCommand::Panic).await;
        assert!(matches!(lost, Err(SupervisorError::Io { .. })), "{lost:?}");
        assert_eq!(keeper.unmap("a volume").await.unwrap(), Done::Already);
        assert!(keeper.list().is_empty());
    }
}
