//! Attaching a volume's source as a device.

use std::{path::PathBuf, rc::Rc, sync::Arc};

use rustix::fd::AsFd as _;

use super::{
    already,
    context::Context,
    error::Cause,
    record::Record,
    spec::{Stage, Use},
    task::Volume,
};
use crate::{
    device::{AttachOptions, Attachment, Device, Purpose, Source},
    mount::{PathKind, path::SafePath, table},
};

/// The state of a volume before it is attached.
#[derive(Debug, Default)]
pub(super) struct Before {
    /// Its device, as [`known_device`] found it.
    pub device: Option<PathBuf>,
    /// Whether it is staged.
    pub is_staged: bool,
}

/// Attaches the source; creates an inline volume's image first. A failure leaves nothing
/// behind but that image.
pub(super) async fn attach_source(
    cx: Context<'_>,
    spec: &Stage,
    purpose: Purpose,
    before: Before,
) -> Result<Attachment, Cause> {
    if let Some(other) = cx.other_user(&spec.source) {
        return Err(Cause::precondition(format!(
            "{} is in use on this node by volume {other}",
            spec.source
        )));
    }
    let place = cx.admit(&cx.node.config.gates.attach, &spec.source).await?;
    if let Some(inline) = &spec.inline {
        let backends = Arc::clone(&cx.node.backends);
        let (source, id, bytes) = (spec.source.clone(), cx.volume.id.clone(), inline.bytes);
        let done = cx
            .lane("create", move || {
                backends.inline_image(&source).create_inline(&id, bytes)
            })
            .await?;
        already("create", done);
    }
    let backends = Arc::clone(&cx.node.backends);
    let source = spec.source.clone();
    let options = AttachOptions {
        read_only: spec.read_only,
        shared: spec.mode.multi_node(),
        volume_id: cx.volume.id.clone(),
        purpose,
        known: before.device,
        staged: before.is_staged,
        fencing: spec.fencing,
        secrets: cx.secrets.clone(),
    };
    let (attached, done) = cx
        .lane("attach", move || {
            let _place = place;
            backends.bind(&source).attach(&options)
        })
        .await?;
    already("attach", done);
    Ok(attached)
}

/// The purpose for which a stage attaches the device.
pub(super) fn purpose_of(spec: &Stage) -> Purpose {
    match spec.usage {
        Use::Block => Purpose::Raw,
        Use::Mount { .. } => Purpose::Mount,
    }
}

/// The recorded device, while the volume's source still backs it: its number may have
/// gone to another device meanwhile, and a known raw device may be attached though it is
/// in use. Else, for a volume that is to be mounted, the device mounted at its staging
/// path: an agent may have died before it recorded that. On the volume's lane.
pub(super) fn known_device(
    place: &SafePath,
    record: Option<&Record>,
    usage: &Use,
) -> Option<PathBuf> {
    let noted = record.and_then(|record| {
        let device = record.device.as_ref()?;
        (record.source.is_still(device)).then(|| device.node.clone())
    });
    let mounted = || {
        if *usage == Use::Block {
            return None;
        }
        let opened = place.open().ok()?;
        matches!(PathKind::of(opened.as_fd()), Ok(PathKind::Mount(_)))
            .then(|| table::covering(opened.as_fd()).ok())
            .flatten()
            .map(|entry| PathBuf::from(entry.source))
    };
    noted.or_else(mounted)
}

impl Context<'_> {
    /// Another volume of this node with the same source: a second handle of one image
    /// would unstage it under the first.
    pub fn other_user(self, source: &Source) -> Option<String> {
        let volumes = self.node.volumes.borrow();
        let other = volumes.values().find(|other| {
            other.id != self.volume.id
                && other
                    .record()
                    .is_some_and(|record| record.source.is_same(source))
        });
        other.map(|other| other.id.clone())
    }

    /// The devices that other volumes of this node have.
    pub fn devices_of_others(self) -> Vec<Device> {
        let volumes = self.node.volumes.borrow();
        let others = volumes.values().filter(|other| other.id != self.volume.id);
        let device = |other: &Rc<Volume>| {
            let held = other.held.borrow();
            held.as_ref()?.record.device.clone()
        };
        others.filter_map(device).collect()
    }

    /// The sources of other volumes of this node, with their handles.
    pub fn sources_of_others(self) -> Vec<(String, Source)> {
        let volumes = self.node.volumes.borrow();
        let others = volumes.values().filter(|other| other.id != self.volume.id);
        let source = |other: &Rc<Volume>| {
            let held = other.held.borrow();
            Some((other.id.clone(), held.as_ref()?.record.source.clone()))
        };
        others.filter_map(source).collect()
    }
}
