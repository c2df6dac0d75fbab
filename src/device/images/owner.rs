//! The owner of a loop device without a record.
//!
//! The kernel is asked before any pool: which files are attached, by which paths, and
//! on which file systems. So a pool that does not answer delays only volumes
//! that may have an image in it attached. The file system only the device itself tells, and
//! it may be a stranger's that hangs: it is asked where the paths and the mounts do not say
//! enough, and waited for but a moment.

use std::{cell::OnceCell, os::unix::ffi::OsStrExt as _, path::Path};

use super::{ImageFiles, ImageSource};
use crate::{
    ceph::csi_format::handle,
    device::{
        Device, Source,
        backend::{FoundDevice, Owner},
        error::{DeviceError, io},
        loopdev::{self, FileId},
    },
    kernel::{
        Dev,
        sysfs::{self, DELETED},
    },
    mount::table::{self, MountEntry},
    pool::{Pool, Pools, claim, handle::VolumeHandle},
};

impl ImageFiles {
    /// The attached image that this node claimed for the volume. A handle of this driver
    /// names its pool: no other is asked. Devices in `known` belong to other volumes.
    ///
    /// Fails as [`Pool::check_mounted`] where the volume's image may be attached, and its
    /// pool is not there to tell.
    pub fn find(
        &self,
        volume_id: &str,
        known: &[Device],
    ) -> Result<Option<FoundDevice>, DeviceError> {
        if handle::is_ours(volume_id) {
            return Ok(None);
        }
        let handle = volume_id.parse::<VolumeHandle>().ok();
        let attached = loopdev::backing_files().map_err(io("list the loop devices"))?;
        let places = self.pool_places();
        let is_known = |dev| (known.iter()).any(|it| it.dev == dev && it.still_matches());
        for (dev, backing) in attached {
            let Some(image) = name_of(&backing).filter(|_| !is_known(dev)) else {
                continue;
            };
            let pools: Vec<&Pool> = match &handle {
                Some(handle) => self.pools.get(handle.parts().pool()).into_iter().collect(),
                None => places.may_hold(&backing, dev)?,
            };
            let is_its = handle.as_ref().is_some_and(|it| it.image() == image);
            for pool in pools {
                let claim = claim::own(pool, image, &self.node_id)?;
                // If an image was deleted with its pool, only the handle shows its owner.
                let may_be_its = backing.starts_with(&pool.dir) && !is_deleted(&backing);
                if claim.is_none() && (is_its || may_be_its) {
                    pool.check_mounted()?;
                }
                if claim.is_some_and(|claim| claim.volume_id == volume_id) {
                    let source = ImageSource::new(&pool.name, image);
                    let device = self.bind(&source).attached_as(None)?;
                    return Ok(device.map(|device| FoundDevice {
                        device,
                        source: Source::Loop(source),
                    }));
                }
            }
        }
        Ok(None)
    }

    /// The image behind a device, if it is in a pool of this node. Fails as [`Pool::check_mounted`]
    /// where it may be, and its pool is not there to tell.
    pub fn find_behind(&self, node: &Path, dev: Dev) -> Result<Option<FoundDevice>, DeviceError> {
        let Some(source) = self.source_behind(dev)? else {
            return Ok(None);
        };
        let device = self.bind(&source).attached_as(Some(node))?;
        if device.is_none() {
            self.pools.get(&source.pool)?.check_mounted()?;
        }
        let device = device.filter(|device| device.node == node);
        let source = Source::Loop(source);
        Ok(device.map(|device| FoundDevice { device, source }))
    }

    /// The owner of a device that has an image of a pool behind it. Fails as
    /// [`Pool::check_mounted`] where one may be, and its pool is not there to tell.
    pub fn owner_of(&self, dev: Dev) -> Result<Owner, DeviceError> {
        let Some(source) = self.source_behind(dev)? else {
            return Ok(Owner::None);
        };
        let claim = claim::own(self.pools.get(&source.pool)?, &source.image, &self.node_id)?;
        let volume_id = claim.map(|claim| claim.volume_id);
        Ok(match volume_id.filter(|id| !id.is_empty()) {
            Some(volume_id) => Owner::Volume(volume_id),
            None => Owner::Source(Box::new(Source::Loop(source))),
        })
    }

    /// Fails as [`Pool::check_mounted`] where a loop device may be over the image: what is
    /// not in the pool then says nothing.
    pub fn check_mounted_where_attached(&self, source: &ImageSource) -> Result<(), DeviceError> {
        let image = name_of(Path::new(&source.image));
        let attached = loopdev::backing_files().map_err(io("list the loop devices"))?;
        let places = self.pool_places();
        for (dev, backing) in attached {
            if name_of(&backing) != image {
                continue;
            }
            let mut pools = places.may_hold(&backing, dev)?.into_iter();
            if let Some(pool) = pools.find(|pool| pool.name == source.pool) {
                pool.check_mounted()?;
            }
        }
        Ok(())
    }

    /// The image of a pool that is behind a device: by its path, or, where that says
    /// nothing, by its inode. It was attached in another container, which saw the pool
    /// elsewhere, or the pool was unmounted meanwhile.
    fn source_behind(&self, dev: Dev) -> Result<Option<ImageSource>, DeviceError> {
        let Ok(backing) = sysfs::backing_file(dev) else {
            return Ok(None);
        };
        let by_path = self.pools.iter().find_map(|pool| {
            let image = backing.strip_prefix(&pool.dir).ok()?;
            Some(ImageSource::new(&pool.name, image.to_str()?))
        });
        let Some(image) = name_of(&backing).filter(|_| by_path.is_none()) else {
            return Ok(by_path);
        };
        let mut mounted = Ok(());
        for pool in self.pool_places().may_hold(&backing, dev)? {
            let Ok(file) = pool.open_image(image, false) else {
                mounted = mounted.and(pool.check_mounted());
                continue;
            };
            let id = FileId::of(&file).map_err(io("look at the image"))?;
            let over = loopdev::find(id, Path::new(image)).map_err(io("list the loop devices"))?;
            if over.iter().any(|over| over.device.dev == dev) {
                return Ok(Some(ImageSource::new(&pool.name, image)));
            }
        }
        mounted?;
        Ok(None)
    }

    fn pool_places(&self) -> PoolPlaces<'_> {
        PoolPlaces {
            pools: &self.pools,
            file_systems: OnceCell::new(),
        }
    }
}

/// Where the pools are, for one look at the loop devices.
struct PoolPlaces<'a> {
    pools: &'a Pools,
    /// Each pool with `st_dev` of its files, as far as the mount table tells. Read when it
    /// is needed, and once for all devices.
    file_systems: OnceCell<Vec<(&'a Pool, Option<Dev>)>>,
}

impl<'a> PoolPlaces<'a> {
    /// The pools that may hold the file behind a loop device, as far as the kernel
    /// tells without asking any of them.
    fn may_hold(&self, backing: &Path, dev: Dev) -> Result<Vec<&'a Pool>, DeviceError> {
        let by_path = self.pools.iter().filter(|it| backing.starts_with(&it.dir));
        let by_path: Vec<_> = by_path.collect();
        if !by_path.is_empty() {
            return Ok(by_path);
        }
        let pools = self.file_systems()?;
        // Where it could exclude no pool, the device is not asked.
        let is_told = pools.iter().any(|(_, told)| told.is_some());
        let behind = is_told.then(|| loopdev::file_system_behind(dev)).flatten();
        let may_be = |told: Option<Dev>| told.is_none() || behind.is_none() || told == behind;
        let pools = pools.iter().filter(|(_, told)| may_be(*told));
        Ok(pools.map(|(pool, _)| *pool).collect())
    }

    fn file_systems(&self) -> Result<&[(&'a Pool, Option<Dev>)], DeviceError> {
        if let Some(known) = self.file_systems.get() {
            return Ok(known);
        }
        let mounts = table::list().map_err(io("list the mounts"))?;
        let told = |pool: &Pool| {
            let mut mounts = mounts.iter().rev();
            let mounted = mounts.find(|entry| entry.mount_point == pool.dir);
            mounted.filter(|it| tells_device(it)).map(|it| it.dev)
        };
        let pools = self.pools.iter().map(|pool| (pool, told(pool)));
        Ok(self.file_systems.get_or_init(|| pools.collect()))
    }
}

/// The name of the file behind a loop device, which may be deleted.
pub(super) fn name_of(backing: &Path) -> Option<&str> {
    let name = backing.file_name()?.to_str()?;
    Some(name.strip_suffix(DELETED).unwrap_or(name))
}

pub(super) fn is_deleted(backing: &Path) -> bool {
    backing.as_os_str().as_bytes().ends_with(DELETED.as_bytes())
}

/// Whether the mount's device is `st_dev` of its files. It is of whatever is on a
/// block device, and of these; not of btrfs and overlayfs, which number their files'
/// devices otherwise.
fn tells_device(entry: &MountEntry) -> bool {
    let kind = entry.fs_type.split('.').next().unwrap_or_default();
    entry.dev.major != 0 || ["fuse", "nfs", "nfs4", "tmpfs"].contains(&kind)
}
