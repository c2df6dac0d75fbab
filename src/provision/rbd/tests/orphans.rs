//! What no volume refers to, made by hand or by a kill: listed, and removed by its name.

use uuid::Uuid;

use super::{encrypted::VaultHome, *};
use crate::{
    Done,
    ceph::client::rbd::{Image, OpenMode},
    provision::{Orphan, OrphanKind, OrphanReport},
};

/// The time that a report may take.
const WITHIN: Duration = Duration::from_secs(60);

impl Home {
    async fn orphan_report(&self) -> OrphanReport {
        self.rbd.orphans(WITHIN).await.unwrap()
    }

    /// The orphans of this test's pool: others have theirs in the same cluster.
    async fn orphans(&self) -> Vec<Orphan> {
        let mut orphans = self.orphan_report().await.orphans;
        orphans.retain(|orphan| orphan.pool == self.pool);
        orphans
    }

    /// The only orphan.
    async fn orphan(&self) -> Orphan {
        let mut orphans = self.orphans().await;
        assert_eq!(orphans.len(), 1, "{orphans:#?}");
        orphans.pop().unwrap()
    }

    async fn remove_orphan(&self, name: &str) -> Result<Done, ProvisionError> {
        let path = format!("{}/{name}", self.pool);
        self.rbd.remove_orphan("ceph".to_owned(), path).await
    }

    async fn refused(&self, name: &str, why: &str) {
        let refused = self.remove_orphan(name).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
        assert!(refused.to_string().contains(why), "{refused}");
    }

    /// Removes the only orphan, and looks that nothing else went.
    async fn removes(&self, kind: OrphanKind) {
        let orphan = self.orphan().await;
        assert_eq!(
            (orphan.kind, orphan.kept.as_str()),
            (kind, ""),
            "{orphan:?}"
        );
        assert_eq!(self.remove_orphan(&orphan.name).await.unwrap(), Done::Now);
        assert_eq!(self.orphans().await, []);
        assert_eq!(
            self.remove_orphan(&orphan.name).await.unwrap(),
            Done::Already
        );
    }

    /// Removes all orphans that a kill at that change left.
    pub(super) async fn remove_orphans_after(&self, at: usize) {
        // A dead process counts as a user of its image until Ceph knows its end.
        let mut rounds = 0..200;
        while let Some(orphan) = self.orphans().await.pop() {
            match self.remove_orphan(&orphan.name).await {
                Ok(_) => {}
                Err(error) if rounds.next().is_some() => {
                    let passes = matches!(
                        error.kind(),
                        ErrorKind::Precondition | ErrorKind::InUse | ErrorKind::Transient
                    );
                    assert!(passes, "killed at {at}: {error}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(error) => panic!("killed at {at}: {error}"),
            }
        }
    }

    fn add_image(&self, image: &str) {
        let image = format!("{}/{image}", self.pool);
        self.cluster.rbd(&["create", "--size", "1M", &image]);
    }

    fn add_entry(&self, uuid: Uuid, keys: &[(&str, &str)]) {
        let object = format!("csi.volume.{uuid}");
        self.io().omap_set(&object, keys).unwrap();
    }

    fn add_name(&self, name: &str, uuid: Uuid) {
        let (key, value) = (format!("csi.volume.{name}"), uuid.to_string());
        let keys = [(key.as_str(), value.as_str())];
        self.io().omap_set("csi.volumes.default", &keys).unwrap();
    }
}

/// Volumes, snapshots and copies of either.
struct Healthy {
    volumes: Vec<String>,
    snapshot: String,
}

impl Healthy {
    async fn new(home: &Home) -> Self {
        let source = home.make(home.volume("source", MIB)).await;
        let taken = home.snapshot("taken", &source.handle);
        let snapshot = home.rbd.create_snapshot(taken).await.unwrap().handle;
        let mut volumes = vec![source.handle.clone()];
        for (name, from) in [
            ("restored", ContentSource::Snapshot(snapshot.clone())),
            ("cloned", ContentSource::Volume(source.handle)),
        ] {
            let mut copy = home.volume(name, 0);
            copy.source = Some(from);
            let prefix = ("volumeNamePrefix".to_owned(), "copy-".to_owned());
            copy.parameters.extend([prefix]);
            volumes.push(home.make(copy).await.handle);
        }
        assert_eq!(home.orphans().await, []);
        Self { volumes, snapshot }
    }

    /// They are all there, and what they consist of can be deleted.
    async fn check(self, home: &Home) {
        for handle in &self.volumes {
            home.rbd.get_volume(handle.clone()).await.unwrap();
        }
        let secrets = home.secrets();
        let snapshot = home.rbd.get_snapshot(self.snapshot, secrets).await;
        snapshot.unwrap();
    }
}

#[tokio::test]
async fn an_image_without_an_entry_is_removed_by_its_name_alone() {
    let Some(home) = Home::new() else { return };
    let healthy = Healthy::new(&home).await;
    let uuid = Uuid::new_v4();
    // Of the default prefixes, and of one that a volume's entry shows.
    for image in [
        format!("csi-vol-{uuid}"),
        format!("csi-snap-{uuid}"),
        format!("copy-{uuid}"),
    ] {
        home.add_image(&image);
        home.removes(OrphanKind::Image).await;
        assert!(!home.images().contains(&image));
    }
    // Not this driver's.
    for image in [format!("other-{uuid}"), "csi-vol-1".to_owned()] {
        home.add_image(&image);
        assert_eq!(home.orphans().await, []);
        home.refused(&image, "not this driver's").await;
    }
    home.add_image(&format!("csi-vol-{uuid}-temp"));
    home.removes(OrphanKind::Temporary).await;
    healthy.check(&home).await;
}

#[tokio::test]
async fn a_doubtful_image_stays() {
    let Some(home) = Home::new() else { return };
    let image = format!("csi-vol-{}", Uuid::new_v4());
    home.add_image(&image);
    let pool = home.io();
    let user = Image::open(&pool, &image, OpenMode::ReadWrite).unwrap();
    assert!(home.orphan().await.kept.contains("127."));
    home.refused(&image, "in use by").await;
    user.snapshot_create("backup").unwrap();
    drop(user);
    home.refused(&image, "backup").await;
    let snapshot = format!("{}/{image}@backup", home.pool);
    home.cluster.rbd(&["snap", "rm", &snapshot]);

    let mirror = |args: &[&str]| home.cluster.rbd(&[&["mirror"], args].concat());
    let path = format!("{}/{image}", home.pool);
    mirror(&["pool", "enable", &home.pool, "image"]);
    home.cluster
        .rbd(&["feature", "enable", &path, "journaling"]);
    mirror(&["image", "enable", &path, "journal"]);
    home.refused(&image, "failed over").await;
    mirror(&["image", "demote", &path]);
    assert_eq!(home.orphan().await.kind, OrphanKind::Secondary);
    home.refused(&image, "primary image").await;
    mirror(&["image", "promote", &path]);
    mirror(&["image", "disable", &path]);
    home.removes(OrphanKind::Image).await;
}

#[tokio::test]
async fn an_image_that_got_its_entry_meanwhile_stays() {
    let Some(home) = Home::new() else { return };
    let uuid = Uuid::new_v4();
    let image = format!("csi-vol-{uuid}");
    home.add_image(&image);
    assert_eq!(home.orphan().await.kind, OrphanKind::Image);
    let keys = [
        ("csi.volname", "found"),
        ("csi.imagename", &image),
        ("csi.imageid", "1"),
    ];
    home.add_entry(uuid, &keys);
    // Its name may be in another instance's journal.
    home.refused(&image, "refers to it").await;
    home.add_name("found", uuid);
    assert_eq!(home.orphans().await, []);
    home.refused(&image, "refers to it").await;
    assert_eq!(home.images(), [image]);
}

#[tokio::test]
async fn an_attempt_that_was_given_up_is_removed_with_all_its_parts() {
    let Some(home) = Home::new() else { return };
    let healthy = Healthy::new(&home).await;
    let before = home.images();
    for with_name in [true, false] {
        for state in ["1", "0"] {
            let uuid = Uuid::new_v4();
            let image = format!("csi-vol-{uuid}");
            let keys = [
                ("csi.volname", "left"),
                ("csi.imagename", &*image),
                ("uring-csi.making", state),
            ];
            home.add_entry(uuid, &keys);
            home.add_image(&image);
            home.add_image(&format!("{image}-temp"));
            if with_name {
                home.add_name("left", uuid);
                home.removes(OrphanKind::Incomplete).await;
            } else {
                // Found by each of its images.
                let orphans = home.orphans().await;
                let is_it = |one: &Orphan| one.kind == OrphanKind::Nameless && one.name == image;
                assert!(
                    !orphans.is_empty() && orphans.iter().all(is_it),
                    "{orphans:?}"
                );
                assert_eq!(home.remove_orphan(&image).await.unwrap(), Done::Now);
                assert_eq!(home.remove_orphan(&image).await.unwrap(), Done::Already);
            }
            assert_eq!(home.orphans().await, []);
            assert_eq!(home.images(), before);
            let object = format!("csi.volume.{uuid}");
            assert!(!home.io().exists(&object).unwrap());
        }
    }
    healthy.check(&home).await;
}

#[tokio::test]
async fn a_snapshot_of_a_group_under_way_is_no_orphan() {
    let Some(home) = Home::new() else { return };
    let volume = home.make(home.volume("source", MIB)).await.handle;
    let (group, member) = (Uuid::new_v4(), Uuid::new_v4());
    let handle = format!("{}{group}", &volume[..volume.len() - 36]);
    let image = format!("csi-snap-{member}");
    let set = |object: &str, keys: &[(&str, &str)]| home.io().omap_set(object, keys).unwrap();
    let set_group = |state: &str| {
        let keys = [("csi.volname", "group"), ("uring-csi.making", state)];
        set(&format!("csi.volume.group.{group}"), &keys);
    };
    set_group("1");
    let keys = [
        ("csi.snapname", "member"),
        ("csi.imagename", &image),
        ("csi.groupid", &handle),
        ("uring-csi.making", "1"),
    ];
    set(&format!("csi.snap.{member}"), &keys);
    let name = [("csi.snap.member", &*member.to_string())];
    set("csi.snaps.default", &name);
    assert_eq!(home.orphans().await, []);
    home.refused(&image, "refers to it").await;
    set_group("0");
    home.removes(OrphanKind::Incomplete).await;
}

#[tokio::test]
async fn a_group_snapshot_that_nobody_completes_is_an_orphan() {
    let Some(home) = Home::new() else { return };
    let uuid = Uuid::new_v4();
    let (key, group) = ("csi.volume.group.left", format!("csi-vol-group-{uuid}"));
    let set = |object: &str, keys: &[(&str, &str)]| home.io().omap_set(object, keys).unwrap();
    let name = || set("csi.groups.default", &[(key, &uuid.to_string())]);
    name();
    for left in [group.clone(), format!("{group}-vg")] {
        let path = format!("{}/{left}", home.pool);
        home.cluster.rbd(&["group", "create", &path]);
        let orphan = home.orphan().await;
        assert!(orphan.kept.contains(&left), "{orphan:?}");
        home.refused(key, "rbd group remove").await;
        home.cluster.rbd(&["group", "remove", &path]);
    }
    home.removes(OrphanKind::Name).await;

    name();
    let entry = format!("csi.volume.group.{uuid}");
    let keys = [("csi.volname", "left"), ("csi.groupname", &group)];
    set(&entry, &keys);
    // ceph-csi's may be complete.
    assert_eq!(home.orphans().await, []);
    home.refused(&group, "refers to it").await;
    home.refused(key, "refers to it").await;
    for state in ["1", "0"] {
        name();
        set(&entry, &keys);
        set(&entry, &[("uring-csi.making", state)]);
        let orphan = home.orphan().await;
        assert_eq!(orphan.name, group);
        assert!(orphan.why.contains("\"left\""), "{orphan:?}");
        home.removes(OrphanKind::Incomplete).await;
    }
}

#[tokio::test]
async fn a_pool_of_cephfs_is_not_looked_at() {
    let Some(home) = Home::new() else { return };
    home.add_name("subvolume", Uuid::new_v4());
    assert_eq!(home.orphan().await.kind, OrphanKind::Name);
    let application = |action: &str, name: &str| {
        let command = ["osd", "pool", "application", action, &home.pool, name];
        let sure = ["--yes-i-really-mean-it"];
        home.cluster.ceph(&[&command[..], &sure].concat());
    };
    application("disable", "rbd");
    application("enable", "cephfs");
    assert_eq!(home.orphans().await, []);
}

#[tokio::test]
async fn what_is_young_is_no_orphan() {
    let Some(home) = Home::new() else { return };
    let mut store = store_over(home.dir.path(), None, PurgeTimes::default());
    store.quiet_for = QUIET_FOR;
    let young = Stores::new(None, Some(store.into()), None, &Lanes::new(4));
    let (uuid, other) = (Uuid::new_v4(), Uuid::new_v4());
    let image = format!("csi-vol-{uuid}");
    home.add_entry(uuid, &[("csi.volname", "left"), ("uring-csi.making", "1")]);
    home.add_name("left", uuid);
    let late = format!("csi-vol-{other}");
    home.add_image(&late);
    let report = young.orphans(WITHIN).await.unwrap();
    let mut orphans = report.orphans.iter();
    assert!(orphans.all(|one| one.pool != home.pool), "{report:#?}");
    for name in [image, late] {
        let path = format!("{}/{name}", home.pool);
        let refused = young.remove_orphan("ceph".to_owned(), path).await;
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("too young"), "{refused}");
    }
    assert_eq!(home.orphans().await.len(), 2);
}

#[tokio::test]
async fn an_attempt_of_ceph_csi_stays_while_its_image_may_be_complete() {
    let Some(home) = Home::new() else { return };
    let uuid = Uuid::new_v4();
    let image = format!("csi-vol-{uuid}");
    let keys = [("csi.volname", "pvc-1"), ("csi.imagename", &*image)];
    home.add_entry(uuid, &keys);
    home.add_name("pvc-1", uuid);
    home.add_image(&image);
    let orphan = home.orphan().await;
    assert_eq!(orphan.kind, OrphanKind::Incomplete);
    assert!(orphan.why.contains("ceph-csi"), "{orphan:?}");
    home.refused(&image, "uringctl delete").await;
    assert_eq!(home.images(), std::slice::from_ref(&image));
    home.cluster.rbd(&["rm", &format!("{}/{image}", home.pool)]);
    home.removes(OrphanKind::Incomplete).await;
    let directory = home.io().omap_list("csi.volumes.default", "").unwrap();
    assert!(directory.is_empty(), "{directory:?}");
}

#[tokio::test]
async fn a_snapshot_that_ceph_csi_began_keeps_no_deleted_volume() {
    let Some(home) = Home::new() else { return };
    let source = home.make(home.volume("source", MIB)).await;
    let snapshot = home.snapshot_reserved_by_ceph_csi("left");
    let cut = home.cut_by_ceph_csi(&source, &snapshot);
    home.removes(OrphanKind::Incomplete).await;
    assert_eq!(home.cluster.rbd(&["snap", "ls", &cut]), "");
    home.delete(&source.handle).await.unwrap();
    // Nothing keeps it in the trash.
    assert_eq!(home.orphans().await, []);
}

/// Its image may be complete.
#[tokio::test]
async fn the_delete_of_a_snapshot_that_ceph_csi_began_leaves_nothing_on_its_volume() {
    let Some(home) = Home::new() else { return };
    let source = home.make(home.volume("source", MIB)).await;
    let snapshot = home.snapshot_reserved_by_ceph_csi("left");
    let cut = home.cut_by_ceph_csi(&source, &snapshot);
    let (from, to) = (
        format!("{cut}@{snapshot}"),
        format!("{}/{snapshot}", home.pool),
    );
    let clone = ["clone", "--rbd-default-clone-format", "2", &from, &to];
    home.cluster.rbd(&clone);
    home.refused(&snapshot, "uringctl").await;
    let uuid = &snapshot["csi-snap-".len()..];
    let handle = format!("{}{uuid}", &source.handle[..source.handle.len() - 36]);
    let deleted = home.rbd.delete_snapshot(handle, home.secrets());
    deleted.await.unwrap();
    home.delete(&source.handle).await.unwrap();
    assert_eq!(home.orphans().await, []);
}

/// A secondary image takes no change, and needs none.
#[tokio::test]
async fn a_name_that_ceph_csi_reserved_for_a_snapshot_of_a_secondary_image_is_removed() {
    let Some(home) = Home::new() else { return };
    let source = home.make(home.volume("source", MIB)).await;
    let snapshot = home.snapshot_reserved_by_ceph_csi("left");
    let cut = home.cut_by_ceph_csi(&source, &snapshot);
    home.mirror_pool();
    let mirror = |verb: &str| home.cluster.rbd(&["mirror", "image", verb, &cut]);
    home.cluster
        .rbd(&["mirror", "image", "enable", &cut, "snapshot"]);
    mirror("demote");
    home.refused(&snapshot, "rbd snap rm").await;
    mirror("promote");
    home.cluster
        .rbd(&["snap", "rm", &format!("{cut}@{snapshot}")]);
    mirror("demote");
    home.removes(OrphanKind::Incomplete).await;
}

#[tokio::test]
async fn the_passphrase_of_an_orphan_is_removed_with_the_secret_of_its_user() {
    let Some(there) = VaultHome::new() else {
        return;
    };
    let VaultHome { home, vault } = &there;
    let made = home.make(there.volume("left", "vault")).await;
    // As if its create had been given up.
    let entry = Home::entry(&made.handle);
    let io = home.io();
    io.omap_set(&entry, &[("uring-csi.making", "1")]).unwrap();
    io.omap_remove(&entry, &["csi.imageid"]).unwrap();
    std::fs::write(home.dir.path().join("vault-ca"), vault.ca()).unwrap();
    home.removes(OrphanKind::Incomplete).await;
    assert_eq!(vault.passphrase(&made.handle), None);
}

#[tokio::test]
async fn a_name_without_an_entry_is_removed_unless_an_image_has_its_uuid() {
    let Some(home) = Home::new() else { return };
    let healthy = Healthy::new(&home).await;
    home.add_name("left", Uuid::new_v4());
    home.removes(OrphanKind::Name).await;
    // In a pool that was deleted.
    let (key, uuid) = ("csi.volume.far", Uuid::new_v4());
    let gone = format!("00000000000fffff/{uuid}");
    home.io()
        .omap_set("csi.volumes.default", &[(key, &gone)])
        .unwrap();
    home.removes(OrphanKind::Name).await;

    let image = format!("csi-vol-{uuid}");
    home.add_name("lost", uuid);
    home.add_image(&image);
    assert_eq!(home.orphans().await.len(), 2);
    home.refused("csi.volume.lost", &image).await;
    assert_eq!(home.remove_orphan(&image).await.unwrap(), Done::Now);
    home.removes(OrphanKind::Name).await;
    // A name that leads to a volume.
    home.refused("csi.volume.source", "refers to it").await;
    healthy.check(&home).await;
}

#[tokio::test]
async fn a_volume_without_an_image_is_listed_and_deleted_by_its_handle() {
    let Some(home) = Home::new() else { return };
    let lost = home.make(home.volume("lost", MIB)).await;
    let image = format!("{}/{}", home.pool, lost.context["imageName"]);
    home.cluster.rbd(&["rm", &image]);
    let orphan = home.orphan().await;
    assert_eq!(orphan.kind, OrphanKind::Lost);
    assert!(orphan.kept.contains(&lost.handle), "{orphan:?}");
    home.refused(&orphan.name, "delete the volume").await;
    home.delete(&lost.handle).await.unwrap();
    assert_eq!(home.orphans().await, []);
}

#[tokio::test]
async fn a_deleted_image_with_a_users_snapshot_is_listed_until_the_snapshot_is_removed() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("kept", MIB)).await;
    let name = &made.context["imageName"];
    let snapshot = format!("{}/{name}@backup", home.pool);
    home.cluster.rbd(&["snap", "create", &snapshot]);
    home.delete(&made.handle).await.unwrap();
    let orphan = home.orphan().await;
    assert_eq!((orphan.kind, &orphan.name), (OrphanKind::Trashed, name));
    home.refused(name, "backup").await;
    let id = home.io().omap_list("uring-csi.trash", "").unwrap();
    let id = id.into_keys().next().unwrap();
    let remove = ["snap", "rm", "--snap", "backup", "--pool", &home.pool];
    home.cluster
        .rbd(&[&remove[..], &["--image-id", &id]].concat());
    assert_eq!(home.orphans().await, []);
}

/// A kill at each change of a create leaves nothing that is not listed, removed by its name.
#[tokio::test]
async fn what_a_killed_create_leaves_is_listed_and_removed() {
    let Some(home) = Home::of_its_own() else {
        return;
    };
    for at in 0.. {
        let crashed = home.crashes(at, (&[], &[]));
        home.remove_orphans_after(at).await;
        let (volumes, snapshots) = home.party().handles().await;
        home.party().unmake(&volumes, &snapshots).await;
        home.assert_empty(at).await;
        if !crashed {
            assert!(at > 20, "only {at} points");
            return;
        }
    }
}

#[tokio::test]
async fn a_cluster_that_does_not_answer_is_named_and_delays_no_other() {
    let Some(home) = Home::new() else { return };
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let config = serde_json::json!([
        {"clusterID": "dead", "monitors": [address]},
        {"clusterID": "ceph", "monitors": home.cluster.monitors},
        // The same cluster under another name.
        {"clusterID": "twin", "monitors": home.cluster.monitors},
    ]);
    let file = home.dir.path().join("config.json");
    std::fs::write(file, config.to_string()).unwrap();
    home.add_image(&format!("csi-vol-{}", Uuid::new_v4()));
    let report = home.orphan_report().await;
    let omitted = report.omitted.join("; ");
    assert!(omitted.contains("\"dead\""), "{omitted}");
    let mut orphans = report.orphans;
    orphans.retain(|orphan| orphan.pool == home.pool);
    assert_eq!(orphans.len(), 1, "{orphans:#?}");
}
