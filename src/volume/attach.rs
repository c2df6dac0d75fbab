//! Attaching a volume's source as a device.

use std::{collections::HashMap, path::PathBuf, sync::Arc};

use rustix::fd::AsFd as _;

use super::{
    already,
    context::OnLane,
    error::Cause,
    held::Volume,
    record::{Held, Record},
    spec::{Stage, Use},
};
use crate::{
    admission::{Gate, Gates},
    device::{AttachOptions, Attachment, Device, Purpose, Source},
    fs::FsType,
    mount::{path::SafePath, table},
};

/// The state of a volume before it is attached.
#[derive(Debug, Default)]
pub(super) struct Before {
    /// Its device, as [`known_device`] found it.
    pub device: Option<PathBuf>,
    /// Whether it is staged.
    pub is_staged: bool,
    /// Whether something is mounted where it is to be staged.
    pub is_mounted: bool,
}

/// Attaches the source; creates an inline volume's image first. A failure leaves nothing
/// behind but that image.
pub(super) async fn attach_source(
    cx: OnLane<'_>,
    spec: &Stage,
    purpose: Purpose,
    before: Before,
) -> Result<Attachment, Cause> {
    let gates = &cx.node.config.gates;
    let _admission = cx.admit(&gates.attach, &spec.source).await?;
    if before.device.is_none() {
        let later = later_gates(gates, spec, purpose);
        let refused = gates.refuse_full(&spec.source.domain(), &later);
        refused.map_err(Cause::Overloaded)?;
    }
    let backends = &cx.node.backends;
    if let Some(bytes) = spec.inline.as_ref().and_then(|inline| inline.image_bytes) {
        let image = backends.inline_image(&spec.source);
        let create = || image.create_inline(&cx.volume.id, bytes);
        already("create", cx.step("create", create)?);
    }
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
    let attach = || backends.bind(&spec.source).attach(&options);
    let (attached, done) = cx.step("attach", attach)?;
    already("attach", done);
    Ok(attached)
}

/// Those that the volume may wait at once it is attached.
fn later_gates<'a>(gates: &'a Gates, spec: &Stage, purpose: Purpose) -> Vec<&'a Gate> {
    let mut later = vec![&gates.probe];
    if spec.source.is_encrypted() {
        later.push(&gates.cryptsetup);
    }
    if purpose == Purpose::Format {
        later.push(&gates.mkfs);
    }
    if let Use::Mount { fs, .. } = &spec.usage {
        later.push(&gates.mount);
        if !spec.read_only {
            later.push(&gates.mkfs);
            if fs.is_none_or(|fs| fs == FsType::Ext4) {
                later.push(&gates.fsck);
            }
        }
    }
    later
}

/// The purpose for which a stage attaches the device.
pub(super) fn purpose_of(usage: &Use) -> Purpose {
    match usage {
        Use::Block => Purpose::Raw,
        Use::Mount { .. } => Purpose::Mount,
    }
}

/// The recorded device, while the volume's source still backs it: its number may have
/// gone to another device meanwhile, and a known raw device may be attached though it is
/// in use. Else, for a volume that is to be mounted, the device mounted at its staging
/// path: an agent may have died before it recorded that.
pub(super) fn known_device(
    place: &SafePath,
    is_mounted: bool,
    record: Option<&Record>,
    usage: &Use,
) -> Option<PathBuf> {
    let recorded = record.and_then(|record| {
        let device = record.device.as_ref()?;
        (record.source.is_still(device)).then(|| device.node.clone())
    });
    let mounted = || {
        if *usage == Use::Block || !is_mounted {
            return None;
        }
        let entry = table::covering(place.open().ok()?.as_fd()).ok()?;
        Some(PathBuf::from(entry.source))
    };
    recorded.or_else(mounted)
}

impl OnLane<'_> {
    /// Holds the record of a volume before it is attached. Fails if another volume of this
    /// node has the same source: of two at the same time, one gets it.
    pub fn claim(self, record: &Record) -> Result<(), Cause> {
        let volumes = self.node.volumes();
        if let Some(other) = self.other_user_of(&volumes, &record.source) {
            return Err(Cause::precondition(format!(
                "{} is in use on this node by volume {other}",
                record.source
            )));
        }
        self.volume.hold_record(record.clone());
        Ok(())
    }

    /// Another volume of this node with the same source: a second handle of one image
    /// would unstage it under the first.
    pub fn other_user(self, source: &Source) -> Option<String> {
        self.other_user_of(&self.node.volumes(), source)
    }

    /// Holds a volume that was found without a record. Fails with the other volume of this
    /// node that has the same source.
    pub fn hold_found(self, found: Held) -> Result<(), String> {
        // Of two volumes found at the same time, one gets the source.
        let volumes = self.node.volumes();
        if let Some(other) = self.other_user_of(&volumes, &found.record.source) {
            return Err(other);
        }
        self.volume.hold(Some(found));
        Ok(())
    }

    fn other_user_of(
        self,
        volumes: &HashMap<String, Arc<Volume>>,
        source: &Source,
    ) -> Option<String> {
        let other = volumes.values().find(|other| {
            let is_same = |held: &Held| held.record.source.is_same(source);
            source.has_device()
                && other.id != self.volume.id
                && other.held().as_ref().is_some_and(is_same)
        });
        other.map(|other| other.id.clone())
    }

    /// The devices that other volumes of this node have.
    pub fn devices_of_others(self) -> Vec<Device> {
        let volumes = self.node.volumes();
        let others = volumes.values().filter(|other| other.id != self.volume.id);
        let device = |other: &Arc<Volume>| other.held().as_ref()?.record.device.clone();
        others.filter_map(device).collect()
    }
}
