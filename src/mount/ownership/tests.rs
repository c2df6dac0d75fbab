use std::{
    fs::{File, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink},
    path::Path,
};

use rustix::{
    fs::{CWD, mknodat},
    mount::{MountFlags, mount},
};

use super::*;
use crate::mount::testing::{MountScratch, TestLoop};

const GROUP: u32 = 4711;

fn make(path: &Path, mode: u32) {
    File::create(path).expect("created");
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("changed");
}

/// The group and the mode.
fn of(path: &Path) -> (u32, u32) {
    let data = fs::symlink_metadata(path).expect("there");
    (data.gid(), data.mode() & 0o7777)
}

fn apply(root: &Path) -> Result<Done, OwnershipError> {
    FsGroup(GROUP).apply(File::open(root).expect("opens").as_fd())
}

#[test]
fn a_tree_gets_kubelets_group_and_modes() {
    let scratch = MountScratch::new();
    let root = scratch.path();
    fs::create_dir_all(root.join("a/b")).expect("created");
    for (directory, mode) in [("", 0o700), ("a", 0o700), ("a/b", 0o755)] {
        let mode = Permissions::from_mode(mode);
        fs::set_permissions(root.join(directory), mode).expect("changed");
    }
    make(&root.join("a/b/file"), 0o400);
    make(&root.join("suid"), 0o4755);
    mknodat(CWD, root.join("fifo"), FileType::Fifo, Mode::RUSR, 0).expect("made");

    assert_eq!(apply(root).expect("applied"), Done::Now);
    assert_eq!(of(root), (GROUP, 0o2770));
    assert_eq!(of(&root.join("a")), (GROUP, 0o2770));
    assert_eq!(of(&root.join("a/b")), (GROUP, 0o2775));
    assert_eq!(of(&root.join("a/b/file")), (GROUP, 0o660));
    assert_eq!(of(&root.join("suid")), (GROUP, 0o4775));
    assert_eq!(of(&root.join("fifo")), (GROUP, 0o660));
    assert_eq!(apply(root).expect("applied"), Done::Already);
}

#[test]
fn nothing_outside_the_mount_is_changed() {
    let scratch = MountScratch::new();
    let volume = scratch.directory("volume");
    let outside = scratch.path().join("outside");
    make(&outside, 0o600);
    symlink(&outside, volume.path().join("link")).expect("linked");
    symlink(scratch.path(), volume.path().join("up")).expect("linked");
    let other = scratch.directory("volume/other");
    mount(
        "none",
        other.path(),
        "tmpfs",
        MountFlags::empty(),
        Some(c"mode=700"),
    )
    .expect("tmpfs");

    assert_eq!(apply(volume.path()).expect("applied"), Done::Now);
    assert_eq!(of(&volume.path().join("link")).0, GROUP);
    assert_eq!(of(&outside), (0, 0o600));
    assert_eq!(of(other.path()), (0, 0o700));
    assert_ne!(of(scratch.path()).0, GROUP);
}

#[test]
fn a_tree_is_changed_only_where_its_root_does_not_match() {
    let scratch = MountScratch::new();
    let root = scratch.path();
    let _ = apply(root).expect("applied");
    make(&root.join("new"), 0o600);
    assert_eq!(apply(root).expect("applied"), Done::Already);
    assert_eq!(of(&root.join("new")).1, 0o600);

    chown(root, None, Some(0)).expect("changed");
    assert_eq!(apply(root).expect("applied"), Done::Now);
    assert_eq!(of(&root.join("new")), (GROUP, 0o660));
}

#[test]
fn a_tree_too_deep_is_named_and_its_root_does_not_match() {
    let scratch = MountScratch::new();
    fs::create_dir_all(scratch.path().join("1/2/3")).expect("created");
    let root = File::open(scratch.path()).expect("opens");
    let error = FsGroup(GROUP).walk(root.as_fd(), 3).expect_err("too deep");
    assert!(error.to_string().contains("1/2/3"), "{error}");
    assert_ne!(of(scratch.path()).0, GROUP);
    assert!(FsGroup(GROUP).walk(root.as_fd(), 4).is_ok());
}

#[test]
fn a_deep_walk_reopens_its_parents_and_continues() {
    let scratch = MountScratch::new();
    let mut directory = scratch.path().to_owned();
    let mut all = vec![directory.clone()];
    for _ in 0..3 * MAX_OPEN {
        for name in ["a", "b/c", "d", "down", "y/z"] {
            fs::create_dir_all(directory.join(name)).expect("created");
            make(&directory.join(name).join("file"), 0o400);
            all.push(directory.join(name));
            all.push(directory.join(name).join("file"));
        }
        directory.push("down");
    }
    assert_eq!(apply(scratch.path()).expect("applied"), Done::Now);
    for path in all {
        let (group, mode) = of(&path);
        assert_eq!((group, mode & 0o660), (GROUP, 0o660), "{}", path.display());
    }
}

#[test]
fn names_with_equal_hashes_are_all_visited() {
    let scratch = MountScratch::new();
    // ext4's only hash without a seed, so the names of each line below have one hash.
    let legacy = "mkfs.ext4 -q $1 && tune2fs -E hash_alg=legacy $1";
    let device = TestLoop::new(&scratch, &["sh", "-c", legacy], &[]);
    let volume = scratch.directory("volume");
    let no_data = None::<&CStr>;
    mount(
        &device.node,
        volume.path(),
        "ext4",
        MountFlags::empty(),
        no_data,
    )
    .expect("mounted");
    let names = [
        ["lvfsd", "lvhsd", "lvmsd"],
        ["tlykk", "jdyst", "jdyvw"],
        ["adodq", "afler", "ykpjr"],
        ["gsaqf", "gslqf", "kxpqo"],
    ];
    let mut all = Vec::new();
    for name in names.as_flattened() {
        // So deep that the walk closes the directory above meanwhile.
        let deep = volume.path().join(name).join("d/".repeat(MAX_OPEN));
        fs::create_dir_all(&deep).expect("created");
        make(&deep.join("file"), 0o400);
        all.push(deep.join("file"));
    }
    let level = Level::new(File::open(volume.path()).expect("opens").as_fd());
    let mut level = level.expect("listed");
    let mut places = Vec::new();
    while let Some(entry) = level.read() {
        places.push(entry.expect("read").offset());
    }
    places.dedup();
    assert!(places.len() < all.len(), "they have hashes of their own");

    assert_eq!(apply(volume.path()).expect("applied"), Done::Now);
    for path in all {
        assert_eq!(of(&path), (GROUP, 0o660), "{}", path.display());
    }
}

#[test]
fn a_directory_moved_during_the_walk_is_an_error() {
    let scratch = MountScratch::new();
    fs::create_dir_all(scratch.path().join("above/below")).expect("created");
    let opened = |name| File::open(scratch.path().join(name)).expect("opens");
    let below = opened("above/below");
    let mut above = Level::new(opened("above").as_fd()).expect("opens");
    above.listing = None;
    above.reopen_from(below.as_fd()).expect("where it was");
    above.listing = None;
    let moved = scratch.path().join("moved");
    fs::rename(scratch.path().join("above/below"), moved).expect("moved");
    let error = above.reopen_from(below.as_fd()).expect_err("another");
    assert!(matches!(error, OwnershipError::Moved { .. }), "{error}");
}

#[test]
fn a_group_is_a_number_that_chown_takes() {
    assert_eq!("4711".parse::<FsGroup>().expect("a group"), FsGroup(GROUP));
    for text in ["", "-1", "wheel", "4294967295", "4294967296"] {
        assert!(text.parse::<FsGroup>().is_err(), "{text}");
    }
}
