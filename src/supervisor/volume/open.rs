//! A device that is open here, and neither opened nor closed on the thread that
//! serves calls: without a daemon either takes as long as that lasts.

use std::{fs::File, sync::Arc, time::Duration};

use rustix::fs::{FlockOperation, flock};
use tokio::{sync::oneshot, time::timeout};

use crate::{
    lane::Lanes,
    supervisor::{SupervisorError, devices::Device, error::failed},
};

/// How long that may take where a daemon serves the device.
const WITHIN: Duration = Duration::from_secs(20);

/// Open, or about to be, until it is dropped.
#[derive(Debug)]
pub struct Open {
    /// Once it is open; then the file is in `file`.
    opened: oneshot::Receiver<Result<Closing, SupervisorError>>,
    file: Option<Closing>,
}

/// Closed by a lane; unlocked, too, where others have the same file.
#[derive(Debug)]
struct Closing {
    file: Option<Arc<File>>,
    lanes: Lanes,
    volume: String,
}

impl Drop for Closing {
    fn drop(&mut self) {
        let file = self.file.take();
        if let Some(file) = &file {
            // At once: it is locked already, if for itself alone.
            let shared = flock(file, FlockOperation::NonBlockingLockShared);
            shared.unwrap_or_else(|error| {
                tracing::warn!(volume = self.volume, %error, "the device's lock is lost");
            });
        }
        let close = move || drop(file);
        drop(self.lanes.run(&self.volume, "close", close));
    }
}

impl Open {
    /// Opens a volume's device by that function, as soon as that can be.
    pub fn begin(
        lanes: &Lanes,
        volume: &str,
        open: impl FnOnce() -> Result<Arc<File>, SupervisorError> + Send + 'static,
    ) -> Self {
        let (tell, opened) = oneshot::channel();
        let (own, of) = (lanes.clone(), volume.to_owned());
        drop(lanes.run(volume, "open", move || {
            let opened = open().map(|file| Closing {
                file: Some(file),
                lanes: own,
                volume: of,
            });
            // Where nobody wants it any more it ends here.
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

    /// Waits until it is open, while a daemon serves it.
    pub async fn is_open(&mut self, device: &Device) -> Result<(), SupervisorError> {
        if self.file.is_none() {
            let late = || failed("open", device.node.display());
            let opened = timeout(WITHIN, &mut self.opened).await;
            let opened = opened.map_err(|elapsed| late()(elapsed.into()))?;
            let lost = |lost| late()(std::io::Error::other(lost));
            self.file = Some(opened.map_err(lost)??);
        }
        Ok(())
    }
}
