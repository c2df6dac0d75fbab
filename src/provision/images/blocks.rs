//! The blocks of snapshots: the data of their files, holes left out (lseek(2)).

use std::{fs::File, ops::Range, os::unix::fs::FileExt as _, path::PathBuf};

use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};

use super::{
    super::{
        BlockPage, BlockRequest, ProvisionError,
        blocks::{self, SnapshotData, before_end},
    },
    ImageStore,
    catalogue::{EntryKind as _, failed},
    snapshots::SnapshotDetail,
};

/// The file of a snapshot.
struct FileData {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl FileData {
    fn seek(&self, to: SeekFrom) -> Result<u64, ProvisionError> {
        match seek(&self.file, to) {
            Ok(at) => Ok(at),
            // There is no more data.
            Err(Errno::NXIO) => Ok(self.bytes),
            Err(errno) => Err(failed("find the data of", &self.path, errno.into())),
        }
    }
}

impl SnapshotData for FileData {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn allocated(&self, part: &Range<u64>) -> Result<Vec<Range<u64>>, ProvisionError> {
        let end = part.end.min(self.bytes);
        let (mut found, mut at) = (Vec::new(), part.start);
        while at < end {
            let data = self.seek(SeekFrom::Data(at))?;
            if data >= end {
                break;
            }
            at = self.seek(SeekFrom::Hole(data))?.min(end);
            found.push(data..at);
        }
        Ok(found)
    }

    fn read(&self, at: u64, data: &mut [u8]) -> Result<(), ProvisionError> {
        let inside = before_end(data, at, self.bytes);
        let read = self.file.read_exact_at(inside, at);
        read.map_err(|error| failed("read", &self.path, error))
    }
}

impl ImageStore {
    pub(super) fn snapshot_blocks(&self, what: &BlockRequest) -> Result<BlockPage, ProvisionError> {
        blocks::snapshot_blocks(what, |handle| self.file_data(handle))
    }

    /// The file of a snapshot, and the handle of its volume.
    fn file_data(&self, handle: &str) -> Result<(FileData, String), ProvisionError> {
        let (pool, entry) = self.find_snapshot(handle)?;
        let path = SnapshotDetail::image(pool, entry.id);
        let file = File::open(&path).map_err(|error| failed("open", &path, error))?;
        let metadata = file.metadata();
        let bytes = metadata
            .map_err(|error| failed("look at", &path, error))?
            .len();
        Ok((FileData { file, path, bytes }, entry.detail.source))
    }
}
