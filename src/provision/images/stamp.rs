//! Whether a directory changed since it was read.
//!
//! What was read of a directory is kept in memory for as long as the directory has the
//! [`DirectoryStamp`] that was taken *before* it was read. Every entry that appears,
//! disappears or is replaced sets the directory's time of change (`st_ctime`, which no call
//! sets to a chosen time), under the lock that a reader of the directory takes as well. But
//! there is a stamp only where each later change will show in it:
//!
//! - One machine alone mounts the file system. On others, as NFS, the times are another
//!   machine's, and arrive late.
//! - The last change is older than the tick of the clock that file systems read: within one
//!   tick a second change leaves the same time. All changes of that tick are over when the
//!   stamp is taken, so whoever reads the directory then finds them.
//!
//! Where there is no stamp, the directory is read each time.

use std::path::Path;

use rustix::fs::{Mode, OFlags, fstat, fstatfs, open};

use super::file_system::is_local;
use crate::kernel::clock;

/// Identifies a directory and its last change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryStamp {
    dev: u64,
    ino: u64,
    changed: (i64, i64),
}

impl DirectoryStamp {
    /// The stamp of a directory. `None` where a later change might not show in it, or the
    /// directory cannot be opened, as who reads it will report.
    pub fn of(dir: &Path) -> Option<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = open(dir, flags, Mode::empty()).ok()?;
        if !u64::try_from(fstatfs(&dir).ok()?.f_type).is_ok_and(is_local) {
            return None;
        }
        let stat = fstat(&dir).ok()?;
        let changed = (stat.st_ctime, i64::try_from(stat.st_ctime_nsec).ok()?);
        // The clock that file systems read: a finer one may be ahead by more than a tick,
        // where the machine's hypervisor held the tick up.
        let now = clock::realtime_coarse()?;
        is_past(changed, now).then_some(Self {
            dev: stat.st_dev,
            ino: stat.st_ino,
            changed,
        })
    }
}

/// Whether a change from `now` on cannot have the time `changed`.
fn is_past((seconds, nanoseconds): (i64, i64), now: (i64, i64)) -> bool {
    // Old formats of ext4 keep no fractions of a second.
    if nanoseconds == 0 {
        return false;
    }
    let nanoseconds = nanoseconds + TICK;
    let end = (seconds + nanoseconds / SECOND, nanoseconds % SECOND);
    end < now
}

const SECOND: i64 = 1_000_000_000;
/// The longest tick of a kernel (`CONFIG_HZ=100`), in nanoseconds.
const TICK: i64 = 10_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_in_the_tick_of_another_is_not_past() {
        let now = (7, 5_000_000);
        assert!(is_past((6, 994_999_999), now));
        assert!(!is_past((6, 995_000_000), now));
        assert!(!is_past((7, 5_000_000), now));
        // The clock was set back.
        assert!(!is_past((8, 1), now));
        assert!(!is_past((3, 0), now), "a file system without fractions");
        assert!(is_past((3, 1), now));
    }

    #[test]
    fn every_change_of_entries_changes_the_stamp() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path();
        let (a, b) = (path.join("a"), path.join("b"));
        let settled = || {
            loop {
                if let Some(stamp) = DirectoryStamp::of(path) {
                    return stamp;
                }
            }
        };
        let mut before = settled();
        let mut changes = |change: &dyn Fn()| {
            change();
            assert_eq!(DirectoryStamp::of(path), None, "it has just changed");
            let after = settled();
            assert_ne!(after, before);
            assert_eq!(settled(), after);
            before = after;
        };
        changes(&|| std::fs::write(&a, "").unwrap());
        changes(&|| std::fs::hard_link(&a, &b).unwrap());
        changes(&|| std::fs::remove_file(&a).unwrap());
        std::fs::write(path.with_extension("x"), "").unwrap();
        changes(&|| std::fs::rename(path.with_extension("x"), &b).unwrap());
        // Only the file's own times.
        std::fs::write(&b, "longer").unwrap();
        assert_eq!(DirectoryStamp::of(path), Some(before));
    }

    #[test]
    fn other_file_systems_and_missing_directories_have_no_stamp() {
        assert_eq!(DirectoryStamp::of(Path::new("/proc/self")), None);
        assert_eq!(DirectoryStamp::of(Path::new("/nowhere")), None);
    }
}
