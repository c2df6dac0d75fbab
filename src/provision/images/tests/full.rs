//! Deletes in a pool whose file system is full, on small ones in a mount namespace of their
//! own.

use std::{
    fs::{self, File},
    io,
    process::Command,
};

use rustix::fs::{FallocateFlags, fallocate};

use super::{
    crashes::{crashes, unmake},
    *,
};
use crate::provision::NewGroupSnapshot;

#[test]
fn a_full_xfs_can_be_emptied() {
    on("mkfs.xfs -q $1 && mount -o loop $1 $2", 320);
}

#[test]
fn a_full_ext4_can_be_emptied() {
    on("mkfs.ext4 -q $1 && mount -o loop $1 $2", 64);
}

#[test]
fn a_full_btrfs_can_be_emptied() {
    on("mkfs.btrfs -q $1 && mount -o loop $1 $2", 1024);
}

#[test]
fn a_full_tmpfs_can_be_emptied() {
    on("mount -t tmpfs -o size=64m tmpfs $2", 0);
}

/// Runs [`inside`] on the file system that the script mounts.
fn on(script: &str, mib: u64) {
    let dir = tempfile::tempdir().unwrap();
    let (disk, at) = (dir.path().join("disk"), dir.path().join("at"));
    File::create(&disk).unwrap().set_len(mib * MIB).unwrap();
    fs::create_dir(&at).unwrap();
    let script = format!("{script} && exec $3 --exact --ignored --nocapture $4");
    let ran = Command::new("unshare")
        .args(["--mount", "sh", "-c", &script, "sh"])
        .args([&disk, &at, &std::env::current_exe().unwrap()])
        .arg("provision::images::tests::full::inside")
        .env("FULL_FILE_SYSTEM", &at)
        .output()
        .unwrap();
    let said = [ran.stdout, ran.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(ran.status.success(), "{}\n{}", said[0], said[1]);
    assert!(said[0].contains("1 passed"), "{}", said[0]);
}

#[tokio::test]
#[ignore = "run by the tests above, on a file system of its own"]
async fn inside() {
    let at = std::env::var("FULL_FILE_SYSTEM").expect("run by the tests above");
    let disk = Disk::at(Path::new(&at));
    let images = images_over(&[("main", &disk.pool.dir, Scope::Shared)], None);
    nothing_but_deletes(&disk, &images).await;
    killed_at_each_step(&disk, &images).await;
}

async fn nothing_but_deletes(disk: &Disk, images: &Stores) {
    let mut empty = Vec::new();
    // More than there are spares; deletes of images without data free next to nothing.
    for n in 0..40 {
        let made = images.create_volume(new(&format!("empty {n}"), MIB)).await;
        empty.push(made.unwrap());
    }
    let snapshot = snapshot_of("snapshot".to_owned(), empty[0].handle.clone());
    images.create_snapshot(snapshot).await.unwrap();
    let group = NewGroupSnapshot {
        name: "group".to_owned(),
        volumes: vec![empty[1].handle.clone(), empty[2].handle.clone()],
        parameters: HashMap::new(),
        secrets: none(),
    };
    images.create_group_snapshot(group).await.unwrap();
    let claim = Claim {
        node_id: "node-a".to_owned(),
        boot_id: BOOT.to_owned(),
        volume_id: String::new(),
        access: Sharing::Exclusive,
        read_only: false,
    };
    let claimed = &empty[3];
    let _ = claim::claim(&disk.pool, &claimed.context["image"], &claim).unwrap();
    let before = disk.free();
    let written = images.create_volume(new("written", MIB)).await.unwrap();
    disk.fill_by(&disk.pool.dir.join(&written.context["image"]));

    let refused = images.create_volume(new("another", MIB)).await;
    assert_eq!(kind(refused), Kind::Exhausted);
    // Refusals use up nothing.
    for _ in 0..40 {
        let refused = images.delete_volume(claimed.handle.clone(), none()).await;
        assert_eq!(kind(refused), Kind::Precondition);
    }
    let released = claim::release(&disk.pool, &claimed.context["image"], "node-a").unwrap();
    assert_eq!(released, crate::Done::Now);
    // The oldest first, so the image with the data last.
    unmake(images).await;
    assert_eq!(files_of(&disk.pool), [""; 0]);
    disk.remove_small_files();
    let free = disk.free();
    assert!(free > before / 10 * 9, "{free} of {before}");
}

async fn killed_at_each_step(disk: &Disk, images: &Stores) {
    let sweep = async || {
        let swept = images.sweep(StoreKind::Images).await.unwrap();
        assert!(swept.is_empty(), "{swept:?}");
    };
    for at in 0.. {
        images.create_volume(new("empty", MIB)).await.unwrap();
        let written = images.create_volume(new("written", MIB)).await.unwrap();
        disk.fill_by(&disk.pool.dir.join(&written.context["image"]));
        let crashed = crashes(&disk.pool.dir, "unmake", at);
        // The next call alone must do, and so must the next start.
        if at % 2 == 0 {
            sweep().await;
        } else {
            let written = written.handle.clone();
            images
                .delete_volume(written, Secrets::default())
                .await
                .unwrap();
        }
        unmake(images).await;
        sweep().await;
        assert_eq!(files_of(&disk.pool), [""; 0], "crashed at {at}");
        disk.remove_small_files();
        if !crashed {
            assert!(at > 10, "only {at} points");
            return;
        }
    }
}

/// A file system with a pool.
struct Disk {
    pool: Pool,
    small_files: std::path::PathBuf,
}

impl Disk {
    fn at(at: &Path) -> Self {
        let [pool_dir, small_files] = ["pool", "small"].map(|name| at.join(name));
        fs::create_dir(&pool_dir).unwrap();
        let pool = pool("main", &pool_dir, Scope::Shared);
        Self { pool, small_files }
    }

    /// Takes all blocks for this file, then all inodes that XFS has blocks for.
    fn fill_by(&self, image: &Path) {
        fs::create_dir(&self.small_files).unwrap();
        let file = File::options().write(true).open(image).unwrap();
        let write = |path: &Path| -> io::Result<()> {
            fs::write(path, [1; 4096])?;
            File::open(path)?.sync_all()
        };
        // Blocks that were freed before may come late.
        for n in 0.. {
            let mut end = file.metadata().unwrap().len();
            let mut step = 64 * MIB;
            while step >= 4096 {
                match fallocate(&file, FallocateFlags::empty(), end, step) {
                    Ok(()) => end += step,
                    Err(_) => step /= 2,
                }
            }
            file.sync_all().unwrap();
            if write(&self.small_files.join(n.to_string())).is_err() {
                return;
            }
        }
    }

    fn remove_small_files(&self) {
        fs::remove_dir_all(&self.small_files).unwrap();
    }

    fn free(&self) -> u64 {
        let disk = File::open(&self.pool.dir).unwrap();
        rustix::fs::syncfs(&disk).unwrap();
        let found = self.pool.statvfs().unwrap();
        found.f_bavail * found.f_frsize
    }
}
