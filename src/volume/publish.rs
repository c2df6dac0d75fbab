//! Publish: a staged volume appears at a target path.
//!
//! Of a mounted volume this never touches the device, so it runs to its end on
//! the runtime thread, without a wake-up. No record is written: the mount at
//! the target is the record.

use std::{
    path::{Path, PathBuf},
    rc::Rc,
};

use rustix::{
    fd::{AsFd as _, OwnedFd},
    fs::{Mode, OFlags},
};

use super::{
    Error, Node, Outcome, TARGET, already, mounted,
    record::{Phase, Record, Target},
    spec::{Publish, Use},
    task::{Progress, Volume},
    unstage::absent_is_none,
};
use crate::{
    Done,
    capability::Mode as AccessMode,
    device::{self, Device, sysfs},
    kernel::Dev,
    mount::{
        Look, Mounted, bind,
        options::MountOptions,
        path::{PathError, Place},
        table,
    },
};

/// `NodePublishVolume` of a staged volume.
pub async fn publish(
    node: &Rc<Node>,
    volume: &Volume,
    spec: &Publish,
    progress: &Progress,
) -> Result<Outcome, Error> {
    let record = volume
        .record()
        .filter(|record| record.phase == Phase::Staged)
        .ok_or_else(|| volume.precondition("it is not staged on this node; stage it first"))?;
    progress.backend(record.source.backend());
    if record.staging_path != spec.staging_path {
        return Err(volume.precondition(format!(
            "it is staged at {}, not at {}",
            record.staging_path.display(),
            spec.staging_path.display()
        )));
    }
    let device = volume.device_of(&record)?;
    let options = publish_options(volume, &record, spec)?;
    let read_only = spec.read_only || record.read_only;
    let target = Target { read_only };
    let place = node.target(&spec.target_path)?;
    match place
        .look()
        .map_err(volume.io(format!("look at {}", place.path().display())))?
    {
        Look::Mount(mounted) if appears_at(&record, &device, &mounted) => {
            let is_read_only = mounted.read_only
                && (record.read_only || is_bound_read_only(node, volume, &record, &place)?);
            if is_read_only != read_only {
                return Err(Error::Incompatible {
                    volume: volume.id.clone(),
                    have: format!(
                        "published {} at {}",
                        access(is_read_only),
                        place.path().display()
                    ),
                    want: access(read_only).to_owned(),
                });
            }
            volume.set_target(&spec.target_path, target);
            already(volume, "publish", Done::Already);
            lock(node, volume, &record, &device, &place, progress).await?;
            return Ok(Outcome::Done);
        }
        Look::Mount(_) => {
            return Err(Error::Incompatible {
                volume: volume.id.clone(),
                have: format!(
                    "staged, but something else is mounted at {}",
                    place.path().display()
                ),
                want: "this volume there".to_owned(),
            });
        }
        _ => {}
    }
    let single = |mode| mode == AccessMode::SingleNodeSingleWriter;
    if (single(spec.mode) || single(record.mode))
        && let Some(other) = node.live_target(volume)
    {
        return Err(volume.precondition(format!(
            "its access mode allows one target, and it is published at {}",
            other.display()
        )));
    }
    match record.usage {
        Use::Mount { .. } => {
            let staging = node.staging(&record.mount_point())?;
            refuse_shut_down(volume, &staging)?;
            if let Some(group) = spec.group.filter(|_| !read_only) {
                mounted::own(node, volume, &staging, group, progress).await?;
            }
            let pin = pin(volume, &record, &device, &staging)?.ok_or_else(|| {
                volume.precondition(format!(
                    "its mount at {} is gone; stage it again",
                    staging.path().display()
                ))
            })?;
            let made = place.make_dir(0o750).map_err(at_target)?;
            if made == Done::Already {
                place.refuse_content().map_err(at_target)?;
            }
            progress
                .step("bind", async {
                    bind_at(volume, &pin, &place, &options, read_only, made)
                })
                .await?;
        }
        Use::Block => {
            if !record.source.is_still(&device) {
                return Err(volume.precondition(format!(
                    "{} is not its device any more; unstage it and stage it again",
                    device.node.display()
                )));
            }
            set_writable(node, volume, &device, read_only, progress).await?;
            bind_node(volume, &device, &place, read_only, progress).await?;
            lock(node, volume, &record, &device, &place, progress).await?;
        }
    }
    volume.set_target(&spec.target_path, target);
    Ok(Outcome::Done)
}

pub fn at_target(source: PathError) -> Error {
    Error::Path {
        field: TARGET,
        source,
    }
}

/// Whether a target that cannot be written was published so: a file system becomes
/// read-only by errors, too, and kubelet repeats the calls for its pods all the same.
fn is_bound_read_only(
    node: &Node,
    volume: &Volume,
    record: &Record,
    target: &Place,
) -> Result<bool, Error> {
    let staged = node
        .staging(&record.mount_point())
        .map(|place| place.look());
    if record.usage == Use::Block || matches!(staged, Ok(Ok(Look::Mount(it))) if !it.read_only) {
        return Ok(true);
    }
    let entry = target
        .open()
        .and_then(|target| table::covering(target.as_fd()));
    let failed = volume.io(format!("look at {}", target.path().display()));
    Ok(entry.map_err(failed)?.own_read_only)
}

fn access(read_only: bool) -> &'static str {
    if read_only { "read-only" } else { "writable" }
}

/// What of the capability's options applies to a target. Options of the
/// superblock took effect at stage; here they must be those of the stage.
fn publish_options(
    volume: &Volume,
    record: &Record,
    spec: &Publish,
) -> Result<MountOptions, Error> {
    match (&record.usage, &spec.usage) {
        (Use::Block, Use::Block) => Ok(MountOptions::default()),
        (
            Use::Mount {
                options: staged, ..
            },
            Use::Mount { options, fs },
        ) => {
            if fs.is_some() && record.fs.is_some() && *fs != record.fs {
                return Err(volume.precondition(format!("it is staged {}", record.describe())));
            }
            let options = options.for_publish();
            let unknown: Vec<_> = options
                .fs_options()
                .filter(|option| !record.found && !staged.has(option))
                .map(ToString::to_string)
                .collect();
            if unknown.is_empty() {
                Ok(options)
            } else {
                Err(Error::Invalid {
                    field: "volume_capability.mount.mount_flags",
                    why: format!(
                        "{} takes effect at stage, and the volume was staged without",
                        unknown.join(", ")
                    ),
                })
            }
        }
        _ => Err(volume.precondition(format!("it is {}", record.describe()))),
    }
}

/// What helps a file system that has shut down.
pub const RESTAGE: &str = "the kernel log says why; once no pod of this node uses the volume it is \
                           unstaged, and the next one finds it mounted anew";

/// A file system that has shut down is of no use to a pod more.
pub fn refuse_shut_down(volume: &Volume, staging: &Place) -> Result<(), Error> {
    match staging.look() {
        Ok(Look::Mount(mounted)) if mounted.shut_down => Err(volume.precondition(format!(
            "its file system at {} has shut down: {RESTAGE}",
            staging.path().display()
        ))),
        _ => Ok(()),
    }
}

/// Whether what is mounted is this volume.
pub fn appears_at(record: &Record, device: &Device, mounted: &Mounted) -> bool {
    match record.usage {
        Use::Block => mounted.rdev == Some(device.dev),
        Use::Mount { .. } => mounted.dev == record.root_dev.unwrap_or(device.dev),
    }
}

/// A descriptor of the staging mount, which keeps its superblock alive; `None`
/// when the volume is not what is mounted there.
pub fn pin(
    volume: &Volume,
    record: &Record,
    device: &Device,
    staging: &Place,
) -> Result<Option<OwnedFd>, Error> {
    let failed = || volume.io(format!("open {}", staging.path().display()));
    let pin = staging.open().map_err(failed())?;
    let look = Look::at(pin.as_fd()).map_err(failed())?;
    Ok(match look {
        Look::Mount(mounted) if appears_at(record, device, &mounted) => Some(pin),
        _ => None,
    })
}

/// Binds; what was made for it goes again where that fails.
fn bind_at(
    volume: &Volume,
    source: &OwnedFd,
    place: &Place,
    options: &MountOptions,
    read_only: bool,
    made: Done,
) -> Result<(), Error> {
    let bound = bind::bind(source.as_fd(), place, options, read_only);
    match bound {
        Ok(mounted) => {
            tracing::debug!(volume_id = volume.id, ?mounted, "published");
            Ok(())
        }
        Err(source) => {
            if made == Done::Now {
                let _ = place.remove().map_err(at_target)?;
            }
            Err(Error::Bind {
                volume: volume.id.clone(),
                source,
            })
        }
    }
}

/// Binds the device's node to a file.
pub async fn bind_node(
    volume: &Volume,
    device: &Device,
    place: &Place,
    read_only: bool,
    progress: &Progress,
) -> Result<(), Error> {
    let failed = || volume.io(format!("open {}", device.node.display()));
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let source = rustix::fs::open(&device.node, flags, Mode::empty())
        .map_err(|errno| failed()(errno.into()))?;
    let found = rustix::fs::fstat(&source).map_err(|errno| failed()(errno.into()))?;
    if Dev::from_raw(found.st_rdev) != device.dev {
        return Err(failed()(std::io::Error::other(format!(
            "its number is {}, not {}",
            Dev::from_raw(found.st_rdev),
            device.dev
        ))));
    }
    let made = place.make_file(0o600).map_err(at_target)?;
    if made == Done::Already {
        place.refuse_content().map_err(at_target)?;
    }
    progress
        .step("bind", async {
            bind_at(
                volume,
                &source,
                place,
                &MountOptions::default(),
                read_only,
                made,
            )
        })
        .await?;
    Ok(())
}

/// Takes the descriptor lock over a published device node, where told to.
async fn lock(
    node: &Rc<Node>,
    volume: &Volume,
    record: &Record,
    device: &Device,
    place: &Place,
    progress: &Progress,
) -> Result<(), Error> {
    if !node.config.block_lock || record.usage != Use::Block {
        return Ok(());
    }
    let (dev, target) = (device.dev, place.path().to_owned());
    let done = node
        .lane(volume, progress, "lock", move || {
            device::lock::lock(dev, &target)
        })
        .await
        .map_err(|error| volume.device(error))?;
    already(volume, "lock", done);
    Ok(())
}

/// A read-only bind of a device node does not stop a writer who opens it: the
/// device itself has to refuse. It does so for all targets or for none.
async fn set_writable(
    node: &Rc<Node>,
    volume: &Volume,
    device: &Device,
    read_only: bool,
    progress: &Progress,
) -> Result<(), Error> {
    if device.read_only
        || sysfs::is_read_only(device.dev).map_err(volume.io("read the device's state"))?
            == read_only
    {
        return Ok(());
    }
    if let Some(other) = node.live_target(volume) {
        return Err(volume.precondition(format!(
            "it is published {} at {}, and a raw block device is read-only for all its targets or for none",
            access(!read_only),
            other.display()
        )));
    }
    let on = device.clone();
    node.lane(volume, progress, "set-ro", move || {
        device::set_read_only(&on, read_only)
    })
    .await
    .map_err(|error| volume.device(error))
}

impl Volume {
    fn set_target(&self, path: &Path, target: Target) {
        if let Some(held) = self.held.borrow_mut().as_mut() {
            held.targets.insert(path.to_owned(), target);
        }
    }
}

impl Node {
    /// A target at which the volume still appears. Targets that somebody else
    /// has unmounted are forgotten on the way.
    pub fn live_target(&self, volume: &Volume) -> Option<PathBuf> {
        let mut held = volume.held.borrow_mut();
        let held = held.as_mut()?;
        let record = &held.record;
        let device = record.device.as_ref()?;
        held.targets.retain(|path, _| match self.target(path) {
            Ok(place) => match place.look() {
                Ok(Look::Mount(mounted)) => appears_at(record, device, &mounted),
                Ok(_) => false,
                // What cannot be seen is not proven gone.
                Err(_) => true,
            },
            Err(error) => !matches!(absent_is_none(Err(error)), Ok(None)),
        });
        held.targets.keys().next().cloned()
    }
}
