//! The store of directories on NFS servers. It makes and removes directories of a share
//! that is mounted on the controller's machine, or is there; it mounts nothing. Quotas need
//! `CAP_SYS_ADMIN`.
//!
//! Handles, parameters and what a delete does are csi-driver-nfs'. The directory is the
//! volume: there is no catalogue, so an equal request finds what an earlier one made. Volumes
//! of csi-driver-nfs have no record.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    path::Path,
};

use rustix::{
    fd::OwnedFd,
    fs::{FileType, Mode, chmod, fstat},
};
use tokio::sync::OwnedMutexGuard;

use super::{
    Abilities, Capacity, CapacityRequest, ContentSource, ListEntry, ListRequest, NewSnapshot,
    NewVolume, ProvisionError, Provisioner, PublishRequest, PublishedVolume, Range, Release,
    SnapshotInfo, VolumeCondition, VolumeInfo, VolumeUse,
    images::{Copies, CopyKind, CopyTarget, refuse_any},
    serialized::KeyedMutex,
};
use crate::{Done, crash_point, digest, lane::Inspection, nfs::Directory, secret::Secrets};

mod below;
mod class;
mod export;
mod handle;
mod making;
mod memory;
mod owners;
mod quota;
mod records;
mod removal;
mod snapshots;
#[cfg(test)]
mod tests;
mod tree;
mod unpack;

pub use class::is_ours as is_of_class;
pub use export::NfsExport;
pub use handle::is_ours as is_handle;

pub use class::OnDelete;
pub use quota::QuotaPolicy;

use class::NewDirectory;
use handle::{DELETED, DirectoryHandle};
use making::DirectoryDraft;
use records::{DirectoryRecord, RecordedVolumes, VolumeRecords, its_size};
use snapshots::PackedSnapshot;
use tree::TreeSize;
use unpack::UnpackBounds;

const OF_SNAPSHOT: &str = "it is the directory of a snapshot, or in that";

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
    quotas: QuotaPolicy,
    copies: Copies,
    /// Held while a directory is made or moved.
    directories: KeyedMutex,
    recorded: RecordedVolumes,
}

impl NfsStore {
    /// Over these shares, each given once.
    pub fn new(
        exports: Vec<NfsExport>,
        on_delete: OnDelete,
        quotas: QuotaPolicy,
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
            quotas,
            copies,
            directories: KeyedMutex::default(),
            recorded: RecordedVolumes::default(),
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

    /// The shares of a list: that one, or all.
    fn listed(&self, share: Option<&str>) -> impl Iterator<Item = &NfsExport> {
        let is_it = move |it: &&NfsExport| share.is_none_or(|share| it.share.to_string() == share);
        self.exports.iter().filter(is_it)
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

    /// The size of a new volume that gets a quota; none if it gets no quota.
    fn quota(
        &self,
        root: &OwnedFd,
        directory: &Directory,
        range: Range,
    ) -> Result<Option<u64>, ProvisionError> {
        if self.quotas == QuotaPolicy::Off {
            return Ok(None);
        }
        let obstacle = quota::obstacle(root, directory.sub_dir());
        match obstacle.map_err(failed("read the quota of", directory))? {
            // A limit alone is the size, too.
            None => range.choose(range.limit, range.limit.min(1)).map(Some),
            Some(why) if self.quotas == QuotaPolicy::Auto => {
                tracing::info!(%directory, why, "the size of the volume is not enforced");
                Ok(None)
            }
            Some(why) => Err(ProvisionError::NoQuota {
                directory: directory.to_string(),
                why,
            }),
        }
    }

    /// The size of a volume that has a quota, else 0.
    fn size_of(&self, directory: &Directory) -> Result<u64, ProvisionError> {
        let (above, dir) = self.opened(directory)?;
        quota::limit(&above, &dir).map_err(failed("read the quota of", directory))
    }

    /// A volume's directory, and the one above it.
    fn opened(&self, directory: &Directory) -> Result<(OwnedFd, OwnedFd), ProvisionError> {
        let export = self.export(directory)?;
        let (parent, name) = below::split(directory.sub_dir());
        let opened = export.open().and_then(|root| {
            let above = below::walk(&root, parent)?;
            let dir = below::walk(&above, name)?;
            Ok((above, dir))
        });
        opened.map_err(failed("open", directory))
    }

    /// Refuses a new volume in the directory of another, or around it: the outer one's pods
    /// could put a symlink in the inner one's place, and nodes would follow it anywhere on the
    /// server.
    fn refuse_nested(
        &self,
        root: &OwnedFd,
        made: &NewDirectory,
    ) -> io::Result<Result<(), ProvisionError>> {
        let directory = made.handle.directory.sub_dir();
        let volumes = VolumeRecords::list(root)?;
        let other = self.recorded.nested(root, &volumes, directory)?;
        Ok(other.map_or(Ok(()), |other| {
            Err(ProvisionError::Nested {
                field: made.field(),
                directory: directory.to_owned(),
                other,
            })
        }))
    }

    /// Makes an empty directory, or finds it; returns its size if that is enforced, else 0.
    fn create_empty(&self, made: &NewDirectory, range: Range) -> Result<u64, ProvisionError> {
        let directory = &made.handle.directory;
        let export = self.export(directory)?;
        let root = export.open().map_err(failed("open", &export.share))?;
        let path = records::of_volume(&made.handle);
        let mut record = DirectoryRecord {
            handle: made.handle.to_string(),
            source: None,
            size: range.named(),
        };
        let sub_dir = directory.sub_dir();
        let locked = self.lock_for_new(export, sub_dir, &record.handle);
        let _directory = locked.map_err(failed("make", directory))?;
        let quota = self.quota(&root, directory, range)?;
        let mut attempt = || {
            let found: Option<DirectoryRecord> = records::read(&root, &path)?;
            let is_recorded = found.is_some();
            let is_there = export.has(sub_dir)?;
            if let Some(found) = found.filter(|_| is_there) {
                if found.source.is_some() {
                    return Ok(Err(differs(made, "it is a copy of a volume or snapshot")));
                }
                if let Some(how) = found.other_size(range) {
                    return Ok(Err(differs(made, &how)));
                }
                if found.size != 0 {
                    record.size = found.size;
                }
            } else if let Err(nested) = self.refuse_nested(&root, made)? {
                return Ok(Err(nested));
            }
            if snapshots::has(&root, sub_dir)? {
                return Ok(Err(differs(made, OF_SNAPSHOT)));
            }
            let parent = below::split(sub_dir).0;
            if let Some(bytes) = quota.filter(|_| is_there) {
                let dir = below::walk(&root, sub_dir)?;
                let size = quota::limit(&below::walk(&root, parent)?, &dir)?.max(bytes);
                if !range.holds(size) {
                    return Ok(Err(differs(made, &its_size(size))));
                }
            }
            records::write(&root, &path, &record)?;
            crash_point();
            let dir = export.make(sub_dir, made.mode).or_else(|error| {
                // Nobody deletes a volume whose making was refused.
                if !is_recorded && matches!(export.has(sub_dir), Ok(false)) {
                    records::remove(&root, &path)?;
                }
                Err(error)
            })?;
            let Some(bytes) = quota else {
                return Ok(Ok(0));
            };
            crash_point();
            let above = below::walk(&root, parent)?;
            quota::give(&above, &dir, &directory.to_string(), bytes).map(Ok)
        };
        attempt().map_err(failed("make", directory))?
    }

    /// Makes a copy, or finds the one that an equal request made; returns its size if that is
    /// enforced, else 0.
    fn create_copy(
        &self,
        made: &NewDirectory,
        new: &NewVolume,
        source: &ContentSource,
    ) -> Result<u64, ProvisionError> {
        let name = &new.name;
        let directory = &made.handle.directory;
        let sub_dir = directory.sub_dir();
        let export = self.export(directory)?;
        let cannot = |step| failed(step, directory);
        let root = export.open().map_err(cannot("open the share of"))?;
        let path = records::of_volume(&made.handle);
        let record = DirectoryRecord {
            handle: made.handle.to_string(),
            source: Some(source.clone()),
            size: new.range.named(),
        };
        let draft = DirectoryDraft::begin(&root, &path).map_err(cannot("make"))?;
        let draft = draft.ok_or_else(|| ProvisionError::Busy(name.clone()))?;
        if export.has(sub_dir).map_err(cannot("look for"))? {
            let found: Option<DirectoryRecord> =
                records::read(&root, &path).map_err(cannot("look for"))?;
            let found = found.filter(|it| it.source == record.source);
            return match found.map(|it| it.other_size(new.range)) {
                Some(Some(how)) => Err(differs(made, &how)),
                // Its maker may have been killed before it was durable.
                Some(None) => {
                    making::sync_place(&root, sub_dir).map_err(cannot("make"))?;
                    self.size_of(directory)
                }
                None => Err(differs(made, "the directory is not a copy of that source")),
            };
        }
        // Before the work of a copy, and again once nobody else can make one.
        let not_nested = || self.refuse_nested(&root, made);
        not_nested().map_err(cannot("look around"))??;
        let from = match source {
            ContentSource::Volume(handle) => DirectoryOrigin::Tree(self.volume_tree(handle)?),
            ContentSource::Snapshot(handle) => self.snapshot_content(handle)?,
        };
        let quota = self.quota(&root, directory, new.range)?;
        let to = draft.make(sub_dir).map_err(cannot("make"))?;
        let size = match quota {
            None => 0,
            Some(bytes) => {
                let limited = draft.limit(&to, &directory.to_string(), bytes);
                limited.map_err(cannot("limit"))?
            }
        };
        let target = CopyTarget {
            kind: CopyKind::Volume,
            name: name.clone(),
            handle: record.handle.clone(),
            source: source.handle().to_owned(),
            pool: export.share.to_string(),
        };
        match &from {
            DirectoryOrigin::Tree(tree) => drop(self.copy(tree, &to, target, size)?),
            DirectoryOrigin::Packed(packed) => {
                let share = export.room().map_err(cannot("read the size of"))?;
                let bounds = UnpackBounds::new(size, share.f_blocks * share.f_frsize);
                self.unpack(packed, &to, target, bounds)?;
            }
        }
        if let Some(mode) = made.mode {
            let done = chmod(below::path_of(&to, ""), Mode::from_raw_mode(mode));
            let done = done.map_err(io::Error::from);
            done.and_then(|()| below::sync(&to))
                .map_err(cannot("make"))?;
        }
        let locked = self.lock_for_new(export, sub_dir, &record.handle);
        let _directory = locked.map_err(cannot("make"))?;
        not_nested().map_err(cannot("look around"))??;
        if snapshots::has(&root, sub_dir).map_err(cannot("look for"))? {
            return Err(differs(made, OF_SNAPSHOT));
        }
        crash_point();
        records::write(&root, &path, &record).map_err(cannot("record"))?;
        match draft.place(sub_dir).map_err(cannot("make"))? {
            Done::Now => Ok(size),
            Done::Already => Err(differs(made, "another volume has made the directory")),
        }
    }

    /// Fills an empty directory, which has room for `most` bytes, with the source's content;
    /// 0: any number.
    fn copy(
        &self,
        from: &SourceTree<'_>,
        to: &OwnedFd,
        target: CopyTarget,
        most: u64,
    ) -> Result<TreeSize, ProvisionError> {
        let cannot = |source, below: &Path| ProvisionError::Io {
            step: "copy",
            path: Path::new(&from.directory.to_string()).join(below),
            source,
        };
        let top = |source| cannot(source, Path::new(""));
        let size = tree::measure(&from.root).map_err(top)?;
        // Privileged writers may exceed a quota of ext4.
        if most != 0 && size.allocated > most {
            let why = format!("{most} is too little: the source takes {}", size.allocated);
            return Err(ProvisionError::Size {
                field: "required_bytes",
                why,
            });
        }
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

    /// Fills an empty directory with what an archive has.
    fn unpack(
        &self,
        from: &PackedSnapshot,
        to: &OwnedFd,
        target: CopyTarget,
        bounds: UnpackBounds,
    ) -> Result<(), ProvisionError> {
        let place = Path::new("/").join(&target.pool).join(&from.path);
        let cannot = |source, below: &Path| ProvisionError::Io {
            step: "unpack",
            path: place.join(below),
            source,
        };
        let opened = || {
            let stat = fstat(&from.archive)?;
            if !FileType::from_raw_mode(stat.st_mode).is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no file"));
            }
            let length = u64::try_from(stat.st_size).unwrap_or(0);
            Ok((fs::File::from(tree::reopen(&from.archive)?), length))
        };
        let (archive, length) = opened().map_err(|error| cannot(error, Path::new("")))?;
        let running = self.copies.begin(target, length)?;
        let done = unpack::unpack(archive, from.is_compressed, to, bounds, &running);
        done.map_err(|error| cannot(error.source, &error.path))
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

/// What a new volume is filled with.
enum DirectoryOrigin<'s> {
    Tree(SourceTree<'s>),
    Packed(PackedSnapshot),
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

/// The name in the share of the directory for what is deleted of a directory that other
/// volumes are in.
fn own_files_of(handle: &str) -> String {
    format!("{}-files", aside_of(handle))
}

/// The part of a list that is requested, and one entry more.
fn page<T>(what: &ListRequest, mut all: Vec<ListEntry<T>>) -> Vec<ListEntry<T>> {
    all.retain(|it| what.from.as_ref().is_none_or(|from| it.token > *from));
    all.sort_unstable_by(|a, b| a.token.cmp(&b.token));
    all.truncate(what.max + 1);
    all
}

/// The volume context of a volume that has no class.
fn context_of(it: &Directory) -> BTreeMap<String, String> {
    let context = [
        ("server", it.server().to_owned()),
        ("share", format!("/{}", it.share())),
        ("subDir", it.sub_dir().to_owned()),
    ];
    context.map(|(key, value)| (key.to_owned(), value)).into()
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
            lists: true,
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

    fn inspections(&self) -> Vec<Inspection> {
        let each = self.exports.iter().cloned();
        let inspection = |export: NfsExport| {
            Inspection::new(format!("share {}", export.share), move || {
                vec![export.inspect()]
            })
        };
        each.map(inspection).collect()
    }

    fn swept_pools(&self) -> Vec<String> {
        let shares = self.exports.iter().map(|export| export.share.to_string());
        shares.collect()
    }

    fn sweep(&self, share: Option<&str>) -> Vec<ProvisionError> {
        let swept =
            |export: &&NfsExport| share.is_none_or(|share| export.share.to_string() == share);
        let swept = self.exports.iter().filter(swept).flat_map(|export| {
            let swept = export.open().and_then(|root| {
                if let Err(error) = owners::probe(&root) {
                    let share = &export.share;
                    tracing::warn!(
                        %share,
                        %error,
                        "cannot keep owners and modes of other users' files: deletions, copies \
                         and mountPermissions will fail; docs/nfs.md says what the controller needs"
                    );
                }
                making::sweep(&root)
            });
            let left = swept.unwrap_or_else(|error| vec![(String::new(), error)]);
            let cannot = |(name, source): (String, io::Error)| {
                let path = Path::new(&export.share.to_string()).join(name);
                match source.kind() {
                    io::ErrorKind::WouldBlock => ProvisionError::Busy(path.display().to_string()),
                    _ => ProvisionError::Io {
                        step: "clean up",
                        path,
                        source,
                    },
                }
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
        let bytes = match &new.source {
            None => self.create_empty(&made, new.range)?,
            Some(source) => self.create_copy(&made, new, source)?,
        };
        if bytes != 0 && !new.range.holds(bytes) {
            return Err(differs(&made, &its_size(bytes)));
        }
        Ok(VolumeInfo {
            source: new.source.clone(),
            ..volume(&made.handle, made.context, bytes)
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
            let looked = export.has(sub_dir);
            if !looked.map_err(failed("look at", directory))? {
                return Ok(());
            }
            return Err(ProvisionError::BadParameter {
                name: "onDelete",
                value: parsed.on_delete,
                why: "the handle has another word than delete, retain or archive".to_owned(),
            });
        };
        let (aside, own_files) = (aside_of(handle), own_files_of(handle));
        let release = || {
            let _directory = self.lock(export, sub_dir);
            let root = export.open()?;
            let record = records::of_volume(&parsed);
            let volumes = VolumeRecords::list(&root)?;
            let is_shared = volumes.has_others(&record) || snapshots::has(&root, sub_dir)?;
            let inner = self.recorded.below(&root, &volumes, sub_dir)?;
            match on_delete {
                _ if is_shared => tracing::info!(
                    handle,
                    %directory,
                    "the directory is also that of another volume or a snapshot: it stays"
                ),
                OnDelete::Delete if !inner.is_empty() => {
                    tracing::info!(handle, %directory, ?inner, "volumes in the directory stay");
                    export.set_own_files_aside(sub_dir, &own_files, &inner)?;
                }
                _ if !inner.is_empty() => {
                    tracing::info!(handle, %directory, ?inner, "it stays with the volumes in it");
                }
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
        let done = release().and_then(|()| {
            let _ = export.remove(&own_files)?;
            export.remove(&aside)
        });
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

    /// A directory without a quota has any size.
    fn expand_volume(
        &self,
        handle: &str,
        range: Range,
        _: &Secrets,
    ) -> Result<u64, ProvisionError> {
        let parsed = self.existing(handle)?;
        let directory = &parsed.directory;
        let bytes = range.named();
        let export = self.export(directory)?;
        let _directory = self.lock(export, directory.sub_dir());
        let (above, dir) = self.opened(directory)?;
        let grown = quota::expand(&above, &dir, bytes);
        let grown = grown.map_err(failed("raise the quota of", directory))?;
        let grown = grown.map_err(|why| ProvisionError::NoQuota {
            directory: directory.to_string(),
            why,
        })?;
        let recorded = export.open().and_then(|root| {
            let path = records::of_volume(&parsed);
            match records::read::<DirectoryRecord>(&root, &path)? {
                Some(record) if record.size < bytes => {
                    let size = bytes;
                    records::write(&root, &path, &DirectoryRecord { size, ..record })
                }
                _ => Ok(()),
            }
        });
        recorded.map_err(failed("record the size of", directory))?;
        match grown {
            Some(size) if !range.holds(size) => Err(ProvisionError::Size {
                field: "limit_bytes",
                why: format!("{} is too little: the volume has {size}", range.limit),
            }),
            grown => Ok(grown.unwrap_or(bytes)),
        }
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
        let bytes = self.size_of(&parsed.directory)?;
        Ok(PublishedVolume {
            volume: volume(&parsed, context_of(&parsed.directory), bytes),
            nodes: Vec::new(),
        })
    }

    fn listed_pools(&self) -> Vec<String> {
        let shares = self.exports.iter().map(|export| export.share.to_string());
        shares.collect()
    }

    fn largest_page(&self) -> usize {
        1000
    }

    fn list_volumes(
        &self,
        what: &ListRequest,
        share: Option<&str>,
    ) -> Result<Vec<ListEntry<VolumeInfo>>, ProvisionError> {
        let complete = |root: &OwnedFd| {
            let mut all = Vec::new();
            for (record, handle) in self.recorded.list(root)? {
                if !making::is_being_made(root, &record)? {
                    all.push(handle);
                }
            }
            Ok(all)
        };
        let mut all = Vec::new();
        for export in self.listed(share) {
            let listed = export.open().and_then(|root| complete(&root));
            all.extend(what.or_omit(listed.map_err(failed("list", &export.share)))?);
        }
        let entry = |handle: DirectoryHandle| ListEntry {
            token: handle.to_string(),
            entry: handle,
        };
        let listed = page(what, all.into_iter().map(entry).collect());
        let described = listed.into_iter().map(|ListEntry { token, entry }| {
            let directory = &entry.directory;
            // It may be deleted meanwhile.
            let bytes = self.size_of(directory).unwrap_or_default();
            let entry = volume(&entry, context_of(directory), bytes);
            ListEntry { token, entry }
        });
        Ok(described.collect())
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

    /// The free space of the class' share; without a class that of all shares, each file system
    /// once.
    fn capacity(&self, room: &CapacityRequest) -> Result<Capacity, ProvisionError> {
        if let Some(why) = unsupported(&room.uses) {
            return Err(ProvisionError::UnsupportedUse(why));
        }
        let available = |export: &NfsExport| {
            let room = export.room();
            let room = room.map_err(failed("read the free space of", &export.share))?;
            let bytes = room.f_bavail.saturating_mul(room.f_frsize);
            Ok::<_, ProvisionError>((room.f_fsid, bytes))
        };
        let of_file_systems: BTreeMap<_, _> = if room.parameters.is_empty() {
            self.exports
                .iter()
                .map(available)
                .collect::<Result<_, _>>()?
        } else {
            let of_class = self.export(&class::share(&room.parameters)?)?;
            [available(of_class)?].into()
        };
        let each = of_file_systems.into_values();
        Ok(Capacity {
            available: each.fold(0, u64::saturating_add),
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
        share: Option<&str>,
        volume: Option<&str>,
        _: &Secrets,
    ) -> Result<Vec<ListEntry<SnapshotInfo>>, ProvisionError> {
        self.snapshots(what, share, volume)
    }
}

/// With 0 bytes, for a volume without a quota, the provisioner takes the size of the claim.
fn volume(handle: &DirectoryHandle, context: BTreeMap<String, String>, bytes: u64) -> VolumeInfo {
    VolumeInfo {
        handle: handle.to_string(),
        bytes,
        context,
        source: None,
        local: false,
        topology: BTreeMap::new(),
    }
}
