//! Paths from requests, resolved without following a symlink.
//!
//! A pod may own directories below kubelet's and put symlinks there. So only the
//! allowed roots (kubelet's directory and each `--allow-path`) may be symlinks;
//! they are resolved once, at start. The rest of a path is walked by openat2(2)
//! with `RESOLVE_NO_SYMLINKS` and `RESOLVE_NO_MAGICLINKS` to the PARENT of its last name;
//! every later call takes that name with the parent's descriptor. The path has no `..`
//! either, so the walk, which begins with the root's names, cannot leave the root.
//!
//! ```text
//!   /var/lib/kubelet / pods/UID/volumes/kubernetes.io~csi/pvc-1 / mount
//!   └─ a root ─────┘                                              └ name ┘
//!   └─ openat2: the parent's descriptor ──────────────────────┘
//! ```
//!
//! [`Roots`] keeps no descriptor of a root, as it would keep the root's mount busy; a
//! [`SafePath`] is made for one call and dropped with it.

use std::{
    ffi::{CString, OsStr, OsString},
    fs::File,
    io::{self, Read as _, Write as _},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{
        AtFlags, CWD, Dir, Mode, OFlags, ResolveFlags, mkdirat, openat, openat2, renameat, statat,
        unlinkat,
    },
    io::Errno,
};

use super::{Mounted, PathKind};
use crate::{Done, crash_point};

mod error;

pub(crate) use error::PathError;

/// Bytes that [`SafePath::read`] reads at most.
const MAX_FILE: u64 = 64 << 10;

/// Follows no link, wherever it is in a path.
const NO_LINKS: ResolveFlags = ResolveFlags::NO_SYMLINKS.union(ResolveFlags::NO_MAGICLINKS);

/// Bytes of a name in a directory (`NAME_MAX`).
const LONGEST_NAME: usize = 255;

/// The directories below which volumes may be mounted.
#[derive(Clone, Debug)]
pub struct Roots(Arc<[Root]>);

#[derive(Clone, Debug)]
struct Root {
    /// The path as configured, and as kubelet passes it.
    given: PathBuf,
    /// The path with symlinks resolved.
    real: PathBuf,
    /// Whether nobody but the orchestrator and this agent mounts below it.
    is_for_volumes: bool,
}

/// A name in a directory that is held open.
#[derive(Clone, Debug)]
pub struct SafePath {
    path: PathBuf,
    name: OsString,
    parent: Arc<OwnedFd>,
}

impl Roots {
    /// Resolves the directories, which must exist, and are the orchestrator's or this agent's.
    pub fn new(directories: &[PathBuf]) -> Result<Self, PathError> {
        let roots = Self::resolved(directories, true)?;
        Ok(Self(roots.into()))
    }

    /// With these as well, in which the administrator may have mounts.
    pub fn with_allowed(self, directories: &[PathBuf]) -> Result<Self, PathError> {
        let allowed = Self::resolved(directories, false)?;
        Ok(Self(self.0.iter().cloned().chain(allowed).collect()))
    }

    fn resolved(directories: &[PathBuf], is_for_volumes: bool) -> Result<Vec<Root>, PathError> {
        let root = |given: &PathBuf| {
            let failed = |source| PathError::Io {
                path: given.clone(),
                doing: "resolve the allowed directory",
                source,
            };
            if !given.is_absolute() {
                return Err(PathError::NotAbsolute(given.display().to_string()));
            }
            let real = given.canonicalize().map_err(failed)?;
            if !real.is_dir() {
                return Err(failed(Errno::NOTDIR.into()));
            }
            let given = given.components().collect();
            Ok(Root {
                given,
                real,
                is_for_volumes,
            })
        };
        directories.iter().map(root).collect()
    }

    /// Resolves `path`. Its parent must exist; its last name need not.
    pub fn resolve(&self, path: &str) -> Result<SafePath, PathError> {
        let requested = normalized(path)?;
        let (root, below) = self.innermost_root(&requested)?;
        let path = root.join(below);
        let (Some(parent), Some(name)) = (path.parent(), below.file_name()) else {
            unreachable!("innermost_root() leaves at least one name below the root");
        };
        let parent = match walk(parent) {
            Ok(parent) => parent,
            Err(Errno::NOENT | Errno::NOTDIR) => return Err(PathError::MissingParent { path }),
            Err(Errno::LOOP | Errno::XDEV) => return Err(PathError::Symlink { path }),
            Err(error) => {
                let doing = "open the parent directory of";
                return Err(PathError::new(path, doing, error.into()));
            }
        };
        Ok(SafePath {
            path,
            name: name.to_owned(),
            parent: Arc::new(parent),
        })
    }

    /// An `O_PATH` descriptor of the file at `path`, where the kernel gets there without
    /// waiting for a disk (openat2(2), `RESOLVE_CACHED`). None also for any path that
    /// [`Roots::resolve`] refuses.
    pub fn open_cached(&self, path: &Path) -> Option<OwnedFd> {
        let path = normalized(path.to_str()?).ok()?;
        let (root, below) = self.innermost_root(&path).ok()?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let cached = NO_LINKS | ResolveFlags::CACHED;
        openat2(CWD, root.join(below), flags, Mode::empty(), cached).ok()
    }

    /// An `O_PATH` descriptor of the file at `path`, which the kernel reaches as in
    /// [`Roots::resolve`]; `None` where it does not exist.
    pub fn open(&self, path: &Path) -> Result<Option<OwnedFd>, PathError> {
        let requested = normalized(&path.to_string_lossy())?;
        let (root, below) = self.innermost_root(&requested)?;
        let path = root.join(below);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat2(CWD, &path, flags, Mode::empty(), NO_LINKS) {
            Ok(opened) => Ok(Some(opened)),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(Errno::LOOP | Errno::XDEV) => Err(PathError::Symlink { path }),
            Err(error) => Err(PathError::new(path, "open", error.into())),
        }
    }

    /// Whether the path is below one of the roots.
    pub fn has(&self, path: &Path) -> bool {
        self.innermost_root(path).is_ok()
    }

    /// Whether nobody but the orchestrator and this agent mounts where the path is.
    pub fn is_for_volumes(&self, path: &Path) -> bool {
        let mut own = self.0.iter().filter(|root| root.is_for_volumes);
        own.any(|root| path.starts_with(&root.given) || path.starts_with(&root.real))
    }

    /// The path with its root's symlinks resolved, as in [`SafePath::path`] and the mount
    /// table. A path below no root is returned unchanged.
    pub fn canonical(&self, path: &Path) -> PathBuf {
        match self.innermost_root(path) {
            Ok((root, below)) => root.join(below),
            Err(_) => path.to_owned(),
        }
    }

    /// The innermost root that contains `path`, and the path relative to it.
    fn innermost_root<'a>(&'a self, path: &'a Path) -> Result<(&'a Path, &'a Path), PathError> {
        let below = |root: &'a Root| {
            let rest = path.strip_prefix(&root.given);
            let rest = rest.or_else(|_| path.strip_prefix(&root.real)).ok()?;
            rest.file_name().map(|_| (root.real.as_path(), rest))
        };
        let outside = || PathError::Outside {
            path: path.to_owned(),
            roots: self.0.iter().map(|root| root.given.clone()).collect(),
        };
        let innermost = self.0.iter().filter_map(below);
        innermost
            .min_by_key(|(_, rest)| rest.components().count())
            .ok_or_else(outside)
    }
}

impl SafePath {
    /// The path with its root's symlinks resolved, as in the mount table.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The current kind of the file there. Never blocks on a device.
    pub fn kind(&self) -> io::Result<PathKind> {
        match PathKind::at(self.parent(), &self.name) {
            Err(Errno::NOENT) => Ok(PathKind::Absent),
            // An XFS that has shut down: the mount table shows more.
            Err(Errno::IO) => PathKind::of(self.open()?.as_fd()),
            // A mounted directory that its server has lost, which cannot be opened.
            Err(Errno::STALE) => Ok(PathKind::stale(&self.path)?.ok_or(Errno::STALE)?),
            found => Ok(found?),
        }
    }

    /// Whether the mount there, or its superblock, is read-only.
    pub fn is_read_only(&self, mounted: &Mounted) -> io::Result<bool> {
        mounted.is_read_only(self.open()?.as_fd())
    }

    /// An `O_PATH` descriptor; of a symlink, the symlink itself. While it is open, a mount
    /// there cannot be unmounted.
    pub fn open(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.parent, &self.name, flags, Mode::empty())?)
    }

    /// Makes a directory with `mode` (less the umask). Leaves an existing one, mounted on or
    /// not, unchanged.
    pub fn make_dir(&self, mode: u32) -> Result<Done, PathError> {
        let new = mkdirat(&self.parent, &self.name, Mode::from_raw_mode(mode));
        crash_point();
        match new {
            Ok(()) => Ok(Done::Now),
            Err(Errno::EXIST) => match self.checked_kind()? {
                PathKind::Dir => Ok(Done::Already),
                PathKind::Mount(mounted) if mounted.directory => Ok(Done::Already),
                found => Err(self.wrong_kind(found, "a directory")),
            },
            Err(error) => Err(self.failed("make the directory", error)),
        }
    }

    /// Makes an empty file with `mode` (less the umask), the target of a device node. Leaves
    /// an existing one, mounted on or not, unchanged.
    pub fn make_file(&self, mode: u32) -> Result<Done, PathError> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        let new = openat(&self.parent, &self.name, flags, Mode::from_raw_mode(mode));
        crash_point();
        match new {
            Ok(_) => Ok(Done::Now),
            Err(Errno::EXIST) => match self.checked_kind()? {
                PathKind::File => Ok(Done::Already),
                PathKind::Mount(mounted) if !mounted.directory => Ok(Done::Already),
                found => Err(self.wrong_kind(found, "a file")),
            },
            Err(error) => Err(self.failed("make the file", error)),
        }
    }

    /// Refuses a directory or file that is not empty: a mount on it would hide its data.
    pub fn refuse_content(&self) -> Result<(), PathError> {
        let has_content = match self.checked_kind()? {
            PathKind::Dir => self.has_others(&[])?,
            PathKind::File => self.file_size()? != 0,
            PathKind::Absent | PathKind::Mount(_) | PathKind::Block(_) | PathKind::Other(_) => {
                false
            }
        };
        if has_content {
            return Err(PathError::NotEmpty {
                path: self.path.clone(),
            });
        }
        Ok(())
    }

    /// Whether the directory has an entry of another name than these.
    pub fn has_others(&self, names: &[&str]) -> Result<bool, PathError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let entries = openat(&self.parent, &self.name, flags, Mode::empty()).and_then(Dir::new);
        let entries = entries.map_err(|error| self.failed("read", error))?;
        let entries = entries.map(|entry| Ok(entry?.file_name().to_owned()));
        let is_named = |name: &CString| names.iter().any(|it| it.as_bytes() == name.as_bytes());
        any_name(entries.filter(|name| !name.as_ref().is_ok_and(is_named)))
            .map_err(|error| self.failed("read", error))
    }

    fn file_size(&self) -> Result<i64, PathError> {
        statat(&self.parent, &self.name, AtFlags::SYMLINK_NOFOLLOW)
            .map(|stat| stat.st_size)
            .map_err(|error| self.failed("look at", error))
    }

    /// Removes an empty directory or an empty file, and refuses any other, which is user data.
    pub fn remove(&self) -> Result<Done, PathError> {
        self.remove_kind(self.checked_kind()?)
    }

    /// As [`SafePath::remove`], of a file that was just seen to be of this kind.
    pub fn remove_kind(&self, kind: PathKind) -> Result<Done, PathError> {
        let path = || self.path.clone();
        let flags = match kind {
            PathKind::Absent => return Ok(Done::Already),
            PathKind::Dir => AtFlags::REMOVEDIR,
            PathKind::File => {
                if self.file_size()? != 0 {
                    return Err(PathError::NotEmpty { path: path() });
                }
                AtFlags::empty()
            }
            PathKind::Mount(_) => return Err(PathError::Mounted { path: path() }),
            found @ (PathKind::Block(_) | PathKind::Other(_)) => {
                return Err(self.wrong_kind(found, "an empty directory or file"));
            }
        };
        match unlinkat(&self.parent, &self.name, flags) {
            Ok(()) => Ok(Done::Now),
            Err(Errno::NOENT) => Ok(Done::Already),
            Err(Errno::NOTEMPTY | Errno::EXIST) => Err(PathError::NotEmpty { path: path() }),
            Err(Errno::BUSY) => Err(PathError::Mounted { path: path() }),
            Err(error) => Err(self.failed("remove", error)),
        }
    }

    /// Reads the file, at most 64 KiB; `None` where it does not exist.
    pub fn read(&self) -> Result<Option<Vec<u8>>, PathError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&self.parent, &self.name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(self.failed("open", error)),
        };
        let mut bytes = Vec::new();
        let read = file.take(MAX_FILE).read_to_end(&mut bytes);
        read.map_err(|error| self.io("read", error))?;
        Ok(Some(bytes))
    }

    /// Replaces the file, readable by root only, atomically and durably. Blocks as long as
    /// the disk does.
    pub fn replace(&self, bytes: &[u8]) -> Result<(), PathError> {
        let draft = self.draft();
        let written = self.write_and_rename(&draft, bytes);
        if written.is_err() {
            let _ = unlinkat(&self.parent, &draft, AtFlags::empty());
        }
        written
    }

    fn write_and_rename(&self, draft: &OsStr, bytes: &[u8]) -> Result<(), PathError> {
        let flags = OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY | OFlags::NOFOLLOW;
        let opened = openat(
            &self.parent,
            draft,
            flags | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o600),
        );
        let mut file = File::from(opened.map_err(|error| self.failed("write", error))?);
        file.write_all(bytes)
            .and_then(|()| file.sync_all())
            .map_err(|error| self.io("write", error))?;
        crash_point();
        renameat(&self.parent, draft, &self.parent, &self.name)
            .map_err(|error| self.failed("write", error))
    }

    /// Where [`SafePath::replace`] writes the new content.
    fn draft(&self) -> OsString {
        let mut draft = OsString::from(".");
        draft.push(&self.name);
        draft
    }

    /// Removes a file, whatever its content, and what a killed [`SafePath::replace`] left.
    pub fn unlink(&self) -> Result<Done, PathError> {
        let remove = |name: &OsStr| match unlinkat(&self.parent, name, AtFlags::empty()) {
            Ok(()) => Ok(Done::Now),
            Err(Errno::NOENT) => Ok(Done::Already),
            Err(error) => Err(self.failed("remove", error)),
        };
        let _ = remove(&self.draft())?;
        remove(&self.name)
    }

    /// The parent directory.
    pub(super) fn parent(&self) -> BorrowedFd<'_> {
        self.parent.as_fd()
    }

    /// The name in the parent directory.
    pub(super) fn name(&self) -> &OsStr {
        &self.name
    }

    fn checked_kind(&self) -> Result<PathKind, PathError> {
        self.kind().map_err(|error| self.io("look at", error))
    }

    fn failed(&self, doing: &'static str, error: Errno) -> PathError {
        self.io(doing, error.into())
    }

    fn io(&self, doing: &'static str, source: io::Error) -> PathError {
        PathError::new(self.path.clone(), doing, source)
    }

    fn wrong_kind(&self, found: PathKind, wanted: &'static str) -> PathError {
        PathError::WrongKind {
            path: self.path.clone(),
            found: found.describe(),
            wanted,
        }
    }
}

/// The path without `.` and repeated slashes.
fn normalized(path: &str) -> Result<PathBuf, PathError> {
    let given = Path::new(path);
    if !given.is_absolute() || path.contains('\0') {
        return Err(PathError::NotAbsolute(path.to_owned()));
    }
    if given.components().any(|part| part == Component::ParentDir) {
        return Err(PathError::DotDot(path.to_owned()));
    }
    let given: PathBuf = given.components().collect();
    if given.iter().any(|name| name.len() > LONGEST_NAME) {
        return Err(PathError::TooLong { path: given });
    }
    Ok(given)
}

/// Whether a directory has any name but its own two. Reads no further than it must: there may
/// be millions.
fn any_name<E>(mut names: impl Iterator<Item = Result<CString, E>>) -> Result<bool, E> {
    let is_own = |name: &CString| [c".", c".."].contains(&name.as_c_str());
    let first = names.find(|name| !name.as_ref().is_ok_and(is_own));
    Ok(first.transpose()?.is_some())
}

/// Opens a directory. The path is absolute, without `..`, and no symlink is followed, so
/// that it leads below the root that it begins with.
fn walk(directory: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat2(CWD, directory, flags, Mode::empty(), NO_LINKS)
}

#[cfg(test)]
mod tests;
