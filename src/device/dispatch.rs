//! Which backend attaches, finds, grows and detaches a source.

use std::path::Path;

use super::{
    Source,
    backend::{BackendVolume, Condition, Device, FoundDevice, Owner},
    ceph::CephImages,
    error::DeviceError,
    exports::Exports,
    images::{BoundImage, ImageFiles},
    loop_attach, nbd, openers,
    owed::Owed,
};
use crate::{
    Detached,
    admission::Gate,
    kernel::{Dev, block, sysfs},
    lane::Lanes,
    pool::{Pool, PoolError},
};

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
