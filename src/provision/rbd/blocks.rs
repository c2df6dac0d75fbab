//! The blocks of snapshots: the objects of their images. The offsets are those of the device
//! that a pod has, which backup software reads.

use std::ops::Range;

use super::{
    super::{
        BlockPage, BlockRequest, ProvisionError,
        blocks::{self, SnapshotData, before_end},
    },
    RbdStore,
    encryption::{Encryption, EncryptionType},
    error::RbdError,
    luks_header::data_offset,
    snapshots::show_snapshot,
};
use crate::{
    ceph::client::rbd::{Image, OpenMode},
    secret::Secrets,
};

/// The image of a snapshot.
struct ImageData {
    image: Image,
    /// Where the device begins in the image.
    begins: u64,
    /// The size of the device.
    bytes: u64,
}

impl SnapshotData for ImageData {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn allocated(&self, part: &Range<u64>) -> Result<Vec<Range<u64>>, ProvisionError> {
        let part = part.start..part.end.min(self.bytes);
        if part.is_empty() {
            return Ok(Vec::new());
        }
        let inside = self.begins + part.start..self.begins + part.end;
        let mut ranges = self.image.changes(None, &inside).map_err(RbdError::from)?;
        for range in &mut ranges {
            *range = range.start - self.begins..range.end - self.begins;
        }
        Ok(ranges)
    }

    fn read(&self, at: u64, data: &mut [u8]) -> Result<(), ProvisionError> {
        let inside = before_end(data, at, self.bytes);
        if inside.is_empty() {
            return Ok(());
        }
        let read = self.image.read(self.begins + at, inside);
        Ok(read.map_err(RbdError::from)?)
    }
}

impl RbdStore {
    pub(super) fn snapshot_blocks(&self, what: &BlockRequest) -> Result<BlockPage, ProvisionError> {
        blocks::snapshot_blocks(what, |handle| self.image_data(handle, &what.secrets))
    }

    /// The image of a snapshot, and the handle of its volume.
    fn image_data(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<(ImageData, String), ProvisionError> {
        let found = self.snapshot(handle, secrets)?;
        let image = match found.open(OpenMode::ReadOnly) {
            Err(RbdError::Lost { handle, .. }) => return Err(ProvisionError::NoSnapshot(handle)),
            image => image?,
        };
        let shown = show_snapshot(&found)?;
        let encryption = Encryption::of_journal(&found.recorded()?.entry)?;
        let begins = match encryption.map(|encryption| encryption.what) {
            Some(EncryptionType::Block) => data_offset(&image)?,
            Some(EncryptionType::Files) | None => 0,
        };
        let data = ImageData {
            image,
            begins,
            bytes: shown.bytes.saturating_sub(begins),
        };
        Ok((data, shown.source))
    }
}
