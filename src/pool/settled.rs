//! Which scope a pool has, once and for all who use it, and whether it is there.
//!
//! In a local pool claims of another boot are passed over, as there is only one
//! node that could have made them. So an agent that takes a shared pool for a
//! local one would pass over what other nodes hold, and write to it. Whoever
//! uses a pool first therefore notes its scope in it, durably, and whoever was
//! told another scope is refused.
//!
//! The same note tells a pool from the empty directory that it is mounted on. So
//! only who makes a volume or claims an image writes it, all else only reads; and
//! where a pool was seen with its note, no other directory becomes that pool for
//! as long as the process lives ([`PoolError::Away`]).

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Write as _},
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
};
use crate::Done;

/// Which directory a pool was when it last held its note, by the pool's path:
/// `st_dev` and `st_ino`.
static SEEN: Mutex<BTreeMap<PathBuf, (u64, u64)>> = Mutex::new(BTreeMap::new());

impl Pool {
    /// Refuses the pool where it is away, or used under another scope than this
    /// agent was told; one that nobody has used yet is settled. For what makes a
    /// volume or claims an image. A short read, as a rule.
    pub fn settle(&self) -> Result<(), PoolError> {
        if let Some(found) = self.look()? {
            return self.refuse_other(found);
        }
        let (tmp, path) = (self.meta_dir("tmp")?, self.scope_path());
        // Of two that settle it at once the first one counts.
        let settled = Draft::new(&tmp).and_then(|draft| {
            writeln!(draft.file(), "{}", self.scope)?;
            draft.place_new(&path, Durable)
        });
        let _: Done = settled.map_err(|e| self.io("write", &path, e))?;
        self.refuse_other(self.look()?.unwrap_or(self.scope))
    }

    /// As [`Pool::settle`], but only reads: one that nobody has used yet will do.
    pub fn check_scope(&self) -> Result<(), PoolError> {
        let found = self.look()?;
        found.map_or(Ok(()), |found| self.refuse_other(found))
    }

    /// As [`Pool::check_scope`], for what is in the pool already: one that nobody
    /// has used is away.
    pub fn check_settled(&self) -> Result<(), PoolError> {
        match self.look()? {
            Some(found) => self.refuse_other(found),
            None => Err(self.away()),
        }
    }

    /// Whether the pool is there and was ever used. Where a mount is missing, its
    /// directory is empty, and that a file is not in it says nothing.
    pub fn is_settled(&self) -> Result<bool, PoolError> {
        let (found, _) = self.read_scope()?;
        Ok(found.is_some())
    }

    /// What the pool's directory is where the pool is not.
    pub(super) fn away(&self) -> PoolError {
        PoolError::Away {
            pool: self.name.clone(),
            dir: self.dir.clone(),
        }
    }

    /// The scope that was settled; none where nobody has used the pool yet.
    fn look(&self) -> Result<Option<Scope>, PoolError> {
        let (found, at) = self.read_scope()?;
        let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
        if found.is_some() {
            seen.insert(self.dir.clone(), at);
        } else if seen.get(&self.dir).is_some_and(|before| *before != at) {
            return Err(self.away());
        }
        Ok(found)
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

    /// What the note says, and which directory it was looked for in.
    fn read_scope(&self) -> Result<(Option<Scope>, (u64, u64)), PoolError> {
        let dir = self.open_dir()?;
        let stat = fstat(&dir).map_err(|errno| self.io("look at", &self.dir, errno))?;
        let at = (stat.st_dev, stat.st_ino);
        let path = self.scope_path();
        let note = Path::new(META).join(SCOPE);
        let file = match openat(&dir, note, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok((None, at)),
            Err(errno) => return Err(self.io("open", &path, errno)),
        };
        let text = io::read_to_string(file).map_err(|e| self.io("read", &path, e))?;
        let found = match text.trim() {
            "local" => Scope::Local,
            "shared" => Scope::Shared,
            other => {
                let why = format!("it holds {other:?}, neither `local` nor `shared`");
                return Err(self.io("read", &path, io::Error::other(why)));
            }
        };
        Ok((Some(found), at))
    }
}

const SCOPE: &str = "scope";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::claim::{self, Claim, Sharing};

    #[test]
    fn the_first_use_settles_the_scope() {
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
        for refused in [pool.settle(), pool.check_scope()] {
            assert!(matches!(refused, Err(PoolError::NotReady { .. })));
        }
        assert!(!pool.dir.exists());
    }

    #[test]
    fn to_look_at_a_pool_settles_nothing() {
        let (dir, pool) = pool();
        pool.check_scope().unwrap();
        assert!(matches!(pool.check_settled(), Err(PoolError::Away { .. })));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        pool.settle().unwrap();
        pool.check_settled().unwrap();
    }

    /// The directory that is left where the pool's file system was unmounted.
    #[test]
    fn another_directory_does_not_become_a_pool_that_was_seen() {
        let (dir, mut pool) = pool();
        let elsewhere = dir.path().join("elsewhere");
        pool.dir = dir.path().join("pool");
        std::fs::create_dir(&pool.dir).unwrap();
        pool.settle().unwrap();

        std::fs::rename(&pool.dir, &elsewhere).unwrap();
        std::fs::create_dir(&pool.dir).unwrap();
        for refused in [pool.check_scope(), pool.check_settled(), pool.settle()] {
            assert!(matches!(refused, Err(PoolError::Away { .. })));
        }
        assert!(!pool.is_settled().unwrap());
        assert_eq!(std::fs::read_dir(&pool.dir).unwrap().count(), 0);

        std::fs::remove_dir(&pool.dir).unwrap();
        std::fs::rename(&elsewhere, &pool.dir).unwrap();
        pool.settle().unwrap();
        // By hand, to have it settled anew.
        std::fs::remove_file(pool.scope_path()).unwrap();
        pool.settle().unwrap();
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
