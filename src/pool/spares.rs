//! Spare files and directories of a pool, for deletes in a full file system.
//!
//! A delete claims its image and marks its record, which takes new files and a directory.
//! A full file system has no room for them; on XFS, not even for an inode. So the
//! controller keeps a few ready, while there is room. Overwriting blocks that a file has,
//! linking and renaming it take no room that another process could take first, as blocks
//! that are only freed would. A call that uses a spare file has it locked, so a killed one
//! leaves it to others.
//!
//! Versions that know nothing of spares read the files that were made of them as any other:
//! of the same format, with spaces at the end. Their start removes the spare directories.

use std::{
    collections::BTreeSet,
    fs::{self, File, Metadata},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use rustix::fs::{FlockOperation, IFlags, flock, ioctl_getflags, ioctl_setflags};
use uuid::Uuid;

use super::{Pool, PoolError};

/// The spare files and directories of a pool.
#[derive(Clone, Debug)]
pub struct Spares {
    files: PathBuf,
    /// Where a file is written.
    tmp: PathBuf,
    /// Beside the directories of claims, where a directory of XFS then has a block for names.
    dirs: PathBuf,
}

impl Pool {
    /// The spares of this pool.
    pub fn spares(&self) -> Spares {
        Spares {
            files: self.meta_path(FILES),
            tmp: self.meta_path("tmp"),
            dirs: self.meta_path(CLAIMS),
        }
    }

    /// Makes the spares that are missing, as far as there is room. A failure is logged only:
    /// no call needs them until the file system is full.
    pub fn refill_spares(&self) {
        static REFILLING: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
        let refilling = || REFILLING.lock().unwrap_or_else(PoisonError::into_inner);
        // Else another call of this process makes them, and may hang with the pool.
        if refilling().insert(self.dir.clone()) {
            self.refill();
            refilling().remove(&self.dir);
        }
    }

    fn refill(&self) {
        let dirs = [FILES, CLAIMS, "tmp"].map(|name| self.meta_dir(name));
        let dirs = dirs.into_iter().collect::<Result<Vec<_>, _>>();
        let refilled = dirs.and_then(|_| {
            let spares = self.spares();
            let refilled = spares.refill();
            refilled.map_err(|e| self.io("make spare files in", &spares.files, e))
        });
        match refilled {
            Err(PoolError::Io { source, .. }) if is_full(&source) => {
                tracing::debug!(pool = self.name, "no room for all spare files");
            }
            Err(error) => tracing::warn!(%error, "no spare files for deletes in a full pool"),
            Ok(()) => {}
        }
    }
}

impl Spares {
    fn refill(&self) -> io::Result<()> {
        for _ in self.files()?.len()..SPARE_FILES {
            let name = Uuid::new_v4().to_string();
            write_spare(&self.tmp.join(&name), &self.files.join(&name))?;
        }
        (self.dirs()?.len()..SPARE_DIRS).try_for_each(|_| fs::create_dir(self.unused_dir()))
    }

    /// The spare files, locked or not, each by its path from `tmp/` and its path.
    pub fn files(&self) -> io::Result<Vec<(String, PathBuf)>> {
        let mut files = Vec::new();
        for (name, path) in list(&self.files)? {
            match fs::symlink_metadata(&path) {
                Ok(found) if is_spare(&found) => files.push((format!("../{FILES}/{name}"), path)),
                // Not one of these.
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(files)
    }

    fn dirs(&self) -> io::Result<Vec<PathBuf>> {
        let mut dirs = list(&self.dirs)?;
        dirs.retain(|(name, _)| name.starts_with(SPARE_DIR));
        Ok(dirs.into_iter().map(|(_, path)| path).collect())
    }

    /// Moves a spare directory to `to`, where may be an empty one; `false`: there is none.
    pub fn take_dir(&self, to: &Path) -> io::Result<bool> {
        for path in self.dirs()? {
            // A claim that was entered while the directory became a spare one would be taken
            // for one of the next image.
            let is_empty = fs::read_dir(&path).map(|mut entries| entries.next().is_none());
            let taken = is_empty.and_then(|is_empty| {
                if is_empty {
                    fs::rename(&path, to)?;
                }
                Ok(is_empty)
            });
            match taken {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                // Another call took it.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(false)
    }

    /// Makes a file a spare one again, unless there are enough.
    pub fn give_back_file(&self, path: &Path) -> io::Result<()> {
        if self.files()?.len() >= SPARE_FILES {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        fs::rename(path, self.files.join(Uuid::new_v4().to_string()))
    }

    /// Whether no spare directory is in use.
    pub fn has_all_dirs(&self) -> io::Result<bool> {
        Ok(self.dirs()?.len() >= SPARE_DIRS)
    }

    /// Makes a directory a spare one again, unless there are enough.
    pub fn give_back_dir(&self, path: &Path) -> io::Result<()> {
        if self.dirs()?.len() >= SPARE_DIRS {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        fs::rename(path, self.unused_dir())
    }

    fn unused_dir(&self) -> PathBuf {
        self.dirs.join(format!("{SPARE_DIR}{}", Uuid::new_v4()))
    }
}

/// The names and paths in a directory, which may be missing.
fn list(dir: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let named = entries.map(|entry| {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        Ok((name, entry.path()))
    });
    named.collect()
}

/// Whether the error says that a file system or a quota has no room.
pub fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Whether a file is long enough for a spare one.
pub fn is_spare(found: &Metadata) -> bool {
    found.is_file() && found.len() >= SPARE_BYTES as u64
}

/// Makes a file that has all its blocks, by way of one in `tmp/`, which a sweep removes if
/// this process dies.
fn write_spare(draft: &Path, path: &Path) -> io::Result<()> {
    let written = write_draft(draft).and_then(|locked| {
        fs::rename(draft, path)?;
        drop(locked);
        Ok(())
    });
    if written.is_err() {
        let _ = fs::remove_file(draft);
    }
    written
}

fn write_draft(path: &Path) -> io::Result<File> {
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    flock(&file, FlockOperation::LockExclusive)?;
    // Btrfs overwrites such a file in place. Others refuse the flag, and do so anyway.
    let _ = ioctl_getflags(&file).and_then(|flags| ioctl_setflags(&file, flags | IFlags::NOCOW));
    file.write_all(&[b' '; SPARE_BYTES])?;
    // Until then blocks are only promised.
    file.sync_all()?;
    Ok(file)
}

/// For several deletes at once; each makes what it took a spare one again.
const SPARE_FILES: usize = 16;
const SPARE_DIRS: usize = 16;
/// Bytes of a spare file: more than a record of a group of a hundred volumes has.
const SPARE_BYTES: usize = 8 << 10;
const FILES: &str = "spare";
/// Where [`super::claim`] has its directories.
const CLAIMS: &str = "claims";
/// No image's name begins so.
pub const SPARE_DIR: &str = ".spare-";
