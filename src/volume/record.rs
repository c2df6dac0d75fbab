//! The records of volumes, and where they are.
//!
//! Two stores: records of state that dies with the kernel (devices, mounts) are below the
//! run directory, a tmpfs: one file a volume, written and renamed by a call's first change
//! and overwritten in place by its later ones ([`RecordFile`]), never synced. Records
//! of state that outlives a reboot (an inline volume's image) are synced below the state
//! directory, on the volume's lane: if its disk hangs, other volumes' records are written
//! all the same. A record says what the agent set out to do; the kernel says how far it
//! came.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::spec::{self, Stage, Use};
use crate::{
    capability::AccessMode,
    device::{Device, Source},
    digest,
    file::{self, FileDurability, PageFile},
    fs::FsType,
    kernel::Dev,
    mount::Mounted,
};

/// A volume that this node holds, or has begun to stage or to unstage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub volume_id: String,
    /// The name that it was created with, for listings; empty if it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The boot's id: the fields below hold for this boot only.
    pub boot_id: String,
    /// How far its stage or unstage has come.
    pub phase: Phase,
    /// Where its bytes are.
    pub source: Source,
    /// Where it is staged; for an inline volume a directory of our own.
    pub staging_path: PathBuf,
    /// Raw or mounted, as asked.
    pub usage: Use,
    /// The file system that is mounted.
    pub fs: Option<FsType>,
    /// Whether this node may only read it.
    pub read_only: bool,
    /// Its access mode.
    pub mode: AccessMode,
    /// The device, once there is one.
    pub device: Option<Device>,
    /// `st_dev` of the files on the mounted file system: the device's number,
    /// but an anonymous one on btrfs.
    pub root_dev: Option<Dev>,
    /// The inode of its mounted directory, where it has no device: volumes of one server
    /// can have the same `root_dev`.
    #[serde(default)]
    pub root_ino: Option<u64>,
    /// An inline ephemeral volume: the target that it ends with.
    pub inline: Option<PathBuf>,
    /// It was found staged without a record: how it was asked for is not known.
    #[serde(default)]
    pub found: bool,
}

/// How far staging has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Stage has begun; only the kernel knows how far it came.
    Staging,
    /// The stage is complete.
    Staged,
    /// Unstage has begun.
    Unstaging,
}

impl Phase {
    /// As listings show it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Staging => "staging",
            Self::Staged => "staged",
            Self::Unstaging => "unstaging",
        }
    }
}

impl Record {
    /// As listings and gauges show it.
    pub fn state(&self) -> &'static str {
        if self.inline.is_some() {
            "inline"
        } else {
            self.phase.as_str()
        }
    }

    /// The record of a stage that begins.
    pub fn begin(volume_id: &str, boot_id: &str, spec: &Stage) -> Self {
        Self {
            volume_id: volume_id.to_owned(),
            name: spec.name.clone(),
            boot_id: boot_id.to_owned(),
            phase: Phase::Staging,
            source: spec.source.clone(),
            staging_path: spec.staging_path.clone(),
            usage: spec.usage.clone(),
            fs: None,
            read_only: spec.read_only,
            mode: spec.mode,
            device: None,
            root_dev: None,
            root_ino: None,
            inline: spec
                .inline
                .as_ref()
                .map(|inline| inline.target_path.clone()),
            found: false,
        }
    }

    /// Whether there is something of it after a reboot: the image of an inline volume.
    pub fn outlives_reboot(&self) -> bool {
        self.inline.is_some() && self.source.has_device()
    }

    /// Where the volume's mount is, or its device node's where the backend
    /// stages raw volumes too.
    pub fn mount_point(&self) -> PathBuf {
        spec::mount_point(&self.source, &self.staging_path, &self.volume_id)
    }

    /// What a look into its file system waits for.
    pub fn waits_for(&self) -> &'static str {
        if self.source.has_device() {
            "its device"
        } else {
            "its server"
        }
    }

    /// Whether the mount is this volume's, on its device if it has one. `false` before it
    /// is attached.
    pub fn appears_at(&self, mounted: &Mounted) -> bool {
        match (&self.usage, &self.device) {
            (Use::Block, device) => {
                (device.as_ref()).is_some_and(|device| mounted.rdev == Some(device.dev))
            }
            (Use::Mount { .. }, Some(device)) => mounted.dev == self.root_dev.unwrap_or(device.dev),
            (Use::Mount { .. }, None) => {
                let is_root = |ino| mounted.shut_down || mounted.ino == ino;
                self.root_dev == Some(mounted.dev) && self.root_ino.is_some_and(is_root)
            }
        }
    }

    /// Whether something is mounted where it is staged.
    pub fn mounts(&self) -> bool {
        self.usage != Use::Block || self.is_staged_below()
    }

    /// Whether there is a directory of its own below the staging path. A volume
    /// that is only formatted has no staging path.
    pub fn is_staged_below(&self) -> bool {
        self.source.is_staged_below() && !self.staging_path.as_os_str().is_empty()
    }

    /// Whether a volume staged like this satisfies the call.
    pub fn satisfies(&self, spec: &Stage) -> bool {
        self.source == spec.source
            && self.staging_path == spec.staging_path
            && self.usage.satisfies(&spec.usage, self.fs)
            && self.read_only == spec.read_only
            && self.mode == spec.mode
    }

    /// Whether a volume that was found staged like this may have been staged by
    /// such a call. Whether a raw device was attached read-only, or is published so, the attach
    /// decides.
    pub fn may_satisfy(&self, spec: &Stage) -> bool {
        let same_kind = (self.usage == Use::Block) == (spec.usage == Use::Block);
        self.source.is_same(&spec.source)
            && self.staging_path == spec.staging_path
            && same_kind
            && (self.usage == Use::Block || self.read_only == spec.read_only)
    }

    /// In words, for an error.
    pub fn describe(&self) -> String {
        let access = if self.read_only {
            "read-only"
        } else {
            "writable"
        };
        let staged = self.staging_path.display();
        let (phase, usage, source) = (self.phase.as_str(), &self.usage, &self.source);
        format!("{phase} as {usage}, {access}, of {source}, at {staged}")
    }
}

/// Where a published volume appears. Not recorded: the mount is the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The target cannot write.
    pub read_only: bool,
}

/// All that this node holds of a volume.
#[derive(Clone, Debug)]
pub struct Held {
    pub record: Record,
    /// Where it is published.
    pub targets: BTreeMap<PathBuf, Target>,
}

/// The file of a volume's record while a call changes it, none before the first change. The
/// file of another call may have been removed since.
#[derive(Debug, Default)]
pub struct RecordFile(Option<PageFile>);

/// The records on disk.
#[derive(Clone, Debug)]
pub struct Records {
    volumes: PathBuf,
    inline: PathBuf,
}

impl Records {
    /// Opens the stores. The state directory is on a disk that may hang, so
    /// [`Records::load_inline`] makes its directory.
    pub fn open(run_dir: &Path, state_dir: &Path) -> io::Result<Self> {
        let records = Self {
            volumes: run_dir.join("volumes"),
            inline: state_dir.join("inline"),
        };
        std::fs::create_dir_all(&records.volumes)?;
        Ok(records)
    }

    /// The directory of inline volumes' records.
    pub fn inline_dir(&self) -> &Path {
        &self.inline
    }

    /// The records of this boot, but those of inline volumes with an image.
    pub fn load(&self, boot_id: &str) -> io::Result<Vec<Record>> {
        let mut loaded = Vec::new();
        for (path, record) in read_all(&self.volumes)? {
            if record.boot_id == boot_id {
                loaded.push(record);
            } else {
                // Its device and mounts went with the other boot.
                std::fs::remove_file(&path)?;
            }
        }
        Ok(loaded)
    }

    /// The records of inline volumes, of every boot. For a lane, which it blocks.
    pub fn load_inline(&self) -> io::Result<Vec<Record>> {
        std::fs::create_dir_all(&self.inline)?;
        let all = read_all(&self.inline)?;
        Ok(all.into_iter().map(|(_, record)| record).collect())
    }

    /// Writes the record of a volume down; `file` is the one that this call wrote before. Of
    /// an inline volume with an image it blocks until its disk has it; of others it is in the
    /// memory of a tmpfs.
    pub fn save(&self, record: &Record, file: &mut RecordFile) -> io::Result<()> {
        let bytes = serde_json::to_vec(record)?;
        let (path, durability) = self.file_of(&record.volume_id, record.outlives_reboot());
        match durability {
            FileDurability::Durable => file::replace(&path, &bytes, durability),
            FileDurability::Volatile => {
                let file = file.0.get_or_insert_with(|| PageFile::new(path));
                file.write(bytes)
            }
        }
    }

    /// Forgets a volume. Blocks as [`Records::save`].
    pub fn forget(&self, record: &Record) -> io::Result<()> {
        let (path, durability) = self.file_of(&record.volume_id, record.outlives_reboot());
        file::remove(&path, durability)
    }

    fn file_of(&self, volume_id: &str, outlives_reboot: bool) -> (PathBuf, FileDurability) {
        let (directory, durability) = if outlives_reboot {
            (&self.inline, FileDurability::Durable)
        } else {
            (&self.volumes, FileDurability::Volatile)
        };
        let name = digest::sha256_hex(volume_id) + ".json";
        (directory.join(name), durability)
    }
}

/// Every record in the directory; fails if one cannot be read. Files that are none are named in
/// the log and left alone.
fn read_all(dir: &Path) -> io::Result<Vec<(PathBuf, Record)>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_none_or(|e| e != "json") {
            continue;
        }
        // A failing disk may have the record of a volume that is here.
        let bytes = match std::fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            bytes => bytes?,
        };
        match serde_json::from_slice::<Record>(&bytes) {
            Ok(record) => all.push((path, record)),
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "cannot read a volume's record; leaving it alone");
            }
        }
    }
    Ok(all)
}
