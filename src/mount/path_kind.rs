//! The kind of file at a path, by one statx(2), and whether a mount is read-only, by one
//! statmount(2). Neither accesses the device, so neither hangs with it. Kernels before 6.8
//! have no statmount; there fstatfs(2) tells, which can block on some file systems.
//!
//! `STATX_ATTR_MOUNT_ROOT` (Linux 5.8) identifies a mount. A comparison of devices would
//! not: a bind mount within one file system has its parent's device.
//!
//! An XFS that has shut down after an error answers `EIO` to statx(2), and still has to be
//! unmounted. The mount table shows such a mount, and reading it accesses no file system.

use std::{
    ffi::OsStr,
    fs, io,
    os::fd::{AsRawFd as _, BorrowedFd},
    path::Path,
};

use rustix::{
    fs::{
        AtFlags, CWD, FileType, Mode, OFlags, StatVfsMountFlags, Statx, StatxAttributes,
        StatxFlags, fstatvfs, openat, statx,
    },
    io::Errno,
    mount::MountAttrFlags,
};

use super::table;
use crate::kernel::{
    Dev,
    mounts::{StatMount, wants},
};

/// The kind of file at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// No file.
    Absent,
    /// A directory without a mount on it.
    Dir,
    /// A regular file without a mount on it.
    File,
    /// A block device node without a mount on it.
    Block(Dev),
    /// Anything else, described: a symlink, a socket.
    Other(&'static str),
    /// The root of a mount, the topmost where several are stacked.
    Mount(Mounted),
}

/// A mount, its superblock, and the file that it mounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mounted {
    pub id: MountId,
    /// The superblock's device, st_dev. For btrfs it is an anonymous one, and only
    /// [`super::table::MountEntry::source`] names the device.
    pub dev: Dev,
    /// The inode of its root, where the file system answers.
    pub ino: u64,
    /// The device of a bind-mounted block device node.
    pub rdev: Option<Dev>,
    /// Whether it mounts a directory.
    pub directory: bool,
    /// Whether the file system has shut down: every access fails until its last mount
    /// is unmounted and it is mounted again.
    pub shut_down: bool,
}

/// The id of a mount. Ids of the two kinds are never equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MountId {
    /// An id that the kernel never uses again while it runs (Linux 6.8).
    Unique(u64),
    /// The id in mountinfo, which another mount may get after this one is gone.
    Classic(u32),
}

/// `STATX_MNT_ID_UNIQUE`.
const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// Either id; kernels before 6.8 ignore the unknown flag.
pub(super) const ANY_MNT_ID: StatxFlags = StatxFlags::MNT_ID.union(MNT_ID_UNIQUE);

impl PathKind {
    /// The kind of the file behind `at`, possibly an `O_PATH` descriptor.
    pub fn of(at: BorrowedFd<'_>) -> io::Result<Self> {
        match Self::with_id(at, OsStr::new(""), ANY_MNT_ID) {
            Err(Errno::IO) => Ok(Self::shut_down(at)?.ok_or(Errno::IO)?),
            kind => Ok(kind?),
        }
    }

    /// The kind of the file of that name in the directory `parent`; of a symlink, the
    /// symlink itself. Of a file system that has shut down only [`PathKind::of`] shows the
    /// mount; this fails with `EIO`.
    pub(super) fn at(parent: BorrowedFd<'_>, name: &OsStr) -> Result<Self, Errno> {
        Self::with_id(parent, name, ANY_MNT_ID)
    }

    /// The root of a mount whose file system has shut down; `None` for any other file in
    /// it.
    fn shut_down(at: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        let entry = table::covering(at)?;
        let link = format!("/proc/self/fd/{}", at.as_raw_fd());
        if fs::read_link(&link)? != entry.mount_point {
            return Ok(None);
        }
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Some(Self::Mount(Mounted {
            id: MountId::Classic(entry.id),
            dev: entry.dev,
            ino: 0,
            rdev: None,
            directory: openat(CWD, &link, directory, Mode::empty()).is_ok(),
            shut_down: true,
        })))
    }

    /// The mount at the path, in the mount table, of a directory that its server has lost.
    pub(super) fn stale(path: &Path) -> io::Result<Option<Self>> {
        let all = table::list()?;
        let topmost = all.iter().rev().find(|entry| entry.mount_point == path);
        Ok(topmost.map(|entry| {
            Self::Mount(Mounted {
                id: MountId::Classic(entry.id),
                dev: entry.dev,
                ino: 0,
                rdev: None,
                directory: true,
                shut_down: true,
            })
        }))
    }

    fn with_id(at: BorrowedFd<'_>, name: &OsStr, id: StatxFlags) -> Result<Self, Errno> {
        let mut flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        flags |= AtFlags::STATX_DONT_SYNC;
        if name.is_empty() {
            flags |= AtFlags::EMPTY_PATH;
        }
        let wanted = StatxFlags::TYPE | StatxFlags::INO | id;
        let stat = statx(at, name, flags, wanted)?;
        let kind = FileType::from_raw_mode(stat.stx_mode.into());
        let rdev = (kind == FileType::BlockDevice).then_some(Dev {
            major: stat.stx_rdev_major,
            minor: stat.stx_rdev_minor,
        });
        if stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
            return Ok(Self::Mount(Mounted {
                id: MountId::of(&stat),
                dev: Dev {
                    major: stat.stx_dev_major,
                    minor: stat.stx_dev_minor,
                },
                ino: stat.stx_ino,
                rdev,
                directory: kind == FileType::Directory,
                shut_down: false,
            }));
        }
        Ok(match (kind, rdev) {
            (_, Some(dev)) => Self::Block(dev),
            (FileType::Directory, _) => Self::Dir,
            (FileType::RegularFile, _) => Self::File,
            (FileType::Symlink, _) => Self::Other("a symlink"),
            (FileType::Fifo, _) => Self::Other("a FIFO"),
            (FileType::Socket, _) => Self::Other("a socket"),
            (FileType::CharacterDevice, _) => Self::Other("a character device"),
            _ => Self::Other("a file of unknown type"),
        })
    }

    /// A noun phrase for messages.
    pub(super) fn describe(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Dir => "a directory",
            Self::File => "a file",
            Self::Block(_) => "a block device node",
            Self::Other(what) => what,
            Self::Mount(_) => "a mount point",
        }
    }
}

impl Mounted {
    /// Whether the mount or the superblock is read-only. `at` is its root.
    pub fn is_read_only(&self, at: BorrowedFd<'_>) -> io::Result<bool> {
        if self.shut_down {
            return Ok(table::covering(at)?.read_only);
        }
        if let MountId::Unique(id) = self.id
            && let Ok(mount) = StatMount::read(id, wants::SB_BASIC | wants::MNT_BASIC)
        {
            return Ok(mount.read_only());
        }
        let flags = fstatvfs(at)?.f_flag;
        Ok(flags.contains(StatVfsMountFlags::RDONLY))
    }

    /// Which of `nosuid`, `nodev` and `noexec` the mount has. `at` is its root.
    pub fn protection(&self, at: BorrowedFd<'_>) -> io::Result<MountAttrFlags> {
        const ALL: [(MountAttrFlags, StatVfsMountFlags); 3] = [
            (MountAttrFlags::MOUNT_ATTR_NOSUID, StatVfsMountFlags::NOSUID),
            (MountAttrFlags::MOUNT_ATTR_NODEV, StatVfsMountFlags::NODEV),
            (MountAttrFlags::MOUNT_ATTR_NOEXEC, StatVfsMountFlags::NOEXEC),
        ];
        if let MountId::Unique(id) = self.id
            && let Ok(mount) = StatMount::read(id, wants::MNT_BASIC)
        {
            let protection = ALL.iter().map(|(attribute, _)| *attribute).collect();
            return Ok(mount.attributes().intersection(protection));
        }
        let flags = fstatvfs(at)?.f_flag;
        let has = ALL.iter().filter(|(_, flag)| flags.contains(*flag));
        Ok(has.map(|(attribute, _)| *attribute).collect())
    }
}

impl MountId {
    /// The id in the answer of a statx(2) that asked for either kind.
    pub(super) fn of(stat: &Statx) -> Self {
        let answered = StatxFlags::from_bits_retain(stat.stx_mask);
        if answered.contains(MNT_ID_UNIQUE) {
            return Self::Unique(stat.stx_mnt_id);
        }
        // The kernel's own is an int.
        Self::Classic(u32::try_from(stat.stx_mnt_id).unwrap_or(u32::MAX))
    }

    /// The mount that contains `at`.
    pub(super) fn covering(at: BorrowedFd<'_>) -> io::Result<Self> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        Ok(Self::of(&statx(at, "", flags, ANY_MNT_ID)?))
    }

    /// The mountinfo id of the mount that contains `at`, from `fdinfo` (proc(5)), which has it
    /// on any kernel and file system.
    pub(super) fn classic_covering(at: BorrowedFd<'_>) -> io::Result<u32> {
        let path = format!("/proc/self/fdinfo/{}", at.as_raw_fd());
        let info = fs::read_to_string(path)?;
        info.lines()
            .find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok())
            .ok_or_else(|| io::Error::other("fdinfo tells no mount id"))
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsFd, process::Command};

    use rustix::mount::{MountFlags, mount};

    use super::*;
    use crate::{
        Done,
        kernel::mounts::listmount,
        mount::{
            testing::{MountScratch, TestLoop},
            unmount::unmount,
        },
    };

    /// Both kinds of id: of Linux 6.8 and later, and of earlier kernels.
    #[test]
    fn a_mount_has_a_unique_id_or_a_classic_one() {
        let scratch = MountScratch::new();
        mount("none", scratch.path(), "tmpfs", MountFlags::RDONLY, None).expect("tmpfs");
        let root = File::open(scratch.path()).expect("opens");

        let look = |id| PathKind::with_id(root.as_fd(), OsStr::new(""), id).expect("looks");
        let PathKind::Mount(new) = look(StatxFlags::MNT_ID | MNT_ID_UNIQUE) else {
            panic!("not seen as a mount");
        };
        let PathKind::Mount(old) = look(StatxFlags::MNT_ID) else {
            panic!("not seen as a mount");
        };
        assert_eq!(matches!(new.id, MountId::Unique(_)), listmount().is_ok());
        assert!(matches!(old.id, MountId::Classic(_)), "{old:?}");
        assert!(old.directory && old.rdev.is_none());
        for seen in [old, new] {
            assert!(seen.is_read_only(root.as_fd()).expect("looks"));
        }
        assert_eq!(Mounted { id: old.id, ..new }, old);
    }

    /// XFS only: the other file systems still answer statx after a shutdown.
    #[test]
    fn a_file_system_that_has_shut_down_is_found() {
        let scratch = MountScratch::new();
        let device = TestLoop::new(&scratch, &["mkfs.xfs"], &[]);
        let place = scratch.directory("m");
        mount(&device.node, place.path(), "xfs", MountFlags::empty(), None).expect("mounted");
        let below = scratch.directory("m/below").open().expect("opens");
        let PathKind::Mount(before) = place.kind().expect("looks") else {
            panic!("not seen as a mount");
        };
        let mut command = Command::new("xfs_io");
        let said = command.args(["-x", "-c", "shutdown"]).arg(place.path());
        assert!(said.status().expect("installed").success());

        let PathKind::Mount(after) = place.kind().expect("looks") else {
            panic!("not seen as a mount");
        };
        assert!(after.shut_down && !before.shut_down);
        assert_eq!((after.dev, after.directory), (before.dev, true));
        let error = PathKind::of(below.as_fd()).expect_err("no mount");
        assert_eq!(Errno::from_io_error(&error), Some(Errno::IO));
        drop(below);
        assert_eq!(unmount(&place).expect("unmounted"), Done::Now);
        assert_eq!(place.kind().expect("looks"), PathKind::Dir);
    }

    #[test]
    fn kinds_are_distinguished() {
        let scratch = MountScratch::new();
        let at = |path: &str| {
            let node = File::open(path).expect("opens");
            PathKind::of(node.as_fd()).expect("looks")
        };
        assert_eq!(at("/dev/null"), PathKind::Other("a character device"));
        assert_eq!(at(scratch.path().to_str().expect("utf-8")), PathKind::Dir);
        assert_eq!(at("/proc/version"), PathKind::File);
    }
}
