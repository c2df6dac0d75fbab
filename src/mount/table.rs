//! The mount table. That of this process is read by listmount(2) and statmount(2), where
//! the kernel has them and reports the source of each mount (Linux 6.16 and later), else
//! from mountinfo; that of another process from its mountinfo.
//!
//! Reading it takes time in proportion to the number of mounts. It serves the agent's
//! start, listings and the search for openers; the mount at one path is found by
//! [`SafePath::kind`](super::path::SafePath::kind).

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

use rustix::fs::{CWD, Mode, OFlags, openat};

use super::MountId;
use crate::kernel::{
    Dev,
    mounts::{StatMount, listmount, wants},
};

pub(super) mod mountinfo;

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// The id in mountinfo; another mount may get it after this one is gone.
    pub id: u32,
    /// The id of the mount that this one is on.
    pub parent: u32,
    /// The superblock's device, st_dev; btrfs has an anonymous one.
    pub dev: Dev,
    /// The mounted part of the file system: `/`, or the source of a bind mount.
    pub root: PathBuf,
    /// Its mount point, relative to the reader's root directory.
    pub mount_point: PathBuf,
    /// The type, with its subtype: `ext4`, `fuse.sshfs`.
    pub fs_type: String,
    /// The device's path, or any other source; `none` without one.
    pub source: OsString,
    /// Whether the mount or the superblock is read-only.
    pub read_only: bool,
    /// Whether the mount itself is read-only. A superblock also becomes read-only by
    /// errors.
    pub own_read_only: bool,
    /// The group of its peers, possibly in other namespaces, to which mounts below it propagate;
    /// none if they do not.
    pub peer_group: Option<u32>,
}

/// Every mount in the calling thread's mount namespace below its root directory.
pub fn list() -> io::Result<Vec<MountEntry>> {
    match by_statmount()? {
        Some(entries) => Ok(entries),
        None => by_mountinfo(OWN_MOUNTINFO),
    }
}

/// Every mount that the process sees. `NotFound` where the process has ended.
pub fn of_process(pid: u32) -> io::Result<Vec<MountEntry>> {
    by_mountinfo(&format!("/proc/{pid}/mountinfo"))
}

/// The mount that contains `at`, possibly an `O_PATH` descriptor. `NotFound` where the
/// mount is not reachable from this process's root directory.
pub fn covering(at: BorrowedFd<'_>) -> io::Result<MountEntry> {
    // A file system that has shut down has no unique id; fdinfo has the classic one.
    if let Ok(MountId::Unique(id)) = MountId::covering(at)
        && let Stat::Complete(entry) = stat(id)?
    {
        return Ok(entry);
    }
    let id = MountId::classic_covering(at)?;
    let entries = by_mountinfo(OWN_MOUNTINFO)?;
    let found = entries.into_iter().find(|entry| entry.id == id);
    found.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The superblock options of the mount that contains `at`, as the file system shows
/// them: most leave out their defaults.
pub fn super_options(at: BorrowedFd<'_>) -> io::Result<String> {
    let id = MountId::classic_covering(at)?;
    let lines = mountinfo::parse(&fs::read(OWN_MOUNTINFO)?)?;
    let line = lines.into_iter().find(|line| line.entry.id == id);
    line.map(|line| line.super_options)
        .ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Whether the mount that contains `path` propagates mounts below it.
fn is_shared(path: &Path) -> io::Result<bool> {
    let here = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    Ok(covering(here.as_fd())?.peer_group.is_some())
}

/// Whether pods can see this process's mounts below `path`: its mount namespace is that
/// of process 1, or the mount that contains `path` is shared
/// (`mountPropagation: Bidirectional`). Process 1 is the host's only with hostPID.
pub fn propagation_reaches_host(path: &Path) -> io::Result<bool> {
    // Comparing /proc/PID/ns/mnt requires permission to trace process 1. A mount is in
    // one namespace only, and the ids in mountinfo are unique in the whole system.
    let theirs = of_process(1)?;
    let ours = by_mountinfo(OWN_MOUNTINFO)?;
    let same = ours
        .iter()
        .any(|our| theirs.iter().any(|their| their.id == our.id));
    Ok(same || is_shared(path)?)
}

/// The calling thread's mountinfo: a thread may have a mount namespace of its own.
const OWN_MOUNTINFO: &str = "/proc/thread-self/mountinfo";

/// The fields of statmount(2) that a [`MountEntry`] needs.
const ALL_FIELDS: u64 = wants::SB_BASIC
    | wants::MNT_BASIC
    | wants::MNT_ROOT
    | wants::MNT_POINT
    | wants::FS_TYPE
    | wants::FS_SUBTYPE
    | wants::SB_SOURCE
    | wants::SUPPORTED_MASK;

enum Stat {
    Complete(MountEntry),
    /// The mount is gone by now, or not below this process's root directory.
    NotVisible,
    /// The kernel lacks a field, or a seccomp filter forbids the call.
    Unsupported,
}

fn by_mountinfo(path: &str) -> io::Result<Vec<MountEntry>> {
    let lines = mountinfo::parse(&fs::read(path)?)?;
    Ok(lines.into_iter().map(|line| line.entry).collect())
}

/// `None` where the kernel does not report every field.
fn by_statmount() -> io::Result<Option<Vec<MountEntry>>> {
    let ids = match listmount() {
        Ok(ids) => ids,
        Err(error) if is_missing(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut entries = Vec::with_capacity(ids.len());
    for id in ids {
        match stat(id)? {
            Stat::Complete(entry) => entries.push(entry),
            Stat::NotVisible => {}
            Stat::Unsupported => return Ok(None),
        }
    }
    Ok(Some(entries))
}

fn is_missing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM))
}

fn stat(unique_id: u64) -> io::Result<Stat> {
    let stat = match StatMount::read(unique_id, ALL_FIELDS) {
        Ok(stat) => stat,
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(Stat::NotVisible),
        Err(error) if is_missing(&error) => return Ok(Stat::Unsupported),
        Err(error) => return Err(error),
    };
    // A mount without a source has no text here, whether the kernel knows the field or
    // not.
    if stat.supported() & wants::SB_SOURCE == 0 {
        return Ok(Stat::Unsupported);
    }
    let path = |text: Option<&OsStr>| text.filter(|path| !path.is_empty()).map(PathBuf::from);
    let (Some(root), Some(mount_point)) = (path(stat.root()), path(stat.mount_point())) else {
        return Ok(Stat::NotVisible);
    };
    let mut fs_type = stat
        .fs_type()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    if let Some(subtype) = stat.fs_subtype() {
        fs_type.push('.');
        fs_type.push_str(&subtype.to_string_lossy());
    }
    Ok(Stat::Complete(MountEntry {
        id: stat.id(),
        parent: stat.parent(),
        dev: stat.dev(),
        root,
        mount_point,
        fs_type,
        source: stat.source().unwrap_or(OsStr::new("none")).to_owned(),
        read_only: stat.read_only(),
        own_read_only: stat.own_read_only(),
        peer_group: stat.peer_group(),
    }))
}

#[cfg(test)]
mod tests {
    use rustix::mount::{
        MountFlags, MountPropagationFlags, mount, mount_bind, mount_change, mount_remount,
    };

    use super::*;
    use crate::mount::testing::MountScratch;

    fn tmpfs(at: &Path, source: &str) {
        mount(source, at, "tmpfs", MountFlags::empty(), None).expect("tmpfs");
    }

    fn shared(at: &Path) {
        mount_change(at, MountPropagationFlags::SHARED).expect("shared");
    }

    #[test]
    fn both_sources_agree() {
        let scratch = MountScratch::new();
        // Longer than the first buffer for statmount.
        let long = "x".repeat(3000);
        for (name, source) in [
            ("a b\tc\\d\n#e", "x y#"),
            ("é", "none"),
            ("no source", ""),
            ("long", &long),
        ] {
            tmpfs(scratch.directory(name).path(), source);
        }
        let file = scratch.place("file");
        let _ = file.make_file(0o600).expect("made");
        mount_bind("/dev/loop-control", file.path()).expect("bound");
        shared(scratch.place("é").path());
        let read_only = MountFlags::BIND | MountFlags::RDONLY;
        mount_remount(scratch.place("no source").path(), read_only, "").expect("remounted");

        let old = by_mountinfo(OWN_MOUNTINFO).expect("listed");
        if let Some(new) = by_statmount().expect("listed") {
            assert_eq!(new, old);
        }
        assert_eq!(list().expect("listed"), old);
        assert!(
            old.iter().any(|entry| entry.mount_point == file.path()
                && entry.root == Path::new("/loop-control"))
        );
    }

    #[test]
    fn the_mount_that_covers_a_place_is_found() {
        let scratch = MountScratch::new();
        let place = scratch.directory("m");
        tmpfs(place.path(), "the source");
        let below = scratch.place("m/below");
        let _ = below.make_dir(0o700).expect("made");
        let found = covering(below.open().expect("opens").as_fd()).expect("found");
        assert_eq!(found.mount_point, place.path());
        assert_eq!(found.source, "the source");
        assert!(
            by_mountinfo(OWN_MOUNTINFO)
                .expect("listed")
                .contains(&found)
        );
    }

    #[test]
    fn mounts_reach_the_host_through_a_shared_mount_only() {
        let scratch = MountScratch::new();
        let place = scratch.directory("m");
        tmpfs(place.path(), "none");
        let below = place.path().join("below");
        fs::create_dir(&below).expect("created");
        assert!(!propagation_reaches_host(&below).expect("read"));
        shared(place.path());
        assert!(propagation_reaches_host(&below).expect("read"));
    }

    #[test]
    fn another_process_has_its_own_table() {
        let mine = of_process(std::process::id()).expect("read");
        assert!(mine.iter().any(|entry| entry.mount_point == Path::new("/")));
        let error = of_process(u32::MAX).expect_err("no such process");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
