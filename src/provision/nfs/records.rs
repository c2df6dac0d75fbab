//! The controller's records in a share, below `.uring-csi`: which volumes have a directory,
//! and what its content was copied from.
//!
//! A class may name the directory, so a new volume may get that of a deleted one, or two
//! volumes share one. The handle of each then has the volume's name, but the directory does
//! not. So a volume has a record `volumes/DIRECTORY.HANDLE`, named by digests of both. By these
//! records volumes are listed, too.

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::{
    fd::OwnedFd,
    fs::{Mode, OFlags},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    below::{self, absent_is_none, path_of, split},
    handle::{DirectoryHandle, RECORDS},
};
use crate::{
    digest, error_chain, nfs,
    pool::draft::{self, Durability::Durable},
    provision::{ContentSource, Range},
};

/// Only the controller's.
const MODE: u32 = 0o700;

/// A volume's record.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryRecord {
    pub handle: String,
    /// What its content was copied from, if anything.
    pub source: Option<ContentSource>,
    /// The bytes that were asked for, also by expansions; 0: none, or unknown, as earlier
    /// releases do not record it.
    #[serde(default)]
    pub size: u64,
}

impl DirectoryRecord {
    /// Why the range is that of another volume, if it is.
    pub fn other_size(&self, range: Range) -> Option<String> {
        let differs = self.size != 0 && !range.holds(self.size);
        differs.then(|| its_size(self.size))
    }
}

/// Says that a volume has another size than the requested.
pub fn its_size(bytes: u64) -> String {
    format!("its size is {bytes}")
}

/// The path of a volume's record.
pub fn of_volume(handle: &DirectoryHandle) -> String {
    let directory = digest::sha256_hex(handle.directory.sub_dir());
    let handle = digest::sha256_hex(&handle.to_string());
    format!("volumes/{directory}.{handle}")
}

/// Reads a record of the share.
pub fn read<T: DeserializeOwned>(share: &OwnedFd, record: &str) -> io::Result<Option<T>> {
    let path = format!("{RECORDS}/{record}");
    let opened = below::open(share, &path, OFlags::RDONLY, Mode::empty());
    let Some(opened) = absent_is_none(opened)? else {
        return Ok(None);
    };
    let read = serde_json::from_reader(io::BufReader::new(fs::File::from(opened)));
    read.map(Some).map_err(|error: serde_json::Error| {
        if error.is_io() {
            return error.into();
        }
        io::Error::other(BadRecord {
            path,
            source: error,
        })
    })
}

/// A record that no controller has written.
#[derive(Debug, thiserror::Error)]
#[error("cannot parse the record {path} in the share; remove it by hand")]
struct BadRecord {
    path: String,
    source: serde_json::Error,
}

/// Whether a record cannot be parsed; another error may pass.
pub fn is_bad(error: &io::Error) -> bool {
    let inner = error.get_ref();
    inner.is_some_and(<dyn std::error::Error + Send + Sync>::is::<BadRecord>)
}

/// Writes a record of the share.
pub fn write<T: Serialize>(share: &OwnedFd, record: &str, content: &T) -> io::Result<()> {
    let bytes = serde_json::to_vec(content)?;
    let (dir, name) = split(record);
    let tmp = below::make(share, &format!("{RECORDS}/tmp"), MODE)?;
    let at = below::make(share, &format!("{RECORDS}/{dir}"), MODE)?;
    draft::replace(&path_of(&tmp, ""), &path_of(&at, name), &bytes, Durable).map(drop)
}

/// Removes a record of the share.
pub fn remove(share: &OwnedFd, record: &str) -> io::Result<()> {
    let (dir, name) = split(record);
    if let Some(at) = absent_is_none(below::walk(share, format!("{RECORDS}/{dir}")))? {
        let _ = draft::remove(&path_of(&at, name), Durable)?;
    }
    Ok(())
}

/// The records of that directory, by their paths. The name of each is so many digests; others
/// are files that an NFS client or an editor leaves.
pub fn list(share: &OwnedFd, dir: &str, digests: usize) -> io::Result<Vec<String>> {
    let Some(at) = absent_is_none(below::walk(share, format!("{RECORDS}/{dir}")))? else {
        return Ok(Vec::new());
    };
    let mut all = Vec::new();
    for entry in fs::read_dir(path_of(&at, ""))? {
        let name = entry?.file_name();
        let name = name.to_str().filter(|name| is_name(name, digests));
        all.extend(name.map(|name| format!("{dir}/{name}")));
    }
    Ok(all)
}

/// Whether the name of a record is one of so many digests.
pub fn is_name(name: &str, digests: usize) -> bool {
    let is_digest = |part: &str| {
        let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        part.len() == 64 && part.bytes().all(is_digit)
    };
    name.split('.').count() == digests && name.split('.').all(is_digest)
}

/// The records of a share's volumes, at one moment.
pub struct VolumeRecords(Vec<String>);

impl VolumeRecords {
    pub fn list(share: &OwnedFd) -> io::Result<Self> {
        list(share, "volumes", 2).map(Self)
    }

    /// Whether a volume has the directory.
    pub fn has(&self, sub_dir: &str) -> bool {
        let its = format!("volumes/{}.", digest::sha256_hex(sub_dir));
        self.0.iter().any(|it| it.starts_with(&its))
    }

    /// Whether another volume than that of the record has the same directory.
    pub fn has_others(&self, record: &str) -> bool {
        let (directory, _) = record.split_once('.').unwrap_or((record, ""));
        let same = format!("{directory}.");
        self.0
            .iter()
            .any(|it| it != record && it.starts_with(&same))
    }
}

/// The handles of recorded volumes, by the paths of the records. These are digests of the
/// content, so no record has to be read twice.
#[derive(Debug, Default)]
pub struct RecordedVolumes(Mutex<HashMap<String, DirectoryHandle>>);

impl RecordedVolumes {
    /// The directories of volumes that are below that one.
    pub fn below(
        &self,
        share: &OwnedFd,
        volumes: &VolumeRecords,
        sub_dir: &str,
    ) -> io::Result<Vec<String>> {
        let above = format!("{sub_dir}/");
        let (mut inner, mut unread) = (Vec::new(), HashSet::new());
        for record in &volumes.0 {
            match self.get(share, record) {
                Err(error) if is_bad(&error) => {
                    unread.extend(split(record).1.split('.').next().map(str::to_owned));
                }
                known => inner.extend(known?.map(|handle| handle.directory.sub_dir().to_owned())),
            }
        }
        inner.retain(|it| it.starts_with(&above));
        // Another program may have removed it. A path that a pod has spoiled is kept.
        inner.retain(|it| below::has(share, it).unwrap_or(true));
        if !unread.is_empty() {
            inner.extend(of_digests(share, sub_dir, &unread)?);
        }
        Ok(inner)
    }

    /// The directory of another volume that a new one in that directory would be in, or that
    /// would be in it.
    pub fn nested(
        &self,
        share: &OwnedFd,
        volumes: &VolumeRecords,
        sub_dir: &str,
    ) -> io::Result<Option<String>> {
        let mut above = split(sub_dir).0;
        while !above.is_empty() {
            if volumes.has(above) {
                return Ok(Some(above.to_owned()));
            }
            above = split(above).0;
        }
        // Mostly it is not there: no record has to be read.
        if !below::has(share, sub_dir)? {
            return Ok(None);
        }
        Ok(self.below(share, volumes, sub_dir)?.pop())
    }

    /// The volumes of a share whose directories are there, with their records, but for records
    /// that cannot be parsed.
    pub fn list(&self, share: &OwnedFd) -> io::Result<Vec<(String, DirectoryHandle)>> {
        let mut all = Vec::new();
        for record in VolumeRecords::list(share)?.0 {
            let handle = match self.get(share, &record) {
                Err(error) if is_bad(&error) => {
                    let error = error_chain(&error);
                    tracing::warn!(error, "a volume is not listed");
                    continue;
                }
                known => known?,
            };
            let Some(handle) = handle else {
                continue;
            };
            if below::has(share, handle.directory.sub_dir()).unwrap_or(true) {
                all.push((record, handle));
            }
        }
        Ok(all)
    }

    fn get(&self, share: &OwnedFd, record: &str) -> io::Result<Option<DirectoryHandle>> {
        let known = self.all().get(record).cloned();
        if known.is_some() {
            return Ok(known);
        }
        let Some(read): Option<DirectoryRecord> = read(share, record)? else {
            return Ok(None);
        };
        let handle: DirectoryHandle = read.handle.parse().map_err(|_| {
            io::Error::other(BadRecord {
                path: format!("{RECORDS}/{record}"),
                source: serde::de::Error::custom("its handle is that of no directory"),
            })
        })?;
        self.all().insert(record.to_owned(), handle.clone());
        Ok(Some(handle))
    }

    /// Forgets a record that is removed.
    pub fn forget(&self, record: &str) {
        self.all().remove(record);
    }

    fn all(&self) -> MutexGuard<'_, HashMap<String, DirectoryHandle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The directories below that one whose paths have one of these digests.
fn of_digests(
    share: &OwnedFd,
    sub_dir: &str,
    digests: &HashSet<String>,
) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    let mut to_look = vec![sub_dir.to_owned()];
    while let Some(path) = to_look.pop() {
        let names = below::walk(share, &path).and_then(|dir| below::names(&dir));
        for name in absent_is_none(names)?.unwrap_or_default() {
            // A volume's path is text, and no longer than the source of a mount.
            let Ok(name) = name.into_string() else {
                continue;
            };
            let inner = format!("{path}/{name}");
            if inner.len() > nfs::LONGEST || !below::has(share, &inner).unwrap_or(false) {
                continue;
            }
            if digests.contains(&digest::sha256_hex(&inner)) {
                found.push(inner.clone());
            }
            to_look.push(inner);
        }
    }
    Ok(found)
}
