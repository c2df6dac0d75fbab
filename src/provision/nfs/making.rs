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
    records,
};
use crate::{Done, crash_point, pool::draft};

const PREFIX: &str = ".making-";
const NEW: &str = "new";
const LOCK: &str = "lock";

/// A directory that is being filled. Dropping it before it is placed removes it.
#[derive(Debug)]
pub struct DirectoryDraft<'s> {
    share: &'s OwnedFd,
    record: String,
    /// The directory that has it.
    dir: OwnedFd,
    _lock: File,
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
            _lock: lock,
        };
        draft.clear()?;
        Ok(Some(draft))
    }

    /// Removes the directory with its record, if it is not placed.
    fn clear(&self) -> io::Result<()> {
        if below::has(&self.dir, NEW)? {
            records::remove(self.share, &self.record)?;
            crash_point();
            let _ = below::remove(&self.dir, NEW)?;
        }
        Ok(())
    }

    /// Makes the directory to fill.
    pub fn make(&self) -> io::Result<OwnedFd> {
        crash_point();
        below::make(&self.dir, NEW, 0o700)
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
        let _ = fs::remove_dir(path_of(self.share, &name_of(&self.record)));
    }
}

/// Whether the directory of the record is not placed yet.
pub fn is_being_made(share: &OwnedFd, record: &str) -> io::Result<bool> {
    below::has(share, &format!("{}/{NEW}", name_of(record)))
}

/// The directory in which that of a record is made.
fn name_of(record: &str) -> String {
    format!("{PREFIX}{}", record.replace('/', "-"))
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

/// Removes what dead controllers left in the share.
pub fn sweep(share: &OwnedFd) -> io::Result<()> {
    for entry in fs::read_dir(path_of(share, ""))? {
        let name = entry?.file_name();
        let record = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if let Some(record) = record {
            drop(DirectoryDraft::begin(share, &record.replacen('-', "/", 1))?);
        }
    }
    Ok(())
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
        let record = "volumes/a.b";
        let has_record = || {
            records::read::<String>(&share, record)
                .expect("read")
                .is_some()
        };
        let begun = || DirectoryDraft::begin(&share, record).expect("begun");
        let dead = dir.path().join(".making-volumes-a.b");

        fs::create_dir_all(dead.join("new/sub")).expect("made");
        records::write(&share, record, &"dead").expect("written");
        sweep(&share).expect("swept");
        assert!(!dead.exists() && !has_record());

        let live = begun().expect("nobody else makes it");
        drop(live.make().expect("made"));
        records::write(&share, record, &"live").expect("written");
        assert!(begun().is_none());
        sweep(&share).expect("swept");
        assert_eq!(live.place("ns/v").expect("placed"), Done::Now);
        assert!(!dead.exists() && has_record() && dir.path().join("ns/v").exists());

        // Killed after it was placed.
        fs::create_dir(&dead).expect("made");
        sweep(&share).expect("swept");
        assert!(!dead.exists() && has_record());

        let other = begun().expect("nobody makes it");
        drop(other.make().expect("made"));
        assert_eq!(other.place("ns/v").expect("looked"), Done::Already);
        assert!(!dead.exists() && !has_record() && dir.path().join("ns/v").exists());
    }
}
