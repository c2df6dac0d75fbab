//! Copies of directories with all that is in them: owners, modes, extended attributes,
//! times, hard links, symlinks, holes and special files.
//!
//! Each file is copied by reference where the file system can do that, else its data. Pods
//! may write meanwhile, so a copy shows no single point in time, and what vanishes during
//! the copy is left out. They may also put a symlink or a device where a file was: entries
//! are opened by descriptors of their parents, and only regular files for reading. They may
//! nest directories until no process has the descriptors for all of them: a copy fails of
//! paths longer than programs can use, and of directories for which this process has too few
//! descriptors besides those of its other work.

use std::{
    collections::{HashMap, hash_map::Entry},
    ffi::{CStr, OsStr},
    fs::File,
    io,
    os::{fd::AsRawFd as _, unix::ffi::OsStrExt as _},
    path::{Path, PathBuf},
};

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{
        AtFlags, Dir, FileType, Gid, Mode, OFlags, Stat, Statx, StatxFlags, Timespec, Timestamps,
        Uid, XattrFlags, chmod, chownat, fchmod, fchown, fgetxattr, flistxattr, fsetxattr, fstat,
        futimens, linkat, mkdirat, mknodat, openat, readlinkat, statat, statx, symlinkat, syncfs,
        unlinkat, utimensat,
    },
    io::Errno,
    process::{Resource, geteuid, getrlimit},
};

use super::{
    below::{self, next_name, open_dir},
    memory::{KeptMemory, MOST_MEMORY},
    removal,
};
use crate::{
    crash_point,
    provision::{copy, images::RunningCopy},
};

/// The size of a directory with all that is in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeSize {
    /// Of its files, holes included.
    pub bytes: u64,
    /// What it takes on the disk.
    pub allocated: u64,
}

/// An entry that could not be copied.
#[derive(Debug)]
pub struct TreeError {
    /// Below the directory.
    pub path: PathBuf,
    pub source: io::Error,
}

/// What all hard links of a file have in common. A device and an inode are not enough: a new
/// file may have the inode of one that was removed since.
#[derive(Debug, PartialEq, Eq, Hash)]
struct LinkedFile {
    device: (u32, u32),
    inode: u64,
    proof: SameFile,
}

/// What two files of one inode differ in.
#[derive(Debug, PartialEq, Eq, Hash)]
enum SameFile {
    /// When it was made, in seconds and nanoseconds.
    Born(i64, u32),
    /// Its size and when it was written, where the file system has no birth time.
    Written(u64, i64, u32),
}

impl LinkedFile {
    /// With the number of its names.
    fn read(at: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<(Self, u32)> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        statx(at, name, flags, wanted).map(|it| (Self::new(&it), it.stx_nlink))
    }

    fn new(it: &Statx) -> Self {
        let (born, written) = (it.stx_btime, it.stx_mtime);
        let has_birth = StatxFlags::from_bits_retain(it.stx_mask).contains(StatxFlags::BTIME);
        Self {
            device: (it.stx_dev_major, it.stx_dev_minor),
            inode: it.stx_ino,
            proof: if has_birth {
                SameFile::Born(born.tv_sec, born.tv_nsec)
            } else {
                SameFile::Written(it.stx_size, written.tv_sec, written.tv_nsec)
            },
        }
    }
}

/// The files of a tree that have several names, until all of these were seen.
struct TreeLinks {
    first: HashMap<LinkedFile, FirstLink>,
    memory: KeptMemory,
}

/// The first name of a file that was seen.
struct FirstLink {
    path: PathBuf,
    /// How many of its names were.
    seen: u32,
}

impl TreeLinks {
    fn new(memory: KeptMemory) -> Self {
        Self {
            first: HashMap::new(),
            memory,
        }
    }

    fn first(&self, file: &LinkedFile) -> Option<&Path> {
        self.first.get(file).map(|first| &*first.path)
    }

    /// Counts one more name of a file that has so many now; whether it is the first.
    fn see(&mut self, file: LinkedFile, names: u32, path: &Path) -> io::Result<bool> {
        match self.first.entry(file) {
            Entry::Vacant(new) => {
                self.memory.take(path)?;
                let path = path.to_owned();
                new.insert(FirstLink { path, seen: 1 });
                Ok(true)
            }
            Entry::Occupied(mut known) => {
                known.get_mut().seen += 1;
                if known.get().seen >= names {
                    self.memory.give_back(&known.remove().path);
                }
                Ok(false)
            }
        }
    }

    /// Forgets the files whose first names are below that path.
    fn forget(&mut self, path: &Path) {
        self.first.retain(|_, first| {
            let is_kept = !first.path.starts_with(path);
            if !is_kept {
                self.memory.give_back(&first.path);
            }
            is_kept
        });
    }
}

/// Adds up a directory.
pub fn measure(from: &OwnedFd) -> io::Result<TreeSize> {
    measure_within(from, KeptMemory::new(MOST_MEMORY), most_levels())
}

fn measure_within(from: &OwnedFd, memory: KeptMemory, deepest: usize) -> io::Result<TreeSize> {
    let mut size = TreeSize::default();
    let mut links = TreeLinks::new(memory);
    // With the lengths of their paths.
    let mut levels = vec![(Dir::new(open_dir(from.as_fd(), c".")?)?, 0)];
    while let Some((level, length)) = levels.last_mut() {
        let Some(name) = unless_gone(next_name(level))?.flatten() else {
            levels.pop();
            continue;
        };
        // With a slash before all but the first.
        let length = *length + usize::from(*length > 0) + name.count_bytes();
        refuse_longer_path(length)?;
        let at = level.fd()?;
        let Some(stat) = unless_gone(statat(at, &name, AtFlags::SYMLINK_NOFOLLOW))? else {
            continue;
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind != FileType::Directory && stat.st_nlink > 1 {
            let Some((file, names)) = unless_gone(LinkedFile::read(at, &name))? else {
                continue;
            };
            if !links.see(file, names, Path::new(""))? {
                continue;
            }
        }
        size.allocated += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        if kind == FileType::RegularFile {
            size.bytes += u64::try_from(stat.st_size).unwrap_or(0);
        } else if kind == FileType::Directory
            && let Some(opened) = unless_gone(open_dir(at, &name).and_then(Dir::new))?
        {
            levels.push((opened, length));
            refuse_deeper(levels.len(), deepest)?;
        }
    }
    Ok(size)
}

/// Copies what is in `from` into the empty directory `to`, and its attributes. The copy is
/// durable.
pub fn copy(from: &OwnedFd, to: &OwnedFd, running: &RunningCopy) -> Result<(), TreeError> {
    let memory = KeptMemory::new(MOST_MEMORY);
    copy_within(from, to, running, memory, most_levels())
}

fn copy_within(
    from: &OwnedFd,
    to: &OwnedFd,
    running: &RunningCopy,
    memory: KeptMemory,
    deepest: usize,
) -> Result<(), TreeError> {
    let top = |source| TreeError {
        path: PathBuf::new(),
        source,
    };
    let mut copy = TreeCopy::new(to, running, memory);
    let first = TreeLevel::enter(from.as_fd(), to.as_fd()).map_err(top)?;
    let mut levels = vec![first];
    while let Some(level) = levels.last_mut() {
        let name = match next_name(&mut level.from) {
            Ok(Some(name)) => name,
            ended => {
                let last = levels.pop().expect("there is one");
                let left = ended.map_err(io::Error::from);
                let left = match (left.and_then(|_| copy.leave(&last)), levels.last()) {
                    (Err(error), Some(above)) if is_stale(&error) => copy.forget(above, &last.path),
                    (left, _) => left,
                };
                left.map_err(|source| TreeError {
                    path: last.path,
                    source,
                })?;
                continue;
            }
        };
        crash_point();
        running.report();
        let path = level.path.join(OsStr::from_bytes(name.to_bytes()));
        let entry = refuse_longer_path(path.as_os_str().len());
        match entry.and_then(|()| copy.entry(level, &name, &path)) {
            Ok(None) => {}
            Ok(Some(below)) => match refuse_deeper(levels.len() + 1, deepest) {
                Ok(()) => levels.push(TreeLevel { path, ..below }),
                Err(source) => return Err(TreeError { path, source }),
            },
            Err(source) => return Err(TreeError { path, source }),
        }
    }
    let synced = open_dir(to.as_fd(), c".").and_then(syncfs);
    synced.map_err(|errno| top(errno.into()))
}

/// A copy under way.
struct TreeCopy<'c> {
    root: &'c OwnedFd,
    running: &'c RunningCopy,
    /// The copies of files that have several names, by their originals.
    links: TreeLinks,
    /// Until a file could not be copied by reference.
    has_references: bool,
    /// For extended attributes.
    buffer: Vec<u8>,
}

/// A directory whose entries are being copied.
struct TreeLevel {
    from: Dir,
    to: OwnedFd,
    /// Below the root.
    path: PathBuf,
}

impl TreeLevel {
    fn enter(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self {
            from: Dir::new(open_dir(from, c".")?)?,
            to: open_dir(to, c".")?,
            path: PathBuf::new(),
        })
    }
}

impl<'c> TreeCopy<'c> {
    fn new(root: &'c OwnedFd, running: &'c RunningCopy, memory: KeptMemory) -> Self {
        Self {
            root,
            running,
            links: TreeLinks::new(memory),
            has_references: true,
            buffer: vec![0; MOST_XATTR],
        }
    }

    /// Gives a directory its attributes, which the making of entries changes.
    fn leave(&mut self, level: &TreeLevel) -> io::Result<()> {
        let from = level.from.fd()?;
        self.attributes(from, level.to.as_fd(), &fstat(from)?)
    }

    /// Copies an entry; the entries of a directory are to follow. If a server replaces it
    /// meanwhile, this copies what then has its name.
    fn entry(
        &mut self,
        level: &TreeLevel,
        name: &CStr,
        path: &Path,
    ) -> io::Result<Option<TreeLevel>> {
        for _ in 0..MOST_CHANGES {
            match self.begin(level, name, path) {
                Err(error) if is_stale(&error) => self.forget(level, path)?,
                done => return done,
            }
        }
        Err(io::Error::other("it is replaced again and again"))
    }

    /// Removes what was made of an entry.
    fn forget(&mut self, level: &TreeLevel, path: &Path) -> io::Result<()> {
        self.links.forget(path);
        let name = path.file_name().expect("an entry has a name");
        match unlinkat(&level.to, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::ISDIR) => removal::remove(&level.to, name).map(drop),
            Err(errno) => Err(errno.into()),
        }
    }

    fn begin(
        &mut self,
        level: &TreeLevel,
        name: &CStr,
        path: &Path,
    ) -> io::Result<Option<TreeLevel>> {
        let (from, to) = (level.from.fd()?, level.to.as_fd());
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Some(opened) = unless_gone(openat(from, name, flags, Mode::empty()))? else {
            return Ok(None);
        };
        let stat = fstat(&opened)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            mkdirat(to, name, Mode::RWXU)?;
            let made = open_dir(to, name)?;
            return TreeLevel::enter(opened.as_fd(), made.as_fd()).map(Some);
        }
        let linked = match stat.st_nlink {
            0 | 1 => None,
            _ => Some(LinkedFile::read(opened.as_fd(), c"")?),
        };
        if let Some((file, _)) = &linked
            && let Some(first) = self.links.first(file)
        {
            let parent = first.parent().unwrap_or(Path::new(""));
            let parent = below::walk(self.root, parent)?;
            let last = first.file_name().expect("an entry has a name");
            link(&parent, last, to, name)?;
        } else if !self.make(&opened, &stat, to, name)? {
            return Ok(None);
        }
        if let Some((file, names)) = linked {
            let _ = self.links.see(file, names, path)?;
        }
        Ok(None)
    }

    /// Makes the copy of what is no directory; false if it is gone.
    fn make(
        &mut self,
        from: &OwnedFd,
        stat: &Stat,
        to: BorrowedFd<'_>,
        name: &CStr,
    ) -> io::Result<bool> {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let file = match reopen(from) {
                    Err(Errno::NOENT) => return Ok(false),
                    file => file?,
                };
                self.file(&File::from(file), to, name)?;
            }
            FileType::Symlink => {
                let target = readlinkat(from, c"", Vec::new())?;
                symlinkat(&*target, to, name)?;
                owner_and_times(to, name, stat)?;
            }
            kind => {
                mknodat(to, name, kind, Mode::RUSR, stat.st_rdev)?;
                owner_and_times(to, name, stat)?;
                let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let made = openat(to, name, flags, Mode::empty())?;
                // There is no fchmod of such a descriptor before Linux 6.6.
                chmod(of_descriptor(&made), Mode::from_raw_mode(stat.st_mode))?;
            }
        }
        Ok(true)
    }

    fn file(&mut self, from: &File, to: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let made = openat(to, name, flags, Mode::RUSR | Mode::WUSR)?;
        let made = File::from(made);
        self.has_references = self.has_references && copy::reflink(from, &made)?;
        if self.has_references {
            self.running.advance(from.metadata()?.len());
        } else {
            self.data(from, &made)?;
        }
        self.attributes(from.as_fd(), made.as_fd(), &fstat(from)?)
    }

    /// Copies the data of a file, which may be truncated meanwhile.
    fn data(&self, from: &File, to: &File) -> io::Result<()> {
        let advanced = |bytes| self.running.advance(bytes);
        let may_continue = || {
            self.running.report();
            Ok(true)
        };
        for _ in 0..MOST_CHANGES {
            let len = from.metadata()?.len();
            match copy::sparse(from, to, len, &advanced, may_continue) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => to.set_len(0)?,
                done => return done.map(drop),
            }
        }
        Err(io::Error::other("it is truncated again and again"))
    }

    /// Owner first: a change of it clears mode bits and capabilities.
    fn attributes(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        stat: &Stat,
    ) -> io::Result<()> {
        let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
        fchown(to, Some(uid), Some(gid))?;
        fchmod(to, Mode::from_raw_mode(stat.st_mode))?;
        self.xattrs(from, to)?;
        Ok(futimens(to, &times(stat))?)
    }

    fn xattrs(&mut self, from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
        let listed = match flistxattr(from, &mut self.buffer[..]) {
            Err(Errno::OPNOTSUPP) => return Ok(()),
            listed => listed?,
        };
        let names = self.buffer[..listed].to_vec();
        for name in names.split_inclusive(|byte| *byte == 0) {
            let name = CStr::from_bytes_with_nul(name).map_err(io::Error::other)?;
            if NOT_COPIED.contains(&name) {
                continue;
            }
            match fgetxattr(from, name, &mut self.buffer[..]) {
                // Removed meanwhile.
                Err(Errno::NODATA) => {}
                read => fsetxattr(to, name, &self.buffer[..read?], XattrFlags::empty())?,
            }
        }
        Ok(())
    }
}

/// Attributes that the file system of the copy sets itself: a label by the policy there, and
/// a list of NFS that repeats the mode.
const NOT_COPIED: [&CStr; 2] = [c"security.selinux", c"system.nfs4_acl"];

/// The most bytes of an extended attribute, and of the list of their names (xattr(7)).
const MOST_XATTR: usize = 64 << 10;

/// How often a file may be truncated or replaced while it is copied.
const MOST_CHANGES: usize = 5;

/// Gives a file one more name. Where the kernel protects hard links
/// (`fs.protected_hardlinks`), only a file's owner, or who has `CAP_FOWNER`, may do that for
/// every file.
fn link(above: &OwnedFd, first: &OsStr, to: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let again = || linkat(above, first, to, name, AtFlags::empty());
    match again() {
        Err(Errno::PERM) => {}
        done => return Ok(done?),
    }
    let of = |user| chownat(above, first, Some(user), None, AtFlags::SYMLINK_NOFOLLOW);
    let stat = statat(above, first, AtFlags::SYMLINK_NOFOLLOW)?;
    of(geteuid())?;
    again()?;
    of(Uid::from_raw(stat.st_uid))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = openat(above, first, flags, Mode::empty())?;
        chmod(of_descriptor(&made), Mode::from_raw_mode(stat.st_mode))?;
    }
    Ok(())
}

fn owner_and_times(at: BorrowedFd<'_>, name: &CStr, stat: &Stat) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
    chownat(at, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(utimensat(
        at,
        name,
        &times(stat),
        AtFlags::SYMLINK_NOFOLLOW,
    )?)
}

#[expect(
    clippy::cast_possible_wrap,
    reason = "nanoseconds are less than 10^9, but have other types elsewhere"
)]
fn times(stat: &Stat) -> Timestamps {
    Timestamps {
        last_access: Timespec {
            tv_sec: stat.st_atime,
            tv_nsec: stat.st_atime_nsec as _,
        },
        last_modification: Timespec {
            tv_sec: stat.st_mtime,
            tv_nsec: stat.st_mtime_nsec as _,
        },
    }
}

/// Opens a regular file for reading.
pub fn reopen(file: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    rustix::fs::open(of_descriptor(file), flags, Mode::empty())
}

pub fn of_descriptor(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// None if the entry was removed after its name was read.
fn unless_gone<T>(result: rustix::io::Result<T>) -> io::Result<Option<T>> {
    match result {
        // The second: a server removed it.
        Err(Errno::NOENT | Errno::STALE) => Ok(None),
        result => Ok(Some(result?)),
    }
}

/// Whether a server removed what is open.
fn is_stale(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::STALE)
}

/// Fails for a path of `length` bytes that system calls do not take.
pub fn refuse_longer_path(length: usize) -> io::Result<()> {
    if length < PATH_MAX {
        return Ok(());
    }
    let why = format!("a path in it has {PATH_MAX} bytes or more");
    Err(io::Error::new(io::ErrorKind::InvalidFilename, why))
}

/// How many directories may be in each other: a copy has two descriptors of each, and takes
/// a quarter of those that this process may have at most.
fn most_levels() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / 8).unwrap_or(usize::MAX)
}

/// Fails for the level of this number, where it is too deep.
fn refuse_deeper(level: usize, deepest: usize) -> io::Result<()> {
    if level <= deepest {
        return Ok(());
    }
    let why = format!(
        "more than {deepest} directories in it are in each other, for which this process may have too few descriptors (RLIMIT_NOFILE)"
    );
    Err(io::Error::new(io::ErrorKind::InvalidFilename, why))
}

/// The most bytes of a path, with the null byte at its end (linux/limits.h).
const PATH_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
        process::Command,
        time::{Duration, SystemTime},
    };

    use rustix::fs::{CWD, getxattr, setxattr};

    use super::{
        super::tests::{opened, running},
        *,
    };
    use crate::Done;

    fn copied(from: &Path, to: &Path) -> Result<TreeSize, TreeError> {
        // As the controller at its start.
        crate::kernel::descriptors::raise().expect("raised");
        let from = opened(from);
        let size = measure(&from).expect("measured");
        copy(&from, &opened(to), &running(size.bytes)).map(|()| size)
    }

    /// What rsync compares, and more.
    fn attributes(path: &Path) -> String {
        let it = fs::symlink_metadata(path).expect("there");
        let changed = (it.mtime(), it.mtime_nsec());
        let mut value = [0; 9];
        let value = match getxattr(path, c"user.key", &mut value) {
            Ok(length) if !it.is_symlink() => String::from_utf8_lossy(&value[..length]).into(),
            _ => String::new(),
        };
        format!(
            "{:o} {}:{} {changed:?} {} {} {} {value:?}",
            it.mode(),
            it.uid(),
            it.gid(),
            it.nlink(),
            it.rdev(),
            if it.is_dir() { 0 } else { it.len() },
        )
    }

    #[test]
    fn a_copy_has_what_the_original_has() {
        let dir = tempfile::tempdir().expect("a directory");
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let odd = Path::new(OsStr::from_bytes(b"n\xff\n"));
        let deep = from.join("a/b").join(odd);
        fs::create_dir_all(&deep).expect("made");
        fs::create_dir(&to).expect("made");
        let file = fs::File::create(from.join("a/sparse")).expect("made");
        file.set_len(9 << 20).expect("grown");
        std::os::unix::fs::FileExt::write_all_at(&file, b"data", 5 << 20).expect("written");
        fs::write(deep.join("file"), "text").expect("written");
        fs::hard_link(deep.join("file"), from.join("link")).expect("linked");
        symlink("/nowhere", from.join("symlink")).expect("linked");
        let fifo = deep.join("fifo");
        assert!(
            Command::new("mkfifo")
                .arg(&fifo)
                .status()
                .expect("run")
                .success()
        );
        for (path, mode) in [
            ("a", 0o2750),
            ("a/sparse", 0o4711),
            ("link", 0o400),
            ("", 0o1777),
        ] {
            let path = from.join(path);
            std::os::unix::fs::chown(&path, Some(1234), Some(77)).expect("owned");
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("set");
            setxattr(&path, c"user.key", b"value", XattrFlags::empty()).expect("set");
        }
        let past = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 5);
        for path in ["a/sparse", "a/b", ""] {
            let opened = fs::File::open(from.join(path)).expect("opened");
            opened.set_modified(past).expect("set");
        }

        let size = copied(&from, &to).expect("copied");
        assert_eq!(size.bytes, (9 << 20) + 4);
        assert!(size.allocated < 9 << 20, "holes take nothing");
        let inner = Path::new("a/b").join(odd);
        for path in [
            Path::new(""),
            Path::new("a"),
            Path::new("a/sparse"),
            Path::new("a/b"),
            &inner,
            &inner.join("file"),
            &inner.join("fifo"),
            Path::new("link"),
            Path::new("symlink"),
        ] {
            assert_eq!(
                attributes(&to.join(path)),
                attributes(&from.join(path)),
                "{path:?}"
            );
        }
        assert_eq!(fs::read(to.join("link")).expect("read"), b"text");
        let target = fs::read_link(to.join("symlink")).expect("a symlink");
        assert_eq!(target, Path::new("/nowhere"));
        let sparse = fs::read(to.join("a/sparse")).expect("read");
        assert_eq!(sparse, fs::read(from.join("a/sparse")).expect("read"));
        let taken = fs::metadata(to.join("a/sparse")).expect("there").blocks() * 512;
        assert!(taken < 1 << 20, "{taken}");
        let link = fs::metadata(to.join("link")).expect("there").ino();
        let same = fs::metadata(to.join(inner).join("file")).expect("there");
        assert_eq!(link, same.ino());
    }

    #[test]
    fn a_tree_of_any_depth_is_copied_and_an_error_names_its_entry() {
        let dir = tempfile::tempdir().expect("a directory");
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let mut deep = from.clone();
        deep.extend(["d"; 300]);
        fs::create_dir_all(&deep).expect("made");
        fs::write(deep.join("file"), "text").expect("written");
        fs::create_dir(&to).expect("made");
        copied(&from, &to).expect("copied");
        let copy = to.join(deep.strip_prefix(&from).expect("below"));
        assert_eq!(fs::read(copy.join("file")).expect("read"), b"text");

        let error = copied(&from, &to).expect_err("it is there");
        assert_eq!(error.path, Path::new("d"));
        assert_eq!(error.source.kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn hard_links_are_kept_in_memory_until_the_last_and_within_a_bound() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |path: String| dir.path().join(path);
        let [from, outside] = ["from", "outside"].map(|name| at(name.to_owned()));
        fs::create_dir(&outside).expect("made");
        for number in 0..20 {
            fs::create_dir_all(from.join(number.to_string())).expect("made");
            fs::write(at(format!("from/{number}/a")), "text").expect("written");
            let link = at(format!("from/{number}/b"));
            fs::hard_link(at(format!("from/{number}/a")), link).expect("linked");
        }
        let two = KeptMemory::new(400);
        let copied = |name: &str| {
            let to = at(name.to_owned());
            fs::create_dir(&to).expect("made");
            let copied = copy_within(&opened(&from), &opened(&to), &running(0), two, usize::MAX);
            copied.map_err(|error| error.source.kind())
        };
        let measured = measure_within(&opened(&from), two, usize::MAX).expect("one at a time");
        assert_eq!(measured.bytes, 80);
        copied("to").expect("one at a time");
        for number in 0..20 {
            let made = fs::metadata(at(format!("to/{number}/a"))).expect("there");
            assert_eq!(made.nlink(), 2);
        }
        // Names that no copy comes to.
        for number in 0..20 {
            let link = at(format!("from/{number}/b"));
            fs::rename(link, outside.join(number.to_string())).expect("moved");
        }
        let measured = measure_within(&opened(&from), two, usize::MAX).expect_err("too many");
        assert_eq!(measured.kind(), io::ErrorKind::InvalidData);
        assert_eq!(copied("refused"), Err(io::ErrorKind::InvalidData));
    }

    #[test]
    fn a_path_longer_than_a_path_may_be_is_refused() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir(&from).expect("made");
        fs::create_dir(&to).expect("made");
        let mut at = opened(&from);
        for _ in 0..=PATH_MAX / 2 {
            mkdirat(&at, c"d", Mode::RWXU).expect("made");
            at = open_dir(at.as_fd(), c"d").expect("opened");
        }
        let (source, target) = (opened(&from), opened(&to));
        let measured = measure(&source).expect_err("it is too deep");
        assert_eq!(measured.kind(), io::ErrorKind::InvalidFilename);
        let copied = copy(&source, &target, &running(0)).expect_err("it is too deep");
        assert_eq!(copied.source.kind(), io::ErrorKind::InvalidFilename);
        for name in ["from", "to"] {
            let removed = removal::remove(&opened(dir.path()), name);
            assert_eq!(removed.expect("removed"), Done::Now);
        }
    }

    #[test]
    fn directories_that_take_too_many_descriptors_are_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("from/1/2/3")).expect("made");
        let memory = || KeptMemory::new(MOST_MEMORY);
        for (deepest, is_enough) in [(3, false), (4, true)] {
            let measured = measure_within(&opened(&at("from")), memory(), deepest);
            let to = at(&deepest.to_string());
            fs::create_dir(&to).expect("made");
            let (from, to) = (opened(&at("from")), opened(&to));
            let copied = copy_within(&from, &to, &running(0), memory(), deepest);
            let refused = [measured.err(), copied.err().map(|error| error.source)];
            for refused in refused {
                let is_refused = refused.is_some_and(|error| {
                    assert!(error.to_string().contains("RLIMIT_NOFILE"), "{error}");
                    error.kind() == io::ErrorKind::InvalidFilename
                });
                assert_eq!(is_refused, !is_enough);
            }
        }
    }

    #[test]
    fn a_file_with_the_inode_of_a_removed_one_is_no_link() {
        let dir = tempfile::tempdir().expect("a directory");
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir(&from).expect("made");
        fs::create_dir(&to).expect("made");
        fs::write(from.join("a"), "old").expect("written");
        fs::hard_link(from.join("a"), from.join("link")).expect("linked");
        let (source, root, running) = (opened(&from), opened(&to), running(0));
        let mut copy = TreeCopy::new(&root, &running, KeptMemory::new(MOST_MEMORY));
        let level = TreeLevel::enter(source.as_fd(), root.as_fd()).expect("opened");
        let mut entry = |name: &CStr| {
            let path = Path::new(OsStr::from_bytes(name.to_bytes()));
            let below = copy.entry(&level, name, path).expect("copied");
            assert!(below.is_none());
        };
        entry(c"a");
        // A file of the same inode that is none of the links.
        fs::remove_file(from.join("link")).expect("removed");
        fs::rename(from.join("a"), from.join("b")).expect("renamed");
        fs::write(from.join("b"), "new").expect("written");
        entry(c"b");
        let read = |name: &str| fs::read_to_string(to.join(name)).expect("read");
        assert_eq!((&*read("a"), &*read("b")), ("old", "new"));

        let looked = statx(CWD, &from, AtFlags::empty(), StatxFlags::BASIC_STATS);
        let looked = looked.expect("there");
        let id = |mask: StatxFlags, born, size, written| {
            let mut it = looked;
            it.stx_mask = mask.bits();
            (it.stx_btime.tv_sec, it.stx_size, it.stx_mtime.tv_nsec) = (born, size, written);
            LinkedFile::new(&it)
        };
        let (birth, none) = (StatxFlags::BTIME, StatxFlags::empty());
        assert_eq!(id(birth, 1, 1, 1), id(birth, 1, 2, 2), "it was written to");
        assert_ne!(id(birth, 1, 1, 1), id(birth, 2, 1, 1));
        assert_eq!(id(none, 1, 1, 1), id(none, 2, 1, 1));
        assert_ne!(id(none, 1, 1, 1), id(none, 1, 2, 1));
        assert_ne!(id(none, 1, 1, 1), id(none, 1, 1, 2));
    }

    #[test]
    fn what_was_made_of_a_removed_entry_is_no_file_to_link_to() {
        let dir = tempfile::tempdir().expect("a directory");
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir_all(from.join("d")).expect("made");
        fs::create_dir(&to).expect("made");
        fs::write(from.join("d/file"), "text").expect("written");
        fs::hard_link(from.join("d/file"), from.join("link")).expect("linked");
        let (source, root, running) = (opened(&from), opened(&to), running(0));
        let mut copy = TreeCopy::new(&root, &running, KeptMemory::new(MOST_MEMORY));
        let level = TreeLevel::enter(source.as_fd(), root.as_fd()).expect("opened");
        let below = copy.entry(&level, c"d", Path::new("d")).expect("copied");
        let below = below.expect("a directory");
        let file = Path::new("d/file");
        assert!(copy.entry(&below, c"file", file).expect("copied").is_none());
        assert!(to.join(file).exists());
        for _ in 0..2 {
            copy.forget(&level, Path::new("d")).expect("removed");
            assert!(!to.join("d").exists());
        }
        let link = Path::new("link");
        assert!(copy.entry(&level, c"link", link).expect("copied").is_none());
        assert_eq!(fs::read(to.join(link)).expect("read"), b"text");
        copy.forget(&level, link).expect("removed");
        assert!(!to.join(link).exists());
    }
}
