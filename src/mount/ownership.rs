//! fsGroup: the group that a pod wants its volume to belong to.
//!
//! The result is that of kubelet's `SetVolumeOwnership` (pkg/volume,
//! `volume_linux.go`) with `fsGroupChangePolicy: OnRootMismatch`: everything gets
//! the group, `u+rw,g+rw`, directories also `ug+x` and the setgid bit; symlinks
//! get the group alone. The root comes last, so that a root that matches proves
//! that an earlier walk came to its end, and the tree is left alone.
//!
//! Pods that have the volume already may change the tree meanwhile. So each thing
//! is opened once, without following a symlink or leaving the mount, and is
//! changed through that descriptor.

use std::{
    ffi::CStr,
    fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::PathBuf,
    str::FromStr,
};

use rustix::{
    fs::{
        AtFlags, Dir, DirEntry, FileType, Gid, Mode, OFlags, ResolveFlags, chmod, chownat, fstat,
        openat2,
    },
    io::Errno,
};

use crate::Done;

/// A group id to give to a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FsGroup(u32);

/// The text was not a group id.
#[derive(Debug, thiserror::Error)]
#[error("volume_mount_group {0:?} is not a group id; pass a number from 0 to 4294967294")]
pub struct BadGroup(String);

/// Why the volume does not wholly belong to the group.
#[derive(Debug, thiserror::Error)]
pub enum OwnershipError {
    /// Deeper than a path can be long.
    #[error("cannot give {path:?} to the group: it lies deeper than {DEEPEST} directories")]
    TooDeep {
        /// The directory.
        path: PathBuf,
    },
    /// Somebody moved a directory while the walk was below it.
    #[error(
        "cannot give the directory above {path:?} to the group: it was moved meanwhile; try again"
    )]
    Moved {
        /// The directory below it.
        path: PathBuf,
    },
    /// The system's own refusal.
    #[error("cannot give {path:?} to the group: cannot {doing} it")]
    Io {
        /// The directory or file, or the directory that it is in.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl FromStr for FsGroup {
    type Err = BadGroup;

    fn from_str(text: &str) -> Result<Self, BadGroup> {
        // The highest number means "no group" to chown(2).
        let group = text.parse().ok().filter(|group| *group != u32::MAX);
        group.map(Self).ok_or_else(|| BadGroup(text.to_owned()))
    }
}

impl FsGroup {
    /// Gives all that is in the mount from the directory `root` down to the group,
    /// unless `root` shows that it was done before. Takes as long as the tree is
    /// large, and can hang with the device.
    pub fn apply(self, root: BorrowedFd<'_>) -> Result<Done, OwnershipError> {
        let stat = fstat(root).map_err(failed(root, "look at"))?;
        let mode = Mode::from_raw_mode(stat.st_mode);
        if stat.st_gid == self.0 && mode.contains(DIRECTORY) {
            return Ok(Done::Already);
        }
        self.walk(root, DEEPEST)?;
        Ok(Done::Now)
    }

    fn walk(self, root: BorrowedFd<'_>, deepest: usize) -> Result<(), OwnershipError> {
        // The directories from the root down to where we are.
        let mut way = vec![Level::new(root)?];
        while let Some(level) = way.last_mut() {
            let entry = level.read();
            let here = level.fd();
            let Some(entry) = entry else {
                self.give(here)?;
                let done = way.pop();
                if let (Some(done), Some(above)) = (done, way.last_mut()) {
                    above.open_from(done.fd())?;
                }
                continue;
            };
            let entry = entry.map_err(failed(here, "read"))?;
            if [c".", c".."].contains(&entry.file_name()) {
                continue;
            }
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV;
            let found = match openat2(here, entry.file_name(), flags, Mode::empty(), resolve) {
                Ok(found) => found,
                // Removed meanwhile, or the root of another mount.
                Err(Errno::NOENT | Errno::XDEV) => continue,
                Err(error) => return Err(failed(here, "open what is in")(error)),
            };
            let stat = fstat(&found).map_err(failed(found.as_fd(), "look at"))?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                self.give(found.as_fd())?;
            } else if way.len() == deepest {
                let path = path_of(found.as_fd());
                return Err(OwnershipError::TooDeep { path });
            } else {
                way.push(Level::new(found.as_fd())?);
                if let Some(far) = way.len().checked_sub(OPEN + 1) {
                    way[far].listing = None;
                }
            }
        }
        Ok(())
    }

    /// Changes one thing.
    fn give(self, thing: BorrowedFd<'_>) -> Result<(), OwnershipError> {
        let stat = fstat(thing).map_err(failed(thing, "look at"))?;
        let new_group = stat.st_gid != self.0;
        if new_group {
            chownat(
                thing,
                "",
                None,
                Some(Gid::from_raw(self.0)),
                AtFlags::EMPTY_PATH,
            )
            .map_err(failed(thing, "change the group of"))?;
        }
        let wanted = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => return Ok(()),
            FileType::Directory => DIRECTORY,
            _ => FILE,
        };
        let mode = Mode::from_raw_mode(stat.st_mode);
        // A change of the group took the set-id bits away.
        if new_group || !mode.contains(wanted) {
            // fchmod(2) takes no O_PATH descriptor; this link leads to the thing
            // itself, which is no symlink.
            chmod(magic_link(thing), mode | wanted).map_err(failed(thing, "change the mode of"))?;
        }
        Ok(())
    }
}

const FILE: Mode = Mode::RUSR
    .union(Mode::WUSR)
    .union(Mode::RGRP)
    .union(Mode::WGRP);
const DIRECTORY: Mode = FILE.union(Mode::XUSR).union(Mode::XGRP).union(Mode::SGID);

/// kubelet walks by paths, and `PATH_MAX` (4096) does not allow it more directories on
/// the way.
const DEEPEST: usize = 2048;

/// How many of them are open at once, those that are nearest: what a volume may have
/// open is counted (`crate::kernel::descriptors`), and many may be walked at a time.
const OPEN: usize = 8;

/// A directory on the way.
struct Level {
    /// None while the walk is far below.
    listing: Option<Dir>,
    /// Its device and inode.
    id: (u64, u64),
    /// Where the entry after the last one is (readdir(3), `d_off`).
    next: i64,
    /// What `next` was when it was opened again.
    reopened_at: Option<i64>,
}

impl Level {
    fn new(directory: BorrowedFd<'_>) -> Result<Self, OwnershipError> {
        let (listing, id) = listing(directory, c".")?;
        Ok(Self {
            listing: Some(listing),
            id,
            next: 0,
            reopened_at: None,
        })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        let listing = self.listing.as_ref().expect("the last one is open");
        listing.fd().expect("a Dir on Linux has a descriptor")
    }

    fn read(&mut self) -> Option<rustix::io::Result<DirEntry>> {
        loop {
            let entry = self
                .listing
                .as_mut()
                .expect("the last one is open")
                .read()?;
            if let Ok(entry) = &entry {
                // Entries with equal hashes are at one place: ext4 tells of the first of
                // them once more, which would never end.
                if self.reopened_at.is_some_and(|at| entry.offset() <= at) {
                    continue;
                }
                self.next = entry.offset();
            }
            return Some(entry);
        }
    }

    /// Opens it again where it was closed, from the directory `below`, and goes on
    /// where it was.
    fn open_from(&mut self, below: BorrowedFd<'_>) -> Result<(), OwnershipError> {
        if self.listing.is_some() {
            return Ok(());
        }
        let (mut listing, id) = listing(below, c"..")?;
        // Somebody who moved `below` chose what is above it now.
        if id != self.id {
            let path = path_of(below);
            return Err(OwnershipError::Moved { path });
        }
        listing
            .seek(self.next)
            .map_err(failed(below, "read what is above"))?;
        self.reopened_at = Some(self.next);
        self.listing = Some(listing);
        Ok(())
    }
}

/// Opens `name` in a directory, itself or the one above it, for reading; `directory`
/// may be an `O_PATH` descriptor. Returns its device and inode, too.
fn listing(directory: BorrowedFd<'_>, name: &CStr) -> Result<(Dir, (u64, u64)), OwnershipError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = || {
        let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
        let opened = openat2(directory, name, flags, Mode::empty(), resolve)?;
        let stat = fstat(&opened)?;
        Ok((Dir::new(opened)?, (stat.st_dev, stat.st_ino)))
    };
    open().map_err(failed(directory, "read"))
}

fn magic_link(thing: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", thing.as_raw_fd())
}

fn path_of(thing: BorrowedFd<'_>) -> PathBuf {
    fs::read_link(magic_link(thing)).unwrap_or_default()
}

fn failed(thing: BorrowedFd<'_>, doing: &'static str) -> impl FnOnce(Errno) -> OwnershipError {
    move |error| OwnershipError::Io {
        path: path_of(thing),
        doing,
        source: error.into(),
    }
}

#[cfg(test)]
mod tests {
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
    use crate::mount::testing::Scratch;

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
        let scratch = Scratch::new();
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
        let scratch = Scratch::new();
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
    fn a_root_that_matches_is_believed_and_one_that_does_not_is_not() {
        let scratch = Scratch::new();
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
        let scratch = Scratch::new();
        fs::create_dir_all(scratch.path().join("1/2/3")).expect("created");
        let root = File::open(scratch.path()).expect("opens");
        let error = FsGroup(GROUP).walk(root.as_fd(), 3).expect_err("too deep");
        assert!(error.to_string().contains("1/2/3"), "{error}");
        assert_ne!(of(scratch.path()).0, GROUP);
        assert!(FsGroup(GROUP).walk(root.as_fd(), 4).is_ok());
    }

    #[test]
    fn a_directory_far_above_is_taken_up_where_it_was_left() {
        let scratch = Scratch::new();
        let mut directory = scratch.path().to_owned();
        let mut all = vec![directory.clone()];
        for _ in 0..3 * OPEN {
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
    fn what_is_above_a_moved_directory_is_not_taken_for_what_was() {
        let scratch = Scratch::new();
        fs::create_dir_all(scratch.path().join("above/below")).expect("created");
        let opened = |name| File::open(scratch.path().join(name)).expect("opens");
        let below = opened("above/below");
        let mut above = Level::new(opened("above").as_fd()).expect("opens");
        above.listing = None;
        above.open_from(below.as_fd()).expect("where it was");
        above.listing = None;
        let moved = scratch.path().join("moved");
        fs::rename(scratch.path().join("above/below"), moved).expect("moved");
        let error = above.open_from(below.as_fd()).expect_err("another");
        assert!(matches!(error, OwnershipError::Moved { .. }), "{error}");
    }

    #[test]
    fn a_group_is_a_number_that_chown_takes() {
        assert_eq!("4711".parse::<FsGroup>().expect("a group"), FsGroup(GROUP));
        for text in ["", "-1", "wheel", "4294967295", "4294967296"] {
            assert!(text.parse::<FsGroup>().is_err(), "{text}");
        }
    }
}
