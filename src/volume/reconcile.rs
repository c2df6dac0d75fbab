//! After a restart: what does this node hold?
//!
//! The records say what was set out, the mount table what came of it. Nothing
//! is undone here: a call that was under way is repeated by whoever made it,
//! and the repeat finishes or undoes. Only what nobody will ever ask for again
//! is cleared away: inline volumes whose pod is gone.

use std::{collections::BTreeMap, io, path::Path, rc::Rc, sync::Arc, time::Duration};

use super::{
    Error, Node,
    record::{Held, Phase, Record, Target},
    spec::{Call, Use},
    task::{Progress, Volume},
    unstage::absent_is_none,
};
use crate::{
    capability::Mode,
    chain,
    device::Device,
    mount::{
        Look,
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
    Ok(())
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
fn targets(
    mounts: &[Entry],
    record: &Record,
    device: &Device,
) -> BTreeMap<std::path::PathBuf, Target> {
    mounts
        .iter()
        .filter(|entry| entry.mount_point != record.staging_path)
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

/// The record of a volume that is staged, though no record says so: by what is
/// mounted at its staging path, else by its handle.
pub async fn rebuild(
    node: &Rc<Node>,
    volume: &Volume,
    staging_path: &Path,
    progress: &Progress,
) -> Result<Option<Record>, Error> {
    let place = absent_is_none(node.staging(staging_path))?;
    let look = match &place {
        Some(place) => place
            .look()
            .map_err(volume.io(format!("look at {}", staging_path.display())))?,
        None => Look::Absent,
    };
    let backends = Arc::clone(&node.backends);
    let id = volume.id.clone();
    let mounted = match look {
        Look::Mount(mounted) => Some(mounted),
        _ => None,
    };
    let mounts = table::list().map_err(volume.io("list the mounts"))?;
    let source = mounts
        .iter()
        .rev()
        .find(|entry| mounted.is_some() && entry.mount_point == staging_path)
        .map(|entry| entry.source.clone());
    let found = node
        .lane(volume, progress, "find", move || match source {
            Some(source) => backends.find_behind(Path::new(&source)),
            None => backends.find(&id),
        })
        .await
        .map_err(|error| volume.device(error))?;
    if let Some(other) = found
        .as_ref()
        .and_then(|found| node.other_user(volume, &found.source))
    {
        return Err(volume.precondition(format!(
            "what is staged at {} is volume {other}",
            staging_path.display()
        )));
    }
    let Some(found) = found else {
        return match mounted {
            None => Ok(None),
            Some(_) => Err(volume.precondition(format!(
                "what is mounted at {} is none of this node's volumes; unmount it by hand",
                staging_path.display()
            ))),
        };
    };
    let record = Record {
        volume_id: volume.id.clone(),
        boot_id: node.backends.boot_id().to_owned(),
        phase: Phase::Staged,
        source: found.source,
        staging_path: staging_path.to_owned(),
        usage: match mounted {
            Some(_) => Use::Mount {
                fs: None,
                options: MountOptions::default(),
            },
            None => Use::Block,
        },
        fs: None,
        read_only: found.device.read_only,
        mode: Mode::SingleNodeWriter,
        root_dev: mounted.map(|mounted| mounted.dev),
        device: Some(found.device.clone()),
        inline: None,
    };
    tracing::warn!(volume_id = volume.id, device = %found.device.node.display(), "found without a record, taken up");
    let targets = targets(&mounts, &record, &found.device);
    volume.hold(Some(Held {
        record: record.clone(),
        targets,
    }));
    Ok(Some(record))
}
