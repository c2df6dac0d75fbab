//! An image's watchers, features and metadata, read from its cluster by Ceph's libraries,
//! where they are installed.
//!
//! The kernel's driver shows none of these. Without the libraries plain volumes are mapped
//! all the same, and only the orchestrator prevents a second writer: a client passes an
//! image's exclusive lock to any other that requests it.

use std::{sync::Arc, time::Duration};

use super::{
    error::CephImageError,
    format_marker::{self, ImageFormatMarker},
};
use crate::{
    ceph::{
        client::{
            CephError, Credentials,
            connections::Connections,
            rados::{IoCtx, ObjectLock},
            rbd::{self, Features, Header, Mirroring, OpenMode, Watcher},
        },
        csi_format::{
            config::ClusterConfig,
            encryption::{ENCRYPTED, SEALED_KEY, STATE_KEY, value_of},
            handle::CephVolumeHandle,
            journal::{self, JournalKind},
        },
        krbd::ImageSpec,
    },
    kernel::busy,
};

/// The longest time until other clients release an image: the watch of a node that died
/// ends after 30 seconds (`osd_client_watch_timeout`).
const FREE_WITHIN: Duration = Duration::from_secs(40);

/// The longest time until clients release an image that open it only for a moment: the
/// controller that grows it, an operator's `rbd`. Two nodes that have it mapped and see each
/// other wait as long; neither has written yet.
const LEFT_WITHIN: Duration = Duration::from_secs(10);

/// How long a rotation of a key may have its lock: as long as ceph-csi's.
const ROTATION: Duration = Duration::from_secs(180);

/// The client of an image that is this node's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnClient {
    /// None yet.
    None,
    /// The kernel driver's, by its id.
    Krbd(i64),
    /// rbd-nbd's: any one client, as it does not report its id.
    RbdNbd,
}

/// An image, and the connection by which the agent queries it.
///
/// Mostly the header suffices ([`Header`]). The agent opens the image only if other clients
/// have it open, to name them and to learn whether they may write.
#[derive(Debug)]
pub struct QueriedImage {
    pool: IoCtx,
    name: String,
    header: Header,
    pub features: Features,
    /// Its format marker; none for images of format 1, whose copies would have it, too.
    pub format_marker: Option<Arc<ImageFormatMarker>>,
}

impl QueriedImage {
    /// Looks for the image; none where there is no librbd.
    pub fn of(
        connections: &Connections,
        cluster: &ClusterConfig,
        credentials: &Credentials,
        image: &ImageSpec,
    ) -> Result<Option<Self>, CephImageError> {
        let (monitors, namespace) = (&cluster.monitors, cluster.net_namespace());
        let connected = connections.get(&cluster.cluster_id, monitors, credentials, namespace);
        let connected = match connected {
            Err(CephError::Library(missing)) => {
                tracing::debug!(%missing, "not querying the cluster");
                return Ok(None);
            }
            connected => connected?,
        };
        let pool = connected.ioctx(&image.pool, &image.namespace)?;
        let header = Header::of(&pool, &image.name)?;
        // Before the watchers are listed, which has no deadline.
        let (features, marker) = header.features_and(format_marker::KEY)?;
        Ok(Some(Self {
            features,
            format_marker: ImageFormatMarker::of(&header, marker.is_some()),
            header,
            pool,
            name: image.name.clone(),
        }))
    }

    /// The id of its cluster.
    pub fn fsid(&self) -> &str {
        self.pool.cluster().fsid()
    }

    /// The id of its pool.
    pub fn pool_id(&self) -> i64 {
        self.pool.pool_id()
    }

    /// Waits until only that client has the image open, also for nodes that died; an error
    /// names the others.
    pub fn wait_until_alone(&self, own: OwnClient) -> Result<(), CephImageError> {
        self.alone_within(FREE_WITHIN, own)
    }

    /// Checks that only that client has the image open, apart from those that have it open
    /// for a moment; an error names the others.
    pub fn is_alone(&self, own: OwnClient) -> Result<(), CephImageError> {
        self.alone_within(LEFT_WITHIN, own)
    }

    fn alone_within(&self, time: Duration, own: OwnClient) -> Result<(), CephImageError> {
        let watching = self.header.watching()?;
        let is_own = |client: &i64| own == OwnClient::Krbd(*client);
        if watching.iter().all(is_own) || own == OwnClient::RbdNbd && watching.len() == 1 {
            return Ok(());
        }
        if let Some(marker) = &self.format_marker {
            marker.invalidate();
        }
        let image = self.open(OpenMode::ReadOnly)?;
        let watchers = busy::retry_while_busy_for(
            time,
            || others(&image, own),
            |others| others.as_ref().is_ok_and(|some| !some.is_empty()),
        )?;
        self.refuse_watched(watchers)
    }

    /// Fails with the names of the watchers, if there are any.
    fn refuse_watched(&self, watchers: Vec<Watcher>) -> Result<(), CephImageError> {
        if watchers.is_empty() {
            return Ok(());
        }
        Err(CephImageError::InUse {
            image: format!("{}/{}", self.pool, self.name),
            watchers,
        })
    }

    /// Its encryption, by its metadata.
    pub fn encryption(&self) -> Result<EncryptionMetadata, CephError> {
        let metadata = self.header.metadata()?;
        Ok(EncryptionMetadata {
            encrypted: value_of(&metadata, STATE_KEY) == Some(ENCRYPTED),
            sealed: value_of(&metadata, SEALED_KEY).map(str::to_owned),
        })
    }

    /// The tenant of the volume with that handle, by ceph-csi's journal; empty if that has
    /// none.
    pub fn tenant(&self, handle: &str) -> Result<String, CephImageError> {
        let Ok(CephVolumeHandle::Journaled(handle)) = handle.parse() else {
            return Ok(String::new());
        };
        let (kind, uuid) = (JournalKind::Volume, handle.uuid());
        let mut entry = journal::read(kind, &self.pool, uuid)?;
        if entry.as_ref().is_some_and(|entry| entry.name.is_empty()) {
            entry = journal::read_from_other_pools(kind, &self.pool, uuid)?;
        }
        Ok(entry.unwrap_or_default().owner)
    }

    /// Whether another cluster has a copy of it, or is to have one.
    pub fn is_mirrored(&self) -> Result<bool, CephError> {
        self.header.is_mirrored()
    }

    /// Refuses the secondary image of a mirror, which `rbd-mirror` rewrites below its readers.
    pub fn refuse_secondary(&self) -> Result<(), CephImageError> {
        // Of a mirror by a journal the features do not tell.
        let is_secondary = self.features.contains(Features::NON_PRIMARY)
            || self.features.contains(Features::JOURNALING)
                && self.is_mirrored()?
                && self.open(OpenMode::ReadOnly)?.mirroring()? == Mirroring::Secondary;
        if !is_secondary {
            return Ok(());
        }
        Err(CephImageError::Secondary {
            image: format!("{}/{}", self.pool, self.name),
        })
    }

    /// Takes ceph-csi's lock of a volume's key rotation. The lock of a killed agent of this
    /// node is left; each agent has its own node.
    pub fn lock_rotation(
        &self,
        handle: &str,
        node_id: &str,
    ) -> Result<ObjectLock<'_>, CephImageError> {
        let (name, cookie) = (
            format!("{handle}-mutexlock"),
            format!("uring-csi {node_id}"),
        );
        self.pool.break_lock(handle, &name, &cookie)?;
        let lock = self.pool.try_lock(handle, &name, &cookie, ROTATION)?;
        // ceph-csi creates the object again for the next rotation.
        lock.map(ObjectLock::with_object)
            .ok_or(CephImageError::RotatedElsewhere)
    }

    /// Stores its own passphrase, sealed, in its metadata.
    pub fn set_sealed(&self, sealed: &str) -> Result<(), CephError> {
        self.open(OpenMode::ReadWrite)?
            .metadata_set(SEALED_KEY, sealed)
    }

    /// Records in its metadata that it holds encrypted data from now on.
    pub fn set_encrypted(&self) -> Result<(), CephError> {
        let image = self.open(OpenMode::ReadWrite)?;
        image.metadata_set(STATE_KEY, ENCRYPTED)
    }

    fn open(&self, access: OpenMode) -> Result<rbd::Image, CephError> {
        rbd::Image::open(&self.pool, &self.name, access)
    }
}

/// The watchers of the image other than this connection, that client and those that mirror
/// it, which do not write.
fn others(image: &rbd::Image, own: OwnClient) -> Result<Vec<Watcher>, CephError> {
    let mut others = image.watchers()?;
    others.retain(|watcher| !watcher.own && OwnClient::Krbd(watcher.client) != own);
    let others = image.without_mirror_daemons(others)?;
    let known = usize::from(own == OwnClient::RbdNbd);
    Ok(if others.len() > known {
        others
    } else {
        Vec::new()
    })
}

/// The encryption of an image, by its metadata.
#[derive(Debug, Default)]
pub struct EncryptionMetadata {
    /// It was encrypted.
    pub encrypted: bool,
    /// Its own passphrase, sealed.
    pub sealed: Option<String>,
}

#[cfg(test)]
mod tests {
    use std::thread;

    use testkit::TestCluster;

    use super::*;
    use crate::Kind;
    use crate::ceph::{
        client::{rados::Timeouts, rbd::ImageOptions},
        csi_format::config::ReadAffinity,
        testing::{TestPool, connect, credentials},
    };

    fn queried(cluster: &TestCluster, io: &IoCtx, name: &str) -> QueriedImage {
        let connections = Connections::new(Timeouts::default()).unwrap();
        let config = ClusterConfig {
            cluster_id: "lab".to_owned(),
            monitors: cluster.monitors.clone(),
            rados_namespace: None,
            net_namespace_file: None,
            read_affinity: ReadAffinity::default(),
        };
        let spec = ImageSpec {
            cluster_id: "lab".to_owned(),
            pool: io.pool().to_owned(),
            namespace: io.namespace().to_owned(),
            name: name.to_owned(),
            snapshot: None,
        };
        let queried = QueriedImage::of(&connections, &config, &credentials(cluster), &spec);
        queried.unwrap().unwrap()
    }

    #[test]
    fn the_secondary_of_a_mirror_is_refused_in_both_modes() {
        let Some(cluster) = TestCluster::shared() else {
            return;
        };
        let pool = cluster.fresh_pool();
        let io = connect(&cluster).ioctx(&*pool, "").unwrap();
        let mirror = |args: &[&str]| cluster.rbd(&[&["mirror"], args].concat());
        mirror(&["pool", "enable", &pool, "image"]);
        for (mode, features) in [
            ("snapshot", "layering"),
            ("journal", "layering,exclusive-lock,journaling"),
        ] {
            let options = ImageOptions {
                features: Some(features.parse().unwrap()),
                ..ImageOptions::default()
            };
            rbd::create(&io, mode, 1 << 20, &options).unwrap();
            let path = format!("{pool}/{mode}");
            let refused = || queried(&cluster, &io, mode).refuse_secondary();
            refused().unwrap();
            mirror(&["image", "enable", &path, mode]);
            refused().unwrap();
            mirror(&["image", "demote", &path]);
            let error = refused().unwrap_err();
            assert_eq!(error.kind(), Kind::Precondition, "{error}");
            assert!(error.to_string().contains("promote"), "{error}");
            mirror(&["image", "promote", &path]);
            refused().unwrap();
        }
    }

    #[test]
    fn one_rotation_of_a_key_at_a_time_has_ceph_csi_s_lock() {
        let Some(pool) = TestPool::new() else {
            return;
        };
        let (io, cluster) = (&pool.io, &pool.cluster);
        rbd::create(io, "image", 1 << 20, &ImageOptions::default()).unwrap();
        let images = [(); 2].map(|()| queried(cluster, io, "image"));
        let lock = |one: usize, node: &str| images[one].lock_rotation("volume", node);
        let other = connect(cluster);
        let other = other.ioctx(&*cluster.pool, io.namespace()).unwrap();
        let of_ceph_csi = || {
            let cookie = "volume-enc-key-rotate";
            let locked = other.try_lock("volume", "volume-mutexlock", cookie, ROTATION);
            locked.unwrap()
        };
        let held = lock(0, "node-a").unwrap();
        assert!(of_ceph_csi().is_none());
        assert_eq!(lock(1, "node-b").unwrap_err().kind(), Kind::InUse);
        // The agent of node-a is killed.
        std::mem::forget(held);
        drop(lock(1, "node-a").unwrap());
        let held = of_ceph_csi().expect("it is free");
        assert_eq!(lock(0, "node-a").unwrap_err().kind(), Kind::InUse);
        drop(held);
        let held = lock(1, "node-b").unwrap();
        assert!(other.exists("volume").unwrap());
        drop(held);
        assert!(!other.exists("volume").unwrap());

        // One that has lost its lock meanwhile leaves the object to who has it.
        let lost = lock(1, "node-b").unwrap();
        other
            .break_lock("volume", "volume-mutexlock", "uring-csi node-b")
            .unwrap();
        let held = of_ceph_csi().expect("it is free");
        drop(lost);
        assert_eq!(lock(0, "node-a").unwrap_err().kind(), Kind::InUse);
        drop(held);
    }

    #[test]
    fn a_client_that_has_the_image_open_for_a_moment_is_waited_for() {
        let Some(pool) = TestPool::new() else {
            return;
        };
        let (io, cluster) = (&pool.io, &pool.cluster);
        rbd::create(io, "grown", 1 << 20, &ImageOptions::default()).unwrap();
        let queried = queried(cluster, io, "grown");
        let other = connect(cluster)
            .ioctx(&cluster.pool, io.namespace())
            .unwrap();
        let opened = rbd::Image::open(&other, "grown", OpenMode::ReadWrite).unwrap();
        let moment = thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            drop(opened);
        });
        queried.is_alone(OwnClient::None).unwrap();
        moment.join().unwrap();
    }
}
