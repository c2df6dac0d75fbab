//! A volume of this node: its record and targets, the calls under way on it, and the
//! listing for operators.

use std::{
    collections::BTreeMap,
    fmt, iter,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use futures_util::future::Shared;
use tokio::sync::oneshot;

use super::{
    Node, VolumeError,
    error::Cause,
    paths::Paths,
    places::{Places, absent_is_none},
    progress::{Progress, UnderWay},
    record::{Held, Record, Target},
    spec::{Call, Request, Use},
    stats::StatsRequests,
};
use crate::{device::Device, fs::FsType, lane::Lanes, mount::PathKind, observe::metrics};

/// What a successful call reports back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing but success.
    Done,
    /// The volume's size in bytes.
    Size(u64),
    /// The space that the source took before and after unused space was returned, where
    /// it is known.
    Reclaimed {
        before: Option<u64>,
        after: Option<u64>,
    },
    /// The previous content of a device that an operator had formatted.
    Was(String),
}

/// A call's answer, shared by all who joined it.
pub type Answer = Result<Outcome, Arc<VolumeError>>;

/// A call under way, as equal calls join it.
#[derive(Clone)]
pub struct Running {
    pub request: Arc<Request>,
    /// When it began.
    pub begun: Instant,
    /// Its step.
    pub progress: Progress,
    /// Its answer, once it ends.
    pub answer: Shared<oneshot::Receiver<Answer>>,
}

/// How long a call waits for a conflicting brief one ([`Call::is_brief`]) before it is
/// refused.
const BRIEF: Duration = Duration::from_secs(1);

impl Running {
    /// Whether it is a brief call and ends in time: kubelet repeats a refused call after
    /// half a second, much longer than a brief call takes.
    pub async fn ends_within(&self, left: Duration) -> bool {
        let left = left.min(BRIEF.saturating_sub(self.begun.elapsed()));
        self.request.call.is_brief()
            && tokio::time::timeout(left, self.answer.clone())
                .await
                .is_ok()
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running")
            .field("call", &self.request.call)
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}

/// A volume that this node holds or works on.
#[derive(Debug)]
pub struct Volume {
    /// The handle.
    pub id: String,
    /// Its record and targets, while this node holds it.
    held: Mutex<Option<Held>>,
    /// Where this node's volumes are; changed under the lock of `held`.
    paths: Arc<Paths>,
    /// How often it was published; read and changed under the lock of `held`.
    pub published: AtomicU64,
    /// Questions to its file system.
    pub asked: Arc<StatsRequests>,
    /// In the order in which they began: first the volume's task, then calls beside it.
    running: Mutex<Vec<Running>>,
}

impl Volume {
    /// A volume without a record, one of those whose paths are `paths`.
    pub fn new(id: &str, paths: Arc<Paths>) -> Self {
        Self {
            id: id.to_owned(),
            held: Mutex::default(),
            paths,
            published: AtomicU64::default(),
            asked: Arc::default(),
            running: Mutex::default(),
        }
    }

    /// Its record and targets, while this node holds it. Nothing can panic under this
    /// lock.
    pub fn held(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The calls under way. Nothing can panic under this lock.
    pub fn running(&self) -> MutexGuard<'_, Vec<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The call under way, if any.
    pub fn under_way(&self, lanes: &Lanes) -> Option<UnderWay> {
        let progress = (self.running().first()).map(|first| first.progress.clone());
        progress.map(|progress| progress.under_way(lanes))
    }

    /// Whether this node holds nothing of it and no call runs, so that it can be forgotten.
    pub fn is_idle_and_empty(&self) -> bool {
        self.running().is_empty() && self.held().is_none()
    }

    /// The equal call under way, or else one that this call must not run beside.
    pub fn in_the_way(&self, call: &Call) -> Option<Running> {
        let is_inline = (self.held().as_ref()).is_some_and(|held| held.record.inline.is_some());
        let running = self.running();
        let conflicts = |other: &&Running| is_inline || !call.may_begin_beside(&other.request.call);
        let equal = running.iter().find(|other| other.request.call == *call);
        equal.or_else(|| running.iter().find(conflicts)).cloned()
    }
}

impl Volume {
    /// Replaces the volume's record and targets; the gauges follow.
    pub(super) fn hold(&self, with: Option<Held>) {
        let mut held = self.held();
        let state = |held: &Option<Held>| held.as_ref().map(|held| held.record.state());
        metrics::volume_state_changed(state(&held), state(&with));
        (with.iter().flat_map(paths_of)).for_each(|path| self.paths.add(path));
        (held.iter().flat_map(paths_of)).for_each(|path| self.paths.remove(path));
        *held = with;
    }

    /// Replaces the volume's record. Its targets stay: a publish may add one meanwhile.
    pub(super) fn hold_record(&self, record: Record) {
        let mut held = self.held();
        let before = held.as_ref().map(|held| held.record.state());
        metrics::volume_state_changed(before, Some(record.state()));
        self.paths.add(&record.staging_path);
        if let Some(held) = held.as_mut() {
            self.paths.remove(&held.record.staging_path);
            held.record = record;
        } else {
            let targets = BTreeMap::new();
            *held = Some(Held { record, targets });
        }
    }

    /// Whether this node has it staged or published at the path, which is canonical.
    pub(super) fn is_at(&self, path: &Path) -> bool {
        self.held().as_ref().is_some_and(|held| {
            held.targets.contains_key(path)
                || path == held.record.staging_path
                || path == held.record.mount_point()
        })
    }

    /// A copy of the record, if there is one.
    pub(super) fn record(&self) -> Option<Record> {
        self.held().as_ref().map(|held| held.record.clone())
    }
}

/// Where the volume is.
fn paths_of(held: &Held) -> impl Iterator<Item = &Path> {
    let targets = held.targets.keys().map(PathBuf::as_path);
    iter::once(&*held.record.staging_path).chain(targets)
}

impl Record {
    /// The volume's device.
    pub(super) fn attached_device(&self) -> Result<Device, Cause> {
        self.device.clone().ok_or_else(|| {
            Cause::precondition("it has no device yet: its staging did not finish; stage it again")
        })
    }
}

/// A volume's targets at one moment, for its lane to look at.
#[derive(Debug, Default)]
pub(super) struct Targets {
    pub(super) paths: Vec<PathBuf>,
    /// How often the volume had been published by then.
    published: u64,
    /// The targets at which the volume no longer appears.
    unmounted: Vec<PathBuf>,
}

impl Targets {
    /// A target at which the volume still appears. Blocks.
    pub(super) fn live(&mut self, places: &Places, record: &Record) -> Option<PathBuf> {
        let appears = |path: &PathBuf| match places.target(path) {
            Ok(place) => match place.kind() {
                Ok(PathKind::Mount(mounted)) => record.appears_at(&mounted),
                Ok(_) => false,
                // An unreadable target is not proven gone.
                Err(_) => true,
            },
            Err(error) => !matches!(absent_is_none(Err(error)), Ok(None)),
        };
        let (live, unmounted) = self.paths.drain(..).partition(appears);
        self.paths = live;
        self.unmounted.extend::<Vec<_>>(unmounted);
        self.paths.first().cloned()
    }
}

impl Volume {
    /// Where it is published.
    pub(super) fn targets(&self) -> Targets {
        let held = self.held();
        Targets {
            paths: (held.iter())
                .flat_map(|held| held.targets.keys().cloned())
                .collect(),
            published: self.published.load(Relaxed),
            unmounted: Vec::new(),
        }
    }

    /// Forgets targets that others have unmounted, unless the volume was published
    /// meanwhile: then a target may be back, and a later look decides.
    pub(super) fn forget_unmounted(&self, targets: &Targets) {
        let mut held = self.held();
        if let Some(held) = held.as_mut()
            && targets.published == self.published.load(Relaxed)
        {
            for path in &targets.unmounted {
                self.drop_target_of(held, path);
            }
        }
    }

    /// Adds a target.
    pub(super) fn set_target(&self, path: &Path, target: Target) {
        let mut held = self.held();
        self.published.fetch_add(1, Relaxed);
        if let Some(held) = held.as_mut()
            && held.targets.insert(path.to_owned(), target).is_none()
        {
            self.paths.add(path);
        }
    }

    /// Removes a target.
    pub(super) fn drop_target(&self, path: &Path) {
        if let Some(held) = self.held().as_mut() {
            self.drop_target_of(held, path);
        }
    }

    fn drop_target_of(&self, held: &mut Held, path: &Path) {
        if held.targets.remove(path).is_some() {
            self.paths.remove(path);
        }
    }
}

/// One volume, as `uringctl volumes` shows it.
#[derive(Clone, Debug)]
pub struct Listed {
    pub volume_id: String,
    /// The name that it was created with; empty if it is not known.
    pub name: String,
    /// The backend's name.
    pub backend: &'static str,
    /// The device, once attached.
    pub device: Option<Device>,
    /// ext4, xfs, btrfs, nfs or block.
    pub access: &'static str,
    /// Where it is staged.
    pub staging_path: PathBuf,
    /// Where it is published.
    pub targets: BTreeMap<PathBuf, Target>,
    /// staging, staged, unstaging, inline.
    pub state: &'static str,
    /// The call under way.
    pub under_way: Option<UnderWay>,
}

impl Node {
    /// Every volume that this node holds or works on, by handle.
    pub async fn list(self: Arc<Self>, deadline: Duration) -> Result<Vec<Listed>, VolumeError> {
        self.recovered("", deadline).await?;
        let mut volumes: Vec<_> = self.volumes().values().cloned().collect();
        volumes.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(volumes.iter().map(|volume| self.listed(volume)).collect())
    }

    fn listed(&self, volume: &Volume) -> Listed {
        let under_way = volume.under_way(&self.lanes);
        let held = volume.held();
        let record = held.as_ref().map(|held| &held.record);
        Listed {
            volume_id: volume.id.clone(),
            name: record.map(|r| r.name.clone()).unwrap_or_default(),
            backend: record.map_or("", |r| r.source.backend()),
            device: record.and_then(|r| r.device.clone()),
            access: record.map_or("", |r| match (&r.usage, r.fs) {
                (Use::Block, _) => "block",
                (Use::Mount { .. }, _) if !r.source.has_device() => r.source.backend(),
                (Use::Mount { .. }, fs) => fs.map_or("", FsType::as_str),
            }),
            staging_path: record.map(|r| r.staging_path.clone()).unwrap_or_default(),
            targets: held.as_ref().map(|h| h.targets.clone()).unwrap_or_default(),
            state: record.map_or("", Record::state),
            under_way,
        }
    }

    /// How many volumes there are, in whatever state.
    pub(super) fn count(&self) -> usize {
        self.volumes().len()
    }
}
