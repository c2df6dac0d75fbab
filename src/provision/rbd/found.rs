//! The cluster, pool, image and journal entry of a handle.

use std::{collections::BTreeMap, sync::Arc};

use uuid::Uuid;

use super::{
    super::{ContentSource, TopologySegments, VolumeInfo},
    error::RbdError,
};
use crate::ceph::{
    client::{
        Credentials,
        rados::{Cluster, IoCtx, PoolRef},
        rbd::{self, Image, Mirroring, OpenMode},
    },
    csi_format::{
        config::ClusterConfig,
        handle::Handle,
        journal::{JournalEntry, NameEntry},
    },
};

/// A connected cluster.
#[derive(Clone, Debug)]
pub struct ClusterConnection {
    pub cluster: Arc<Cluster>,
    pub config: ClusterConfig,
    pub credentials: Credentials,
}

impl ClusterConnection {
    /// A pool of the cluster, in the namespace that is configured.
    pub fn pool<'a>(&self, pool: impl Into<PoolRef<'a>>) -> Result<IoCtx, RbdError> {
        let namespace = self.config.rados_namespace.as_deref();
        Ok(self.cluster.ioctx(pool, namespace.unwrap_or_default())?)
    }

    /// A pool that a class names.
    pub fn named_pool(&self, name: &str) -> Result<IoCtx, RbdError> {
        self.pool(name).map_err(|error| match error {
            error if error.is_not_found() => RbdError::NoPool {
                cluster_id: self.config.cluster_id.clone(),
                pool: name.to_owned(),
            },
            error => error,
        })
    }
}

/// The volume or snapshot of a handle.
#[derive(Debug)]
pub struct FoundImage {
    pub handle: String,
    pub link: ClusterConnection,
    /// The pool of the image.
    pub pool: IoCtx,
    /// The image's name, and its id if known.
    pub image: String,
    pub image_id: String,
    /// None for a volume of Kubernetes' own plugin.
    pub recorded: Option<Recorded>,
    /// Whether `cluster-mapping.json` maps its handle to another cluster or pool.
    pub stands_in: bool,
}

/// Its entry in the journal.
#[derive(Debug)]
pub struct Recorded {
    /// The directory's pool.
    pub journal: IoCtx,
    pub reserved: NameEntry,
    pub entry: JournalEntry,
}

impl FoundImage {
    /// Opens the image; fails with [`RbdError::Lost`] if the journal has an entry without it.
    pub fn open(&self, access: OpenMode) -> Result<Image, RbdError> {
        match Image::open(&self.pool, &self.image, access) {
            Err(error) if error.is_not_found() => Err(RbdError::Lost {
                handle: self.handle.clone(),
                image: self.path(),
            }),
            result => Ok(result?),
        }
    }

    /// Opens the image to change it. A secondary one only its mirror daemon changes.
    pub fn open_primary(&self) -> Result<Image, RbdError> {
        let image = self.open(OpenMode::ReadWrite)?;
        self.refuse_secondary(&image, "change")?;
        Ok(image)
    }

    /// Refuses to `change` the image, if it is secondary. librbd's error would have the call
    /// repeated for ever.
    pub fn refuse_secondary(&self, image: &Image, change: &str) -> Result<(), RbdError> {
        // Where the role cannot be read, librbd refuses the change.
        if let Ok(Mirroring::Secondary) = image.mirroring() {
            return Err(RbdError::NotReplicated {
                image: self.path(),
                why: format!(
                    "it is secondary: {change} it at the site where it is primary, or promote it"
                ),
            });
        }
        Ok(())
    }

    /// Refuses to continue or remove a copy of the image that was begun before it became
    /// secondary: either would change the image. The copy's entry stays until the image is
    /// primary again. One that is gone is not secondary.
    pub fn refuse_secondary_source(&self) -> Result<(), RbdError> {
        match self.open(OpenMode::ReadOnly) {
            Err(RbdError::Lost { .. }) => Ok(()),
            image => self.refuse_secondary(&image?, "copy"),
        }
    }

    /// `pool[/namespace]/image`.
    pub fn path(&self) -> String {
        format!("{}/{}", self.pool, self.image)
    }

    /// Whether it is in that cluster and pool.
    pub fn is_in(&self, cluster_id: &str, pool_id: i64) -> bool {
        self.link.config.cluster_id == cluster_id && self.pool.pool_id() == pool_id
    }

    /// Whether there is an image of that name.
    pub fn has_image(&self) -> Result<bool, RbdError> {
        Ok(rbd::image_id(&self.pool, &self.image)?.is_some())
    }

    /// Whether a delete was to remove its image, or has.
    pub fn is_deleting(&self) -> bool {
        let recorded = self.recorded.as_ref();
        recorded.is_some_and(|recorded| recorded.entry.is_deleting)
    }

    /// The journal's entry.
    pub fn recorded(&self) -> Result<&Recorded, RbdError> {
        let none = || RbdError::Migrated(self.handle.clone());
        self.recorded.as_ref().ok_or_else(none)
    }

    /// The name of the request that created it; a handle without a journal has none.
    pub fn name(&self) -> Option<&str> {
        let recorded = self.recorded.as_ref()?;
        Some(&recorded.entry.name)
            .filter(|name| !name.is_empty())
            .map(String::as_str)
    }

    /// The answer for the volume, without the class's part of the context.
    pub fn volume(&self, bytes: u64) -> VolumeInfo {
        let mut context = BTreeMap::from([
            ("clusterID".to_owned(), self.link.config.cluster_id.clone()),
            ("pool".to_owned(), self.pool.pool().to_owned()),
            ("imageName".to_owned(), self.image.clone()),
        ]);
        if let Some(recorded) = &self.recorded {
            let pool = recorded.journal.pool().to_owned();
            context.insert("journalPool".to_owned(), pool);
        }
        if let Some(namespace) = &self.link.config.rados_namespace {
            context.insert("radosNamespace".to_owned(), namespace.clone());
        }
        let origin = self
            .recorded
            .as_ref()
            .map(|recorded| &recorded.entry.origin);
        VolumeInfo {
            handle: self.handle.clone(),
            bytes,
            context,
            source: origin.and_then(|origin| source_named(origin)),
            local: false,
            topology: TopologySegments::new(),
        }
    }

    /// The entry of a listing: with the name of the request that
    /// created it, and the parameters of its class that the journal keeps.
    pub fn listed(&self, bytes: u64) -> VolumeInfo {
        let mut volume = self.volume(bytes);
        let context = &mut volume.context;
        if let Some(name) = self.name() {
            context.insert("name".to_owned(), name.to_owned());
        }
        let kms = self.recorded.as_ref().map(|recorded| &recorded.entry.kms);
        if let Some(kms) = kms.filter(|kms| !kms.is_empty()) {
            context.insert("encrypted".to_owned(), "true".to_owned());
            context.insert("encryptionKMSID".to_owned(), kms.clone());
        }
        volume
    }
}

/// A source in the journal's form. An entry without a source is recorded as such, since
/// ceph-csi records nothing.
pub fn name_of(source: Option<&ContentSource>) -> String {
    match source {
        None => "none".to_owned(),
        Some(ContentSource::Snapshot(handle)) => format!("snapshot {handle}"),
        Some(ContentSource::Volume(handle)) => format!("volume {handle}"),
    }
}

/// The source in the journal's entry.
pub fn source_named(text: &str) -> Option<ContentSource> {
    match text.split_once(' ')? {
        ("snapshot", handle) => Some(ContentSource::Snapshot(handle.to_owned())),
        ("volume", handle) => Some(ContentSource::Volume(handle.to_owned())),
        _ => None,
    }
}

/// The volume or snapshot of a journal entry.
pub fn found(
    link: ClusterConnection,
    pool: IoCtx,
    uuid: Uuid,
    entry: JournalEntry,
) -> Result<FoundImage, RbdError> {
    let elsewhere = entry.journal_pool.filter(|id| *id != pool.pool_id());
    let (journal, pool_id) = match elsewhere.map(|id| link.pool(id)) {
        None => (pool.clone(), None),
        // The pool was deleted, with its names.
        Some(Err(error)) if error.is_not_found() => (pool.clone(), None),
        Some(journal) => (journal?, Some(pool.pool_id())),
    };
    Ok(FoundImage {
        handle: handle_of(&link, &pool, uuid),
        image: entry.image.clone(),
        image_id: entry.image_id.clone(),
        link,
        pool,
        stands_in: false,
        recorded: Some(Recorded {
            journal,
            reserved: NameEntry { uuid, pool_id },
            entry,
        }),
    })
}

/// The handle of an image in that pool.
pub fn handle_of(link: &ClusterConnection, pool: &IoCtx, uuid: Uuid) -> String {
    let handle = Handle::new(&link.config.cluster_id, pool.pool_id(), uuid);
    handle.expect("a linked cluster's id fits").to_string()
}
