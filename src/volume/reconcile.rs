//! After a restart: what does this node hold?
//!
//! The records say what was set out, the mount table what came of it. Nothing
//! is undone here: a call that was under way is repeated by whoever made it,
//! and the repeat finishes or undoes. Only what nobody will ever ask for again
//! is cleared away: inline volumes whose pod is gone.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use super::{
    Error, Node, layout,
    record::{Held, Phase, Record, Target},
    spec::{Call, Use},
    task::{Progress, Volume},
    unstage::absent_is_none,
};
use crate::{
    capability::Mode,
    chain,
    device::{Device, sysfs},
    mount::{
        Look, Mounted,
        options::MountOptions,
        table::{self, Entry},
    },
    ring,
};

/// How long the start waits for the pools: one that does not answer must not
/// keep the node from serving the others.
const POOLS_ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Takes up every record of an earlier agent.
pub async fn reconcile(node: &Rc<Node>) -> io::Result<()> {
    release_stale_claims(node).await;
    let boot_id = node.backends.boot_id();
    let records = node.records.load(boot_id).await?;
    let mounts = table::list()?;
    for mut record in records {
        // An agent before this one may have left that open.
        record.source = node.backends.settled(&record.source);
        if record.boot_id != boot_id {
            // An inline volume that has outlived a reboot: its image is all
            // that is left of it.
            record.device = None;
            record.root_dev = None;
            record.phase = Phase::Unstaging;
        }
        let targets = record
            .device
            .as_ref()
            .map(|device| targets(&mounts, &record, device))
            .unwrap_or_default();
        tracing::info!(
            volume_id = record.volume_id,
            state = record.phase.as_str(),
            targets = targets.len(),
            "taken up"
        );
        let volume = node.volume(&record.volume_id);
        if let Some(device) = &record.device {
            node.backends
                .take_up(&record.source, device, &record.volume_id);
        }
        volume.hold(Some(Held { record, targets }));
        delete_if_orphaned(node, &volume);
    }
    take_over(node, &mounts).await;
    Ok(())
}

/// Takes up what another driver has staged: its pods go on, and kubelet stages
/// nothing again that it knows to be staged.
async fn take_over(node: &Rc<Node>, mounts: &[Entry]) {
    for entry in mounts {
        let is_device = Path::new(&entry.source).starts_with("/dev") || entry.fs_type == "devtmpfs";
        let (Some(id), Some(staging_path)) = (
            entry.mount_point.file_name().and_then(|name| name.to_str()),
            entry.mount_point.parent(),
        ) else {
            continue;
        };
        let is_dir = |path: &Path| {
            let place = node.staging(path).ok();
            place.is_some_and(|place| matches!(place.look(), Ok(Look::Dir)))
        };
        if !is_device || node.known(id).is_some() || !is_dir(staging_path) {
            continue;
        }
        if let Ok(Some(_)) = layout::read_note(node, staging_path) {
            let volume = node.volume(id);
            let progress = Progress::new(id, "take over");
            if let Err(error) = rebuild(node, &volume, staging_path, &progress).await {
                let error = chain(&error);
                tracing::error!(
                    volume_id = id,
                    error,
                    "another driver's volume is not taken up"
                );
            }
            node.forget_if_empty(id);
        }
    }
}

/// Before anything can be staged, so that no claim goes that a call just made.
async fn release_stale_claims(node: &Node) {
    let backends = Arc::clone(&node.backends);
    let released = node.lanes.run("", "release", move || {
        backends.images.release_stale_claims();
    });
    match ring::timer::timeout(POOLS_ANSWER_WITHIN, released).await {
        Ok(()) => {}
        Err(_) => {
            tracing::warn!("a pool does not answer; claims of an earlier boot may be left in it");
        }
    }
}

/// Nobody unpublishes an inline volume whose pod's directory is gone.
fn delete_if_orphaned(node: &Rc<Node>, volume: &Rc<Volume>) {
    let Some(target) = volume.record().and_then(|record| record.inline) else {
        return;
    };
    if matches!(absent_is_none(node.target(&target)), Ok(None))
        && node.live_target(volume).is_none()
    {
        tracing::info!(volume_id = volume.id, target = %target.display(), "its pod is gone, the inline volume goes");
        let (node, id) = (node.clone(), volume.id.clone());
        ring::spawn(async move {
            let deleted = node
                .submit(id.clone(), Call::Unpublish(target), Duration::MAX)
                .await;
            if let Err(error) = deleted {
                tracing::error!(
                    volume_id = id,
                    error = chain(&*error),
                    "an orphaned inline volume stays"
                );
            }
        });
    }
}

/// Where a device appears besides its staging path.
fn targets(mounts: &[Entry], record: &Record, device: &Device) -> BTreeMap<PathBuf, Target> {
    let staged_at = record.mount_point();
    mounts
        .iter()
        .filter(|entry| entry.mount_point != staged_at)
        .filter(|entry| match record.usage {
            Use::Mount { .. } => {
                (entry.dev == device.dev || Path::new(&entry.source) == device.node)
                    && entry.root == Path::new("/")
                    && !is_kubelets(&entry.mount_point, "volume-subpaths")
            }
            // devtmpfs' root is /dev.
            Use::Block => {
                entry.fs_type == "devtmpfs"
                    && entry.root.file_name() == device.node.file_name()
                    && (!is_kubelets(&entry.mount_point, "volumeDevices")
                        || is_kubelets(&entry.mount_point, "publish"))
            }
        })
        .map(|entry| {
            (
                entry.mount_point.clone(),
                Target {
                    read_only: entry.read_only,
                },
            )
        })
        .collect()
}

/// Whether the path has a directory of this name in it, in which kubelet keeps
/// bind mounts of its own.
fn is_kubelets(path: &Path, directory: &str) -> bool {
    path.iter().any(|part| part == directory)
}

/// What is mounted where the volume would be staged, and where that is.
fn mounted_at(
    node: &Node,
    volume: &Volume,
    staging_path: &Path,
) -> Result<Option<(PathBuf, Mounted)>, Error> {
    let below = layout::is_one_name(&volume.id).then(|| staging_path.join(&volume.id));
    for path in [Some(staging_path.to_owned()), below].into_iter().flatten() {
        let Some(place) = absent_is_none(node.staging(&path))? else {
            continue;
        };
        let look = place.look();
        let look = look.map_err(volume.io(format!("look at {}", path.display())))?;
        if let Look::Mount(mounted) = look {
            return Ok(Some((path, mounted)));
        }
    }
    Ok(None)
}

/// The record of a volume that is staged, though no record says so: by what is
/// mounted at its staging path, else by its handle.
pub async fn rebuild(
    node: &Rc<Node>,
    volume: &Volume,
    staging_path: &Path,
    progress: &Progress,
) -> Result<Option<Record>, Error> {
    let (path, mounted) = match mounted_at(node, volume, staging_path)? {
        Some((path, mounted)) => (path, Some(mounted)),
        None => (staging_path.to_owned(), None),
    };
    let backends = Arc::clone(&node.backends);
    let id = volume.id.clone();
    let mounts = table::list().map_err(volume.io("list the mounts"))?;
    let entry = mounts
        .iter()
        .rev()
        .find(|entry| mounted.is_some() && entry.mount_point == path);
    let behind = match mounted.and_then(|mounted| mounted.rdev) {
        Some(dev) => Some(sysfs::node_of(dev).map_err(volume.io("name what is mounted"))?),
        None => entry.map(|entry| PathBuf::from(&entry.source)),
    };
    // What is mounted at the staging path itself may hang.
    let left = if mounted.is_some() && path == staging_path {
        None
    } else {
        layout::read_note(node, staging_path)?
    };
    let found = node
        .lane(volume, progress, "find", move || {
            let found = match &behind {
                Some(node) => backends.find_behind(node, &id, left.as_deref())?,
                None => backends.find(&id)?,
            };
            match (found, behind, left) {
                // It may be mapped, or nothing may be left of it but the note.
                (None, None, Some(left)) => backends.find_noted(&left, &id).map(Some),
                (found, ..) => Ok(found.map(|found| (found.source, Some(found.device)))),
            }
        })
        .await
        .map_err(|error| volume.device(error))?;
    if let Some(other) = found
        .as_ref()
        .and_then(|(source, _)| node.other_user(volume, source))
    {
        return Err(volume.precondition(format!(
            "what is staged at {} is volume {other}",
            staging_path.display()
        )));
    }
    let Some((source, device)) = found else {
        return match mounted {
            None => Ok(None),
            Some(_) => Err(volume.precondition(format!(
                "what is mounted at {} is none of this node's volumes; unmount it by hand",
                path.display()
            ))),
        };
    };
    let record = Record {
        volume_id: volume.id.clone(),
        boot_id: node.backends.boot_id().to_owned(),
        phase: Phase::Staged,
        source,
        staging_path: staging_path.to_owned(),
        usage: match mounted {
            Some(Mounted { rdev: None, .. }) => Use::Mount {
                fs: None,
                options: MountOptions::default(),
            },
            _ => Use::Block,
        },
        fs: entry.and_then(|entry| entry.fs_type.parse().ok()),
        read_only: device.as_ref().is_some_and(|device| device.read_only),
        mode: Mode::SingleNodeWriter,
        root_dev: mounted.map(|mounted| mounted.dev),
        device,
        inline: None,
        found: true,
    };
    tracing::warn!(volume_id = volume.id, source = %record.source, "found without a record, taken up");
    let targets = (record.device.as_ref())
        .map(|device| targets(&mounts, &record, device))
        .unwrap_or_default();
    volume.hold(Some(Held {
        record: record.clone(),
        targets,
    }));
    Ok(Some(record))
}
