//! The controller's records in a share, below `.uring-csi`: which volumes have a directory,
//! and what its content was copied from.
//!
//! A class may name the directory, so a new volume may get that of a deleted one, or two
//! volumes share one. The handle of each then has the volume's name, but the directory does
//! not. So such a volume has a record `volumes/DIRECTORY.HANDLE`, named by digests of both.

use std::{
    collections::HashMap,
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
    digest,
    pool::draft::{self, Durability::Durable},
    provision::ContentSource,
};

/// Only the controller's.
const MODE: u32 = 0o700;

/// A volume's record.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryRecord {
    pub handle: String,
    /// What its content was copied from, if anything.
    pub source: Option<ContentSource>,
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
    read.map(Some).map_err(|error| {
        let why = format!("cannot parse the record {path} in the share: {error}");
        io::Error::other(why)
    })
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

/// The records of that directory, by their paths.
pub fn list(share: &OwnedFd, dir: &str) -> io::Result<Vec<String>> {
    let Some(at) = absent_is_none(below::walk(share, format!("{RECORDS}/{dir}")))? else {
        return Ok(Vec::new());
    };
    let path = |entry: io::Result<fs::DirEntry>| {
        let name = entry?.file_name();
        Ok(format!("{dir}/{}", name.to_string_lossy()))
    };
    fs::read_dir(path_of(&at, ""))?.map(path).collect()
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
        let mut records = list(share, "volumes")?;
        // Not the files that an NFS client or an editor leaves.
        records.retain(|record| is_name(split(record).1, 2));
        Ok(Self(records))
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

/// The directories of recorded volumes, by the paths of the records. These are digests of the
/// content, so no record has to be read twice.
#[derive(Debug, Default)]
pub struct RecordedDirectories(Mutex<HashMap<String, String>>);

impl RecordedDirectories {
    /// Whether one of the volumes has a directory below that one.
    pub fn has_below(
        &self,
        share: &OwnedFd,
        volumes: &VolumeRecords,
        sub_dir: &str,
    ) -> io::Result<bool> {
        let above = format!("{sub_dir}/");
        for record in &volumes.0 {
            let directory = self.get(share, record)?;
            let Some(directory) = directory.filter(|it| it.starts_with(&above)) else {
                continue;
            };
            // Another program may have removed it. A path that a pod has spoiled is kept.
            if below::has(share, &directory).unwrap_or(true) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn get(&self, share: &OwnedFd, record: &str) -> io::Result<Option<String>> {
        let known = self.all().get(record).cloned();
        if known.is_some() {
            return Ok(known);
        }
        let read: Option<DirectoryRecord> = read(share, record)?;
        let handle = read.and_then(|it| it.handle.parse::<DirectoryHandle>().ok());
        let Some(handle) = handle else {
            return Ok(None);
        };
        let directory = handle.directory.sub_dir().to_owned();
        self.all().insert(record.to_owned(), directory.clone());
        Ok(Some(directory))
    }

    /// Forgets a record that is removed.
    pub fn forget(&self, record: &str) {
        self.all().remove(record);
    }

    fn all(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
