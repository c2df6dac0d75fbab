//! What a volume context says about a Ceph image, and the note that ceph-csi
//! leaves of one beside its mount.
//!
//! Both are ceph-csi's, key for key: see `NodeStageVolume` and
//! `rbdImageMetadataStash` in its `internal/rbd`.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::mounter::{Mounter, Served};
use crate::{
    ceph::{encryption::DEFAULT_KMS, handle::VolumeHandle, rbd::Features},
    device::{
        Behind, Device, Note, SourceError,
        context::Context,
        luks,
        rbd::{Image, MapOptions, Mapped},
    },
    holder::{NbdOptions, devices as nbd},
    kernel::Dev,
};

/// The file beside the mount.
pub const NOTE: &str = "image-meta.json";

/// An image of a Ceph cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CephSource {
    /// The image. An empty namespace is the one that the cluster's configuration
    /// says.
    pub image: Image,
    /// The pool's id, where the handle says it: names may change.
    pub pool_id: Option<i64>,
    /// What the class says of its features; none where it says nothing.
    pub features: Features,
    /// Who maps it.
    #[serde(default)]
    pub mounter: Mounter,
    /// What krbd is told when it maps the image.
    pub map_options: MapOptions,
    /// What ceph-csi tells it when it unmaps the image; kept for the note.
    pub unmap_options: MapOptions,
    /// Who keeps the passphrase, where the image is encrypted.
    pub kms: Option<String>,
}

impl fmt::Display for CephSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "image {}", self.image)
    }
}

impl CephSource {
    /// An image that was found served by rbd-nbd, as [`CephSource::found`].
    pub fn found_served(image: Image, volume_id: &str) -> Self {
        Self {
            mounter: Mounter::RbdNbd(Served {
                cookie: volume_id.to_owned(),
                options: NbdOptions::default(),
            }),
            ..Self::found(image, volume_id)
        }
    }

    /// An image that was found mapped: nobody has said how it should be.
    pub fn found(image: Image, volume_id: &str) -> Self {
        let handle = volume_id.parse().ok();
        let known = handle.as_ref().map(VolumeHandle::cluster_id);
        let cluster_id = match &*image.cluster_id {
            "" => known.unwrap_or_default().to_owned(),
            marked => marked.to_owned(),
        };
        Self {
            image: Image {
                cluster_id,
                ..image
            },
            pool_id: handle.as_ref().and_then(pool_id),
            features: Features::default(),
            mounter: Mounter::Krbd,
            map_options: MapOptions::default(),
            unmap_options: MapOptions::default(),
            kms: None,
        }
    }

    /// Reads `clusterID`, `pool`, `imageName` and all else that ceph-csi has for
    /// the node. A static volume's image is named as its handle is; a migrated
    /// one's names are in the handle.
    pub fn parse(context: Context<'_>, volume_id: &str) -> Result<Self, SourceError> {
        let handle: Option<VolumeHandle> = volume_id.parse().ok();
        let (pool, name) = match &handle {
            Some(VolumeHandle::Migrated(migrated)) => (migrated.pool(), migrated.image()),
            _ if context.switch("staticVolume", false)? => (context.need("pool")?, volume_id),
            _ => (context.need("pool")?, context.need("imageName")?),
        };
        let bad = |key, why: String| Err(SourceError { key, why });
        let options = |key| {
            let given = context.get(key).unwrap_or_default();
            let parsed = MapOptions::parse(given);
            parsed.map_err(|error| SourceError {
                key,
                why: error.to_string(),
            })
        };
        let features = match context.get("imageFeatures").unwrap_or_default().parse() {
            Ok(features) => features,
            Err(error) => return bad("imageFeatures", format!("{error}")),
        };
        Ok(Self {
            image: Image {
                cluster_id: context.need("clusterID")?.to_owned(),
                pool: pool.to_owned(),
                namespace: context.get("radosNamespace").unwrap_or_default().to_owned(),
                name: name.to_owned(),
                snapshot: None,
            },
            pool_id: handle.as_ref().and_then(pool_id),
            features,
            mounter: Mounter::parse(context, volume_id)?,
            map_options: options("mapOptions")?,
            unmap_options: options("unmapOptions")?,
            kms: kms(context)?,
        })
    }

    /// Whether the device is this image's, or what shows it in the clear.
    pub fn is_behind(&self, dev: Dev) -> bool {
        let below = luks::mapping_of(dev).map_or(dev, |mapping| mapping.under);
        match self.mounter.served() {
            Some(served) if nbd::Device::is_behind(below, &served.cookie) => true,
            _ => Mapped::of(below).is_some_and(|mapped| self.is_named(&mapped.image)),
        }
    }

    /// Whether a mapped image has this one's names.
    pub fn is_named(&self, mapped: &Image) -> bool {
        let mut own = self.image.clone();
        if own.namespace.is_empty() {
            own.namespace.clone_from(&mapped.namespace);
        }
        own.is_named_as(mapped)
    }

    /// Whether both are the same image, however mapped.
    pub fn is_same(&self, other: &Self) -> bool {
        let (one, two) = (&self.image.cluster_id, &other.image.cluster_id);
        let same_cluster = one == two || one.is_empty() || two.is_empty();
        same_cluster && self.is_named(&other.image)
    }

    /// The note, as ceph-csi reads it.
    pub fn note(&self, device: &Device) -> Note {
        let under = device.encrypted.as_ref();
        let below = under.map_or(device.dev, |under| under.dev);
        let is_served = matches!(device.behind, Behind::Served(_));
        let node = under.map_or(&device.node, |under| &under.path).to_str();
        let node = node.map(str::to_owned);
        let mapped = Mapped::of(below).map(|mapped| mapped.image);
        let image = mapped.as_ref().unwrap_or(&self.image);
        let stash = Stash {
            version: 3,
            pool: image.pool.clone(),
            // Which the cluster's configuration may say, and the context not.
            rados_namespace: image.namespace.clone(),
            image: image.name.clone(),
            unmap_options: self.unmap_options.to_string(),
            // ceph-csi unmaps by it what rbd-nbd serves.
            access_type: is_served,
            encrypted: self.kms.is_some(),
            device: node.filter(|_| is_served).unwrap_or_default(),
            log_dir: String::new(),
            log_file_strategy: String::new(),
        };
        let text = serde_json::to_vec(&stash).expect("strings and flags are JSON");
        Note { name: NOTE, text }
    }

    /// The image that a note is of.
    pub fn noted(note: &[u8], volume_id: &str) -> serde_json::Result<Self> {
        let stash: Stash = serde_json::from_slice(note)?;
        let image = Image {
            cluster_id: String::new(),
            pool: stash.pool,
            namespace: stash.rados_namespace,
            name: stash.image,
            snapshot: None,
        };
        let found = if stash.access_type {
            Self::found_served(image, volume_id)
        } else {
            Self::found(image, volume_id)
        };
        Ok(Self {
            kms: stash.encrypted.then(|| DEFAULT_KMS.to_owned()),
            // Of use to nobody but ceph-csi.
            unmap_options: MapOptions::parse(&stash.unmap_options).unwrap_or_default(),
            ..found
        })
    }
}

fn pool_id(handle: &VolumeHandle) -> Option<i64> {
    match handle {
        VolumeHandle::Journaled(handle) => Some(handle.pool_id()),
        VolumeHandle::Migrated(_) => None,
    }
}

fn kms(context: Context<'_>) -> Result<Option<String>, SourceError> {
    if !context.switch("encrypted", false)? {
        return Ok(None);
    }
    match context.get("encryptionType") {
        None | Some("block") => {}
        Some(other) => {
            return Err(SourceError {
                key: "encryptionType",
                why: format!("{other:?} is not available; `block` is"),
            });
        }
    }
    let id = context.get("encryptionKMSID").unwrap_or(DEFAULT_KMS);
    Ok(Some(id.to_owned()))
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
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const HANDLE: &str = "0001-0001-c-0000000000000004-36eaa70e-eb63-11ea-8e79-246e96907f74";

    fn parse(volume_id: &str, pairs: &[(&str, &str)]) -> Result<CephSource, SourceError> {
        let own = |&(key, value): &(&str, &str)| (key.to_owned(), value.to_owned());
        let context: HashMap<_, _> = pairs.iter().map(own).collect();
        CephSource::parse(Context(&context), volume_id)
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
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (key, value) in [
            ("clusterID", ""),
            ("pool", ""),
            ("imageName", ""),
            ("staticVolume", "1"),
            ("mounter", "fuse"),
            ("tryOtherMounters", "perhaps"),
            ("mapOptions", "secret=x"),
            ("imageFeatures", "layering,colour"),
            ("encrypted", "perhaps"),
        ] {
            let mut pairs = BASE.to_vec();
            pairs.push((key, value));
            let error = parse(HANDLE, &pairs).unwrap_err();
            assert_eq!(error.key, key);
        }
        let files = [
            &BASE[..],
            &[("encrypted", "true"), ("encryptionType", "file")],
        ]
        .concat();
        assert_eq!(parse(HANDLE, &files).unwrap_err().key, "encryptionType");
    }

    #[test]
    fn who_maps_is_as_ceph_csi_has_it() {
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
        assert_eq!(nbd.served().unwrap().cookie, HANDLE);
        let bad = [("mounter", "rbd-nbd"), ("mapOptions", "nbd:conf=/x")];
        let error = parse(HANDLE, &[&BASE[..], &bad].concat()).unwrap_err();
        assert_eq!(error.key, "mapOptions");
    }

    #[test]
    fn the_note_is_as_ceph_csi_has_it() {
        let more = [("encrypted", "true"), ("unmapOptions", "krbd:force;nbd:x")];
        let source = parse(HANDLE, &[&BASE[..], &more].concat()).unwrap();
        let device = Device {
            dev: Dev { major: 1, minor: 0 },
            node: "/dev/rbd0".into(),
            behind: crate::device::Behind::Image(crate::device::loopdev::FileId { dev: 1, ino: 1 }),
            read_only: false,
            encrypted: None,
        };
        let note = source.note(&device);
        let text = r#"{"Version":3,"pool":"rbd","radosNamespace":"","image":"csi-vol-1","unmapOptions":"force","accessType":false,"encrypted":true,"device":"","logDir":"","logFileStrategy":""}"#;
        assert_eq!(String::from_utf8(note.text.clone()).unwrap(), text);
        let read = CephSource::noted(&note.text, HANDLE).unwrap();
        assert!(read.is_same(&source) && read.pool_id == Some(4));
        assert_eq!(read.image.cluster_id, "c");

        let served = Device {
            node: "/dev/nbd7".into(),
            behind: Behind::Served(HANDLE.to_owned()),
            ..device
        };
        let note = source.note(&served);
        let text = String::from_utf8(note.text.clone()).unwrap();
        assert!(
            text.contains(r#""accessType":true"#) && text.contains("/dev/nbd7"),
            "{text}"
        );
        let read = CephSource::noted(&note.text, HANDLE).unwrap();
        assert!(matches!(read.mounter, Mounter::RbdNbd(_)));
    }

    proptest! {
        #[test]
        fn any_note_is_read_or_refused(text in ".{0,80}|\\{\"Version\":3,\"pool\":.{0,9},\"image\":.{0,9}\\}") {
            let _ = CephSource::noted(text.as_bytes(), HANDLE);
        }
    }
}
