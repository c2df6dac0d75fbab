//! The volume context of a Ceph image: key for key that of ceph-csi, see
//! `NodeStageVolume` in its `internal/rbd`.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::mounter::{Mounter, RbdNbdArgs};
use crate::{
    ceph::{
        client::rbd::Features,
        csi_format::{
            handle::CephVolumeHandle,
            journal::JournalKind,
            map_options::{KRBD, MapOptions, OptionError, part_for},
        },
        kms::DEFAULT_KMS,
        krbd::ImageSpec,
    },
    device::{SourceError, context::VolumeContext, luks},
    fs::fscrypt::EncryptedDirectory,
    kernel::{Dev, nbd::identifier_of},
    supervisor::NbdOptions,
};

/// An image of a Ceph cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CephSource {
    /// The image. If the context names no namespace, the cluster's configuration may
    /// ([`CephImages::canonical`]).
    ///
    /// [`CephImages::canonical`]: super::CephImages::canonical
    pub image: ImageSpec,
    /// The pool's id, if the handle has it: names may change.
    pub pool_id: Option<i64>,
    /// The features that its class names, if it does.
    pub features: Features,
    /// The driver that maps it.
    #[serde(default)]
    pub mounter: Mounter,
    /// The map options of krbd.
    pub map_options: MapOptions,
    /// ceph-csi's unmap options for both drivers; kept for the stage file.
    #[serde(default)]
    pub unmapping: String,
    /// The KMS of the passphrase, if the image or its files are encrypted.
    pub kms: Option<String>,
    /// Its files are encrypted, not its block device.
    #[serde(default)]
    pub encrypts_files: bool,
    /// Its encryption has options that this driver does not support.
    #[serde(default)]
    pub is_tuned: bool,
}

/// ceph-csi's directory for files that are encrypted.
pub const ENCRYPTED_DIRECTORY: EncryptedDirectory = EncryptedDirectory {
    name: "ceph-csi-encrypted",
    protector: "ceph-csi",
};

/// ceph-csi's optional arguments of `luksFormat`. Opening an image that it formatted needs
/// only the header.
pub const TUNING: [&str; 3] = [
    "encryptionCipher",
    "encryptionKeySize",
    "encryptionSectorSize",
];

/// The keys that are read here, and those of the controller that ceph-csi passes on.
const KNOWN: [&str; 27] = [
    "backend",
    "cephLogDir",
    "cephLogFileEnabled",
    "cephLogStrategy",
    "clusterID",
    "dataPool",
    "encrypted",
    "encryptionCipher",
    "encryptionKMSID",
    "encryptionKeySize",
    "encryptionSectorSize",
    "encryptionType",
    "imageFeatures",
    "imageFormat",
    "imageName",
    "integrityMode",
    "journalPool",
    "mapOptions",
    "migration",
    "mounter",
    "pool",
    "radosNamespace",
    "staticVolume",
    "thickProvision",
    "tryOtherMounters",
    "unmapOptions",
    "volumeNamePrefix",
];

impl fmt::Display for CephSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "image {}", self.image)
    }
}

impl CephSource {
    /// An image that rbd-nbd was found to serve, as [`CephSource::found`].
    pub fn found_nbd_backed(image: ImageSpec, volume_id: &str) -> Self {
        Self {
            mounter: Mounter::RbdNbd(RbdNbdArgs {
                cookie: volume_id.to_owned(),
                options: NbdOptions::default(),
            }),
            ..Self::found(image, volume_id)
        }
    }

    /// An image that was found mapped: how it was requested is unknown.
    pub fn found(image: ImageSpec, volume_id: &str) -> Self {
        let handle = volume_id.parse().ok();
        let known = handle.as_ref().map(CephVolumeHandle::cluster_id);
        let cluster_id = match &*image.cluster_id {
            "" => known.unwrap_or_default().to_owned(),
            marked => marked.to_owned(),
        };
        Self {
            image: ImageSpec {
                cluster_id,
                ..image
            },
            pool_id: handle.as_ref().and_then(pool_id),
            features: Features::default(),
            mounter: Mounter::Krbd,
            map_options: MapOptions::default(),
            unmapping: String::new(),
            kms: None,
            encrypts_files: false,
            is_tuned: false,
        }
    }

    /// Reads `clusterID`, `pool`, `imageName` and the other keys of ceph-csi for the node. A
    /// static volume's image has the name of its handle; a migrated one's names are in the
    /// handle as well, and the context's count. Where there is no `imageName`, as in PVs of ceph-csi 2.x, the image has the
    /// name that its journal gives to the handle: `volumeNamePrefix` and the uuid.
    pub fn parse(context: VolumeContext<'_>, volume_id: &str) -> Result<Self, SourceError> {
        // A class of ceph-csi has keys for the controller, and later releases have keys
        // that this driver does not know; all of them reach the node.
        let unknown = context.unlisted(&KNOWN);
        if !unknown.is_empty() {
            tracing::debug!(
                volume_id,
                ?unknown,
                "ignoring unknown keys of the volume context"
            );
        }
        let handle: Option<CephVolumeHandle> = volume_id.parse().ok();
        let (pool, name) = match &handle {
            // An image that was not provisioned has another name than its handle.
            Some(CephVolumeHandle::Migrated(migrated)) => (
                context.get("pool").unwrap_or(migrated.pool()),
                context
                    .get("imageName")
                    .unwrap_or(migrated.image())
                    .to_owned(),
            ),
            _ if context.switch("staticVolume", false)? => {
                (context.need("pool")?, volume_id.to_owned())
            }
            _ => (context.need("pool")?, image_name(context, handle.as_ref())?),
        };
        let bad = |key: &'static str, why: String| {
            let key = key.into();
            Err(SourceError { key, why })
        };
        let bad_option = |key: &'static str| {
            move |error: OptionError| SourceError {
                key: key.into(),
                why: error.to_string(),
            }
        };
        let options = MapOptions::parse(context.get("mapOptions").unwrap_or_default());
        let unmapping = context.get("unmapOptions").unwrap_or_default();
        let _ = part_for(KRBD, unmapping).map_err(bad_option("unmapOptions"))?;
        let features = match context.get("imageFeatures").unwrap_or_default().parse() {
            Ok(features) => features,
            Err(error) => return bad("imageFeatures", format!("{error}")),
        };
        Ok(Self {
            image: ImageSpec {
                cluster_id: context.need("clusterID")?.to_owned(),
                pool: pool.to_owned(),
                namespace: context.get("radosNamespace").unwrap_or_default().to_owned(),
                name,
                snapshot: None,
            },
            pool_id: handle.as_ref().and_then(pool_id),
            features,
            mounter: Mounter::parse(context, volume_id)?,
            map_options: options.map_err(bad_option("mapOptions"))?,
            unmapping: unmapping.to_owned(),
            is_tuned: TUNING.iter().any(|key| context.get(key).is_some()),
            kms: kms(context)?,
            encrypts_files: Self::asks_for_encrypted_files(context),
        })
    }

    /// Whether the context is that of an image whose files are encrypted.
    pub fn asks_for_encrypted_files(context: VolumeContext<'_>) -> bool {
        context.switch("encrypted", false).unwrap_or(false)
            && context.get("encryptionType") == Some(FILES)
    }

    /// The KMS of the passphrase of its block device, if that is encrypted.
    pub fn luks_kms(&self) -> Option<&str> {
        self.kms.as_deref().filter(|_| !self.encrypts_files)
    }

    /// The KMS of the secret of its files, if they are encrypted.
    pub fn files_kms(&self) -> Option<&str> {
        self.kms.as_deref().filter(|_| self.encrypts_files)
    }

    /// Whether the device is this image's, or its decrypted mapping.
    pub fn is_behind(&self, dev: Dev) -> bool {
        let lower = luks::mapping_of(dev).map_or(dev, |mapping| mapping.under);
        match self.mounter.rbd_nbd() {
            Some(served) if identifier_of(lower).as_ref() == Some(&served.cookie) => true,
            _ => ImageSpec::mapped_as(lower).is_some_and(|image| self.image.is_named_as(&image)),
        }
    }

    /// Whether both are the same image, however mapped.
    pub fn is_same(&self, other: &Self) -> bool {
        let (one, two) = (&self.image.cluster_id, &other.image.cluster_id);
        let same_cluster = one == two || one.is_empty() || two.is_empty();
        same_cluster && self.image.is_named_as(&other.image)
    }
}

fn pool_id(handle: &CephVolumeHandle) -> Option<i64> {
    match handle {
        CephVolumeHandle::Journaled(handle) => Some(handle.pool_id()),
        CephVolumeHandle::Migrated(_) => None,
    }
}

fn image_name(
    context: VolumeContext<'_>,
    handle: Option<&CephVolumeHandle>,
) -> Result<String, SourceError> {
    match (context.get("imageName"), handle) {
        (None, Some(CephVolumeHandle::Journaled(handle))) => {
            let prefix = context.get("volumeNamePrefix");
            Ok(JournalKind::Volume.image(prefix, handle.uuid()))
        }
        _ => context.need("imageName").map(str::to_owned),
    }
}

/// The `encryptionType` of encrypted files.
const FILES: &str = "file";

fn kms(context: VolumeContext<'_>) -> Result<Option<String>, SourceError> {
    if !context.switch("encrypted", false)? {
        return Ok(None);
    }
    match context.get("encryptionType") {
        None | Some("block" | FILES) => {}
        Some(other) => {
            return Err(SourceError {
                key: "encryptionType".into(),
                why: format!("{other:?} is not available; `block` and `{FILES}` are"),
            });
        }
    }
    if context.get("integrityMode").is_some() {
        return Err(SourceError {
            key: "integrityMode".into(),
            why: "is not available: this driver does not support dm-integrity below LUKS"
                .to_owned(),
        });
    }
    let id = context.get("encryptionKMSID").unwrap_or(DEFAULT_KMS);
    Ok(Some(id.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const HANDLE: &str = "0001-0001-c-0000000000000004-36eaa70e-eb63-11ea-8e79-246e96907f74";

    fn parse(volume_id: &str, pairs: &[(&str, &str)]) -> Result<CephSource, SourceError> {
        let own = |&(key, value): &(&str, &str)| (key.to_owned(), value.to_owned());
        let context: HashMap<_, _> = pairs.iter().map(own).collect();
        CephSource::parse(VolumeContext(&context), volume_id)
    }

    const BASE: [(&str, &str); 3] = [
        ("clusterID", "c"),
        ("pool", "rbd"),
        ("imageName", "csi-vol-1"),
    ];

    #[test]
    fn an_image_is_named_by_its_context_its_handle_or_both() {
        let source = parse(HANDLE, &BASE).unwrap();
        assert_eq!(source.to_string(), "image rbd/csi-vol-1 of cluster c");
        assert_eq!((source.pool_id, &source.kms), (Some(4), &None));
        let fixed = [
            ("clusterID", "c"),
            ("pool", "rbd"),
            ("staticVolume", "true"),
        ];
        let source = parse("my-image", &fixed).unwrap();
        assert_eq!(
            (&*source.image.name, source.pool_id),
            ("my-image", None),
            "the handle is the name"
        );
        let migrated = "mig_mons-b7_image-e0_706f6f6c";
        let source = parse(migrated, &[("clusterID", "b7")]).unwrap();
        assert_eq!(
            source.to_string(),
            "image pool/kubernetes-dynamic-pvc-e0 of cluster b7"
        );
        // As Kubernetes translates the in-tree volume of an image of any name.
        let context = [
            ("clusterID", "b7"),
            ("pool", "other"),
            ("imageName", "my-image"),
            ("staticVolume", "true"),
            ("migration", "true"),
        ];
        let source = parse(migrated, &context).unwrap();
        assert_eq!(source.to_string(), "image other/my-image of cluster b7");
    }

    #[test]
    fn an_image_that_ceph_csi_2_made_has_its_name_by_the_handle() {
        let name = |volume_id, pairs: &[(&str, &str)]| {
            let source = parse(volume_id, &[&BASE[..2], pairs].concat());
            source.map(|source| source.image.name)
        };
        let uuid = "36eaa70e-eb63-11ea-8e79-246e96907f74";
        assert_eq!(name(HANDLE, &[]).unwrap(), format!("csi-vol-{uuid}"));
        let prefix = ("volumeNamePrefix", "team-");
        assert_eq!(name(HANDLE, &[prefix]).unwrap(), format!("team-{uuid}"));
        let named = [prefix, ("imageName", "csi-vol-1")];
        assert_eq!(name(HANDLE, &named).unwrap(), "csi-vol-1");
        assert_eq!(name("my-image", &[]).unwrap_err().key, "imageName");
    }

    #[test]
    fn an_invalid_attribute_is_named() {
        for (key, value) in [
            ("clusterID", ""),
            ("pool", ""),
            ("staticVolume", "2"),
            ("mounter", "fuse"),
            ("tryOtherMounters", "perhaps"),
            ("mapOptions", "secret=x"),
            ("unmapOptions", "fuse:force"),
            ("imageFeatures", "layering,colour"),
            ("encrypted", "perhaps"),
        ] {
            let mut pairs = BASE.to_vec();
            pairs.push((key, value));
            let error = parse(HANDLE, &pairs).unwrap_err();
            assert_eq!(error.key, key);
        }
        let with = |key, value| {
            let encrypted = [("encrypted", "true"), (key, value)];
            parse(HANDLE, &[&BASE[..], &encrypted].concat())
        };
        let encrypted = |key| with(key, "x");
        assert_eq!(
            encrypted("encryptionType").unwrap_err().key,
            "encryptionType"
        );
        let (files, block) = (
            with("encryptionType", "file"),
            with("encryptionType", "block"),
        );
        let kms = |source: &CephSource| {
            let own = |id: Option<&str>| id.map(str::to_owned);
            (own(source.luks_kms()), own(source.files_kms()))
        };
        assert_eq!(kms(&files.unwrap()), (None, Some("default".to_owned())));
        assert_eq!(kms(&block.unwrap()), (Some("default".to_owned()), None));
        assert_eq!(encrypted("integrityMode").unwrap_err().key, "integrityMode");
        assert!(encrypted("encryptionCipher").unwrap().is_tuned);
    }

    #[test]
    fn the_mounter_is_chosen_as_by_ceph_csi() {
        let mounter = |pairs: &[(&str, &str)]| {
            let source = parse(HANDLE, &[&BASE[..], pairs].concat()).unwrap();
            let json = serde_json::to_string(&source).unwrap();
            assert_eq!(serde_json::from_str::<CephSource>(&json).unwrap(), source);
            source.mounter
        };
        assert_eq!(mounter(&[]), Mounter::Krbd);
        let either = mounter(&[("mounter", "rbd"), ("tryOtherMounters", "true")]);
        assert!(matches!(either, Mounter::Either(_)), "{either:?}");
        let options = ("mapOptions", "krbd:notrim;nbd:io-timeout=7");
        let nbd = mounter(&[("mounter", "rbd-nbd"), options]);
        assert_eq!(nbd.rbd_nbd().unwrap().cookie, HANDLE);
        let bad = [("mounter", "rbd-nbd"), ("mapOptions", "nbd:conf=/x")];
        let error = parse(HANDLE, &[&BASE[..], &bad].concat()).unwrap_err();
        assert_eq!(error.key, "mapOptions");
    }
}
