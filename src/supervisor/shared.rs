//! The state that all volumes of the supervisor share, and the commands to their tasks.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Semaphore, mpsc, oneshot};

use super::{Spec, SupervisorError, records::SpecRecords};
use crate::{Done, kernel::nbd::NbdDevice, lane::Lanes, secret::Secret};

/// The state that all volumes share.
#[derive(Debug)]
pub struct Shared {
    /// rbd-nbd.
    pub(super) program: String,
    pub(super) records: SpecRecords,
    pub(super) lanes: Lanes,
    /// Permits to blocklist a volume's dead clients.
    pub(super) blocklist_rounds: Arc<Semaphore>,
    pub(super) volumes: Mutex<BTreeMap<String, Kept>>,
}

/// The commands to a volume's task, and its last report.
#[derive(Debug)]
pub struct Kept {
    pub(super) commands: mpsc::UnboundedSender<VolumeCommand>,
    pub(super) status: Arc<Mutex<Status>>,
}

/// A request to a volume's task.
#[derive(Debug)]
pub enum VolumeCommand {
    /// Map the image, with its key.
    Map(Box<Spec>, Secret, Reply<(NbdDevice, Done)>),
    /// Take the key, and bring the daemon back.
    Reattach(Option<String>, Secret, Reply<NbdDevice>),
    /// Make the device so many bytes large.
    Grow(u64, Reply<u64>),
    /// Unmap the image.
    Unmap(Reply<Done>),
    /// Panic.
    #[cfg(test)]
    Panic(Reply<()>),
}

/// The way back to the caller, if one waits.
pub type Reply<T> = oneshot::Sender<Result<T, SupervisorError>>;

/// A volume's state, as its task last reported it.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// The image, where it is known.
    pub image: Option<String>,
    pub node: Option<String>,
    /// The daemon's process id.
    pub pid: Option<i32>,
    /// The supervisor has the key.
    pub has_key: bool,
    /// The defect, if the volume is unhealthy.
    pub trouble: Option<String>,
}

impl Status {
    /// All states, for the metrics.
    pub const STATES: [&str; 5] = ["starting", "served", "unhealthy", "keyless", "unserved"];

    /// The state, for the metrics.
    pub fn state(&self) -> &'static str {
        match self {
            Self {
                pid: None, node, ..
            } if node.is_none() => "starting",
            Self { pid: None, .. } => "unserved",
            Self { has_key: false, .. } => "keyless",
            Self {
                trouble: Some(_), ..
            } => "unhealthy",
            Self { .. } => "served",
        }
    }
}

impl Shared {
    /// No code that could panic runs under this lock.
    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Kept>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes a volume without a device and a daemon from the list and from the records,
    /// unless a command to it waits.
    pub(super) fn forget(
        &self,
        volume_id: &str,
        commands: &mpsc::UnboundedReceiver<VolumeCommand>,
    ) -> bool {
        let mut volumes = self.lock();
        let idle = commands.is_empty();
        if idle {
            volumes.remove(volume_id);
            // The next supervisor finds no device for a record that stays, and removes it.
            if let Err(error) = self.records.forget(volume_id) {
                tracing::error!(volume = volume_id, %error, "cannot remove the volume's record");
            }
        }
        idle
    }
}
