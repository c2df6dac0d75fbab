//! The scope file of a pool: its scope, and the proof that the pool is mounted.
//!
//! In a local pool an agent ignores claims of another boot, as only its own node can have
//! made them. So an agent that takes a shared pool for a local one would ignore claims of
//! other nodes, and write to their images. Therefore the first use of a pool writes its
//! scope there, durably, and an agent that is configured for another scope refuses the
//! pool.
//!
//! The same file distinguishes a pool from the empty directory below its mount. So only
//! making a volume or claiming an image writes it, all else only reads it; and once the
//! process has seen a pool with the file, it takes no other directory for that pool
//! ([`PoolError::Uninitialized`]).

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read as _, Write as _},
    os::fd::{AsFd as _, BorrowedFd},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use rustix::{
    fs::{Mode, OFlags, fstat, openat},
    io::Errno,
};

use super::{
    META, Pool, PoolError, Scope,
    draft::{Draft, Durability::Durable},
    file_stamp::FileStamp,
};
use crate::Done;

/// Where a pool's scope file was last read, by the pool's path.
static SEEN: Mutex<BTreeMap<PathBuf, SeenScope>> = Mutex::new(BTreeMap::new());

/// A scope file as it was read.
#[derive(Clone, Copy, Debug)]
struct SeenScope {
    /// The directory (`st_dev`, `st_ino`) of its pool.
    at: (u64, u64),
    /// The file, where it is as [`Pool::initialize`] writes it: that of another scope then has
    /// another length, also within one tick of the clock.
    file: Option<FileStamp>,
    scope: Scope,
}

impl Pool {
    /// Fails where the pool is not mounted or has another scope than configured; writes the
    /// scope of a new pool. Making a volume and claiming an image call it. Once the file was
    /// read, it mostly costs one system call.
    pub fn initialize(&self) -> Result<(), PoolError> {
        self.initialize_at(self.open_dir()?.as_fd())
    }

    /// [`Pool::initialize`] of the pool's directory, which is open.
    pub fn initialize_at(&self, dir: BorrowedFd<'_>) -> Result<(), PoolError> {
        if let Some(found) = self.scope_in_use(dir)? {
            return self.refuse_other(found);
        }
        let (tmp, path) = (self.meta_dir("tmp")?, self.scope_path());
        // Of two writers the first one wins.
        let settled = Draft::new(&tmp).and_then(|draft| {
            writeln!(draft.file(), "{}", self.scope)?;
            draft.place_new(&path, Durable)
        });
        let _: Done = settled.map_err(|e| self.io("write", &path, e))?;
        self.refuse_other(self.scope_in_use(dir)?.unwrap_or(self.scope))
    }

    /// As [`Pool::initialize`], but only reads, and accepts a new pool.
    pub fn check_scope(&self) -> Result<(), PoolError> {
        let found = self.scope_in_use(self.open_dir()?.as_fd())?;
        found.map_or(Ok(()), |found| self.refuse_other(found))
    }

    /// As [`Pool::check_scope`], for existing images: a pool without its scope file has none,
    /// so it counts as not mounted.
    pub fn check_initialized(&self) -> Result<(), PoolError> {
        match self.scope_in_use(self.open_dir()?.as_fd())? {
            Some(found) => self.refuse_other(found),
            None => Err(self.uninitialized()),
        }
    }

    /// Whether the pool is mounted and was used before. If not, a missing file proves nothing.
    pub fn is_initialized(&self) -> Result<bool, PoolError> {
        let found = self.read_scope(self.open_dir()?.as_fd())?;
        Ok(found.is_some())
    }

    /// The error of a pool that is not mounted.
    pub(super) fn uninitialized(&self) -> PoolError {
        PoolError::Uninitialized {
            pool: self.name.clone(),
            dir: self.dir.clone(),
        }
    }

    /// The scope of the pool; `None` for a new pool.
    fn scope_in_use(&self, dir: BorrowedFd<'_>) -> Result<Option<Scope>, PoolError> {
        let seen = || SEEN.lock().unwrap_or_else(PoisonError::into_inner);
        let before = seen().get(&self.dir).copied();
        if let Some(SeenScope {
            file: Some(file),
            scope,
            ..
        }) = before
            && FileStamp::of(dir, &Path::new(META).join(SCOPE)) == Ok(file)
        {
            return Ok(Some(scope));
        }
        let stat = fstat(dir).map_err(|errno| self.io("look at", &self.dir, errno))?;
        let at = (stat.st_dev, stat.st_ino);
        let Some((scope, file)) = self.read_scope(dir)? else {
            return match seen().get(&self.dir) {
                Some(before) if before.at != at => Err(self.uninitialized()),
                _ => Ok(None),
            };
        };
        seen().insert(self.dir.clone(), SeenScope { at, file, scope });
        Ok(Some(scope))
    }

    fn refuse_other(&self, found: Scope) -> Result<(), PoolError> {
        if found == self.scope {
            return Ok(());
        }
        Err(PoolError::OtherScope {
            pool: self.name.clone(),
            dir: self.dir.clone(),
            given: self.scope,
            found,
        })
    }

    fn scope_path(&self) -> PathBuf {
        self.meta_path(SCOPE)
    }

    /// What the scope file holds, and the file as it was before it was read, if it is as
    /// [`Pool::initialize`] writes it.
    fn read_scope(
        &self,
        dir: BorrowedFd<'_>,
    ) -> Result<Option<(Scope, Option<FileStamp>)>, PoolError> {
        let path = self.scope_path();
        let file = Path::new(META).join(SCOPE);
        let file = match openat(dir, file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(self.io("open", &path, errno)),
        };
        let looked = FileStamp::of(file.as_fd(), Path::new(""));
        let looked = looked.map_err(|errno| self.io("look at", &path, errno))?;
        let mut text = [0; 64];
        let read = (&file).read(&mut text);
        let text = &text[..read.map_err(|e| self.io("read", &path, e))?];
        let found = match text.trim_ascii() {
            b"local" => Scope::Local,
            b"shared" => Scope::Shared,
            other => {
                let other = other.escape_ascii();
                let why = format!("it holds \"{other}\", neither `local` nor `shared`");
                return Err(self.io("read", &path, io::Error::other(why)));
            }
        };
        let is_as_written = text == format!("{found}\n").as_bytes();
        Ok(Some((found, is_as_written.then_some(looked))))
    }
}

const SCOPE: &str = "scope";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::claim::{self, Claim, Sharing};

    #[test]
    fn the_first_use_sets_the_scope() {
        let dir = tempfile::tempdir().unwrap();
        let [local, shared] = [Scope::Local, Scope::Shared].map(|scope| Pool {
            name: "p".to_owned(),
            dir: dir.path().to_owned(),
            scope,
            mounted: false,
        });
        let by = |node: &str| Claim {
            node_id: node.to_owned(),
            boot_id: format!("boot of {node}"),
            volume_id: String::new(),
            access: Sharing::Exclusive,
            read_only: false,
        };
        let _ = claim::claim(&shared, "i.img", &by("a")).unwrap();
        let error = claim::claim(&local, "i.img", &by("b")).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("local") && text.contains(",shared"), "{text}");
        assert_eq!(claim::owners(&shared, "i.img").unwrap(), [by("a")]);
        shared.check_scope().unwrap();

        // Right after it was read.
        std::fs::write(local.scope_path(), "local\n").unwrap();
        shared.check_scope().unwrap_err();
        local.check_scope().unwrap();
        std::fs::write(local.scope_path(), "loc").unwrap();
        for pool in [&local, &shared] {
            assert!(matches!(pool.check_scope(), Err(PoolError::Io { .. })));
        }
    }

    #[test]
    fn a_pool_that_is_not_there_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool {
            name: "p".to_owned(),
            dir: dir.path().join("unmounted"),
            scope: Scope::Local,
            mounted: false,
        };
        for refused in [pool.initialize(), pool.check_scope()] {
            assert!(matches!(refused, Err(PoolError::NotReady { .. })));
        }
        assert!(!pool.dir.exists());
    }

    #[test]
    fn reading_a_pool_sets_no_scope() {
        let (dir, pool) = pool();
        pool.check_scope().unwrap();
        assert!(matches!(
            pool.check_initialized(),
            Err(PoolError::Uninitialized { .. })
        ));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        pool.initialize().unwrap();
        pool.check_initialized().unwrap();
    }

    /// The mount point after the pool's file system was unmounted.
    #[test]
    fn another_directory_does_not_become_a_pool_that_was_seen() {
        let (dir, mut pool) = pool();
        let elsewhere = dir.path().join("elsewhere");
        pool.dir = dir.path().join("pool");
        std::fs::create_dir(&pool.dir).unwrap();
        pool.initialize().unwrap();

        std::fs::rename(&pool.dir, &elsewhere).unwrap();
        std::fs::create_dir(&pool.dir).unwrap();
        for refused in [
            pool.check_scope(),
            pool.check_initialized(),
            pool.initialize(),
        ] {
            assert!(matches!(refused, Err(PoolError::Uninitialized { .. })));
        }
        assert!(!pool.is_initialized().unwrap());
        assert_eq!(std::fs::read_dir(&pool.dir).unwrap().count(), 0);

        std::fs::remove_dir(&pool.dir).unwrap();
        std::fs::rename(&elsewhere, &pool.dir).unwrap();
        pool.initialize().unwrap();
        // An administrator resets the scope.
        std::fs::remove_file(pool.scope_path()).unwrap();
        pool.initialize().unwrap();
    }

    fn pool() -> (tempfile::TempDir, Pool) {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool {
            name: "p".to_owned(),
            dir: dir.path().to_owned(),
            scope: Scope::Local,
            mounted: false,
        };
        (dir, pool)
    }
}
