//! Making a file system by an operator's explicit request, on a device that is
//! not proven blank. The only place that destroys data.

use std::{path::PathBuf, rc::Rc, sync::Arc};

use super::{
    Error, Node, Outcome,
    attach::{Before, attach_source},
    prepare::{self, Preparing},
    record::Record,
    spec::{Format, Stage, Use},
    task::{Progress, Volume},
    unstage,
};
use crate::{
    capability::AccessMode,
    device::{Attachment, Fencing, Purpose},
};

/// `NodeAdmin.FormatVolume`: attaches, makes the file system, detaches.
pub async fn format(
    node: &Rc<Node>,
    volume: &Volume,
    spec: &Format,
    progress: &Progress,
) -> Result<Outcome, Error> {
    progress.backend(spec.source.backend());
    if let Some(record) = volume.record() {
        if !record.staging_path.as_os_str().is_empty() {
            return Err(volume.precondition(format!(
                "it is {}; unpublish and unstage it before it is formatted",
                record.describe()
            )));
        }
        // Left by a killed agent, in this very call.
        unstage::tear_down(node, volume, &record, progress).await?;
    }
    let (backends, source) = (Arc::clone(&node.backends), spec.source.clone());
    // By a file of the operator's, on a disk.
    let settle = move || backends.settled(&source);
    let attach = Stage {
        source: node.look(volume, progress, &spec.source, settle).await?,
        staging_path: PathBuf::new(),
        usage: Use::Block,
        read_only: false,
        mode: AccessMode::SingleNodeSingleWriter,
        mkfs_options: Vec::new(),
        group: None,
        inline: None,
        fencing: Fencing::Off,
        secrets: spec.secrets.clone(),
    };
    let mut record = Record::begin(&volume.id, node.backends.boot_id(), &attach);
    node.remember(volume, record.clone(), progress).await?;
    let (purpose, before) = (Purpose::Format, Before::default());
    let attaching = attach_source(node, volume, &attach, purpose, before, progress);
    let attached = match attaching.await {
        Ok(attached) => attached,
        // Whatever is attached, this call did not do it.
        Err(cause) => {
            unstage::forget(node, volume, &record, progress).await?;
            return Err(cause);
        }
    };
    record.device = Some(attached.device.clone());
    let was = steps(node, volume, spec, &attached, &record, progress).await;
    match (
        was,
        unstage::tear_down(node, volume, &record, progress).await,
    ) {
        (Ok(was), Ok(())) => Ok(Outcome::Was(was)),
        (Err(cause), Ok(())) => Err(cause),
        (Ok(_), Err(undo)) => Err(undo),
        (Err(cause), Err(undo)) => Err(Error::NotUndone {
            cause: Box::new(cause),
            undo: Box::new(undo),
        }),
    }
}

async fn steps(
    node: &Rc<Node>,
    volume: &Volume,
    spec: &Format,
    attached: &Attachment,
    record: &Record,
    progress: &Progress,
) -> Result<String, Error> {
    node.remember(volume, record.clone(), progress).await?;
    // Refuses where anybody has the device mounted or open exclusively.
    let (source, device) = (&record.source, &attached.device);
    let (content, guard) = prepare::look(node, volume, source, device, progress).await?;
    let was = prepare::describe(&content);
    let preparing = Preparing {
        node,
        volume,
        record,
        attached,
        guard: &guard,
        progress,
    };
    let made = preparing.make(spec.fs, &[]).await;
    guard.close(node, volume, progress).await;
    made?;
    tracing::warn!(
        volume_id = volume.id,
        was,
        now = spec.fs.as_str(),
        "formatted by request"
    );
    Ok(was)
}
