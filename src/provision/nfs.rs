//! The store of directories on NFS servers. It makes and removes directories of a share
//! that is mounted on the controller's machine, or is there; it mounts nothing, and needs
//! no privileges.
//!
//! Handles, parameters and what a delete does are csi-driver-nfs'. The directory is the
//! volume: there is no catalogue, so an equal request finds what an earlier one made. Only
//! copies, and volumes whose class names the directory, have a record.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::Path,
};

use rustix::{
    fd::OwnedFd,
    fs::{Mode, chmod, fstat},
};
use tokio::sync::OwnedMutexGuard;

use super::{
    Abilities, Capacity, CapacityRequest, ContentSource, ListEntry, ListRequest, NewSnapshot,
    NewVolume, ProvisionError, Provisioner, PublishRequest, PublishedVolume, Range, Release,
    SnapshotInfo, VolumeCondition, VolumeInfo, VolumeUse,
    images::{Copies, CopyKind, CopyTarget, refuse_any},
    serialized::KeyedMutex,
};
use crate::{Done, crash_point, digest, nfs::Directory, secret::Secrets};

mod below;
mod class;
mod export;
mod handle;
mod making;
mod records;
mod removal;
mod snapshots;
#[cfg(test)]
mod tests;
mod tree;

pub use class::is_ours as is_of_class;
pub use export::NfsExport;
pub use handle::is_ours as is_handle;

pub use class::OnDelete;

use class::NewDirectory;
use handle::{DELETED, DirectoryHandle};
use making::DirectoryDraft;
use records::{DirectoryRecord, RecordedDirectories, VolumeRecords};
use snapshots::DirectorySnapshotHandle;
use tree::TreeSize;

const OF_SNAPSHOT: &str = "it is the directory of a snapshot, or in that";
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
    copies: Copies,
    /// Held while a directory is made or moved.
    directories: KeyedMutex,
    recorded: RecordedDirectories,
}

impl NfsStore {
    /// Over these shares, each given once.
    pub fn new(
        exports: Vec<NfsExport>,
        on_delete: OnDelete,
        copies: Copies,
    ) -> Result<Self, String> {
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
            copies,
            directories: KeyedMutex::default(),
            recorded: RecordedDirectories::default(),
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

    /// Locks the path with those that begin with the same name, so all above and below it.
    fn lock(&self, export: &NfsExport, path: &str) -> OwnedMutexGuard<()> {
        let (first, _) = below::split_first(path);
        let place = format!("{first:?} in {}", export.share);
        self.directories.lock_on_lane(&place)
    }

    /// Locks the path of a new directory, once what a killed deletion of its handle set
    /// aside is removed: the next deletion would take that for this directory.
    fn lock_for_new(
        &self,
        export: &NfsExport,
        path: &str,
        handle: &str,
    ) -> io::Result<OwnedMutexGuard<()>> {
        let aside = aside_of(handle);
        loop {
            // Not while others wait for the lock: it may take long.
            let _ = export.remove(&aside)?;
            let locked = self.lock(export, path);
            if !export.has(&aside)? {
                return Ok(locked);
            }
        }
    }

    /// Makes an empty directory, or finds it.
    fn create_empty(&self, made: &NewDirectory) -> Result<(), ProvisionError> {
        let directory = &made.handle.directory;
        let export = self.export(directory)?;
        let path = records::of_volume(&made.handle);
        let record = DirectoryRecord {
            handle: made.handle.to_string(),
            source: None,
        };
        let attempt = || {
            let root = export.open()?;
            let sub_dir = directory.sub_dir();
            let _directory = self.lock_for_new(export, sub_dir, &record.handle)?;
            let found: Option<DirectoryRecord> = records::read(&root, &path)?;
            if found.is_some_and(|it| it != record) && export.has(sub_dir)? {
                return Ok(Some("it is a copy of a volume or snapshot"));
            }
            if snapshots::has(&root, sub_dir)? {
                return Ok(Some(OF_SNAPSHOT));
            }
            if !made.handle.uuid.is_empty() {
                records::write(&root, &path, &record)?;
            }
            crash_point();
            export.make(sub_dir, made.mode).map(|()| None)
        };
        match attempt().map_err(failed("make", directory))? {
            None => Ok(()),
            Some(how) => Err(differs(made, how)),
        }
    }

    /// Makes a copy, or finds the one that an equal request made.
    fn create_copy(
        &self,
        made: &NewDirectory,
        name: &str,
        source: &ContentSource,
    ) -> Result<(), ProvisionError> {
        let directory = &made.handle.directory;
        let sub_dir = directory.sub_dir();
        let export = self.export(directory)?;
        let cannot = |step| failed(step, directory);
        let root = export.open().map_err(cannot("open the share of"))?;
        let path = records::of_volume(&made.handle);
        let record = DirectoryRecord {
            handle: made.handle.to_string(),
            source: Some(source.clone()),
        };
        let draft = DirectoryDraft::begin(&root, &path).map_err(cannot("make"))?;
        let draft = draft.ok_or_else(|| ProvisionError::Busy(name.to_owned()))?;
        if export.has(sub_dir).map_err(cannot("look for"))? {
            let found: Option<DirectoryRecord> =
                records::read(&root, &path).map_err(cannot("look for"))?;
            return match found {
                // Its maker may have been killed before it was durable.
                Some(found) if found == record => {
                    making::sync_place(&root, sub_dir).map_err(cannot("make"))
                }
                _ => Err(differs(made, "the directory is not a copy of that source")),
            };
        }
        let from = match source {
            ContentSource::Volume(handle) => self.volume_tree(handle)?,
            ContentSource::Snapshot(handle) => self.snapshot_tree(handle)?,
        };
        let to = draft.make().map_err(cannot("make"))?;
        let target = CopyTarget {
            kind: CopyKind::Volume,
            name: name.to_owned(),
            handle: record.handle.clone(),
            source: source.handle().to_owned(),
            pool: export.share.to_string(),
        };
        self.copy(&from, &to, target)?;
        if let Some(mode) = made.mode {
            let done = chmod(below::path_of(&to, ""), Mode::from_raw_mode(mode));
            let done = done.map_err(io::Error::from);
            done.and_then(|()| below::sync(&to))
                .map_err(cannot("make"))?;
        }
        let locked = self.lock_for_new(export, sub_dir, &record.handle);
        let _directory = locked.map_err(cannot("make"))?;
        if snapshots::has(&root, sub_dir).map_err(cannot("look for"))? {
            return Err(differs(made, OF_SNAPSHOT));
        }
        crash_point();
        records::write(&root, &path, &record).map_err(cannot("record"))?;
        match draft.place(sub_dir).map_err(cannot("make"))? {
            Done::Now => Ok(()),
            Done::Already => Err(differs(made, "another volume has made the directory")),
        }
    }

    /// Fills an empty directory with the source's content.
    fn copy(
        &self,
        from: &SourceTree<'_>,
        to: &OwnedFd,
        target: CopyTarget,
    ) -> Result<TreeSize, ProvisionError> {
        let cannot = |source, below: &Path| ProvisionError::Io {
            step: "copy",
            path: Path::new(&from.directory.to_string()).join(below),
            source,
        };
        let top = |source| cannot(source, Path::new(""));
        let size = tree::measure(&from.root).map_err(top)?;
        let running = self.copies.begin(target, size.bytes)?;
        tree::copy(&from.root, to, &running).map_err(|error| cannot(error.source, &error.path))?;
        // If it was deleted meanwhile, some of it may be missing in the copy.
        if from.is_there().map_err(top)? {
            return Ok(size);
        }
        Err(from.missing.clone().into())
    }

    fn volume_tree(&self, handle: &str) -> Result<SourceTree<'_>, ProvisionError> {
        let (parsed, export) = self.find(handle)?;
        let missing = MissingSource::Volume(handle.to_owned());
        SourceTree::open(export, parsed.directory, missing)
    }

    fn snapshot_tree(&self, handle: &str) -> Result<SourceTree<'_>, ProvisionError> {
        self.find_snapshot(handle)?;
        let missing = MissingSource::Snapshot(handle.to_owned());
        let parsed: Result<DirectorySnapshotHandle, _> = handle.parse();
        let parsed = parsed.map_err(|_| missing.clone())?;
        let (share, data) = (&parsed.share, parsed.data());
        let directory = Directory::new(share.server(), share.share(), &data);
        let directory = directory.map_err(|_| missing.clone())?;
        SourceTree::open(self.export(share)?, directory, missing)
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

/// A directory to copy.
struct SourceTree<'s> {
    export: &'s NfsExport,
    directory: Directory,
    root: OwnedFd,
    missing: MissingSource,
}

/// The source that a copy lacks, by its handle.
#[derive(Clone)]
enum MissingSource {
    Volume(String),
    Snapshot(String),
}

impl From<MissingSource> for ProvisionError {
    fn from(missing: MissingSource) -> Self {
        match missing {
            MissingSource::Volume(handle) => Self::NoVolume(handle),
            MissingSource::Snapshot(handle) => Self::NoSnapshot(handle),
        }
    }
}

impl<'s> SourceTree<'s> {
    fn open(
        export: &'s NfsExport,
        directory: Directory,
        missing: MissingSource,
    ) -> Result<Self, ProvisionError> {
        // Not a missing source: the share may not be mounted yet.
        let share = export.open().map_err(failed("open", &export.share))?;
        let root = below::absent_is_none(below::walk(&share, directory.sub_dir()));
        let root = root.map_err(failed("open", &directory))?;
        Ok(Self {
            export,
            root: root.ok_or_else(|| missing.clone())?,
            directory,
            missing,
        })
    }

    /// Whether it is still at its path.
    fn is_there(&self) -> io::Result<bool> {
        let there = below::walk(&self.export.open()?, self.directory.sub_dir());
        let Some(there) = below::absent_is_none(there)? else {
            return Ok(false);
        };
        let (opened, there) = (fstat(&self.root)?, fstat(there)?);
        Ok((opened.st_dev, opened.st_ino) == (there.st_dev, there.st_ino))
    }
}

/// The name in the share of a directory that is being deleted.
fn aside_of(handle: &str) -> String {
    format!("{DELETED}{}", digest::sha256_hex(handle))
}

fn differs(made: &NewDirectory, how: &str) -> ProvisionError {
    ProvisionError::Differs {
        name: made.handle.directory.to_string(),
        how: how.to_owned(),
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
        let swept = self.exports.iter().flat_map(|export| {
            let swept = export.open().and_then(|root| making::sweep(&root));
            let left = swept.unwrap_or_else(|error| vec![(String::new(), error)]);
            let cannot = |(name, source)| ProvisionError::Io {
                step: "clean up",
                path: Path::new(&export.share.to_string()).join(name),
                source,
            };
            left.into_iter().map(cannot)
        });
        swept.collect()
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
        match &new.source {
            None => self.create_empty(&made)?,
            Some(source) => self.create_copy(&made, &new.name, source)?,
        }
        Ok(VolumeInfo {
            source: new.source.clone(),
            ..volume(&made.handle, made.context)
        })
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
        let Some(on_delete) = on_delete else {
            return Err(ProvisionError::BadParameter {
                name: "onDelete",
                value: parsed.on_delete,
                why: "the handle has another word than delete, retain or archive".to_owned(),
            });
        };
        let aside = aside_of(handle);
        let release = || {
            let _directory = self.lock(export, sub_dir);
            let root = export.open()?;
            let record = records::of_volume(&parsed);
            let volumes = VolumeRecords::list(&root)?;
            let is_shared = volumes.has_others(&record)
                || self.recorded.has_below(&root, &volumes, sub_dir)?
                || snapshots::has(&root, sub_dir)?;
            match on_delete {
                _ if is_shared => tracing::info!(
                    handle,
                    %directory,
                    "the directory is also that of another volume or a snapshot, or has such a \
                     directory in it: it stays"
                ),
                OnDelete::Delete => {
                    let is_kept = |above: &str| volumes.has(above);
                    let _ = export.set_aside(sub_dir, &aside, is_kept)?;
                }
                OnDelete::Archive => drop(export.archive(sub_dir)?),
                OnDelete::Retain => {}
            }
            records::remove(&root, &record)?;
            self.recorded.forget(&record);
            Ok(())
        };
        let done = release().and_then(|()| export.remove(&aside));
        let is_there = |error: &io::Error| error.kind() == io::ErrorKind::AlreadyExists;
        let done = done.map_err(|error| match on_delete {
            OnDelete::Archive if is_there(&error) => ProvisionError::Archived {
                directory: directory.to_string(),
                archived: export::archived(sub_dir),
            },
            _ => failed("delete", directory)(error),
        })?;
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
        1000
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

    fn create_snapshot(&self, new: &NewSnapshot) -> Result<SnapshotInfo, ProvisionError> {
        self.take_snapshot(new)
    }

    fn delete_snapshot(&self, handle: &str, _: &Secrets) -> Result<(), ProvisionError> {
        self.remove_snapshot(handle)
    }

    fn get_snapshot(&self, handle: &str, _: &Secrets) -> Result<SnapshotInfo, ProvisionError> {
        self.find_snapshot(handle)
    }

    fn list_snapshots(
        &self,
        what: &ListRequest,
        _: Option<&str>,
        volume: Option<&str>,
        _: &Secrets,
    ) -> Result<Vec<ListEntry<SnapshotInfo>>, ProvisionError> {
        self.snapshots(what, volume)
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
