//! What a killed mkfs left, where the volume is given up before mkfs was made again.
//!
//! Where the note of it is this node's (`device::notes`), it goes with the device, and
//! without it that would be taken for data, by every node and for ever. So it is
//! blanked out, if the mkfs was so recent that no other node can have written there yet.

use super::{
    Error, Node,
    record::Record,
    task::{Progress, Volume},
};
use crate::device::{Device, blank};

/// Blanks out what an interrupted mkfs of this volume left on the device.
pub async fn unmake(
    node: &Node,
    volume: &Volume,
    record: &Record,
    device: &Device,
    progress: &Progress,
) -> Result<(), Error> {
    // Most volumes have no such note: it is looked for on a tmpfs, without a lane.
    let bound = node.backends.bind(&record.source);
    let leaves = bound.leaves_partial_format(&volume.id);
    if !leaves.map_err(|error| volume.device(error))? {
        return Ok(());
    }
    let (source, on) = (record.source.clone(), device.clone());
    let blanked = node
        .lane(volume, progress, "blank", move || {
            blank(&on.node, on.dev, || source.is_still(&on))
        })
        .await
        .map_err(volume.io(format!("blank out {}", device.node.display())))?;
    if blanked {
        tracing::warn!(volume_id = volume.id, device = %device.node.display(), "a mkfs of this volume was interrupted; what it left is blanked out");
    }
    Ok(())
}
