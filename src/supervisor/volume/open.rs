//! A device that the supervisor has open. A lane opens and closes it, never the thread
//! that serves calls: without a daemon either waits for one.

use std::{fs::File, io, sync::Arc, time::Duration};

use rustix::{
    fs::{FlockOperation, OFlags, flock},
    io::Errno,
};
use tokio::{sync::oneshot, time::timeout};

use crate::{
    kernel::{
        block::{self, BlockDev},
        nbd::{Claimed, identifier_of, netlink::Driver},
    },
    lane::Lanes,
    supervisor::{SupervisorError, error::failed},
};

/// The longest time to open a device that a daemon serves.
const WITHIN: Duration = Duration::from_secs(20);

/// Open, or about to be, until it is dropped.
#[derive(Debug)]
pub struct OpenGuard {
    /// Notified once it is open; then the file is in `file`.
    opened: oneshot::Receiver<Result<CloseOnLane, SupervisorError>>,
    file: Option<CloseOnLane>,
}

/// Closed by a lane; unlocked, too, where others have the same file.
#[derive(Debug)]
struct CloseOnLane {
    file: Option<Arc<File>>,
    lanes: Lanes,
    volume: String,
}

impl Drop for CloseOnLane {
    fn drop(&mut self) {
        let Some(file) = self.file.take() else {
            return;
        };
        // Takes no time: it is locked already, exclusively.
        let shared = flock(&file, FlockOperation::NonBlockingLockShared);
        shared.unwrap_or_else(|error| {
            tracing::warn!(volume = self.volume, %error, "the device's lock is lost");
        });
        let close = move || drop(file);
        drop(self.lanes.run(&self.volume, "close", close));
    }
}

impl OpenGuard {
    /// Opens a volume's device by `open`, as soon as possible.
    pub fn begin(
        lanes: &Lanes,
        volume: &str,
        open: impl FnOnce() -> Result<Arc<File>, SupervisorError> + Send + 'static,
    ) -> Self {
        let (tell, opened) = oneshot::channel();
        let (own, of) = (lanes.clone(), volume.to_owned());
        drop(lanes.run(volume, "open", move || {
            let opened = open().map(|file| CloseOnLane {
                file: Some(file),
                lanes: own,
                volume: of,
            });
            // The guard may have been dropped; then the lane closes the device.
            drop(tell.send(opened));
        }));
        Self { opened, file: None }
    }

    /// The file, if the device is open by now.
    pub fn file(&mut self) -> Option<Arc<File>> {
        if self.file.is_none() {
            self.file = self.opened.try_recv().ok()?.ok();
        }
        self.file.as_ref()?.file.clone()
    }

    /// The file, if the device is open by now, for a lane to close; its lock stays.
    pub fn into_file(mut self) -> Option<Arc<File>> {
        drop(self.file());
        self.file?.file.take()
    }

    /// Waits until it is open, while a daemon serves it.
    pub async fn is_open(&mut self, device: &BlockDev) -> Result<(), SupervisorError> {
        if self.file.is_none() {
            let late = || failed("open", device.node.display());
            let opened = timeout(WITHIN, &mut self.opened).await;
            let opened = opened.map_err(|elapsed| late()(elapsed.into()))?;
            let lost = |lost| late()(io::Error::other(lost));
            self.file = Some(opened.map_err(lost)??);
        }
        Ok(())
    }
}

/// Opens a device, with a shared lock. So udevd reads its superblocks, but not its
/// partitions, for which it needs an exclusive lock: it would read them after each write,
/// and a daemon that ends at that moment could not close the device, and so not end. May
/// block: for a lane.
pub fn open_shared(device: &BlockDev) -> Result<Arc<File>, SupervisorError> {
    let file = open(device)?;
    lock(device, &file, FlockOperation::LockShared)?;
    Ok(file)
}

/// Waits until udevd has closed the device, and keeps udevd off while the file is locked:
/// udevd reads only devices on which it gets a shared lock
/// (<https://systemd.io/BLOCK_DEVICE_LOCKING>). Uses the file that has the device open
/// already, if there is one: its shared lock would conflict. Blocks as long as the device
/// does: for a lane.
pub fn lock_out_udevd(
    device: &BlockDev,
    opened: Option<Arc<File>>,
) -> Result<Arc<File>, SupervisorError> {
    // Not shared first: udevd could take it, too, and wait for the device.
    let file = opened.map_or_else(|| open(device), Ok)?;
    lock(device, &file, FlockOperation::LockExclusive)?;
    Ok(file)
}

/// The same for a device that has just been closed, unless it is no longer attached under
/// that cookie: another process has disconnected it.
pub fn lock_out_udevd_of(device: &BlockDev, cookie: &str) -> Result<Arc<File>, SupervisorError> {
    if identifier_of(device.dev).is_none_or(|has| has != cookie) {
        let gone = io::Error::from(Errno::NODEV);
        return Err(failed("open", device.node.display())(gone));
    }
    lock_out_udevd(device, None)
}

fn open(device: &BlockDev) -> Result<Arc<File>, SupervisorError> {
    let opened = block::open(&device.node, device.dev, OFlags::RDONLY | OFlags::NONBLOCK);
    let opened = opened.map_err(failed("open", device.node.display()))?;
    Ok(Arc::new(File::from(opened)))
}

fn lock(device: &BlockDev, file: &File, how: FlockOperation) -> Result<(), SupervisorError> {
    let locked = flock(file, how);
    locked.map_err(|errno| failed("lock", device.node.display())(errno.into()))
}

/// Claims the device with that cookie, unless it is in use; none where it is disconnected. May
/// have its data written. Blocks for as long as the device does: for a lane.
pub fn claim(
    device: &BlockDev,
    cookie: &str,
    flush: bool,
) -> Result<Option<Claimed>, SupervisorError> {
    let claimed = match Claimed::new(device, |has| has == cookie) {
        Ok(claimed) => claimed,
        Err(error) if block::is_busy(&error) => {
            let node = device.node.clone();
            return Err(SupervisorError::Busy { node });
        }
        Err(error) => return Err(failed("open", device.node.display())(error)),
    };
    if let Some(claimed) = claimed.as_ref().filter(|_| flush) {
        claimed.flush();
    }
    Ok(claimed)
}

/// Disconnects a claimed device, and closes it. A device that a daemon serves is drained first;
/// `opened` is this process's own descriptor of it. For a lane.
pub fn disconnect(
    claimed: Claimed,
    device: &BlockDev,
    is_served: bool,
    opened: Option<&File>,
) -> Result<(), SupervisorError> {
    if is_served {
        claimed.drain(opened);
    }
    let down = Driver::open().and_then(|driver| claimed.disconnect(&driver));
    if let (true, Err(_), Some(file)) = (is_served, &down, opened) {
        // udevd may look at a device that stays.
        let _ = flock(file, FlockOperation::NonBlockingLockShared);
    }
    drop(claimed);
    down.map_err(failed("disconnect", device.node.display()))
}
