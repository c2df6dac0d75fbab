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
    /// How many of the entries that are at `next` were read. On ext4 an entry is where
    /// the hash of its name says, and several may be at one place.
    read_at_next: usize,
    /// How many of them are told of once more, since it was opened again.
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
                // The next one is where this one is.
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
        self.to_skip = self.read_at_next;
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
mod tests;
