//! What an agent would recover at its start of the volumes that another driver has staged on
//! this node. It looks as [`super::reconcile`] does, without an agent and its records, and
//! only reads.

use std::{
    io,
    path::{Path, PathBuf},
};

use super::{
    error::Cause,
    places::Places,
    reconcile::{StagedAt, has_stage_file, is_of, is_unknown, mounted_at, unknown},
};
use crate::{
    device::{ForeignDevice, Owner},
    error_chain,
    mount::{
        path::Roots,
        table::{self, MountEntry},
    },
};

/// A volume that is staged with another driver's stage file beside its mount.
#[derive(Debug)]
pub struct StagedVolume {
    pub volume_id: String,
    pub staging_path: PathBuf,
    /// Its device, or why the agent would not recover the volume.
    pub device: Result<ForeignDevice, String>,
}

/// All of them below these directories. Blocks as long as their disks do.
pub fn staged(roots: Roots) -> io::Result<Vec<StagedVolume>> {
    Ok(among(&table::list()?, &Places::new(roots)))
}

fn among(mounts: &[MountEntry], places: &Places) -> Vec<StagedVolume> {
    let mut found: Vec<_> = mounts
        .iter()
        .filter_map(|entry| unknown(entry, places))
        .collect();
    found.sort();
    found.dedup();
    let one = |(volume_id, staging_path): (String, PathBuf)| {
        let found = match has_stage_file(places, &staging_path) {
            Ok(false) => return None,
            Ok(true) => device(places, &volume_id, &staging_path, mounts),
            Err(cause) => Err(cause),
        };
        Some(StagedVolume {
            device: found.map_err(|cause| error_chain(&cause)),
            volume_id,
            staging_path,
        })
    };
    found.into_iter().filter_map(one).collect()
}

fn device(
    places: &Places,
    volume_id: &str,
    staging_path: &Path,
    mounts: &[MountEntry],
) -> Result<ForeignDevice, Cause> {
    let at = mounted_at(places, volume_id, staging_path)?;
    let staged = StagedAt::look(places, staging_path, at, mounts)?;
    let Some(node) = &staged.behind else {
        return Err(is_unknown(&staged.path));
    };
    let device = ForeignDevice::behind(node, volume_id, staged.stage_file.as_deref())?;
    let device = device.ok_or_else(|| is_unknown(&staged.path))?;
    match &device.owner {
        Owner::Volume(other) if other != volume_id => Err(is_of(other, staging_path)),
        _ => Ok(device),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{device::STAGE_FILE, kernel::Dev};

    fn entry(mount_point: PathBuf, source: &str) -> MountEntry {
        MountEntry {
            id: 1,
            parent: 1,
            dev: Dev { major: 0, minor: 1 },
            root: "/".into(),
            mount_point,
            fs_type: "ext4".to_owned(),
            source: source.into(),
            read_only: false,
            own_read_only: false,
            peer_group: None,
        }
    }

    #[test]
    fn mounts_beside_a_stage_file_are_looked_at() {
        let kubelet = tempfile::tempdir().unwrap();
        let plugin = kubelet
            .path()
            .join("plugins/kubernetes.io/csi/rbd.csi.ceph.com");
        let of_ceph_csi = plugin.join("one/globalmount");
        let of_another = plugin.join("two/globalmount");
        for (staging, name) in [(&of_ceph_csi, "handle"), (&of_another, "other")] {
            fs::create_dir_all(staging.join(name)).unwrap();
        }
        // As ceph-csi v3.13 writes it.
        let text = r#"{"Version":3,"pool":"replicapool","radosNamespace":"","image":"csi-vol-7f6f","unmapOptions":"","accessType":false,"encrypted":false,"device":"/dev/rbd0","logDir":"","logFileStrategy":""}"#;
        fs::write(of_ceph_csi.join(STAGE_FILE), text).unwrap();
        let mounts = [
            entry(of_ceph_csi.join("handle"), "/dev/no-such-device"),
            entry(of_another.join("other"), "/dev/no-such-device"),
            entry(kubelet.path().join("pods/p/volumes"), "tmpfs"),
            entry("/elsewhere/handle".into(), "/dev/no-such-device"),
        ];
        let places = Places::new(Roots::new(&[kubelet.path().to_owned()]).unwrap());
        let found = among(&mounts, &places);
        let [volume] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(volume.volume_id, "handle");
        assert_eq!(volume.staging_path, of_ceph_csi);
        // The table names a mount that is not there: the path decides.
        let why = volume.device.as_ref().unwrap_err();
        assert!(why.contains("none of this node's volumes"), "{why}");
        assert!(of_ceph_csi.join(STAGE_FILE).exists());

        // A file that cannot be read does not hide the volume.
        fs::create_dir(of_another.join(STAGE_FILE)).unwrap();
        let found = among(&mounts, &places);
        let unread = found.iter().find(|volume| volume.volume_id == "other");
        let why = unread.expect("it is shown").device.as_ref().unwrap_err();
        assert!(why.contains(STAGE_FILE), "{why}");
    }
}
