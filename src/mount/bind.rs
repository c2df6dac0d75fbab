//! Bind mounts: open_tree(2) clones the mount, mount_setattr(2) sets the clone's
//! attributes, and move_mount(2) makes it visible. So a read-only mount is never visible
//! writable, and as source and target are descriptors, the mounted source is the one that
//! was checked.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::mount::{MountAttrFlags, OpenTreeFlags, open_tree};

use super::{
    attach::{MountError, failed, move_to},
    options::MountOptions,
    path::SafePath,
};
use crate::kernel::mounts::mount_setattr;

/// A mount of `source` that is nowhere in the tree. It ends with its descriptor, and then
/// with the superblock if that has no other mount. Never blocks on a device or a server.
pub fn detached(source: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    Ok(open_tree(source, "", flags)?)
}

/// Bind-mounts `source`, a `directory` or a block device node, at `at`, without the
/// mounts below it. Applies only the attributes that the options name; the others are the
/// source's. Never blocks on a device.
///
/// A read-only bind mount of a block device node does not prevent opening it for
/// writing: only a read-only device does (BLKROSET).
pub fn bind(
    source: BorrowedFd<'_>,
    directory: bool,
    at: &SafePath,
    options: &MountOptions,
    read_only: bool,
) -> Result<(), MountError> {
    let clone = detached(source).map_err(failed("clone the source's mount for", at))?;
    let mut change = options.attributes();
    if read_only {
        change.set |= MountAttrFlags::MOUNT_ATTR_RDONLY;
    }
    mount_setattr(clone.as_fd(), change.set, change.clear)
        .map_err(failed("set the attributes for", at))?;
    move_to(&clone, directory, at)
}

/// Gives a bind mount the attributes that the options name, in place of those that it has,
/// also while it is in use. It becomes read-only where asked, and never writable. Never
/// blocks on a device.
pub fn set_attributes(
    mount: BorrowedFd<'_>,
    options: &MountOptions,
    read_only: bool,
) -> io::Result<()> {
    let writing = MountAttrFlags::MOUNT_ATTR_RDONLY;
    let others = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_NOSYMFOLLOW
        | MountAttrFlags::MOUNT_ATTR_NODIRATIME
        | MountAttrFlags::MOUNT_ATTR__ATIME;
    let mut set = options.attributes().set.difference(writing);
    if read_only {
        set |= writing;
    }
    mount_setattr(mount, set, others)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use rustix::{
        fs::{CWD, Mode, OFlags, openat},
        mount::{MountFlags, mount},
    };

    use super::*;
    use crate::mount::{Mounted, PathKind, testing::MountScratch, unmount::unmount};

    fn options(words: &str) -> MountOptions {
        MountOptions::parse(&[words]).expect("options")
    }

    fn mounted_at(at: &SafePath) -> Mounted {
        match at.kind().expect("looks") {
            PathKind::Mount(mounted) => mounted,
            found => panic!("{}", found.describe()),
        }
    }

    fn tmpfs(at: &SafePath) {
        mount("none", at.path(), "tmpfs", MountFlags::NODEV, None).expect("tmpfs");
    }

    fn writable(at: &SafePath) -> bool {
        fs::write(at.path().join("file"), "text").is_ok()
    }

    #[test]
    fn a_mount_in_use_gets_other_attributes() {
        let scratch = MountScratch::new();
        let (stage, target) = (scratch.directory("stage"), scratch.directory("target"));
        tmpfs(&stage);
        let source = stage.open().expect("opens");
        let before = options("noexec,noatime,nosuid");
        bind(source.as_fd(), true, &target, &before, true).expect("bound");
        let held = fs::File::open(target.path()).expect("opens");
        let has = || {
            let mountinfo = fs::read_to_string("/proc/thread-self/mountinfo").expect("read");
            let path = target.path().to_str().expect("text").to_owned();
            let mut lines = mountinfo
                .lines()
                .map(|line| line.split(' ').collect::<Vec<_>>());
            let line = lines.find(|fields| fields[4] == path).expect("mounted");
            line[5].to_owned()
        };
        assert_eq!(has(), "ro,nosuid,nodev,noexec,noatime");
        let root = target.open().expect("opens");
        for (words, expected) in [
            ("nodev,nodiratime", "ro,nodev,nodiratime,relatime"),
            ("nosuid,strictatime,rw", "ro,nosuid"),
            ("", "ro,relatime"),
        ] {
            set_attributes(root.as_fd(), &options(words), false).expect("set");
            assert_eq!(has(), expected, "{words}");
        }
        let writable = source.as_fd();
        set_attributes(writable, &options("rw"), true).expect("set");
        let file = stage.path().join("file");
        let error = fs::write(file, "text").expect_err("read-only");
        assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem);
        drop((held, root));
        let _ = unmount(&target).expect("no descriptor is left");
    }

    #[test]
    fn a_directory_appears_with_the_attributes_asked_for() {
        let scratch = MountScratch::new();
        let (stage, target) = (scratch.directory("stage"), scratch.directory("target"));
        tmpfs(&stage);
        let source = stage.open().expect("opens");
        for (words, read_only, is_read_only) in [
            ("rw", false, false),
            ("ro", false, true),
            ("", true, true),
            ("rw", true, true),
        ] {
            bind(source.as_fd(), true, &target, &options(words), read_only).expect("bound");
            let mounted = mounted_at(&target);
            assert_eq!(target.is_read_only(&mounted).expect("looks"), is_read_only);
            assert_eq!(writable(&target), !is_read_only);
            let _ = unmount(&target).expect("no descriptor is left");
        }
        assert!(writable(&stage));

        let words = options("noexec,noatime,discard");
        bind(source.as_fd(), true, &target, &words, false).expect("bound");
        let mountinfo = fs::read_to_string("/proc/thread-self/mountinfo").expect("read");
        let target = target.path().display().to_string();
        let line = mountinfo
            .lines()
            .find(|line| line.contains(&target))
            .expect("there");
        assert!(line.contains("rw,nodev,noexec,noatime"), "{line}");
    }

    #[test]
    fn a_device_node_appears_on_a_file() {
        let scratch = MountScratch::new();
        let target = scratch.place("file");
        let _ = target.make_file(0o640).expect("made");
        let node = Path::new("/dev/loop0");
        let source = openat(CWD, node, OFlags::PATH, Mode::empty()).expect("opens");
        let PathKind::Block(dev) = PathKind::of(source.as_fd()).expect("looks") else {
            panic!("no block device");
        };
        let bound =
            |at: &SafePath, read_only| bind(source.as_fd(), false, at, &options(""), read_only);
        bound(&target, true).expect("bound");
        let mounted = mounted_at(&target);
        assert_eq!(mounted.rdev, Some(dev));
        assert!(!mounted.directory);

        std::os::unix::fs::symlink(target.path(), scratch.path().join("link")).expect("linked");
        for other in [scratch.directory("directory"), scratch.place("link")] {
            let error = bound(&other, false).expect_err("no file");
            assert!(matches!(error, MountError::WrongTarget { .. }), "{error}");
        }
    }

    #[test]
    fn a_symlink_is_no_target() {
        let scratch = MountScratch::new();
        let (stage, elsewhere) = (scratch.directory("stage"), scratch.directory("elsewhere"));
        tmpfs(&stage);
        std::os::unix::fs::symlink(elsewhere.path(), scratch.path().join("link")).expect("linked");
        let source = stage.open().expect("opens");
        let link = scratch.place("link");
        let error = bind(source.as_fd(), true, &link, &options(""), false).expect_err("refused");
        assert!(error.to_string().contains("a symlink"), "{error}");
        assert_eq!(elsewhere.kind().expect("looks"), PathKind::Dir);
    }
}
