//! The backend `rbd`: images of Ceph clusters, mapped by the kernel's driver, or by
//! rbd-nbd if the class requests that ([`nbd_backed`]).
//!
//! ```text
//!  clusterID ─▶ config.json ─▶ monitors, namespace      secrets ─▶ user and key
//!      librados, where installed: features, other clients of the image, metadata
//!      krbd: /dev/rbd0                    LUKS, where encrypted: /dev/dm-0
//! ```
//!
//! Volumes pass between this driver and ceph-csi, so both use the same volume context
//! ([`source`]), stage file beside the mount ([`stage_file`]), name of the encrypted
//! mapping, and image metadata.

use std::sync::Arc;

use super::{
    AttachOptions, Backing, Condition, Device, Purpose, Source,
    backend::{Attachment, BackendVolume, FormatMarker, FoundDevice, Owner},
    error::{DeviceError, io, not_encrypted},
    format_markers::NodeFormatMarkers,
    in_use, luks, read_only_mark,
};
use crate::{
    Detached, Done,
    ceph::{
        client::connections::Connections,
        csi_format::config::{ClusterConfig, Clusters, Mappings},
        kms::KmsConfig,
        krbd::{self, ImageSpec, Mapped, Mapper, Monitors},
    },
    fs::fscrypt::KeySource,
    kernel::{Dev, block::BlockDev, nbd::identifier_of, sysfs},
    secret::{Secret, Secrets},
    supervisor::Watch,
};

mod crush_location;
mod encrypted;
pub(super) mod error;
mod format_marker;
mod library;
mod lower_device;
mod map;
mod mounter;
mod nbd_backed;
mod own_client;
mod registration;
mod source;
mod stage_file;

pub use crush_location::CrushLocation;
pub use error::CephImageError;
#[cfg(feature = "cli")]
pub use nbd_backed::daemon_of;
pub use own_client::StorageClient;
pub use registration::ThisNode;
pub use source::{CephSource, ENCRYPTED_DIRECTORY};
pub use stage_file::STAGE_FILE;

use format_marker::FormatKind;
use lower_device::LowerDevice;
use map::Known;
use mounter::Mounter;

/// The Ceph clusters of this node, and their images that it has mapped.
#[derive(Clone, Debug)]
pub struct CephImages {
    /// ceph-csi's `config.json`; none where this node has no clusters.
    pub clusters: Option<Arc<Clusters>>,
    /// The clusters to which others fail over: ceph-csi's `cluster-mapping.json`.
    pub mappings: Arc<Mappings>,
    /// ceph-csi's configuration of key management systems.
    pub kms: KmsConfig,
    /// Connections of librados.
    pub connections: Connections,
    /// The kernel's driver.
    pub mapper: Mapper,
    /// The supervisor of rbd-nbd's daemons, if this node has one.
    pub supervisor: Option<Watch>,
    /// This node's location in the CRUSH map, for reads from the nearest replica.
    pub location: CrushLocation,
    /// This node's format markers, for images whose metadata cannot be changed.
    pub format_markers: NodeFormatMarkers,
    /// This node, by which its clients are registered for fencing.
    pub this_node: ThisNode,
}

impl CephImages {
    /// The device that an earlier agent mapped for the volume.
    pub fn find(&self, volume_id: &str) -> Result<Option<FoundDevice>, DeviceError> {
        self.mapper.is_under_way(volume_id)?;
        let found = krbd::find_marked(volume_id).map_err(io("list the mapped images"))?;
        match found {
            Some(mapped) => found_as(&mapped, volume_id).map(Some),
            None => nbd_backed::find(self.supervisor.as_ref(), volume_id, None),
        }
    }

    /// [`find_behind`], with the supervisor of this node.
    pub fn find_behind(
        &self,
        dev: Dev,
        volume_id: &str,
        stage_file: Option<&[u8]>,
    ) -> Result<Option<FoundDevice>, DeviceError> {
        find_behind(self.supervisor.as_ref(), dev, volume_id, stage_file)
    }

    /// The owner of a device that has an image of a cluster behind it.
    pub fn owner_of(dev: Dev) -> Result<Owner, DeviceError> {
        let lower = luks::mapping_of(dev).map_or(dev, |mapping| mapping.under);
        if let Some(mapped) = Mapped::of(lower) {
            return Ok(match &mapped.config.mark {
                Some(mark) => Owner::Volume(mark.volume_id.clone()),
                None => Owner::Source(Box::new(found_as(&mapped, "")?.source)),
            });
        }
        // A device of rbd-nbd has the volume's handle as its cookie.
        Ok(sysfs::nbd_backend(lower).map_or(Owner::None, Owner::Volume))
    }

    /// The image that ceph-csi's stage file describes, and its device if it is mapped; devices
    /// in `known` are other volumes'. ceph-csi writes the file in place, so a loss of power
    /// leaves a part of it. None: no image can be mapped that such a file describes.
    pub fn find_by_stage_file(
        &self,
        stage_file: &[u8],
        volume_id: &str,
        known: &[Device],
    ) -> Result<Option<(Source, Option<Device>)>, DeviceError> {
        let source = match CephSource::from_stage_file(stage_file, volume_id) {
            Ok(source) => source,
            Err(error) if nbd_backed::is_nbd_backed(volume_id)? || has_unknown_image(known)? => {
                return Err(io("read the stage file beside the mount")(error.into()));
            }
            Err(error) => {
                tracing::warn!(volume_id, %error, "the stage file is damaged, and no image is mapped");
                return Ok(None);
            }
        };
        if source.mounter.rbd_nbd().is_some() {
            let device = nbd_backed::device(volume_id)?;
            return Ok(Some((Source::Rbd(source), device)));
        }
        let listed = krbd::mapped::named(&source.image.name);
        let mut mapped: Vec<_> = listed.map_err(io("list the mapped images"))?;
        mapped.retain(|mapped| {
            source.image.is_named_as(&mapped.image)
                && !self.belongs_to_other_volume(mapped, volume_id, &source)
        });
        let devices: Result<Vec<_>, _> = mapped.iter().map(device_of).collect();
        let mut devices = devices?;
        if devices.len() > 1 {
            let nodes = devices.into_iter().map(|device| device.node).collect();
            let image = source.image.to_string();
            return Err(CephImageError::Ambiguous { image, nodes }.into());
        }
        Ok(Some((Source::Rbd(source), devices.pop())))
    }

    /// Whether a mapped image belongs to another volume, pool or cluster: it was mapped
    /// by monitors that the configuration names, but not for this image.
    fn belongs_to_other_volume(
        &self,
        mapped: &Mapped,
        volume_id: &str,
        source: &CephSource,
    ) -> bool {
        if let Some(mark) = &mapped.config.mark {
            return mark.volume_id != volume_id;
        }
        let mut places = self.places_of(source);
        let its_pool = mapped.identity.pool_id;
        places.retain(|(_, pool_id)| pool_id.is_none_or(|pool_id| pool_id == its_pool));
        if places.is_empty() {
            return true;
        }
        let known = self.clusters.as_ref().map(|clusters| clusters.all());
        let Some(Ok(known)) = known else {
            return false;
        };
        let has = |cluster: &&ClusterConfig| {
            let monitors = Monitors::resolve(&cluster.monitors);
            monitors.is_ok_and(|monitors| monitors.share(&mapped.config.monitors))
        };
        let with: Vec<_> = known.iter().filter(has).collect();
        let is_its = |known: &ClusterConfig| places.iter().any(|(id, _)| *id == known.cluster_id);
        !with.is_empty() && !with.into_iter().any(is_its)
    }

    /// The clusters that may have the image: its own, and those to which that fails over;
    /// each with the id of its pool there, if the handle names it.
    fn places_of(&self, source: &CephSource) -> Vec<(String, Option<i64>)> {
        let own = &source.image.cluster_id;
        let standing_in = source.pool_id.map(|pool_id| self.mappings.of(own, pool_id));
        let standing_in = standing_in.and_then(Result::ok).into_iter().flatten();
        let others = standing_in.map(|(cluster_id, pool_id)| (cluster_id, Some(pool_id)));
        std::iter::once((own.clone(), source.pool_id))
            .chain(others)
            .collect()
    }

    /// The source with its image's namespace, which the configuration may name.
    pub fn canonical(&self, source: &CephSource) -> CephSource {
        let mut canonical = source.clone();
        if canonical.image.namespace.is_empty() {
            let places = self.places_of(source).into_iter();
            let mut clusters = places.filter_map(|(id, _)| self.cluster(&id).ok());
            let said = clusters.next().and_then(|cluster| cluster.rados_namespace);
            canonical.image.namespace = said.unwrap_or_default();
        }
        canonical
    }

    /// Whether the configuration gives the cluster one of these monitors.
    fn is_of(&self, cluster_id: &str, monitors: &Monitors) -> bool {
        self.cluster(cluster_id).is_ok_and(|cluster| {
            Monitors::resolve(&cluster.monitors).is_ok_and(|its| its.meet(monitors))
        })
    }

    /// The image, bound to this node's clusters.
    pub fn bind<'a>(&'a self, source: &'a CephSource) -> BoundCephImage<'a> {
        BoundCephImage {
            images: self,
            source,
        }
    }

    fn cluster(&self, cluster_id: &str) -> Result<ClusterConfig, CephImageError> {
        let clusters = self.clusters.as_ref();
        let clusters = clusters.ok_or(CephImageError::NotConfigured)?;
        Ok(clusters.get(cluster_id)?)
    }
}

/// The image behind a device, whichever driver mapped it; for a device of rbd-nbd the
/// stage file beside the mount may be the only record.
pub fn find_behind(
    supervisor: Option<&Watch>,
    dev: Dev,
    volume_id: &str,
    stage_file: Option<&[u8]>,
) -> Result<Option<FoundDevice>, DeviceError> {
    let lower = luks::mapping_of(dev).map_or(dev, |mapping| mapping.under);
    match Mapped::of(lower) {
        Some(mapped) => found_as(&mapped, volume_id).map(Some),
        None if identifier_of(lower).as_deref() == Some(volume_id) => {
            let described =
                stage_file.and_then(|text| CephSource::from_stage_file(text, volume_id).ok());
            let described = described.filter(|source| source.mounter.rbd_nbd().is_some());
            let image = described.map(|source| source.image);
            nbd_backed::find(supervisor, volume_id, image)
        }
        None => Ok(None),
    }
}

fn found_as(mapped: &Mapped, volume_id: &str) -> Result<FoundDevice, DeviceError> {
    let mark = mapped.config.mark.as_ref();
    let image = ImageSpec {
        cluster_id: mark.map_or_else(String::new, |mark| mark.cluster_id.clone()),
        ..mapped.image.clone()
    };
    Ok(FoundDevice {
        device: device_of(mapped)?,
        source: Source::Rbd(CephSource::found(image, volume_id)),
    })
}

/// Whether an image is mapped that no agent of this driver mapped, and that is none of the
/// known devices.
fn has_unknown_image(known: &[Device]) -> Result<bool, DeviceError> {
    let mapped = krbd::mapped::list().map_err(io("list the mapped images"))?;
    for mapped in mapped.iter().filter(|it| it.config.mark.is_none()) {
        let dev = device_of(mapped)?.dev;
        if !known.iter().any(|device| device.dev == dev) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The device that shows a mapped image: its decrypted mapping, if one is open.
fn device_of(mapped: &Mapped) -> Result<Device, DeviceError> {
    let device = mapped.device().map_err(io("look at a mapped image"))?;
    as_it_is_shown(LowerDevice::from(device))
}

fn as_it_is_shown(lower: LowerDevice) -> Result<Device, DeviceError> {
    let over = luks::over(lower.block.dev).map_err(io("look for what is over a mapped image"))?;
    Ok(lower.shown(over))
}

/// An image, bound to this node's clusters.
#[derive(Debug)]
pub struct BoundCephImage<'a> {
    images: &'a CephImages,
    source: &'a CephSource,
}

impl BoundCephImage<'_> {
    /// Registers the client of a mapped image, and decrypts it. Clears a mark that was left on
    /// the device's number. Returns the decrypted mapping, if any, and the format marker.
    fn open(
        &self,
        known: &Known<'_>,
        lower: &LowerDevice,
        options: &AttachOptions,
    ) -> Result<(Option<BlockDev>, Arc<dyn FormatMarker>), DeviceError> {
        // A raw volume is published by the mark of the device that it is shown as.
        let is_published = options.purpose == Purpose::Raw && self.source.luks_kms().is_none();
        if !is_published && !lower.read_only {
            read_only_mark::set(&lower.block, false)?;
        }
        self.register(known, lower, options)?;
        let over = match self.source.luks_kms() {
            Some(kms) => Some(self.decrypt(known, kms, lower, options)?),
            None => None,
        };
        let marker = self.marker(known, FormatKind::FileSystem, options)?;
        if options.gives_out_raw() {
            marker.clear()?;
        }
        Ok((over, marker))
    }
}

impl BackendVolume for BoundCephImage<'_> {
    fn attach(&self, options: &AttachOptions) -> Result<(Attachment, Done), DeviceError> {
        let (known, lower, done) = self.map_where_it_is(options)?;
        if done == Done::Already {
            let over = luks::over(lower.block.dev);
            let over = over.map_err(io("look for what is over a mapped image"))?;
            let shown = over.as_ref().unwrap_or(&lower.block);
            in_use::refuse(&shown.node, shown.dev, options)?;
        }
        match self.open(&known, &lower, options) {
            Ok((over, marker)) => {
                let attachment = Attachment {
                    device: lower.shown(over),
                    is_ready: false,
                    exclusive: None,
                    format_marker: marker,
                };
                Ok((attachment, done))
            }
            Err(error) => {
                if done == Done::Already {
                    return Err(error);
                }
                let undone = as_it_is_shown(lower)
                    .and_then(|device| self.detach(&device, &options.volume_id, options.purpose));
                match undone {
                    Ok(_) => Err(error),
                    Err(undo) => Err(CephImageError::not_undone(&error, &undo).into()),
                }
            }
        }
    }

    fn condition(&self, device: &Device) -> Option<Condition> {
        if device.still_matches() {
            self.daemon_condition(&LowerDevice::of(device))
        } else {
            Some(Condition::Detached)
        }
    }

    fn wants_secrets(&self, device: &Device) -> bool {
        self.daemon_condition(&LowerDevice::of(device)).is_some()
    }

    fn is_claimed_for(&self, volume_id: &str) -> Result<bool, DeviceError> {
        self.images.mapper.is_under_way(volume_id)?;
        let found = krbd::find_marked(volume_id).map_err(io("list the mapped images"))?;
        if found.is_some_and(|mapped| self.source.image.is_named_as(&mapped.image)) {
            return Ok(true);
        }
        let served = self.source.mounter.rbd_nbd();
        Ok(served.is_some_and(|served| served.cookie == volume_id)
            && nbd_backed::device(volume_id)?.is_some())
    }

    fn attached(&self) -> Result<Option<Device>, DeviceError> {
        let listed = krbd::mapped::named(&self.source.image.name);
        let mut listed = listed.map_err(io("list the mapped images"))?.into_iter();
        let its = listed.find(|mapped| {
            let mark = mapped.config.mark.as_ref();
            mark.is_some_and(|mark| mark.cluster_id == self.source.image.cluster_id)
                && self.source.image.is_named_as(&mapped.image)
        });
        match (its, self.source.mounter.rbd_nbd()) {
            (Some(mapped), _) => device_of(&mapped).map(Some),
            (None, Some(served)) => nbd_backed::device(&served.cookie),
            (None, None) => Ok(None),
        }
    }

    fn detach(&self, device: &Device, _: &str, purpose: Purpose) -> Result<Detached, DeviceError> {
        // The mapping's number may have gone to another image.
        if self.source.is_behind(device.dev) {
            read_only_mark::clear_published(device, purpose);
            if let Some(mapping) = luks::mapping_of(device.dev) {
                let _ = luks::close(&mapping.name).map_err(CephImageError::from)?;
            }
        }
        Ok(self.unmap(&LowerDevice::of(device))?)
    }

    fn release(&self, volume_id: &str) -> Result<(), DeviceError> {
        // Removes the lock file of an agent that was killed.
        self.images.mapper.is_under_way(volume_id)?;
        if let (Some(served), Some(supervisor)) =
            (self.source.mounter.rbd_nbd(), &self.images.supervisor)
        {
            // A daemon that was starting for a killed agent may still come up.
            supervisor
                .forget(&served.cookie)
                .map_err(CephImageError::from)?;
        }
        // The next node that has it may fill it.
        for format in [FormatKind::Luks, FormatKind::FileSystem] {
            self.node_marker(format).clear()?;
        }
        Ok(())
    }

    fn leaves_partial_format(&self, volume_id: &str) -> Result<bool, DeviceError> {
        self.images.format_markers.is_fresh(self.source, volume_id)
    }

    fn rotate_key(
        &self,
        device: &Device,
        volume_id: &str,
        secrets: &Secrets,
    ) -> Result<(), DeviceError> {
        if let (Some(under), Some(kms)) = (&device.encrypted, self.source.luks_kms()) {
            return Ok(self.rotate(under, kms, volume_id, secrets)?);
        }
        if self.source.encrypts_files {
            return Err(CephImageError::FilesKey.into());
        }
        Err(not_encrypted(device))
    }

    fn files_secret(
        &self,
        device: &Device,
        volume_id: &str,
        secrets: &Secrets,
        is_new: bool,
    ) -> Result<(Secret, KeySource), DeviceError> {
        match self.source.files_kms() {
            Some(kms) => Ok(self.secret_of_files(kms, volume_id, secrets, is_new)?),
            None => Err(not_encrypted(device)),
        }
    }

    /// The controller grows the image; the device follows.
    fn grow(&self, device: &Device, bytes: u64) -> Result<u64, DeviceError> {
        let lower = LowerDevice::of(device);
        let bytes = match &lower.backing {
            Backing::Rbd(identity) => {
                let grown = krbd::refresh(&self.source.image, &lower.krbd(identity), bytes);
                grown.map_err(CephImageError::from)?
            }
            _ => self.grow_nbd_backed(&lower, bytes)?,
        };
        if let Some(mapping) = luks::mapping_of(device.dev) {
            luks::resize(&mapping.name).map_err(CephImageError::from)?;
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests;
