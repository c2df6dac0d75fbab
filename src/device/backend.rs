//! What every backend does: attach, find, grow and detach.
//!
//! All of it is blocking code for a lane. Every verb may be repeated: what was
//! done already is found, not done twice.

use std::{collections::HashMap, fmt, path::PathBuf, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{Source, error::DeviceError, loopdev::FileId, nbd};
use crate::{
    Detached, Done,
    ceph::{
        fencing,
        krbd::{self, MappedIds},
    },
    kernel::{Dev, block::BlockDev, nbd::identifier_of, sysfs},
    nbd::Export,
    secret::Secrets,
};

/// A volume's block device: what the record keeps and what proves, after a
/// restart, that the device with this number is still ours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The device's number.
    pub dev: Dev,
    /// The device's node below `/dev`.
    pub node: PathBuf,
    /// What is behind it. A device's number is used again by others; this
    /// tells whose it is.
    #[serde(rename = "behind")]
    pub backing: Backing,
    /// Attached read-only.
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
    /// Whether what has its number is still the device that was attached. Asks sysfs,
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
}

/// What is behind a device, as the kernel tells it.
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

/// What is wrong with a device.
#[derive(Clone, Debug)]
pub enum Condition {
    /// Nothing is behind it any more.
    Detached,
    /// What is behind it has no name any more, and goes with the device.
    Deleted,
    /// What is behind it is reached, by a server that nothing would bring back.
    Unkept(String),
    /// What is behind it cannot be reached.
    Unreachable {
        /// Whether requests fail; else they wait.
        failing: bool,
        /// Since when, and what happened.
        why: String,
    },
}

/// Whether the controller fences nodes that do not let go of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fencing {
    /// It does not.
    Off,
    /// It does, and asks the backend, where that knows how, to enter this node.
    On,
}

impl Fencing {
    /// As the controller has put it into the publish context.
    pub fn parse(publish_context: &HashMap<String, String>) -> Self {
        if publish_context.contains_key(fencing::ASKED) {
            Self::On
        } else {
            Self::Off
        }
    }
}

/// What a device is attached for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be mounted, with a file system made where it is blank.
    Mount,
    /// To be used raw: what is in it is its user's from now on.
    Raw,
    /// To be given a file system whatever is on it, as an operator asked for.
    Format,
}

/// How to attach.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// Nobody may write through the device.
    pub read_only: bool,
    /// Other nodes may hold the source at the same time.
    pub shared: bool,
    /// What for.
    pub purpose: Purpose,
    /// The volume's handle.
    pub volume_id: String,
    /// The volume's own device, where one is known: only what was seen to have the
    /// source behind it still. Of several devices over the source it is taken, and a
    /// raw volume is given out by it whoever has it open.
    pub known: Option<PathBuf>,
    /// It is staged, so it was seen that nobody else has it.
    pub staged: bool,
    /// Whether who attaches it is to be entered before anything is written.
    pub fencing: Fencing,
    /// What the backend's server asks for.
    pub secrets: Secrets,
}

impl AttachOptions {
    /// Whether nobody but its user knows from now on what is in it.
    pub fn gives_out_raw(&self) -> bool {
        self.purpose == Purpose::Raw && !self.read_only
    }
}

/// A source that is attached.
#[derive(Debug)]
pub struct Attachment {
    /// As this device.
    pub device: Device,
    /// Where it is noted that a mkfs is under way.
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
    /// The device.
    pub device: Device,
    /// Where its bytes are.
    pub source: Source,
}

/// Whose a device is.
#[derive(Debug)]
pub enum Owner {
    /// The volume's of this handle.
    Volume(String),
    /// One of this driver's sources is behind it; for which volume, nothing tells.
    Source(Box<Source>),
    /// None of this driver's.
    Nobody,
}

/// A source with all that its backend needs to work on it.
pub trait BackendVolume {
    /// Attaches the source, or finds it attached as it should be.
    fn attach(&self, options: &AttachOptions) -> Result<(Attachment, Done), DeviceError>;
    /// Keeps what keeps the device alive, after a restart.
    fn take_up(&self, _device: &Device, _volume_id: &str) {}
    /// What is wrong with the attached device, as far as that can be told
    /// without touching it.
    fn condition(&self, device: &Device) -> Option<Condition>;
    /// Whether what serves the device lacks what a stage brings along.
    fn wants_secrets(&self, _device: &Device) -> bool {
        false
    }
    /// Whether this node has it for this volume.
    fn is_claimed_for(&self, volume_id: &str) -> Result<bool, DeviceError>;
    /// The device that it is attached as.
    fn attached(&self) -> Result<Option<Device>, DeviceError>;
    /// Detaches the volume's device.
    fn detach(&self, device: &Device, volume_id: &str) -> Result<Detached, DeviceError>;
    /// Gives the source back, where this node has it for this volume.
    fn release(&self, volume_id: &str) -> Result<(), DeviceError>;
    /// Gives back the claim that an earlier agent left on the source for the volume,
    /// unless the source is attached.
    fn release_left(&self, _volume_id: &str) -> Result<Done, DeviceError> {
        Ok(Done::Already)
    }
    /// Whether a mkfs for this volume was interrupted, the note of it goes with the
    /// source, and no other node can have written to that yet.
    fn leaves_partial_format(&self, _volume_id: &str) -> Result<bool, DeviceError> {
        Ok(false)
    }
    /// Whether everything behind the device is known to read as zeros, because
    /// nothing was ever written to it.
    fn reads_as_zero(&self) -> Result<bool, DeviceError> {
        Ok(false)
    }
    /// Makes the device at least `bytes` large, where that is for this node to
    /// do, and follows the source's size where somebody else has grown it.
    /// Returns the device's size in bytes.
    fn grow(&self, device: &Device, bytes: u64) -> Result<u64, DeviceError>;
}
