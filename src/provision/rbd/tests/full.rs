//! A pool that is at its quota.

use super::{super::pools::ManagerStatus, *};

impl Home {
    fn set_quota(&self, objects: &str) {
        let quota = [
            "osd",
            "pool",
            "set-quota",
            &self.pool,
            "max_objects",
            objects,
        ];
        self.cluster.ceph(&quota);
    }
}

#[tokio::test]
async fn in_a_full_pool_deletes_make_room_and_creates_are_refused_at_once() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("made", MIB)).await;
    let snapshot = home.snapshot("taken", &made.handle);
    let taken = home.rbd.create_snapshot(snapshot).await.unwrap();
    let pool = home.io();
    let has_room = || ManagerStatus::of(pool.cluster()).works_in(&pool);
    testkit::eventually("a manager", async || has_room().then_some(())).await;
    home.set_quota("1");
    testkit::eventually("a full pool", async || (!has_room()).then_some(())).await;

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
    let trash = || home.cluster.rbd(&["trash", "ls", "--all", &home.pool]);
    testkit::eventually("an empty trash", async || {
        home.rbd.sweep(StoreKind::Rbd).await.unwrap();
        trash().is_empty().then_some(())
    })
    .await;
    home.set_quota("0");
    testkit::eventually("room", async || has_room().then_some(())).await;
    let another = home.make(another).await;
    home.delete(&another.handle).await.unwrap();
}
