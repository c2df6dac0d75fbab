//! All stores of a controller: picks the store of each call.
//!
//! The form of a handle names its store, and the parameter `clusterID` that of a class.
//! A listing takes one store after the other, and its token names the store of the next
//! page. If the controller was started without the store of a volume, the error names the
//! missing option: the answer that the volume is gone would leak it.

use std::{
    collections::{BTreeMap, HashMap},
    str::FromStr as _,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::{BoxFuture, join_all};

use super::{
    Abilities, BlockPage, BlockRequest, Capacity, CapacityRequest, Cidr, GroupSnapshotInfo,
    ListEntry, ListRequest, NewGroupSnapshot, NewSnapshot, NewVolume, Page, ProvisionError,
    Provisioner, PublishRequest, PublishedVolume, Range, Release, Replicated, ReplicationChange,
    ReplicationInfo, SnapshotInfo, VolumeCondition, VolumeInfo, VolumeToEnter, VolumeUse,
    images::ImageStore,
    nfs::{self, NfsStore},
    rbd::RbdStore,
    reclaims::Reclaims,
    serialized::{Serialized, group_snapshot_named, snapshot_named, volume_named},
};
use crate::{
    Done,
    ceph::csi_format::handle::is_ours as is_ceph_handle,
    finding::Finding,
    lane::{self, Inspections, Lanes},
    pool::handle::{GroupHandle, SnapshotHandle, VolumeHandle},
    secret::Secrets,
};

mod orphans;

/// All stores of a controller.
#[derive(Clone, Debug)]
pub struct Stores {
    /// Image files: `--pool`.
    images: Option<Serialized>,
    /// Images in Ceph clusters: `--ceph-config`.
    rbd: Option<Serialized>,
    /// Directories of NFS servers: `--nfs-export`.
    nfs: Option<Serialized>,
    reclaims: Reclaims,
    inspections: Inspections,
}

/// The kind of a store, in the order of listings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    /// Image files.
    Images,
    /// Images in Ceph clusters.
    Rbd,
    /// Directories of NFS servers.
    Nfs,
}

impl StoreKind {
    const ALL: [Self; 3] = [Self::Images, Self::Rbd, Self::Nfs];

    /// The prefix of its listings' tokens.
    fn prefix(self) -> &'static str {
        match self {
            Self::Images => "images.",
            Self::Rbd => "rbd.",
            Self::Nfs => "nfs.",
        }
    }

    /// The option of the controller that configures it.
    fn option(self) -> &'static str {
        match self {
            Self::Images => "--pool",
            Self::Rbd => "--ceph-config",
            Self::Nfs => "--nfs-export",
        }
    }

    /// The store of a handle, by its form.
    fn of_handle(handle: &str) -> Option<Self> {
        let is_of_a_pool = VolumeHandle::from_str(handle).is_ok()
            || SnapshotHandle::from_str(handle).is_ok()
            || GroupHandle::from_str(handle).is_ok();
        match handle {
            _ if is_of_a_pool => Some(Self::Images),
            _ if is_ceph_handle(handle) => Some(Self::Rbd),
            _ if nfs::is_handle(handle) => Some(Self::Nfs),
            _ => None,
        }
    }

    /// The store of a class with these parameters; `None` if they name none.
    fn of_class(parameters: &HashMap<String, String>) -> Option<Self> {
        let is_rbd = parameters.contains_key("clusterID")
            || parameters.get("backend").is_some_and(|name| name == "rbd");
        match parameters.len() {
            _ if is_rbd => Some(Self::Rbd),
            _ if nfs::is_of_class(parameters) => Some(Self::Nfs),
            0 => None,
            _ => Some(Self::Images),
        }
    }
}

impl Stores {
    /// Serves these stores; their calls run on `lanes`.
    pub fn new(
        images: Option<Arc<ImageStore>>,
        rbd: Option<Arc<RbdStore>>,
        nfs: Option<Arc<NfsStore>>,
        lanes: &Lanes,
    ) -> Self {
        let over = |store: Arc<dyn Provisioner>| Serialized::new(store, lanes.clone());
        Self {
            images: images.map(|store| over(store)),
            rbd: rbd.map(|store| over(store)),
            nfs: nfs.map(|store| over(store)),
            reclaims: Reclaims::default(),
            inspections: Inspections::new(lanes.clone()),
        }
    }

    fn get(&self, backend: StoreKind) -> Option<&Serialized> {
        match backend {
            StoreKind::Images => self.images.as_ref(),
            StoreKind::Rbd => self.rbd.as_ref(),
            StoreKind::Nfs => self.nfs.as_ref(),
        }
    }

    fn present(&self) -> impl Iterator<Item = (StoreKind, &Serialized)> {
        let present = |backend| Some((backend, self.get(backend)?));
        StoreKind::ALL.into_iter().filter_map(present)
    }

    /// The store of a call that names none.
    fn any(&self) -> Result<&Serialized, ProvisionError> {
        let first = self.present().next();
        first.map(|(_, it)| it).ok_or(ProvisionError::NoBackend)
    }

    /// The kind of a handle. That of csi-driver-nfs' first releases looks like many others,
    /// so it counts only where there are directories.
    fn kind_of(&self, handle: &str) -> Option<StoreKind> {
        let is_old = || self.nfs.is_some() && nfs::is_any_handle(handle);
        StoreKind::of_handle(handle).or_else(|| is_old().then_some(StoreKind::Nfs))
    }

    fn of_handle(&self, handle: &str) -> Result<&Serialized, ProvisionError> {
        let Some(backend) = self.kind_of(handle) else {
            return self.any();
        };
        self.get(backend)
            .ok_or_else(|| ProvisionError::HandleOfNoBackend {
                handle: handle.to_owned(),
                option: backend.option(),
            })
    }

    fn of_class(
        &self,
        parameters: &HashMap<String, String>,
    ) -> Result<&Serialized, ProvisionError> {
        let Some(backend) = StoreKind::of_class(parameters) else {
            return self.any();
        };
        self.get(backend)
            .ok_or_else(|| ProvisionError::ClassOfNoBackend {
                kind: match backend {
                    StoreKind::Images => "has no clusterID: it is for image files",
                    StoreKind::Rbd => "has a clusterID: it is for images in Ceph",
                    StoreKind::Nfs => "has a server and a share: it is for directories of NFS",
                },
                option: backend.option(),
            })
    }

    /// Runs a call on the store that a handle belongs to, after other calls on it.
    async fn on<T: Send + 'static>(
        &self,
        handle: String,
        step: &'static str,
        work: impl FnOnce(&dyn Provisioner, &str) -> Result<T, ProvisionError> + Send + 'static,
    ) -> Result<T, ProvisionError> {
        let store = self.of_handle(&handle)?;
        let key = handle.clone();
        store.run(&key, step, move |it| work(it, &handle)).await
    }

    /// A page of a listing of all stores.
    async fn page<'a, T>(
        &'a self,
        what: ListRequest,
        list: impl Fn(&'a Serialized, ListRequest) -> BoxFuture<'a, Result<Page<T>, ProvisionError>>,
    ) -> Result<Page<T>, ProvisionError> {
        let mut rest: Vec<_> = self.present().collect();
        let mut from = None;
        if let Some(token) = &what.from {
            let goes_on = |(backend, _): &(StoreKind, _)| token.starts_with(backend.prefix());
            let at = rest.iter().position(goes_on);
            let at = at.ok_or_else(|| ProvisionError::BadToken(token.clone()))?;
            rest.drain(..at);
            let own = &token[rest[0].0.prefix().len()..];
            from = Some(own.to_owned()).filter(|own| !own.is_empty());
        }
        let mut entries = Vec::new();
        for (backend, it) in rest {
            let prefix = backend.prefix();
            let max = match what.max {
                0 => 0,
                most if most == entries.len() => {
                    let next = Some(prefix.to_owned());
                    return Ok(Page { entries, next });
                }
                most => most - entries.len(),
            };
            let own = ListRequest {
                from: from.take(),
                max,
                omitted: what.omitted.clone(),
            };
            let page = list(it, own).await?;
            entries.extend(page.entries);
            if let Some(token) = page.next {
                let next = Some(format!("{prefix}{token}"));
                return Ok(Page { entries, next });
            }
        }
        let next = None;
        Ok(Page { entries, next })
    }

    /// Checks that every store can be used; an error says why one cannot.
    pub async fn check(&self) -> Result<(), ProvisionError> {
        for (_, it) in self.present() {
            it.run("check", "check", Provisioner::check).await?;
        }
        Ok(())
    }

    /// Tries out the pools and shares, and asks the Ceph clusters.
    pub async fn inspect(&self) -> Vec<Finding> {
        let all = self.present().flat_map(|(_, it)| it.store.inspections());
        self.inspections.run(all.collect()).await
    }

    /// Finishes or undoes the work of ended controllers in a store; returns the failures.
    /// `None` if the controller was started without the store.
    pub async fn sweep(&self, backend: StoreKind) -> Option<Vec<ProvisionError>> {
        let _ = self.get(backend)?;
        let parts = self.swept_parts(backend).into_iter();
        let swept = join_all(parts.map(|pool| self.sweep_part(backend, pool))).await;
        Some(swept.into_iter().flatten().flatten().collect())
    }

    /// The parts of a store that are swept apart: its pools, or `None` for the whole of it.
    /// Empty if the controller was started without the store.
    pub fn swept_parts(&self, backend: StoreKind) -> Vec<Option<String>> {
        let Some(it) = self.get(backend) else {
            return Vec::new();
        };
        match it.store.swept_pools() {
            pools if pools.is_empty() => vec![None],
            pools => pools.into_iter().map(Some).collect(),
        }
    }

    /// Sweeps one of [`Stores::swept_parts`].
    pub async fn sweep_part(
        &self,
        backend: StoreKind,
        pool: Option<String>,
    ) -> Option<Vec<ProvisionError>> {
        let key = match &pool {
            Some(pool) => format!("sweep of pool {pool}"),
            None => "sweep".to_owned(),
        };
        let sweep = move |store: &dyn Provisioner| store.sweep(pool.as_deref());
        Some(self.get(backend)?.run(&key, "sweep", sweep).await)
    }

    /// The abilities of the controller: it lists if all stores do, and has the others if
    /// any store does.
    pub fn abilities(&self) -> Abilities {
        let able: Vec<_> = self.present().map(|(_, it)| it.store.abilities()).collect();
        Abilities {
            lists: able.iter().all(|one| one.lists),
            modifies: able.iter().any(|one| one.modifies),
            publishes: able.iter().any(|one| one.publishes),
            groups: able.iter().any(|one| one.groups),
            blocks: able.iter().any(|one| one.blocks),
        }
    }

    /// [`Provisioner::grows_on_nodes`].
    pub fn grows_on_nodes(&self, handle: &str) -> bool {
        let store = self.of_handle(handle);
        store.is_ok_and(|it| it.store.grows_on_nodes())
    }

    /// Whether a store's volumes are in clusters.
    pub fn has_clusters(&self) -> bool {
        self.present().any(|(_, it)| it.store.has_clusters())
    }

    /// [`Provisioner::create_volume`].
    pub async fn create_volume(&self, new: NewVolume) -> Result<VolumeInfo, ProvisionError> {
        self.of_class(&new.parameters)?
            .run(&volume_named(&new.name), "create", move |store| {
                store.create_volume(&new)
            })
            .await
    }

    /// [`Provisioner::delete_volume`].
    pub async fn delete_volume(
        &self,
        handle: String,
        secrets: Secrets,
    ) -> Result<(), ProvisionError> {
        self.on(handle, "delete", move |store, handle| {
            store.delete_volume(handle, &secrets)
        })
        .await
    }

    /// [`Provisioner::expand_volume`].
    pub async fn expand_volume(
        &self,
        handle: String,
        range: Range,
        secrets: Secrets,
    ) -> Result<u64, ProvisionError> {
        self.on(handle, "expand", move |store, handle| {
            store.expand_volume(handle, range, &secrets)
        })
        .await
    }

    /// [`Provisioner::reclaim_space`]. It may take hours, so other calls on the volume do
    /// not wait for it.
    pub async fn reclaim_space(
        &self,
        handle: String,
        secrets: Secrets,
    ) -> Result<(), ProvisionError> {
        let came = Instant::now();
        let store = self.of_handle(&handle)?;
        let (id, reclaims) = (handle.clone(), self.reclaims.clone());
        let work = move |store: &dyn Provisioner| -> Result<(), ProvisionError> {
            if reclaims.answers(&id, came) {
                return Ok(());
            }
            store.reclaim_space(&id, &secrets)?;
            reclaims.end(&id);
            Ok(())
        };
        let key = format!("reclaim {handle}");
        store.run(&key, "sparsify", work).await?;
        self.reclaims.tell(&handle);
        Ok(())
    }

    /// [`Provisioner::replicate`].
    pub async fn replicate(
        &self,
        handle: String,
        change: ReplicationChange,
        secrets: Secrets,
    ) -> Result<Replicated, ProvisionError> {
        self.on(handle, "replicate", move |store, handle| {
            store.replicate(handle, &change, &secrets)
        })
        .await
    }

    /// [`Provisioner::replication_info`].
    pub async fn replication_info(
        &self,
        handle: String,
        secrets: Secrets,
    ) -> Result<ReplicationInfo, ProvisionError> {
        self.on(handle, "look", move |store, handle| {
            store.replication_info(handle, &secrets)
        })
        .await
    }

    /// [`Provisioner::replication_destination`].
    pub async fn replication_destination(
        &self,
        handle: String,
        secrets: Secrets,
    ) -> Result<String, ProvisionError> {
        self.on(handle, "look", move |store, handle| {
            store.replication_destination(handle, &secrets)
        })
        .await
    }

    /// [`Provisioner::enter_volume`].
    pub async fn enter_volume(
        &self,
        volume: VolumeToEnter,
        secrets: Secrets,
    ) -> Result<Done, ProvisionError> {
        self.on(volume.handle.clone(), "enter", move |store, _| {
            store.enter_volume(&volume, &secrets)
        })
        .await
    }

    /// The store whose clusters are behind networks.
    fn of_networks(&self) -> Result<&Serialized, ProvisionError> {
        let mut present = self.present().map(|(_, it)| it);
        let found = present.find(|it| it.store.has_clusters());
        found.map_or_else(|| self.any(), Ok)
    }

    /// [`Provisioner::fence_networks`].
    pub async fn fence_networks(
        &self,
        cluster_id: String,
        networks: Vec<Cidr>,
        fenced: bool,
        secrets: Secrets,
    ) -> Result<(), ProvisionError> {
        let key = format!("networks of {cluster_id}");
        let work = move |store: &dyn Provisioner| {
            store.fence_networks(&cluster_id, &networks, fenced, &secrets)
        };
        self.of_networks()?.run(&key, "fence", work).await
    }

    /// [`Provisioner::fenced_networks`].
    pub async fn fenced_networks(
        &self,
        cluster_id: String,
        secrets: Secrets,
    ) -> Result<Vec<Cidr>, ProvisionError> {
        let key = format!("networks of {cluster_id}");
        let work = move |store: &dyn Provisioner| store.fenced_networks(&cluster_id, &secrets);
        self.of_networks()?.run(&key, "list fences", work).await
    }

    /// [`Provisioner::modify_volume`].
    pub async fn modify_volume(
        &self,
        handle: String,
        mutable: HashMap<String, String>,
        secrets: Secrets,
    ) -> Result<(), ProvisionError> {
        self.on(handle, "modify", move |store, handle| {
            store.modify_volume(handle, &mutable, &secrets)
        })
        .await
    }

    /// [`Provisioner::publish_volume`]. A static volume's handle may have any form: its
    /// context shows that it exists, and no store fences its nodes.
    pub async fn publish_volume(
        &self,
        new: PublishRequest,
    ) -> Result<BTreeMap<String, String>, ProvisionError> {
        match self.kind_of(&new.handle) {
            None if new.context.is_empty() => Err(ProvisionError::NoVolume(new.handle)),
            None => Ok(BTreeMap::new()),
            Some(_) => {
                self.on(new.handle.clone(), "publish", move |store, _| {
                    store.publish_volume(&new)
                })
                .await
            }
        }
    }

    /// [`Provisioner::unpublish_volume`], until the node does not have the volume, for
    /// as long as `within`.
    pub async fn unpublish_volume(
        &self,
        handle: String,
        node: String,
        within: Duration,
        secrets: Secrets,
    ) -> Result<(), ProvisionError> {
        if self.kind_of(&handle).is_none() || !self.of_handle(&handle)?.store.abilities().publishes
        {
            return Ok(());
        }
        let until = Instant::now() + within;
        loop {
            let (node, secrets) = (node.clone(), secrets.clone());
            let release = self.on(handle.clone(), "unpublish", move |store, handle| {
                store.unpublish_volume(handle, &node, &secrets)
            });
            match release.await? {
                Release::Done => return Ok(()),
                Release::Pending(_, soon) if Instant::now() + soon < until => {
                    tokio::time::sleep(soon).await;
                }
                Release::Pending(error, _) => return Err(error),
            }
        }
    }

    /// [`Provisioner::get_volume`].
    pub async fn get_volume(&self, handle: String) -> Result<PublishedVolume, ProvisionError> {
        self.on(handle, "look up", Provisioner::get_volume).await
    }

    /// [`Provisioner::list_volumes`], of all stores and pools.
    pub async fn list_volumes(
        &self,
        what: ListRequest,
    ) -> Result<Page<VolumeInfo>, ProvisionError> {
        self.page(what, |it, what| {
            Box::pin(it.page("volumes", what, |store, what, pool| {
                store.list_volumes(what, pool)
            }))
        })
        .await
    }

    /// [`Provisioner::check_uses`].
    pub async fn check_uses(
        &self,
        handle: String,
        uses: Vec<VolumeUse>,
        parameters: HashMap<String, String>,
        secrets: Secrets,
    ) -> Result<Option<String>, ProvisionError> {
        self.on(handle, "check", move |store, handle| {
            store.check_uses(handle, &uses, &parameters, &secrets)
        })
        .await
    }

    /// [`Provisioner::volume_condition`].
    pub async fn volume_condition(
        &self,
        handle: String,
        secrets: Secrets,
    ) -> Result<Option<VolumeCondition>, ProvisionError> {
        self.on(handle, "look up", move |store, handle| {
            store.volume_condition(handle, &secrets)
        })
        .await
    }

    /// [`Provisioner::capacity`]. A slow cluster or share delays no other; the room of all
    /// shares, without a class, waits for each.
    pub async fn capacity(&self, room: CapacityRequest) -> Result<Capacity, ProvisionError> {
        let class: BTreeMap<_, _> = room.parameters.iter().collect();
        let key = format!("capacity of {class:?}");
        self.of_class(&room.parameters)?
            .run(&key, "capacity", move |store| store.capacity(&room))
            .await
    }

    /// [`Provisioner::create_snapshot`].
    pub async fn create_snapshot(&self, new: NewSnapshot) -> Result<SnapshotInfo, ProvisionError> {
        self.of_handle(&new.volume)?
            .run(&snapshot_named(&new.name), "snapshot", move |store| {
                store.create_snapshot(&new)
            })
            .await
    }

    /// [`Provisioner::delete_snapshot`].
    pub async fn delete_snapshot(
        &self,
        handle: String,
        secrets: Secrets,
    ) -> Result<(), ProvisionError> {
        self.on(handle, "delete", move |store, handle| {
            store.delete_snapshot(handle, &secrets)
        })
        .await
    }

    /// [`Provisioner::get_snapshot`].
    pub async fn get_snapshot(
        &self,
        handle: String,
        secrets: Secrets,
    ) -> Result<SnapshotInfo, ProvisionError> {
        self.on(handle, "look up", move |store, handle| {
            store.get_snapshot(handle, &secrets)
        })
        .await
    }

    /// [`Provisioner::create_group_snapshot`].
    pub async fn create_group_snapshot(
        &self,
        new: NewGroupSnapshot,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        let first = new.volumes.first().map(|handle| self.kind_of(handle));
        if let Some(other) = (new.volumes.iter()).find(|one| Some(self.kind_of(one)) != first) {
            return Err(ProvisionError::SeveralBackends(other.clone()));
        }
        let store = match new.volumes.first() {
            Some(handle) => self.of_handle(handle)?,
            None => self.any()?,
        };
        store
            .run(&group_snapshot_named(&new.name), "snapshot", move |store| {
                store.create_group_snapshot(&new)
            })
            .await
    }

    /// [`Provisioner::delete_group_snapshot`].
    pub async fn delete_group_snapshot(
        &self,
        handle: String,
        snapshots: Vec<String>,
        secrets: Secrets,
    ) -> Result<(), ProvisionError> {
        self.on(handle, "delete", move |store, handle| {
            store.delete_group_snapshot(handle, &snapshots, &secrets)
        })
        .await
    }

    /// [`Provisioner::get_group_snapshot`].
    pub async fn get_group_snapshot(
        &self,
        handle: String,
        snapshots: Vec<String>,
        secrets: Secrets,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        self.on(handle, "look up", move |store, handle| {
            store.get_group_snapshot(handle, &snapshots, &secrets)
        })
        .await
    }

    /// [`Provisioner::snapshot_blocks`].
    pub async fn snapshot_blocks(&self, what: BlockRequest) -> Result<BlockPage, ProvisionError> {
        self.on(what.snapshot.clone(), "look up", move |store, _| {
            store.snapshot_blocks(&what)
        })
        .await
    }

    /// [`Provisioner::list_snapshots`], of all stores and pools.
    pub async fn list_snapshots(
        &self,
        what: ListRequest,
        volume: Option<String>,
        secrets: Secrets,
    ) -> Result<Page<SnapshotInfo>, ProvisionError> {
        self.page(what, |it, what| {
            let (volume, secrets) = (volume.clone(), secrets.clone());
            Box::pin(it.page("snapshots", what, move |store, what, pool| {
                store.list_snapshots(what, pool, volume.as_deref(), &secrets)
            }))
        })
        .await
    }
}

impl Serialized {
    /// A page of a store's listing. Each pool is listed under a key and on a lane of its
    /// own, so that a pool that hangs delays only callers that accept no list without it.
    async fn page<T: Send + 'static>(
        &self,
        kind: &str,
        mut what: ListRequest,
        list: impl Fn(
            &dyn Provisioner,
            &ListRequest,
            Option<&str>,
        ) -> Result<Vec<ListEntry<T>>, ProvisionError>
        + Clone
        + Send
        + 'static,
    ) -> Result<Page<T>, ProvisionError> {
        let largest = self.store.largest_page();
        what.max = match what.max {
            0 => largest,
            max => max.min(largest),
        };
        let of_pool = |pool: Option<&str>| {
            let pool = pool.map(str::to_owned);
            let key = match &pool {
                Some(pool) => format!("list {kind} of pool {pool}"),
                None => format!("list {kind}"),
            };
            let (what, list) = (what.clone(), list.clone());
            async move {
                let list = move |store: &dyn Provisioner| {
                    let waits_for = pool.iter().map(|pool| format!("pool {pool:?}"));
                    let _waiting: Vec<_> = waits_for.map(lane::waiting_for).collect();
                    list(store, &what, pool.as_deref())
                };
                self.run(&key, "list", list).await
            }
        };
        let pools = self.store.listed_pools();
        let mut entries = Vec::new();
        match &what.omitted {
            _ if pools.is_empty() => entries = of_pool(None).await?,
            Some(omitted) => {
                let lists = pools.iter().map(|pool| {
                    let listed = tokio::time::timeout(omitted.timeout, of_pool(Some(pool)));
                    async {
                        let listed = listed.await.unwrap_or_else(|_| {
                            Err(ProvisionError::Silent {
                                pool: pool.clone(),
                                after: omitted.timeout,
                            })
                        });
                        match listed {
                            Err(ProvisionError::BadToken(_)) => listed,
                            listed => what.or_omit(listed),
                        }
                    }
                });
                for listed in join_all(lists).await {
                    entries.extend(listed?);
                }
            }
            // One after the other: the error names the pool that does not answer.
            None => {
                for pool in &pools {
                    entries.extend(of_pool(Some(pool)).await?);
                }
            }
        }
        if !pools.is_empty() {
            entries.sort_unstable_by(|a, b| a.token.cmp(&b.token));
        }
        let is_last = entries.len() <= what.max;
        entries.truncate(what.max);
        let next = entries.last().filter(|_| !is_last);
        Ok(Page {
            next: next.map(|last| last.token.clone()),
            entries: entries.into_iter().map(|listed| listed.entry).collect(),
        })
    }
}

#[cfg(test)]
mod tests;
