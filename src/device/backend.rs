//! Attaching, finding, growing and detaching, whatever the backend.
//!
//! All of it is blocking code for a lane. Every verb may be repeated: what was
//! done already is found, not done twice.

use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate, ftruncate};
use serde::{Deserialize, Serialize};

use super::{
    Source,
    error::{DeviceError, io},
    holders, image,
    loopdev::{self, Detached, FileId, LoopError},
    nbd::{self, Links, NbdDevice, NbdError},
    sysfs,
};
use crate::{
    Done, chain, digest,
    kernel::{Dev, block},
    nbd::Export,
    pool::{
        self, PoolError, Pools,
        claim::{self, Claim},
        making,
    },
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
    pub behind: Behind,
    /// Attached read-only.
    pub read_only: bool,
}

/// What is behind a device, as the kernel tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Behind {
    /// An image file, by its device and inode.
    Image(FileId),
    /// An NBD export, which the device's backend identifier names.
    Export(Export),
}

impl Device {
    fn of_nbd(device: NbdDevice, export: &Export) -> Self {
        Self {
            dev: device.dev,
            node: device.node,
            behind: Behind::Export(export.clone()),
            read_only: device.read_only,
        }
    }

    fn as_nbd(&self) -> NbdDevice {
        NbdDevice {
            dev: self.dev,
            node: self.node.clone(),
            read_only: self.read_only,
        }
    }
}

/// What is wrong with a device.
#[derive(Clone, Debug)]
pub enum Ailment {
    /// Nothing is behind it any more.
    Detached,
    /// What is behind it has no name any more, and goes with the device.
    Deleted,
    /// What is behind it cannot be reached.
    Away {
        /// Whether requests fail; else they wait.
        failing: bool,
        /// Since when, and what happened.
        why: String,
    },
}

/// How to attach.
#[derive(Clone, Debug)]
pub struct How {
    /// Nobody may write through the device.
    pub read_only: bool,
    /// Other nodes may hold the source at the same time.
    pub shared: bool,
    /// It is used raw: what is in it is its user's from now on.
    pub raw: bool,
    /// The volume's handle.
    pub volume_id: String,
    /// The device that it had, if it is known: that one, and no other, if it
    /// still has the source behind it.
    pub known: Option<PathBuf>,
}

/// A device that was found without a record of it.
#[derive(Debug)]
pub struct Found {
    /// The device.
    pub device: Device,
    /// Where its bytes are.
    pub source: Source,
}

/// What the backends need to know of this node.
#[derive(Clone, Debug)]
pub struct Backends {
    /// The pools of image files.
    pub pools: Pools,
    /// The links of attached NBD exports.
    pub links: Links,
    /// Which exports have a file system under way.
    pub nbd_notes: nbd::Notes,
    /// This node's name, which its claims carry.
    pub node_id: String,
    /// This boot's id: a claim of an earlier boot is stale.
    pub boot_id: String,
}

impl Backends {
    /// Attaches the source, or finds it attached as it should be.
    pub fn attach(&self, source: &Source, how: &How) -> Result<(Device, Done), DeviceError> {
        let (pool, image) = match source {
            Source::Loop { pool, image, .. } => (pool, image),
            Source::Nbd { export, options } => {
                if how.raw && !how.read_only {
                    self.mkfs_ended(source)?;
                }
                let behind = nbd::Behind {
                    export: export.clone(),
                    volume_id: how.volume_id.clone(),
                };
                let (device, done) = self.links.attach(&behind, how.read_only, options)?;
                return Ok((Device::of_nbd(device, export), done));
            }
        };
        let pool = self.pools.get(pool)?;
        let file = pool.open_image(image, !how.read_only)?;
        let claimed = claim::claim(pool, image, &self.claim(how))?;
        if how.raw && !how.read_only {
            making::ended(pool, image)?;
        }
        let attached = image::attach_loop(source, pool, &file, how);
        if attached.is_err() && claimed == Done::Now {
            // The reason for the failure is what the caller must learn.
            if let Err(error) = claim::release(pool, image, &self.node_id) {
                tracing::warn!(%error, image, "the claim on an image that was not attached stays");
            }
        }
        attached
    }

    fn claim(&self, how: &How) -> Claim {
        Claim {
            node_id: self.node_id.clone(),
            boot_id: self.boot_id.clone(),
            volume_id: how.volume_id.clone(),
            access: match (how.shared, how.read_only) {
                (false, _) => claim::Access::Exclusive,
                (true, false) => claim::Access::Shared,
                (true, true) => claim::Access::Readers,
            },
            read_only: how.read_only,
        }
    }

    /// Keeps what keeps the device alive, after a restart.
    pub fn take_up(&self, source: &Source, device: &Device, volume_id: &str) {
        let Source::Nbd { export, options } = source else {
            return;
        };
        let behind = nbd::Behind {
            export: export.clone(),
            volume_id: volume_id.to_owned(),
        };
        if source.is_behind(device.dev)
            && let Err(error) = self.links.take_up(&behind, &device.as_nbd(), options)
        {
            tracing::error!(
                error = chain(&error),
                volume_id,
                "its connections are not kept"
            );
        }
    }

    /// What is wrong with the device, as far as that can be told without
    /// touching it.
    pub fn ailment(&self, source: &Source, device: &Device) -> Option<Ailment> {
        if !source.is_behind(device.dev) {
            return Some(Ailment::Detached);
        }
        match source {
            Source::Loop { .. } => {
                let path = sysfs::backing_file(device.dev).ok()?;
                let deleted = path.to_string_lossy().ends_with(" (deleted)");
                deleted.then_some(Ailment::Deleted)
            }
            Source::Nbd { export, .. } => {
                let away = self.links.away(export)?;
                let age = away.since.elapsed();
                Some(Ailment::Away {
                    failing: age > away.patience,
                    why: format!("for {} s: {}", age.as_secs(), away.why),
                })
            }
        }
    }

    /// The device of a volume that has no record: what this node claimed
    /// or attached for it, where that is attached.
    pub fn find(&self, volume_id: &str) -> Result<Option<Found>, DeviceError> {
        let export = nbd::find(|behind| behind.volume_id == volume_id);
        if let Some((device, behind)) = export.map_err(io("list the NBD devices"))? {
            return Ok(Some(found(device, behind)));
        }
        for pool in self.pools.iter() {
            for image in claim::claimed_by(pool, &self.node_id)? {
                let source = Source::image(&pool.name, &image);
                if self.is_claimed_for(&source, volume_id)? {
                    let device = self.attached(&source, None)?;
                    return Ok(device.map(|device| Found { device, source }));
                }
            }
        }
        Ok(None)
    }

    /// Whether this node has claimed the source for this volume.
    fn is_claimed_for(&self, source: &Source, volume_id: &str) -> Result<bool, DeviceError> {
        let (pool, image) = match source {
            Source::Loop { pool, image, .. } => (pool, image),
            // The kernel knows for whom it was attached.
            Source::Nbd { export, .. } => {
                let is_its = |behind: &nbd::Behind| {
                    behind.export == *export && behind.volume_id == volume_id
                };
                let found = nbd::find(is_its).map_err(io("list the NBD devices"))?;
                return Ok(found.is_some());
            }
        };
        let claim = claim::own(self.pools.get(pool)?, image, &self.node_id)?;
        Ok(claim.is_some_and(|claim| claim.volume_id == volume_id))
    }

    /// The source of a mounted device that has no record: what stands behind
    /// it, where that is an image of ours.
    pub fn find_behind(&self, node: &Path) -> Result<Option<Found>, DeviceError> {
        let name = node.file_name().map(|name| name.to_string_lossy());
        let dev = name.and_then(|name| block::dev_of(&name).ok());
        if let Some(behind) = dev.and_then(nbd::Behind::of) {
            let device = nbd::find(|other| *other == behind);
            let device = device.map_err(io("list the NBD devices"))?;
            return Ok(device.map(|(device, behind)| found(device, behind)));
        }
        let backing = dev.and_then(|dev| sysfs::backing_file(dev).ok());
        let Some(source) = backing.and_then(|path| self.source_of(&path)) else {
            return Ok(None);
        };
        let device = self.attached(&source, Some(node))?;
        let device = device.filter(|device| device.node == node);
        Ok(device.map(|device| Found { device, source }))
    }

    /// The device of a source that this node has claimed for the volume, where
    /// it is attached: what a killed agent may have attached and not noted.
    pub fn left_by(&self, source: &Source, volume_id: &str) -> Result<Option<Device>, DeviceError> {
        if self.is_claimed_for(source, volume_id)? {
            self.attached(source, None)
        } else {
            Ok(None)
        }
    }

    fn attached(
        &self,
        source: &Source,
        known: Option<&Path>,
    ) -> Result<Option<Device>, DeviceError> {
        let (pool, image) = match source {
            Source::Loop { pool, image, .. } => (pool, image),
            Source::Nbd { export, .. } => {
                let found = nbd::find(|behind| behind.export == *export);
                let found = found.map_err(io("list the NBD devices"))?;
                return Ok(found.map(|(device, _)| Device::of_nbd(device, export)));
            }
        };
        let id = match self.pools.get(pool)?.open_image(image, false) {
            Ok(file) => FileId::of(&file).map_err(io("look at the image"))?,
            Err(PoolError::NoImage { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        Ok(image::attached_to(id, image, known)?.map(|found| Device {
            dev: found.attached.device.dev,
            node: found.attached.device.node,
            behind: Behind::Image(id),
            read_only: found.attached.read_only,
        }))
    }

    /// Detaches the device and gives the source back. `Deferred`: another
    /// opener keeps it a moment longer; the source is not given back yet.
    pub fn detach(
        &self,
        source: &Source,
        device: &Device,
        volume_id: &str,
    ) -> Result<Detached, DeviceError> {
        if source.is_behind(device.dev) {
            image::clear_read_only_mark(device)?;
        }
        let detached = match &device.behind {
            Behind::Image(id) => {
                loopdev::detach(&image::loop_device(device)?, *id).map_err(DeviceError::from)
            }
            Behind::Export(export) => {
                let detached = self.links.detach(export, &device.as_nbd());
                detached.map_err(DeviceError::from)
            }
        };
        match detached {
            Err(error) if is_busy(&error) => Err(DeviceError::Busy {
                device: device.node.clone(),
                holders: holders::holders(device.dev),
            }),
            Ok(detached) if detached != Detached::Deferred => {
                self.release(source, volume_id)?;
                Ok(detached)
            }
            other => other,
        }
    }

    /// Gives the source back, where this node has claimed it for this volume.
    pub fn release(&self, source: &Source, volume_id: &str) -> Result<(), DeviceError> {
        let Source::Loop { pool, image, .. } = source else {
            // Whoever has it next may fill it.
            return self.mkfs_ended(source);
        };
        if self.is_claimed_for(source, volume_id)? {
            let _ = claim::release(self.pools.get(pool)?, image, &self.node_id)?;
        }
        Ok(())
    }

    /// Notes durably that a mkfs of the source is about to begin.
    pub fn mkfs_begins(&self, source: &Source, volume_id: &str) -> Result<(), DeviceError> {
        match source {
            Source::Loop { pool, image, .. } => {
                Ok(making::begins(self.pools.get(pool)?, image, volume_id)?)
            }
            Source::Nbd { export, .. } => {
                (self.nbd_notes.begins(export, volume_id)).map_err(io("note the mkfs that begins"))
            }
        }
    }

    /// Whether a mkfs of the source for this volume has begun and not ended.
    pub fn mkfs_was_interrupted(
        &self,
        source: &Source,
        volume_id: &str,
    ) -> Result<bool, DeviceError> {
        match source {
            Source::Loop { pool, image, .. } => {
                let pool = self.pools.get(pool)?;
                Ok(making::was_interrupted(pool, image, volume_id)?)
            }
            Source::Nbd { export, .. } => (self.nbd_notes.was_interrupted(export, volume_id))
                .map_err(io("look for a note of a mkfs")),
        }
    }

    /// From now on the source may hold data.
    pub fn mkfs_ended(&self, source: &Source) -> Result<(), DeviceError> {
        match source {
            Source::Loop { pool, image, .. } => Ok(making::ended(self.pools.get(pool)?, image)?),
            Source::Nbd { export, .. } => {
                (self.nbd_notes.ended(export)).map_err(io("note the mkfs that ended"))
            }
        }
    }

    /// Whether everything behind the device is known to read as zeros, because
    /// nothing was ever written to it.
    pub fn reads_as_zero(&self, source: &Source) -> Result<bool, DeviceError> {
        let Source::Loop { pool, image, .. } = source else {
            return Ok(false);
        };
        let file = self.pools.get(pool)?.open_image(image, false)?;
        image::is_all_hole(&file).map_err(io("look for data in the image"))
    }

    /// The source of an inline volume whose image is made in this pool, or in
    /// the only one.
    pub fn inline_source(&self, pool: Option<&str>, volume_id: &str) -> Result<Source, PoolError> {
        let pool = self.pools.get_or_only(pool)?;
        Ok(Source::image(
            &pool.name,
            &pool::inline_image(&digest::hex(volume_id)),
        ))
    }

    /// Gives back what this node held before it was rebooted: nobody else can
    /// tell that what it claimed then is attached no more.
    pub fn release_stale_claims(&self) {
        for pool in self.pools.iter() {
            let images = claim::claimed_by(pool, &self.node_id).unwrap_or_else(|error| {
                tracing::warn!(
                    pool = pool.name,
                    error = chain(&error),
                    "claims of an earlier boot may be left"
                );
                Vec::new()
            });
            for image in images {
                match claim::release_stale(pool, &image, &self.node_id, &self.boot_id) {
                    Ok(Done::Now) => {
                        tracing::info!(
                            pool = pool.name,
                            image,
                            "released the claim of an earlier boot"
                        );
                    }
                    Ok(Done::Already) => {}
                    Err(error) => {
                        tracing::warn!(
                            pool = pool.name,
                            image,
                            error = chain(&error),
                            "a claim may be left"
                        );
                    }
                }
            }
        }
    }

    /// Makes the image of an inline volume.
    pub fn create_inline(
        &self,
        source: &Source,
        volume_id: &str,
        bytes: u64,
    ) -> Result<Done, DeviceError> {
        let Source::Loop { pool, .. } = source else {
            unreachable!("an inline volume is an image of a pool");
        };
        let (_, done) = self
            .pools
            .get(pool)?
            .create_inline(&digest::hex(volume_id), bytes)?;
        Ok(done)
    }

    /// Deletes the image of an inline volume.
    pub fn delete_inline(&self, source: &Source, volume_id: &str) -> Result<Done, DeviceError> {
        let Source::Loop { pool, image, .. } = source else {
            unreachable!("an inline volume is an image of a pool");
        };
        let pool = self.pools.get(pool)?;
        making::ended(pool, image)?;
        Ok(pool.delete_inline(&digest::hex(volume_id))?)
    }

    /// Makes the device at least `bytes` large, where that is for this node to
    /// do, and follows the source's size where somebody else has grown it.
    /// Returns the device's size in bytes.
    pub fn grow(&self, source: &Source, device: &Device, bytes: u64) -> Result<u64, DeviceError> {
        let Source::Loop {
            pool,
            image,
            preallocate,
            ..
        } = source
        else {
            // What is behind it grows at the server.
            let Behind::Export(export) = &device.behind else {
                unreachable!("only an export is behind an NBD device");
            };
            return Ok(self.links.grow(export)?);
        };
        let pool = self.pools.get(pool)?;
        let file = pool.open_image(image, true)?;
        let failed = |source| DeviceError::Extend {
            image: pool.image_path(image),
            bytes,
            source,
        };
        let has = file.metadata().map_err(failed)?.len();
        if has < bytes {
            let more = if *preallocate {
                fallocate(&file, FallocateFlags::empty(), has, bytes - has)
            } else {
                ftruncate(&file, bytes)
            };
            more.map_err(std::io::Error::from)
                .and_then(|()| file.sync_all())
                .map_err(failed)?;
        }
        loopdev::resize(&image::loop_device(device)?)?;
        sysfs::size_bytes(device.dev).map_err(io("read the device's size"))
    }

    /// The source that a loop device's backing path stands for.
    fn source_of(&self, backing: &Path) -> Option<Source> {
        self.pools.iter().find_map(|pool| {
            let image = backing.strip_prefix(&pool.dir).ok()?;
            Some(Source::image(&pool.name, image.to_str()?))
        })
    }
}

fn found(device: NbdDevice, behind: nbd::Behind) -> Found {
    Found {
        device: Device::of_nbd(device, &behind.export),
        source: Source::export(behind.export),
    }
}

fn is_busy(error: &DeviceError) -> bool {
    match error {
        DeviceError::Loop(error) => matches!(error, LoopError::Busy { .. }),
        DeviceError::Nbd(error) => matches!(**error, NbdError::Busy { .. }),
        _ => false,
    }
}
