//! The provisioner as its callers see it, against a real cluster.

use futures_util::future::join_all;
use testkit::TestCluster;

mod blocks;
mod crashes;
mod encrypted;
mod fencing;
mod full;
mod groups;
mod limits;
mod lost_daemons;
mod mapping;
mod mirrored;
mod names;
mod orphans;
mod pools;
mod replication;
mod shared_keys;
mod sources;
mod stalls;
mod trash;
mod undone;

use super::*;
use crate::{
    Kind as ErrorKind,
    ceph::client::{
        Credentials,
        rados::{Cluster, IoCtx},
    },
    provision::{AccessibilityRequirements, ContentSource, StoreKind, Stores},
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A pool of its own, and a provisioner that knows its cluster.
struct Home {
    cluster: TestCluster,
    pool: String,
    dir: tempfile::TempDir,
    rbd: Stores,
}

/// A provisioner over the cluster, and as the user, that a directory's files tell of.
fn rbd_over(dir: &Path) -> Stores {
    rbd_fencing(dir, None)
}

/// The same that fences nodes which do not let go in that time.
fn rbd_fencing(dir: &Path, fence_after: Option<Duration>) -> Stores {
    // What a test has killed is purged at once.
    let purge = PurgeTimes {
        settle: Duration::ZERO,
        lock: Duration::from_secs(1),
        ..PurgeTimes::default()
    };
    let rbd = store_over(dir, fence_after, purge);
    Stores::new(None, Some(rbd.into()), None, &Lanes::new(4))
}

fn store_over(dir: &Path, fence_after: Option<Duration>, purge: PurgeTimes) -> RbdStore {
    let own = dir.display().to_string().parse().unwrap();
    let settings = Settings {
        config: &dir.join("config.json"),
        mapping: &dir.join("cluster-mapping.json"),
        kms: KmsConfig {
            config: dir.join("kms.json"),
            secrets: dir.join("kms-secrets"),
            token: dir.join("kms-token"),
        },
        names_of_objects: ObjectNames::default(),
        instance: "default",
        operators: Operators::new(vec![own]),
        fence_after,
        known_nodes: None,
        purge,
        quiet_for: Duration::ZERO,
    };
    RbdStore::new(settings, &Lanes::new(4)).unwrap()
}

/// A volume as it is asked for without secrets.
fn volume(pool: &str, name: &str, bytes: u64) -> NewVolume {
    let class = [("clusterID", "ceph"), ("pool", pool)];
    let own = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
    NewVolume {
        name: name.to_owned(),
        range: Range {
            required: bytes,
            limit: 0,
        },
        parameters: class.into_iter().map(own).collect(),
        mutable: HashMap::new(),
        uses: vec![VolumeUse {
            fs_type: None,
            many_nodes_write: false,
        }],
        source: None,
        elsewhere: None,
        accessibility: AccessibilityRequirements::default(),
        secrets: Secrets::default(),
    }
}

impl Home {
    fn new() -> Option<Self> {
        Some(Self::over(TestCluster::shared()?))
    }

    fn over(cluster: TestCluster) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [("userID", &cluster.user), ("userKey", &cluster.key)] {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let home = Self {
            pool: cluster.fresh_pool(),
            cluster,
            rbd: rbd_over(dir.path()),
            dir,
        };
        home.configure(&["ceph"]);
        home
    }

    /// Has the configuration know the cluster by these names.
    fn configure(&self, ids: &[&str]) {
        let monitors = &self.cluster.monitors;
        let named = |id: &&str| serde_json::json!({"clusterID": id, "monitors": monitors});
        let config: Vec<_> = ids.iter().map(named).collect();
        let file = self.dir.path().join("config.json");
        std::fs::write(file, serde_json::json!(config).to_string()).unwrap();
    }

    fn secrets(&self) -> Secrets {
        let user = ("userID".to_owned(), self.cluster.user.clone());
        let key = ("userKey".to_owned(), self.cluster.key.clone());
        HashMap::from([user, key]).into()
    }

    fn volume(&self, name: &str, bytes: u64) -> NewVolume {
        let secrets = self.secrets();
        NewVolume {
            secrets,
            ..volume(&self.pool, name, bytes)
        }
    }

    fn snapshot(&self, name: &str, volume: &str) -> NewSnapshot {
        NewSnapshot {
            name: name.to_owned(),
            volume: volume.to_owned(),
            parameters: HashMap::new(),
            secrets: self.secrets(),
        }
    }

    async fn make(&self, new: NewVolume) -> VolumeInfo {
        self.rbd.create_volume(new).await.unwrap()
    }

    async fn delete(&self, handle: &str) -> Result<(), ProvisionError> {
        let secrets = self.secrets();
        self.rbd.delete_volume(handle.to_owned(), secrets).await
    }

    /// The pool, on a connection of its own.
    fn io(&self) -> IoCtx {
        let credentials = Credentials::from_secrets(&self.secrets()).unwrap();
        let monitors = &self.cluster.monitors;
        let cluster = Cluster::connect(monitors, &credentials, Timeouts::default()).unwrap();
        cluster.ioctx(&self.pool, "").unwrap()
    }

    /// The images in the pool.
    fn images(&self) -> Vec<String> {
        let listed = self.cluster.rbd(&["ls", &self.pool]);
        listed.lines().map(str::to_owned).collect()
    }
}

#[tokio::test]
async fn one_name_is_one_image_until_it_is_deleted() {
    let Some(home) = Home::new() else { return };
    let name = "pvc-ünï/cödé ☃";
    let creates = (0..32).map(|_| home.make(home.volume(name, 3 * MIB + 1)));
    let made = join_all(creates).await;
    let first = &made[0];
    assert!(made.iter().all(|volume| volume == first));
    assert_eq!(first.bytes, 4 * MIB);
    assert_eq!(home.images(), [first.context["imageName"].clone()]);

    let larger = home.rbd.create_volume(home.volume(name, GIB)).await;
    assert_eq!(larger.unwrap_err().kind(), ErrorKind::Conflict);
    let range = Range {
        required: GIB + 1,
        limit: 0,
    };
    let expanded = home
        .rbd
        .expand_volume(first.handle.clone(), range, home.secrets());
    assert_eq!(expanded.await.unwrap(), 2 * GIB);

    home.delete(&first.handle).await.unwrap();
    home.delete(&first.handle).await.unwrap();
    assert_eq!(home.images(), [""; 0]);
    let again = home.make(home.volume(name, MIB)).await;
    assert_ne!(again.handle, first.handle);
}

#[tokio::test]
async fn copies_outlive_their_sources() {
    let Some(home) = Home::new() else { return };
    let source = home.make(home.volume("source", MIB)).await;
    let taken = home
        .rbd
        .create_snapshot(home.snapshot("snap", &source.handle));
    let snapshot = taken.await.unwrap();
    let repeat = home
        .rbd
        .create_snapshot(home.snapshot("snap", &source.handle));
    assert_eq!(repeat.await.unwrap(), snapshot);

    let mut restored = home.volume("restored", 2 * MIB);
    restored.source = Some(ContentSource::Snapshot(snapshot.handle.clone()));
    let restored = home.make(restored).await;
    assert_eq!(restored.bytes, 2 * MIB);
    let mut cloned = home.volume("cloned", 0);
    cloned.source = Some(ContentSource::Volume(source.handle.clone()));
    let request = cloned.clone();
    let cloned = home.make(cloned).await;
    assert_eq!(cloned.bytes, MIB);

    home.delete(&source.handle).await.unwrap();
    let gone = home
        .rbd
        .delete_snapshot(snapshot.handle.clone(), home.secrets());
    gone.await.unwrap();
    // A repeat needs no source.
    assert_eq!(home.make(request).await, cloned);
    home.delete(&restored.handle).await.unwrap();
    home.delete(&cloned.handle).await.unwrap();
    assert_eq!(home.images(), [""; 0]);
    // With the last copy gone, the trash can be emptied.
    let trash = || home.cluster.rbd(&["trash", "ls", "--all", &home.pool]);
    while !trash().is_empty() {
        assert!(home.rbd.sweep(StoreKind::Rbd).await.unwrap().is_empty());
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn an_image_in_use_is_not_deleted() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("used", MIB)).await;
    let credentials = Credentials::from_secrets(&home.secrets()).unwrap();
    let monitors = &home.cluster.monitors;
    let other = Cluster::connect(monitors, &credentials, Timeouts::default()).unwrap();
    let pool = other.ioctx(&home.pool, "").unwrap();
    let image = &made.context["imageName"];
    let access = crate::ceph::client::rbd::OpenMode::ReadWrite;
    let user = crate::ceph::client::rbd::Image::open(&pool, image, access).unwrap();
    let refused = home.delete(&made.handle).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Precondition);
    assert!(refused.to_string().contains("127."), "{refused}");
    drop(user);
    home.delete(&made.handle).await.unwrap();
}

#[tokio::test]
async fn listings_continue_where_they_ended() {
    let Some(home) = Home::new() else { return };
    let mut made = Vec::new();
    for n in 0..3 {
        made.push(home.make(home.volume(&format!("v{n}"), MIB)).await.handle);
    }
    let (mut from, mut seen) = (None, Vec::new());
    loop {
        let page = home
            .rbd
            .list_volumes(ListRequest {
                from,
                max: 2,
                omitted: None,
            })
            .await
            .unwrap();
        seen.extend(page.entries.into_iter().map(|volume| volume.handle));
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    // Other tests have volumes in the same cluster.
    assert!(made.iter().all(|handle| seen.contains(handle)), "{seen:?}");
    // Without a class, the cluster's answer.
    let classes = [home.volume("any", 0).parameters, HashMap::new()];
    for parameters in classes {
        let room = CapacityRequest {
            parameters,
            ..CapacityRequest::default()
        };
        // The manager counts a new pool after a moment.
        loop {
            match home.rbd.capacity(room.clone()).await {
                Ok(capacity) if capacity.available > 0 => break,
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::Transient, "{error}"),
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }
}

/// As ceph-csi before 3.4 wrote them after a fail-over: they sort before the volumes' names.
#[tokio::test]
async fn a_listing_ends_where_handles_fill_pages() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("pvc-1", MIB)).await.handle;
    let keys: Vec<_> = (0..=listing::BATCH)
        .map(|n| format!("csi.volume.0001-{n:04}"))
        .collect();
    let keys: Vec<_> = keys.iter().map(|key| (&**key, &*made)).collect();
    home.io().omap_set("csi.volumes.default", &keys).unwrap();
    let within = Duration::from_secs(60);
    let listed = home.rbd.list_volumes(ListRequest::default());
    let listed = tokio::time::timeout(within, listed).await.expect("an end");
    let mut listed = listed.unwrap().entries.into_iter();
    assert!(listed.any(|volume| volume.handle == made));
    home.rbd.orphans(within).await.unwrap();
}
