//! A directory that is being filled, hidden in the share until it is complete: a rename
//! gives it its name.
//!
//! It is `.making-RECORD/new`. Whoever makes it has `.making-RECORD/lock` locked, so the
//! maker of an unlocked one is dead. Its record is written while `new` is there, and removed
//! before that is: a record without a `new` is that of a complete directory.

use std::{
    fs::{self, File},
    io,
};

use rustix::{
    fd::OwnedFd,
    fs::{Mode, OFlags},
};

use super::{
    below::{self, path_of},
    handle::MAKING,
    quota, records, removal,
};
use crate::{Done, crash_point, pool::draft};

const NEW: &str = "new";
const LOCK: &str = "lock";

/// A directory that is being filled. Dropping it before it is placed removes it.
#[derive(Debug)]
pub struct DirectoryDraft<'s> {
    share: &'s OwnedFd,
    record: String,
    /// The directory that has it.
    dir: OwnedFd,
    /// Until the draft is dropped.
    lock: Option<File>,
}

impl<'s> DirectoryDraft<'s> {
    /// Begins one, and removes what a dead maker left. None if another controller makes it.
    pub fn begin(share: &'s OwnedFd, record: &str) -> io::Result<Option<Self>> {
        let dir = below::make(share, &name_of(record), 0o700)?;
        // Entries would inherit it.
        let _ = rustix::fs::removexattr(path_of(&dir, ""), c"system.posix_acl_default");
        let flags = OFlags::RDWR | OFlags::CREATE;
        let lock = match below::open(&dir, LOCK, flags, Mode::RUSR | Mode::WUSR) {
            // Its last maker removes it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => File::from(opened?),
        };
        if !draft::try_lock(&lock)? || !draft::is_at(&lock, &path_of(&dir, LOCK)) {
            return Ok(None);
        }
        let draft = Self {
            share,
            record: record.to_owned(),
            dir,
            lock: Some(lock),
        };
        draft.clear()?;
        Ok(Some(draft))
    }

    /// Removes the directory with its record, if it is not placed.
    fn clear(&self) -> io::Result<()> {
        if let Some(new) = below::absent_is_none(below::walk(&self.dir, NEW))? {
            records::remove(self.share, &self.record)?;
            crash_point();
            quota::end_for_removal(&self.dir, &new)?;
            let _ = removal::remove(&self.dir, NEW)?;
        }
        Ok(())
    }

    /// Makes the directory to fill, which is to have that place in the share.
    pub fn make(&self, path: &str) -> io::Result<OwnedFd> {
        crash_point();
        let (above, _) = below::deepest(self.share, below::split(path).0)?;
        // Not that of a place which a dead maker had found.
        quota::leave(&self.dir)?;
        quota::follow(&self.dir, &above)?;
        below::make(&self.dir, NEW, 0o700)
    }

    /// Gives the directory that was made a quota of so many bytes.
    pub fn limit(&self, new: &OwnedFd, name: &str, bytes: u64) -> io::Result<u64> {
        quota::give(&self.dir, new, name, bytes)
    }

    /// Gives it its place in the share, unless there is a directory already. Its record is
    /// written.
    pub fn place(self, path: &str) -> io::Result<Done> {
        let (parent, name) = below::split(path);
        let above = below::make(self.share, parent, 0o777)?;
        crash_point();
        if below::has(&above, name)? {
            return Ok(Done::Already);
        }
        match below::rename(&self.dir, NEW, &above, name) {
            Ok(()) => {}
            Err(error) if is_there(&error) => return Ok(Done::Already),
            Err(error) => return Err(error),
        }
        crash_point();
        sync_place(self.share, path)?;
        Ok(Done::Now)
    }
}

impl Drop for DirectoryDraft<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.clear() {
            let record = &self.record;
            tracing::warn!(record, %error, "an unfinished directory stays until the next start");
            return;
        }
        crash_point();
        let _ = fs::remove_file(path_of(&self.dir, LOCK));
        // An NFS client keeps an open file that is removed, in its directory.
        self.lock = None;
        let _ = fs::remove_dir(path_of(self.share, name_of(&self.record)));
    }
}

/// Whether the directory of the record is not placed yet.
pub fn is_being_made(share: &OwnedFd, record: &str) -> io::Result<bool> {
    below::has(share, &format!("{}/{NEW}", name_of(record)))
}

/// The directory in which that of a record is made.
fn name_of(record: &str) -> String {
    format!("{MAKING}{}", record.replace('/', "-"))
}

/// Makes the names durable by which a directory was placed: after a power cut its record
/// would be that of an unfinished one.
pub fn sync_place(share: &OwnedFd, path: &str) -> io::Result<()> {
    let mut path = path;
    while !path.is_empty() {
        path = below::split(path).0;
        below::sync(&below::walk(share, path)?)?;
    }
    Ok(())
}

/// Removes what dead controllers left in the share. The names of what stays, with the errors:
/// also where its maker lives, as it may yet die.
pub fn sweep(share: &OwnedFd) -> io::Result<Vec<(String, io::Error)>> {
    let mut left = Vec::new();
    for entry in fs::read_dir(path_of(share, ""))? {
        let name = entry?.file_name();
        let Some(record) = name.to_str().and_then(record_of) else {
            continue;
        };
        let why = match DirectoryDraft::begin(share, &record) {
            Ok(Some(_draft)) => continue,
            Ok(None) => io::Error::new(io::ErrorKind::WouldBlock, "a controller works on it"),
            Err(error) => error,
        };
        left.push((name_of(&record), why));
    }
    Ok(left)
}

/// The record whose directory is made in that one; none if the driver has not made it.
fn record_of(name: &str) -> Option<String> {
    let (kind, digests) = name.strip_prefix(MAKING)?.split_once('-')?;
    let parts = match kind {
        "snapshots" => 1,
        "volumes" => 2,
        _ => return None,
    };
    records::is_name(digests, parts).then(|| format!("{kind}/{digests}"))
}

fn is_there(error: &io::Error) -> bool {
    use io::ErrorKind as E;
    [E::AlreadyExists, E::DirectoryNotEmpty].contains(&error.kind())
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, openat};

    use super::*;

    #[test]
    fn what_a_dead_maker_left_is_removed_and_what_a_live_one_makes_is_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let share = openat(CWD, dir.path(), flags, Mode::empty()).expect("opened");
        let digest = "0123456789abcdef".repeat(4);
        let record = &*format!("volumes/{digest}.{digest}");
        let sweep = || super::sweep(&share).expect("swept");
        let has_record = || {
            records::read::<String>(&share, record)
                .expect("read")
                .is_some()
        };
        let begun = || DirectoryDraft::begin(&share, record).expect("begun");
        let dead = dir.path().join(name_of(record));

        fs::create_dir_all(dead.join("new/sub")).expect("made");
        records::write(&share, record, &"dead").expect("written");
        assert!(sweep().is_empty());
        assert!(!dead.exists() && !has_record());

        let live = begun().expect("nobody else makes it");
        drop(live.make("ns/v").expect("made"));
        records::write(&share, record, &"live").expect("written");
        assert!(begun().is_none());
        let left = sweep();
        assert_eq!(left.len(), 1);
        assert_eq!(
            (&*left[0].0, left[0].1.kind()),
            (&*name_of(record), io::ErrorKind::WouldBlock)
        );
        assert_eq!(live.place("ns/v").expect("placed"), Done::Now);
        assert!(!dead.exists() && has_record() && dir.path().join("ns/v").exists());

        // Killed after it was placed.
        fs::create_dir(&dead).expect("made");
        assert!(sweep().is_empty());
        assert!(!dead.exists() && has_record());

        let other = begun().expect("nobody makes it");
        drop(other.make("ns/v").expect("made"));
        assert_eq!(other.place("ns/v").expect("looked"), Done::Already);
        assert!(!dead.exists() && !has_record() && dir.path().join("ns/v").exists());
    }

    #[test]
    fn only_what_the_driver_made_is_removed_and_a_failure_stops_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let share = openat(CWD, dir.path(), flags, Mode::empty()).expect("opened");
        let [a, b] = ["a", "b"].map(|digit| digit.repeat(64));
        let of_users = [
            ".making-docs".to_owned(),
            ".making-volumes-x.y".to_owned(),
            format!(".making-volumes-{a}"),
            format!(".making-snapshots-{a}.{b}"),
            format!(".making-docs-{a}"),
        ];
        let bad = [&a, &b].map(|digest| format!(".making-snapshots-{digest}"));
        let good = format!(".making-volumes-{a}.{b}");
        for name in of_users.iter().chain([&good]) {
            fs::create_dir_all(dir.path().join(name).join("new")).expect("made");
        }
        for name in &bad {
            fs::write(dir.path().join(name), "no directory").expect("written");
        }
        let left = sweep(&share).expect("swept");
        let mut left: Vec<_> = left.into_iter().map(|(name, _)| name).collect();
        left.sort_unstable();
        assert_eq!(left, bad);
        assert!(!dir.path().join(good).exists());
        for name in of_users {
            assert!(dir.path().join(&name).join("new").exists(), "{name}");
        }
    }
}
