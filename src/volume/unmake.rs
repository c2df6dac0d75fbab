//! What a killed mkfs left, where the volume is given up before mkfs was made again.
//!
//! The note of it goes with the device (`device::notes`), and without the note it
//! would be taken for data, by every node and for ever. So it is blanked out, for as
//! long as the device and the note are this node's.

use std::sync::Arc;

use super::{
    Error, Node, prepare,
    record::Record,
    task::{Progress, Volume},
};
use crate::{
    device::{Device, blank},
    fs::probe::Content,
};

/// Blanks out what an interrupted mkfs of this volume left on the device.
pub async fn unmake(
    node: &Node,
    volume: &Volume,
    record: &Record,
    device: &Device,
    progress: &Progress,
) -> Result<(), Error> {
    let backends = Arc::clone(&node.backends);
    let (source, id, on) = (record.source.clone(), volume.id.clone(), device.clone());
    let is_ours = node
        .lane(volume, progress, "note", move || {
            let bound = backends.bind(&source);
            let mkfs = bound.mkfs()?;
            Ok(mkfs.goes_with_its_source()
                && source.is_behind(on.dev)
                && mkfs.was_interrupted(&id)?)
        })
        .await
        .map_err(|error| volume.device(error))?;
    if !is_ours {
        return Ok(());
    }
    match prepare::look(node, volume, device, progress).await? {
        Content::Blank | Content::Fs(_) => return Ok(()),
        Content::Foreign { .. } | Content::Unknown { .. } => {}
    }
    let on = device.clone();
    node.lane(volume, progress, "blank", move || blank(&on.node, on.dev))
        .await
        .map_err(volume.io(format!("blank out {}", device.node.display())))?;
    tracing::warn!(volume_id = volume.id, device = %device.node.display(), "a mkfs of this volume was interrupted; what it left is blanked out");
    Ok(())
}
