//! The interface of every backend: attach, find, grow and detach.
//!
//! Blocking code for lanes. Every verb may be repeated: it continues from the state that an
//! earlier call left.

use std::{collections::HashMap, fmt, os::fd::OwnedFd, path::PathBuf, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{
    Source,
    error::{DeviceError, not_encrypted},
    loopdev::FileId,
    nbd,
};
use crate::{
    Detached, Done,
    ceph::{
        fencing,
        krbd::{self, MappedIds},
    },
    fs::fscrypt::KeySource,
    kernel::{Dev, block::BlockDev, nbd::identifier_of, sysfs},
    nbd::Export,
    secret::{Secret, Secrets},
};

/// A volume's block device, as in its record, with the identity by which an agent
/// recognises it after a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The device's number.
    pub dev: Dev,
    /// The device's node below `/dev`.
    pub node: PathBuf,
    /// The source behind it, as the kernel shows it. The kernel reuses the numbers of
    /// devices; this distinguishes two devices of one number.
    #[serde(rename = "behind")]
    pub backing: Backing,
    /// Attached read-only; not whether it is marked so ([`super::read_only_mark`]).
    pub read_only: bool,
    /// Of a loop device, the sequence number that it has for as long as the same file
    /// is behind it ([`sysfs::diskseq`]). None of other devices, on kernels before
    /// 5.15, and in the records of earlier releases.
    #[serde(default)]
    pub diskseq: Option<u64>,
    /// The encrypted device that this one shows in the clear.
    pub encrypted: Option<BlockDev>,
}

impl Device {
    /// Its number and node.
    pub fn block(&self) -> BlockDev {
        BlockDev {
            dev: self.dev,
            node: self.node.clone(),
        }
    }

    /// Whether the device of its number is still the one that was attached. Asks sysfs,
    /// never the device.
    pub fn still_matches(&self) -> bool {
        let dev = self.encrypted.as_ref().map_or(self.dev, |under| under.dev);
        match &self.backing {
            Backing::Rbd(identity) => krbd::is_behind(dev, identity),
            Backing::RbdNbd(cookie) => identifier_of(dev).as_ref() == Some(cookie),
            Backing::Export(export) => nbd::is_behind(dev, export),
            // Its file's inode was compared when it was attached or found; since then it
            // has had no other file.
            Backing::Image(_) => {
                let same = |seq| matches!(sysfs::diskseq(dev), Ok(Some(now)) if now == seq);
                self.diskseq.is_none_or(same)
            }
        }
    }

    /// Whether the loop device of its number was attached anew. For other devices the kernel
    /// does not tell: false. Asks sysfs, never the device.
    pub fn number_is_reused(&self) -> bool {
        let dev = self.encrypted.as_ref().map_or(self.dev, |under| under.dev);
        matches!(self.backing, Backing::Image(_))
            && !self.still_matches()
            && sysfs::backing_file(dev).is_ok()
    }
}

impl Device {
    /// The path of the image file behind the device, if that is another one than when it was
    /// attached.
    pub fn renamed_file(&self) -> Option<PathBuf> {
        // Without a sequence number the device may have been attached anew.
        let is_same = self.diskseq.is_some() && self.still_matches();
        matches!(&self.backing, Backing::Image(_) if is_same)
            .then(|| sysfs::backing_file(self.dev).ok())
            .flatten()
    }
}

/// The source behind a device, as the kernel reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backing {
    /// An image file, by its device and inode.
    Image(FileId),
    /// An NBD export, which the device's backend identifier names.
    Export(Export),
    /// A Ceph image that krbd mapped, by the cluster's own ids.
    Rbd(MappedIds),
    /// A Ceph image that rbd-nbd serves, by the device's cookie.
    RbdNbd(String),
}

/// A defect of a device.
#[derive(Clone, Debug)]
pub enum Condition {
    /// Nothing is behind it any more.
    Detached,
    /// The file behind it was deleted, and is freed when the device is detached.
    Deleted,
    /// The file behind it has this path now, which is not its volume's.
    Renamed(PathBuf),
    /// It works, but nothing would restart its server.
    Unsupervised(String),
    /// Its server does not answer.
    Unreachable {
        /// Whether requests fail; else they wait.
        failing: bool,
        /// The age of the outage, and its cause.
        why: String,
    },
}

/// Whether the controller fences nodes that do not release a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fencing {
    /// It does not.
    Off,
    /// It does, and asks the backend to register this node's client.
    On,
}

impl Fencing {
    /// Parses the publish context, into which the controller puts it.
    pub fn parse(publish_context: &HashMap<String, String>) -> Self {
        if publish_context.contains_key(fencing::PUBLISH_CONTEXT_KEY) {
            Self::On
        } else {
            Self::Off
        }
    }
}

/// The purpose of an attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be mounted, with a file system made where it is blank.
    Mount,
    /// To be used raw: its content belongs to its user from now on.
    Raw,
    /// To be formatted by an operator's request, also where it has data.
    Format,
}

/// How to attach.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// The device refuses writes.
    pub read_only: bool,
    /// Other nodes may hold the source at the same time.
    pub shared: bool,
    pub purpose: Purpose,
    pub volume_id: String,
    /// The volume's own device, if known: one that still has the source behind it. It is
    /// chosen among several devices over the source, and a raw volume is published by it
    /// although it is open.
    pub known: Option<PathBuf>,
    /// The volume is staged, so no other client had it then.
    pub staged: bool,
    /// Whether to register the client before anything is written.
    pub fencing: Fencing,
    /// The secrets for the backend's server.
    pub secrets: Secrets,
}

impl AttachOptions {
    /// Whether its content belongs to its user from now on.
    pub fn gives_out_raw(&self) -> bool {
        self.purpose == Purpose::Raw && !self.read_only
    }
}

/// A source that is attached.
#[derive(Debug)]
pub struct Attachment {
    pub device: Device,
    /// Whether its size and its node were seen during the attach; else an event may have
    /// to be waited for ([`super::ready`]).
    pub is_ready: bool,
    /// Of a device that was attached just now, to be mounted: open for direct I/O, and
    /// exclusively.
    pub exclusive: Option<OwnedFd>,
    /// The marker of a format under way.
    pub format_marker: Arc<dyn FormatMarker>,
}

/// Where a backend records that a format of one source is under way, durably.
pub trait FormatMarker: fmt::Debug + Send + Sync {
    /// A format for this volume is about to begin.
    fn set(&self, volume_id: &str) -> Result<(), DeviceError>;
    /// Whether one has begun for this volume and not ended.
    fn format_in_progress(&self, volume_id: &str) -> Result<bool, DeviceError>;
    /// From now on the source may hold data.
    fn clear(&self) -> Result<(), DeviceError>;
}

/// A device that was found without a record of it.
#[derive(Debug)]
pub struct FoundDevice {
    pub device: Device,
    /// The source behind it.
    pub source: Source,
}

/// The owner of a device.
#[derive(Debug)]
pub enum Owner {
    /// The volume of this handle.
    Volume(String),
    /// One of this driver's sources is behind it, for an unknown volume.
    Source(Box<Source>),
    /// No volume of this driver.
    None,
}

/// A source with all that its backend needs to work on it.
pub trait BackendVolume {
    /// Attaches the source, or finds it attached as it should be.
    fn attach(&self, options: &AttachOptions) -> Result<(Attachment, Done), DeviceError>;
    /// Recovers the device's link to its server after a restart of the agent.
    fn recover(&self, _device: &Device, _volume_id: &str) {}
    /// The condition of the attached device, found without I/O on it.
    fn condition(&self, device: &Device) -> Option<Condition>;
    /// Whether the device's server needs the secrets of a stage.
    fn wants_secrets(&self, _device: &Device) -> bool {
        false
    }
    /// Whether this node has claimed it for this volume.
    fn is_claimed_for(&self, volume_id: &str) -> Result<bool, DeviceError>;
    /// The device that it is attached as.
    fn attached(&self) -> Result<Option<Device>, DeviceError>;
    /// Detaches the volume's device. `purpose`: that of its attach.
    fn detach(
        &self,
        device: &Device,
        volume_id: &str,
        purpose: Purpose,
    ) -> Result<Detached, DeviceError>;
    /// Releases the source, if this node has claimed it for this volume.
    fn release(&self, volume_id: &str) -> Result<(), DeviceError>;
    /// Releases the claim that an earlier agent left on the source for the volume,
    /// unless the source is attached.
    fn release_pending(&self, _volume_id: &str) -> Result<Done, DeviceError> {
        Ok(Done::Already)
    }
    /// Whether a mkfs for this volume was interrupted, its marker is lost with the
    /// source, and no other node can have written to the source yet.
    fn leaves_partial_format(&self, _volume_id: &str) -> Result<bool, DeviceError> {
        Ok(false)
    }
    /// Whether everything behind the device is known to read as zeros, because
    /// nothing was ever written to it.
    fn reads_as_zero(&self) -> Result<bool, DeviceError> {
        Ok(false)
    }
    /// The space that the source takes, where that is known.
    fn allocated_bytes(&self) -> Option<u64> {
        None
    }
    /// Gives the source another passphrase, whose device is encrypted.
    fn rotate_key(
        &self,
        device: &Device,
        _volume_id: &str,
        _secrets: &Secrets,
    ) -> Result<(), DeviceError> {
        Err(not_encrypted(device))
    }
    /// The secret of its files, which are encrypted, and how that wraps their key. Makes it
    /// where they are to be encrypted now (`is_new`).
    fn files_secret(
        &self,
        device: &Device,
        _volume_id: &str,
        _secrets: &Secrets,
        _is_new: bool,
    ) -> Result<(Secret, KeySource), DeviceError> {
        Err(not_encrypted(device))
    }
    /// Makes the device at least `bytes` large if this node grows the source, and else
    /// follows the size that the controller or the server has given it.
    /// Returns the device's size in bytes.
    fn grow(&self, device: &Device, bytes: u64) -> Result<u64, DeviceError>;
}
