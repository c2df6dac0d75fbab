//! The backend `loop`: image files of pools, claimed, then put behind loop
//! devices.

use std::{
    fmt,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::Path,
    sync::Arc,
};

use rustix::fs::{FallocateFlags, fallocate, fstat};
use serde::{Deserialize, Serialize};

use super::{
    AttachOptions, Backing, Condition, Device, Purpose, Source,
    backend::{Attachment, BackendVolume, FormatMarker},
    context::{SourceError, VolumeContext},
    error::{DeviceError, io},
    loop_attach,
    loopdev::{self, FileId},
    pending_releases::PendingReleases,
};
use crate::{
    Detached, Done, digest, error_chain,
    kernel::{Dev, sysfs},
    pool::{
        self, Pool, PoolError, Pools, Scope,
        claim::{self, Claim},
        format_marker, growth,
    },
};

mod owner;

/// An image file in a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSource {
    /// The pool's name.
    pub pool: String,
    /// The image's path within the pool.
    pub image: String,
    /// Bypass the page cache of the pool's file system where it can.
    pub direct_io: bool,
    /// The device's logical block size in bytes. Part of the volume: a file
    /// system that was made on 512 does not mount on 4096, which the kernel
    /// by itself would choose by the image file's state (Linux 6.11).
    pub sector_size: u32,
    /// Allocate the image's space, also when it grows.
    pub preallocate: bool,
}

const DEFAULT_SECTOR: u32 = 512;

impl fmt::Display for ImageSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "image {} of pool {}", self.image, self.pool)
    }
}

impl ImageSource {
    /// An image, to be attached by the defaults.
    pub fn new(pool: &str, image: &str) -> Self {
        Self {
            pool: pool.to_owned(),
            image: image.to_owned(),
            direct_io: true,
            sector_size: DEFAULT_SECTOR,
            preallocate: false,
        }
    }

    /// Reads `pool`, `image`, `directIO`, `sectorSize` and `preallocate`.
    pub fn parse(context: VolumeContext<'_>) -> Result<Self, SourceError> {
        context.refuse_unlisted(&["backend", "image", "directIO", "sectorSize", "preallocate"])?;
        Ok(Self {
            pool: context.need("pool")?.to_owned(),
            image: context.need("image")?.to_owned(),
            direct_io: context.switch("directIO", true)?,
            preallocate: context.switch("preallocate", false)?,
            sector_size: match context.get("sectorSize") {
                None => DEFAULT_SECTOR,
                Some(text) => match text.parse() {
                    Ok(size @ (512 | 1024 | 2048 | 4096)) => size,
                    _ => {
                        return Err(SourceError {
                            key: "sectorSize".into(),
                            why: format!("{text:?} is none of 512, 1024, 2048, 4096"),
                        });
                    }
                },
            },
        })
    }

    /// Whether a file of the image's name is behind the device. Its directory is not
    /// compared: an agent that runs in another container than the one that attached it
    /// sees another path. [`Device::still_matches`] identifies the file.
    pub fn is_behind(&self, dev: Dev) -> bool {
        let shown = sysfs::backing_file(dev).ok();
        shown.is_some_and(|path| owner::name_of(&path) == Some(&*self.image))
    }

    /// Whether both are the same image, however attached.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.pool, &self.image) == (&other.pool, &other.image)
    }
}

/// The pools of this node, and its identity for nodes that share them.
#[derive(Clone, Debug)]
pub struct ImageFiles {
    pub pools: Pools,
    /// This node's name, which its claims carry.
    pub node_id: String,
    /// This boot's id: a claim of an earlier boot is stale.
    pub boot_id: String,
    /// The pools in which claims may be left.
    pub pending_releases: PendingReleases,
}

impl ImageFiles {
    /// The source of an inline volume whose image is made in this pool, or in
    /// the only one.
    pub fn inline_source(
        &self,
        pool: Option<&str>,
        volume_id: &str,
    ) -> Result<ImageSource, PoolError> {
        let pool = self.pools.get_or_only(pool)?;
        if pool.scope != Scope::Local {
            let pool = pool.name.clone();
            return Err(PoolError::NotLocal { pool });
        }
        let image = pool::inline_image(&digest::sha256_hex(volume_id));
        Ok(ImageSource::new(&pool.name, &image))
    }

    /// See [`super::Backends::release_stale_claims`]: no other node knows that the
    /// images are no longer attached.
    pub fn release_stale_claims(&self, pool: &Pool) {
        let pool_name = &pool.name;
        let images = claim::claimed_by(pool, &self.node_id).unwrap_or_else(|error| {
            let error = error_chain(&error);
            tracing::warn!(pool_name, error, "claims of an earlier boot may be left");
            Vec::new()
        });
        for image in images {
            match claim::release_stale(pool, &image, &self.node_id, &self.boot_id) {
                Ok(Done::Now) => {
                    tracing::info!(pool_name, image, "released the claim of an earlier boot");
                }
                Ok(Done::Already) => {}
                Err(error) => {
                    let error = error_chain(&error);
                    tracing::warn!(pool_name, image, error, "a claim may be left");
                }
            }
        }
    }

    /// See [`super::Backends::claimed_in`].
    pub fn claimed_in(&self, pool: &str) -> Result<Option<Vec<(Source, String)>>, DeviceError> {
        let pool = self.pools.get(pool)?;
        if !pool.is_initialized()? {
            return Ok(None);
        }
        let mut claimed = Vec::new();
        for image in claim::claimed_by(pool, &self.node_id)? {
            let claim = claim::own(pool, &image, &self.node_id)?;
            let source = Source::Loop(ImageSource::new(&pool.name, &image));
            claimed.extend(claim.map(|claim| (source, claim.volume_id)));
        }
        claimed.retain(|(_, id)| !id.is_empty());
        Ok(Some(claimed))
    }

    /// The image, bound to this node's pools.
    pub fn bind<'a>(&'a self, source: &'a ImageSource) -> BoundImage<'a> {
        BoundImage {
            images: self,
            source,
        }
    }
}

/// An image, bound to this node's pools.
#[derive(Debug)]
pub struct BoundImage<'a> {
    images: &'a ImageFiles,
    source: &'a ImageSource,
}

impl BoundImage<'_> {
    fn pool(&self) -> Result<&Pool, PoolError> {
        self.images.pools.get(&self.source.pool)
    }

    fn claim(&self, options: &AttachOptions) -> Claim {
        Claim {
            node_id: self.images.node_id.clone(),
            boot_id: self.images.boot_id.clone(),
            volume_id: options.volume_id.clone(),
            access: match (options.shared, options.read_only) {
                (false, _) => claim::Sharing::Exclusive,
                (true, false) => claim::Sharing::Shared,
                (true, true) => claim::Sharing::Readers,
            },
            read_only: options.read_only,
        }
    }

    fn attached_as(&self, known: Option<&Path>) -> Result<Option<Device>, DeviceError> {
        let image = &self.source.image;
        let id = match self.pool()?.open_image(image, false) {
            Ok(file) => FileId::of(&file).map_err(io("look at the image"))?,
            Err(PoolError::NoImage { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        Ok(
            loop_attach::attached_to(id, image, known)?.map(|found| Device {
                dev: found.attached.device.dev,
                node: found.attached.device.node,
                backing: Backing::Image(id),
                read_only: found.attached.read_only,
                diskseq: found.attached.device.diskseq,
                encrypted: None,
            }),
        )
    }

    /// Makes the image `bytes` large, if it is smaller.
    fn enlarge(&self, bytes: u64) -> Result<(), DeviceError> {
        let (pool, image) = (self.pool()?, &self.source.image);
        let file = pool.open_image(image, true)?;
        let failed = |source| DeviceError::Extend {
            image: pool.image_path(image),
            bytes,
            source,
        };
        let room = pool.lock_room();
        let has = file.metadata().map_err(failed)?.len();
        if has >= bytes {
            return Ok(());
        }
        // Only this node's own controller has a local pool.
        pool.refuse_growth_without_room(image, bytes - has)?;
        let more = if self.source.preallocate {
            fallocate(&file, FallocateFlags::empty(), has, bytes - has).map_err(Into::into)
        } else {
            growth::grow(&file, bytes)
        };
        more.map_err(failed)?;
        pool.mark_grown();
        drop(room);
        file.sync_all().map_err(failed)
    }

    /// Makes the image of an inline volume.
    pub fn create_inline(&self, volume_id: &str, bytes: u64) -> Result<Done, DeviceError> {
        let (_, done) = self
            .pool()?
            .create_inline(&digest::sha256_hex(volume_id), bytes)?;
        Ok(done)
    }

    /// Deletes the image of an inline volume.
    pub fn delete_inline(&self, volume_id: &str) -> Result<Done, DeviceError> {
        format_marker::clear(self.pool()?, &self.source.image)?;
        Ok(self.pool()?.delete_inline(&digest::sha256_hex(volume_id))?)
    }
}

impl BackendVolume for BoundImage<'_> {
    fn release_pending(&self, volume_id: &str) -> Result<Done, DeviceError> {
        if !self.is_claimed_for(volume_id)? || self.attached()?.is_some() {
            return Ok(Done::Already);
        }
        let done = claim::release(self.pool()?, &self.source.image, &self.images.node_id)?;
        tracing::info!(volume_id, source = %self.source, "released a claim that was left");
        Ok(done)
    }

    fn attach(&self, options: &AttachOptions) -> Result<(Attachment, Done), DeviceError> {
        let (pool, image) = (self.pool()?, &self.source.image);
        let dir = pool.open_dir()?;
        let opened = pool.open_image_in(dir.as_fd(), image, !options.read_only);
        let (file, _) = opened.or_else(|error| {
            // An image that is missing while the pool is away is not gone.
            pool.check_scope()?;
            Err(error)
        })?;
        let (claimed, before) = claim::claim_in(pool, dir.as_fd(), image, &self.claim(options))?;
        drop(dir);
        let stat = match fstat(&file) {
            Ok(stat) if stat.st_nlink > 0 => stat,
            // Its deletion was complete before the claim.
            looked => {
                let gone = PoolError::NoImage {
                    pool: pool.name.clone(),
                    image: image.clone(),
                };
                let looked = looked.map_err(|errno| pool.io("look at", Path::new(image), errno));
                if claimed == Done::Now {
                    claim::put_back(pool, image, &self.images.node_id, before)?;
                }
                return Err(looked.map_or_else(|error| error, |_| gone).into());
            }
        };
        let format_marker = Arc::new(PoolFormatMarker(pool.clone(), image.clone()));
        if options.gives_out_raw() {
            format_marker.clear()?;
        }
        let other = before.as_ref().map(|held| &*held.volume_id);
        let other = other.filter(|other| !other.is_empty() && *other != options.volume_id);
        let attached = loop_attach::attach_loop(self.source, pool, (&file, &stat), options, other);
        if attached.is_err() && claimed == Done::Now {
            // The caller gets the error of the attach. A claim that this node held before
            // may be that of a device, whose record is lost.
            let put_back = claim::put_back(pool, image, &self.images.node_id, before);
            if let Err(error) = put_back {
                tracing::warn!(%error, image, "the claim on an image that was not attached stays");
            }
        }
        let (device, exclusive) = attached?;
        let done = match exclusive {
            Some(_) => Done::Now,
            None => Done::Already,
        };
        Ok((
            Attachment {
                device,
                // LOOP_CONFIGURE sets the size, by a descriptor of the node.
                is_ready: done == Done::Now,
                exclusive: exclusive.filter(|_| options.purpose == Purpose::Mount),
                format_marker,
            },
            done,
        ))
    }

    fn condition(&self, device: &Device) -> Option<Condition> {
        let path = sysfs::backing_file(device.dev).ok()?;
        owner::is_deleted(&path).then_some(Condition::Deleted)
    }

    fn is_claimed_for(&self, volume_id: &str) -> Result<bool, DeviceError> {
        let claim = claim::own(self.pool()?, &self.source.image, &self.images.node_id)?;
        if claim.is_none() {
            self.images.check_mounted_where_attached(self.source)?;
        }
        Ok(claim.is_some_and(|claim| claim.volume_id == volume_id))
    }

    fn attached(&self) -> Result<Option<Device>, DeviceError> {
        self.attached_as(None)
    }

    fn detach(&self, device: &Device, _: &str, purpose: Purpose) -> Result<Detached, DeviceError> {
        let Backing::Image(id) = &device.backing else {
            unreachable!("an image is behind a loop device");
        };
        let was_raw = purpose == Purpose::Raw;
        let device = loop_attach::loop_device(device)?;
        // The unmount of a file system does it. Of a local pool no other node reads.
        if was_raw
            && self.pool().is_ok_and(|pool| pool.scope == Scope::Shared)
            && let Err(error) = loopdev::write_back(&device, *id)
        {
            // The kernel reports it once, and drops the data; where the pool's file system has
            // failed, each repeat fails, and the device would keep it from being unmounted.
            let error = error_chain(&error);
            tracing::error!(source = %self.source, error, "data that was written to the volume without a sync may be lost");
        }
        Ok(loopdev::detach(&device, *id, was_raw)?)
    }

    fn release(&self, volume_id: &str) -> Result<(), DeviceError> {
        let pool = self.pool()?;
        let released = self.is_claimed_for(volume_id).and_then(|is_claimed| {
            if is_claimed {
                let _ = claim::release(pool, &self.source.image, &self.images.node_id)?;
                return Ok(true);
            }
            Ok(pool.is_initialized()?)
        });
        match released {
            Ok(true) => return Ok(()),
            Ok(false) => {
                tracing::warn!(volume_id, source = %self.source, "the pool is away; releasing the claim when it is back");
            }
            Err(DeviceError::Claim(claim::ClaimError::Pool(error)) | DeviceError::Pool(error)) => {
                let error = error_chain(&error);
                tracing::warn!(volume_id, source = %self.source, error, "the claim is given back later");
            }
            Err(error) => return Err(error),
        }
        self.images.pending_releases.add(&pool.name);
        Ok(())
    }

    fn reads_as_zero(&self) -> Result<bool, DeviceError> {
        let file = self.pool()?.open_image(&self.source.image, false)?;
        loop_attach::is_all_hole(&file).map_err(io("look for data in the image"))
    }

    fn allocated_bytes(&self) -> Option<u64> {
        let pool = self.pool().ok()?;
        let image = pool.open_image(&self.source.image, false).ok()?;
        // stat(2): in units of 512 bytes, whatever the size of a block.
        Some(image.metadata().ok()?.blocks() * 512)
    }

    fn grow(&self, device: &Device, bytes: u64) -> Result<u64, DeviceError> {
        self.enlarge(bytes)?;
        loopdev::resize(&loop_attach::loop_device(device)?)?;
        sysfs::size_bytes(device.dev).map_err(io("read the device's size"))
    }
}

/// The marker beside an image of a pool.
#[derive(Debug)]
struct PoolFormatMarker(Pool, String);

impl FormatMarker for PoolFormatMarker {
    fn set(&self, volume_id: &str) -> Result<(), DeviceError> {
        Ok(format_marker::set(&self.0, &self.1, volume_id)?)
    }

    fn format_in_progress(&self, volume_id: &str) -> Result<bool, DeviceError> {
        Ok(format_marker::format_in_progress(
            &self.0, &self.1, volume_id,
        )?)
    }

    fn clear(&self) -> Result<(), DeviceError> {
        Ok(format_marker::clear(&self.0, &self.1)?)
    }
}

#[cfg(test)]
mod tests;
