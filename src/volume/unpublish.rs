//! Unpublish: unmounts a target and removes what was made for it.
//!
//! All of it is on the volume's lane: it walks directories that are on a disk, and where
//! the staging mount is gone the target's may be the superblock's last, which writes
//! back. A raw volume's descriptor lock is released before.

use std::path::{Path, PathBuf};

use rustix::fd::AsFd as _;

use super::{
    Outcome, already,
    context::{Context, OnLane},
    error::Cause,
    nested::PathOf,
    places::{absent_is_none, at_target},
    record::Record,
    remote,
    spec::Use,
    unstage,
};
use crate::{
    Done,
    device::{
        Owner,
        descriptor_lock::{self, Unlock},
    },
    fs::FsType,
    kernel::{Dev, block, sysfs},
    mount::{Mounted, PathKind, path::SafePath, table, unmount},
};

/// `NodeUnpublishVolume`. A target that is not there is success.
pub(super) async fn unpublish(cx: Context<'_>, target_path: &Path) -> Result<Outcome, Cause> {
    let record = cx.volume.record();
    if let Some(record) = &record {
        cx.progress.backend(record.source.backend());
    }
    cx.refuse_nested(target_path, PathOf::Target)?;
    let target_path = target_path.to_owned();
    cx.on_lane(|cx| Box::pin(on_lane(cx, record, target_path)))
        .await
}

async fn on_lane(
    cx: OnLane<'_>,
    record: Option<Record>,
    target_path: PathBuf,
) -> Result<Outcome, Cause> {
    release_lock(cx, record.as_ref(), &target_path).await?;
    let unpublishing = Unpublishing {
        cx,
        record: record.as_ref(),
    };
    cx.step("unpublish", || unpublishing.run(&target_path))?;
    cx.volume.drop_target(&target_path);
    match record {
        Some(record) if record.inline.is_some() && cx.live_target().is_none() => {
            unstage::tear_down(cx, &record).await?;
        }
        Some(_) => {}
        None => unstage::end_unknown_inline(cx, &target_path).await?,
    }
    Ok(Outcome::Done)
}

/// An unpublish, on the volume's lane.
#[derive(Clone, Copy)]
struct Unpublishing<'a> {
    cx: OnLane<'a>,
    record: Option<&'a Record>,
}

impl Unpublishing<'_> {
    fn run(self, target_path: &Path) -> Result<(), Cause> {
        let Some(place) = absent_is_none(self.cx.node.places.target(target_path))? else {
            return Ok(());
        };
        let mut kind = place.kind().map_err(looking_at(&place))?;
        let removed = loop {
            let mounted = match kind {
                PathKind::Mount(mounted) => mounted,
                kind => break place.remove_kind(kind).map_err(at_target)?,
            };
            self.is_the_volume(&place, &mounted)?;
            self.unmount(&place)?;
            // Mostly no other mount was below it.
            if mounted.directory
                && let Ok(removed) = place.remove_kind(PathKind::Dir)
            {
                break removed;
            }
            kind = place.kind().map_err(looking_at(&place))?;
        };
        if removed == Done::Now {
            tracing::info!(
                volume_id = self.cx.volume.id,
                target_path = %target_path.display(),
                "unpublished"
            );
        }
        Ok(())
    }

    /// Refuses any other mount at the target than the volume's.
    fn is_the_volume(self, place: &SafePath, mounted: &Mounted) -> Result<(), Cause> {
        match self.record {
            Some(record) if record.appears_at(mounted) => Ok(()),
            Some(record) if record.device.is_some() || record.root_dev.is_some() => {
                Err(Cause::precondition(format!(
                    "something else is mounted at {}; unmount it first",
                    place.path().display()
                )))
            }
            // Another driver may have mounted it.
            _ if remote::is_remote(place) => remote::refuse_others(self.cx, self.record, place),
            _ => self.is_its_device(place, mounted),
        }
    }

    /// The same without a record of the device: by what the kernel and the claims say
    /// about the mounted device.
    fn is_its_device(self, place: &SafePath, mounted: &Mounted) -> Result<(), Cause> {
        let (what, dev) = what_is_mounted(place, mounted)?;
        let refused = |what: String| {
            Err(Cause::precondition(format!(
                "{what} is mounted at {}, which is not this volume; unmount it by hand",
                place.path().display()
            )))
        };
        let Some(dev) = dev else {
            return refused(what);
        };
        let find = || self.cx.node.backends.owner_of(dev);
        match self.cx.step("find", find)? {
            Owner::Volume(id) if id == self.cx.volume.id => Ok(()),
            Owner::Volume(other) => refused(format!("volume {other}, {what},")),
            Owner::Source(source) => match self.cx.other_user(&source) {
                Some(other) => refused(format!("volume {other}, {what},")),
                None => Ok(()),
            },
            Owner::None => refused(what),
        }
    }

    fn unmount(self, place: &SafePath) -> Result<(), Cause> {
        let is_remote = match self.record {
            Some(record) => !record.source.has_device(),
            None => remote::is_remote(place),
        };
        let unmount = || {
            if is_remote {
                remote::unmount(self.cx, place)
            } else {
                Ok(unmount::unmount(place)?)
            }
        };
        already("unbind", self.cx.step("unbind", unmount)?);
        Ok(())
    }
}

/// The mount in words, and its device if that may be a volume's.
fn what_is_mounted(place: &SafePath, mounted: &Mounted) -> Result<(String, Option<Dev>), Cause> {
    let failed = || looking_at(place);
    if let Some(dev) = mounted.rdev {
        let node = sysfs::node_of(dev).map_err(failed())?;
        return Ok((format!("the block device {}", node.display()), Some(dev)));
    }
    let opened = place.open().map_err(failed())?;
    let entry = table::covering(opened.as_fd()).map_err(failed())?;
    let can_be = entry.fs_type.parse::<FsType>().is_ok();
    let source = Path::new(&entry.source);
    // btrfs shows a number of no device.
    let dev = Some(mounted.dev)
        .filter(|dev| dev.major != 0)
        .or_else(|| block::dev_behind(source).ok());
    let what = format!("{} of {}", entry.fs_type, source.display());
    Ok((what, dev.filter(|_| can_be)))
}

fn looking_at(place: &SafePath) -> impl FnOnce(std::io::Error) -> Cause + use<> {
    Cause::io(format!("look at {}", place.path().display()))
}

/// Releases the descriptor lock of this target: our own, over the target, or
/// the one that kubelet left over its map file of the same pod.
async fn release_lock(
    cx: OnLane<'_>,
    record: Option<&Record>,
    target_path: &Path,
) -> Result<(), Cause> {
    let Some(device) = record
        .filter(|record| record.usage == Use::Block)
        .and_then(|record| record.device.as_ref())
    else {
        return Ok(());
    };
    let dev = device.dev;
    let mut paths = vec![target_path.to_owned()];
    paths.extend(kubelet_map_file(target_path));
    let unlock = || match absent_is_none(cx.node.places.target(target_path))? {
        Some(_) => Ok(descriptor_lock::unlock(dev, &Unlock::Over(paths))?),
        None => Ok::<_, Cause>(Vec::new()),
    };
    for lock in cx.step("unlock", unlock)? {
        // While another opener has it open, as udevd does, the target stays busy.
        let released = || Ok((!lock.is_held()).then_some(()));
        let released = async {
            let name = sysfs::name_of(lock.device.dev)?;
            cx.node.uevents.wait(&name, released).await
        };
        cx.wait("gone", released).await.map_err(Cause::io(format!(
            "wait for {} to go",
            lock.device.node.display()
        )))?;
        tracing::info!(volume_id = cx.volume.id, lock = %lock.device.node.display(), backing = %lock.backing_path.display(), "released a descriptor lock");
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
