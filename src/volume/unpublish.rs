//! Unpublish: a target goes, with what was made for it.
//!
//! All of it is one job on the volume's lane ([`Unpublishing`]): it walks directories
//! that are on a disk, and where the staging mount is gone the target's may be the
//! superblock's last, which writes back. A raw volume's descriptor lock goes before, as
//! the end of that is an event that is waited for.

use std::{
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
};

use rustix::fd::AsFd as _;

use super::{
    Error, Node, Outcome, already,
    held::Targets,
    nested::PathOf,
    places::{Places, absent_is_none, at_target},
    publish::appears_at,
    record::Record,
    spec::Use,
    task::{Progress, Volume},
    unstage,
};
use crate::{
    device::{
        Backends, Owner, Source,
        descriptor_lock::{self, Unlock},
    },
    fs::FsType,
    kernel::{Dev, block, sysfs},
    mount::{Mounted, PathKind, path::SafePath, table, unmount},
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
    node.refuse_nested(volume, target_path, PathOf::Target)?;
    release_lock(node, volume, record.as_ref(), target_path, progress).await?;
    let is_known = record.as_ref().is_some_and(|it| it.device.is_some());
    let others = if is_known {
        Vec::new()
    } else {
        node.sources_of_others(volume)
    };
    let job = Unpublishing {
        volume_id: volume.id.clone(),
        record: record.clone(),
        target_path: target_path.to_owned(),
        places: node.places.clone(),
        backends: Arc::clone(&node.backends),
        others,
        targets: volume.targets().but(target_path),
        progress: progress.clone(),
    };
    let (live, targets) = node
        .lane(volume, progress, "unpublish", move || job.run())
        .await?;
    volume.drop_target(target_path);
    volume.forget_gone(&targets);
    if let Some(record) = record
        && record.inline.is_some()
        && live.is_none()
    {
        unstage::tear_down(node, volume, &record, progress).await?;
    }
    Ok(Outcome::Done)
}

/// What an unpublish needs on the volume's lane.
struct Unpublishing {
    volume_id: String,
    record: Option<Record>,
    target_path: PathBuf,
    places: Places,
    backends: Arc<Backends>,
    /// What other volumes have, where no record says what this one looks like.
    others: Vec<(String, Source)>,
    /// Where else it is published.
    targets: Targets,
    progress: Progress,
}

impl Unpublishing {
    /// Answers with a target at which an inline volume still appears.
    fn run(mut self) -> Result<(Option<PathBuf>, Targets), Error> {
        if let Some(place) = absent_is_none(self.places.target(&self.target_path))? {
            while let PathKind::Mount(mounted) = place.kind().map_err(self.looking_at(&place))? {
                self.is_the_volume(&place, &mounted)?;
                self.unmount(&place)?;
            }
            let removed = place.remove().map_err(at_target)?;
            already(&self.volume_id, "unpublish", removed);
        }
        let inline = self.record.as_ref().filter(|it| it.inline.is_some());
        let live = inline.and_then(|record| self.targets.live(&self.places, record));
        Ok((live, self.targets))
    }

    /// Makes sure that what is mounted at the target is the volume.
    fn is_the_volume(&self, place: &SafePath, mounted: &Mounted) -> Result<(), Error> {
        let record = self.record.as_ref();
        match record.and_then(|record| record.device.as_ref().map(|device| (record, device))) {
            Some((record, device)) if appears_at(record, device, mounted) => Ok(()),
            Some(_) => Err(self.precondition(format!(
                "something else is mounted at {}; unmount it first",
                place.path().display()
            ))),
            None => self.is_its_device(place, mounted),
        }
    }

    /// The same where no record says what the volume looks like: by what the kernel and
    /// the claims tell of the device.
    fn is_its_device(&self, place: &SafePath, mounted: &Mounted) -> Result<(), Error> {
        let (what, dev) = self.what_is_mounted(place, mounted)?;
        let refused = |what: String| {
            Err(self.precondition(format!(
                "{what} is mounted at {}, which is not this volume; unmount it by hand",
                place.path().display()
            )))
        };
        let Some(dev) = dev else {
            return refused(what);
        };
        let find = || self.backends.owner_of(dev);
        let owner = self.progress.step_on_lane("find", find);
        match owner.map_err(|error| Error::device(&self.volume_id, error))? {
            Owner::Volume(id) if id == self.volume_id => Ok(()),
            Owner::Volume(other) => refused(format!("volume {other}, {what},")),
            Owner::Source(source) => {
                let mut others = self.others.iter();
                match others.find(|(_, other)| other.is_same(&source)) {
                    Some((other, _)) => refused(format!("volume {other}, {what},")),
                    None => Ok(()),
                }
            }
            Owner::Nobody => refused(what),
        }
    }

    /// What it is, in words, and which device it is of, if it may be a volume's.
    fn what_is_mounted(
        &self,
        place: &SafePath,
        mounted: &Mounted,
    ) -> Result<(String, Option<Dev>), Error> {
        let failed = || self.looking_at(place);
        if let Some(dev) = mounted.rdev {
            let node = sysfs::node_of(dev).map_err(failed())?;
            return Ok((format!("the block device {}", node.display()), Some(dev)));
        }
        let opened = place.open().map_err(failed())?;
        let entry = table::covering(opened.as_fd()).map_err(failed())?;
        let can_be = entry.fs_type.parse::<FsType>().is_ok();
        let source = Path::new(&entry.source);
        // btrfs shows a number that is no device's.
        let dev = Some(mounted.dev)
            .filter(|dev| dev.major != 0)
            .or_else(|| block::dev_behind(source).ok());
        let what = format!("{} of {}", entry.fs_type, source.display());
        Ok((what, dev.filter(|_| can_be)))
    }

    fn unmount(&self, place: &SafePath) -> Result<(), Error> {
        let unmount = || unmount::unmount(place);
        let done = self.progress.step_on_lane("unbind", unmount);
        let done = done.map_err(|source| Error::Unmount {
            volume: self.volume_id.clone(),
            source,
        })?;
        already(&self.volume_id, "unbind", done);
        Ok(())
    }

    fn looking_at(&self, place: &SafePath) -> impl FnOnce(std::io::Error) -> Error + use<> {
        Error::io(
            &self.volume_id,
            format!("look at {}", place.path().display()),
        )
    }

    fn precondition(&self, what: String) -> Error {
        Error::precondition(&self.volume_id, what)
    }
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
    let (places, target, id) = (
        node.places.clone(),
        target_path.to_owned(),
        volume.id.clone(),
    );
    let unlock = move || match absent_is_none(places.target(&target))? {
        Some(_) => descriptor_lock::unlock(dev, &Unlock::Over(paths))
            .map_err(|error| Error::device(&id, error)),
        None => Ok(Vec::new()),
    };
    let released = node.lane(volume, progress, "unlock", unlock).await?;
    for lock in released {
        // Whoever has it open, udevd for a moment, keeps the target busy with it.
        let gone = || Ok((!lock.is_held()).then_some(()));
        let gone = async {
            node.uevents
                .wait(&sysfs::name_of(lock.device.dev)?, gone)
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
