//! Making a file system by an operator's explicit request, on a device that is
//! not proven blank. The only place that destroys data.

use std::path::PathBuf;

use super::{
    Outcome,
    attach::{Before, attach_source},
    context::{Context, OnLane},
    error::Cause,
    prepare::{self, Preparing},
    record::Record,
    spec::{Format, RootAccess, Stage, Use},
    unstage,
};
use crate::{
    admission::Permit,
    capability::AccessMode,
    device::{Attachment, Fencing, Purpose},
};

/// `NodeAdmin.FormatVolume`: attaches, makes the file system, detaches.
pub(super) async fn format(cx: Context<'_>, spec: &Format) -> Result<Outcome, Cause> {
    cx.progress.backend(spec.source.backend());
    if let Some(record) = cx.volume.record()
        && !record.staging_path.as_os_str().is_empty()
    {
        return Err(Cause::precondition(format!(
            "it is {}; unpublish and unstage it before it is formatted",
            record.describe()
        )));
    }
    let (spec, looking) = (spec.clone(), cx.admit_look(&spec.source).await?);
    cx.on_lane(|cx| Box::pin(on_lane(cx, spec, looking))).await
}

async fn on_lane(cx: OnLane<'_>, spec: Format, looking: Permit) -> Result<Outcome, Cause> {
    // Reads a file of the operator's, which is on a disk.
    let source = cx.step("look", || cx.node.backends.canonical(&spec.source));
    drop(looking);
    if let Some(record) = cx.volume.record() {
        // An agent that was killed in this call left it.
        unstage::tear_down(cx, &record).await?;
    }
    let attach = Stage {
        name: String::new(),
        source,
        staging_path: PathBuf::new(),
        usage: Use::Block,
        read_only: false,
        mode: AccessMode::SingleNodeSingleWriter,
        mkfs_options: Vec::new(),
        group: None,
        root: RootAccess::default(),
        inline: None,
        fencing: Fencing::Off,
    };
    let mut record = Record::begin(&cx.volume.id, cx.node.backends.boot_id(), &attach);
    cx.claim(&record)?;
    if let Err(cause) = cx.remember(&record).await {
        cx.volume.hold(None);
        return Err(cause);
    }
    let (purpose, before) = (Purpose::Format, Before::default());
    let attaching = attach_source(cx, &attach, purpose, before);
    let attached = match attaching.await {
        Ok(attached) => attached,
        // If the source is attached, this call did not attach it.
        Err(cause) => {
            return match unstage::forget(cx, &record).await {
                Ok(()) => Err(cause),
                Err(undo) => Err(cause.not_undone(undo)),
            };
        }
    };
    record.device = Some(attached.device.clone());
    let was = steps(cx, &spec, &attached, &record).await;
    match (was, unstage::tear_down(cx, &record).await) {
        (Ok(was), Ok(())) => Ok(Outcome::Was(was)),
        (Err(cause), Ok(())) => Err(cause),
        (Ok(_), Err(undo)) => Err(Cause::NotDetached(Box::new(undo))),
        (Err(cause), Err(undo)) => Err(cause.not_undone(undo)),
    }
}

async fn steps(
    cx: OnLane<'_>,
    spec: &Format,
    attached: &Attachment,
    record: &Record,
) -> Result<String, Cause> {
    cx.remember(record).await?;
    // Refuses a device that is mounted or open exclusively.
    let (source, device) = (&record.source, &attached.device);
    let (content, held) = prepare::look(cx, source, device, None).await?;
    let was = prepare::describe(&content);
    let preparing = Preparing {
        cx,
        record,
        attached,
        held: &held,
    };
    preparing.make(spec.fs, &[]).await?;
    tracing::warn!(
        volume_id = cx.volume.id,
        was,
        now = spec.fs.as_str(),
        "formatted by request"
    );
    Ok(was)
}
