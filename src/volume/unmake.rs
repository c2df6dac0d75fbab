//! Blanking a partial format before its volume is detached.
//!
//! A format marker of this node (`device::format_markers`) is lost with the device, and
//! without it every node takes the partial format of a killed mkfs for data. So unstage
//! blanks it, if the mkfs was so recent that no other node can have written there yet.

use super::{context::OnLane, error::Cause, record::Record};
use crate::device::{Device, blank};

/// Blanks the device where it has a partial format of this volume.
pub(super) fn unmake(cx: OnLane<'_>, record: &Record, device: &Device) -> Result<(), Cause> {
    let source = &record.source;
    let bound = cx.node.backends.bind(source);
    if !bound.leaves_partial_format(&cx.volume.id)? {
        return Ok(());
    }
    let blank = || blank(&device.node, device.dev, || source.is_still(device));
    let blanked = cx
        .step("blank", blank)
        .map_err(Cause::io(format!("blank out {}", device.node.display())))?;
    if blanked {
        tracing::warn!(volume_id = cx.volume.id, device = %device.node.display(), "blanked the partial format of an interrupted mkfs");
    }
    Ok(())
}
