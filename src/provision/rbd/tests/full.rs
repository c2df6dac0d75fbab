//! A pool that is at its quota.

use super::{
    super::pools::{self, ManagerStatus},
    *,
};

impl Home {
    /// With a cluster of its own, which may be full, as a user that may ask for the manager.
    pub(super) fn of_admin() -> Option<Self> {
        let mut cluster = TestCluster::own()?;
        cluster.user = "admin".to_owned();
        cluster.key.clone_from(&cluster.admin_key);
        Some(Self::over(cluster))
    }

    /// Sets a pool's quota, in objects, and waits until it is full, or has room again.
    async fn set_quota(&self, pool: &str, objects: &str) {
        let quota = ["osd", "pool", "set-quota", pool, "max_objects", objects];
        self.cluster.ceph(&quota);
        let cluster = self.io().cluster().clone();
        let id = cluster.ioctx(pool, "").unwrap().pool_id();
        testkit::eventually("the quota's effect", async || {
            let pools = pools::parse(&pools::list(&cluster).unwrap()).unwrap();
            let listed = pools.iter().find(|one| one.id == id).unwrap();
            (listed.is_full() == (objects != "0")).then_some(())
        })
        .await;
    }

    /// Waits until Ceph's manager works.
    async fn manager(&self) {
        let pool = self.io();
        let works = || ManagerStatus::of(pool.cluster()).works().then_some(());
        testkit::eventually("a manager", async || works()).await;
    }

    /// Sweeps until the pool's trash is empty.
    async fn empty_trash(&self) {
        let trash = || self.cluster.rbd(&["trash", "ls", "--all", &self.pool]);
        testkit::eventually("an empty trash", async || {
            self.rbd.sweep(StoreKind::Rbd).await.unwrap();
            trash().is_empty().then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn in_a_full_pool_deletes_make_room_and_creates_are_refused_at_once() {
    let Some(home) = Home::of_admin() else { return };
    let made = home.make(home.volume("made", MIB)).await;
    let snapshot = home.snapshot("taken", &made.handle);
    let taken = home.rbd.create_snapshot(snapshot).await.unwrap();
    let pool = home.io();
    home.manager().await;
    home.set_quota(&home.pool, "1").await;

    let begun = Instant::now();
    let another = home.volume("another", MIB);
    let volume = home.rbd.create_volume(another.clone()).await.unwrap_err();
    assert_eq!(volume.kind(), ErrorKind::Exhausted, "{volume}");
    let another_snapshot = home.snapshot("later", &made.handle);
    let later = home.rbd.create_snapshot(another_snapshot).await;
    assert_eq!(later.unwrap_err().kind(), ErrorKind::Exhausted);
    for (directory, name) in [
        ("csi.volumes.default", "csi.volume.made"),
        ("csi.snaps.default", "csi.snap.taken"),
    ] {
        let names = pool.omap_list(directory, "").unwrap().into_keys();
        assert_eq!(names.collect::<Vec<_>>(), [name]);
    }
    let deleted = home.rbd.delete_snapshot(taken.handle, home.secrets());
    deleted.await.unwrap();
    home.delete(&made.handle).await.unwrap();
    assert_eq!(home.images(), [""; 0]);
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(25), "a call waited: {took:?}");

    // The images' objects go, too.
    home.empty_trash().await;
    home.set_quota(&home.pool, "0").await;
    let another = home.make(another).await;
    home.delete(&another.handle).await.unwrap();
}

#[tokio::test]
async fn deletes_make_room_in_a_full_data_pool() {
    let Some(home) = Home::of_admin() else { return };
    let data = home.cluster.fresh_pool();
    let mut volume = home.volume("made", MIB);
    volume
        .parameters
        .insert("dataPool".to_owned(), data.clone());
    let made = home.make(volume).await;
    let image = format!("{}/{}", home.pool, made.context["imageName"]);
    let write = ["bench", "--io-type", "write", "--io-total", "4096", &image];
    home.cluster.rbd(&write);
    home.manager().await;
    home.set_quota(&data, "1").await;
    home.delete(&made.handle).await.unwrap();
    home.empty_trash().await;
    let objects = home.cluster.rados(&data, &["ls"]);
    assert!(!objects.contains("rbd_data"), "{objects}");
}

/// As after ceph-csi, whose pool has no object of this driver.
#[tokio::test]
async fn deletes_make_room_in_a_pool_that_was_full_before() {
    let Some(home) = Home::of_admin() else { return };
    let made = home.make(home.volume("made", MIB)).await;
    let objects = || home.cluster.rados(&home.pool, &["ls"]);
    for object in ["uring-csi.trash", "rbd_trash"] {
        let is_there = objects().lines().any(|line| line == object);
        if is_there {
            home.cluster.rados(&home.pool, &["rm", object]);
        }
    }
    home.set_quota(&home.pool, "1").await;
    home.delete(&made.handle).await.unwrap();
    home.empty_trash().await;
    assert!(!objects().contains("rbd_header"), "{}", objects());
}
