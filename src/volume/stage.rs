//! Stage: from a source to a device, and for file systems to a mount.

use std::{rc::Rc, time::Duration};

use super::{
    Error, Node, Outcome, STAGING, already,
    attach::{Before, attach_source, known_device, purpose_of},
    guard::Guard,
    layout, mounted,
    prepare::{self, Prepared},
    publish::{self, appears_at},
    record::{Phase, Record},
    spec::{Stage, Use},
    task::{Progress, Volume},
    unstage::{self, forget},
};
use crate::{
    Done,
    device::{Attachment, Device, Fencing, ready, sysfs},
    fs::{FsType, grow, probe::FsInfo},
    kernel::Dev,
    mount::{
        Look,
        attach::{self, NewMount},
        options::MountOptions,
        path::{PathError, Place},
    },
    ring,
};

/// A device is ready within microseconds of its attach, or something is wrong.
const READY_WITHIN: Duration = Duration::from_secs(30);

/// `NodeStageVolume`.
pub async fn stage(
    node: &Rc<Node>,
    volume: &Volume,
    spec: &Stage,
    progress: &Progress,
) -> Result<Outcome, Error> {
    progress.backend(spec.source.backend());
    let place = layout::make_place(node, volume, spec)?;
    if let Some(record) = volume.record() {
        match record.phase {
            // How it was asked for, this call says.
            Phase::Staged if record.found && record.may_serve(spec) => {}
            Phase::Staged if !record.serves(spec) => {
                return Err(Error::Incompatible {
                    volume: volume.id.clone(),
                    have: record.describe(),
                    want: Record::begin(&volume.id, "", spec).describe(),
                });
            }
            Phase::Staged if is_still_there(&record, &place) => {
                publish::refuse_shut_down(volume, &place).map_err(kept)?;
                // Published anew, it has to be entered anew: while this node was cut
                // off, the controller may have taken it out.
                if let Some(device) = &record.device
                    && (spec.fencing == Fencing::On
                        || node.backends.bind(&record.source).wants_secrets(device))
                {
                    let before = Before {
                        device: known_device(&place, Some(device)),
                        is_staged: true,
                    };
                    attach_source(node, volume, spec, purpose_of(spec), before, progress)
                        .await
                        .map_err(kept)?;
                }
                already(volume, "stage", Done::Already);
                return Ok(Outcome::Done);
            }
            // Begun by a call with other arguments: that one is over.
            Phase::Staging | Phase::Unstaging if !record.serves(spec) => {
                unstage::tear_down(node, volume, &record, progress).await?;
            }
            _ => {}
        }
    } else if node.config.max_volumes > 0
        && node.count() > usize::try_from(node.config.max_volumes).unwrap_or(usize::MAX)
    {
        return Err(Error::Full {
            volume: volume.id.clone(),
            limit: node.config.max_volumes,
        });
    }
    let staging = Staging {
        node,
        volume,
        spec,
        place: &place,
        progress,
    };
    staging.bring_up().await?;
    Ok(Outcome::Done)
}

pub fn at_staging(source: PathError) -> Error {
    Error::Path {
        field: STAGING,
        source,
    }
}

/// Whether a staged volume is where its record says. Asks the kernel, not the
/// device: nothing here can hang.
fn is_still_there(record: &Record, place: &Place) -> bool {
    let Some(device) = &record.device else {
        return false;
    };
    match record.usage {
        Use::Block if !record.mounts() => record.source.is_still(device),
        _ => {
            matches!(place.look(), Ok(Look::Mount(mounted)) if appears_at(record, device, &mounted))
        }
    }
}

/// A volume that is being staged.
#[derive(Clone, Copy)]
struct Staging<'a> {
    node: &'a Rc<Node>,
    volume: &'a Volume,
    spec: &'a Stage,
    /// Where it is to be mounted.
    place: &'a Place,
    progress: &'a Progress,
}

impl Staging<'_> {
    /// All of stage that changes something; undone where it fails.
    async fn bring_up(&self) -> Result<(), Error> {
        let Self {
            node,
            volume,
            spec,
            place,
            progress,
        } = *self;
        let before = volume.record();
        let mut record = Record::begin(&volume.id, node.backends.boot_id(), spec);
        if let Some(before) = &before {
            record.device.clone_from(&before.device);
            record.root_dev = before.root_dev;
            record.fs = before.fs;
        }
        node.remember(volume, record.clone()).await?;
        let is_staged =
            |before: &Record| before.phase == Phase::Staged && is_still_there(before, place);
        let known = Before {
            device: known_device(place, record.device.as_ref()),
            is_staged: before.as_ref().is_some_and(is_staged),
        };
        let attached = attach_source(node, volume, spec, purpose_of(spec), known, progress).await;
        let cause = match attached {
            Ok(attached) => {
                record.device = Some(attached.device.clone());
                match self.steps(&mut record, &attached).await {
                    Ok(()) => return Ok(()),
                    Err(cause) => cause,
                }
            }
            // Whatever is attached, this call did not do it.
            Err(cause) if before.is_none() => {
                return match forget(node, volume, &record, progress).await {
                    Ok(()) => Err(cause),
                    Err(undo) => Err(not_undone(cause, undo)),
                };
            }
            Err(cause) => cause,
        };
        if node.live_target(volume).is_some() {
            // Pods use it as it is.
            return Err(kept(cause));
        }
        match unstage::tear_down(node, volume, &record, progress).await {
            Ok(()) => Err(cause),
            Err(undo) => Err(not_undone(cause, undo)),
        }
    }

    async fn steps(&self, record: &mut Record, attached: &Attachment) -> Result<(), Error> {
        let Self {
            node,
            volume,
            spec,
            place,
            progress,
        } = *self;
        let device = &attached.device;
        let ready = ready::ready(&node.uevents, &spec.source, device);
        progress
            .step("ready", ring::timer::timeout(READY_WITHIN, ready))
            .await
            .map_err(|elapsed| std::io::Error::new(std::io::ErrorKind::TimedOut, elapsed))
            .flatten()
            .map_err(volume.io(format!("wait for {}", device.node.display())))?;
        if record.mounts() {
            // Known before anything is mounted: whoever takes this up after a
            // crash must know which device to look for.
            node.remember(volume, record.clone()).await?;
        }
        if let Use::Mount { options, .. } = &spec.usage {
            if let Some((fs, root_dev)) = mounted::fs_of(volume, place, device)? {
                already(volume, "mount", Done::Already);
                (record.fs, record.root_dev) = (Some(fs), Some(root_dev));
                if !spec.read_only {
                    // Who mounted it may have died before it grew to its device.
                    self.grow_to_device(device, fs).await?;
                }
            } else {
                let (prepared, guard) =
                    prepare::prepare(node, volume, record, attached, &spec.mkfs_options, progress)
                        .await?;
                let root_dev = self.mount(options, device, &prepared, guard).await?;
                (record.fs, record.root_dev) = (Some(prepared.fs), Some(root_dev));
                let larger = |info: &FsInfo| {
                    sysfs::size_bytes(device.dev).map(|size| grow::needed(info, size))
                };
                let grows = prepared.found.as_ref().map_or(Ok(false), larger);
                if !spec.read_only && grows.map_err(volume.io("read the device's size"))? {
                    self.grow_to_device(device, prepared.fs).await?;
                }
            }
            if let Some(group) = spec.group.filter(|_| !spec.read_only) {
                mounted::own(node, volume, place, group, progress).await?;
            }
        } else if record.mounts() && !matches!(place.look(), Ok(Look::Mount(_))) {
            publish::bind_node(volume, device, place, spec.read_only, progress).await?;
        }
        layout::write_note(node, volume, record, progress).await?;
        record.phase = Phase::Staged;
        node.remember(volume, record.clone()).await
    }

    async fn mount(
        &self,
        options: &MountOptions,
        device: &Device,
        prepared: &Prepared,
        guard: Guard,
    ) -> Result<Dev, Error> {
        let Self {
            node,
            volume,
            spec,
            place,
            progress,
        } = *self;
        let gate = &node.config.gates.mount;
        let admitted = match self.make_room() {
            Ok(()) => node.admit(volume, progress, gate, &spec.source).await,
            Err(error) => Err(error),
        };
        let admission = match admitted {
            Ok(admission) => admission,
            Err(error) => {
                guard.close(node, volume, progress).await;
                return Err(error);
            }
        };
        let place = place.clone();
        let options = options.clone();
        let node_path = device.node.clone();
        let fs = prepared.fs;
        let read_only = spec.read_only;
        let extra = extra_options(prepared, read_only, &options);
        let held = guard.give();
        let mounted = node
            .lane(volume, progress, "mount", move || {
                let _admission = admission;
                held.check()?;
                let new = NewMount {
                    fs_type: fs.as_str(),
                    source: &node_path,
                    options: &options,
                    extra: &extra,
                    read_only,
                };
                Ok(attach::mount(&new, &place))
            })
            .await
            .map_err(|error| volume.device(error))?
            .map_err(|source| Error::Mount {
                volume: volume.id.clone(),
                source,
            })?;
        tracing::debug!(volume_id = volume.id, ?mounted, "mounted");
        Ok(mounted.dev)
    }

    /// Where it is to be mounted, nothing else may be.
    fn make_room(&self) -> Result<(), Error> {
        let Self { volume, place, .. } = *self;
        if matches!(place.look(), Ok(Look::Mount(_))) {
            return Err(volume.precondition(format!(
                "something else is mounted at the staging path {}; unmount it first",
                place.path().display()
            )));
        }
        let done = place.make_dir(0o750).map_err(at_staging)?;
        already(volume, "make the staging directory", done);
        Ok(())
    }

    /// A clone may be larger than the file system that it was cloned from.
    async fn grow_to_device(&self, device: &Device, fs: FsType) -> Result<(), Error> {
        let Self {
            node,
            volume,
            place,
            progress,
            ..
        } = *self;
        let size = sysfs::size_bytes(device.dev).map_err(volume.io("read the device's size"))?;
        match mounted::grow(node, volume, place, fs, size, progress).await {
            Err(Error::Grow {
                source: source @ grow::GrowError::NeedsCapability { .. },
                ..
            }) => {
                // Smaller than it could be, but all there.
                tracing::warn!(volume_id = volume.id, error = %source, "the file system stays smaller than its device");
                Ok(())
            }
            other => other.map(|_| ()),
        }
    }
}

fn kept(cause: Error) -> Error {
    Error::Kept(Box::new(cause))
}

fn not_undone(cause: Error, undo: Error) -> Error {
    Error::NotUndone {
        cause: Box::new(cause),
        undo: Box::new(undo),
    }
}

/// What each file system needs besides the caller's options. XFS refuses a
/// second mount of one UUID, so clones need `nouuid`; a read-only device cannot
/// replay its log. What ext4 does after an error is said by its superblock, which
/// whoever wrote the image may have told to halt the node; so it is always said
/// by the mount.
fn extra_options(prepared: &Prepared, read_only: bool, asked: &MountOptions) -> Vec<&'static str> {
    let replay = prepared
        .found
        .as_ref()
        .is_some_and(|info| info.needs_recovery);
    let mut extra = match (prepared.fs, read_only) {
        (FsType::Xfs, false) => vec!["nouuid"],
        (FsType::Xfs, true) => vec!["nouuid", "norecovery"],
        (FsType::Ext4, true) if replay => vec!["noload"],
        (FsType::Btrfs, true) if replay => vec!["rescue=nologreplay"],
        _ => Vec::new(),
    };
    if prepared.fs == FsType::Ext4 && !asked.fs_options().any(|option| option.key == "errors") {
        extra.push("errors=remount-ro");
    }
    extra
}
