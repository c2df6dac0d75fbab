//! Parsed requests, in the types by which calls are compared.
//!
//! Two calls are equal if their specs are. So a spec holds only what tells two calls
//! apart: no publish context but [`Fencing`], no `csi.storage.k8s.io/*`, and
//! `SINGLE_NODE_WRITER` is the same as `SINGLE_NODE_MULTI_WRITER`. Secrets come beside
//! the call, in its [`Request`].

use std::{
    collections::HashMap,
    fmt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::error::Cause;
use crate::{
    capability::{AccessMode, AccessType, Capability},
    device::{self, Fencing, Source},
    fs::{FsType, UnsupportedFs, fscrypt::EncryptedDirectory, mkfs},
    mount::{
        options::{FsOption, MountOptions},
        ownership::{BadGroup, FsGroup},
    },
    secret::Secrets,
};

/// How a volume is used on this node: raw, or as which file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "access", rename_all = "lowercase")]
pub enum Use {
    /// As a raw block device.
    Block,
    /// Mounted.
    Mount {
        /// The file system asked for; `None` leaves it to what is on the
        /// device, and to ext4 where nothing is.
        fs: Option<FsType>,
        /// The options of the capability.
        options: MountOptions,
    },
}

impl Use {
    fn parse(access: &AccessType, context: &HashMap<String, String>) -> Result<Self, Cause> {
        if let Some(remote) = Source::remote_file_system(context) {
            return Self::of_remote(remote, access, context);
        }
        let AccessType::Mount { fs_type, flags, .. } = access else {
            return Ok(Self::Block);
        };
        let parse = |field, name: &str| {
            let parsed = (!name.is_empty()).then(|| name.parse()).transpose();
            parsed.map_err(|error: UnsupportedFs| Cause::Invalid {
                field,
                why: error.to_string(),
            })
        };
        let of_class = context.get("fsType").map_or("", String::as_str);
        let of_class = parse("volume_context.fsType", of_class)?;
        let fs = parse("volume_capability.mount.fs_type", fs_type)?.or(of_class);
        let options = MountOptions::parse(flags)?;
        options.refuse_unlisted(fs.map(FsType::as_str))?;
        Ok(Self::Mount { fs, options })
    }

    /// Of a source without a block device.
    fn of_remote(
        remote: &str,
        access: &AccessType,
        context: &HashMap<String, String>,
    ) -> Result<Self, Cause> {
        let invalid = |field, why| Err(Cause::Invalid { field, why });
        let AccessType::Mount { fs_type, flags, .. } = access else {
            let why = format!("a volume of {remote} has no block device; request a mount");
            return invalid("volume_capability", why);
        };
        if !fs_type.is_empty() && !device::is_remote(fs_type) {
            let why = format!("{fs_type:?} is not {remote}, which the volume is");
            return invalid("volume_capability.mount.fs_type", why);
        }
        MountOptions::parse(flags)?.refuse_unlisted(Some(remote))?;
        let of_context = Source::remote_options(context)?.to_string();
        let all: Vec<_> = flags.iter().cloned().chain([of_context]).collect();
        let options = MountOptions::parse(&all)?;
        Ok(Self::Mount { fs: None, options })
    }

    /// Whether a volume in use like `self` satisfies a call that asks for `other`.
    /// `resolved` is the file system that is mounted.
    pub fn satisfies(&self, other: &Self, resolved: Option<FsType>) -> bool {
        match (self, other) {
            (Self::Block, Self::Block) => true,
            (
                Self::Mount { options, .. },
                Self::Mount {
                    fs,
                    options: requested,
                },
            ) => options == requested && (fs.is_none() || resolved.is_none() || *fs == resolved),
            _ => false,
        }
    }
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block => f.write_str("a raw block device"),
            Self::Mount { fs, options } => {
                let fs = fs.map_or("any file system", FsType::as_str);
                let options = options.to_string();
                if options.is_empty() {
                    write!(f, "{fs}")
                } else {
                    write!(f, "{fs} with options {options}")
                }
            }
        }
    }
}

/// `NodeStageVolume`, or the staging half of an inline volume's publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The name that it was created with; empty where the volume context has none.
    pub name: String,
    /// The source of its data.
    pub source: Source,
    /// Where to mount; for raw block just remembered.
    pub staging_path: PathBuf,
    /// Raw or mounted.
    pub usage: Use,
    /// Whether this node may only read it.
    pub read_only: bool,
    /// Its access mode.
    pub mode: AccessMode,
    /// Options of mkfs that replace the defaults.
    pub mkfs_options: Vec<String>,
    /// The group that shall own the volume, where the driver applies it.
    pub group: Option<FsGroup>,
    /// The owner and permission bits of the mounted directory.
    pub root: RootAccess,
    /// What an inline ephemeral volume has besides.
    pub inline: Option<InlineVolume>,
    /// Whether the controller fences nodes that do not let go of it.
    pub fencing: Fencing,
}

/// The owner and the permission bits that the root directory of a mounted volume shall have;
/// what is `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RootAccess {
    /// User and group.
    pub owner: Option<(u32, u32)>,
    pub mode: Option<u32>,
}

/// What a call says of an inline ephemeral volume alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InlineVolume {
    /// The size in bytes of the image that the node makes; not of a volume without a block
    /// device.
    pub image_bytes: Option<u64>,
    /// The target whose unpublish ends it.
    pub target_path: PathBuf,
}

/// `NodePublishVolume` of a staged volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publish {
    /// Where the volume is staged.
    pub staging_path: PathBuf,
    pub target_path: PathBuf,
    /// Raw or mounted.
    pub usage: Use,
    /// Whether pods may only read at this target.
    pub read_only: bool,
    /// Its access mode.
    pub mode: AccessMode,
    /// The group that shall own the volume, where the driver applies it.
    pub group: Option<FsGroup>,
    /// Whether a target that is mounted gets the attributes of the options.
    pub remount: bool,
    /// Whether a raw volume's descriptor lock is taken also where the agent is not configured
    /// to.
    pub lock: bool,
    /// The directory of its files, if they are encrypted.
    pub encrypted: Option<EncryptedDirectory>,
}

/// `NodePublishVolume` of an inline ephemeral volume: staged at a place of our
/// own, then published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inline {
    /// How it is staged.
    pub stage: Stage,
    /// How it is published.
    pub publish: Publish,
}

/// `NodeExpandVolume`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expand {
    /// Where the volume is staged or published.
    pub volume_path: PathBuf,
    /// Where it is staged; empty if the caller does not say. For a raw block
    /// volume kubelet may pass a volume path of its own.
    pub staging_path: PathBuf,
    /// At least so many bytes; 0: as many as the source has.
    pub required: u64,
    /// At most so many bytes; 0: no limit.
    pub limit: u64,
    /// Whether it is a raw block volume, where the caller says.
    pub is_block: Option<bool>,
}

/// Other options for the file system of a staged volume, while it is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remount {
    /// Where the volume is staged.
    pub staging_path: PathBuf,
    /// All options that it then has.
    pub options: MountOptions,
    /// Those to set for that.
    pub set: Vec<FsOption>,
    /// Whether it becomes read-only, or stays so.
    pub read_only: bool,
    /// Its access mode.
    pub mode: AccessMode,
}

/// csi-addons' `NodeReclaimSpace`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reclaim {
    /// Where the volume is staged; empty if the caller does not say.
    pub staging_path: PathBuf,
    /// Where it is published; empty if the caller does not say.
    pub volume_path: PathBuf,
}

/// `NodeAdmin.FormatVolume`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Format {
    /// The source of its data.
    pub source: Source,
    /// The file system to make.
    pub fs: FsType,
}

/// A call with the secrets that its backend's server asks for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The call, by which requests are compared.
    pub call: Call,
    pub secrets: Secrets,
}

impl From<Call> for Request {
    fn from(call: Call) -> Self {
        let secrets = Secrets::default();
        Self { call, secrets }
    }
}

/// A call that changes a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// `NodeStageVolume`.
    Stage(Stage),
    /// `NodeUnstageVolume`, with its staging path.
    Unstage(PathBuf),
    /// The agent's own: releases the claim that was left on this source.
    ReleaseClaim(Source),
    /// `NodePublishVolume`.
    Publish(Publish),
    /// `NodePublishVolume` of an inline volume.
    Inline(Inline),
    /// `NodeUnpublishVolume`, with its target path.
    Unpublish(PathBuf),
    /// The agent's own: deletes an inline volume whose pod is gone, with its target path.
    DeleteOrphan(PathBuf),
    /// `NodeExpandVolume`.
    Expand(Expand),
    /// The agent's own, of the volume manager.
    Remount(Remount),
    /// csi-addons' `NodeReclaimSpace`.
    Reclaim(Reclaim),
    /// csi-addons' `EncryptionKeyRotate`, with its volume path; empty if the caller does not
    /// say.
    RotateKey(PathBuf),
    /// `NodeAdmin.FormatVolume`.
    Format(Format),
}

impl Call {
    /// The call with each of its paths respelled.
    #[must_use]
    pub fn with_paths(mut self, respell: impl Fn(&Path) -> PathBuf) -> Self {
        let publish = |spec: &mut Publish| {
            spec.staging_path = respell(&spec.staging_path);
            spec.target_path = respell(&spec.target_path);
        };
        let stage = |spec: &mut Stage| {
            spec.staging_path = respell(&spec.staging_path);
            if let Some(inline) = &mut spec.inline {
                inline.target_path = respell(&inline.target_path);
            }
        };
        match &mut self {
            Self::Stage(spec) => stage(spec),
            Self::Publish(spec) => publish(spec),
            Self::Inline(spec) => {
                stage(&mut spec.stage);
                publish(&mut spec.publish);
            }
            Self::Unstage(path)
            | Self::Unpublish(path)
            | Self::DeleteOrphan(path)
            | Self::RotateKey(path) => *path = respell(path),
            Self::Expand(spec) => {
                spec.volume_path = respell(&spec.volume_path);
                spec.staging_path = respell(&spec.staging_path);
            }
            Self::Remount(spec) => spec.staging_path = respell(&spec.staging_path),
            Self::Reclaim(spec) => {
                spec.volume_path = respell(&spec.volume_path);
                spec.staging_path = respell(&spec.staging_path);
            }
            Self::Format(_) | Self::ReleaseClaim(_) => {}
        }
        self
    }

    /// Whether this call may begin while `other`, a different one, is under way on the
    /// same volume: each is about one target of a mounted or raw volume, or the other
    /// leaves targets and what is mounted at them alone. What unpublishes keeps the
    /// volume's superblock in use as long as it takes, and detaches nothing.
    ///
    /// Two publishes never: of some volumes only one target may be published.
    pub fn may_begin_beside(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::Unpublish(_),
                Self::Stage(_)
                | Self::Expand(_)
                | Self::Reclaim(_)
                | Self::RotateKey(_)
                | Self::Unpublish(_),
            )
            | (Self::Publish(_), Self::Reclaim(_) | Self::RotateKey(_)) => true,
            (Self::Unpublish(target), Self::Publish(spec)) => *target != spec.target_path,
            // The device's node must not appear while the device changes.
            (Self::Publish(spec), Self::Expand(_)) => spec.usage != Use::Block,
            _ => false,
        }
    }

    /// The path that it mounts the volume at, or unmounts it from.
    pub fn mount_path(&self) -> Option<&Path> {
        match self {
            Self::Stage(spec) => Some(&spec.staging_path),
            Self::Publish(spec) | Self::Inline(Inline { publish: spec, .. }) => {
                Some(&spec.target_path)
            }
            Self::Unstage(path) | Self::Unpublish(path) | Self::DeleteOrphan(path) => Some(path),
            Self::Expand(_)
            | Self::Remount(_)
            | Self::Reclaim(_)
            | Self::RotateKey(_)
            | Self::Format(_)
            | Self::ReleaseClaim(_) => None,
        }
    }

    /// Whether it takes about a millisecond where no disk hangs. The release of a claim is the
    /// agent's own, and refuses no caller unless it takes longer.
    pub fn is_brief(&self) -> bool {
        matches!(
            self,
            Self::Publish(_) | Self::Unpublish(_) | Self::ReleaseClaim(_)
        )
    }

    /// The RPC's name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Stage(_) => "NodeStageVolume",
            Self::Unstage(_) => "NodeUnstageVolume",
            Self::ReleaseClaim(_) => "release",
            Self::DeleteOrphan(_) => "delete",
            Self::Publish(_) | Self::Inline(_) => "NodePublishVolume",
            Self::Unpublish(_) => "NodeUnpublishVolume",
            Self::Expand(_) => "NodeExpandVolume",
            Self::Remount(_) => "remount",
            Self::Reclaim(_) => "NodeReclaimSpace",
            Self::RotateKey(_) => "EncryptionKeyRotate",
            Self::Format(_) => "FormatVolume",
        }
    }
}

/// The part of a request that stage and publish share.
pub struct Parsed {
    /// Raw or mounted.
    pub usage: Use,
    /// By access mode, by the `ro` option, or because the call says so.
    pub read_only: bool,
    /// Its access mode.
    pub mode: AccessMode,
    /// The class's `mkfsOptions`.
    pub mkfs_options: Vec<String>,
    /// The group, if the driver is configured to apply it.
    pub group: Option<FsGroup>,
}

impl Parsed {
    /// `apply_group`: the driver announces `VOLUME_MOUNT_GROUP`.
    pub fn new(
        capability: &Capability,
        context: &HashMap<String, String>,
        apply_group: bool,
    ) -> Result<Self, Cause> {
        let usage = Use::parse(&capability.access, context)?;
        let by_option = match &usage {
            Use::Mount { options, .. } => options.read_only(),
            Use::Block => false,
        };
        let fs = match &usage {
            Use::Mount { fs: Some(fs), .. } => *fs,
            _ => FsType::Ext4,
        };
        let mkfs_options = context.get("mkfsOptions").map_or(Ok(Vec::new()), |text| {
            mkfs::parse_options(fs, text).map_err(|error| Cause::Invalid {
                field: "volume_context.mkfsOptions",
                why: error.to_string(),
            })
        })?;
        let group = match &capability.access {
            AccessType::Mount { group, .. } if apply_group && !group.is_empty() => {
                Some(group.parse().map_err(|error: BadGroup| Cause::Invalid {
                    field: "volume_capability.mount.volume_mount_group",
                    why: error.to_string(),
                })?)
            }
            _ => None,
        };
        Ok(Self {
            read_only: by_option || capability.mode.reader_only(),
            usage,
            mode: capability.mode,
            mkfs_options,
            group,
        })
    }
}

/// The mount point of a volume of this source that is staged at the path.
pub(super) fn mount_point(source: &Source, staging_path: &Path, volume_id: &str) -> PathBuf {
    if source.is_staged_below() {
        staging_path.join(volume_id)
    } else {
        staging_path.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_for_one_target_runs_beside_calls_that_leave_it_alone() {
        let publish = |target: &str, usage: Use| {
            Call::Publish(Publish {
                staging_path: "/s".into(),
                target_path: target.into(),
                usage,
                read_only: false,
                mode: AccessMode::SingleNodeWriter,
                group: None,
                remount: false,
                lock: false,
                encrypted: None,
            })
        };
        let mounted = || Use::Mount {
            fs: None,
            options: MountOptions::default(),
        };
        let unpublish = |target: &str| Call::Unpublish(target.into());
        let unstage = || Call::Unstage("/s".into());
        let expand = || {
            Call::Expand(Expand {
                volume_path: "/t".into(),
                staging_path: "/s".into(),
                required: 1,
                limit: 0,
                is_block: None,
            })
        };
        let reclaim = || {
            Call::Reclaim(Reclaim {
                staging_path: "/s".into(),
                volume_path: PathBuf::new(),
            })
        };
        for (new, other) in [
            (unpublish("/t"), reclaim()),
            (publish("/t", mounted()), reclaim()),
            (unpublish("/t"), expand()),
            (unpublish("/t"), unpublish("/other")),
            (unpublish("/t"), publish("/other", mounted())),
            (unpublish("/t"), publish("/other", Use::Block)),
            (publish("/t", mounted()), expand()),
        ] {
            assert!(new.may_begin_beside(&other), "{new:?} beside {other:?}");
        }
        for (new, other) in [
            (unpublish("/t"), unstage()),
            (unpublish("/t"), publish("/t", mounted())),
            (publish("/t", Use::Block), expand()),
            (publish("/t", mounted()), publish("/other", mounted())),
            (publish("/t", mounted()), unpublish("/t")),
            (unstage(), unpublish("/t")),
            (unstage(), expand()),
            (unstage(), reclaim()),
            (reclaim(), expand()),
            (expand(), unpublish("/t")),
        ] {
            assert!(!new.may_begin_beside(&other), "{new:?} beside {other:?}");
        }
    }
}
