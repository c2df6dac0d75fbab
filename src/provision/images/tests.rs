//! The provisioner as its callers see it, over pools in temporary directories.

use std::{
    collections::HashMap,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::Path,
};

use futures_util::future::join_all;

use super::*;
use crate::{
    Kind,
    lane::Lanes,
    pool::{
        Pool, Scope,
        claim::{self, Claim, Sharing},
    },
    provision::{AccessibilityRequirements, ContentSource, StoreKind, Stores},
};

mod blocks;
mod copied;
mod crashes;
mod exported;
mod full;
mod groups;
mod kept;
mod pages;
mod reflink;
mod rubbish;
mod space;
mod undone;

const MIB: u64 = 1 << 20;
const BOOT: &str = "this boot";

fn images_over(pools: &[(&str, &Path, Scope)], node_id: Option<&str>) -> Stores {
    let pools = pools
        .iter()
        .map(|(name, dir, scope)| pool(name, dir, *scope));
    let pools = Pools::new(pools).unwrap();
    let images = ImageStore::new(
        pools,
        node_id.map(str::to_owned),
        BOOT.to_owned(),
        Copies::new(4, 1),
        &Lanes::new(2),
    );
    Stores::new(Some(images.into()), None, None, &Lanes::new(2))
}

fn pool(name: &str, dir: &Path, scope: Scope) -> Pool {
    Pool {
        name: name.to_owned(),
        dir: dir.to_owned(),
        scope,
        mounted: false,
    }
}

fn new(name: &str, required: u64) -> NewVolume {
    NewVolume {
        name: name.to_owned(),
        range: Range { required, limit: 0 },
        parameters: HashMap::new(),
        uses: vec![VolumeUse {
            fs_type: None,
            many_nodes_write: false,
        }],
        mutable: HashMap::new(),
        source: None,
        elsewhere: None,
        accessibility: AccessibilityRequirements::default(),
        secrets: none(),
    }
}

fn none() -> Secrets {
    Secrets::default()
}

fn snapshot_of(name: String, volume: String) -> NewSnapshot {
    NewSnapshot {
        name,
        volume,
        parameters: HashMap::new(),
        secrets: none(),
    }
}

fn room(parameters: HashMap<String, String>, includes_local: bool) -> CapacityRequest {
    CapacityRequest {
        parameters,
        includes_local,
        ..CapacityRequest::default()
    }
}

fn with(mut new: NewVolume, parameters: &[(&str, &str)]) -> NewVolume {
    let owned = parameters
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    new.parameters = owned.collect();
    new
}

fn copy_of(name: &str, required: u64, source: ContentSource) -> NewVolume {
    NewVolume {
        source: Some(source),
        ..new(name, required)
    }
}

struct Home {
    dir: tempfile::TempDir,
    pool: Pool,
    images: Stores,
}

fn home() -> Home {
    home_in(tempfile::tempdir().unwrap())
}

fn home_in(dir: tempfile::TempDir) -> Home {
    let images = images_over(&[("main", dir.path(), Scope::Shared)], None);
    let pool = pool("main", dir.path(), Scope::Shared);
    Home { dir, pool, images }
}

impl Home {
    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn file(&self, volume: &VolumeInfo) -> std::fs::File {
        self.pool()
            .open_image(&volume.context["image"], true)
            .unwrap()
    }

    fn files(&self) -> Vec<String> {
        files_of(self.pool())
    }

    fn claim(&self, volume: &VolumeInfo, node: &str) {
        let claim = Claim {
            node_id: node.to_owned(),
            boot_id: BOOT.to_owned(),
            volume_id: String::new(),
            access: Sharing::Exclusive,
            read_only: false,
        };
        let _ = claim::claim(self.pool(), &volume.context["image"], &claim).unwrap();
    }

    fn release(&self, volume: &VolumeInfo, node: &str) {
        let _ = claim::release(self.pool(), &volume.context["image"], node).unwrap();
    }
}

/// What is in a pool, its metadata included, but for the pool's own.
fn files_of(pool: &Pool) -> Vec<String> {
    let own = ["/.uring-csi/scope", "/.uring-csi/spare/"];
    let mut files = files_below(&pool.dir);
    files.retain(|file| !own.iter().any(|own| file.contains(own)));
    files
}

fn files_below(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files_below(&path));
        } else {
            found.push(path.display().to_string());
        }
    }
    found
}

fn kind<T: std::fmt::Debug>(result: Result<T, ProvisionError>) -> Kind {
    result.unwrap_err().kind()
}

#[tokio::test]
async fn many_equal_creates_make_one_image() {
    let home = home();
    let creates = (0..32).map(|_| home.images.create_volume(new("pvc-1", 8 * MIB)));
    let made = join_all(creates).await;
    let first = made[0].as_ref().unwrap();
    assert_eq!(first.bytes, 8 * MIB);
    assert!(made.iter().all(|other| other.as_ref().unwrap() == first));
    let images = home.files();
    // The image, its reservation, its record.
    assert_eq!(images.len(), 3, "{images:?}");
    assert_eq!(home.file(first).metadata().unwrap().blocks(), 0);
    assert_eq!(home.file(first).metadata().unwrap().mode() & 0o777, 0o600);

    // After a restart, too; and when it was grown since.
    let later = images_over(&[("main", home.dir.path(), Scope::Shared)], None);
    let range = Range {
        required: 16 * MIB,
        limit: 0,
    };
    assert_eq!(
        later
            .expand_volume(first.handle.clone(), range, none())
            .await
            .unwrap(),
        16 * MIB
    );
    let again = later.create_volume(new("pvc-1", 8 * MIB)).await.unwrap();
    assert_eq!((&again.handle, again.bytes), (&first.handle, 16 * MIB));
}

#[tokio::test]
async fn a_name_with_other_parameters_is_refused() {
    let home = home();
    let other = tempfile::tempdir().unwrap();
    let images = images_over(
        &[
            ("main", home.dir.path(), Scope::Shared),
            ("other", other.path(), Scope::Shared),
        ],
        None,
    );
    let made = images
        .create_volume(with(new("pvc", 8 * MIB), &[("pool", "main")]))
        .await
        .unwrap();
    let copy = copy_of("pvc", 8 * MIB, ContentSource::Volume(made.handle));
    for different in [
        with(new("pvc", 9 * MIB), &[("pool", "main")]),
        with(new("pvc", 8 * MIB), &[("pool", "other")]),
        with(new("pvc", 8 * MIB), &[("pool", "main"), ("fsType", "xfs")]),
        with(copy, &[("pool", "main")]),
    ] {
        assert_eq!(kind(images.create_volume(different).await), Kind::Conflict);
    }
    let unnamed = images.create_volume(new("pvc-2", MIB)).await;
    let error = unnamed.unwrap_err();
    assert!(error.to_string().contains("main, other"), "{error}");
}

#[tokio::test]
async fn a_snapshot_class_has_no_parameters_but_the_sidecars_own() {
    let home = home();
    let volume = home.images.create_volume(new("v", MIB)).await.unwrap();
    let own = "csi.storage.k8s.io/volumesnapshot/name";
    for name in ["pool", "snapshotNamePrefix", "kubernetes.io"] {
        let parameters = HashMap::from([own, name].map(|key| (key.to_owned(), "x".to_owned())));
        let snapshot = NewSnapshot {
            parameters: parameters.clone(),
            ..snapshot_of("s".to_owned(), volume.handle.clone())
        };
        let group = NewGroupSnapshot {
            name: "g".to_owned(),
            volumes: vec![volume.handle.clone()],
            parameters,
            secrets: none(),
        };
        for refused in [
            home.images.create_snapshot(snapshot).await.map(drop),
            home.images.create_group_snapshot(group).await.map(drop),
        ] {
            let ProvisionError::UnknownParameter { name: unknown, .. } = refused.unwrap_err()
            else {
                panic!("another error");
            };
            assert_eq!(unknown, name);
        }
    }
    let mut snapshot = snapshot_of("s".to_owned(), volume.handle);
    let _ = snapshot.parameters.insert(own.to_owned(), "s".to_owned());
    home.images.create_snapshot(snapshot).await.unwrap();
}

#[tokio::test]
async fn a_deleted_volume_leaves_nothing() {
    let home = home();
    let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    for _ in 0..2 {
        home.images
            .delete_volume(made.handle.clone(), none())
            .await
            .unwrap();
    }
    assert_eq!(home.files(), [""; 0]);
    for never_ours in ["x", "", "vol.shared.main.x"] {
        let handle = never_ours.to_owned();
        home.images
            .delete_volume(handle.clone(), none())
            .await
            .unwrap();
        home.images
            .delete_snapshot(handle.clone(), none())
            .await
            .unwrap();
        assert_eq!(kind(home.images.get_volume(handle).await), Kind::NotFound);
    }
    let again = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    assert_ne!(again.handle, made.handle);
}

#[tokio::test]
async fn a_claimed_image_is_neither_deleted_nor_copied_torn() {
    let home = home();
    let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    home.claim(&made, "node-a");
    let published = home.images.get_volume(made.handle.clone()).await.unwrap();
    assert_eq!(published.nodes, ["node-a"]);
    let copy = copy_of("copy", MIB, ContentSource::Volume(made.handle.clone()));
    for refused in [
        home.images
            .delete_volume(made.handle.clone(), none())
            .await
            .err(),
        home.images.create_volume(copy.clone()).await.err(),
        home.images
            .create_snapshot(snapshot_of("snap".to_owned(), made.handle.clone()))
            .await
            .err(),
    ] {
        let error = refused.unwrap();
        assert_eq!(error.kind(), Kind::Precondition);
        let text = crate::error_chain(&error);
        assert!(text.contains("node-a"), "{text}");
    }
    home.release(&made, "node-a");
    home.images.create_volume(copy).await.unwrap();
    home.images
        .delete_volume(made.handle, none())
        .await
        .unwrap();
}

#[tokio::test]
async fn copies_hold_the_data_and_may_be_larger() {
    let home = home();
    let source = home
        .images
        .create_volume(new("source", 8 * MIB))
        .await
        .unwrap();
    home.file(&source).write_all_at(b"old", 4 * MIB).unwrap();
    let taken = home
        .images
        .create_snapshot(snapshot_of("snap".to_owned(), source.handle.clone()))
        .await
        .unwrap();
    assert_eq!(taken.bytes, 8 * MIB);
    home.file(&source).write_all_at(b"new", 4 * MIB).unwrap();

    let from_snapshot = ContentSource::Snapshot(taken.handle.clone());
    let restored = home
        .images
        .create_volume(copy_of("restored", 9 * MIB, from_snapshot.clone()))
        .await
        .unwrap();
    assert_eq!(restored.source.as_ref(), Some(&from_snapshot));
    let cloned = home
        .images
        .create_volume(copy_of(
            "cloned",
            0,
            ContentSource::Volume(source.handle.clone()),
        ))
        .await
        .unwrap();
    assert_eq!((restored.bytes, cloned.bytes), (9 * MIB, 8 * MIB));
    for (volume, data) in [(&restored, b"old"), (&cloned, b"new")] {
        let mut read = [0; 3];
        home.file(volume).read_exact_at(&mut read, 4 * MIB).unwrap();
        assert_eq!(&read, data);
    }
    let smaller = copy_of("smaller", 7 * MIB, from_snapshot.clone());
    assert_eq!(
        kind(home.images.create_volume(smaller).await),
        Kind::OutOfRange
    );

    // The snapshot outlives its volume, and its name goes on meaning it.
    home.images
        .delete_volume(source.handle.clone(), none())
        .await
        .unwrap();
    let again = home
        .images
        .create_snapshot(snapshot_of("snap".to_owned(), source.handle))
        .await
        .unwrap();
    assert_eq!(again, taken);
    let other = home
        .images
        .create_snapshot(snapshot_of("snap".to_owned(), cloned.handle))
        .await;
    assert_eq!(kind(other), Kind::Conflict);
    home.images
        .delete_snapshot(taken.handle, none())
        .await
        .unwrap();
    let late = copy_of("late", 9 * MIB, from_snapshot);
    assert_eq!(kind(home.images.create_volume(late).await), Kind::NotFound);
}

#[tokio::test]
async fn the_format_marker_of_a_deleted_volume_is_removed() {
    let home = home();
    let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    let image = &made.context["image"];
    crate::pool::format_marker::set(home.pool(), image, &made.handle).unwrap();
    home.images
        .delete_volume(made.handle, none())
        .await
        .unwrap();
    assert_eq!(home.files(), [""; 0]);
}

#[tokio::test]
async fn another_controller_s_work_is_left_alone() {
    let home = home();
    let held = catalogue::Catalogue::<volumes::VolumeDetail>::of(home.pool())
        .reserve("pvc")
        .unwrap();
    assert_eq!(
        kind(home.images.create_volume(new("pvc", MIB)).await),
        Kind::InUse
    );
    let left = home.images.sweep(StoreKind::Images).await.unwrap();
    assert!(
        matches!(&*left, [ProvisionError::Busy(name)] if name == "pvc"),
        "{left:?}"
    );
    assert_eq!(home.files().len(), 1, "the reservation is still there");
    drop(held);
    assert!(
        home.images
            .sweep(StoreKind::Images)
            .await
            .unwrap()
            .is_empty()
    );
    assert_eq!(home.files(), [""; 0]);
}

#[tokio::test]
async fn a_failed_create_leaves_nothing() {
    let home = home();
    let impossible = with(new("pvc", 1 << 50), &[("preallocate", "true")]);
    let kind = kind(home.images.create_volume(impossible).await);
    assert!(
        matches!(kind, Kind::Exhausted | Kind::OutOfRange),
        "{kind:?}"
    );
    assert_eq!(home.files(), [""; 0]);
    home.images.create_volume(new("pvc", MIB)).await.unwrap();
}
