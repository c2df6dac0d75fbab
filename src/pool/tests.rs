use std::{
    io::Write as _,
    os::unix::fs::{FileExt as _, symlink},
};

use proptest::prelude::*;
use rustix::{
    fs::{FallocateFlags, fallocate},
    mount::{MountFlags, mount},
};

use super::*;
use crate::mount::testing::MountScratch;

fn pool() -> (tempfile::TempDir, Pool) {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool {
        name: "fast".to_owned(),
        dir: dir.path().to_owned(),
        scope: Scope::Local,
        mounted: false,
    };
    (dir, pool)
}

#[test]
fn invalid_pool_specs_name_the_reason() {
    let spec: PoolSpec = "fast=/srv/a".parse().unwrap();
    assert_eq!(spec.scope, None);
    assert_eq!(spec.or(Scope::Shared).scope, Scope::Shared);
    let spec: PoolSpec = "fast=/srv/a,local".parse().unwrap();
    assert!(!spec.mounted);
    assert_eq!(spec.or(Scope::Shared).scope, Scope::Local);
    let spec: PoolSpec = "fast=/srv/a,mounted".parse().unwrap();
    assert!(spec.mounted && spec.scope.is_none());
    let spec: PoolSpec = "fast=/srv/a,shared,mounted".parse().unwrap();
    assert!(spec.mounted && spec.or(Scope::Local).scope == Scope::Shared);
    for bad in [
        "fast=/a,local,shared",
        "fast=/a,mounted,mounted",
        "fast=/a,",
        "fast",
        "=/srv",
        "a.b=/srv",
        "fast=srv",
        "fast=/srv,locl",
        "fast=/a,b,local",
    ] {
        assert!(
            matches!(bad.parse::<PoolSpec>(), Err(PoolError::BadSpec { .. })),
            "{bad}"
        );
    }
}

#[test]
fn the_only_pool_needs_no_name() {
    let (_dir, one) = pool();
    let other = Pool {
        name: "slow".to_owned(),
        ..one.clone()
    };
    let pools = Pools::new([one.clone()]).unwrap();
    assert_eq!(pools.get_or_only(None).unwrap(), &one);
    let pools = Pools::new([one.clone(), other]).unwrap();
    let error = pools.get_or_only(None).unwrap_err().to_string();
    assert!(error.contains("fast, slow"), "{error}");
    let error = pools.get("none").unwrap_err().to_string();
    assert!(error.contains("fast, slow"), "{error}");
    assert!(matches!(
        Pools::new([one.clone(), one]),
        Err(PoolError::Twice(_))
    ));
}

#[test]
fn only_regular_files_directly_in_the_pool_are_images() {
    let (dir, pool) = pool();
    std::fs::write(dir.path().join("disk.img"), "data").unwrap();
    symlink("disk.img", dir.path().join("link.img")).unwrap();
    std::fs::create_dir(dir.path().join("sub.img")).unwrap();
    rustix::fs::mkfifoat(
        rustix::fs::CWD,
        dir.path().join("fifo.img"),
        Mode::from(0o600),
    )
    .unwrap();

    let file = pool.open_image("disk.img", false).unwrap();
    assert!(
        !rustix::fs::fcntl_getfl(&file)
            .unwrap()
            .contains(OFlags::NONBLOCK)
    );
    file.write_at(b"x", 0).unwrap_err();
    pool.open_image("disk.img", true)
        .unwrap()
        .write_all(b"x")
        .unwrap();

    for bad in [
        "link.img",
        "sub.img",
        "fifo.img",
        "",
        ".",
        "..",
        ".uring-csi",
        "../disk.img",
        "sub.img/x",
        "a\0b",
    ] {
        for writable in [false, true] {
            let result = pool.open_image(bad, writable);
            assert!(
                matches!(result, Err(PoolError::BadName { .. })),
                "{bad:?}: {result:?}"
            );
        }
    }
    assert!(matches!(
        pool.open_image("none.img", true),
        Err(PoolError::NoImage { .. })
    ));
}

#[test]
fn a_pool_that_is_not_there_is_not_made() {
    let (dir, mut pool) = pool();
    pool.dir = dir.path().join("unmounted");
    assert!(matches!(
        pool.meta_dir("tmp"),
        Err(PoolError::NotReady { .. })
    ));
    assert!(matches!(
        pool.create_inline("a", 1),
        Err(PoolError::NotReady { .. })
    ));
    assert!(!pool.dir.exists());
}

#[test]
fn inline_images_are_made_mended_and_deleted() {
    let (_dir, pool) = pool();
    let (image, done) = pool.create_inline("csi-1", 1 << 20).unwrap();
    assert_eq!(done, Done::Now);
    assert_eq!(
        pool.create_inline("csi-1", 1 << 20).unwrap().1,
        Done::Already
    );
    pool.open_image(&image, true).unwrap().set_len(0).unwrap();
    assert_eq!(pool.create_inline("csi-1", 1 << 20).unwrap().1, Done::Now);
    assert_eq!(
        pool.open_image(&image, false)
            .unwrap()
            .metadata()
            .unwrap()
            .len(),
        1 << 20
    );
    assert_eq!(pool.delete_inline("csi-1").unwrap(), Done::Now);
    assert_eq!(pool.delete_inline("csi-1").unwrap(), Done::Already);
    // An empty directory, as where the pool is not mounted.
    let (_empty, empty) = self::pool();
    let away = empty.delete_inline("csi-1");
    assert!(matches!(away, Err(PoolError::Uninitialized { .. })));
    assert!(pool.create_inline("../x", 1).is_err() && pool.delete_inline("a/b").is_err());
}

/// As on ZFS, or where an extended attribute takes a block.
#[test]
fn an_inline_image_with_blocks_is_counted_unless_it_has_its_size() {
    const MIB: u64 = 1 << 20;
    let scratch = MountScratch::new();
    let options = Some(c"size=64m");
    mount(
        "none",
        scratch.path(),
        "tmpfs",
        MountFlags::empty(),
        options,
    )
    .expect("a tmpfs");
    let pool = Pool {
        name: "main".to_owned(),
        dir: scratch.path().to_owned(),
        scope: Scope::Local,
        mounted: false,
    };
    pool.initialize().expect("ours");
    let at = scratch.path().join(inline_image("a"));
    let too_large = || match pool.create_inline("a", 128 * MIB) {
        Err(PoolError::NoRoom { .. }) => {}
        other => panic!("{other:?}"),
    };
    let file = File::create(&at).expect("made");
    fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 4096).expect("a block");
    assert!(file.metadata().expect("there").blocks() > 0);
    too_large();
    assert!(!at.exists(), "it was new");

    std::fs::write(&at, "data").expect("written");
    too_large();
    assert_eq!(std::fs::read(&at).expect("kept"), b"data");
    let grown = pool.create_inline("a", 32 * MIB).expect("there is room");
    assert_eq!(grown.1, Done::Now);
    // It is counted, whatever else has filled the pool since.
    std::fs::write(scratch.path().join("other"), vec![1; 60 << 20]).expect("written");
    assert_eq!(
        pool.create_inline("a", 32 * MIB).expect("whole").1,
        Done::Already
    );
    assert_eq!(std::fs::metadata(&at).expect("kept").len(), 32 * MIB);
}

#[test]
fn an_inline_image_is_made_through_no_link_and_into_no_pipe() {
    let (dir, pool) = pool();
    let (outside, at) = (
        tempfile::tempdir().unwrap(),
        dir.path().join(inline_image("a")),
    );
    let victim = outside.path().join("victim");
    std::fs::write(&victim, "").unwrap();
    symlink(&victim, &at).unwrap();
    assert!(pool.create_inline("a", 1 << 20).is_err());
    assert_eq!(std::fs::metadata(&victim).unwrap().len(), 0);
    std::fs::remove_file(&at).unwrap();

    rustix::fs::mkfifoat(rustix::fs::CWD, &at, rustix::fs::Mode::RUSR).unwrap();
    let error = pool.create_inline("a", 1 << 20).unwrap_err();
    assert!(matches!(error, PoolError::BadName { .. }), "{error}");
}

proptest! {
    #[test]
    fn any_name_is_refused_or_that_of_an_image_directly_in_the_pool(
        parts in prop::collection::vec(prop::sample::select(vec![
            "v.img", "..", ".", "", "/", "link.img", "dir", "victim", ".uring-csi", "\0", "\n",
            "/etc/passwd", "v.img/", "x",
        ]), 0..4),
        slashes: bool,
    ) {
        let (dir, pool) = pool();
        let outside = tempfile::tempdir().unwrap();
        let victim = outside.path().join("victim");
        std::fs::write(&victim, "").unwrap();
        for file in ["v.img", "dir/v.img", ".uring-csi/v.img"] {
            let path = dir.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        symlink(&victim, dir.path().join("link.img")).unwrap();
        symlink(outside.path(), dir.path().join("x")).unwrap();
        let name = parts.join(if slashes { "/" } else { "" });
        if pool.open_image(&name, true).is_ok() {
            prop_assert_eq!(name, "v.img");
        }
    }
}

/// Writing to an image lowers the free and the promised bytes alike.
#[test]
fn a_count_of_the_room_during_writes_finds_none_too_many() {
    let counted = std::thread::spawn(|| {
        // A file system of its own.
        let sandbox = testkit::Sandbox::new();
        let pool = Pool {
            name: "p".to_owned(),
            dir: sandbox.pool("counted"),
            scope: Scope::Shared,
            mounted: false,
        };
        let image = |n: u32| {
            let file = File::create(pool.image_path(&format!("{n}.img"))).unwrap();
            file.set_len(1 << 20).unwrap();
            file
        };
        let images: Vec<_> = (0..500).map(image).collect();
        let there = pool.room().unwrap().available();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for image in images.iter().cycle().take(20_000) {
                    let at = image.metadata().unwrap().blocks() * 512;
                    image.write_all_at(&[7; 4096], at).unwrap();
                }
            });
            while !writer.is_finished() {
                let counted = pool.room().unwrap().available();
                assert!(counted <= there, "{counted} of {there}");
            }
        });
    });
    counted.join().unwrap();
}
