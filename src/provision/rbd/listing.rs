//! Listings and capacity, for calls without secrets, as the users of
//! `--ceph-secret`.
//!
//! A listing has the names of the journals' directories, cluster by cluster, pool by pool,
//! in the order of the names. A token names the last entry listed; if that was deleted
//! since, its name is unknown, and the listing starts again.

use std::{fmt, str::FromStr};

use serde_json::json;
use uuid::Uuid;

use super::{
    super::{
        Capacity, CapacityRequest, ListEntry, ListRequest, ProvisionError, SnapshotInfo,
        VolumeInfo, range::least,
    },
    RbdStore,
    class::Class,
    error::RbdError,
    found::{ClusterConnection, FoundImage, found},
    pools::{self, ListedPool},
    snapshots::show_snapshot,
};
use crate::{
    ceph::{
        client::{rados::IoCtx, rbd::OpenMode},
        csi_format::journal::{Journal, JournalEntry, JournalError},
    },
    digest, error_chain,
    secret::Secrets,
};

/// The most entries in a page, also where a request allows more: the image of each is opened
/// for its size.
pub const LARGEST_PAGE: usize = 200;

/// The last entry listed, in fewer than the 128 bytes of a CSI string, which name and
/// handle together may exceed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Token {
    /// The first digits of the SHA-256 of the cluster's id.
    cluster: String,
    /// The pools of the directory and of the image.
    directory: i64,
    pool: i64,
    uuid: Uuid,
}

impl Token {
    fn new(link: &ClusterConnection, directory: &IoCtx, pool: &IoCtx, uuid: Uuid) -> Self {
        Self {
            cluster: short(link),
            directory: directory.pool_id(),
            pool: pool.pool_id(),
            uuid,
        }
    }
}

fn short(link: &ClusterConnection) -> String {
    let mut digits = digest::sha256_hex(&link.config.cluster_id);
    digits.truncate(12);
    digits
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            cluster,
            directory,
            pool,
            uuid,
        } = self;
        write!(f, "{cluster}.{directory}.{pool}.{uuid}")
    }
}

impl FromStr for Token {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut fields = text.split('.');
        let mut next = || fields.next().ok_or(());
        let token = Self {
            cluster: next()?.to_owned(),
            directory: next()?.parse().map_err(drop)?,
            pool: next()?.parse().map_err(drop)?,
            uuid: next()?.parse().map_err(drop)?,
        };
        fields.next().is_none().then_some(token).ok_or(())
    }
}

impl RbdStore {
    pub(super) fn list_volumes(
        &self,
        what: &ListRequest,
    ) -> Result<Vec<ListEntry<VolumeInfo>>, ProvisionError> {
        let links = self.listed_links(what)?;
        page(&self.volumes, &links, what, |found| {
            let bytes = match found.open(OpenMode::ReadOnly) {
                Ok(image) => image.size()?,
                Err(RbdError::Lost { .. }) => 0,
                Err(error) => return Err(error),
            };
            Ok(Some(found.listed(bytes)))
        })
    }

    pub(super) fn list_snapshots(
        &self,
        what: &ListRequest,
        volume: Option<&str>,
        secrets: &Secrets,
    ) -> Result<Vec<ListEntry<SnapshotInfo>>, ProvisionError> {
        let links = if secrets.is_empty() {
            self.listed_links(what)?
        } else {
            self.links_with(secrets)?
        };
        page(&self.snapshots, &links, what, |found| {
            match show_snapshot(found) {
                Ok(shown) if volume.is_none_or(|volume| volume == shown.source) => Ok(Some(shown)),
                Ok(_) | Err(RbdError::Lost { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        })
    }

    /// The clusters for which this controller has a user: all, or those that answer if
    /// the caller accepts an incomplete list.
    fn listed_links(&self, what: &ListRequest) -> Result<Vec<ClusterConnection>, RbdError> {
        let mut links = Vec::new();
        for id in self.own_cluster_ids()? {
            let link = self.link(&id, &Secrets::default()).map(Some);
            links.extend(what.or_omit(link)?);
        }
        Ok(links)
    }

    /// The clusters that the secrets of a request open.
    fn links_with(&self, secrets: &Secrets) -> Result<Vec<ClusterConnection>, RbdError> {
        let all = self.clusters.all()?;
        let links = all.iter().filter_map(|cluster| {
            let link = self.link(&cluster.cluster_id, secrets);
            link.inspect_err(|error| tracing::debug!(error = error_chain(error), "not listed"))
                .ok()
        });
        Ok(links.collect())
    }

    /// The space available in the class's pool, by Ceph's own count (`ceph df`): after
    /// replication, and before the fullest OSD is full. Without a class, the most that one
    /// may have: see [`all_available`](Self::all_available).
    pub(super) fn capacity(&self, room: &CapacityRequest) -> Result<Capacity, ProvisionError> {
        if room.parameters.is_empty() {
            return Ok(Capacity {
                available: self.all_available()?,
                maximum: None,
                minimum: least(&Class::file_systems(&room.uses)?),
            });
        }
        let class = Class::parse(&room.parameters)?;
        let minimum = least(&Class::file_systems(&room.uses)?);
        let none = Capacity {
            minimum,
            ..Capacity::default()
        };
        let mut accessibility = super::super::AccessibilityRequirements::default();
        if !room.topology.is_empty() {
            accessibility.requisite.push(room.topology.clone());
        }
        let pools = match class.pools(&accessibility) {
            Err(ProvisionError::NotHere { .. }) => return Ok(none),
            pools => pools?,
        };
        let link = self.link(&class.cluster_id, &Secrets::default())?;
        let pool = link.named_pool(pools.data.as_ref().unwrap_or(&pools.image))?;
        let available = available(&pool)?;
        Ok(Capacity {
            available,
            // Images are thin: Ceph creates any size.
            maximum: None,
            minimum,
        })
    }
}

impl RbdStore {
    /// The space in the clusters for which this controller has a user. The pools of a cluster
    /// share its OSDs, so of each cluster it is that of the RBD pool with the most.
    fn all_available(&self) -> Result<u64, RbdError> {
        let mut ids = self.own_cluster_ids()?;
        if ids.is_empty() {
            // The error names one of them.
            ids = (self
                .clusters
                .all()?
                .iter()
                .map(|one| one.cluster_id.clone()))
            .collect();
        }
        let mut available = 0_u64;
        for id in ids {
            let cluster = self.link(&id, &Secrets::default())?.cluster;
            let pools = pools::list(&cluster)?;
            let df = cluster.mon_command(&json!({"prefix": "df", "format": "json"}))?;
            let most = most_available_in(&df, &pools);
            let what = format!("any RBD pool of cluster {id:?}");
            available = available.saturating_add(most.ok_or(RbdError::NotMeasured { what })?);
        }
        Ok(available)
    }
}

/// The number of names read at once.
pub const BATCH: u64 = 200;

/// The entries of a journal that fit a page, and one more.
fn page<T>(
    journal: &Journal,
    links: &[ClusterConnection],
    what: &ListRequest,
    show: impl Fn(&FoundImage) -> Result<Option<T>, RbdError>,
) -> Result<Vec<ListEntry<T>>, ProvisionError> {
    let from = match &what.from {
        Some(token) => Some(resume(journal, links, token)?),
        None => None,
    };
    let mut entries = Vec::new();
    for (link, directory, after) in directories(links, from, what)? {
        let mut next = Some(after);
        while let Some(after) = next {
            let page = match journal.page(&directory, &after, BATCH) {
                Err(JournalError::Ceph(error)) if error.is_access_denied() => break,
                page => page.map_err(RbdError::from)?,
            };
            next = page.next;
            for (_, reserved) in page.names {
                let pool = match reserved.pool_id.map(|id| link.pool(id)) {
                    None => directory.clone(),
                    // The pool was deleted, with all its images.
                    Some(Err(error)) if error.is_not_found() => continue,
                    Some(pool) => pool?,
                };
                let entry = entry_of(journal, &directory, &pool, reserved.uuid)?;
                // Incomplete: no caller has its handle yet.
                let Some(entry) = entry.filter(|entry| !entry.image_id.is_empty()) else {
                    continue;
                };
                let token = Token::new(link, &directory, &pool, reserved.uuid).to_string();
                let found = found(link.clone(), pool, reserved.uuid, entry)?;
                let Some(entry) = show(&found)? else { continue };
                entries.push(ListEntry { token, entry });
                if entries.len() > what.max {
                    return Ok(entries);
                }
            }
        }
    }
    Ok(entries)
}

/// The entry of a name in that directory, of which ceph-csi may have written the keys to the
/// directory's pool ([`read_from_other_pools`](crate::ceph::csi_format::journal::read_from_other_pools)).
fn entry_of(
    journal: &Journal,
    directory: &IoCtx,
    pool: &IoCtx,
    uuid: Uuid,
) -> Result<Option<JournalEntry>, RbdError> {
    let entry = journal.read(pool, uuid)?;
    let Some(JournalEntry { is_deleting, .. }) = entry.as_ref().filter(|it| it.name.is_empty())
    else {
        return Ok(entry);
    };
    let keys = journal.read(directory, uuid)?;
    Ok(keys.map(|keys| JournalEntry {
        is_deleting: *is_deleting,
        journal_pool: Some(directory.pool_id()),
        ..keys
    }))
}

/// The position after which a token continues a listing.
fn resume(
    journal: &Journal,
    links: &[ClusterConnection],
    token: &str,
) -> Result<(Token, String), ProvisionError> {
    let bad = || ProvisionError::BadToken(token.to_owned());
    let parsed: Token = token.parse().map_err(|()| bad())?;
    let link = links.iter().find(|link| short(link) == parsed.cluster);
    let link = link.ok_or_else(bad)?;
    let pool = link.pool(parsed.pool).map_err(|_| bad())?;
    let directory = link.pool(parsed.directory).map_err(|_| bad())?;
    let entry = entry_of(journal, &directory, &pool, parsed.uuid)?;
    let name = entry
        .map(|entry| entry.name)
        .filter(|name| !name.is_empty());
    Ok((parsed, name.ok_or_else(bad)?))
}

/// The directories still to list, each with the name after which its listing continues.
fn directories<'a>(
    links: &'a [ClusterConnection],
    from: Option<(Token, String)>,
    what: &ListRequest,
) -> Result<Vec<(&'a ClusterConnection, IoCtx, String)>, RbdError> {
    let mut all = Vec::new();
    for link in links {
        for pool in what.or_omit(pools(link))? {
            all.push((link, pool, String::new()));
        }
    }
    if let Some((token, name)) = from {
        let is_it = |(link, pool, _): &(&ClusterConnection, IoCtx, String)| {
            short(link) == token.cluster && pool.pool_id() == token.directory
        };
        let at = all.iter().position(is_it).unwrap_or(all.len());
        all.drain(..at);
        if let Some(first) = all.first_mut() {
            first.2 = name;
        }
    }
    Ok(all)
}

/// The pools of a cluster, in the order of their ids.
pub fn pools(link: &ClusterConnection) -> Result<Vec<IoCtx>, RbdError> {
    let mut pools = Vec::new();
    for name in link.cluster.pools().map_err(RbdError::from)? {
        match link.pool(&name) {
            // Deleted meanwhile.
            Err(error) if error.is_not_found() => {}
            pool => pools.push(pool?),
        }
    }
    pools.sort_by_key(IoCtx::pool_id);
    Ok(pools)
}

fn available(pool: &IoCtx) -> Result<u64, RbdError> {
    let command = json!({"prefix": "df", "format": "json"});
    let answer = pool.cluster().mon_command(&command)?;
    // The monitors count what Ceph's manager has measured last.
    available_in(&answer, pool.pool_id()).ok_or_else(|| {
        let what = format!("pool {pool}");
        RbdError::NotMeasured { what }
    })
}

/// The pool's figure from `ceph df`, if it has one.
fn available_in(df: &[u8], pool_id: i64) -> Option<u64> {
    let df: serde_json::Value = serde_json::from_slice(df).ok()?;
    let mut pools = df["pools"].as_array()?.iter();
    pools.find(|one| one["id"].as_i64() == Some(pool_id))?["stats"]["max_avail"].as_u64()
}

/// The largest figure of a pool of the application `rbd`. A cluster whose pools all have other
/// applications, such as file systems alone, has no room for images.
fn most_available_in(df: &[u8], pools: &[u8]) -> Option<u64> {
    let pools = pools::parse(pools)?;
    if !pools.iter().any(ListedPool::may_be_of_rbd) {
        return Some(0);
    }
    let of_rbd = pools.iter().filter(|pool| pool.is_of_rbd());
    let ids = of_rbd.map(|pool| pool.id);
    ids.filter_map(|id| available_in(df, id)).max()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn missing_capacity_is_unknown_not_zero() {
        let df = |stats: serde_json::Value| json!({"pools": [{"id": 3, "stats": stats}]});
        let of = |df: serde_json::Value| available_in(df.to_string().as_bytes(), 3);
        assert_eq!(of(df(json!({"max_avail": 7}))), Some(7));
        assert_eq!(of(df(json!({"max_avail": 0}))), Some(0));
        assert_eq!(of(df(json!({}))), None);
        assert_eq!(of(json!({"pools": []})), None);
        assert_eq!(available_in(b"", 3), None);
    }

    #[test]
    fn the_pools_of_a_cluster_share_its_room() {
        let pool = |id: i64, application: &str| json!({"pool_id": id, "application_metadata": {application: {}}});
        let pools = json!([
            pool(1, "mgr"),
            pool(2, "rbd"),
            pool(3, "rbd"),
            pool(4, "rbd")
        ]);
        let room = |id: i64, bytes: u64| json!({"id": id, "stats": {"max_avail": bytes}});
        let df = json!({"pools": [room(1, 90), room(2, 20), room(3, 30)]});
        let most = |df: &serde_json::Value| {
            most_available_in(df.to_string().as_bytes(), pools.to_string().as_bytes())
        };
        assert_eq!(most(&df), Some(30));
        assert_eq!(most(&json!({"pools": [room(1, 90)]})), None);
        let of_files = json!([pool(1, "mgr"), pool(5, "cephfs")]).to_string();
        let most = most_available_in(df.to_string().as_bytes(), of_files.as_bytes());
        assert_eq!(most, Some(0));
        let untagged = |name: &str| {
            let pools = json!([pool(5, "cephfs"), {"pool_id": 2, "pool_name": name}]);
            most_available_in(df.to_string().as_bytes(), pools.to_string().as_bytes())
        };
        assert_eq!(untagged("images"), None);
        assert_eq!(untagged(".mgr"), Some(0));
        assert_eq!(untagged("device_health_metrics"), Some(0));
    }

    proptest! {
        #[test]
        fn a_token_reads_back(directory: i64, pool: i64, id: u128) {
            let cluster = "0123456789ab".to_owned();
            let uuid = Uuid::from_u128(id);
            let token = Token { cluster, directory, pool, uuid };
            let text = token.to_string();
            prop_assert!(text.len() <= 128);
            prop_assert_eq!(text.parse(), Ok(token));
        }

        #[test]
        fn any_token_is_read_or_refused(text in "[0-9a-f.-]{0,90}|.{0,20}") {
            let _ = text.parse::<Token>();
        }
    }
}
