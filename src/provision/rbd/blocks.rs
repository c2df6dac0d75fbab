//! The blocks of snapshots: the objects of their images.

use std::ops::Range;

use super::{
    super::{
        BlockPage, BlockRequest, ProvisionError,
        blocks::{SnapshotData, page},
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
    /// The handle of its volume.
    source: String,
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
        let inside = self.bytes.saturating_sub(at);
        let inside = usize::try_from(inside).map_or(data.len(), |inside| inside.min(data.len()));
        let (inside, beyond) = data.split_at_mut(inside);
        beyond.fill(0);
        if inside.is_empty() {
            return Ok(());
        }
        Ok(self.image.read(at, inside).map_err(RbdError::from)?)
    }
}

impl RbdStore {
    pub(super) fn snapshot_blocks(&self, what: &BlockRequest) -> Result<BlockPage, ProvisionError> {
        let target = self.image_data(&what.snapshot, &what.secrets)?;
        let Some(handle) = &what.base else {
            return page(&target, None, what);
        };
        let base = self.image_data(handle, &what.secrets)?;
        if base.source != target.source {
            let (base, target) = (handle.clone(), what.snapshot.clone());
            return Err(ProvisionError::OtherSource { base, target });
        }
        page(&target, Some(&base), what)
    }

    fn image_data(&self, handle: &str, secrets: &Secrets) -> Result<ImageData, ProvisionError> {
        let found = self.snapshot(handle, secrets)?;
        let image = match found.open(OpenMode::ReadOnly) {
            Err(RbdError::Lost { handle, .. }) => return Err(ProvisionError::NoSnapshot(handle)),
            image => image?,
        };
        let shown = show_snapshot(&found)?;
        Ok(ImageData {
            image,
            bytes: shown.bytes,
            source: shown.source,
        })
    }
}
