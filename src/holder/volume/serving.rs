//! A volume's daemon: begun, ended, and replaced.

use std::time::Duration;

use rustix::process::Pid;
use tokio::time::sleep;

use super::{LOOK_EVERY, Volume};
use crate::{
    device::sysfs,
    holder::{
        HolderError,
        daemon::{Daemon, Started},
        devices::Device,
        error::failed,
        spec::Verb,
    },
};

/// How long a daemon may take until it serves. It looks for monitors half as long.
const START_WITHIN: Duration = Duration::from_secs(60);
/// How long one that was found may take to serve or to end.
const SETTLE_WITHIN: Duration = Duration::from_secs(20);

impl Volume {
    /// Serves a device that nobody serves.
    pub(super) async fn attach(&mut self, device: &Device) -> Result<(), HolderError> {
        let node = device.node.to_string_lossy();
        self.start(&Verb::Attach(&node)).await?;
        self.retry = None;
        self.trouble = None;
        Ok(())
    }

    /// Starts the volume's daemon.
    pub(super) async fn start(&mut self, verb: &Verb<'_>) -> Result<String, HolderError> {
        let mut daemon = self.begin(verb, None)?;
        let spec = self
            .spec
            .clone()
            .ok_or_else(|| HolderError::Unknown(self.id.clone()))?;
        match daemon.ready(&spec, START_WITHIN).await {
            Started::Ready(node) => {
                self.resized = 0;
                self.daemon = Some(daemon);
                Ok(node)
            }
            Started::Ended(error) => Err(error),
            Started::Late => {
                let stuck = HolderError::Stuck {
                    image: self.image(),
                    pid: daemon.pid(),
                    how: "did not begin to serve within a minute",
                };
                if !daemon.end().await {
                    // It may still begin: nobody else may.
                    self.daemon = Some(daemon);
                }
                Err(stuck)
            }
        }
    }

    fn begin(&self, verb: &Verb<'_>, unseen: Option<Pid>) -> Result<Daemon, HolderError> {
        let spec = self
            .spec
            .as_ref()
            .ok_or_else(|| HolderError::Unknown(self.id.clone()))?;
        let key = self
            .key
            .as_ref()
            .ok_or_else(|| HolderError::NoKey(self.id.clone()))?;
        Daemon::start(&self.shared.program, spec, verb, key, unseen)
    }

    /// Gives the device its image's size, while its daemon serves.
    ///
    /// rbd-nbd refuses to attach while the process lives that the driver says
    /// made the device, which is right anywhere else: so it is not shown that.
    pub(super) async fn take_size(&self, device: &Device) -> Result<(), HolderError> {
        let node = device.node.to_string_lossy();
        let spec = self
            .spec
            .clone()
            .ok_or_else(|| HolderError::Unknown(self.id.clone()))?;
        let maker = sysfs::nbd_pid(device.dev);
        let maker = maker.map_err(failed("find who made", &node))?;
        let mut beside = self.begin(&Verb::Attach(&node), Pid::from_raw(maker))?;
        let started = beside.ready(&spec, START_WITHIN).await;
        let ended = beside.end().await;
        match started {
            Started::Ready(_) if ended => Ok(()),
            Started::Ended(error) => Err(error),
            _ => Err(HolderError::Stuck {
                image: self.image(),
                pid: beside.pid(),
                how: "did not give the device its size",
            }),
        }
    }

    pub(super) async fn end_daemon(&mut self) -> Result<(), HolderError> {
        if let Some(daemon) = &self.daemon {
            if !daemon.end().await {
                return Err(HolderError::Stuck {
                    image: self.image(),
                    pid: daemon.pid(),
                    how: "does not end, not even when it is killed",
                });
            }
            self.daemon = None;
        }
        Ok(())
    }

    /// Waits for the end of a daemon that has no device, or for its device.
    pub(super) async fn settle(&mut self) -> Result<(), HolderError> {
        let Some(daemon) = &self.daemon else {
            return Ok(());
        };
        let device = async {
            while !matches!(self.device(), Ok(Some(_))) {
                sleep(LOOK_EVERY).await;
            }
        };
        tokio::select! {
            () = daemon.ended() => self.daemon = None,
            () = device => {}
            () = sleep(SETTLE_WITHIN) => return Err(HolderError::Stuck {
                image: self.image(),
                pid: daemon.pid(),
                how: "neither serves a device nor ends",
            }),
        }
        Ok(())
    }
}
