//! The stage file, which ceph-csi writes beside an image's mount and reads at unstage:
//! `rbdImageMetadataStash` in its `internal/rbd`.

use serde::{Deserialize, Serialize};

use super::CephSource;
use crate::{
    ceph::{
        csi_format::map_options::{KRBD, NBD, part_for},
        kms::DEFAULT_KMS,
        krbd::ImageSpec,
    },
    device::{Backing, Device, StageFile},
};

/// The file beside the mount.
pub const STAGE_FILE: &str = "image-meta.json";

impl CephSource {
    /// The stage file, as ceph-csi reads it.
    pub fn stage_file(&self, device: &Device) -> StageFile {
        let under = device.encrypted.as_ref();
        let lower = under.map_or(device.dev, |under| under.dev);
        let is_nbd_backed = matches!(device.backing, Backing::RbdNbd(_));
        let mounter = if is_nbd_backed { NBD } else { KRBD };
        let node = under.map_or(&device.node, |under| &under.node).to_str();
        let node = node.map(str::to_owned);
        let mapped = ImageSpec::mapped_as(lower);
        let image = mapped.as_ref().unwrap_or(&self.image);
        let stash = Stash {
            version: 3,
            pool: image.pool.clone(),
            // The cluster's configuration may name it instead of the context.
            rados_namespace: image.namespace.clone(),
            image: image.name.clone(),
            unmap_options: part_for(mounter, &self.unmapping)
                .unwrap_or_default()
                .to_owned(),
            // ceph-csi unmaps a device of rbd-nbd by it.
            access_type: is_nbd_backed,
            encrypted: self.luks_kms().is_some(),
            device: node.filter(|_| is_nbd_backed).unwrap_or_default(),
            log_dir: String::new(),
            log_file_strategy: String::new(),
        };
        let text = serde_json::to_vec(&stash).expect("strings and flags are JSON");
        StageFile {
            name: STAGE_FILE,
            text,
        }
    }

    /// The image that a stage file describes.
    pub fn from_stage_file(text: &[u8], volume_id: &str) -> serde_json::Result<Self> {
        let stash: Stash = serde_json::from_slice(text)?;
        let image = ImageSpec {
            cluster_id: String::new(),
            pool: stash.pool,
            namespace: stash.rados_namespace,
            name: stash.image,
            snapshot: None,
        };
        let found = if stash.access_type {
            Self::found_nbd_backed(image, volume_id)
        } else {
            Self::found(image, volume_id)
        };
        Ok(Self {
            kms: stash.encrypted.then(|| DEFAULT_KMS.to_owned()),
            ..found
        })
    }
}

/// `rbdImageMetadataStash`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Stash {
    #[serde(rename = "Version")]
    version: u32,
    pool: String,
    #[serde(default)]
    rados_namespace: String,
    image: String,
    #[serde(default)]
    unmap_options: String,
    /// By rbd-nbd.
    #[serde(default)]
    access_type: bool,
    #[serde(default)]
    encrypted: bool,
    #[serde(default)]
    device: String,
    #[serde(default)]
    log_dir: String,
    #[serde(default)]
    log_file_strategy: String,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        device::{ceph::mounter::Mounter, context::VolumeContext},
        kernel::Dev,
    };

    const HANDLE: &str = "0001-0001-c-0000000000000004-36eaa70e-eb63-11ea-8e79-246e96907f74";

    #[test]
    fn the_stage_file_is_that_of_ceph_csi() {
        let context = [
            ("clusterID", "c"),
            ("pool", "rbd"),
            ("imageName", "csi-vol-1"),
            ("encrypted", "true"),
            ("unmapOptions", "krbd:force;nbd:force,x"),
        ];
        let context = context.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let source = CephSource::parse(VolumeContext(&context.into()), HANDLE).unwrap();
        let device = Device {
            dev: Dev { major: 1, minor: 0 },
            node: "/dev/rbd0".into(),
            backing: crate::device::Backing::Image(crate::device::loopdev::FileId {
                dev: 1,
                ino: 1,
            }),
            read_only: false,
            diskseq: None,
            encrypted: None,
        };
        let file = source.stage_file(&device);
        let text = r#"{"Version":3,"pool":"rbd","radosNamespace":"","image":"csi-vol-1","unmapOptions":"force","accessType":false,"encrypted":true,"device":"","logDir":"","logFileStrategy":""}"#;
        assert_eq!(String::from_utf8(file.text.clone()).unwrap(), text);
        let read = CephSource::from_stage_file(&file.text, HANDLE).unwrap();
        assert!(read.is_same(&source) && read.pool_id == Some(4));
        assert_eq!(read.image.cluster_id, "c");

        let served = Device {
            node: "/dev/nbd7".into(),
            backing: Backing::RbdNbd(HANDLE.to_owned()),
            ..device
        };
        let file = source.stage_file(&served);
        let text = String::from_utf8(file.text.clone()).unwrap();
        assert!(
            text.contains(r#""accessType":true"#) && text.contains("/dev/nbd7"),
            "{text}"
        );
        assert!(text.contains(r#""unmapOptions":"force,x""#), "{text}");
        let read = CephSource::from_stage_file(&file.text, HANDLE).unwrap();
        assert!(matches!(read.mounter, Mounter::RbdNbd(_)));
    }

    proptest! {
        #[test]
        fn any_stage_file_is_read_or_refused(text in ".{0,80}|\\{\"Version\":3,\"pool\":.{0,9},\"image\":.{0,9}\\}") {
            let _ = CephSource::from_stage_file(text.as_bytes(), HANDLE);
        }
    }
}
