//! Atomic creation and replacement of files.
//!
//! A draft is written under a unique name in the pool's `tmp/` and moved to its path
//! by link(2) (never over another file) or rename(2). The writer of a [`Draft`] keeps it
//! locked by flock(2), so the writer of an unlocked file in `tmp/` is dead or about to
//! move it ([`replace`]), and [`sweep`] may remove the file.

use std::{
    fs::File,
    io::{self, Write as _},
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use uuid::Uuid;

use super::spares::{Spares, is_full, is_spare};
use crate::{Done, crash_point};

/// Whether a change must outlive a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// No: it is valid until the next boot only.
    Volatile,
    /// Yes, by fsync of the file and of its directory.
    Durable,
}

/// An unfinished file. Dropping it before it is placed removes it, or unlocks a spare one.
#[derive(Debug)]
pub struct Draft {
    file: File,
    path: PathBuf,
    id: String,
    is_spare: bool,
}

impl Draft {
    /// Makes an empty draft in the directory `tmp`.
    pub fn new(tmp: &Path) -> io::Result<Self> {
        loop {
            let id = unique_name();
            let path = tmp.join(&id);
            let file = create(&path)?;
            let draft = Self {
                file,
                path,
                id,
                is_spare: false,
            };
            // Only a sweep can have locked it, for a moment, and then removes it.
            flock(&draft.file, FlockOperation::LockExclusive)?;
            if is_at(&draft.file, &draft.path) {
                return Ok(draft);
            }
        }
    }

    /// Makes a durable draft of what `content` makes of its id, in the directory `tmp`; of a
    /// spare file where the file system is full. That may be longer, and ends in spaces.
    pub fn written(
        tmp: &Path,
        spares: &Spares,
        content: impl Fn(&str) -> Vec<u8>,
    ) -> io::Result<Self> {
        match Self::new(tmp).and_then(|draft| draft.fill(&content)) {
            Err(full) if is_full(&full) => Self::of_spare(spares)?.ok_or(full)?.fill(&content),
            made => made,
        }
    }

    /// A spare file that no other call has locked.
    fn of_spare(spares: &Spares) -> io::Result<Option<Self>> {
        for (id, path) in spares.files()? {
            let file = match open_to_lock(&path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(e),
            };
            // A dead controller's claim may be a link of it until the next start.
            if try_lock(&file)? && is_at(&file, &path) && file.metadata()?.nlink() == 1 {
                crash_point();
                return Ok(Some(Self {
                    file,
                    path,
                    id,
                    is_spare: true,
                }));
            }
        }
        Ok(None)
    }

    fn fill(self, content: impl Fn(&str) -> Vec<u8>) -> io::Result<Self> {
        let mut bytes = content(self.id());
        // Not shortened, so that a spare file keeps its blocks.
        let found = usize::try_from(self.file.metadata()?.len()).unwrap_or_default();
        bytes.resize(found.max(bytes.len()), b' ');
        self.file.write_all_at(&bytes, 0)?;
        // NFS says only here that the server has no room.
        self.file.sync_all()?;
        Ok(self)
    }

    /// Its unique path from `tmp`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The file to write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Links it at `path`, unless a file exists there.
    pub fn place_new(self, path: &Path, durability: Durability) -> io::Result<Done> {
        self.flush(durability)?;
        crash_point();
        match std::fs::hard_link(&self.path, path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(Done::Already),
            Err(e) => return Err(e),
        }
        crash_point();
        sync_parent(path, durability)?;
        Ok(Done::Now)
    }

    /// Moves a written draft to `path`, in place of a file there, durably.
    pub fn replace(self, path: &Path) -> io::Result<()> {
        crash_point();
        std::fs::rename(&self.path, path)?;
        crash_point();
        sync_parent(path, Durability::Durable)
    }

    /// Gives it a second name, which does not end with it.
    pub fn link(&self, path: &Path) -> io::Result<()> {
        let linked = std::fs::hard_link(&self.path, path);
        linked.map_err(|error| match error.kind() {
            // A sweep of another machine, as after NFS lost the lock.
            io::ErrorKind::NotFound if !is_at(&self.file, &self.path) => {
                io::Error::other(format!("{} was removed", self.path.display()))
            }
            _ => error,
        })
    }

    /// [`Draft::place_new`], durable, of a file that stays locked for as long
    /// as the returned descriptor is open.
    pub fn place_new_locked(self, path: &Path) -> io::Result<Option<File>> {
        // A duplicate descriptor shares the lock (flock(2)).
        let lock = self.file.try_clone()?;
        let done = self.place_new(path, Durability::Durable)?;
        Ok((done == Done::Now).then_some(lock))
    }

    fn flush(&self, durability: Durability) -> io::Result<()> {
        match durability {
            Durability::Durable => self.file.sync_all(),
            Durability::Volatile => Ok(()),
        }
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After a rename this name is gone; after a link it is a second name of the inode.
        if !self.is_spare {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Replaces a file atomically, by a file in `tmp`, which it returns. That one has no lock: if
/// a sweep removes it, this makes another.
pub fn replace(tmp: &Path, path: &Path, bytes: &[u8], how: Durability) -> io::Result<File> {
    loop {
        let draft = tmp.join(unique_name());
        match write_and_move(&draft, path, bytes, how) {
            Ok(file) => {
                sync_parent(path, how)?;
                return Ok(file);
            }
            // Not the directories are missing, so it was the file.
            Err(e) if e.kind() == io::ErrorKind::NotFound && both_exist(tmp, path) => {}
            Err(e) => {
                let _ = std::fs::remove_file(&draft);
                return Err(e);
            }
        }
    }
}

fn write_and_move(draft: &Path, path: &Path, bytes: &[u8], how: Durability) -> io::Result<File> {
    let mut file = create(draft)?;
    file.write_all(bytes)?;
    if how == Durability::Durable {
        file.sync_all()?;
    }
    crash_point();
    std::fs::rename(draft, path)?;
    crash_point();
    Ok(file)
}

fn both_exist(tmp: &Path, path: &Path) -> bool {
    tmp.is_dir() && path.parent().is_some_and(Path::is_dir)
}

/// A file of that name, which does not exist yet.
fn create(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    let options = options.read(true).write(true).create_new(true);
    let file = options.mode(0o600).open(path)?;
    crash_point();
    Ok(file)
}

/// A name that no other draft has or had, of this process or any other.
fn unique_name() -> String {
    static PROCESS: LazyLock<Uuid> = LazyLock::new(Uuid::new_v4);
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}", *PROCESS, NEXT.fetch_add(1, Relaxed))
}

/// Removes a file; [`Done::Already`] if there is none.
pub fn remove(path: &Path, how: Durability) -> io::Result<Done> {
    crash_point();
    match std::fs::remove_file(path) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Done::Already),
        Err(e) => return Err(e),
    }
    crash_point();
    sync_parent(path, how)?;
    Ok(Done::Now)
}

/// Removes a file durably, and makes it a spare one again if it was.
pub fn remove_or_give_back(path: &Path, spares: &Spares) -> io::Result<Done> {
    let was_spare = std::fs::metadata(path).is_ok_and(|found| is_spare(&found));
    if !was_spare || spares.give_back_file(path).is_err() {
        return remove(path, Durability::Durable);
    }
    crash_point();
    sync_parent(path, Durability::Durable)?;
    Ok(Done::Now)
}

/// Makes the names in the directory of `path` durable.
fn sync_parent(path: &Path, how: Durability) -> io::Result<()> {
    match (how, path.parent()) {
        (Durability::Durable, Some(dir)) => File::open(dir)?.sync_all(),
        _ => Ok(()),
    }
}

/// Makes a draft in `tmp`, links it, and removes both names. Fails where that, or its lock,
/// does not work.
pub fn try_out(tmp: &Path) -> io::Result<()> {
    let draft = Draft::new(tmp)?;
    if is_live(tmp, draft.id())? {
        // In `tmp`, too, where a sweep removes what a crash left.
        let second = tmp.join(unique_name());
        draft.link(&second)?;
        return std::fs::remove_file(second);
    }
    Err(io::Error::other(
        "a file that is locked could be locked again",
    ))
}

/// Whether the writer of this draft lives.
pub fn is_live(tmp: &Path, id: &str) -> io::Result<bool> {
    let file = match open_to_lock(&tmp.join(id)) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e),
    };
    Ok(!try_lock(&file)?)
}

/// Opens a file for locking: NFS does not lock a file that is open read-only.
pub fn open_to_lock(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

/// Locks a file unless another descriptor has it locked (flock(2)).
pub fn try_lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether an open file is still at this path.
pub fn is_at(file: &File, path: &Path) -> bool {
    let (mine, there) = (file.metadata(), std::fs::metadata(path));
    matches!((mine, there), (Ok(a), Ok(b)) if (a.dev(), a.ino()) == (b.dev(), b.ino()))
}

/// Removes the drafts of dead processes; returns how many.
///
/// It may remove a draft that was just created and is not locked yet; its writer then
/// makes another.
pub fn sweep(tmp: &Path) -> io::Result<usize> {
    let mut swept = 0;
    for entry in std::fs::read_dir(tmp)? {
        let path = entry?.path();
        let file = match open_to_lock(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        if try_lock(&file)? {
            match std::fs::remove_file(&path) {
                Ok(()) => swept += 1,
                // Its writer placed or removed it just before this lock.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
    }
    Ok(swept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_takes_its_place_whole_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let tmp = dir.path().join("tmp");
        std::fs::create_dir(&tmp).unwrap();
        let at = dir.path().join("file");
        let new = |text: &str| {
            let mut draft = Draft::new(&tmp).unwrap();
            draft.file.write_all(text.as_bytes()).unwrap();
            draft.place_new(&at, Durability::Durable).unwrap()
        };
        assert_eq!(new("one"), Done::Now);
        assert_eq!(new("two"), Done::Already);
        assert_eq!(std::fs::read(&at).unwrap(), b"one");
        replace(&tmp, &at, b"three", Durability::Volatile).unwrap();
        assert_eq!(std::fs::read(&at).unwrap(), b"three");
        assert_eq!(remove(&at, Durability::Durable).unwrap(), Done::Now);
        assert_eq!(remove(&at, Durability::Durable).unwrap(), Done::Already);
        assert_eq!(std::fs::read_dir(&tmp).unwrap().count(), 0);
    }

    #[test]
    fn the_sweep_leaves_drafts_that_are_locked() {
        let dir = tempfile::tempdir().unwrap();
        let live = Draft::new(dir.path()).unwrap();
        std::fs::write(dir.path().join("dead"), "x").unwrap();
        assert!(is_live(dir.path(), live.id()).unwrap() && !is_live(dir.path(), "dead").unwrap());
        assert_eq!(sweep(dir.path()).unwrap(), 1);
        assert!(live.path.exists() && !dir.path().join("dead").exists());
    }

    #[test]
    fn a_draft_that_a_sweep_took_is_made_anew() {
        use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    sweep(dir.path()).unwrap();
                }
            });
            let lost = (0..2000).find(|_| {
                let draft = Draft::new(dir.path()).unwrap();
                !draft.path.exists()
            });
            done.store(true, Relaxed);
            assert_eq!(lost, None);
        });
    }
}
