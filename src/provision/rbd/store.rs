//! Where volumes and snapshots are found: the clusters, and the journals in them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use uuid::Uuid;

use super::{
    super::{Error, Place, Source, Volume},
    copies::Flattener,
    encryption::Keeper,
    error::RbdError,
    operators::Operators,
    trash::Bin,
};
use crate::{
    ceph::{
        Credentials,
        config::{ClusterConfig, Clusters},
        connections::Connections,
        encryption::KmsConfig,
        handle::{Handle, MAX_CLUSTER_ID, VolumeHandle},
        journal::{Entry, Journal, Reserved},
        rados::{Cluster, IoCtx, Pool},
        rbd::{Access, Image},
    },
    secret::Secrets,
};

/// All that the calls share. Every one of its calls blocks.
#[derive(Debug)]
pub struct Store {
    pub clusters: Clusters,
    pub connections: Connections,
    pub operators: Operators,
    pub volumes: Journal,
    pub snapshots: Journal,
    pub kms: KmsConfig,
    pub bin: Bin,
    pub flattener: Flattener,
    /// Pools that are known to be used, by cluster, with who may use them.
    pub used: Mutex<BTreeMap<(String, i64), Credentials>>,
}

/// A cluster that can be talked to.
#[derive(Clone, Debug)]
pub struct Link {
    pub cluster: Arc<Cluster>,
    pub config: ClusterConfig,
    pub credentials: Credentials,
}

impl Link {
    /// A pool of the cluster, in the namespace that is configured.
    pub fn pool<'a>(&self, pool: impl Into<Pool<'a>>) -> Result<IoCtx, RbdError> {
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

/// What a handle leads to.
#[derive(Debug)]
pub struct Found {
    pub handle: String,
    pub link: Link,
    /// Where the image is.
    pub pool: IoCtx,
    /// The image's name, and its id, where that is known.
    pub image: String,
    pub image_id: String,
    /// None for a volume of Kubernetes' own plugin.
    pub recorded: Option<Recorded>,
}

/// What the journal says of it.
#[derive(Debug)]
pub struct Recorded {
    /// The directory's pool.
    pub journal: IoCtx,
    pub reserved: Reserved,
    pub entry: Entry,
}

impl Found {
    /// Opens the image; a journal without one has lost it.
    pub fn open(&self, access: Access) -> Result<Image, RbdError> {
        match Image::open(&self.pool, &self.image, access) {
            Err(error) if error.is_not_found() => Err(RbdError::Lost {
                handle: self.handle.clone(),
                image: format!("{}/{}", self.pool, self.image),
            }),
            result => Ok(result?),
        }
    }

    /// What the journal says.
    pub fn recorded(&self) -> Result<&Recorded, RbdError> {
        let none = || RbdError::Migrated(self.handle.clone());
        self.recorded.as_ref().ok_or_else(none)
    }

    /// The name that its create was asked by; a handle without a journal has none.
    pub fn name(&self) -> Option<&str> {
        let recorded = self.recorded.as_ref()?;
        Some(&recorded.entry.name)
            .filter(|name| !name.is_empty())
            .map(String::as_str)
    }

    /// The volume, as it is told; not the class' part of the context.
    pub fn volume(&self, bytes: u64) -> Volume {
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
        Volume {
            handle: self.handle.clone(),
            bytes,
            context,
            source: origin.and_then(|origin| source_named(origin)),
            local: false,
            place: Place::new(),
        }
    }
}

/// A source as the journal has it.
pub fn name_of(source: &Source) -> String {
    match source {
        Source::Snapshot(handle) => format!("snapshot {handle}"),
        Source::Volume(handle) => format!("volume {handle}"),
    }
}

fn source_named(text: &str) -> Option<Source> {
    match text.split_once(' ')? {
        ("snapshot", handle) => Some(Source::Snapshot(handle.to_owned())),
        ("volume", handle) => Some(Source::Volume(handle.to_owned())),
        _ => None,
    }
}

impl Store {
    /// Connects to a cluster of the configuration, as the user of the secrets;
    /// without any, as the one that this controller was given.
    pub fn link(&self, cluster_id: &str, secrets: &Secrets) -> Result<Link, RbdError> {
        let credentials = if secrets.is_empty() {
            self.operators.credentials(cluster_id)?
        } else {
            Credentials::from_secrets(secrets)?
        };
        self.link_as(cluster_id, credentials)
    }

    fn link_as(&self, cluster_id: &str, credentials: Credentials) -> Result<Link, RbdError> {
        let config = self.clusters.get(cluster_id)?;
        if cluster_id.len() > MAX_CLUSTER_ID {
            return Err(RbdError::LongId(config.cluster_id));
        }
        let cluster = self.connections.get(&config.monitors, &credentials)?;
        Ok(Link {
            cluster,
            config,
            credentials,
        })
    }

    /// Remembers a pool, and who may use it. Where it was not known, what is left
    /// in its trash is taken up again.
    pub fn use_pool(&self, link: &Link, pool: &IoCtx) {
        let key = (link.config.cluster_id.clone(), pool.pool_id());
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if used.insert(key, link.credentials.clone()).is_none() {
            self.bin.sweep_soon(pool);
        }
    }

    /// Takes up again what is left in the trash of every pool that is known: those
    /// that were used, and all that this controller's own users see. Says which
    /// clusters could not be asked; they hold up no other.
    pub fn sweep(&self) -> Vec<RbdError> {
        let mut errors = Vec::new();
        let used = self
            .used
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let mut failed = String::new();
        for ((cluster_id, pool_id), credentials) in used {
            if cluster_id == failed {
                continue;
            }
            let swept = self
                .link_as(&cluster_id, credentials)
                .and_then(|link| Ok(self.bin.sweep(&link.pool(pool_id)?)?));
            match swept {
                Ok(()) => {}
                // With its pool, all has gone.
                Err(error) if error.is_not_found() => {}
                Err(error) => {
                    errors.push(error);
                    failed = cluster_id;
                }
            }
        }
        match self.own_cluster_ids() {
            Ok(ids) => {
                let swept = ids.iter().map(|id| self.sweep_cluster(id));
                errors.extend(swept.filter_map(Result::err));
            }
            Err(error) => errors.push(error),
        }
        errors
    }

    /// The same for one cluster, as this controller's own user.
    fn sweep_cluster(&self, cluster_id: &str) -> Result<(), RbdError> {
        let link = self.link(cluster_id, &Secrets::default())?;
        for name in link.cluster.pools()? {
            match link.pool(&name).and_then(|pool| Ok(self.bin.sweep(&pool)?)) {
                // It is not for this user, or has gone.
                Err(error) if error.is_access_denied() || error.is_not_found() => {}
                result => result?,
            }
        }
        Ok(())
    }

    /// The ids of the clusters that this controller has users of its own for.
    fn own_cluster_ids(&self) -> Result<Vec<String>, RbdError> {
        let all = self.clusters.all()?;
        let ids = all.iter().map(|cluster| &cluster.cluster_id);
        let own = ids.filter(|id| self.operators.has(id));
        Ok(own.cloned().collect())
    }

    /// Those clusters; none is left out.
    pub fn own_links(&self) -> Result<Vec<Link>, RbdError> {
        let ids = self.own_cluster_ids()?;
        let links = ids.iter().map(|id| self.link(id, &Secrets::default()));
        links.collect()
    }

    /// Who keeps passphrases, for a request with these secrets.
    pub fn keeper<'a>(&'a self, secrets: &'a Secrets) -> Keeper<'a> {
        let config = &self.kms;
        Keeper { config, secrets }
    }

    /// What a volume's handle leads to; none: nothing, or it was never ours.
    pub fn find_volume(&self, handle: &str, secrets: &Secrets) -> Result<Option<Found>, RbdError> {
        match handle.parse() {
            Ok(VolumeHandle::Journaled(parsed)) => self.find(&self.volumes, &parsed, secrets),
            Ok(VolumeHandle::Migrated(parsed)) => {
                let link = self.link(parsed.cluster_id(), secrets)?;
                let pool = match link.pool(parsed.pool()) {
                    Err(error) if error.is_not_found() => return Ok(None),
                    pool => pool?,
                };
                Ok(Some(Found {
                    handle: handle.to_owned(),
                    link,
                    pool,
                    image: parsed.image().to_owned(),
                    image_id: String::new(),
                    recorded: None,
                }))
            }
            Err(_) => Ok(None),
        }
    }

    /// What a snapshot's handle leads to; none: nothing, or it was never ours.
    pub fn find_snapshot(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<Option<Found>, RbdError> {
        match handle.parse() {
            Ok(parsed) => self.find(&self.snapshots, &parsed, secrets),
            Err(_) => Ok(None),
        }
    }

    fn find(
        &self,
        of: &Journal,
        handle: &Handle,
        secrets: &Secrets,
    ) -> Result<Option<Found>, RbdError> {
        let link = self.link(handle.cluster_id(), secrets)?;
        let pool = match link.pool(handle.pool_id()) {
            // With its pool, all has gone.
            Err(error) if error.is_not_found() => return Ok(None),
            pool => pool?,
        };
        self.use_pool(&link, &pool);
        let Some(entry) = of.read(&pool, handle.uuid())? else {
            return Ok(None);
        };
        found(link, pool, handle.uuid(), entry).map(Some)
    }

    /// A volume that must be there.
    pub fn volume(&self, handle: &str, secrets: &Secrets) -> Result<Found, Error> {
        let found = self.find_volume(handle, secrets)?;
        found.ok_or_else(|| Error::NoVolume(handle.to_owned()))
    }

    /// A snapshot that must be there.
    pub fn snapshot(&self, handle: &str, secrets: &Secrets) -> Result<Found, Error> {
        let found = self.find_snapshot(handle, secrets)?;
        found.ok_or_else(|| Error::NoSnapshot(handle.to_owned()))
    }
}

/// What an entry of the journal leads to.
pub fn found(link: Link, pool: IoCtx, uuid: Uuid, entry: Entry) -> Result<Found, RbdError> {
    let (journal, pool_id) = match entry.journal_pool {
        Some(id) if id != pool.pool_id() => (link.pool(id)?, Some(pool.pool_id())),
        _ => (pool.clone(), None),
    };
    Ok(Found {
        handle: handle_of(&link, &pool, uuid),
        image: entry.image.clone(),
        image_id: entry.image_id.clone(),
        link,
        pool,
        recorded: Some(Recorded {
            journal,
            reserved: Reserved { uuid, pool_id },
            entry,
        }),
    })
}

/// The handle of what has its image in that pool.
pub fn handle_of(link: &Link, pool: &IoCtx, uuid: Uuid) -> String {
    let handle = Handle::new(&link.config.cluster_id, pool.pool_id(), uuid);
    handle.expect("a linked cluster's id fits").to_string()
}
