//! Snapshots: copies of directories, in the share beside the volumes.
//!
//! Handles are csi-driver-nfs', `server#share#NAME#NAME#SOURCE`. It keeps a snapshot as an
//! archive `NAME/SOURCE.tar.gz`, this driver as a directory `NAME/data` and a record. Either
//! deletes both.

use std::{
    fmt, io,
    str::FromStr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::{
    fd::OwnedFd,
    fs::{Mode, OFlags, fstat},
};
use serde::{Deserialize, Serialize};

use super::{
    DirectoryOrigin, MissingSource, NfsStore, SourceTree, aside_of,
    below::{self, absent_is_none},
    class, failed,
    handle::{BadHandle, DirectoryHandle},
    making::{DirectoryDraft, is_being_made, sync_place},
    page,
    records::{self, VolumeRecords},
};
use crate::{
    Done,
    capability::MAX_ID,
    crash_point, digest, error_chain,
    nfs::Directory,
    provision::{
        ListEntry, ListRequest, NewSnapshot, ProvisionError, SnapshotInfo,
        images::{CopyKind, CopyTarget},
    },
};

/// The directory of a snapshot's content, in the snapshot's own.
const DATA: &str = "data";

/// A snapshot's handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectorySnapshotHandle {
    /// The share that has it.
    pub share: Directory,
    pub name: String,
    /// The name of its volume.
    source: String,
}

/// The record of a snapshot.
#[derive(Debug, Serialize, Deserialize)]
struct DirectorySnapshotRecord {
    handle: String,
    /// The handle of its volume, which may be gone by now.
    source: String,
    /// When its copy began: nanoseconds since 1970.
    created: u64,
    /// What it takes on the disk.
    bytes: u64,
}

impl DirectorySnapshotHandle {
    /// The handle of a snapshot of that name; none if it could not be read, or is too long for
    /// a later call.
    fn new(share: Directory, name: &str, volume: &DirectoryHandle) -> Option<Self> {
        let source = match &*volume.uuid {
            "" => volume.directory.sub_dir(),
            uuid => uuid,
        };
        let handle = Self {
            share,
            name: name.to_owned(),
            source: source.to_owned(),
        };
        let text = handle.to_string();
        (text.len() <= MAX_ID && text.parse() == Ok(handle.clone())).then_some(handle)
    }

    fn record(&self) -> String {
        record_of(&self.name)
    }

    /// The directory of its content.
    pub fn data(&self) -> String {
        data_of(&self.name)
    }
}

impl FromStr for DirectorySnapshotHandle {
    type Err = BadHandle;

    fn from_str(text: &str) -> Result<Self, BadHandle> {
        let parts: Vec<_> = text.split('#').collect();
        let [server, share, name, again, source] = parts[..] else {
            return Err(BadHandle);
        };
        let is_hidden = name.starts_with('.') || name.contains(['/', '\\']);
        let climbs = source.split(['/', '\\']).any(|part| part == "..");
        if name.is_empty() || name != again || is_hidden || source.is_empty() || climbs {
            return Err(BadHandle);
        }
        // Checks the name as well.
        let share = Directory::new(server, share, name)
            .and_then(|_| Directory::new(server, share, ""))
            .map_err(|_| BadHandle)?;
        Ok(Self {
            share,
            name: name.to_owned(),
            source: source.to_owned(),
        })
    }
}

impl fmt::Display for DirectorySnapshotHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (it, name, source) = (&self.share, &self.name, &self.source);
        write!(f, "{}#{}#{name}#{name}#{source}", it.server(), it.share())
    }
}

impl NfsStore {
    pub(super) fn take_snapshot(&self, new: &NewSnapshot) -> Result<SnapshotInfo, ProvisionError> {
        let (volume, _) = self.find(&new.volume)?;
        let share = class::snapshot_share(&new.parameters, &volume.directory)?;
        let handle = DirectorySnapshotHandle::new(share, &new.name, &volume);
        let handle = handle.ok_or_else(|| ProvisionError::BadParameter {
            name: "name",
            value: new.name.clone(),
            why: "no directory of a share and no handle can have the name".to_owned(),
        })?;
        let cannot = |step| failed(step, &handle.share);
        let export = self.export(&handle.share)?;
        let root = export.open().map_err(cannot("open"))?;
        let draft = DirectoryDraft::begin(&root, &handle.record()).map_err(cannot("write in"))?;
        let draft = draft.ok_or_else(|| ProvisionError::Busy(new.name.clone()))?;
        // Before the volume is looked for: a snapshot may outlive it.
        if let Some(taken) = as_taken_before(&root, &handle, &new.volume)? {
            // Its maker may have been killed before it was durable.
            sync_place(&root, &handle.name).map_err(cannot("write in"))?;
            return Ok(taken);
        }
        let has_name = || ProvisionError::Differs {
            name: new.name.clone(),
            how: format!("{} has a directory of that name", handle.share),
        };
        if below::has(&root, &handle.name).map_err(cannot("look in"))? {
            return Err(has_name());
        }
        let from = self.volume_tree(&new.volume)?;
        let created = SystemTime::now().duration_since(UNIX_EPOCH);
        let to = draft
            .make(&handle.name)
            .and_then(|new| below::make(&new, DATA, 0o700));
        let target = CopyTarget {
            kind: CopyKind::Snapshot,
            name: new.name.clone(),
            handle: handle.to_string(),
            source: new.volume.clone(),
            pool: handle.share.to_string(),
        };
        let size = self.copy(&from, &to.map_err(cannot("write in"))?, target, 0)?;
        let record = DirectorySnapshotRecord {
            handle: handle.to_string(),
            source: new.volume.clone(),
            created: u64::try_from(created.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX),
            bytes: size.allocated,
        };
        let locked = self.lock_for_new(export, &handle.name, &record.handle);
        let _directory = locked.map_err(cannot("write in"))?;
        let written = records::write(&root, &handle.record(), &record);
        written.map_err(cannot("write in"))?;
        match draft.place(&handle.name).map_err(cannot("write in"))? {
            Done::Now => Ok(record.info()),
            Done::Already => Err(has_name()),
        }
    }

    pub(super) fn remove_snapshot(&self, text: &str) -> Result<(), ProvisionError> {
        let Ok(handle) = text.parse::<DirectorySnapshotHandle>() else {
            return Ok(());
        };
        let export = self.export(&handle.share)?;
        let aside = aside_of(text);
        let remove = || {
            let root = export.open()?;
            let record = handle.record();
            // Removes what a dead maker left, so that its record is of no other directory.
            let Some(_draft) = DirectoryDraft::begin(&root, &record)? else {
                return Ok(Err(ProvisionError::Busy(handle.name.clone())));
            };
            {
                let _directory = self.lock(export, &handle.name);
                let is_ours = complete(&root, &record, &handle.name)?.is_some();
                if !is_ours && packed(&root, &handle)?.is_none() && below::has(&root, &handle.name)?
                {
                    return Ok(Err(ProvisionError::NotSnapshot {
                        handle: text.to_owned(),
                        name: handle.name.clone(),
                    }));
                }
                let volumes = VolumeRecords::list(&root)?;
                let is_shared = volumes.has(&handle.name)
                    || !self
                        .recorded
                        .below(&root, &volumes, &handle.name)?
                        .is_empty();
                if is_shared {
                    return Ok(Err(ProvisionError::VolumeInSnapshot(text.to_owned())));
                }
                let _ = export.set_aside(&handle.name, &aside, |_| false)?;
                crash_point();
                records::remove(&root, &record)?;
            }
            crash_point();
            export.remove(&aside).map(|_| Ok(()))
        };
        remove().map_err(failed("delete a snapshot in", &handle.share))?
    }

    pub(super) fn find_snapshot(&self, text: &str) -> Result<SnapshotInfo, ProvisionError> {
        let missing = || ProvisionError::NoSnapshot(text.to_owned());
        let handle: DirectorySnapshotHandle = text.parse().map_err(|_| missing())?;
        let root = self.export(&handle.share)?.open();
        let look = |root: &OwnedFd| match complete(root, &handle.record(), &handle.name)? {
            Some(record) => Ok(Some(record.info())),
            None => packed(root, &handle)?
                .map(|it| it.info(&handle))
                .transpose(),
        };
        let looked = root.and_then(|root| look(&root));
        let looked = looked.map_err(failed("look in", &handle.share))?;
        looked.ok_or_else(missing)
    }

    /// The content of a snapshot, whichever driver took it.
    pub(super) fn snapshot_content(
        &self,
        text: &str,
    ) -> Result<DirectoryOrigin<'_>, ProvisionError> {
        let missing = MissingSource::Snapshot(text.to_owned());
        let handle: DirectorySnapshotHandle = text.parse().map_err(|_| missing.clone())?;
        let export = self.export(&handle.share)?;
        let look = || {
            let root = export.open()?;
            let found = complete(&root, &handle.record(), &handle.name)?;
            let packed = match found {
                None => packed(&root, &handle)?,
                Some(_) => None,
            };
            Ok((found.is_some(), packed))
        };
        match look().map_err(failed("look in", &handle.share))? {
            (_, Some(packed)) => Ok(DirectoryOrigin::Packed(packed)),
            (false, None) => Err(missing.into()),
            (true, None) => {
                let (server, share) = (handle.share.server(), handle.share.share());
                let directory = Directory::new(server, share, &handle.data());
                let directory = directory.map_err(|_| missing.clone())?;
                SourceTree::open(export, directory, missing).map(DirectoryOrigin::Tree)
            }
        }
    }

    pub(super) fn snapshots(
        &self,
        what: &ListRequest,
        share: Option<&str>,
        volume: Option<&str>,
    ) -> Result<Vec<ListEntry<SnapshotInfo>>, ProvisionError> {
        let mut all = Vec::new();
        for export in self.listed(share) {
            let listed = export.open().and_then(|root| in_share(&root));
            all.extend(what.or_omit(listed.map_err(failed("list", &export.share)))?);
        }
        all.retain(|it| volume.is_none_or(|volume| it.source == volume));
        let entry = |record: DirectorySnapshotRecord| ListEntry {
            token: record.handle.clone(),
            entry: record.info(),
        };
        Ok(page(what, all.into_iter().map(entry).collect()))
    }
}

impl DirectorySnapshotRecord {
    fn info(&self) -> SnapshotInfo {
        let handle = self.handle.parse::<DirectorySnapshotHandle>();
        SnapshotInfo {
            handle: self.handle.clone(),
            name: handle.map(|handle| handle.name).unwrap_or_default(),
            source: self.source.clone(),
            bytes: self.bytes,
            created: UNIX_EPOCH + Duration::from_nanos(self.created),
            local: false,
            group: None,
        }
    }
}

/// The snapshot that an equal call took.
fn as_taken_before(
    root: &OwnedFd,
    handle: &DirectorySnapshotHandle,
    volume: &str,
) -> Result<Option<SnapshotInfo>, ProvisionError> {
    let found = complete(root, &handle.record(), &handle.name);
    match found.map_err(failed("look in", &handle.share))? {
        None => Ok(None),
        Some(record) if record.source == volume => Ok(Some(record.info())),
        Some(record) => Err(ProvisionError::Differs {
            name: handle.name.clone(),
            how: format!("it is a snapshot of {:?}", record.source),
        }),
    }
}

/// The snapshots of a share, but for records that cannot be parsed.
fn in_share(root: &OwnedFd) -> io::Result<Vec<DirectorySnapshotRecord>> {
    let mut all = Vec::new();
    for record in records::list(root, "snapshots", 1)? {
        let read: Option<DirectorySnapshotRecord> = match records::read(root, &record) {
            Err(error) if records::is_bad(&error) => {
                let error = error_chain(&error);
                tracing::warn!(error, "a snapshot is not listed");
                continue;
            }
            read => read?,
        };
        let handle = read.and_then(|read| read.handle.parse::<DirectorySnapshotHandle>().ok());
        if let Some(handle) = handle {
            all.extend(complete(root, &record, &handle.name)?);
        }
    }
    Ok(all)
}

/// The record of a snapshot whose content is there: another program may have removed it, and
/// what has its name while it is being made is another directory.
fn complete(
    root: &OwnedFd,
    record: &str,
    name: &str,
) -> io::Result<Option<DirectorySnapshotRecord>> {
    let Some(found) = records::read(root, record)? else {
        return Ok(None);
    };
    let is_there = !is_being_made(root, record)? && below::has(root, &data_of(name))?;
    Ok(is_there.then_some(found))
}

/// Whether the path is the directory of a snapshot, or in that.
pub fn has(root: &OwnedFd, path: &str) -> io::Result<bool> {
    let (name, _) = below::split_first(path);
    Ok(complete(root, &record_of(name), name)?.is_some())
}

fn record_of(name: &str) -> String {
    format!("snapshots/{}", digest::sha256_hex(name))
}

fn data_of(name: &str) -> String {
    format!("{name}/{DATA}")
}

/// An archive of csi-driver-nfs.
pub struct PackedSnapshot {
    /// In its share.
    pub path: String,
    /// By `O_PATH`, as it may be no file.
    pub archive: OwnedFd,
    pub is_compressed: bool,
}

impl PackedSnapshot {
    /// Of its volume it has a name, and no handle.
    fn info(&self, handle: &DirectorySnapshotHandle) -> io::Result<SnapshotInfo> {
        let stat = fstat(&self.archive)?;
        let written = Duration::from_secs(u64::try_from(stat.st_mtime).unwrap_or(0));
        Ok(SnapshotInfo {
            handle: handle.to_string(),
            name: handle.name.clone(),
            source: handle.source.clone(),
            bytes: u64::try_from(stat.st_size).unwrap_or(0),
            created: UNIX_EPOCH + written,
            local: false,
            group: None,
        })
    }
}

/// The snapshot, if it is an archive of csi-driver-nfs.
pub fn packed(
    root: &OwnedFd,
    handle: &DirectorySnapshotHandle,
) -> io::Result<Option<PackedSnapshot>> {
    for (suffix, is_compressed) in [(".tar.gz", true), (".tar", false)] {
        let path = format!("{}/{}{suffix}", handle.name, handle.source);
        let opened = below::open(root, &path, OFlags::PATH, Mode::empty());
        if let Some(archive) = absent_is_none(opened)? {
            return Ok(Some(PackedSnapshot {
                path,
                archive,
                is_compressed,
            }));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        Kind,
        provision::{
            images::Copies,
            nfs::{OnDelete, QuotaPolicy},
        },
        secret::Secrets,
    };

    #[test]
    fn handles_are_those_of_csi_driver_nfs() {
        for text in [
            "srv#share#snapshot-1#snapshot-1#pvc-1",
            "srv##snapshot-1#snapshot-1#ns/pvc-1",
        ] {
            let handle: DirectorySnapshotHandle = text.parse().expect(text);
            assert_eq!(handle.to_string(), text);
            assert_eq!(handle.data(), "snapshot-1/data");
        }
        let volume: DirectoryHandle = "srv#share#ns/name#pvc-1#".parse().expect("a volume");
        let share = Directory::new("srv", "share", "").expect("a share");
        let handle = DirectorySnapshotHandle::new(share.clone(), "snap", &volume);
        let handle = handle.expect("a handle").to_string();
        assert_eq!(handle, "srv#share#snap#snap#pvc-1");
        for name in ["", ".", "..", ".deleted-x", "a/b", "a#b", "a\nb"] {
            let handle = DirectorySnapshotHandle::new(share.clone(), name, &volume);
            assert_eq!(handle, None, "{name:?}");
        }
        // Of a volume whose handle is made by hand.
        let volume = format!("srv#share#v#{}#", "u".repeat(900));
        let volume: DirectoryHandle = volume.parse().expect("a volume");
        let of = |name: &str| DirectorySnapshotHandle::new(share.clone(), name, &volume);
        assert!(of(&"s".repeat(50)).is_some());
        assert_eq!(of(&"s".repeat(60)), None);
        for text in [
            "srv#share#pvc-1##",
            "srv#share#pvc-1#pvc-1#",
            "srv#share#a#b#pvc-1",
            "srv#share#a#a#../b",
            "srv#../share#a#a#b",
            "srv#share#a#a#b#c",
        ] {
            assert!(text.parse::<DirectorySnapshotHandle>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_directory_with_the_name_of_an_unfinished_snapshot_is_none() {
        let dir = tempfile::tempdir().expect("a directory");
        let export = format!("srv:/share={}", dir.path().display());
        let exports = vec![export.parse().expect("an export")];
        let store = NfsStore::new(
            exports,
            OnDelete::Delete,
            QuotaPolicy::Auto,
            Copies::new(1, 1),
        );
        let store = store.expect("a store");
        let foreign = dir.path().join("snap/data");
        std::fs::create_dir_all(&foreign).expect("made");
        std::fs::create_dir(dir.path().join("v")).expect("made");
        let text = "srv#share#snap#snap#v";
        let handle: DirectorySnapshotHandle = text.parse().expect("a handle");
        let root = store.exports[0].open().expect("opened");
        let record = DirectorySnapshotRecord {
            handle: text.to_owned(),
            source: "srv#share#v##".to_owned(),
            created: 0,
            bytes: 0,
        };
        let kind_of = |error: ProvisionError| error.kind();
        let take = || {
            let taken = store.take_snapshot(&NewSnapshot {
                name: "snap".to_owned(),
                volume: record.source.clone(),
                parameters: HashMap::default(),
                secrets: Secrets::default(),
            });
            taken.map(drop).map_err(kind_of)
        };
        let find = || store.find_snapshot(text).map(drop).map_err(kind_of);
        let remove = || store.remove_snapshot(text).map_err(kind_of);
        let write = || records::write(&root, &handle.record(), &record).expect("written");
        // What a maker leaves that is killed before it places the copy.
        let making = format!(".making-{}/new", handle.record().replace('/', "-"));
        let leave = || {
            std::fs::create_dir_all(dir.path().join(&making)).expect("made");
            write();
        };
        leave();
        assert_eq!(find(), Err(Kind::NotFound));
        assert_eq!(take(), Err(Kind::Conflict));
        leave();
        assert_eq!(remove(), Err(Kind::Precondition));
        assert!(foreign.exists() && !dir.path().join(&making).exists());
        // A record whose directory another program has replaced.
        std::fs::remove_dir(&foreign).expect("removed");
        write();
        assert_eq!(find(), Err(Kind::NotFound));
        assert_eq!(take(), Err(Kind::Conflict));
        assert_eq!(remove(), Err(Kind::Precondition));
        assert!(dir.path().join("snap").exists());
    }

    proptest! {
        #[test]
        fn a_snapshot_is_in_its_share(text in "[a-z]{1,3}#([a-z./#]|\\.\\.){0,12}") {
            if let Ok(handle) = text.parse::<DirectorySnapshotHandle>() {
                prop_assert!(!handle.name.contains('/') && !handle.name.starts_with('.'));
                prop_assert!(!handle.source.split('/').any(|part| part == ".."));
            }
        }
    }
}
