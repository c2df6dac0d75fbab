//! Which scope a pool has, once and for all who use it.
//!
//! In a local pool claims of another boot are passed over, as there is only one
//! node that could have made them. So an agent that takes a shared pool for a
//! local one would pass over what other nodes hold, and write to it. Whoever
//! uses a pool first therefore notes its scope in it, durably, and whoever was
//! told another scope is refused.

use std::{
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use super::{
    Pool, PoolError, Scope,
    draft::{Draft, Durability::Durable},
};
use crate::Done;

impl Pool {
    /// Refuses the pool where it is used under another scope than this agent was
    /// told; the first to ask settles it. A short read, for every use.
    pub fn check_scope(&self) -> Result<(), PoolError> {
        let path = self.scope_path();
        let found = if let Some(found) = self.read_scope(&path)? {
            found
        } else {
            let tmp = self.meta_dir("tmp")?;
            // Of two that settle it at once the first one counts.
            let settled = Draft::new(&tmp).and_then(|draft| {
                writeln!(draft.file(), "{}", self.scope)?;
                draft.place_new(&path, Durable)
            });
            let _: Done = settled.map_err(|e| self.io("write", &path, e))?;
            self.read_scope(&path)?.unwrap_or(self.scope)
        };
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

    /// Whether the pool is there and was ever used. Where a mount is missing, its
    /// directory is empty, and that a file is not in it says nothing.
    pub fn is_settled(&self) -> Result<bool, PoolError> {
        let found = self.read_scope(&self.scope_path())?;
        Ok(found.is_some())
    }

    fn scope_path(&self) -> PathBuf {
        self.meta_path("scope")
    }

    fn read_scope(&self, path: &Path) -> Result<Option<Scope>, PoolError> {
        self.open_dir()?;
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(self.io("read", path, e)),
        };
        match text.trim() {
            "local" => Ok(Some(Scope::Local)),
            "shared" => Ok(Some(Scope::Shared)),
            other => {
                let why = format!("it holds {other:?}, neither `local` nor `shared`");
                Err(self.io("read", path, io::Error::other(why)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::claim::{self, Access, Claim};

    #[test]
    fn the_first_use_settles_the_scope() {
        let dir = tempfile::tempdir().unwrap();
        let [local, shared] = [Scope::Local, Scope::Shared].map(|scope| Pool {
            name: "p".to_owned(),
            dir: dir.path().to_owned(),
            scope,
        });
        let by = |node: &str| Claim {
            node_id: node.to_owned(),
            boot_id: format!("boot of {node}"),
            volume_id: String::new(),
            access: Access::Exclusive,
            read_only: false,
        };
        let _ = claim::claim(&shared, "i.img", &by("a")).unwrap();
        let error = claim::claim(&local, "i.img", &by("b")).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("local") && text.contains(",shared"), "{text}");
        assert_eq!(claim::holders(&shared, "i.img").unwrap(), [by("a")]);
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
        };
        let refused = pool.check_scope();
        assert!(matches!(refused, Err(PoolError::NotReady { .. })));
        assert!(!pool.dir.exists());
    }
}
