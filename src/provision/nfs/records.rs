//! The controller's records in a share, below `.uring-csi`: which volumes have a directory,
//! and what its content was copied from.
//!
//! A class may name the directory, so a new volume may get that of a deleted one, or two
//! volumes share one. The handle of each then has the volume's name, but the directory does
//! not. So such a volume has a record `volumes/DIRECTORY.HANDLE`, named by digests of both.

use std::{fs, io};

use rustix::{
    fd::OwnedFd,
    fs::{Mode, OFlags},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    below::{self, absent_is_none, path_of, split},
    handle::DirectoryHandle,
};
use crate::{
    digest,
    pool::draft::{self, Durability::Durable},
    provision::ContentSource,
};

/// The directory of all records.
const ROOT: &str = ".uring-csi";
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
    let path = format!("{ROOT}/{record}");
    let opened = below::open(share, &path, OFlags::RDONLY, Mode::empty());
    let Some(opened) = absent_is_none(opened)? else {
        return Ok(None);
    };
    let read = serde_json::from_reader(io::BufReader::new(fs::File::from(opened)));
    read.map(Some).map_err(|error| {
        let why = format!("cannot parse the record {path} in the share: {error}");
        io::Error::new(io::ErrorKind::InvalidData, why)
    })
}

/// Writes a record of the share.
pub fn write<T: Serialize>(share: &OwnedFd, record: &str, content: &T) -> io::Result<()> {
    let bytes = serde_json::to_vec(content)?;
    let (dir, name) = split(record);
    let tmp = below::make(share, &format!("{ROOT}/tmp"), MODE)?;
    let at = below::make(share, &format!("{ROOT}/{dir}"), MODE)?;
    draft::replace(&path_of(&tmp, ""), &path_of(&at, name), &bytes, Durable)
}

/// Removes a record of the share.
pub fn remove(share: &OwnedFd, record: &str) -> io::Result<()> {
    let (dir, name) = split(record);
    if let Some(at) = absent_is_none(below::walk(share, format!("{ROOT}/{dir}")))? {
        let _ = draft::remove(&path_of(&at, name), Durable)?;
    }
    Ok(())
}

/// The records of that directory, by their paths.
pub fn list(share: &OwnedFd, dir: &str) -> io::Result<Vec<String>> {
    let Some(at) = absent_is_none(below::walk(share, format!("{ROOT}/{dir}")))? else {
        return Ok(Vec::new());
    };
    let path = |entry: io::Result<fs::DirEntry>| {
        let name = entry?.file_name();
        Ok(format!("{dir}/{}", name.to_string_lossy()))
    };
    fs::read_dir(path_of(&at, ""))?.map(path).collect()
}

/// Whether another volume than that of the record has the same directory.
pub fn has_others(share: &OwnedFd, record: &str) -> io::Result<bool> {
    let (directory, _) = record.split_once('.').unwrap_or((record, ""));
    let same = format!("{directory}.");
    let all = list(share, "volumes")?;
    Ok(all.iter().any(|it| it != record && it.starts_with(&same)))
}
