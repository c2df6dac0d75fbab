//! Attaching, finding, growing and detaching, whatever the backend.
//!
//! All of it is blocking code for a lane. Every verb may be repeated: what was
//! done already is found, not done twice.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{
    Source,
    ceph::CephImages,
    error::DeviceError,
    exports::Exports,
    format_markers::FormatMarker,
    images::{BoundImage, ImageFiles},
    loop_attach,
    loopdev::FileId,
    nbd, openers,
    owed::Owed,
};
use crate::{
    Detached, Done,
    admission::Gate,
    ceph::{
        fencing,
        krbd::{self, MappedIds},
    },
    kernel::{
        Dev,
        block::{self, BlockDev},
        nbd::identifier_of,
        sysfs,
    },
    lane::Lanes,
    nbd::Export,
    pool::{Pool, PoolError},
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
    pub format_marker: Arc<FormatMarker>,
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

/// What the backends need to know of this node.
#[derive(Clone, Debug)]
pub struct Backends {
    /// Image files.
    pub images: ImageFiles,
    /// NBD exports.
    pub exports: Exports,
    /// Images of Ceph clusters.
    pub ceph: CephImages,
}

impl Backends {
    /// The source with all that its backend needs to work on it.
    pub fn bind<'a>(&'a self, source: &'a Source) -> Box<dyn BackendVolume + 'a> {
        match source {
            Source::Loop(image) => Box::new(self.images.bind(image)),
            Source::Nbd(export) => Box::new(self.exports.bind(export)),
            Source::Rbd(image) => Box::new(self.ceph.bind(image)),
        }
    }

    /// The source as it is named once and for all, whatever the configuration says
    /// later.
    pub fn canonical(&self, source: &Source) -> Source {
        match source {
            Source::Rbd(image) => Source::Rbd(self.ceph.canonical(image)),
            Source::Loop(_) | Source::Nbd(_) => source.clone(),
        }
    }

    /// This boot's id: what is of an earlier one is gone.
    pub fn boot_id(&self) -> &str {
        &self.images.boot_id
    }

    /// Keeps what keeps the device alive, after a restart.
    pub fn take_up(&self, source: &Source, device: &Device, volume_id: &str) {
        if source.is_still(device) {
            self.bind(source).take_up(device, volume_id);
        }
    }

    /// What is wrong with the device, as far as that can be told without
    /// touching it.
    pub fn condition(&self, source: &Source, device: &Device) -> Option<Condition> {
        if source.is_still(device) {
            self.bind(source).condition(device)
        } else {
            Some(Condition::Detached)
        }
    }

    /// The device of a volume that has no record: what this node claimed
    /// or attached for it, where that is attached. Devices in `known` are other
    /// volumes'.
    pub fn find(
        &self,
        volume_id: &str,
        known: &[Device],
    ) -> Result<Option<FoundDevice>, DeviceError> {
        if let Some(found) = self.exports.find(volume_id)? {
            return Ok(Some(found));
        }
        match self.ceph.find(volume_id)? {
            None => self.images.find(volume_id, known),
            found => Ok(found),
        }
    }

    /// The source of a mounted device that has no record: what stands behind
    /// it, where that is ours, or of a driver before us, which may have left a note
    /// beside the mount.
    pub fn find_behind(
        &self,
        node: &Path,
        volume_id: &str,
        left: Option<&[u8]>,
    ) -> Result<Option<FoundDevice>, DeviceError> {
        let name = node.file_name().map(|name| name.to_string_lossy());
        let by_name = name.and_then(|name| sysfs::dev_of(&name).ok());
        // A mapping has a name of the device mapper's.
        let Some(dev) = by_name.or_else(|| block::dev_behind(node).ok()) else {
            return Ok(None);
        };
        if let Some(found) = self.exports.find_behind(dev)? {
            return Ok(Some(found));
        }
        match self.ceph.find_behind(dev, volume_id, left)? {
            None => self.images.find_behind(node, dev),
            found => Ok(found),
        }
    }

    /// Whose the device is, as the kernel and the claims beside images tell.
    pub fn owner_of(&self, dev: Dev) -> Result<Owner, DeviceError> {
        match self.exports.owner_of(dev) {
            Owner::Nobody => {}
            owner => return Ok(owner),
        }
        match CephImages::owner_of(dev)? {
            Owner::Nobody => self.images.owner_of(dev),
            owner => Ok(owner),
        }
    }

    /// What another driver has left a note of at the staging path.
    pub fn find_by_stage_file(
        &self,
        note: &[u8],
        volume_id: &str,
    ) -> Result<(Source, Option<Device>), DeviceError> {
        self.ceph.find_by_stage_file(note, volume_id)
    }

    /// The device of a source that this node has for the volume, where it is
    /// attached: what a killed agent may have attached and not noted.
    pub fn left_by(&self, source: &Source, volume_id: &str) -> Result<Option<Device>, DeviceError> {
        let bound = self.bind(source);
        if bound.is_claimed_for(volume_id)? {
            bound.attached()
        } else {
            Ok(None)
        }
    }

    /// Detaches the device and gives the source back. `Deferred`: another
    /// opener keeps it a moment longer; the source is not given back yet.
    pub fn detach(
        &self,
        source: &Source,
        device: &Device,
        volume_id: &str,
    ) -> Result<Detached, DeviceError> {
        if source.is_still(device) {
            loop_attach::clear_read_only_mark(device)?;
        }
        let bound = self.bind(source);
        match bound.detach(device, volume_id) {
            Err(error) if error.is_busy() => Err(DeviceError::Busy {
                device: device.node.clone(),
                openers: openers::openers(held(source, device)),
            }),
            Ok(detached) if detached != Detached::Deferred => {
                bound.release(volume_id)?;
                Ok(detached)
            }
            other => other,
        }
    }

    /// The pools in which this node claims images.
    pub fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.images.pools.iter()
    }

    /// Gives back what this node held of the pool before it was rebooted.
    pub fn release_stale_claims(&self, pool: &Pool) {
        self.images.release_stale_claims(pool);
    }

    /// What this node has claimed in a pool, and for which volume; `None` while the pool
    /// is not there.
    pub fn claimed_in(&self, pool: &str) -> Result<Option<Vec<(Source, String)>>, DeviceError> {
        self.images.claimed_in(pool)
    }

    /// The pools that were away when a claim in them was to be given back.
    pub fn owed(&self) -> &Owed {
        &self.images.owed
    }

    /// Reconnects devices to their servers, for as long as the agent runs. On the runtime
    /// thread; what may block goes to lanes.
    pub fn keep_connected(
        &self,
        lanes: Lanes,
        reconnect: Gate,
    ) -> impl Future<Output = ()> + use<> {
        nbd::keep(self.exports.links.clone(), lanes, reconnect)
    }

    /// The source of an inline volume whose image is made in this pool, or in
    /// the only one.
    pub fn inline_source(&self, pool: Option<&str>, volume_id: &str) -> Result<Source, PoolError> {
        let source = self.images.inline_source(pool, volume_id)?;
        Ok(Source::Loop(source))
    }

    /// The image of an inline volume.
    pub fn inline_image<'a>(&'a self, source: &'a Source) -> BoundImage<'a> {
        let Source::Loop(image) = source else {
            unreachable!("an inline volume is an image of a pool");
        };
        self.images.bind(image)
    }
}

/// The device that somebody holds: the encrypted one, once what showed it is closed.
fn held(source: &Source, device: &Device) -> Dev {
    match &device.encrypted {
        Some(under) if !source.is_behind(device.dev) => under.dev,
        _ => device.dev,
    }
}
