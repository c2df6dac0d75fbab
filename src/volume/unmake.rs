//! Blanking a partial format before its volume is detached.
//!
//! A format marker of this node (`device::notes`) is lost with the device, and without it
//! every node takes a killed mkfs' partial format for data. So it is blanked, if the mkfs
//! was so recent that no other node can have written there yet.

use super::{context::Context, error::Cause, record::Record};
use crate::device::{Device, blank};

/// Blanks the device where it has a partial format of this volume.
pub(super) async fn unmake(cx: Context<'_>, record: &Record, device: &Device) -> Result<(), Cause> {
    // Most volumes have no such marker: it is looked for on a tmpfs, without a lane.
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
        tracing::warn!(volume_id = cx.volume.id, device = %device.node.display(), "blanked the partial format of an interrupted mkfs");
    }
    Ok(())
}
