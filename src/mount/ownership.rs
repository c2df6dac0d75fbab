//! fsGroup: the group that a pod wants its volume to belong to.
//!
//! The result is that of kubelet's `SetVolumeOwnership` (pkg/volume,
//! `volume_linux.go`) with `fsGroupChangePolicy: OnRootMismatch`: every file gets
//! the group and `u+rw,g+rw`, a directory also `ug+x` and the setgid bit; a symlink
//! gets the group alone. The walk changes the root last, so a matching root proves
//! that an earlier walk completed, and the tree needs no other.
//!
//! Pods that use the volume already may change the tree meanwhile. So the walk opens each
//! file once, without following a symlink or leaving the mount, and changes it through
//! that descriptor.

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

/// The group id of a volume (`volume_mount_group`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FsGroup(u32);

/// The text is not a group id.
#[derive(Debug, thiserror::Error)]
#[error("volume_mount_group {0:?} is not a group id; pass a number from 0 to 4294967294")]
pub struct BadGroup(String);

/// Why the group could not be applied to the whole volume.
#[derive(Debug, thiserror::Error)]
pub enum OwnershipError {
    /// The tree is deeper than a path can be long.
    ///
    /// Remedy: set fsGroupChangePolicy: OnRootMismatch in the pod, or flatten the tree.
    #[error("cannot change the group of {path:?}: it is more than {MAX_DEPTH} directories deep")]
    TooDeep { path: PathBuf },
    /// A directory was moved while the walk was below it.
    #[error("cannot change the group of the parent of {path:?}: it was moved meanwhile; retry")]
    Moved {
        /// The directory below it.
        path: PathBuf,
    },
    /// Any other failure of a system call.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the call is repeated.
    #[error("cannot change the group of {path:?}: cannot {doing} it")]
    Io {
        path: PathBuf,
        doing: &'static str,
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
    /// Applies the group to everything in the mount below and including the directory
    /// `root`, unless `root` matches already. Takes time in proportion to the tree, and
    /// can hang with the device.
    pub fn apply(self, root: BorrowedFd<'_>) -> Result<Done, OwnershipError> {
        let stat = fstat(root).map_err(failed(root, "look at"))?;
        let mode = Mode::from_raw_mode(stat.st_mode);
        if stat.st_gid == self.0 && mode.contains(DIRECTORY) {
            return Ok(Done::Already);
        }
        self.walk(root, MAX_DEPTH)?;
        Ok(Done::Now)
    }

    fn walk(self, root: BorrowedFd<'_>, max_depth: usize) -> Result<(), OwnershipError> {
        // The directories from the root down to the current one.
        let mut stack = vec![Level::new(root)?];
        while let Some(level) = stack.last_mut() {
            let entry = level.read();
            let here = level.fd();
            let Some(entry) = entry else {
                self.change(here)?;
                let done = stack.pop();
                if let (Some(done), Some(above)) = (done, stack.last_mut()) {
                    above.reopen_from(done.fd())?;
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
                Err(error) => return Err(failed(here, "open a file in")(error)),
            };
            let stat = fstat(&found).map_err(failed(found.as_fd(), "look at"))?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                self.change(found.as_fd())?;
            } else if stack.len() == max_depth {
                let path = path_of(found.as_fd());
                return Err(OwnershipError::TooDeep { path });
            } else {
                stack.push(Level::new(found.as_fd())?);
                if let Some(far) = stack.len().checked_sub(MAX_OPEN + 1) {
                    stack[far].listing = None;
                }
            }
        }
        Ok(())
    }

    /// Changes one file or directory.
    fn change(self, file: BorrowedFd<'_>) -> Result<(), OwnershipError> {
        let stat = fstat(file).map_err(failed(file, "look at"))?;
        let new_group = stat.st_gid != self.0;
        if new_group {
            chownat(
                file,
                "",
                None,
                Some(Gid::from_raw(self.0)),
                AtFlags::EMPTY_PATH,
            )
            .map_err(failed(file, "change the group of"))?;
        }
        let wanted = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => return Ok(()),
            FileType::Directory => DIRECTORY,
            _ => FILE,
        };
        let mode = Mode::from_raw_mode(stat.st_mode);
        // Changing the group clears the set-id bits.
        if new_group || !mode.contains(wanted) {
            // fchmod(2) takes no O_PATH descriptor; this link resolves to the file itself,
            // which is no symlink.
            chmod(magic_link(file), mode | wanted).map_err(failed(file, "change the mode of"))?;
        }
        Ok(())
    }
}

const FILE: Mode = Mode::RUSR
    .union(Mode::WUSR)
    .union(Mode::RGRP)
    .union(Mode::WGRP);
const DIRECTORY: Mode = FILE.union(Mode::XUSR).union(Mode::XGRP).union(Mode::SGID);

/// The most levels of a tree: kubelet walks by paths, and `PATH_MAX` (4096) allows no
/// deeper ones.
const MAX_DEPTH: usize = 2048;

/// How many directories of the stack, the deepest ones, are open at once: each volume has
/// a budget of descriptors (`crate::kernel::descriptors`).
const MAX_OPEN: usize = 8;

/// A directory on the stack.
struct Level {
    /// `None` while the walk is more than [`MAX_OPEN`] levels below.
    listing: Option<Dir>,
    /// Its device and inode.
    id: (u64, u64),
    /// The offset of the next entry (readdir(3), `d_off`).
    next: i64,
    /// How many entries at offset `next` were read. On ext4 the offset is the hash of the
    /// name, and several entries may share one.
    read_at_next: usize,
    /// How many of those to skip after reopening.
    to_skip: usize,
}

impl Level {
    fn new(directory: BorrowedFd<'_>) -> Result<Self, OwnershipError> {
        let (listing, id) = listing(directory, c".")?;
        Ok(Self {
            listing: Some(listing),
            id,
            next: 0,
            read_at_next: 0,
            to_skip: 0,
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
            let Ok(offset) = entry.as_ref().map(DirEntry::offset) else {
                return Some(entry);
            };
            let skip = self.to_skip > 0;
            if offset == self.next {
                // The next entry has the same offset.
                if skip {
                    self.to_skip -= 1;
                } else {
                    self.read_at_next += 1;
                }
            } else {
                self.next = offset;
                self.read_at_next = 0;
                self.to_skip = 0;
            }
            if !skip {
                return Some(entry);
            }
        }
    }

    /// Reopens a closed directory from its child `below`, at the entry that is next.
    fn reopen_from(&mut self, below: BorrowedFd<'_>) -> Result<(), OwnershipError> {
        if self.listing.is_some() {
            return Ok(());
        }
        let (mut listing, id) = listing(below, c"..")?;
        // A process moved `below`: its parent is another directory now.
        if id != self.id {
            let path = path_of(below);
            return Err(OwnershipError::Moved { path });
        }
        listing
            .seek(self.next)
            .map_err(failed(below, "read the parent directory of"))?;
        self.to_skip = self.read_at_next;
        self.listing = Some(listing);
        Ok(())
    }
}

/// Opens `name`, `.` or `..`, in `directory`, possibly an `O_PATH` descriptor, for
/// reading. Also returns its device and inode.
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

fn magic_link(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

fn path_of(file: BorrowedFd<'_>) -> PathBuf {
    fs::read_link(magic_link(file)).unwrap_or_default()
}

fn failed(file: BorrowedFd<'_>, doing: &'static str) -> impl FnOnce(Errno) -> OwnershipError {
    move |error| OwnershipError::Io {
        path: path_of(file),
        doing,
        source: error.into(),
    }
}

#[cfg(test)]
mod tests;
