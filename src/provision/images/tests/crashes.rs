//! Ends a controller between any two steps, as kill -9 would, and looks whether
//! the next one over the same directory puts everything right.
//!
//! The victim is this test program, started anew for one test with `CRASH_AT`
//! set: see `crash_point`.

use std::{path::Path, process::Command};

use testkit::eventually;

use super::*;
use crate::provision::NewGroupSnapshot;

/// Makes one of each thing in the pool in `dir`; all of it may have been made before.
async fn make(images: &Stores, dir: &Path) {
    let source = images.create_volume(new("source", 8 * MIB)).await.unwrap();
    let pool = pool("main", dir, Scope::Shared);
    let file = |volume: &VolumeInfo| pool.open_image(&volume.context["image"], true).unwrap();
    let data = vec![7; 6 << 20];
    file(&source).write_all_at(&data, MIB).unwrap();
    let snapshot = images
        .create_snapshot(snapshot_of("snapshot".to_owned(), source.handle.clone()))
        .await
        .unwrap();
    let copies = [
        copy_of(
            "restored",
            9 * MIB,
            ContentSource::Snapshot(snapshot.handle),
        ),
        copy_of(
            "cloned",
            8 * MIB,
            ContentSource::Volume(source.handle.clone()),
        ),
    ];
    for copy in copies {
        let copy = images.create_volume(copy).await.unwrap();
        let mut found = vec![0; data.len()];
        file(&copy).read_exact_at(&mut found, MIB).unwrap();
        assert!(found == data, "complete, and differs from its source");
    }
    let range = Range {
        required: 16 * MIB,
        limit: 0,
    };
    images
        .expand_volume(source.handle, range, none())
        .await
        .unwrap();
}

/// Makes two volumes and a group snapshot of them; all of it may have been made before.
async fn make_group(images: &Stores) {
    let mut volumes = Vec::new();
    for name in ["one", "two"] {
        let made = images.create_volume(new(name, MIB)).await.unwrap();
        volumes.push(made.handle);
    }
    let group = NewGroupSnapshot {
        name: "group".to_owned(),
        volumes,
        parameters: HashMap::new(),
        secrets: none(),
    };
    let taken = images.create_group_snapshot(group).await.unwrap();
    assert_eq!(taken.snapshots.len(), 2);
}

/// Deletes everything that is still listed.
pub(super) async fn unmake(images: &Stores) {
    let snapshots = images
        .list_snapshots(ListRequest::default(), None, none())
        .await;
    for snapshot in snapshots.unwrap().entries {
        let deleted = match snapshot.group {
            Some(group) => {
                let group = images.delete_group_snapshot(group, Vec::new(), none());
                group.await
            }
            None => images.delete_snapshot(snapshot.handle, none()).await,
        };
        deleted.unwrap();
    }
    let volumes = images.list_volumes(ListRequest::default()).await;
    for volume in volumes.unwrap().entries {
        images.delete_volume(volume.handle, none()).await.unwrap();
    }
}

#[tokio::test]
#[ignore = "the victim of the tests below"]
async fn victim() {
    let dir = std::env::var("VICTIM_POOL").expect("run by the tests below");
    let images = images_over(&[("main", Path::new(&dir), Scope::Shared)], None);
    match std::env::var("VICTIM_DOES").as_deref() {
        Ok("make") => make(&images, Path::new(&dir)).await,
        Ok("group") => make_group(&images).await,
        _ => unmake(&images).await,
    }
}

/// Whether it was ended before it was done.
pub(super) fn crashes(dir: &Path, does: &str, at: usize) -> bool {
    let victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--test-threads=1"])
        .arg("provision::images::tests::crashes::victim")
        .env("CRASH_AT", at.to_string())
        .env("VICTIM_POOL", dir)
        .env("VICTIM_DOES", does)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&victim.stdout);
    let crashed = std::os::unix::process::ExitStatusExt::signal(&victim.status).is_some();
    assert!(crashed || victim.status.success(), "{said}");
    crashed
}

/// After a sweep nothing is half made: as many images and names as records.
fn assert_whole(home: &Home) {
    let count = |area: &str, suffix: &str| {
        let dir = home.pool().meta_path(area);
        let files = if dir.exists() {
            files_below(&dir)
        } else {
            Vec::new()
        };
        files.iter().filter(|file| file.ends_with(suffix)).count()
    };
    let names = std::fs::read_dir(home.dir.path()).unwrap();
    let images = names
        .filter(|e| e.as_ref().unwrap().path().is_file())
        .count();
    let volumes = count("volumes", ".json");
    assert_eq!((images, count("names", "")), (volumes, volumes));
    let snapshots = count("snapshots", ".json");
    assert_eq!(
        (count("snapshots", ".img"), count("snapnames", "")),
        (snapshots, snapshots)
    );
    assert_eq!(count("groupnames", ""), count("groups", ".json"));
    assert_eq!(count("tmp", ""), 0);
}

fn home_in_memory() -> Home {
    home_in(tempfile::tempdir_in("/dev/shm").unwrap())
}

#[tokio::test]
async fn an_interrupted_create_is_finished_or_undone() {
    for at in 0.. {
        let home = home_in_memory();
        let crashed = crashes(home.dir.path(), "make", at);
        // The next call alone must do, and so must the next start.
        if at % 2 == 0 {
            sweep_all(&home.images).await;
            assert_whole(&home);
        }
        make(&home.images, home.dir.path()).await;
        sweep_all(&home.images).await;
        assert_whole(&home);
        assert_eq!(home.files().len(), 3 * 3 + 3, "{:?}", home.files());
        unmake(&home.images).await;
        assert_eq!(home.files(), [""; 0], "crashed at {at}");
        if !crashed {
            assert!(at > 40, "only {at} points");
            return;
        }
    }
}

/// Sweeps until nothing is busy, and all else is swept: a child that another test forks has a
/// copy of a lock for as long as it has not executed its program.
async fn sweep_all(images: &Stores) {
    let sweep = async || {
        let swept = images.sweep(StoreKind::Images).await.unwrap();
        let is_busy = |error: &_| matches!(error, ProvisionError::Busy(_));
        assert!(swept.iter().all(is_busy), "{swept:?}");
        swept.is_empty().then_some(())
    };
    eventually("nothing is busy", sweep).await;
}

#[tokio::test]
async fn an_interrupted_group_snapshot_is_finished_or_undone() {
    for at in 0.. {
        let home = home_in_memory();
        let sweep = async || {
            sweep_all(&home.images).await;
            assert_whole(&home);
        };
        let made = !crashes(home.dir.path(), "group", at);
        if at % 2 == 0 {
            sweep().await;
        }
        make_group(&home.images).await;
        sweep().await;
        // Image, record and name of each; of the group, record and name.
        assert_eq!(home.files().len(), 4 * 3 + 2, "{:?}", home.files());
        let unmade = !crashes(home.dir.path(), "unmake", at);
        if at % 2 == 0 {
            sweep().await;
        }
        unmake(&home.images).await;
        sweep().await;
        assert_eq!(home.files(), [""; 0], "crashed at {at}");
        if made && unmade {
            assert!(at > 20, "only {at} points");
            return;
        }
    }
}

#[tokio::test]
async fn an_interrupted_delete_is_finished() {
    for at in 0.. {
        let home = home_in_memory();
        make(&home.images, home.dir.path()).await;
        let crashed = crashes(home.dir.path(), "unmake", at);
        if at % 2 == 0 {
            sweep_all(&home.images).await;
            assert_whole(&home);
        }
        unmake(&home.images).await;
        sweep_all(&home.images).await;
        assert_eq!(home.files(), [""; 0], "crashed at {at}");
        if !crashed {
            assert!(at > 20, "only {at} points");
            return;
        }
    }
}
