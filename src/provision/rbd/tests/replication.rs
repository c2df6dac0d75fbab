//! Mirroring, in one cluster: the roles of an image. Two clusters with their daemons are in
//! `mirrored`.

use serde_json::json;

use super::*;
use crate::{
    ceph::client::rbd::{Image, Mirroring, OpenMode},
    provision::{
        Replicated, ReplicationChange, ReplicationParameters, rbd::replication::is_replaced,
    },
};

impl Home {
    /// Has images of the pool mirrored.
    pub fn mirror_pool(&self) {
        let enable = ["mirror", "pool", "enable", &self.pool, "image"];
        self.cluster.rbd(&enable);
    }

    /// As the sidecar, which repeats it while the cluster's manager is starting.
    pub async fn replicate(
        &self,
        volume: &VolumeInfo,
        change: ReplicationChange,
    ) -> Result<Replicated, ProvisionError> {
        testkit::eventually("a manager", async || {
            let (handle, secrets) = (volume.handle.clone(), self.secrets());
            let done = self.rbd.replicate(handle, change.clone(), secrets).await;
            match &done {
                Err(error) if error.to_string().contains("the manager command") => None,
                _ => Some(done),
            }
        })
        .await
    }

    fn role(&self, volume: &VolumeInfo) -> Mirroring {
        let name = &volume.context["imageName"];
        let image = Image::open(&self.io(), name, OpenMode::ReadOnly).unwrap();
        image.mirroring().unwrap()
    }

    fn path(&self, volume: &VolumeInfo) -> String {
        format!("{}/{}", self.pool, volume.context["imageName"])
    }
}

pub fn enable() -> ReplicationChange {
    ReplicationChange::Enable(ReplicationParameters::default())
}

pub fn promote(force: bool) -> ReplicationChange {
    let parameters = ReplicationParameters::default();
    ReplicationChange::Promote { force, parameters }
}

fn disable(force: bool) -> ReplicationChange {
    ReplicationChange::Disable { force }
}

fn precondition(refused: Result<Replicated, ProvisionError>, word: &str) {
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
    assert!(refused.to_string().contains(word), "{refused}");
}

#[tokio::test]
async fn an_image_changes_its_role_and_each_call_may_be_repeated() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("one", MIB)).await;
    precondition(
        home.replicate(&made, enable()).await,
        "rbd mirror pool enable",
    );
    for change in [promote(false), promote(true), ReplicationChange::Demote] {
        precondition(home.replicate(&made, change).await, "not mirrored");
    }
    home.mirror_pool();
    home.replicate(&made, disable(false)).await.unwrap();
    for (change, role) in [
        (enable(), Mirroring::Primary),
        (promote(false), Mirroring::Primary),
        (ReplicationChange::Demote, Mirroring::Secondary),
        (enable(), Mirroring::Secondary),
        (promote(false), Mirroring::Primary),
        (ReplicationChange::Demote, Mirroring::Secondary),
        (promote(true), Mirroring::Primary),
        (disable(false), Mirroring::None),
    ] {
        for _ in 0..2 {
            let done = home.replicate(&made, change.clone()).await.unwrap();
            assert_eq!(done, Replicated::Done);
            assert_eq!(home.role(&made), role, "{change:?}");
        }
    }
    home.delete(&made.handle).await.unwrap();
}

#[tokio::test]
async fn a_promotion_enters_the_id_of_an_image_that_was_copied_anew() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("one", MIB)).await;
    home.mirror_pool();
    for change in [enable(), ReplicationChange::Demote] {
        home.replicate(&made, change).await.unwrap();
    }
    let (io, entry) = (home.io(), Home::entry(&made.handle));
    let entered = || io.omap_get(&entry, &["csi.imageid"]).unwrap();
    let own = entered();
    home.enter_former_id(&made.handle);
    home.replicate(&made, promote(false)).await.unwrap();
    assert_eq!(entered(), own);
}

#[tokio::test]
async fn an_image_in_use_is_not_demoted() {
    let Some(home) = Home::new() else { return };
    home.mirror_pool();
    let made = home.make(home.volume("one", MIB)).await;
    home.replicate(&made, enable()).await.unwrap();
    let name = &made.context["imageName"];
    // A client that only watches, as krbd does.
    let user = testkit::ImageOpener::start(&home.cluster, &home.pool, name);
    precondition(
        home.replicate(&made, ReplicationChange::Demote).await,
        "in use",
    );
    assert_eq!(home.role(&made), Mirroring::Primary);
    drop(user);
    home.replicate(&made, ReplicationChange::Demote)
        .await
        .unwrap();
    // Nor changed then, at this site.
    let reclaim = home.rbd.reclaim_space(made.handle.clone(), home.secrets());
    let refused = reclaim.await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
    assert!(refused.to_string().contains("secondary"), "{refused}");
}

#[tokio::test]
async fn a_secondary_without_a_primary_ends_by_force_alone() {
    let Some(home) = Home::new() else { return };
    home.mirror_pool();
    let made = home.make(home.volume("one", MIB)).await;
    home.replicate(&made, enable()).await.unwrap();
    home.replicate(&made, ReplicationChange::Demote)
        .await
        .unwrap();
    precondition(home.replicate(&made, disable(false)).await, "force");
    home.replicate(&made, disable(true)).await.unwrap();
    assert_eq!(home.role(&made), Mirroring::None);
}

#[tokio::test]
async fn a_clone_is_mirrored_with_its_parent_or_without_one() {
    let Some(home) = Home::new() else { return };
    home.mirror_pool();
    let made = home.make(home.volume("one", MIB)).await;
    let snapshot = home.snapshot("moment", &made.handle);
    let snapshot = home.rbd.create_snapshot(snapshot).await.unwrap();
    let source = Some(ContentSource::Snapshot(snapshot.handle));
    let copy = NewVolume {
        source,
        ..home.volume("copy", MIB)
    };
    let copy = home.make(copy).await;
    precondition(home.replicate(&copy, enable()).await, "flattenMode");
    let flatten = ReplicationChange::Enable(ReplicationParameters {
        flattens: true,
        ..ReplicationParameters::default()
    });
    testkit::eventually("flattened", async || {
        match home.replicate(&copy, flatten.clone()).await {
            Ok(done) => Some(done),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
                None
            }
        }
    })
    .await;
    assert_eq!(home.role(&copy), Mirroring::Primary);
}

#[tokio::test]
async fn the_manager_takes_snapshots_as_scheduled() {
    let Some(home) = Home::new() else { return };
    home.mirror_pool();
    let made = home.make(home.volume("one", MIB)).await;
    let scheduled = ReplicationChange::Enable(ReplicationParameters {
        schedule: Some(("1h".to_owned(), None)),
        ..ReplicationParameters::default()
    });
    let listed = || {
        let list = json!({
            "prefix": "rbd mirror snapshot schedule list",
            "level_spec": home.path(&made),
        });
        let said = home.io().cluster().mgr_command(&list).unwrap();
        String::from_utf8(said).unwrap()
    };
    for _ in 0..2 {
        home.replicate(&made, scheduled.clone()).await.unwrap();
        assert!(listed().contains("\"1h\""), "{}", listed());
    }
    home.replicate(&made, disable(false)).await.unwrap();
    // Nothing of it is left for a later mirroring.
    home.replicate(&made, enable()).await.unwrap();
    assert_eq!(listed().trim(), "{}");
}

#[tokio::test]
async fn a_resync_is_of_a_secondary_image_and_only_by_force() {
    let Some(home) = Home::new() else { return };
    home.mirror_pool();
    let made = home.make(home.volume("one", MIB)).await;
    let resync = |force| home.replicate(&made, ReplicationChange::Resync { force });
    precondition(resync(true).await, "not mirrored");
    home.replicate(&made, enable()).await.unwrap();
    precondition(resync(true).await, "primary");
    let info = || {
        home.rbd
            .replication_info(made.handle.clone(), home.secrets())
    };
    let unknown = info().await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::NotFound, "{unknown}");
    home.replicate(&made, ReplicationChange::Demote)
        .await
        .unwrap();
    let refused = info().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
    // No daemon runs.
    assert_eq!(resync(false).await.unwrap(), Replicated::NotYet);
    let flagged = resync(true).await.unwrap_err();
    assert_eq!(flagged.kind(), ErrorKind::Transient, "{flagged}");
}

/// A daemon that resyncs removes and creates an image between any two looks at it.
#[tokio::test]
async fn an_image_that_is_replaced_while_it_is_open_is_not_taken_for_one_that_is_not_mirrored() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("one", MIB)).await;
    let rbd = store_over(home.dir.path(), None, PurgeTimes::default());
    let found = || rbd.volume(&made.handle, &home.secrets()).unwrap();
    let open = |name: &str| Image::open(&home.io(), name, OpenMode::ReadOnly).unwrap();
    let (old, image) = (found(), &made.context["imageName"]);
    let opened = open(image);
    assert!(!is_replaced(&old, &opened).unwrap());
    let path = home.path(&made);
    home.cluster
        .rbd(&["rename", &path, &format!("{path}-away")]);
    assert!(is_replaced(&old, &opened).unwrap());
    home.cluster.rbd(&["create", "--size", "1M", &path]);
    assert!(is_replaced(&old, &opened).unwrap());
    // Found only now.
    assert!(is_replaced(&found(), &open(image)).unwrap());
}

#[tokio::test]
async fn no_copy_is_begun_of_a_secondary_image() {
    let Some(home) = Home::new() else { return };
    home.mirror_pool();
    let made = home.make(home.volume("primary", MIB)).await;
    home.replicate(&made, enable()).await.unwrap();
    home.replicate(&made, ReplicationChange::Demote)
        .await
        .unwrap();
    let snapshot = || async {
        let new = home.snapshot("moment", &made.handle);
        home.rbd.create_snapshot(new).await.map(drop)
    };
    let copy = || async {
        let copy = NewVolume {
            source: Some(ContentSource::Volume(made.handle.clone())),
            ..home.volume("copy", MIB)
        };
        home.rbd.create_volume(copy).await.map(drop)
    };
    for refused in [snapshot().await, copy().await] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
        assert!(refused.to_string().contains("promote"), "{refused}");
    }
    // Neither has taken its name.
    for (directory, key) in [
        ("csi.snaps.default", "csi.snap.moment"),
        ("csi.volumes.default", "csi.volume.copy"),
    ] {
        let taken = match home.io().omap_get(directory, &[key]) {
            Err(error) if error.is_not_found() => false,
            taken => !taken.unwrap().is_empty(),
        };
        assert!(!taken, "{key}");
    }
    home.replicate(&made, promote(false)).await.unwrap();
    snapshot().await.unwrap();
    copy().await.unwrap();
}

/// The entry of a copy that was begun while its source was primary.
#[tokio::test]
async fn a_copy_begun_before_a_demotion_is_refused_and_its_entry_stays() {
    let Some(home) = Home::new() else { return };
    home.mirror_pool();
    let made = home.make(home.volume("primary", MIB)).await;
    let io = home.io();
    let uuids = [
        "6a0c9d0e-58c5-4a7c-9f42-0d3c6f0f8f6a",
        "6a0c9d0e-58c5-4a7c-9f42-0d3c6f0f8f6b",
    ];
    let begun = [
        (
            "csi.snaps.default",
            "csi.snap.",
            "csi.snapname",
            "csi-snap-",
        ),
        (
            "csi.volumes.default",
            "csi.volume.",
            "csi.volname",
            "csi-vol-",
        ),
    ];
    for ((directory, prefix, name, image), uuid) in begun.iter().zip(uuids) {
        let (key, image) = (format!("{prefix}begun"), format!("{image}{uuid}"));
        io.omap_set(directory, &[(&key, uuid)]).unwrap();
        // As ceph-csi enters them.
        let keys = [(*name, "begun"), ("csi.imagename", &image)];
        io.omap_set(&format!("{prefix}{uuid}"), &keys).unwrap();
    }
    home.replicate(&made, enable()).await.unwrap();
    home.replicate(&made, ReplicationChange::Demote)
        .await
        .unwrap();
    let snapshot = || async {
        let new = home.snapshot("begun", &made.handle);
        home.rbd.create_snapshot(new).await.map(|made| made.handle)
    };
    let copy = || async {
        let copy = NewVolume {
            source: Some(ContentSource::Volume(made.handle.clone())),
            ..home.volume("begun", MIB)
        };
        home.rbd.create_volume(copy).await.map(|made| made.handle)
    };
    for refused in [snapshot().await, copy().await] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
        assert!(refused.to_string().contains("promote"), "{refused}");
    }
    home.replicate(&made, promote(false)).await.unwrap();
    for (completed, uuid) in [snapshot().await, copy().await].into_iter().zip(uuids) {
        assert!(completed.unwrap().ends_with(uuid));
    }
}
