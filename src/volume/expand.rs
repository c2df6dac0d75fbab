//! Growth of a volume in use: the source, the device, the file system.

use super::{
    Outcome, Usage,
    context::{Context, OnLane},
    error::Cause,
    mounted,
    record::Record,
    spec::{Expand, Use},
    stats,
};
use crate::{kernel::sysfs, size::exact};

/// `NodeExpandVolume`. Answers with the device's size in bytes.
pub(super) async fn expand(cx: Context<'_>, spec: &Expand) -> Result<Outcome, Cause> {
    let record = cx.staged()?;
    if is_staged_at(&record, spec) {
        refuse(&record, spec)?;
    }
    let spec = spec.clone();
    cx.run_on_lane(move |cx| on_lane(cx, &record, &spec)).await
}

/// Whether the record alone shows that the volume is at the path: nothing is mounted where
/// a raw block volume is staged.
fn is_staged_at(record: &Record, spec: &Expand) -> bool {
    record.usage == Use::Block
        && [&spec.staging_path, &spec.volume_path].contains(&&record.staging_path)
}

/// Refuses what the record alone shows to be impossible.
fn refuse(record: &Record, spec: &Expand) -> Result<(), Cause> {
    let is_block = record.usage == Use::Block;
    if spec.is_block.is_some_and(|asked| asked != is_block) {
        return Err(Cause::Invalid {
            field: "volume_capability",
            why: format!("the volume is staged as {}", record.usage),
        });
    }
    if record.inline.is_some() {
        return Err(Cause::precondition(
            "it is an inline volume, which keeps the size that its pod was made with",
        ));
    }
    if record.read_only {
        return Err(Cause::precondition(
            "it is staged read-only and cannot grow",
        ));
    }
    if spec.limit > 0 && spec.required > spec.limit {
        return Err(Cause::Invalid {
            field: "capacity_range",
            why: format!(
                "required_bytes {} is more than limit_bytes {}",
                spec.required, spec.limit
            ),
        });
    }
    Ok(())
}

fn on_lane(cx: OnLane<'_>, record: &Record, spec: &Expand) -> Result<Outcome, Cause> {
    if !is_staged_at(record, spec) {
        let look = || stats::usage(&cx.node.places, record, &spec.volume_path);
        let usage = cx.step("look", look)?;
        if let (false, Usage::Mounted { bytes, .. }) = (record.source.has_device(), usage) {
            // Its server limits it, if anything does: there is nothing to grow here.
            return Ok(Outcome::Size(spec.required.max(bytes.total)));
        }
    }
    refuse(record, spec)?;
    let device = record.attached_device()?;
    let now = sysfs::size_bytes(device.dev).map_err(Cause::io("read the device's size"))?;
    if spec.limit > 0 && now > spec.limit {
        return Err(Cause::Range(format!(
            "it has {}, more than limit_bytes {}, and volumes do not shrink",
            exact(now),
            spec.limit
        )));
    }
    let bound = cx.node.backends.bind(&record.source);
    let size = cx.step("resize", || bound.grow(&device, spec.required))?;
    if size < spec.required {
        return Err(Cause::NotGrown {
            size,
            required: spec.required,
        });
    }
    if let Use::Mount { .. } = record.usage {
        // Another driver may have mounted a file system that this one does not know.
        let fs = record.fs.ok_or_else(|| {
            let at = record.mount_point();
            Cause::precondition(format!(
                "the file system mounted at {} is of a type that this driver cannot grow",
                at.display()
            ))
        })?;
        // An encryption layer takes some of the source's size.
        let clear = sysfs::size_bytes(device.dev).map_err(Cause::io("read the device's size"))?;
        let grown = mounted::grow(cx, record, fs, clear)?;
        tracing::info!(
            volume_id = cx.volume.id,
            before = grown.before,
            after = grown.after,
            "file system grown"
        );
    }
    Ok(Outcome::Size(size))
}
