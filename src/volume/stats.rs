//! The usage of a volume, and whether its file system answers: from the kernel's memory,
//! without locks, records or data of the device.
//!
//! But the directories on the way to it are on a disk that may hang, and some file
//! systems' statfs waits for their device: of XFS in Linux 5.15 to 5.18
//! (`xfs_inodegc_flush` in `xfs_fs_statfs`), and of ext4 and XFS with project quotas,
//! which may read a limit (`ext4_statfs_project`, `xfs_qm_statvfs`). ext4 has limits only
//! where it is mounted so, whatever its superblock says of quotas.
//!
//! So the runtime thread asks where neither can be: the walk takes names from the kernel's
//! cache only ([`Places::open_cached`]), and the file system is one whose statfs never waits.
//! Else the volume's lane asks, for one call at a time. A caller that would wait too long gets the
//! last answer, or a transient error if there is none.

use std::{
    borrow::Cow,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures_util::{FutureExt as _, future::Shared};
use rustix::{
    fd::{AsFd as _, OwnedFd},
    fs::fstatvfs,
};
use tokio::sync::oneshot;

use super::{
    Node, VolumeError,
    error::Cause,
    health::{self, HealthCondition},
    places::Places,
    record::Record,
    spec::Use,
};
use crate::{
    Kind,
    fs::FsType,
    hold_point, is_held,
    kernel::sysfs,
    mount::{PathKind, bind, path::PathError},
    ring,
};

/// How long a call waits for the file system.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// An amount of space, in its own unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// In all.
    pub total: u64,
    /// In use.
    pub used: u64,
    /// Available without root's reserve.
    pub available: u64,
}

/// How full a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// A file system.
    Mounted {
        /// In bytes.
        bytes: Space,
        /// In inodes; `None` where the file system does not count them (btrfs).
        inodes: Option<Space>,
    },
    /// A raw block device of so many bytes.
    Block(u64),
}

/// An answer about how full a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statistics {
    /// How full it is, or was.
    pub usage: Usage,
    /// How old that is, if the file system does not answer now.
    pub age: Option<Duration>,
}

impl From<Usage> for Statistics {
    fn from(usage: Usage) -> Self {
        Self { usage, age: None }
    }
}

/// Questions about a volume that its task does not answer.
#[derive(Debug, Default)]
pub struct StatsRequests(Mutex<StatsState>);

#[derive(Debug, Default)]
struct StatsState {
    under_way: Option<StatsRequest>,
    /// Its last answer and the time of that: the same directory or device is at all of a
    /// volume's paths.
    last: Option<(Usage, Instant)>,
}

impl StatsRequests {
    /// Nothing can panic under this lock.
    fn lock(&self) -> MutexGuard<'_, StatsState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long the question under way has waited.
    pub(super) fn waits_for(&self) -> Duration {
        let asked = self.lock();
        let question = asked.under_way.as_ref();
        question.map_or(Duration::ZERO, |question| question.begun.elapsed())
    }
}

impl StatsState {
    fn answered(&mut self, usage: Usage) {
        self.last = Some((usage, Instant::now()));
    }
}

/// The subject of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
enum About {
    /// How full it is, at a path.
    Usage(PathBuf),
    /// The conditions of the file system at its staging path.
    Health,
}

/// The lane's answer.
#[derive(Clone, Debug)]
enum Told {
    Usage(Result<Usage, Arc<VolumeError>>),
    Health(Vec<HealthCondition>),
}

/// A question under way, whose answer all callers share.
#[derive(Clone, Debug)]
struct StatsRequest {
    about: About,
    begun: Instant,
    answer: Shared<oneshot::Receiver<Told>>,
}

impl Node {
    /// How full the volume is, if it is recovered and the kernel has that in memory. For the
    /// runtime thread: it waits for nothing.
    pub(super) fn stats_at_once(&self, volume_id: &str, path: &Path) -> Option<Usage> {
        if self.unrecovered.has(volume_id) {
            return None;
        }
        let volume = self.known(volume_id)?;
        let record = volume.record()?;
        let usage = usage_in_memory(&self.places, &record, &self.places.canonical(path))?;
        volume.asked.lock().answered(usage);
        Some(usage)
    }

    /// `NodeGetVolumeStats`: asks about the mount that this node made.
    pub async fn stats(
        self: Arc<Self>,
        volume_id: String,
        path: PathBuf,
        deadline: Duration,
    ) -> Result<Statistics, Arc<VolumeError>> {
        let not_there = || {
            let what = format!("it is not at {} on this node", path.display());
            Cause::NotFound(what).of(&volume_id)
        };
        let begun = Instant::now();
        self.recovered(&volume_id, deadline).await?;
        let left = deadline.saturating_sub(begun.elapsed());
        self.inline_recovered(&volume_id, left).await?;
        if let Some(usage) = self.stats_at_once(&volume_id, &path) {
            return Ok(usage.into());
        }
        let volume = self.known(&volume_id).ok_or_else(not_there)?;
        let record = volume.record().ok_or_else(not_there)?;
        let path = self.places.canonical(&path);
        let about = About::Usage(path.clone());
        if let Some(Told::Usage(answer)) = self.ask(&volume.asked, &record, about, deadline).await {
            return answer.map(Statistics::from);
        }
        let last = volume.asked.lock().last;
        if let Some((usage, at)) = last.filter(|_| volume.is_at(&path)) {
            let (age, waits_for) = (at.elapsed(), record.waits_for());
            tracing::warn!(
                volume_id,
                path = %path.display(),
                seconds = age.as_secs(),
                "the file system waits for {waits_for}; these statistics are so many seconds old"
            );
            let age = Some(age);
            return Ok(Statistics { usage, age });
        }
        let what = format!("ask how full it is at {}", path.display());
        let why = format!("its file system waits for {}", record.waits_for());
        let waits = io::Error::new(io::ErrorKind::TimedOut, why);
        Err(Arc::new(Cause::io(what)(waits).of(&volume_id)))
    }

    /// The conditions of a mounted volume's file system; `None` if it does not answer in
    /// time.
    pub async fn file_system_health(
        &self,
        asked: &Arc<StatsRequests>,
        record: &Record,
        deadline: Duration,
    ) -> Option<Vec<HealthCondition>> {
        match self.ask(asked, record, About::Health, deadline).await? {
            Told::Health(found) => Some(found),
            Told::Usage(_) => None,
        }
    }

    /// Waits for the answer, after those to other questions; `None` where they take too
    /// long.
    async fn ask(
        &self,
        asked: &Arc<StatsRequests>,
        record: &Record,
        about: About,
        deadline: Duration,
    ) -> Option<Told> {
        let until = Instant::now() + deadline.min(ANSWERS_WITHIN);
        loop {
            let question = self.question(asked, record, &about);
            let left = until.saturating_duration_since(Instant::now());
            match tokio::time::timeout(left, question.answer).await {
                Ok(Ok(answer)) if question.about == about => return Some(answer),
                // Another question's.
                Ok(Ok(_)) if !left.is_zero() => {}
                Ok(Err(_)) => {
                    // The lane panicked: the next call asks anew.
                    asked.lock().under_way = None;
                    return None;
                }
                _ => return None,
            }
        }
    }

    /// The look under way at the volume, or a new one.
    fn question(
        &self,
        shared: &Arc<StatsRequests>,
        record: &Record,
        about: &About,
    ) -> StatsRequest {
        let mut asked = shared.lock();
        if let Some(question) = &asked.under_way {
            return question.clone();
        }
        let (send, receive) = oneshot::channel();
        let question = StatsRequest {
            about: about.clone(),
            begun: Instant::now(),
            answer: receive.shared(),
        };
        asked.under_way = Some(question.clone());
        drop(asked);
        let (places, about) = (self.places.clone(), about.clone());
        let of = record.clone();
        let looks = self.lanes.run(&record.volume_id, "statfs", move || {
            match &about {
                About::Usage(path) => {
                    let usage = usage(&places, &of, path);
                    Told::Usage(usage.map_err(|cause| Arc::new(cause.of(&of.volume_id))))
                }
                About::Health => {
                    // If it hangs, so does this.
                    let _ = usage(&places, &of, &of.mount_point());
                    Told::Health(health::of_file_system(&places, &of))
                }
            }
        });
        let shared = Arc::clone(shared);
        ring::spawn(async move {
            let told = looks.await;
            let mut asked = shared.lock();
            asked.under_way = None;
            match &told {
                Told::Usage(Ok(usage)) => asked.answered(*usage),
                // Says nothing of the paths at which the volume is.
                Told::Usage(Err(error)) if error.kind() == Kind::NotFound => {}
                Told::Usage(Err(_)) => asked.last = None,
                Told::Health(_) => {}
            }
            drop(asked);
            // All callers may have gone.
            let _ = send.send(told);
        });
        question
    }
}

/// The usage of the volume that is staged or published at the path. On the volume's lane.
pub(super) fn usage(places: &Places, record: &Record, path: &Path) -> Result<Usage, Cause> {
    let path = &mount_at(record, path);
    // Our mount is not at a path that cannot be resolved, unless its server or disk fails.
    let place = places.target(path).map_err(|error| match error {
        Cause::Path {
            source: PathError::Io { .. },
            ..
        } => error,
        _ => gone(path),
    })?;
    let mut opened = place.open().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => gone(path),
        _ => Cause::io(format!("open {}", path.display()))(error),
    })?;
    // While its device or server does not answer, this call must not keep a target busy.
    if !record.source.has_device() {
        opened = bind::detached(opened.as_fd()).map_err(Cause::io("clone the mount"))?;
    } else if is_its(&opened, record)
        && let Ok(Some(staged)) = places.open_staging(&record.mount_point())
        && is_its(&staged, record)
    {
        opened = staged;
    }
    hold_point("statfs", &record.volume_id);
    usage_of(&opened, record, path)
}

/// The same, where the kernel has it in memory; `None` where it might wait for a disk.
fn usage_in_memory(places: &Places, record: &Record, path: &Path) -> Option<Usage> {
    if !never_waits(record) || is_held("statfs", &record.volume_id) {
        return None;
    }
    let path = &mount_at(record, path);
    usage_of(&places.open_cached(path)?, record, path).ok()
}

/// Whether the statfs of the volume's file system waits for no device, on any kernel. The
/// options of a mount that was found are not known.
fn never_waits(record: &Record) -> bool {
    let Use::Mount { options, .. } = &record.usage else {
        return true;
    };
    match record.fs {
        _ if record.found => false,
        Some(FsType::Ext4) => !(options.fs_options()).any(|option| option.key.contains("quota")),
        Some(FsType::Btrfs) => true,
        Some(FsType::Xfs) | None => false,
    }
}

/// The path of the mount that is meant by a staging or target path.
fn mount_at<'a>(record: &Record, path: &'a Path) -> Cow<'a, Path> {
    if path == record.staging_path {
        record.mount_point().into()
    } else {
        path.into()
    }
}

fn gone(path: &Path) -> Cause {
    Cause::NotFound(format!("it is not what is mounted at {}", path.display()))
}

fn is_its(opened: &OwnedFd, record: &Record) -> bool {
    matches!(PathKind::of(opened.as_fd()), Ok(PathKind::Mount(mounted)) if record.appears_at(&mounted))
}

/// The usage of the file system, or of the device, that is opened.
fn usage_of(opened: &OwnedFd, record: &Record, path: &Path) -> Result<Usage, Cause> {
    if !is_its(opened, record) {
        return Err(gone(path));
    }
    if record.usage == Use::Block {
        let device = record.attached_device()?;
        let bytes = sysfs::size_bytes(device.dev).map_err(Cause::io("read the device's size"))?;
        return Ok(Usage::Block(bytes));
    }
    let fs = fstatvfs(opened)
        .map_err(|errno| Cause::io(format!("statfs {}", path.display()))(errno.into()))?;
    let bytes = Space {
        total: fs.f_blocks * fs.f_frsize,
        used: fs.f_blocks.saturating_sub(fs.f_bfree) * fs.f_frsize,
        available: fs.f_bavail * fs.f_frsize,
    };
    let inodes = (fs.f_files > 0).then(|| Space {
        total: fs.f_files,
        used: fs.f_files.saturating_sub(fs.f_ffree),
        available: fs.f_favail,
    });
    Ok(Usage::Mounted { bytes, inodes })
}

#[cfg(test)]
mod tests;
