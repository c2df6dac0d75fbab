//! The store of directories on NFS servers. It makes and removes directories of a share
//! that is mounted on the controller's machine, or is there; it mounts nothing, and needs
//! no privileges.
//!
//! Handles, parameters and what a delete does are csi-driver-nfs'. The directory is the
//! volume: there is no catalogue, so an equal request finds what an earlier one made.

use std::{
    collections::{BTreeMap, HashMap},
    io,
};

use super::{
    Abilities, Capacity, CapacityRequest, ListEntry, ListRequest, NewSnapshot, NewVolume,
    ProvisionError, Provisioner, PublishRequest, PublishedVolume, Range, Release, SnapshotInfo,
    VolumeCondition, VolumeInfo, VolumeUse, images::refuse_any, serialized::KeyedMutex,
};
use crate::{digest, nfs::Directory, secret::Secrets};

mod class;
mod export;
mod handle;

pub use class::is_ours as is_of_class;
pub use export::NfsExport;
pub use handle::is_ours as is_handle;

pub use class::OnDelete;

use class::NewDirectory;
use handle::DirectoryHandle;

const NO_SNAPSHOTS: &str = "a directory of an NFS server has no snapshots";
const NO_COPIES: &str = "a directory is not copied: files that are being written would show no \
                         single point in time; make an empty volume, and copy into it in a pod";
const NO_LIST: &str = "the directories of an NFS server are not listed";

/// Whether the text is a handle of any release of csi-driver-nfs.
pub fn is_any_handle(handle: &str) -> bool {
    handle.parse::<DirectoryHandle>().is_ok()
}

/// The shares of NFS servers, by the directories where this controller has them.
#[derive(Debug)]
pub struct NfsStore {
    exports: Vec<NfsExport>,
    /// What a delete does where the handle does not say it.
    on_delete: OnDelete,
    /// Held while a directory is made or moved.
    directories: KeyedMutex,
}

impl NfsStore {
    /// Over these shares, each given once.
    pub fn new(exports: Vec<NfsExport>, on_delete: OnDelete) -> Result<Self, String> {
        for (at, export) in exports.iter().enumerate() {
            if exports[..at]
                .iter()
                .any(|other| other.share == export.share)
            {
                return Err(format!("--nfs-export: {} is given twice", export.share));
            }
        }
        Ok(Self {
            exports,
            on_delete,
            directories: KeyedMutex::default(),
        })
    }

    fn export(&self, directory: &Directory) -> Result<&NfsExport, ProvisionError> {
        let is_its = |it: &&NfsExport| {
            let share = &it.share;
            share.server() == directory.server() && share.share() == directory.share()
        };
        let found = self.exports.iter().find(is_its);
        found.ok_or_else(|| ProvisionError::ShareNotGiven {
            server: directory.server().to_owned(),
            share: directory.share().to_owned(),
        })
    }

    fn find(&self, handle: &str) -> Result<(DirectoryHandle, &NfsExport), ProvisionError> {
        let parsed: Result<DirectoryHandle, _> = handle.parse();
        let parsed = parsed.map_err(|_| ProvisionError::NoVolume(handle.to_owned()))?;
        let export = self.export(&parsed.directory)?;
        Ok((parsed, export))
    }

    /// The volume, whose directory must be there.
    fn existing(&self, handle: &str) -> Result<DirectoryHandle, ProvisionError> {
        let (parsed, export) = self.find(handle)?;
        let there = export.has(parsed.directory.sub_dir());
        if there.map_err(failed("look for", &parsed.directory))? {
            Ok(parsed)
        } else {
            Err(ProvisionError::NoVolume(handle.to_owned()))
        }
    }
}

fn failed(step: &'static str, what: &Directory) -> impl FnOnce(io::Error) -> ProvisionError {
    let path = what.to_string().into();
    move |source| ProvisionError::Io { step, path, source }
}

/// Says why a directory does not support the uses, if it does not.
fn unsupported(uses: &[VolumeUse]) -> Option<String> {
    uses.iter().find_map(|one| match one.fs_type.as_deref() {
        None => Some("a directory of an NFS server has no block device".to_owned()),
        Some("" | "nfs" | "nfs4") => None,
        Some(other) => Some(format!("fs_type {other:?} is not that of an NFS server")),
    })
}

impl Provisioner for NfsStore {
    fn abilities(&self) -> Abilities {
        Abilities {
            lists: false,
            modifies: false,
            publishes: false,
            groups: false,
            blocks: false,
        }
    }

    fn grows_on_nodes(&self) -> bool {
        false
    }

    /// Checks that every share's directory is there.
    fn check(&self) -> Result<(), ProvisionError> {
        self.exports.iter().try_for_each(|export| {
            let opened = export.open().map_err(failed("open", &export.share));
            opened.map(drop)
        })
    }

    fn sweep(&self) -> Vec<ProvisionError> {
        Vec::new()
    }

    fn create_volume(&self, new: &NewVolume) -> Result<VolumeInfo, ProvisionError> {
        refuse_any(&new.mutable, "none that can be changed later")?;
        if let Some(why) = unsupported(&new.uses) {
            return Err(ProvisionError::UnsupportedUse(why));
        }
        let mut made = NewDirectory::parse(&new.name, &new.parameters)?;
        if made.handle.on_delete.is_empty() {
            self.on_delete.word().clone_into(&mut made.handle.on_delete);
        }
        if new.source.is_some() {
            return Err(ProvisionError::Unsupported(NO_COPIES));
        }
        let directory = &made.handle.directory;
        let export = self.export(directory)?;
        let _directory = self.directories.lock_on_lane(&directory.to_string());
        let done = export.make(directory.sub_dir(), made.mode);
        done.map_err(failed("make", directory))?;
        Ok(volume(&made.handle, made.context))
    }

    fn delete_volume(&self, handle: &str, _: &Secrets) -> Result<(), ProvisionError> {
        let (parsed, export) = match self.find(handle) {
            Err(ProvisionError::NoVolume(_)) => return Ok(()),
            found => found?,
        };
        let directory = &parsed.directory;
        let sub_dir = directory.sub_dir();
        let on_delete = match parsed.on_delete.as_str() {
            "" => Some(self.on_delete),
            word => OnDelete::parse(word),
        };
        let done = match on_delete {
            Some(OnDelete::Delete) => {
                let aside = format!(".deleted-{}", digest::sha256_hex(handle));
                let moved = {
                    let _directory = self.directories.lock_on_lane(&directory.to_string());
                    export.set_aside(sub_dir, &aside)
                };
                moved.and_then(|_| export.remove(&aside))
            }
            Some(OnDelete::Archive) => {
                let _directory = self.directories.lock_on_lane(&directory.to_string());
                export.archive(sub_dir)
            }
            Some(OnDelete::Retain) => return Ok(()),
            None => {
                return Err(ProvisionError::BadParameter {
                    name: "onDelete",
                    value: parsed.on_delete,
                    why: "the handle has another word than delete, retain or archive".to_owned(),
                });
            }
        };
        let done = done.map_err(failed("delete", directory))?;
        tracing::debug!(handle, ?done, "deleted");
        Ok(())
    }

    /// Nothing limits a directory, so it has any size.
    fn expand_volume(
        &self,
        handle: &str,
        range: Range,
        _: &Secrets,
    ) -> Result<u64, ProvisionError> {
        self.existing(handle)?;
        Ok(match range.required {
            0 => range.limit,
            bytes => bytes,
        })
    }

    fn modify_volume(
        &self,
        _: &str,
        mutable: &HashMap<String, String>,
        _: &Secrets,
    ) -> Result<(), ProvisionError> {
        refuse_any(mutable, "none that can be changed later")
    }

    fn publish_volume(
        &self,
        new: &PublishRequest,
    ) -> Result<BTreeMap<String, String>, ProvisionError> {
        self.existing(&new.handle).map(|_| BTreeMap::new())
    }

    fn unpublish_volume(&self, _: &str, _: &str, _: &Secrets) -> Result<Release, ProvisionError> {
        Ok(Release::Done)
    }

    fn get_volume(&self, handle: &str) -> Result<PublishedVolume, ProvisionError> {
        let parsed = self.existing(handle)?;
        let it = &parsed.directory;
        let context = [
            ("server", it.server().to_owned()),
            ("share", format!("/{}", it.share())),
            ("subDir", it.sub_dir().to_owned()),
        ];
        let context = context.map(|(key, value)| (key.to_owned(), value));
        Ok(PublishedVolume {
            volume: volume(&parsed, context.into()),
            nodes: Vec::new(),
        })
    }

    fn listed_pools(&self) -> Vec<String> {
        Vec::new()
    }

    fn largest_page(&self) -> usize {
        1
    }

    fn list_volumes(
        &self,
        what: &ListRequest,
        _: Option<&str>,
    ) -> Result<Vec<ListEntry<VolumeInfo>>, ProvisionError> {
        what.or_omit(Err(ProvisionError::Unsupported(NO_LIST)))
    }

    fn check_uses(
        &self,
        handle: &str,
        uses: &[VolumeUse],
        _: &HashMap<String, String>,
        _: &Secrets,
    ) -> Result<Option<String>, ProvisionError> {
        self.existing(handle)?;
        Ok(unsupported(uses))
    }

    fn volume_condition(
        &self,
        handle: &str,
        _: &Secrets,
    ) -> Result<Option<VolumeCondition>, ProvisionError> {
        self.existing(handle).map(|_| None)
    }

    fn capacity(&self, room: &CapacityRequest) -> Result<Capacity, ProvisionError> {
        if let Some(why) = unsupported(&room.uses) {
            return Err(ProvisionError::UnsupportedUse(why));
        }
        let share = class::share(&room.parameters)?;
        let room = self.export(&share)?.room();
        let room = room.map_err(failed("read the free space of", &share))?;
        Ok(Capacity {
            available: room.f_bavail * room.f_frsize,
            ..Capacity::default()
        })
    }

    fn create_snapshot(&self, _: &NewSnapshot) -> Result<SnapshotInfo, ProvisionError> {
        Err(ProvisionError::Unsupported(NO_SNAPSHOTS))
    }

    fn delete_snapshot(&self, _: &str, _: &Secrets) -> Result<(), ProvisionError> {
        Err(ProvisionError::Unsupported(NO_SNAPSHOTS))
    }

    fn get_snapshot(&self, handle: &str, _: &Secrets) -> Result<SnapshotInfo, ProvisionError> {
        Err(ProvisionError::NoSnapshot(handle.to_owned()))
    }

    fn list_snapshots(
        &self,
        _: &ListRequest,
        _: Option<&str>,
        _: Option<&str>,
        _: &Secrets,
    ) -> Result<Vec<ListEntry<SnapshotInfo>>, ProvisionError> {
        Ok(Vec::new())
    }
}

fn volume(handle: &DirectoryHandle, context: BTreeMap<String, String>) -> VolumeInfo {
    VolumeInfo {
        handle: handle.to_string(),
        // Not limited: the provisioner takes the size of the claim.
        bytes: 0,
        context,
        source: None,
        local: false,
        topology: BTreeMap::new(),
    }
}
