//! Which backend attaches, finds, grows and detaches a source.

use std::path::Path;

use super::{
    Source,
    backend::{BackendVolume, Condition, Device, FoundDevice, Owner, Purpose},
    ceph::{CephImages, StorageClient},
    error::DeviceError,
    exports::Exports,
    images::{BoundImage, ImageFiles},
    nbd,
    no_device::NoDevice,
    openers,
    pending_releases::PendingReleases,
};
use crate::{
    Detached,
    admission::Gate,
    kernel::{Dev, block, sysfs},
    lane::Lanes,
    nfs::InlineShare,
    pool::{Pool, PoolError},
    secret::Secrets,
};

/// The backends of this node.
#[derive(Clone, Debug)]
pub struct Backends {
    /// Image files.
    pub images: ImageFiles,
    /// NBD exports.
    pub exports: Exports,
    /// Images of Ceph clusters.
    pub ceph: CephImages,
    /// The shares of NFS servers that inline volumes may be.
    pub inline_shares: Vec<InlineShare>,
}

impl Backends {
    /// The source with all that its backend needs to work on it.
    pub fn bind<'a>(&'a self, source: &'a Source) -> Box<dyn BackendVolume + 'a> {
        match source {
            Source::Loop(image) => Box::new(self.images.bind(image)),
            Source::Nbd(export) => Box::new(self.exports.bind(export)),
            Source::Rbd(image) => Box::new(self.ceph.bind(image)),
            Source::Nfs(_) => Box::new(NoDevice),
        }
    }

    /// The source with the names that the configuration gives it now, which later changes
    /// of the configuration leave as they are.
    pub fn canonical(&self, source: &Source) -> Source {
        match source {
            Source::Rbd(image) => Source::Rbd(self.ceph.canonical(image)),
            Source::Loop(_) | Source::Nbd(_) | Source::Nfs(_) => source.clone(),
        }
    }

    /// Whether sources may be in clusters.
    pub fn has_clusters(&self) -> bool {
        self.ceph.clusters.is_some()
    }

    /// The client by which this node uses a cluster.
    pub fn own_client(
        &self,
        cluster_id: &str,
        secrets: &Secrets,
    ) -> Result<StorageClient, DeviceError> {
        self.ceph.own_client(cluster_id, secrets)
    }

    /// This boot's id: devices of an earlier boot are gone.
    pub fn boot_id(&self) -> &str {
        &self.images.boot_id
    }

    /// Recovers the device's link to its server after a restart of the agent.
    pub fn recover(&self, source: &Source, device: &Device, volume_id: &str) {
        if source.is_still(device) {
            self.bind(source).recover(device, volume_id);
        }
    }

    /// The condition of the device, found without I/O on it.
    pub fn condition(&self, source: &Source, device: &Device) -> Option<Condition> {
        if source.is_still(device) {
            return self.bind(source).condition(device);
        }
        Some(match device.renamed_file() {
            Some(path) => Condition::Renamed(path),
            None => Condition::Detached,
        })
    }

    /// The device of a volume without a record, by the claim or the identity that this
    /// node attached it with. Devices in `known` belong to other volumes.
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

    /// The source behind a mounted device without a record, if this driver or one before
    /// it attached it; `stage_file` is the file beside the mount.
    pub fn find_behind(
        &self,
        node: &Path,
        volume_id: &str,
        stage_file: Option<&[u8]>,
    ) -> Result<Option<FoundDevice>, DeviceError> {
        let Some(dev) = dev_of(node) else {
            return Ok(None);
        };
        if let Some(found) = self.exports.find_behind(dev)? {
            return Ok(Some(found));
        }
        match self.ceph.find_behind(dev, volume_id, stage_file)? {
            None => self.images.find_behind(node, dev),
            found => Ok(found),
        }
    }

    /// The device's owner, by the kernel and by the claims beside images.
    pub fn owner_of(&self, dev: Dev) -> Result<Owner, DeviceError> {
        match self.exports.owner_of(dev) {
            Owner::None => {}
            owner => return Ok(owner),
        }
        match CephImages::owner_of(dev)? {
            Owner::None => self.images.owner_of(dev),
            owner => Ok(owner),
        }
    }

    /// The source and the device that another driver's stage file describes; devices in
    /// `known` are other volumes'. None: nothing is attached of a file that describes nothing.
    pub fn find_by_stage_file(
        &self,
        stage_file: &[u8],
        volume_id: &str,
        known: &[Device],
    ) -> Result<Option<(Source, Option<Device>)>, DeviceError> {
        self.ceph.find_by_stage_file(stage_file, volume_id, known)
    }

    /// The device of a source that this node has claimed for the volume, if it is
    /// attached: a killed agent may have attached it before it recorded that.
    pub fn left_by(&self, source: &Source, volume_id: &str) -> Result<Option<Device>, DeviceError> {
        let bound = self.bind(source);
        if bound.is_claimed_for(volume_id)? {
            bound.attached()
        } else {
            Ok(None)
        }
    }

    /// Detaches the device and releases the source. `Deferred`: another opener keeps the
    /// device a moment longer; the source is not released yet.
    pub fn detach(
        &self,
        source: &Source,
        device: &Device,
        volume_id: &str,
        purpose: Purpose,
    ) -> Result<Detached, DeviceError> {
        let bound = self.bind(source);
        match bound.detach(device, volume_id, purpose) {
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

    /// Releases this node's claims in the pool from before a reboot.
    pub fn release_stale_claims(&self, pool: &Pool) {
        self.images.release_stale_claims(pool);
    }

    /// This node's claims in a pool, with their volumes; `None` while the pool is away.
    pub fn claimed_in(&self, pool: &str) -> Result<Option<Vec<(Source, String)>>, DeviceError> {
        self.images.claimed_in(pool)
    }

    /// The pools that were away when a claim in them was to be released.
    pub fn pending_releases(&self) -> &PendingReleases {
        &self.images.pending_releases
    }

    /// Reconnects devices to their servers, for as long as the agent runs. On the runtime
    /// thread; calls that may block run on lanes.
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

    /// The source of an inline volume that a pod's author names, which has no block device, as
    /// the administrator allows it; `None` if it is not allowed.
    pub fn inline_remote_source(&self, named: Source) -> Option<Source> {
        let Source::Nfs(directory) = named else {
            return None;
        };
        let allowed = directory.of_inline_shares(&self.inline_shares);
        allowed.map(Source::Nfs)
    }

    /// The image of an inline volume.
    pub fn inline_image<'a>(&'a self, source: &'a Source) -> BoundImage<'a> {
        let Source::Loop(image) = source else {
            unreachable!("{source} is no image of an inline volume");
        };
        self.images.bind(image)
    }
}

/// The number of a device by its node, which may be missing in this mount namespace.
pub(super) fn dev_of(node: &Path) -> Option<Dev> {
    let name = node.file_name().map(|name| name.to_string_lossy());
    let by_name = name.and_then(|name| sysfs::dev_of(&name).ok());
    // A mapping's node has another name than the device.
    by_name.or_else(|| block::dev_behind(node).ok())
}

/// The device that is busy: the encrypted one, once its mapping is closed.
fn held(source: &Source, device: &Device) -> Dev {
    match &device.encrypted {
        Some(under) if !source.is_behind(device.dev) => under.dev,
        _ => device.dev,
    }
}
