//! Unpublish: a target goes, with what was made for it.
//!
//! Of a mounted volume this runs on the runtime thread, though it unmounts: a
//! descriptor of the staging mount is kept meanwhile, so that what goes is never
//! the superblock's last mount, which alone would write back and could hang.

use std::{
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
};

use rustix::{
    fd::AsFd as _,
    fs::{Mode, OFlags},
};

use super::{
    Error, Node, Outcome, already,
    publish::{appears_at, at_target, pin},
    record::Record,
    spec::Use,
    task::{Progress, Volume},
    unstage::{self, absent_is_none},
};
use crate::{
    device::{
        Owner,
        lock::{self, Unlock},
        sysfs,
    },
    fs::FsType,
    kernel::block,
    mount::{
        Look, Mounted,
        path::Place,
        table,
        unmount::{self, UnmountError},
    },
};

/// `NodeUnpublishVolume`. A target that is not there is success.
pub async fn unpublish(
    node: &Rc<Node>,
    volume: &Volume,
    target_path: &Path,
    progress: &Progress,
) -> Result<Outcome, Error> {
    let record = volume.record();
    if let Some(record) = &record {
        progress.backend(record.source.backend());
    }
    if let Some(place) = absent_is_none(node.target(target_path))? {
        release_lock(node, volume, record.as_ref(), target_path, progress).await?;
        while let Look::Mount(mounted) = place
            .look()
            .map_err(volume.io(format!("look at {}", place.path().display())))?
        {
            let known = record.as_ref();
            if known.is_none_or(|record| record.device.is_none()) {
                is_the_volume(node, volume, &place, &mounted, progress).await?;
            }
            unmount_target(node, volume, known, &place, &mounted, progress).await?;
        }
        already(volume, "unpublish", place.remove().map_err(at_target)?);
    }
    volume.drop_target(target_path);
    if let Some(record) = record
        && record.inline.is_some()
        && node.live_target(volume).is_none()
    {
        unstage::tear_down(node, volume, &record, progress).await?;
    }
    Ok(Outcome::Done)
}

/// Makes sure that what is mounted at a target is the volume, of which no record says
/// what it looks like: by what the kernel and the claims tell of its device.
async fn is_the_volume(
    node: &Rc<Node>,
    volume: &Volume,
    place: &Place,
    mounted: &Mounted,
    progress: &Progress,
) -> Result<(), Error> {
    let path = place.path().display();
    let failed = || volume.io(format!("look at {path}"));
    let (what, dev) = if let Some(dev) = mounted.rdev {
        let node = block::node_of(dev).map_err(failed())?;
        (format!("the block device {}", node.display()), Some(dev))
    } else {
        let opened = place.open().map_err(failed())?;
        let entry = table::covering(opened.as_fd()).map_err(failed())?;
        let can_be = entry.fs_type.parse::<FsType>().is_ok();
        let source = Path::new(&entry.source);
        // btrfs shows a number that is no device's.
        let dev = Some(mounted.dev)
            .filter(|dev| dev.major != 0)
            .or_else(|| block::dev_behind(source).ok());
        let what = format!("{} of {}", entry.fs_type, source.display());
        (what, dev.filter(|_| can_be))
    };
    let refused = |what: String| {
        Err(volume.precondition(format!(
            "{what} is mounted at {path}, which is not this volume; unmount it by hand"
        )))
    };
    let Some(dev) = dev else {
        return refused(what);
    };
    let backends = Arc::clone(&node.backends);
    let owner = node
        .lane(volume, progress, "find", move || backends.owner_of(dev))
        .await
        .map_err(|error| volume.device(error))?;
    match owner {
        Owner::Volume(id) if id == volume.id => Ok(()),
        Owner::Volume(other) => refused(format!("volume {other}, {what},")),
        Owner::Source(source) => match node.other_user(volume, &source) {
            Some(other) => refused(format!("volume {other}, {what},")),
            None => Ok(()),
        },
        Owner::Nobody => refused(what),
    }
}

async fn unmount_target(
    node: &Rc<Node>,
    volume: &Volume,
    record: Option<&Record>,
    place: &Place,
    mounted: &Mounted,
    progress: &Progress,
) -> Result<(), Error> {
    let known = record.and_then(|record| record.device.as_ref().map(|device| (record, device)));
    let pinned = match known {
        Some((record, device)) if !appears_at(record, device, mounted) => {
            return Err(volume.precondition(format!(
                "something else is mounted at {}; unmount it first",
                place.path().display()
            )));
        }
        Some((record, device)) if matches!(record.usage, Use::Mount { .. }) => {
            match absent_is_none(node.staging(&record.mount_point()))? {
                Some(staging) => pin(volume, record, device, &staging)?,
                None => None,
            }
        }
        // The mount of a device node is one of /dev, and never its last.
        Some((_, device)) => Some(
            rustix::fs::open("/dev", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(
                |errno| {
                    volume.io(format!("open the directory of {}", device.node.display()))(
                        errno.into(),
                    )
                },
            )?,
        ),
        None => None,
    };
    if pinned.is_some() {
        let unbound = progress
            .step("unbind", async { unmount::unmount_once(place) })
            .await;
        match unbound {
            // Somebody looks at it just now, or uses it: found out on the lane.
            Err(UnmountError::Busy { .. }) => {}
            Err(source) => {
                return Err(Error::Unmount {
                    volume: volume.id.clone(),
                    source,
                });
            }
            Ok(done) => {
                already(volume, "unbind", done);
                return Ok(());
            }
        }
    }
    drop(pinned);
    // Busy, or maybe the last mount of its superblock, which can hang.
    let place = place.clone();
    let done = node
        .lane(volume, progress, "unmount", move || {
            unmount::unmount(&place)
        })
        .await
        .map_err(|source| Error::Unmount {
            volume: volume.id.clone(),
            source,
        })?;
    already(volume, "unmount", done);
    Ok(())
}

/// Releases the descriptor lock of this target: our own, over the target, or
/// the one that kubelet left over its map file of the same pod.
async fn release_lock(
    node: &Rc<Node>,
    volume: &Volume,
    record: Option<&Record>,
    target_path: &Path,
    progress: &Progress,
) -> Result<(), Error> {
    let Some(device) = record
        .filter(|record| record.usage == Use::Block)
        .and_then(|record| record.device.as_ref())
    else {
        return Ok(());
    };
    let dev = device.dev;
    let mut paths = vec![target_path.to_owned()];
    paths.extend(kubelet_map_file(target_path));
    let released = node
        .lane(volume, progress, "unlock", move || {
            lock::unlock(dev, &Unlock::Over(paths))
        })
        .await
        .map_err(|error| volume.device(error))?;
    for lock in released {
        // Whoever has it open, udevd for a moment, keeps the target busy with it.
        let gone = || Ok((!lock.is_held()).then_some(()));
        let gone = async {
            node.uevents
                .wait(&sysfs::sysname_of(lock.device.dev)?, gone)
                .await
        };
        progress
            .step("gone", gone)
            .await
            .map_err(volume.io(format!("wait for {} to go", lock.device.node.display())))?;
        tracing::info!(volume_id = volume.id, lock = %lock.device.node.display(), backing = %lock.backing_path.display(), "released a descriptor lock");
    }
    Ok(())
}

/// Kubelet's map file for a publish path:
/// `…/volumeDevices/publish/<spec>/<pod>` → `…/volumeDevices/<spec>/dev/<pod>`
/// (pkg/volume/csi/csi_block.go).
fn kubelet_map_file(publish_path: &Path) -> Option<PathBuf> {
    let pod = publish_path.file_name()?;
    let spec = publish_path.parent()?;
    let publish = spec.parent()?;
    let devices = publish.parent()?;
    (publish.file_name()? == "publish" && devices.file_name()? == "volumeDevices")
        .then(|| devices.join(spec.file_name()?).join("dev").join(pod).into())
        .flatten()
}

impl Volume {
    fn drop_target(&self, path: &Path) {
        if let Some(held) = self.held.borrow_mut().as_mut() {
            held.targets.remove(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubelets_map_file_is_found_from_the_publish_path() {
        let root = Path::new("/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices");
        let publish = root.join("publish/pvc-1/0a1b");
        assert_eq!(
            kubelet_map_file(&publish),
            Some(root.join("pvc-1/dev/0a1b"))
        );
        assert_eq!(kubelet_map_file(Path::new("/mnt/x")), None);
        assert_eq!(kubelet_map_file(&root.join("pvc-1/dev/0a1b")), None);
    }
}
