//! Parses a volume context into the volume's source.

use std::{collections::HashMap, fmt, path::Path};

use serde::{Deserialize, Serialize};

use super::{
    Backing, Device,
    ceph::{CephSource, ENCRYPTED_DIRECTORY, STAGE_FILE},
    context::{SourceError, VolumeContext},
    exports::ExportSource,
    images::ImageSource,
    nfs::{INLINE_KEYS, NFS, NfsSource},
};
use crate::{
    fs::fscrypt::EncryptedDirectory,
    kernel::Dev,
    mount::{
        Mounted, attach::MountError, options::MountOptions, path::SafePath, table::MountEntry,
    },
    nbd::Export,
};

/// A volume's source, as the volume context names it. Two sources are equal if they name
/// the same data, attached in the same way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "backend", rename_all = "lowercase")]
pub enum Source {
    /// An image file in a pool, attached as a loop device.
    Loop(ImageSource),
    /// An export of an NBD server, attached by the kernel's NBD driver.
    Nbd(ExportSource),
    /// An image of a Ceph cluster, attached by the kernel's RBD driver.
    Rbd(CephSource),
    /// A directory of an NFS server, mounted by the kernel's client.
    Nfs(NfsSource),
}

/// A file beside a volume's mount by which any driver can unstage the volume without a
/// record of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageFile {
    pub name: &'static str,
    /// Its content.
    pub text: Vec<u8>,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loop(image) => image.fmt(f),
            Self::Nbd(export) => export.fmt(f),
            Self::Rbd(image) => image.fmt(f),
            Self::Nfs(directory) => directory.fmt(f),
        }
    }
}

impl Source {
    /// Reads the key `backend`, and the keys of that backend:
    /// [`ImageSource::parse`], [`ExportSource::parse`], [`CephSource::parse`],
    /// [`NfsSource::parse`].
    /// ceph-csi's volumes have a `clusterID` and no such key, csi-driver-nfs' a `server`
    /// and a `share`.
    pub fn parse(context: &HashMap<String, String>, volume_id: &str) -> Result<Self, SourceError> {
        let context = VolumeContext(context);
        let is_ceph = context.get("clusterID").is_some();
        match context.get("backend") {
            Some("loop") => ImageSource::parse(context).map(Self::Loop),
            Some("nbd") => ExportSource::parse(context).map(Self::Nbd),
            Some("rbd") => CephSource::parse(context, volume_id).map(Self::Rbd),
            None if is_ceph => CephSource::parse(context, volume_id).map(Self::Rbd),
            _ if NfsSource::is_named_by(context) => NfsSource::parse(context).map(Self::Nfs),
            None => Err(SourceError {
                key: "backend".into(),
                why: "is required, or clusterID, or server and share".to_owned(),
            }),
            Some(other) => Err(SourceError {
                key: "backend".into(),
                why: format!("{other:?} is unknown; this node has: loop, nbd, nfs, rbd"),
            }),
        }
    }

    /// An image of a pool, to be attached by the defaults.
    #[cfg(test)]
    pub fn image(pool: &str, image: &str) -> Self {
        Self::Loop(ImageSource::new(pool, image))
    }

    /// An export, to be attached by the defaults.
    pub fn export(export: Export) -> Self {
        Self::Nbd(ExportSource::new(export))
    }

    /// Whether the kernel shows this source behind the device, whose number may have gone
    /// to another image. Never waits for the device.
    pub fn is_behind(&self, dev: Dev) -> bool {
        match self {
            Self::Loop(image) => image.is_behind(dev),
            Self::Nbd(export) => export.is_behind(dev),
            Self::Rbd(image) => image.is_behind(dev),
            Self::Nfs(_) => false,
        }
    }

    /// Whether this source is behind the device, and it is still the device that was
    /// attached: its number has gone neither to another source nor to another image of
    /// the same name. Never waits for the device.
    pub fn is_still(&self, device: &Device) -> bool {
        let is_behind = match (self, &device.backing) {
            // `still_matches` asks the kernel.
            (Self::Nbd(its), Backing::Export(export)) => its.export == *export,
            _ => self.is_behind(device.dev),
        };
        is_behind && device.still_matches()
    }

    /// Its failure domain, shared with other volumes: a pool, a server, a cluster.
    pub fn domain(&self) -> String {
        match self {
            Self::Loop(image) => format!("pool {}", image.pool),
            Self::Nbd(export) => format!("server {}", export.export.server()),
            Self::Rbd(image) => format!("cluster {}", image.image.cluster_id),
            Self::Nfs(directory) => format!("server {}", directory.server()),
        }
    }

    /// Whether both name the same data, however attached.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Loop(one), Self::Loop(other)) => one.is_same(other),
            (Self::Nbd(one), Self::Nbd(other)) => one.is_same(other),
            (Self::Rbd(one), Self::Rbd(other)) => one.is_same(other),
            (Self::Nfs(one), Self::Nfs(other)) => one.is_same(other),
            _ => false,
        }
    }

    /// Whether it is staged below the staging path, under the volume's handle,
    /// raw ones too, beside a [`StageFile`]: as ceph-csi does it.
    pub fn is_staged_below(&self) -> bool {
        match self {
            Self::Loop(_) | Self::Nbd(_) | Self::Nfs(_) => false,
            Self::Rbd(_) => true,
        }
    }

    /// The stage file by which another driver can unstage the volume.
    pub fn stage_file(&self, device: &Device) -> Option<StageFile> {
        match self {
            Self::Loop(_) | Self::Nbd(_) | Self::Nfs(_) => None,
            Self::Rbd(image) => Some(image.stage_file(device)),
        }
    }

    /// The name of the stage file beside its mount, if it has one.
    pub fn stage_file_name(&self) -> Option<&'static str> {
        match self {
            Self::Loop(_) | Self::Nbd(_) | Self::Nfs(_) => None,
            Self::Rbd(_) => Some(STAGE_FILE),
        }
    }

    /// Whether it, or its files, are encrypted.
    pub fn is_encrypted(&self) -> bool {
        matches!(self, Self::Rbd(image) if image.kms.is_some())
    }

    /// The directory of its files, if they are encrypted.
    pub fn encrypted_directory(&self) -> Option<EncryptedDirectory> {
        matches!(self, Self::Rbd(image) if image.encrypts_files).then_some(ENCRYPTED_DIRECTORY)
    }

    /// The same by a volume context: what is known of a volume that was found staged.
    pub fn encrypted_directory_of(context: &HashMap<String, String>) -> Option<EncryptedDirectory> {
        let context = VolumeContext(context);
        CephSource::asks_for_encrypted_files(context).then_some(ENCRYPTED_DIRECTORY)
    }

    /// Whether a mount of this directory of its file system may be a target. A volume that was
    /// found staged may have been published in the clear before it was known to encrypt files.
    pub fn may_show(&self, root: &Path) -> bool {
        let encrypted = || Path::new("/").join(ENCRYPTED_DIRECTORY.name);
        root == Path::new("/") || matches!(self, Self::Rbd(_)) && root == encrypted()
    }

    /// [`Source::has_device`], by a volume context.
    pub fn has_device_by(context: &HashMap<String, String>) -> bool {
        !NfsSource::is_named_by(VolumeContext(context))
    }

    /// The key that lacks of those by which a pod names a directory of a server, if it has set
    /// another one.
    pub fn missing_remote_key(context: &HashMap<String, String>) -> Option<&'static str> {
        NfsSource::missing_key(VolumeContext(context))
    }

    /// The backend's name, as metrics and listings show it.
    pub fn backend(&self) -> &'static str {
        match self {
            Self::Loop(_) => "loop",
            Self::Nbd(_) => "nbd",
            Self::Rbd(_) => "rbd",
            Self::Nfs(_) => NFS,
        }
    }

    /// Whether its data is behind a block device. Else a server has the file system, and
    /// any number of volumes may be the same directory of it.
    pub fn has_device(&self) -> bool {
        !matches!(self, Self::Nfs(_))
    }

    /// The file system of a source without a block device, if the context names one.
    pub fn remote_file_system(context: &HashMap<String, String>) -> Option<&'static str> {
        NfsSource::is_named_by(VolumeContext(context)).then_some(NFS)
    }

    /// What a pod's author may set, in any case, for an inline volume without a block device.
    pub const INLINE_REMOTE_KEYS: [&str; 3] = INLINE_KEYS;

    /// The mount options in the context of a source without a block device.
    pub fn remote_options(context: &HashMap<String, String>) -> Result<MountOptions, SourceError> {
        NfsSource::mount_options(VolumeContext(context))
    }

    /// Mounts a source without a block device. Waits for its server.
    pub fn mount(
        &self,
        options: &MountOptions,
        read_only: bool,
        at: &SafePath,
    ) -> Result<Mounted, MountError> {
        let Self::Nfs(directory) = self else {
            unreachable!("{self} is mounted by its device");
        };
        directory.mount(options, read_only, at)
    }

    /// Whether the mount is one of this source, which has no block device.
    pub fn is_mounted_as(&self, entry: &MountEntry) -> bool {
        matches!(self, Self::Nfs(directory) if directory.is_mounted_as(entry))
    }

    /// The permission bits to set on the mounted directory, if any.
    pub fn root_mode(&self) -> Option<u32> {
        match self {
            Self::Nfs(directory) => directory.mode,
            Self::Loop(_) | Self::Nbd(_) | Self::Rbd(_) => None,
        }
    }
}
#[cfg(test)]
mod tests {
    use super::*;

    fn context(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    #[test]
    fn an_encrypted_directory_is_what_targets_show() {
        let [whole, encrypted] = ["/", "/ceph-csi-encrypted"].map(Path::new);
        let of = |pairs: &[(&str, &str)]| {
            let known = [("clusterID", "c"), ("pool", "p"), ("imageName", "i")];
            Source::parse(&context(&[&known, pairs].concat()), "v").unwrap()
        };
        let clear = of(&[]);
        assert!(clear.may_show(whole) && clear.may_show(encrypted));
        let files = of(&[("encrypted", "true"), ("encryptionType", "file")]);
        assert!(files.may_show(encrypted) && files.may_show(whole));
        let image = Source::image("p", "i.img");
        assert!(image.may_show(whole) && !image.may_show(encrypted));
        assert!(!files.may_show(Path::new("/ceph-csi-encrypted/sub")));
    }

    #[test]
    fn a_loop_source_is_a_pool_and_an_image() {
        let base = [("backend", "loop"), ("pool", "p"), ("image", "i.img")];
        let parsed = Source::parse(&context(&base), "v").unwrap();
        assert_eq!(parsed, Source::image("p", "i.img"));
        for (key, value) in [
            ("backend", "tape"),
            ("backend", ""),
            ("pool", ""),
            ("image", ""),
            ("directIO", "maybe"),
            ("preallocate", "yes"),
            ("sectorSize", "513"),
        ] {
            let mut bad = context(&base);
            bad.insert(key.to_owned(), value.to_owned());
            let message = Source::parse(&bad, "v").unwrap_err().to_string();
            assert!(message.contains(key), "{message}");
        }
    }

    #[test]
    fn unknown_keys_are_refused_by_name() {
        let of_loop = [("backend", "loop"), ("pool", "p"), ("image", "i.img")];
        let of_nbd = [("backend", "nbd"), ("uri", "nbd://h/x")];
        for base in [&of_loop[..], &of_nbd[..]] {
            for key in ["directIo", "overcommit", "kubernetes.io", "x-k8s.io/y"] {
                let mut bad = context(base);
                bad.insert(key.to_owned(), "x".to_owned());
                let message = Source::parse(&bad, "v").unwrap_err().to_string();
                let expected = format!("volume_context: {key}: is unknown; there are backend, ");
                assert!(message.starts_with(&expected), "{message}");
            }
            let mut good = context(base);
            for key in [
                // The controller gives each of its volumes the next two.
                "name",
                "pool",
                "storage.kubernetes.io/csiProvisionerIdentity",
                "csi.storage.k8s.io/pod.name",
                "fsType",
                "mkfsOptions",
            ] {
                good.insert(key.to_owned(), "x".to_owned());
            }
            Source::parse(&good, "v").unwrap();
        }
        // ceph-csi's volumes have keys of every release's.
        let ceph = [
            ("clusterID", "c"),
            ("pool", "p"),
            ("imageName", "i"),
            ("x", "y"),
        ];
        Source::parse(&context(&ceph), "v").unwrap();
    }

    #[test]
    fn an_nbd_source_is_an_address() {
        let by_uri = |uri| Source::parse(&context(&[("backend", "nbd"), ("uri", uri)]), "v");
        let host = [("backend", "nbd"), ("host", "h"), ("export", "a b")];
        let by_host = Source::parse(&context(&host), "v").unwrap();
        assert_eq!(by_host, by_uri("nbd://H/a%20b").unwrap());
        let socket = [("backend", "nbd"), ("socket", "/s"), ("connections", "1")];
        let by_socket = Source::parse(&context(&socket), "v").unwrap();
        assert!(by_socket.is_same(&by_uri("nbd+unix:///?socket=/s").unwrap()));
        assert_ne!(by_socket, by_uri("nbd+unix:///?socket=/s").unwrap());
        let json = serde_json::to_string(&by_host).unwrap();
        assert_eq!(serde_json::from_str::<Source>(&json).unwrap(), by_host);
        for (key, value) in [
            ("uri", "nbds://h/x"),
            ("uri", "nbd://h/x"),
            ("port", "0"),
            ("port", "65536"),
            ("host", "a/b"),
            ("connections", "0"),
            ("requestTimeout", "none"),
            ("deadConnectionTimeout", "0"),
        ] {
            let mut bad = context(&host);
            bad.insert(key.to_owned(), value.to_owned());
            let message = Source::parse(&bad, "v").unwrap_err().to_string();
            assert!(message.contains(key), "{message}");
        }
        let message = by_uri("nbds://h/x").unwrap_err().to_string();
        assert!(message.contains("TLS"), "{message}");
    }
}
