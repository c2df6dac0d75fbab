//! What all volumes of the supervisor share, and how their tasks are reached.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{mpsc, oneshot};

use super::{Spec, SupervisorError, records::SpecRecords};
use crate::{Done, kernel::nbd::NbdDevice, lane::Lanes, secret::Secret};

/// What all volumes share.
#[derive(Debug)]
pub struct Shared {
    /// rbd-nbd.
    pub(super) program: String,
    pub(super) records: SpecRecords,
    pub(super) lanes: Lanes,
    pub(super) volumes: Mutex<BTreeMap<String, Kept>>,
}

/// The way to a volume's task, and what it reports.
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
    /// The key is there.
    pub has_key: bool,
    /// What is wrong.
    pub trouble: Option<String>,
}

impl Shared {
    /// No code that could panic runs under this lock.
    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Kept>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes a volume of which nothing is left from the list and from the records,
    /// unless a request to it waits.
    pub(super) fn forget(
        &self,
        volume_id: &str,
        asked: &mpsc::UnboundedReceiver<VolumeCommand>,
    ) -> bool {
        let mut volumes = self.lock();
        let idle = asked.is_empty();
        if idle {
            volumes.remove(volume_id);
            // The next supervisor finds no device for a record that stays, and removes it.
            if let Err(error) = self.records.forget(volume_id) {
                tracing::error!(volume = volume_id, %error, "a record is left");
            }
        }
        idle
    }
}
