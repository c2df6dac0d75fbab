//! What a killed mkfs left, where the volume is given up before mkfs was made again.
//!
//! Where the note of it is this node's (`device::notes`), it goes with the device, and
//! without it that would be taken for data, by every node and for ever. So it is
//! blanked out, if the mkfs was so recent that no other node can have written there yet.

use super::{context::Context, error::Cause, record::Record};
use crate::device::{Device, blank};

/// Blanks out what an interrupted mkfs of this volume left on the device.
pub async fn unmake(cx: Context<'_>, record: &Record, device: &Device) -> Result<(), Cause> {
    // Most volumes have no such note: it is looked for on a tmpfs, without a lane.
    let bound = cx.node.backends.bind(&record.source);
    if !bound.leaves_partial_format(&cx.volume.id)? {
        return Ok(());
    }
    let (source, on) = (record.source.clone(), device.clone());
    let blanked = cx
        .lane("blank", move || {
            blank(&on.node, on.dev, || source.is_still(&on))
        })
        .await
        .map_err(Cause::io(format!("blank out {}", device.node.display())))?;
    if blanked {
        tracing::warn!(volume_id = cx.volume.id, device = %device.node.display(), "a mkfs of this volume was interrupted; what it left is blanked out");
    }
    Ok(())
}
