//! Listings in pages.
//!
//! Ids increase with the time of their making, entries are listed by id, and a
//! token is the last id that was listed. So a page goes on behind it whether or
//! not that entry is still there, and what is made meanwhile comes at the end.

use uuid::Uuid;

use super::{
    super::{Error, Listing, Page, Snapshot, Volume},
    catalogue::{Catalogue, Entry, Kind},
    snapshots::SnapshotDetail,
    store::{Store, size_of},
    volumes::VolumeDetail,
};
use crate::{chain, pool::Pool};

impl Store {
    pub fn list_volumes(&self, what: &Listing) -> Result<Page<Volume>, Error> {
        self.page(what, |pool, entry: &Entry<VolumeDetail>| {
            let bytes = size_of(&VolumeDetail::image(pool, entry.id))?;
            Ok(Some(self.volume(pool, entry, bytes.unwrap_or(0))))
        })
    }

    pub fn list_snapshots(
        &self,
        what: &Listing,
        volume: Option<&str>,
    ) -> Result<Page<Snapshot>, Error> {
        self.page(what, |pool, entry: &Entry<SnapshotDetail>| {
            if volume.is_some_and(|volume| volume != entry.detail.source) {
                return Ok(None);
            }
            self.snapshot(pool, entry).map(Some)
        })
    }

    fn page<K: Kind, T>(
        &self,
        what: &Listing,
        show: impl Fn(&Pool, &Entry<K>) -> Result<Option<T>, Error>,
    ) -> Result<Page<T>, Error> {
        let behind = match &what.from {
            Some(token) => {
                let id = Uuid::try_parse(token);
                Some(id.map_err(|_| Error::BadToken(token.clone()))?)
            }
            None => None,
        };
        let mut all = Vec::new();
        for pool in self.pools.iter() {
            let ids = what.or_omit(Catalogue::<K>::of(pool).ids())?;
            all.extend(ids.into_iter().map(|id| (id, pool)));
        }
        all.sort_unstable_by_key(|(id, _)| *id);
        all.retain(|(id, _)| behind.is_none_or(|last| *id > last));

        let most = match what.max {
            0 => LARGEST_PAGE,
            max => max.min(LARGEST_PAGE),
        };
        let mut entries = Vec::new();
        let mut last = None;
        for (id, pool) in all {
            // Gone since it was listed, or on its way out.
            let entry = match Catalogue::of(pool).ready(id) {
                Ok(Some(entry)) => entry,
                Ok(None) => continue,
                // Its own calls fail; it must not hide all the others.
                Err(error @ (Error::Corrupt { .. } | Error::Io { .. })) => {
                    tracing::warn!(error = chain(&error), "not listed");
                    continue;
                }
                Err(error) => return Err(error),
            };
            let Some(shown) = show(pool, &entry)? else {
                continue;
            };
            if entries.len() == most {
                let next = last.map(|id: Uuid| id.to_string());
                return Ok(Page { entries, next });
            }
            entries.push(shown);
            last = Some(id);
        }
        let next = None;
        Ok(Page { entries, next })
    }
}

/// Entries in a page, whatever is asked for: clients in Go refuse messages of
/// more than 4 MiB, and an entry has some hundred bytes, at worst a few thousand.
pub const LARGEST_PAGE: usize = 1000;
