//! The device of a volume that another driver has staged, as an agent finds it at its start,
//! but without an agent.

use std::{
    io,
    path::{Path, PathBuf},
};

use super::{
    backend::{Backing, Owner},
    ceph::{self, CephImages},
    dispatch::dev_of,
    error::DeviceError,
};
use crate::ceph::krbd::mapped;

/// A device that an agent would recover.
#[derive(Debug)]
pub struct ForeignDevice {
    pub node: PathBuf,
    /// The device below, if it is encrypted; else the same.
    pub mapped_as: PathBuf,
    /// Its image, for people.
    pub image: String,
    /// No volume where no agent of this driver attached it.
    pub owner: Owner,
    pub server: DeviceServer,
}

/// What serves the I/O of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceServer {
    /// The kernel's driver.
    Kernel,
    /// A process; the device's I/O waits once it has ended.
    Process(i32),
    /// A process that has ended.
    Nothing,
}

impl ForeignDevice {
    /// The device behind a mounted node; `stage_file` is the text of the file beside the
    /// mount. Pools, exports and the supervisor are not asked.
    pub fn behind(
        node: &Path,
        volume_id: &str,
        stage_file: Option<&[u8]>,
    ) -> Result<Option<Self>, DeviceError> {
        let Some(dev) = dev_of(node) else {
            return Ok(None);
        };
        let Some(found) = ceph::find_behind(None, dev, volume_id, stage_file)? else {
            return Ok(None);
        };
        Ok(Some(Self {
            image: found.source.to_string(),
            owner: CephImages::owner_of(dev)?,
            server: match found.device.backing {
                Backing::RbdNbd(_) => match ceph::daemon_of(volume_id)? {
                    Some(pid) => DeviceServer::Process(pid),
                    None => DeviceServer::Nothing,
                },
                _ => DeviceServer::Kernel,
            },
            mapped_as: (found.device.encrypted.as_ref())
                .map_or(&found.device.node, |under| &under.node)
                .clone(),
            node: found.device.node,
        }))
    }

    /// All images that the kernel's driver has mapped on this node, with their devices.
    pub fn mapped() -> io::Result<Vec<(String, PathBuf)>> {
        let one = |mapped: mapped::Mapped| {
            let node = PathBuf::from(format!("/dev/rbd{}", mapped.id));
            (mapped.image.to_string(), node)
        };
        Ok(mapped::list()?.into_iter().map(one).collect())
    }
}
