//! The ids of the records in each pool's catalogue, in memory.
//!
//! A page of a listing reads the records of its own entries only. To find these it needs all
//! ids in their order, which the directory of the records does not have. They are 16 bytes
//! each, and are kept while the directory does not change ([`DirectoryStamp`]). Records and
//! images are not kept: each page reads them.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use uuid::Uuid;

use super::{
    super::ProvisionError,
    catalogue::{Catalogue, EntryKind},
    stamp::DirectoryStamp,
};
use crate::pool::Pool;

/// The ids of records, by their directory.
#[derive(Debug, Default)]
pub struct IdLists(Mutex<HashMap<PathBuf, IdList>>);

#[derive(Debug)]
struct IdList {
    stamp: DirectoryStamp,
    ids: Arc<[Uuid]>,
}

impl IdLists {
    /// [`Catalogue::ids`], which reads the directory only if it changed.
    pub fn ids<K: EntryKind>(&self, pool: &Pool) -> Result<Arc<[Uuid]>, ProvisionError> {
        pool.check_scope()?;
        let dir = pool.meta_path(K::RECORDS);
        let stamp = DirectoryStamp::of(&dir);
        if let Some(list) = self.lock().get(&dir)
            && Some(list.stamp) == stamp
        {
            return Ok(Arc::clone(&list.ids));
        }
        // Not under the lock: a pool that hangs delays no other.
        let ids: Arc<[Uuid]> = Catalogue::<K>::of(pool).ids()?.into();
        if let Some(stamp) = stamp {
            let ids = Arc::clone(&ids);
            self.lock().insert(dir, IdList { stamp, ids });
        }
        Ok(ids)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, IdList>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
