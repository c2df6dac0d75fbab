//! Where the mount table shows a volume. It tells a volume's mount from any other at the same
//! path, and reading it waits for no device and no server.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use super::{
    Node,
    record::{Phase, Record},
    spec::Use,
};
use crate::{
    fs::FsType,
    kernel::Dev,
    mount::table::{self, MountEntry},
};

/// A volume that this node holds, as the mount table shows it.
#[derive(Clone, Debug)]
pub struct Appearance {
    pub volume_id: String,
    pub staging_path: PathBuf,
    /// Its stage is complete, and it is what is mounted where it is staged, if it is mounted
    /// there at all.
    pub is_staged: bool,
    /// Where it is published, and is what is mounted.
    pub targets: BTreeSet<PathBuf>,
}

impl Record {
    /// Whether the mount is this volume's, by what the mount table shows of it.
    pub(super) fn is_shown_as(&self, entry: &MountEntry) -> bool {
        match (&self.usage, &self.device) {
            (Use::Mount { .. }, Some(device)) => is_superblock_of(entry, device.dev, &device.node),
            (Use::Mount { .. }, None) => {
                self.root_dev == Some(entry.dev) && self.source.is_mounted_as(entry)
            }
            (Use::Block, Some(device)) => is_node_of(entry, &device.node),
            (Use::Block, None) => false,
        }
    }
}

/// Whether a file system on the device is mounted there. That of btrfs has a number of its
/// own, and another driver may have mounted it by another name of the device.
fn is_superblock_of(entry: &MountEntry, dev: Dev, node: &Path) -> bool {
    let by_name = || Path::new(&entry.source) == node && entry.fs_type.parse::<FsType>().is_ok();
    entry.dev == dev || by_name()
}

/// Whether the device's node is bound there. devtmpfs' root is /dev.
pub(super) fn is_node_of(entry: &MountEntry, node: &Path) -> bool {
    entry.fs_type == "devtmpfs" && entry.root.file_name() == node.file_name()
}

impl Node {
    /// Every volume that this node holds, as the mount table shows it.
    pub async fn appearances(self: Arc<Self>) -> io::Result<Vec<Appearance>> {
        let recovered = self.recovered("", Duration::MAX).await;
        recovered.map_err(io::Error::other)?;
        let mounts = self.lanes.run("", "look", table::list).await?;
        // Of several at one path, the last is the topmost.
        let topmost = mounts.iter().map(|entry| (&*entry.mount_point, entry));
        let topmost: HashMap<&Path, &MountEntry> = topmost.collect();
        let volumes: Vec<_> = self.volumes().values().cloned().collect();
        let appearances = volumes.iter().filter_map(|volume| {
            let held = volume.held();
            let held = held.as_ref()?;
            let record = &held.record;
            let appears = |path: &Path| {
                let entry = topmost.get(path);
                entry.is_some_and(|entry| record.is_shown_as(entry))
            };
            let targets = held.targets.keys().filter(|path| appears(path));
            Some(Appearance {
                volume_id: volume.id.clone(),
                staging_path: record.staging_path.clone(),
                is_staged: record.phase == Phase::Staged
                    && (!record.mounts() || appears(&record.mount_point())),
                targets: targets.cloned().collect(),
            })
        });
        Ok(appearances.collect())
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    fn entry(fs_type: &str, dev: Dev, root: &str, source: &str) -> MountEntry {
        MountEntry {
            id: 1,
            parent: 0,
            dev,
            root: root.into(),
            mount_point: "/mnt".into(),
            fs_type: fs_type.to_owned(),
            source: OsString::from(source),
            read_only: false,
            own_read_only: false,
            peer_group: None,
        }
    }

    #[test]
    fn a_mount_is_told_from_another_at_its_path() {
        let node = Path::new("/dev/loop7");
        let dev = Dev { major: 7, minor: 7 };
        let other = Dev {
            major: 0,
            minor: 41,
        };
        let is_superblock =
            |fs_type, of, source| is_superblock_of(&entry(fs_type, of, "/", source), dev, node);
        assert!(is_superblock("ext4", dev, "/dev/loop7"));
        assert!(is_superblock("btrfs", other, "/dev/loop7"));
        assert!(!is_superblock("tmpfs", other, "/dev/loop7"));
        assert!(!is_superblock("ext4", other, "/dev/loop8"));
        let is_node = |fs_type, root| is_node_of(&entry(fs_type, other, root, "none"), node);
        assert!(is_node("devtmpfs", "/loop7"));
        assert!(!is_node("devtmpfs", "/loop8"));
        assert!(!is_node("ext4", "/images/loop7"));
    }
}
