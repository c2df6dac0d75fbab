//! Listings in pages.
//!
//! Ids increase with the time of their making, entries are listed by id, and a
//! token is the last id that was listed. So a page goes on behind it whether or
//! not that entry is still there, and what is made meanwhile comes at the end.
//!
//! Each pool is asked in a turn and on a lane of its own, so that one that hangs
//! holds up only a caller who takes no list without it.

use std::time::Duration;

use futures_util::future::join_all;
use uuid::Uuid;

use super::{
    super::{Error, Listing, Page, Snapshot, Volume},
    Images,
    catalogue::{Catalogue, Entry, Kind},
    snapshots::SnapshotDetail,
    store::{Store, size_of},
    volumes::VolumeDetail,
};
use crate::{chain, lane, pool::Pool};

/// What a page has room for.
#[derive(Clone, Copy, Debug)]
struct Room {
    /// Entries behind this one.
    behind: Option<Uuid>,
    most: usize,
}

impl Room {
    fn of(what: &Listing) -> Result<Self, Error> {
        let behind = match &what.from {
            Some(token) => {
                let id = Uuid::try_parse(token);
                Some(id.map_err(|_| Error::BadToken(token.clone()))?)
            }
            None => None,
        };
        let most = match what.max {
            0 => LARGEST_PAGE,
            max => max.min(LARGEST_PAGE),
        };
        Ok(Self { behind, most })
    }
}

impl Images {
    pub(super) async fn page_of_volumes(&self, what: &Listing) -> Result<Page<Volume>, Error> {
        self.page("volumes", what, |store, pool, room| {
            entries(pool, room, |entry: &Entry<VolumeDetail>| {
                let bytes = size_of(&VolumeDetail::image(pool, entry.id))?;
                Ok(Some(store.volume(pool, entry, bytes.unwrap_or(0))))
            })
        })
        .await
    }

    pub(super) async fn page_of_snapshots(
        &self,
        what: &Listing,
        volume: Option<String>,
    ) -> Result<Page<Snapshot>, Error> {
        self.page("snapshots", what, move |store, pool, room| {
            entries(pool, room, |entry: &Entry<SnapshotDetail>| {
                if (volume.as_ref()).is_some_and(|volume| *volume != entry.detail.source) {
                    return Ok(None);
                }
                store.snapshot(pool, entry).map(Some)
            })
        })
        .await
    }

    async fn page<T: Send + 'static>(
        &self,
        kind: &str,
        what: &Listing,
        list: impl Fn(&Store, &Pool, Room) -> Result<Vec<(Uuid, T)>, Error> + Clone + Send + 'static,
    ) -> Result<Page<T>, Error> {
        let room = Room::of(what)?;
        let of_pool = |pool: &Pool| {
            let (pool, list) = (pool.clone(), list.clone());
            let turn = format!("list {kind} of pool {}", pool.name);
            async move {
                let list = move |store: &Store| {
                    let _waiting = lane::waiting_for(format!("pool {:?}", pool.name));
                    list(store, &pool, room)
                };
                self.turns.run(&turn, "list", list).await
            }
        };
        let mut entries = Vec::new();
        let pools = self.turns.store().pools.iter();
        if let Some(omitted) = &what.omitted {
            let asked = pools.map(|pool| async {
                let listed = in_time(pool, omitted.patience, of_pool(pool)).await;
                what.or_omit(listed)
            });
            for listed in join_all(asked).await {
                entries.extend(listed?);
            }
        } else {
            // One after the other: who waits in vain is told for which.
            for pool in pools {
                entries.extend(of_pool(pool).await?);
            }
        }
        entries.sort_unstable_by_key(|(id, _)| *id);
        let is_last = entries.len() <= room.most;
        entries.truncate(room.most);
        let next = entries.last().filter(|_| !is_last);
        Ok(Page {
            next: next.map(|(id, _)| id.to_string()),
            entries: entries.into_iter().map(|(_, shown)| shown).collect(),
        })
    }
}

async fn in_time<T>(
    pool: &Pool,
    patience: Duration,
    listed: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let in_time = tokio::time::timeout(patience, listed).await;
    in_time.unwrap_or_else(|_| {
        Err(Error::Silent {
            pool: pool.name.clone(),
            after: patience,
        })
    })
}

/// A pool's first entries of those that a page has room for, and one more, which
/// tells that the page is not the last.
fn entries<K: Kind, T>(
    pool: &Pool,
    room: Room,
    show: impl Fn(&Entry<K>) -> Result<Option<T>, Error>,
) -> Result<Vec<(Uuid, T)>, Error> {
    let catalogue = Catalogue::of(pool);
    let mut ids = catalogue.ids()?;
    ids.retain(|id| room.behind.is_none_or(|last| *id > last));
    let mut entries = Vec::new();
    for id in ids {
        if entries.len() > room.most {
            break;
        }
        // Gone since it was listed, or on its way out.
        let entry = match catalogue.ready(id) {
            Ok(Some(entry)) => entry,
            Ok(None) => continue,
            // Its own calls fail; it must not hide all the others.
            Err(error @ (Error::Corrupt { .. } | Error::Io { .. })) => {
                tracing::warn!(error = chain(&error), "not listed");
                continue;
            }
            Err(error) => return Err(error),
        };
        entries.extend(show(&entry)?.map(|shown| (id, shown)));
    }
    Ok(entries)
}

/// Entries in a page, whatever is asked for: clients in Go refuse messages of
/// more than 4 MiB, and an entry has some hundred bytes, at worst a few thousand.
pub const LARGEST_PAGE: usize = 1000;
