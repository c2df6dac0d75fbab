//! How full a volume is. No lock, no record, no device: three system calls on
//! the runtime thread, none of which can hang with the device.

use std::path::Path;

use rustix::{fd::AsFd as _, fs::fstatvfs};

use super::{Error, Node, publish::appears_at, record::Record, spec::Use, task::Volume};
use crate::{device::sysfs, mount::Look};

/// What of something there is, in its own unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// In all.
    pub total: u64,
    /// In use.
    pub used: u64,
    /// Left for those who are not root.
    pub available: u64,
}

/// How full a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// A file system.
    Mounted {
        /// In bytes.
        bytes: Space,
        /// In inodes; `None` where the file system does not count them (btrfs).
        inodes: Option<Space>,
    },
    /// A raw block device of so many bytes.
    Block(u64),
}

impl Node {
    /// Whether the volume is staged or published at the path, by what the
    /// kernel says.
    pub fn is_at(&self, volume: &Volume, path: &Path) -> bool {
        let held = volume.held.borrow();
        held.as_ref()
            .is_some_and(|held| self.usage(volume, &held.record, path).is_ok())
    }

    /// `NodeGetVolumeStats`: asks about the mount that this node made.
    pub fn stats(&self, volume_id: &str, path: &Path) -> Result<Usage, Error> {
        let not_there = || Error::NotFound {
            volume: volume_id.to_owned(),
            what: format!("it is not at {} on this node", path.display()),
        };
        let volume = self.known(volume_id).ok_or_else(not_there)?;
        let held = volume.held.borrow();
        let held = held.as_ref().ok_or_else(not_there)?;
        self.usage(&volume, &held.record, path)
    }

    fn usage(&self, volume: &Volume, record: &Record, path: &Path) -> Result<Usage, Error> {
        let gone = || Error::NotFound {
            volume: volume.id.clone(),
            what: format!("it is not what is mounted at {}", path.display()),
        };
        let device = record.device.as_ref().ok_or_else(gone)?;
        let below;
        let path = if path == record.staging_path {
            below = record.mount_point();
            &below
        } else {
            path
        };
        // Whatever keeps the path from being resolved, our mount is not there.
        let place = self.target(path).map_err(|_| gone())?;
        let opened = place.open().map_err(|_| gone())?;
        match Look::at(opened.as_fd()) {
            Ok(Look::Mount(mounted)) if appears_at(record, device, &mounted) => {}
            _ => return Err(gone()),
        }
        if record.usage == Use::Block {
            let bytes =
                sysfs::size_bytes(device.dev).map_err(volume.io("read the device's size"))?;
            return Ok(Usage::Block(bytes));
        }
        let fs = fstatvfs(&opened)
            .map_err(|errno| volume.io(format!("statfs {}", path.display()))(errno.into()))?;
        let bytes = Space {
            total: fs.f_blocks * fs.f_frsize,
            used: fs.f_blocks.saturating_sub(fs.f_bfree) * fs.f_frsize,
            available: fs.f_bavail * fs.f_frsize,
        };
        let inodes = (fs.f_files > 0).then(|| Space {
            total: fs.f_files,
            used: fs.f_files.saturating_sub(fs.f_ffree),
            available: fs.f_favail,
        });
        Ok(Usage::Mounted { bytes, inodes })
    }
}
