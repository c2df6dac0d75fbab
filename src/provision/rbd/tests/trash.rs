//! What is in the trash, and whose it is.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::{
    super::{pools::ManagerStatus, trash::Discarded},
    *,
};
use crate::ceph::client::rbd::{image_id, trash};

const ROUNDS: usize = 8;

impl Home {
    fn trash(&self) -> String {
        self.cluster.rbd(&["trash", "ls", "--all", &self.pool])
    }

    /// What is listed to be removed.
    fn listed(&self) -> Vec<String> {
        let listed = self.io().omap_list("uring-csi.trash", "").unwrap();
        listed.into_values().collect()
    }

    fn listed_ids(&self) -> Vec<String> {
        let listed = self.io().omap_list("uring-csi.trash", "").unwrap();
        listed.into_keys().collect()
    }

    /// Has the trash emptied for as long as `left` is there, up to some ten seconds.
    async fn sweeps(&self, left: impl Fn() -> bool) {
        for _ in 0..200 {
            assert!(self.rbd.sweep(StoreKind::Rbd).await.unwrap().is_empty());
            if !left() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        panic!("the trash still has {:?}", self.trash());
    }
}

#[tokio::test]
async fn a_snapshot_of_an_interrupted_copy_does_not_keep_an_image() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("source", MIB)).await;
    let image = format!("{}/{}", home.pool, made.context["imageName"]);
    let left = format!("{image}@csi-vol-{}-temp", uuid::Uuid::new_v4());
    home.cluster.rbd(&["snap", "create", &left]);
    home.delete(&made.handle).await.unwrap();
    home.sweeps(|| !home.trash().is_empty()).await;
}

#[tokio::test]
async fn a_users_snapshot_keeps_a_deleted_image_until_it_is_removed() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("kept", MIB)).await;
    let name = &made.context["imageName"];
    let image = format!("{}/{name}", home.pool);
    let user = format!("backup-{}", uuid::Uuid::new_v4());
    // What copies leave, one of them in the journal, is removed; if nothing else is there.
    let of_copy = format!("csi-snap-{}", uuid::Uuid::new_v4());
    let entry = of_copy.replace("csi-snap-", "csi.snap.");
    let keys = [("csi.snapname", "s"), ("csi.imagename", &*of_copy)];
    home.io().omap_set(&entry, &keys).unwrap();
    for snapshot in [&user, &of_copy] {
        home.cluster
            .rbd(&["snap", "create", &format!("{image}@{snapshot}")]);
    }
    home.delete(&made.handle).await.unwrap();
    let id = home.listed_ids().pop().unwrap();
    let purger = super::super::trash::TrashPurger::new(Lanes::new(1), PurgeTimes::default());
    let discarded = Discarded {
        id: id.clone(),
        name: name.clone(),
    };
    // The lock may be another purge's.
    let refused = loop {
        if let Err(refused) = purger.empty(&home.io(), &discarded, true) {
            break refused.to_string();
        }
        assert!(home.listed_ids().contains(&id), "it was purged");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(refused.contains(&user), "{refused}");
    assert!(!refused.contains(&of_copy), "{refused}");
    let of_image = ["--pool", &home.pool, "--image-id", &id];
    let listed = home.cluster.rbd(&[&["snap", "ls"], &of_image[..]].concat());
    assert!(listed.contains(&user), "{listed}");
    assert!(home.listed_ids().contains(&id));
    let remove = ["snap", "rm", "--snap", &user];
    home.cluster.rbd(&[&remove[..], &of_image].concat());
    home.sweeps(|| !home.trash().is_empty()).await;
}

#[tokio::test]
async fn an_image_that_a_delete_could_not_trash_is_not_removed_later() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("followed", MIB)).await;
    let name = made.context["imageName"].clone();
    let image = format!("{}/{name}", home.pool);
    // It becomes a mirror after the delete has looked at it.
    let mirror = |args: &[&str]| home.cluster.rbd(&[&["mirror"], args].concat());
    mirror(&["pool", "enable", &home.pool, "image"]);
    home.cluster
        .rbd(&["feature", "enable", &image, "journaling"]);
    mirror(&["image", "enable", &image, "journal"]);
    mirror(&["image", "demote", &image]);
    let pool = home.io();
    let id = crate::ceph::client::rbd::image_id(&pool, &name)
        .unwrap()
        .unwrap();
    let purger = store_over(home.dir.path(), None, PurgeTimes::default()).purger;
    let discarded = [Discarded { id, name }];
    purger.discard(&pool, &discarded).unwrap_err();
    assert_eq!(home.listed(), [""; 0]);

    mirror(&["image", "promote", &image]);
    home.delete(&made.handle).await.unwrap();
    home.sweeps(|| !home.trash().is_empty()).await;
}

#[tokio::test]
async fn a_member_of_a_group_of_images_stays() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("member", MIB)).await;
    let image = format!("{}/{}", home.pool, made.context["imageName"]);
    let group = format!("{}/consistent", home.pool);
    let of_group = |args: &[&str]| home.cluster.rbd(&[&["group"], args].concat());
    of_group(&["create", &group]);
    of_group(&["image", "add", &group, &image]);
    // What a copy has left beside it.
    home.cluster
        .rbd(&["create", "--size", "1M", &format!("{image}-temp")]);
    let refused = home.delete(&made.handle).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
    assert!(refused.to_string().contains("consistent"), "{refused}");
    assert_eq!(home.images().len(), 2);
    of_group(&["image", "remove", &group, &image]);
    home.delete(&made.handle).await.unwrap();
    assert_eq!(home.images(), [""; 0]);
}

#[tokio::test]
async fn an_image_that_an_operator_trashed_stays() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("kept", MIB)).await;
    let name = &made.context["imageName"];
    let image = format!("{}/{name}", home.pool);
    let keep = ["trash", "mv", "--expires-at", "tomorrow", &image];
    home.cluster.rbd(&keep);
    home.delete(&made.handle).await.unwrap();
    home.sweeps(|| !home.listed().is_empty()).await;
    assert!(home.trash().contains(name));
}

#[tokio::test]
async fn a_repeated_delete_completes_interrupted_moves() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("killed", MIB)).await;
    let name = &made.context["imageName"];
    let temp = format!("{name}-temp");
    // What a copy has left beside it.
    let left = format!("{}/{temp}", home.pool);
    home.cluster.rbd(&["create", "--size", "1M", &left]);
    for image in [name, &temp] {
        trash::interrupt_move(&home.io(), image);
    }
    assert_eq!(home.images().len(), 2);
    // Its sweep leaves what was moved a moment ago alone.
    let rbd = store_over(home.dir.path(), None, PurgeTimes::default());
    let stores = Stores::new(None, Some(rbd.into()), None, &Lanes::new(4));
    let secrets = home.secrets();
    stores.delete_volume(made.handle, secrets).await.unwrap();
    assert_eq!(home.images(), [""; 0]);
}

/// Each of a deployment's replicas purges the trash, at its start and then periodically.
#[tokio::test]
async fn replicas_that_purge_one_trash_do_not_fence_each_other() {
    let Some(home) = Home::of_its_own() else {
        return;
    };
    let replicas: Vec<_> = (0..4).map(|_| rbd_over(home.dir.path())).collect();
    for round in 0..ROUNDS {
        let volume = |number| home.volume(&format!("{round}-{number}"), MIB);
        let made = join_all((0..6).map(|number| home.make(volume(number)))).await;
        let images: Vec<_> = made
            .iter()
            .map(|it| it.context["imageName"].clone())
            .collect();
        let pool = home.io();
        let discarded: Vec<_> = images
            .iter()
            .map(|name| Discarded {
                id: image_id(&pool, name).unwrap().unwrap(),
                name: name.clone(),
            })
            .collect();
        for image in &discarded {
            pool.omap_set("uring-csi.trash", &[(&image.id, &image.name)])
                .unwrap();
            trash::move_image(&pool, &image.name, Duration::ZERO).unwrap();
        }
        let sweep = async |replica: &Stores| {
            while !home.listed().is_empty() {
                let failed = replica.sweep(StoreKind::Rbd).await.unwrap();
                assert!(failed.is_empty(), "{failed:?}");
            }
        };
        join_all(replicas.iter().map(sweep)).await;
        join_all(made.iter().map(|it| home.delete(&it.handle))).await;
    }
    assert_eq!(home.cluster.ceph(&["osd", "blocklist", "ls"]), "");
}

#[tokio::test]
async fn an_image_is_left_to_a_manager_that_does_not_answer() {
    let Some(home) = Home::of_admin() else {
        return;
    };
    let credentials = Credentials::from_secrets(&home.secrets()).unwrap();
    let monitors = &home.cluster.monitors;
    let timeouts = Timeouts {
        operation: Duration::from_secs(2),
        ..Timeouts::default()
    };
    let cluster = Cluster::connect(monitors, &credentials, timeouts).unwrap();
    let pool = cluster.ioctx(&home.pool, "").unwrap();
    let image = home.make(home.volume("left", MIB)).await.context["imageName"].clone();
    let id = image_id(&pool, &image).unwrap().unwrap();
    let discarded = Discarded { id, name: image };
    pool.omap_set("uring-csi.trash", &[(&discarded.id, &discarded.name)])
        .unwrap();
    trash::move_image(&pool, &discarded.name, Duration::ZERO).unwrap();
    testkit::eventually("a manager", async || {
        ManagerStatus::of(pool.cluster()).works().then_some(())
    })
    .await;

    let manager = home.cluster.dir().join("mgr.x.pid");
    let manager = std::fs::read_to_string(manager).unwrap();
    let manager = Pid::from_raw(manager.trim().parse().unwrap()).unwrap();
    kill_process(manager, Signal::STOP).unwrap();
    let purger = super::super::trash::TrashPurger::new(Lanes::new(1), PurgeTimes::default());
    // No answer, and then one command has none yet.
    for _ in 0..2 {
        let left = purger.empty(&pool, &discarded, true).unwrap_err();
        assert_eq!(left.kind(), ErrorKind::Transient, "{left}");
        assert_eq!(home.listed(), [&*discarded.name]);
        assert!(home.trash().contains(&discarded.name));
    }
    kill_process(manager, Signal::CONT).unwrap();
    home.sweeps(|| !home.trash().is_empty()).await;
}

/// `rbd_support` refuses all while a pool without active placement groups holds up its start.
#[tokio::test]
async fn an_image_is_removed_without_a_manager_that_is_not_ready() {
    let Some(home) = Home::of_admin() else {
        return;
    };
    let pool = home.io();
    let image = home.make(home.volume("refused", MIB)).await.context["imageName"].clone();
    let id = image_id(&pool, &image).unwrap().unwrap();
    let discarded = Discarded { id, name: image };
    pool.omap_set("uring-csi.trash", &[(&discarded.id, &discarded.name)])
        .unwrap();
    trash::move_image(&pool, &discarded.name, Duration::ZERO).unwrap();

    let list = || {
        pool.cluster()
            .mgr_command(&json!({"prefix": "rbd task list"}))
    };
    // Before the pool that it cannot read: with it, it may never be ready.
    testkit::eventually("a manager", async || list().ok()).await;
    for args in [
        &["pool", "create", "stuck"][..],
        &["pool", "set", "stuck", "size", "3"],
        &["pool", "set", "stuck", "min_size", "3"],
        &["pool", "application", "enable", "stuck", "rbd"],
    ] {
        home.cluster.ceph(&[&["osd"], args].concat());
    }
    home.cluster.ceph(&["mgr", "fail", "x"]);
    testkit::eventually("a refusal", async || {
        let refused = list().err()?.to_string();
        refused.contains("not ready").then_some(())
    })
    .await;

    let purger = super::super::trash::TrashPurger::new(Lanes::new(1), PurgeTimes::default());
    purger.empty(&pool, &discarded, true).unwrap();
    assert_eq!(home.listed(), [""; 0]);
    assert_eq!(home.trash(), "");
}

#[tokio::test]
async fn a_panic_ends_no_later_purge() {
    let Some(home) = Home::new() else { return };
    let times = PurgeTimes {
        settle: Duration::ZERO,
        lock: Duration::from_secs(1),
        ..PurgeTimes::default()
    };
    let rbd = store_over(home.dir.path(), None, times);
    let purger = rbd.purger.clone();
    let pool = home.io();
    let discard = async |name: &str| {
        let image = home.make(home.volume(name, MIB)).await.context["imageName"].clone();
        let id = image_id(&pool, &image).unwrap().unwrap();
        let discarded = [Discarded { id, name: image }];
        purger.discard(&pool, &discarded).unwrap();
    };
    let idle = async || {
        testkit::eventually("no purge", async || (purger.pending() == 0).then_some(())).await;
    };
    purger.panics.arm();
    discard("first").await;
    idle().await;
    assert_eq!(home.listed().len(), 1, "it did not panic");
    discard("second").await;
    idle().await;
    home.sweeps(|| !home.trash().is_empty()).await;
}

#[tokio::test]
async fn the_user_of_a_pool_is_forgotten_once_its_trash_is_empty() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("any", MIB)).await;
    let times = PurgeTimes {
        forget: Duration::ZERO,
        ..PurgeTimes::default()
    };
    let rbd = store_over(home.dir.path(), None, times);
    let pool = home.io();
    // It has its name: then no sweep removes it.
    let name = &made.context["imageName"];
    let id = image_id(&pool, name).unwrap().unwrap();
    pool.omap_set("uring-csi.trash", &[(&id, name)]).unwrap();
    rbd.volume(&made.handle, &home.secrets()).unwrap();
    let users = || rbd.used.lock().unwrap().len();
    assert!(rbd.sweep().is_empty());
    assert_eq!(users(), 1);
    pool.omap_remove("uring-csi.trash", &[&id]).unwrap();
    assert!(rbd.sweep().is_empty());
    assert_eq!(users(), 0);
}
