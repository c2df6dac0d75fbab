//! Listings in pages.
//!
//! Ids increase with the time of their making, entries are listed by id, and a
//! token is the last id that was listed. So a page continues behind it whether or not that
//! entry is still there, and entries that are made meanwhile come at the end.

use uuid::Uuid;

use super::{
    super::{ListEntry, ListRequest, ProvisionError, SnapshotInfo, VolumeInfo},
    ImageStore,
    catalogue::{Catalogue, CatalogueEntry, EntryKind},
    id_lists::IdLists,
    snapshots::SnapshotDetail,
    store::size_of,
    volumes::VolumeDetail,
};
use crate::{error_chain, pool::Pool};

impl ImageStore {
    pub(super) fn list_volumes(
        &self,
        what: &ListRequest,
        pool: Option<&str>,
    ) -> Result<Vec<ListEntry<VolumeInfo>>, ProvisionError> {
        let pool = self.pools.get_or_only(pool)?;
        let ids = &self.id_lists;
        entries(pool, ids, what, |entry: &CatalogueEntry<VolumeDetail>| {
            let bytes = size_of(&VolumeDetail::image(pool, entry.id))?;
            Ok(Some(self.volume(pool, entry, bytes.unwrap_or(0))))
        })
    }

    pub(super) fn list_snapshots(
        &self,
        what: &ListRequest,
        pool: Option<&str>,
        volume: Option<&str>,
    ) -> Result<Vec<ListEntry<SnapshotInfo>>, ProvisionError> {
        let pool = self.pools.get_or_only(pool)?;
        let ids = &self.id_lists;
        entries(pool, ids, what, |entry: &CatalogueEntry<SnapshotDetail>| {
            if volume.is_some_and(|volume| volume != entry.detail.source) {
                return Ok(None);
            }
            self.snapshot(pool, entry).map(Some)
        })
    }
}

/// A pool's first entries behind a token: those of a page, and one more, which shows
/// that the page is not the last.
fn entries<K: EntryKind, T>(
    pool: &Pool,
    ids: &IdLists,
    what: &ListRequest,
    show: impl Fn(&CatalogueEntry<K>) -> Result<Option<T>, ProvisionError>,
) -> Result<Vec<ListEntry<T>>, ProvisionError> {
    let last = what.from.as_ref().map(|token| {
        let id = Uuid::try_parse(token);
        id.map_err(|_| ProvisionError::BadToken(token.clone()))
    });
    let last = last.transpose()?;
    let catalogue = Catalogue::of(pool);
    let ids = ids.ids::<K>(pool)?;
    let from = last.map_or(0, |last| ids.partition_point(|id| *id <= last));
    let mut entries = Vec::new();
    for &id in &ids[from..] {
        if entries.len() > what.max {
            break;
        }
        // Gone since it was listed, or on its way out.
        let shown = match catalogue.ready(id) {
            Ok(Some(entry)) => show(&entry),
            Ok(None) => continue,
            // Its own calls fail; it must not hide all the others.
            Err(error @ ProvisionError::Corrupt { .. }) => {
                tracing::warn!(error = error_chain(&error), "not listed");
                continue;
            }
            Err(error) => Err(error),
        };
        let shown = match shown {
            // It passes: an entry that is missing meanwhile would look deleted.
            Err(ProvisionError::Io { .. }) => what.or_omit(shown),
            shown => shown,
        };
        entries.extend(shown?.map(|entry| ListEntry {
            token: id.to_string(),
            entry,
        }));
    }
    Ok(entries)
}

/// The most entries of a page: clients in Go refuse messages of more than 4 MiB, and an
/// entry has some hundred bytes, at worst a few thousand.
pub const LARGEST_PAGE: usize = 1000;
