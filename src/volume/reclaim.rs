//! Returning the space that a volume in use no longer needs: its file system discards what
//! is free.

use rustix::fd::AsFd as _;

use super::{
    Outcome,
    context::{Context, OnLane},
    error::Cause,
    record::Record,
    spec::{Reclaim, Use},
};
use crate::{fs::trim, kernel::sysfs, mount::PathKind};

/// csi-addons' `NodeReclaimSpace`. Answers with the space that the source took before and
/// after, where that is known.
pub(super) async fn reclaim(cx: Context<'_>, spec: &Reclaim) -> Result<Outcome, Cause> {
    let record = cx.staged()?;
    for path in [&spec.staging_path, &spec.volume_path] {
        cx.expect_at(path)?;
    }
    refuse(&record)?;
    cx.run_on_lane(move |cx| on_lane(cx, &record)).await
}

/// Refuses the volumes of which no file system of this node's alone is mounted for writing.
fn refuse(record: &Record) -> Result<(), Cause> {
    let why = if record.usage == Use::Block {
        "it is a raw block device, whose user alone knows which space is unused"
    } else if !record.source.has_device() {
        "its server has its file system, and returns the space that is unused"
    } else if record.read_only {
        "it is staged read-only"
    } else if record.mode.multi_node_writer() {
        "several nodes may write to it"
    } else {
        return Ok(());
    };
    Err(Cause::Unsupported(why.to_owned()))
}

fn on_lane(cx: OnLane<'_>, record: &Record) -> Result<Outcome, Cause> {
    let device = record.attached_device()?;
    let mount_point = record.mount_point();
    let failed = || Cause::io(format!("look at {}", mount_point.display()));
    let root = cx.step("look", || {
        let place = cx.node.places.staging(&mount_point)?;
        let root = place.open().map_err(failed())?;
        match PathKind::of(root.as_fd()).map_err(failed())? {
            PathKind::Mount(mounted) if record.appears_at(&mounted) => Ok(root),
            _ => Err(Cause::NotFound(format!(
                "it is not what is mounted at {}",
                mount_point.display()
            ))),
        }
    })?;
    let bound = cx.node.backends.bind(&record.source);
    let allocated = || cx.step("look", || bound.allocated_bytes());
    let bytes = sysfs::size_bytes(device.dev).map_err(Cause::io("read the device's size"))?;
    let before = allocated();
    let parts = trim::parts(record.fs, bytes);
    let mut free = 0;
    for start in &parts {
        let trim = || trim::trim_part(root.as_fd(), *start, parts.len() == 1);
        free += cx.step("trim", trim)?;
    }
    let after = allocated();
    let volume_id = &cx.volume.id;
    tracing::info!(volume_id, free, before, after, "unused space returned");
    Ok(Outcome::Reclaimed { before, after })
}
