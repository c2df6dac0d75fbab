//! How full a volume is. No lock, no record, no device: a few system calls on the
//! runtime thread, none of which can hang with the device.
//!
//! A file system whose statfs may wait for its device ([`statfs::may_wait`]) is asked
//! on the volume's lane, by one call at a time. Whoever would wait for it too long
//! gets its last answer, or where there is none an error that may pass.

use std::{
    cell::RefCell,
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::{FutureExt as _, future::Shared};
use rustix::{fd::AsFd as _, fs::fstatvfs};
use tokio::sync::oneshot;

use super::{
    Error, Node, places::Places, publish::appears_at, record::Record, spec::Use, task::Volume,
};
use crate::{device::sysfs, fs::statfs, hold_point, mount::Look, ring};

/// How long a file system that may wait for its device is waited for.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// What of something there is, in its own unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// In all.
    pub total: u64,
    /// In use.
    pub used: u64,
    /// Left for those who are not root.
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

/// What was asked of a file system that may wait for its device.
#[derive(Debug, Default)]
pub struct Asked {
    under_way: RefCell<Option<Question>>,
    /// Its last answers, by where it was asked.
    last: RefCell<HashMap<PathBuf, Usage>>,
}

/// One look at a path, which all who ask meanwhile wait for.
#[derive(Clone, Debug)]
struct Question {
    path: PathBuf,
    answer: Shared<oneshot::Receiver<Result<Usage, Arc<Error>>>>,
}

impl Node {
    /// `NodeGetVolumeStats`: asks about the mount that this node made.
    pub async fn stats(
        self: Rc<Self>,
        volume_id: String,
        path: PathBuf,
        deadline: Duration,
    ) -> Result<Usage, Arc<Error>> {
        let not_there = || Error::NotFound {
            volume: volume_id.clone(),
            what: format!("it is not at {} on this node", path.display()),
        };
        self.taken_up(&volume_id, deadline).await?;
        let volume = self.known(&volume_id).ok_or_else(not_there)?;
        let record = volume.record().ok_or_else(not_there)?;
        let path = self.places.spelled(&path);
        if !may_wait(&record) {
            return Ok(usage(&self.places, &record, &path)?);
        }
        let until = Instant::now() + deadline.min(ANSWERS_WITHIN);
        loop {
            let question = self.question(&volume, &record, &path);
            let left = until.saturating_duration_since(Instant::now());
            match ring::timer::timeout(left, question.answer).await {
                Ok(Ok(answer)) if question.path == path => return answer,
                // Another path's, or a lane that panicked.
                Ok(_) if !left.is_zero() => {}
                _ => break,
            }
        }
        let last = volume.asked.last.borrow().get(&path).copied();
        last.ok_or_else(|| {
            let what = format!("ask how full it is at {}", path.display());
            let why = "its file system waits for its device";
            Arc::new(Error::io(&volume.id, what)(io::Error::new(
                io::ErrorKind::TimedOut,
                why,
            )))
        })
    }

    /// Whether the volume's file system answers within the time.
    pub async fn answers(&self, volume: &Rc<Volume>, record: &Record) -> bool {
        if !may_wait(record) {
            return true;
        }
        let question = self.question(volume, record, &record.mount_point());
        let answer = ring::timer::timeout(ANSWERS_WITHIN, question.answer).await;
        answer.is_ok()
    }

    /// The look under way at the volume, or a new one.
    fn question(&self, volume: &Rc<Volume>, record: &Record, path: &Path) -> Question {
        if let Some(question) = &*volume.asked.under_way.borrow() {
            return question.clone();
        }
        let (send, receive) = oneshot::channel();
        let question = Question {
            path: path.to_owned(),
            answer: receive.shared(),
        };
        volume.asked.under_way.replace(Some(question.clone()));
        let (places, record, path) = (self.places.clone(), record.clone(), path.to_owned());
        let at = path.clone();
        let looks = self.lanes.run(&volume.id, "statfs", move || {
            usage(&places, &record, &at).map_err(Arc::new)
        });
        let asked = Rc::clone(volume);
        ring::spawn(async move {
            let answer = looks.await;
            asked.asked.under_way.replace(None);
            let mut last = asked.asked.last.borrow_mut();
            match &answer {
                Ok(usage) => last.insert(path, *usage),
                Err(_) => last.remove(&path),
            };
            // All callers may have gone.
            let _ = send.send(answer);
        });
        question
    }
}

/// Whether asking the volume's file system may wait for its device.
pub fn may_wait(record: &Record) -> bool {
    let Use::Mount { options, .. } = &record.usage else {
        return false;
    };
    // How another driver has mounted it is not known.
    let options = Some(options).filter(|_| !record.found);
    record.fs.is_some_and(|fs| statfs::may_wait(fs, options))
}

/// How full the volume is that is staged or published at the path, by what the
/// kernel says.
pub fn usage(places: &Places, record: &Record, path: &Path) -> Result<Usage, Error> {
    let gone = || Error::NotFound {
        volume: record.volume_id.clone(),
        what: format!("it is not what is mounted at {}", path.display()),
    };
    let failed = |what| Error::io(&record.volume_id, what);
    let device = record.device.as_ref().ok_or_else(gone)?;
    let below;
    let path = if path == record.staging_path {
        below = record.mount_point();
        &below
    } else {
        path
    };
    // Whatever keeps the path from being resolved, our mount is not there.
    let place = places.target(path).map_err(|_| gone())?;
    let opened = place.open().map_err(|_| gone())?;
    hold_point("statfs", &record.volume_id);
    match Look::at(opened.as_fd()) {
        Ok(Look::Mount(mounted)) if appears_at(record, device, &mounted) => {}
        _ => return Err(gone()),
    }
    if record.usage == Use::Block {
        let bytes =
            sysfs::size_bytes(device.dev).map_err(failed("read the device's size".to_owned()))?;
        return Ok(Usage::Block(bytes));
    }
    let fs = fstatvfs(&opened)
        .map_err(|errno| failed(format!("statfs {}", path.display()))(errno.into()))?;
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
