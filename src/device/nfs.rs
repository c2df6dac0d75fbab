//! The backend `nfs`: directories of NFS servers, mounted by the kernel's client. They
//! have no block device.
//!
//! Keys of the volume context are csi-driver-nfs', in any case.

use std::{
    borrow::Cow,
    fmt, io,
    net::{IpAddr, TcpStream, ToSocketAddrs as _},
    path::Path,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::context::{SourceError, VolumeContext, set_by_kubernetes};
use crate::{
    mount::{
        Mounted,
        attach::{self, MountError, NewMount},
        options::MountOptions,
        path::SafePath,
        table::MountEntry,
    },
    nfs::{BadDirectory, Directory, InlineShare},
};

/// The type of its mounts, as a StorageClass or a PersistentVolume may name it.
pub const NFS: &str = "nfs";

/// The versions to try where the options name none, the newest first.
const VERSIONS: [&str; 4] = ["vers=4.2", "vers=4.1", "vers=4.0", "vers=3"];

/// How long a server may take to accept a connection, before the kernel's client is asked,
/// which waits for minutes.
const ACCEPTS_WITHIN: Duration = Duration::from_secs(10);

const SERVER_PORT: u16 = 2049;
/// The server's rpcbind, which a client of NFS 3 asks for the ports.
const RPCBIND_PORT: u16 = 111;

/// A directory of an NFS server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NfsSource {
    #[serde(flatten)]
    directory: Directory,
    /// The permission bits to set on the directory, if any.
    pub mode: Option<u32>,
    /// The server's port, which the administrator has chosen for inline volumes; else the
    /// mount options may have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
}

/// The keys of the context, in lower case. `onDelete` is the controller's.
const KEYS: [&str; 7] = [
    "backend",
    "mountoptions",
    "mountpermissions",
    "ondelete",
    "server",
    "share",
    "subdir",
];

/// What a pod's author may set for an inline volume; in any case.
pub const INLINE_KEYS: [&str; 3] = ["mountOptions", "server", "share"];

impl fmt::Display for NfsSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "directory {}", self.directory)
    }
}

impl NfsSource {
    /// Whether the context names a directory of an NFS server: csi-driver-nfs' volumes have
    /// a `server` and a `share`, and no key `backend`.
    pub fn is_named_by(context: VolumeContext<'_>) -> bool {
        if let Some(name) = context.get("backend") {
            return name == NFS;
        }
        let has = |key| !matches!(get(context, key), Ok(None));
        has("server") && has("share") && context.get("clusterID").is_none()
    }

    /// Which of `server` and `share` lacks, if the context has the other alone.
    pub fn missing_key(context: VolumeContext<'_>) -> Option<&'static str> {
        let has = |key| matches!(get(context, key), Ok(Some(_)));
        match (has("server"), has("share")) {
            (true, false) => Some("share"),
            (false, true) => Some("server"),
            _ => None,
        }
    }

    /// Reads `server`, `share`, `subDir` and `mountPermissions`.
    pub fn parse(context: VolumeContext<'_>) -> Result<Self, SourceError> {
        let is_known =
            |key: &str| KEYS.contains(&key.to_ascii_lowercase().as_str()) || set_by_kubernetes(key);
        let mut unknown: Vec<_> = context.0.keys().filter(|key| !is_known(key)).collect();
        unknown.sort_unstable();
        if let Some(key) = unknown.first() {
            return Err(SourceError {
                key: Cow::Owned((*key).clone()),
                why: "is unknown; there are backend, server, share, subDir, mountOptions, \
                      mountPermissions, onDelete"
                    .to_owned(),
            });
        }
        let need = |key: &'static str| {
            get(context, key)?.ok_or_else(|| SourceError {
                key: key.into(),
                why: "is required".to_owned(),
            })
        };
        let sub_dir = get(context, "subDir")?.unwrap_or_default();
        if sub_dir.contains("${") {
            return Err(SourceError {
                key: "subDir".into(),
                why: format!("{sub_dir:?} is a template; name a directory"),
            });
        }
        let directory = Directory::new(need("server")?, need("share")?, sub_dir);
        let mode = match get(context, "mountPermissions")? {
            None => None,
            Some(text) => crate::nfs::parse_mode(text).map_err(|why| SourceError {
                key: "mountPermissions".into(),
                why,
            })?,
        };
        Ok(Self {
            directory: directory.map_err(|error: BadDirectory| SourceError {
                key: error.key.into(),
                why: error.to_string(),
            })?,
            mode,
            port: None,
        })
    }

    /// The mount options in the context, which csi-driver-nfs adds to those of the request.
    pub fn mount_options(context: VolumeContext<'_>) -> Result<MountOptions, SourceError> {
        let flags: Vec<_> = get(context, "mountOptions")?.into_iter().collect();
        let options = MountOptions::parse(&flags).and_then(|options| {
            options.refuse_unlisted(Some(NFS))?;
            Ok(options)
        });
        options.map_err(|error| SourceError {
            key: "mountOptions".into(),
            why: error.to_string(),
        })
    }

    /// Whether both are the same directory.
    pub fn is_same(&self, other: &Self) -> bool {
        self.directory == other.directory
    }

    /// Itself by the port that its share has among these; `None` if it is none of them.
    pub fn of_inline_shares(mut self, shares: &[InlineShare]) -> Option<Self> {
        let text = self.directory.to_string();
        let allowed = shares.iter().find(|it| it.share.to_string() == text)?;
        self.port = allowed.port;
        Some(self)
    }

    /// Its server's name or address.
    pub fn server(&self) -> &str {
        self.directory.server()
    }

    /// Whether the mount is one of this directory.
    pub fn is_mounted_as(&self, entry: &MountEntry) -> bool {
        is_nfs(&entry.fs_type)
            && entry.root == Path::new("/")
            && entry.source.to_str() == Some(&self.directory.to_string())
    }

    /// Mounts it at `at`, by the newest version that both sides have unless the options
    /// name one. Waits for the server.
    pub fn mount(
        &self,
        options: &MountOptions,
        read_only: bool,
        at: &SafePath,
    ) -> Result<Mounted, MountError> {
        let source = self.directory.to_string();
        let address = self.accepting_address(options);
        let address = address.map_err(|error| MountError::NoServer {
            remote: source.clone(),
            source: error,
        })?;
        let mut extra = vec![format!("addr={address}")];
        extra.extend(self.port.map(|port| format!("port={port}")));
        let names_version = |key| option(options, key).is_some();
        let versions = if names_version("vers") || names_version("nfsvers") {
            &[""][..]
        } else {
            &VERSIONS
        };
        let mut refused = None;
        for version in versions {
            let version = Some(*version).filter(|version| !version.is_empty());
            let extra: Vec<_> = extra.iter().map(String::as_str).chain(version).collect();
            let new = NewMount {
                fs_type: NFS,
                source: Path::new(&source),
                options,
                extra: &extra,
                read_only,
            };
            match attach::mount(&new, at) {
                Err(error) if error.is_other_version() => {
                    // The reason of the newest version is the one that helps.
                    refused.get_or_insert(error);
                }
                mounted => return mounted,
            }
        }
        Err(refused.expect("a version was tried"))
    }

    /// The first address of the server that accepts a connection. The kernel's client
    /// resolves no names.
    fn accepting_address(&self, options: &MountOptions) -> io::Result<IpAddr> {
        let of_options = || option(options, "port")?.parse().ok();
        let port = self.port.or_else(of_options);
        let version = option(options, "vers").or_else(|| option(options, "nfsvers"));
        let port = port.unwrap_or(match version {
            Some("3") => RPCBIND_PORT,
            _ => SERVER_PORT,
        });
        let over_tcp = match option(options, "proto") {
            Some(proto) => proto.starts_with("tcp"),
            None => !options
                .fs_options()
                .any(|it| it.key == "udp" || it.key == "rdma"),
        };
        let until = Instant::now() + ACCEPTS_WITHIN;
        let mut last = io::Error::new(io::ErrorKind::NotFound, "its name has no address");
        for address in (self.server(), port).to_socket_addrs()? {
            if !over_tcp {
                return Ok(address.ip());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(_) => return Ok(address.ip()),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// Whether a mount of this type is one of the kernel's NFS client.
pub fn is_nfs(fs_type: &str) -> bool {
    [NFS, "nfs4"].contains(&fs_type)
}

/// The value of a key in any case, where there is one; an empty one is none.
fn get<'a>(context: VolumeContext<'a>, key: &'static str) -> Result<Option<&'a str>, SourceError> {
    let mut found = context
        .0
        .iter()
        .filter(|(k, _)| k.eq_ignore_ascii_case(key));
    let value = found.next().map(|(_, value)| value.as_str());
    if found.next().is_some() {
        return Err(SourceError {
            key: key.into(),
            why: "is there in two spellings".to_owned(),
        });
    }
    Ok(value.filter(|value| !value.is_empty()))
}

/// The value of a superblock option.
fn option<'a>(options: &'a MountOptions, key: &str) -> Option<&'a str> {
    let mut all = options.fs_options();
    all.find(|option| option.key == key)?.value.as_deref()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::device::Source;

    fn context(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    }

    fn parse(pairs: &[(&str, &str)]) -> Result<Source, SourceError> {
        Source::parse(&context(pairs), "a handle")
    }

    #[test]
    fn a_volume_of_csi_driver_nfs_is_a_directory() {
        let full = [
            ("Server", "srv"),
            ("SHARE", "/export"),
            ("subdir", "ns/pvc-1"),
            ("onDelete", "retain"),
            ("mountPermissions", "0775"),
            ("mountoptions", "nfsvers=4.1,hard"),
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("storage.kubernetes.io/csiProvisionerIdentity", "x"),
        ];
        let source = parse(&full).expect("a directory");
        assert_eq!(source.to_string(), "directory srv:/export/ns/pvc-1");
        assert_eq!(source.backend(), "nfs");
        assert!(!source.has_device());
        let Source::Nfs(nfs) = &source else {
            panic!("{source}");
        };
        assert_eq!(nfs.mode, Some(0o775));
        let json = serde_json::to_string(&source).expect("text");
        let again: Source = serde_json::from_str(&json).expect("a source");
        assert_eq!(again, source);

        let plain = [
            ("backend", "nfs"),
            ("server", "srv"),
            ("share", "/export/ns/pvc-1"),
        ];
        let plain = parse(&plain).expect("a directory");
        assert_eq!(plain.to_string(), source.to_string());
        assert_ne!(plain, source);
    }

    #[test]
    fn what_names_no_directory_is_refused_by_its_key() {
        let base = [
            ("backend", "nfs"),
            ("server", "srv"),
            ("share", "/a"),
            ("subDir", "b"),
        ];
        for (key, value) in [
            ("server", ""),
            ("share", ""),
            ("server", "a,addr=10.0.0.1"),
            ("subDir", "../b"),
            ("subDir", "${pvc.metadata.name}"),
            ("mountPermissions", "9"),
            ("mountPermissions", "77777"),
            ("image", "x"),
            ("SERVER", "other"),
        ] {
            let mut pairs = base.to_vec();
            pairs.retain(|(known, _)| *known != key);
            pairs.push((key, value));
            let message = parse(&pairs).expect_err("refused").to_string();
            let named = message.to_lowercase().contains(&key.to_lowercase());
            assert!(named, "{key}={value}: {message}");
        }
    }

    #[test]
    fn a_mount_of_the_directory_is_recognised() {
        let pairs = [("server", "fd00::1"), ("share", "/a"), ("subDir", "b")];
        let source = parse(&pairs).expect("a directory");
        let entry = |fs_type: &str, source: &str, root: &str| MountEntry {
            id: 1,
            parent: 0,
            dev: "0:50".parse().expect("a number"),
            root: root.into(),
            mount_point: "/m".into(),
            fs_type: fs_type.to_owned(),
            source: source.into(),
            read_only: false,
            own_read_only: false,
            peer_group: None,
        };
        assert!(source.is_mounted_as(&entry("nfs4", "[fd00::1]:/a/b", "/")));
        assert!(source.is_mounted_as(&entry("nfs", "[fd00::1]:/a/b", "/")));
        for other in [
            entry("nfs4", "[fd00::1]:/a", "/"),
            entry("nfs4", "[fd00::1]:/a/b", "/sub"),
            entry("ext4", "[fd00::1]:/a/b", "/"),
        ] {
            assert!(!source.is_mounted_as(&other), "{other:?}");
        }
    }

    proptest! {
        #[test]
        fn any_context_is_a_directory_or_refused(
            pairs in prop::collection::hash_map(
                "(?i)server|share|subdir|backend|mountpermissions|mountoptions|[a-z/.]{0,9}",
                "nfs|[a-z./0-7:,$\\{\\}]{0,12}",
                0..6,
            ),
        ) {
            if !NfsSource::is_named_by(VolumeContext(&pairs)) {
                return Ok(());
            }
            match NfsSource::parse(VolumeContext(&pairs)) {
                Ok(source) => {
                    let text = source.directory.to_string();
                    prop_assert!(!text.split('/').any(|part| part == ".."), "{}", text);
                    prop_assert!(!source.server().contains([',', '/']), "{}", text);
                    prop_assert!(source.mode.is_none_or(|mode| (1..=0o7777).contains(&mode)));
                }
                Err(error) => {
                    prop_assert!(error.to_string().starts_with("volume_context: "), "{}", error);
                }
            }
        }
    }
}
