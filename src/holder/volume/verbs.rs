//! What a volume is asked for.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::{LOOK_EVERY, Volume};
use crate::{
    Done,
    holder::{HolderError, Spec, daemon::Daemon, devices::Device, error::failed, spec::Verb},
    secret::Secret,
};

/// How long the device may take to be opened, and to be gone when its daemon is.
const GONE_WITHIN: Duration = Duration::from_secs(20);

impl Volume {
    /// Maps the image, or finds it mapped, with a daemon afterwards.
    pub(super) async fn map(
        &mut self,
        spec: Spec,
        key: Secret,
    ) -> Result<(Device, Done), HolderError> {
        spec.check()?;
        self.look();
        let Some(device) = self.device()? else {
            // It is on its way down, or up, begun by a holder that was killed.
            self.settle().await?;
            if let Some(device) = self.device()? {
                return Ok((self.serve(device, spec, key).await?, Done::Already));
            }
            return Ok((self.make(spec, key).await?, Done::Now));
        };
        Ok((self.serve(device, spec, key).await?, Done::Already))
    }

    async fn make(&mut self, spec: Spec, key: Secret) -> Result<Device, HolderError> {
        // First, so that a daemon is never without a record.
        self.keep(spec, key)?;
        let made = match self.start(&Verb::Map).await {
            Ok(_) => self.device(),
            Err(error) => Err(error),
        };
        match made {
            Ok(Some(device)) => Ok(device),
            Ok(None) => Err(HolderError::Failed {
                image: self.image(),
                said: "it says that it serves a device, and the kernel has none of this volume"
                    .to_owned(),
            }),
            Err(error) => Err(error),
        }
    }

    /// Makes sure that the device is this image's, and served.
    async fn serve(
        &mut self,
        device: Device,
        spec: Spec,
        key: Secret,
    ) -> Result<Device, HolderError> {
        let otherwise = |how: String| HolderError::Otherwise {
            volume_id: self.id.clone(),
            node: device.node.display().to_string(),
            how,
        };
        let known = self.spec.as_ref().map(Spec::name).or(self.found.clone());
        if let Some(image) = known.filter(|image| *image != spec.name()) {
            return Err(otherwise(format!(
                "over image {image}, not {}",
                spec.name()
            )));
        }
        if device.read_only != spec.read_only {
            let how = if device.read_only {
                "read-only"
            } else {
                "writable"
            };
            return Err(otherwise(how.to_owned()));
        }
        self.keep(spec, key)?;
        if self.daemon.is_none() {
            self.attach(&device).await?;
        }
        Ok(device)
    }

    /// Takes the key of a mapped volume, and brings its daemon back.
    pub(super) async fn reattach(
        &mut self,
        user: Option<String>,
        key: Secret,
    ) -> Result<Device, HolderError> {
        self.look();
        let device = self.device()?;
        let unknown = || HolderError::Unknown(self.id.clone());
        let (Some(device), Some(mut spec)) = (device, self.spec.clone()) else {
            return Err(unknown());
        };
        if let Some(user) = user {
            spec.user = user;
            spec.check()?;
        }
        self.serve(device, spec, key).await
    }

    /// Makes the device as large as its image, if it has fewer bytes than that.
    pub(super) async fn grow(&mut self, bytes: u64) -> Result<u64, HolderError> {
        let image = self.image();
        let device = self
            .device()?
            .ok_or_else(|| HolderError::Unknown(self.id.clone()))?;
        if device.bytes >= bytes {
            return Ok(device.bytes);
        }
        if self.key.is_none() {
            return Err(HolderError::NoKey(self.id.clone()));
        }
        if self.daemon.is_none() {
            self.attach(&device).await?;
        }
        self.take_size(&device).await?;
        self.replace_daemon(&device).await?;
        let now = self.device()?.map_or(0, |device| device.bytes);
        if now < bytes {
            return Err(HolderError::Small {
                image,
                node: device.node,
                bytes: now,
                wanted: bytes,
            });
        }
        Ok(now)
    }

    /// Ends the daemon and starts another in its place.
    async fn replace_daemon(&mut self, device: &Device) -> Result<(), HolderError> {
        let lanes = self.shared.lanes.clone();
        let of = device.clone();
        let lock = lanes.run(&self.id, "lock", move || of.without_udevd());
        let lock = lock.await?;
        let replaced = async {
            self.end_daemon().await?;
            self.attach(device).await
        };
        let replaced = replaced.await;
        // Without a daemon it cannot be closed, which is nothing to wait for.
        let closed = lanes.run(&self.id, "unlock", move || drop(lock));
        let _ = timeout(GONE_WITHIN, closed).await;
        replaced
    }

    /// Unmaps it.
    pub(super) async fn unmap(&mut self) -> Result<Done, HolderError> {
        self.look();
        let done = match self.device()? {
            None => Done::Already,
            Some(device) => {
                let stuck = || HolderError::Io {
                    what: "take down in time",
                    subject: device.node.display().to_string(),
                    source: std::io::ErrorKind::TimedOut.into(),
                };
                let (taken, cookie) = (device.clone(), self.id.clone());
                let down = self
                    .shared
                    .lanes
                    .run(&self.id, "disconnect", move || taken.disconnect(&cookie));
                timeout(GONE_WITHIN, down).await.map_err(|_| stuck())??;
                Done::Now
            }
        };
        self.retry = None;
        if let Some(daemon) = &self.daemon
            && !daemon.is_ending().await
        {
            self.end_daemon().await?;
        }
        self.daemon = None;
        // And one that a holder had begun beside it, and was killed.
        let look = || Daemon::find(&self.id).map_err(failed("look for processes of", &self.id));
        while let Some((other, _)) = look()? {
            if !other.end().await {
                return Err(HolderError::Stuck {
                    image: self.image(),
                    pid: other.pid(),
                    how: "does not end, not even when it is killed",
                });
            }
        }
        let gone = async {
            while self.device()?.is_some() {
                sleep(LOOK_EVERY).await;
            }
            Ok::<_, HolderError>(())
        };
        if let Ok(gone) = timeout(GONE_WITHIN, gone).await {
            gone?;
        } else {
            // Another opener, such as udevd, keeps it a moment longer.
            tracing::warn!(volume = self.id, "the device does not go");
        }
        (self.key, self.trouble) = (None, None);
        Ok(done)
    }
}
