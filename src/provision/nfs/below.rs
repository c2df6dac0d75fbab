//! Paths below a directory, walked without symlinks (openat2(2)): nodes mount parts of a
//! share for writing, and a pod may put a symlink wherever it can write.

use std::{
    ffi::{CStr, CString},
    fs, io,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
};

use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{
        Dir, Mode, OFlags, RenameFlags, ResolveFlags, mkdirat, openat, openat2, renameat,
        renameat_with,
    },
    io::Errno,
    path::Arg,
};

const BELOW: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS);

/// Opens a path below `root`.
pub fn open(
    root: &OwnedFd,
    path: impl AsRef<Path>,
    flags: OFlags,
    mode: Mode,
) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC;
    Ok(openat2(root.as_fd(), path.as_ref(), flags, mode, BELOW)?)
}

/// The directory below `root`; an empty path is `root` itself.
pub fn walk(root: &OwnedFd, path: impl AsRef<Path>) -> io::Result<OwnedFd> {
    let path = Some(path.as_ref()).filter(|path| *path != Path::new(""));
    let path = path.unwrap_or(Path::new("."));
    open(root, path, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())
}

/// The last directory of a path that is there, and whether that is all of the path.
pub fn deepest(root: &OwnedFd, path: &str) -> io::Result<(OwnedFd, bool)> {
    let mut at = walk(root, "")?;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        match absent_is_none(walk(&at, name))? {
            Some(next) => at = next,
            None => return Ok((at, false)),
        }
    }
    Ok((at, true))
}

/// Whether the directory is there.
pub fn has(root: &OwnedFd, path: &str) -> io::Result<bool> {
    Ok(absent_is_none(walk(root, path))?.is_some())
}

/// Makes the directories of a path that are missing, and opens the last.
pub fn make(root: &OwnedFd, path: &str, mode: u32) -> io::Result<OwnedFd> {
    let mut at = walk(root, "")?;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        match mkdirat(&at, name, Mode::from_raw_mode(mode)) {
            Ok(()) | Err(Errno::EXIST) => at = walk(&at, name)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(at)
}

/// Makes a directory's entries and mode durable.
pub fn sync(dir: &OwnedFd) -> io::Result<()> {
    let opened = open(dir, ".", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
    fs::File::from(opened).sync_all()
}

/// Opens a directory to read its entries.
pub fn open_dir(at: impl AsFd, name: &CStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at, name, flags, Mode::empty())
}

/// The next entry but `.` and `..`.
pub fn next_name(dir: &mut Dir) -> rustix::io::Result<Option<CString>> {
    loop {
        match dir.read() {
            None => return Ok(None),
            Some(entry) => {
                let entry = entry?;
                let name = entry.file_name();
                if name != c"." && name != c".." {
                    return Ok(Some(name.to_owned()));
                }
            }
        }
    }
}

/// The entries of a directory but `.` and `..`.
pub fn names(dir: &OwnedFd) -> io::Result<Vec<CString>> {
    let mut entries = Dir::new(open_dir(dir, c".")?)?;
    let mut all = Vec::new();
    while let Some(name) = next_name(&mut entries)? {
        all.push(name);
    }
    Ok(all)
}

/// Renames an entry to a name that is not there.
pub fn rename(
    from: &OwnedFd,
    name: impl Arg + Copy,
    to: &OwnedFd,
    new_name: &str,
) -> io::Result<()> {
    match renameat_with(from, name, to, new_name, RenameFlags::NOREPLACE) {
        // NFS has no such rename; only this controller renames volumes.
        Err(Errno::INVAL) => Ok(renameat(from, name, to, new_name)?),
        renamed => Ok(renamed?),
    }
}

/// The path of a name in an open directory, for calls that take paths. The name must be one
/// that no pod can have made a symlink.
pub fn path_of(at: &OwnedFd, name: impl AsRef<Path>) -> PathBuf {
    Path::new("/proc/self/fd")
        .join(at.as_raw_fd().to_string())
        .join(name)
}

/// The first name, and the path below it.
pub fn split_first(path: &str) -> (&str, &str) {
    path.split_once('/').unwrap_or((path, ""))
}

/// The parent, empty for the share itself, and the last name.
pub fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

pub fn absent_is_none<T>(walked: io::Result<T>) -> io::Result<Option<T>> {
    match walked {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        walked => walked.map(Some),
    }
}
