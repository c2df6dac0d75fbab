//! After a restart: the recovery of the volumes that this node holds.
//!
//! The records say what an agent set out to do, the mount table how far it came. Nothing
//! is undone here: its caller repeats a call that was under way, and the repeat finishes
//! or undoes. Only inline volumes whose pod is gone are deleted, since no caller will ask
//! for that.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ffi::OsStr,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, stream};
use tokio::{sync::Notify, time::error::Elapsed};

use super::{
    Node, VolumeError,
    appearance::is_node_of,
    claims,
    context::{Context, OnLane},
    error::Cause,
    layout,
    places::{Places, absent_is_none, is_kubelets},
    progress::Progress,
    record::{Held, Phase, Record, Target},
    remote,
    spec::{Call, Use},
};
use crate::{
    capability::AccessMode,
    device::{Backends, Backing, Device, DeviceError, Owner, Source},
    error_chain, hold_point,
    kernel::{Dev, sysfs},
    mount::{
        Mounted, PathKind,
        options::MountOptions,
        table::{self, MountEntry},
    },
    ring,
    secret::Secrets,
};

/// How many volumes of another driver are examined at once.
const AT_ONCE: usize = 8;

/// Between two tries to read the records of inline volumes, and between the first two to
/// delete one.
const RETRY: Duration = Duration::from_secs(5);

/// Between two tries to delete an inline volume, at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// How long the state directory may take before it is reported.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);

/// Volumes of an earlier agent, or of another driver, that are not recovered yet: no call
/// may act on them.
#[derive(Debug, Default)]
pub struct Unrecovered {
    /// The records are read, but for those of inline volumes.
    are_read: AtomicBool,
    /// The records of inline volumes, which are on another disk.
    inline: Mutex<InlineRecords>,
    /// Volumes without a record, which may be another driver's.
    volumes: Mutex<HashSet<String>>,
    changed: Notify,
}

/// How far the reading of inline volumes' records has come.
#[derive(Debug, Default)]
enum InlineRecords {
    /// The others come first.
    #[default]
    NotBegun,
    /// Since this time.
    Reading(Instant),
    /// The last try failed; there will be another.
    Failed(String),
    /// The volumes are recovered.
    Recovered,
}

impl Unrecovered {
    /// Nothing can panic under this lock.
    fn volumes(&self) -> MutexGuard<'_, HashSet<String>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing can panic under this lock.
    fn inline(&self) -> MutexGuard<'_, InlineRecords> {
        self.inline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_inline(&self) -> bool {
        !matches!(*self.inline(), InlineRecords::Recovered)
    }

    fn remove(&self, volume_id: &str) {
        self.volumes().remove(volume_id);
        self.changed.notify_waiters();
    }

    pub fn has(&self, volume_id: &str) -> bool {
        !self.are_read.load(Relaxed) || self.volumes().contains(volume_id)
    }
}

impl Node {
    /// Waits until the volume, if there is one, is recovered.
    pub async fn recovered(&self, volume_id: &str, deadline: Duration) -> Result<(), VolumeError> {
        let waits = || self.unrecovered.has(volume_id);
        let waited = self.while_unrecovered(waits, deadline).await;
        waited.map_err(|_| Cause::NotRecovered.of(volume_id))
    }

    /// The same for a call that may be on an inline volume: it is one if no other has the
    /// handle.
    pub async fn inline_recovered(
        &self,
        volume_id: &str,
        deadline: Duration,
    ) -> Result<(), VolumeError> {
        let is_known = || {
            let volume = self.known(volume_id);
            volume.is_some_and(|volume| volume.record().is_some())
        };
        let waits = || self.unrecovered.has_inline() && !is_known();
        let waited = self.while_unrecovered(waits, deadline).await;
        waited.map_err(|_| {
            let cause = self.unread_records().map(Cause::RecordsUnread);
            cause.unwrap_or(Cause::NotRecovered).of(volume_id)
        })
    }

    async fn while_unrecovered(
        &self,
        waits: impl Fn() -> bool,
        deadline: Duration,
    ) -> Result<(), Elapsed> {
        let recovered = async {
            while waits() {
                // Changed on this thread alone: not before this is polled.
                self.unrecovered.changed.notified().await;
            }
        };
        tokio::time::timeout(deadline, recovered).await
    }

    /// Why the records of inline volumes are not read, if that takes too long.
    pub fn unread_records(&self) -> Option<String> {
        let state = self.unrecovered.inline();
        let why = match &*state {
            InlineRecords::NotBegun | InlineRecords::Recovered => return None,
            InlineRecords::Reading(since) if since.elapsed() < ANSWERS_WITHIN => return None,
            InlineRecords::Reading(_) => "it does not answer",
            InlineRecords::Failed(error) => error,
        };
        let dir = self.records.inline_dir().display();
        Some(format!(
            "cannot read the records of inline volumes in {dir}: {why}"
        ))
    }

    /// Recovers the volumes of an earlier agent, by its records, and those that another
    /// driver has staged. The node serves meanwhile; calls on volumes wait.
    pub async fn recover(self: Arc<Self>) -> io::Result<()> {
        release_stale_claims(&self);
        let (backends, records) = (Arc::clone(&self.backends), self.records.clone());
        let places = self.places.clone();
        let read = self.lanes.run("", "recover", move || {
            hold_point("recover", "records");
            let records = records.load(backends.boot_id())?;
            let mounts = table::list()?;
            let inventory = Inventory::of(records, &mounts, &backends, &places);
            let others = of_others(&mounts, &inventory.volumes, &places);
            Ok::<_, io::Error>((inventory, others))
        });
        let (inventory, others) = read.await?;
        hold(&self, inventory.volumes).await;
        *self.unrecovered.volumes() = others.iter().map(|(id, _)| id.clone()).collect();
        self.unrecovered.are_read.store(true, Relaxed);
        self.unrecovered.changed.notify_waiters();
        ring::spawn(recover_inline(Arc::clone(&self)));
        for (id, target) in inventory.orphans {
            delete_orphan(&self, id, target);
        }
        claims::keep(&self);
        take_over(&self, others).await;
        Ok(())
    }
}

/// Recovers the inline volumes of an earlier agent. Their records are on a disk that may
/// hang or fail; other volumes do not wait for it.
async fn recover_inline(node: Arc<Node>) {
    *node.unrecovered.inline() = InlineRecords::Reading(Instant::now());
    let inventory = loop {
        let (backends, records) = (Arc::clone(&node.backends), node.records.clone());
        let places = node.places.clone();
        let read = node.lanes.run("", "recover", move || {
            hold_point("recover", "inline");
            let records = records.load_inline()?;
            let mounts = table::list()?;
            Ok(Inventory::of(records, &mounts, &backends, &places))
        });
        let error: io::Error = match read.await {
            Ok(inventory) => break inventory,
            Err(error) => error,
        };
        let dir = node.records.inline_dir().display();
        tracing::error!(%dir, %error, "cannot read the records of inline volumes; calls on them wait");
        *node.unrecovered.inline() = InlineRecords::Failed(error.to_string());
        tokio::time::sleep(RETRY).await;
    };
    hold(&node, inventory.volumes).await;
    *node.unrecovered.inline() = InlineRecords::Recovered;
    node.unrecovered.changed.notify_waiters();
    for (id, target) in inventory.orphans {
        delete_orphan(&node, id, target);
    }
}

/// Holds volumes that were found by their records.
async fn hold(node: &Arc<Node>, volumes: Vec<(Record, BTreeMap<PathBuf, Target>)>) {
    for (record, targets) in volumes {
        tracing::info!(
            volume_id = record.volume_id,
            state = record.phase.as_str(),
            targets = targets.len(),
            "recovered from its record"
        );
        let volume = node.volume(&record.volume_id);
        volume.hold(Some(Held { record, targets }));
        // Other calls are answered meanwhile.
        tokio::task::yield_now().await;
    }
}

/// The volumes that an earlier agent left.
struct Inventory {
    volumes: Vec<(Record, BTreeMap<PathBuf, Target>)>,
    /// Inline volumes whose pod is gone, and where they were published.
    orphans: Vec<(String, PathBuf)>,
}

impl Inventory {
    /// By the records and the mount table.
    fn of(
        records: Vec<Record>,
        mounts: &[MountEntry],
        backends: &Backends,
        places: &Places,
    ) -> Self {
        let boot_id = backends.boot_id();
        let index = Index::of(mounts);
        // Of several volumes that are the same directory.
        let is_shared = |record: &Record| {
            let is_same = |other: &&Record| other.source.is_same(&record.source);
            records.iter().filter(is_same).count() > 1
        };
        let shared = records.iter().filter(|it| is_shared(it));
        let shared: HashSet<_> = shared.map(|record| record.volume_id.clone()).collect();
        let lost = records
            .iter()
            .filter(|it| lost_device(it, &records, &index));
        let lost: HashSet<_> = lost.map(|record| record.volume_id.clone()).collect();
        let mut inventory = Self {
            volumes: Vec::with_capacity(records.len()),
            orphans: Vec::new(),
        };
        for mut record in records {
            // An earlier agent may not have completed it.
            record.source = backends.canonical(&record.source);
            if record.boot_id != boot_id {
                // An inline volume that has outlived a reboot: its image is all
                // that is left of it.
                record.device = None;
                (record.root_dev, record.root_ino) = (None, None);
                record.phase = Phase::Unstaging;
            }
            let targets = match (&record.device, record.root_dev) {
                (Some(_), _) if lost.contains(&record.volume_id) => BTreeMap::new(),
                (Some(device), _) => targets(index.of_device(device), &record, device, places),
                (None, Some(dev)) if record.inline.is_some() => {
                    let target = record.inline.as_ref();
                    let at_target = |entry: &&MountEntry| target == Some(&entry.mount_point);
                    remote_targets(index.of_dev(dev).filter(at_target), &record, places)
                }
                (None, Some(dev)) if shared.contains(&record.volume_id) => {
                    let peers = peers_of_staged(&index, dev, &record);
                    remote_targets(peers, &record, places)
                }
                (None, Some(dev)) => remote_targets(index.of_dev(dev), &record, places),
                (None, None) => BTreeMap::new(),
            };
            if let Some(device) = &record.device {
                backends.recover(&record.source, device, &record.volume_id);
            }
            if let Some(target) = &record.inline
                && targets.is_empty()
                && matches!(absent_is_none(places.target(target)), Ok(None))
            {
                inventory
                    .orphans
                    .push((record.volume_id.clone(), target.clone()));
            }
            inventory.volumes.push((record, targets));
        }
        inventory
    }
}

/// Mounts of devices that no record knows: which volumes they would be, and where those
/// would be staged.
fn of_others(
    mounts: &[MountEntry],
    volumes: &[(Record, BTreeMap<PathBuf, Target>)],
    places: &Places,
) -> Vec<(String, PathBuf)> {
    let records = || volumes.iter().map(|(record, _)| record);
    let devices = records().flat_map(|record| &record.device);
    let known: HashSet<_> = devices.map(|device| device.dev).collect();
    let ids: HashSet<_> = records().map(|record| &record.volume_id[..]).collect();
    mounts
        .iter()
        .filter(|entry| !known.contains(&entry.dev))
        .filter_map(|entry| unknown(entry, places))
        .filter(|(id, _)| !ids.contains(&id[..]))
        .collect()
}

/// Which volume is mounted here and where it is staged, if another driver has staged
/// it: below the staging path, under its handle.
pub(super) fn unknown(entry: &MountEntry, places: &Places) -> Option<(String, PathBuf)> {
    let is_device = Path::new(&entry.source).starts_with("/dev") || entry.fs_type == "devtmpfs";
    let id = entry.mount_point.file_name()?.to_str()?;
    let staging_path = entry.mount_point.parent()?;
    // The directory may be on a disk that does not answer: it is opened later.
    let is_allowed = places.has(staging_path);
    (is_device && is_allowed).then(|| (id.to_owned(), staging_path.to_owned()))
}

/// Mounts by device number and by name.
struct Index<'a> {
    by_dev: HashMap<Dev, Vec<&'a MountEntry>>,
    /// By the last name of the source, and of what devtmpfs shows.
    by_name: HashMap<&'a OsStr, Vec<&'a MountEntry>>,
}

impl<'a> Index<'a> {
    fn of(mounts: &'a [MountEntry]) -> Self {
        let mut index = Self {
            by_dev: HashMap::new(),
            by_name: HashMap::new(),
        };
        for entry in mounts {
            index.by_dev.entry(entry.dev).or_default().push(entry);
            let source = Path::new(&entry.source).file_name();
            for name in source.into_iter().chain(entry.root.file_name()) {
                index.by_name.entry(name).or_default().push(entry);
            }
        }
        index
    }

    /// Every mount of a superblock.
    fn of_dev(&self, dev: Dev) -> impl Iterator<Item = &'a MountEntry> {
        self.by_dev.get(&dev).into_iter().flatten().copied()
    }

    /// Every mount that may be one of the device; some twice.
    fn of_device(&self, device: &Device) -> impl Iterator<Item = &'a MountEntry> {
        let by_dev = self.by_dev.get(&device.dev);
        let name = device.node.file_name();
        let by_name = name.and_then(|name| self.by_name.get(name));
        by_dev.into_iter().chain(by_name).flatten().copied()
    }
}

/// Recovers the volumes that another driver has staged: their pods keep running, and
/// kubelet stages no volume again that it knows as staged.
async fn take_over(node: &Arc<Node>, others: Vec<(String, PathBuf)>) {
    let one = |(id, staging_path): (String, PathBuf)| async move {
        let (places, at) = (node.places.clone(), staging_path.clone());
        let look = move || has_stage_file(&places, &at);
        let looked = node.lanes.run(&id, "find", look).await;
        let has_stage_file = looked.unwrap_or_else(|cause| {
            let error = error_chain(&cause.of(&id));
            tracing::error!(
                volume_id = id,
                error,
                "cannot look for another driver's stage file; the volume is not recovered"
            );
            false
        });
        if has_stage_file && node.known(&id).is_none() {
            let volume = node.volume(&id);
            let progress = &Progress::new(&id, "take over");
            let cx = Context {
                node,
                volume: &volume,
                progress,
                secrets: &Secrets::default(),
            };
            let rebuilt = cx.run_on_lane(move |cx| rebuild(cx, &staging_path));
            if let Err(cause) = rebuilt.await {
                let error = error_chain(&cause.of(&id));
                tracing::error!(
                    volume_id = id,
                    error,
                    "cannot recover another driver's volume"
                );
            }
            node.forget_if_empty(&id);
        }
        node.unrecovered.remove(&id);
    };
    stream::iter(others).for_each_concurrent(AT_ONCE, one).await;
}

/// Whether another driver's stage file is in the directory. Blocks.
pub(super) fn has_stage_file(places: &Places, staging_path: &Path) -> Result<bool, Cause> {
    let Some(place) = absent_is_none(places.staging(staging_path))? else {
        return Ok(false);
    };
    let look = place.kind();
    let kind = look.map_err(Cause::io(format!("look at {}", staging_path.display())))?;
    Ok(matches!(kind, PathKind::Dir) && layout::read_stage_file(places, staging_path)?.is_some())
}

/// Releases the claims of earlier boots; a call's new claim stays, as it is of this boot.
fn release_stale_claims(node: &Node) {
    for pool in node.backends.pools() {
        let (backends, pool) = (Arc::clone(&node.backends), pool.clone());
        drop(node.lanes.run("", "release", move || {
            backends.release_stale_claims(&pool);
        }));
    }
}

/// Deletes an inline volume whose pod is gone, since no caller will unpublish it. Its pool
/// may be away: then it is deleted once the pool is back.
fn delete_orphan(node: &Arc<Node>, id: String, target: PathBuf) {
    tracing::info!(volume_id = id, target = %target.display(), "deleting orphaned inline volume");
    let node = node.clone();
    ring::spawn(async move {
        let mut pause = RETRY;
        loop {
            let call = Call::DeleteOrphan(target.clone());
            let deleted = node
                .clone()
                .submit(id.clone(), call.into(), Duration::MAX)
                .await;
            let Err(error) = deleted else { return };
            tracing::error!(
                volume_id = id,
                error = error_chain(&*error),
                "cannot delete orphaned inline volume; trying again"
            );
            tokio::time::sleep(pause).await;
            // Each try syncs the volume's record, and its lines are in the log.
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    });
}

/// Whether the device of the record was detached and its number went to another device, as
/// after a kill between the detach and the end of the unstage. The mounts that show that
/// number are then another volume's.
///
/// A mount keeps its device, so a volume that is mounted where it was staged has its own.
fn lost_device(record: &Record, records: &[Record], index: &Index<'_>) -> bool {
    let Some(device) = &record.device else {
        return false;
    };
    let staged_at = record.mount_point();
    let is_staged = || {
        index
            .of_device(device)
            .any(|it| it.mount_point == staged_at)
    };
    if (record.mounts() && is_staged()) || record.source.is_still(device) {
        return false;
    }
    let is_its = |other: &Record| {
        let its = other.device.as_ref().filter(|its| its.dev == device.dev);
        its.is_some_and(|its| other.source.is_still(its))
    };
    // Its own image may have been attached anew.
    let is_reused = device.number_is_reused() && !record.source.is_behind(device.dev);
    is_reused || records.iter().any(is_its)
}

/// The mounts of a device other than at its staging path.
fn targets<'a>(
    mounts: impl Iterator<Item = &'a MountEntry>,
    record: &Record,
    device: &Device,
    places: &Places,
) -> BTreeMap<PathBuf, Target> {
    let staged_at = record.mount_point();
    mounts
        .filter(|entry| entry.mount_point != staged_at)
        // No call publishes a volume elsewhere, nor unpublishes it. A file system that is
        // mounted there keeps the device busy, so it is not detached.
        .filter(|entry| places.has(&entry.mount_point))
        .filter(|entry| match record.usage {
            Use::Mount { .. } => {
                (entry.dev == device.dev || Path::new(&entry.source) == device.node)
                    && record.source.may_show(&entry.root)
                    && !is_kubelets(&entry.mount_point, "volume-subpaths")
            }
            Use::Block => {
                is_node_of(entry, &device.node)
                    && (!is_kubelets(&entry.mount_point, "volumeDevices")
                        || is_kubelets(&entry.mount_point, "publish"))
            }
        })
        .map(|entry| {
            (
                entry.mount_point.clone(),
                Target {
                    read_only: entry.own_read_only,
                },
            )
        })
        .collect()
}

/// The mounts of a superblock that are bound to a volume's staged mount. Where kubelet's
/// directory is shared, each mount made there has a group of peers, which its bind mounts join.
fn peers_of_staged<'a>(
    index: &'a Index<'a>,
    dev: Dev,
    record: &Record,
) -> impl Iterator<Item = &'a MountEntry> {
    let at = record.mount_point();
    let mut staged = index.of_dev(dev).filter(|entry| entry.mount_point == at);
    let group = staged.next().and_then(|entry| entry.peer_group);
    let is_peer = move |entry: &&MountEntry| group.is_some() && entry.peer_group == group;
    index.of_dev(dev).filter(is_peer)
}

/// The mounts of a source without a block device other than at its staging path.
fn remote_targets<'a>(
    mounts: impl Iterator<Item = &'a MountEntry>,
    record: &Record,
    places: &Places,
) -> BTreeMap<PathBuf, Target> {
    let is_target = |path: &Path| matches!(absent_is_none(places.target(path)), Ok(Some(_)));
    mounts
        .filter(|entry| entry.mount_point != record.mount_point())
        .filter(|entry| record.source.is_mounted_as(entry))
        // Of others: kubelet for its own volumes of NFS, and outside of this agent's paths.
        .filter(|entry| !is_kubelets(&entry.mount_point, remote::IN_TREE))
        .filter(|entry| is_target(&entry.mount_point))
        .filter(|entry| !is_kubelets(&entry.mount_point, "volume-subpaths"))
        .map(|entry| {
            let read_only = entry.own_read_only;
            (entry.mount_point.clone(), Target { read_only })
        })
        .collect()
}

/// The mount at the volume's staging path or below, and its mount point.
pub(super) fn mounted_at(
    places: &Places,
    volume_id: &str,
    staging_path: &Path,
) -> Result<Option<(PathBuf, Mounted)>, Cause> {
    let below = layout::is_one_name(volume_id).then(|| staging_path.join(volume_id));
    for path in [Some(staging_path.to_owned()), below].into_iter().flatten() {
        let Some(place) = absent_is_none(places.staging(&path))? else {
            continue;
        };
        let look = place.kind();
        let look = look.map_err(Cause::io(format!("look at {}", path.display())))?;
        if let PathKind::Mount(mounted) = look {
            return Ok(Some((path, mounted)));
        }
    }
    Ok(None)
}

/// What is at a volume's staging path.
pub(super) struct StagedAt<'a> {
    /// The mount point, or the staging path where nothing is mounted.
    pub path: PathBuf,
    mounted: Option<Mounted>,
    entry: Option<&'a MountEntry>,
    /// The device that is mounted.
    pub behind: Option<PathBuf>,
    /// The text of the stage file, whichever driver wrote it.
    pub stage_file: Option<Vec<u8>>,
}

impl<'a> StagedAt<'a> {
    /// `found`: by [`mounted_at`]. Blocks.
    pub fn look(
        places: &Places,
        staging_path: &Path,
        found: Option<(PathBuf, Mounted)>,
        mounts: &'a [MountEntry],
    ) -> Result<Self, Cause> {
        let (path, mounted) = match found {
            Some((path, mounted)) => (path, Some(mounted)),
            None => (staging_path.to_owned(), None),
        };
        let entry = mounts
            .iter()
            .rev()
            .find(|entry| mounted.is_some() && entry.mount_point == path);
        let behind = match mounted.and_then(|mounted| mounted.rdev) {
            Some(dev) => {
                Some(sysfs::present_node_of(dev).map_err(Cause::io("name what is mounted"))?)
            }
            None => entry.map(|entry| PathBuf::from(&entry.source)),
        };
        // A file system mounted at the staging path itself may hang.
        let stage_file = if mounted.is_some() && path == staging_path {
            None
        } else {
            layout::read_stage_file(places, staging_path)?
        };
        Ok(Self {
            path,
            mounted,
            entry,
            behind,
            stage_file,
        })
    }
}

/// The error of a mount that this driver does not recover.
pub(super) fn is_unknown(mount_point: &Path) -> Cause {
    Cause::precondition(format!(
        "what is mounted at {} is none of this node's volumes; unmount it by hand",
        mount_point.display()
    ))
}

/// Rebuilds the record of a volume that is staged without one: by the mount at its
/// staging path, else by its handle.
pub(super) fn rebuild(cx: OnLane<'_>, staging_path: &Path) -> Result<Option<Record>, Cause> {
    let known = cx.devices_of_others();
    let find = || {
        let (places, backends) = (&cx.node.places, &cx.node.backends);
        find(places, backends, &cx.volume.id, staging_path, &known)
    };
    let Some(held) = cx.step("find", find)? else {
        return Ok(None);
    };
    let record = held.record.clone();
    cx.hold_found(held)
        .map_err(|other| is_of(&other, staging_path))?;
    tracing::warn!(volume_id = cx.volume.id, source = %record.source, "rebuilt the record of a staged volume");
    Ok(Some(record))
}

pub(super) fn is_of(other: &str, staging_path: &Path) -> Cause {
    let what = format!(
        "what is staged at {} is volume {other}",
        staging_path.display()
    );
    Cause::precondition(what)
}

/// Finds a volume that has no record; devices in `known` are other volumes'.
fn find(
    places: &Places,
    backends: &Backends,
    volume_id: &str,
    staging_path: &Path,
    known: &[Device],
) -> Result<Option<Held>, Cause> {
    let at = mounted_at(places, volume_id, staging_path)?;
    // After that look: what it has found is in the list.
    let mounts = table::list().map_err(Cause::io("list the mounts"))?;
    let staged = StagedAt::look(places, staging_path, at, &mounts)?;
    let (mounted, entry) = (staged.mounted, staged.entry);
    let (behind, left) = (staged.behind.as_deref(), staged.stage_file.as_deref());
    let found = source_of(backends, volume_id, behind, left, known)?;
    let Some((source, mut device)) = found else {
        return match mounted {
            None => Ok(None),
            Some(_) => Err(is_unknown(&staged.path)),
        };
    };
    if let Some(device) = &device
        && let Owner::Volume(other) = backends.owner_of(device.dev)?
        && other != volume_id
    {
        return Err(is_of(&other, staging_path));
    }
    let usage = match mounted {
        Some(Mounted { rdev: None, .. }) => Use::Mount {
            fs: None,
            options: MountOptions::default(),
        },
        _ => Use::Block,
    };
    if let Some(device) = &mut device
        && usage == Use::Block
        && matches!(device.backing, Backing::Export(_))
    {
        // Nobody knows any more whether it was attached read-only, or is published so.
        device.read_only = false;
    }
    let record = Record {
        volume_id: volume_id.to_owned(),
        name: String::new(),
        boot_id: backends.boot_id().to_owned(),
        phase: Phase::Staged,
        source,
        staging_path: staging_path.to_owned(),
        usage,
        fs: entry.and_then(|entry| entry.fs_type.parse().ok()),
        read_only: device.as_ref().is_some_and(|device| device.read_only),
        mode: AccessMode::SingleNodeWriter,
        root_dev: mounted.map(|mounted| mounted.dev),
        root_ino: None,
        device,
        inline: None,
        found: true,
    };
    let targets = (record.device.as_ref())
        .map(|device| targets(mounts.iter(), &record, device, places))
        .unwrap_or_default();
    Ok(Some(Held { record, targets }))
}

/// Finds the source by the mounted device, by the handle, or by another driver's stage
/// file.
fn source_of(
    backends: &Backends,
    volume_id: &str,
    behind: Option<&Path>,
    left: Option<&[u8]>,
    known: &[Device],
) -> Result<Option<(Source, Option<Device>)>, DeviceError> {
    let found = match behind {
        Some(node) => backends.find_behind(node, volume_id, left)?,
        None => backends.find(volume_id, known)?,
    };
    match (found, behind, left) {
        // It may be mapped, or only the stage file may be left.
        (None, None, Some(left)) => backends.find_by_stage_file(left, volume_id, known),
        (found, ..) => Ok(found.map(|found| (found.source, Some(found.device)))),
    }
}
