//! On a file system that clones files, in a mount namespace of its own.

use std::process::Command;

use super::*;

#[test]
fn an_image_in_use_is_cloned_atomically() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, at) = (dir.path().join("disk"), dir.path().join("at"));
    std::fs::File::create(&disk)
        .unwrap()
        .set_len(512 * MIB)
        .unwrap();
    std::fs::create_dir(&at).unwrap();
    // The namespace ends with its last process; mount(8) makes a loop device
    // that ends with its mount.
    let script = "mkfs.xfs -q $1 && mount -o loop $1 $2 && exec $3 --exact --ignored $4";
    let ran = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, "sh"])
        .args([&disk, &at, &std::env::current_exe().unwrap()])
        .arg("provision::images::tests::reflink::inside")
        .env("REFLINK_POOL", &at)
        .output()
        .unwrap();
    let said = [ran.stdout, ran.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(ran.status.success(), "{said:?}");
    assert!(said[0].contains("1 passed"), "{said:?}");
}

#[tokio::test]
#[ignore = "run by the test above, on a file system of its own"]
async fn inside() {
    let dir = std::env::var("REFLINK_POOL").expect("run by the test above");
    let dir = Path::new(&dir);
    let images = images_over(&[("main", dir, Scope::Shared)], None);
    let source = images
        .create_volume(new("source", 256 * MIB))
        .await
        .unwrap();
    let pool = pool("main", dir, Scope::Shared);
    let file = |volume: &VolumeInfo| pool.open_image(&volume.context["image"], true).unwrap();
    let data = vec![7; 64 << 20];
    file(&source).write_all_at(&data, MIB).unwrap();
    let claim = Claim {
        node_id: "node-a".to_owned(),
        boot_id: BOOT.to_owned(),
        volume_id: String::new(),
        access: Sharing::Exclusive,
        read_only: false,
    };
    let _ = claim::claim(&pool, &source.context["image"], &claim).unwrap();
    file(&source).sync_all().unwrap();
    let free = || {
        let fs = pool.statvfs().unwrap();
        fs.f_bavail * fs.f_frsize
    };
    let before = free();

    let snapshot = images
        .create_snapshot(snapshot_of("snapshot".to_owned(), source.handle.clone()))
        .await
        .unwrap();
    file(&source).write_all_at(b"new", MIB).unwrap();
    let copies = [
        (ContentSource::Snapshot(snapshot.handle), [7; 3]),
        (ContentSource::Volume(source.handle), *b"new"),
    ];
    for (from, expected) in copies {
        let name = format!("{from:?}");
        let name = &name[..20.min(name.len())];
        let copy = images
            .create_volume(with(
                copy_of(name, 300 * MIB, from),
                &[("overcommit", "true")],
            ))
            .await;
        let copy = copy.unwrap();
        let mut read = vec![0; data.len()];
        file(&copy).read_exact_at(&mut read, MIB).unwrap();
        assert_eq!(read[..3], expected);
        assert!(read[3..] == data[3..]);
        assert_eq!(copy.bytes, 300 * MIB);
    }
    // 192 MiB of copies, next to none of it written.
    assert!(before - free() < 16 * MIB);
}
