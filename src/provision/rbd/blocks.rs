//! The blocks of snapshots: the objects of their images.

use std::ops::Range;

use super::{
    super::{
        BlockPage, BlockRequest, ProvisionError,
        blocks::{self, SnapshotData, before_end},
    },
    RbdStore,
    error::RbdError,
    snapshots::show_snapshot,
};
use crate::{
    ceph::client::rbd::{Image, OpenMode},
    secret::Secrets,
};

/// The image of a snapshot.
struct ImageData {
    image: Image,
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
        Ok(self.image.changes(None, &part).map_err(RbdError::from)?)
    }

    fn read(&self, at: u64, data: &mut [u8]) -> Result<(), ProvisionError> {
        let inside = before_end(data, at, self.bytes);
        if inside.is_empty() {
            return Ok(());
        }
        Ok(self.image.read(at, inside).map_err(RbdError::from)?)
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
        let bytes = shown.bytes;
        Ok((ImageData { image, bytes }, shown.source))
    }
}
