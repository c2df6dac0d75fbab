//! Unmounting: never lazily, never by force, never through a symlink.
//!
//! umount2(2) takes paths only. As the parent directory is held open,
//! `/proc/self/fd/N/name` with `UMOUNT_NOFOLLOW` names the mount that was checked, even if
//! a directory above it is moved.
//!
//! Success does not mean that the superblock is gone: another mount of it, here or
//! in another namespace, keeps it and its device.

use std::{
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

use rustix::{
    io::Errno,
    mount::{UnmountFlags, unmount as umount2},
};

use super::{
    PathKind,
    path::SafePath,
    users::{OpenerProcess, users},
};
use crate::{Done, Kind, kernel::busy::retry_while_busy};

/// Why the unmount failed.
#[derive(Debug, thiserror::Error)]
pub enum UnmountError {
    /// The mount is in use.
    ///
    /// Remedy: end what the message names (`fuser --mount PATH` lists the processes).
    #[error("{path:?} is in use: {}", describe(users))]
    Busy {
        /// The mount point.
        path: PathBuf,
        /// The processes that use it, as far as they could be found.
        users: Vec<OpenerProcess>,
    },
    /// Any other failure of umount2(2).
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the call is repeated.
    #[error("cannot unmount {path:?}")]
    Io {
        /// The mount point.
        path: PathBuf,
        /// The error of umount2(2).
        #[source]
        source: io::Error,
    },
}

impl UnmountError {
    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Busy { .. } => Kind::InUse,
            Self::Io { .. } => Kind::Transient,
        }
    }
}

fn describe(users: &[OpenerProcess]) -> String {
    if users.is_empty() {
        return "a mount is below it, or a process that was not found has a file of it open"
            .to_owned();
    }
    let users: Vec<_> = users.iter().map(OpenerProcess::to_string).collect();
    format!("{} has a file or directory of it open", users.join(", "))
}

/// Unmounts the mount at `at`, the topmost of several. Unmounting the last mount of a
/// superblock writes it out: this can hang with the device. Retries a transient `EBUSY`.
pub fn unmount(at: &SafePath) -> Result<Done, UnmountError> {
    let done = retry_while_busy(
        || unmount_once(at),
        |result| matches!(result, Err(UnmountError::Busy { .. })),
    );
    done.map_err(|error| match (error, at.kind()) {
        (UnmountError::Busy { path, .. }, Ok(PathKind::Mount(mounted))) => UnmountError::Busy {
            path,
            users: users(mounted.id),
        },
        (error, _) => error,
    })
}

fn unmount_once(at: &SafePath) -> Result<Done, UnmountError> {
    let failed = |source| UnmountError::Io {
        path: at.path().to_owned(),
        source,
    };
    let parent = format!("/proc/self/fd/{}", at.parent().as_raw_fd());
    let path = Path::new(&parent).join(at.name());
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    match umount2(&path, UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(Done::Now),
        // Nothing is mounted there, or nothing is there.
        Err(Errno::INVAL | Errno::NOENT) if !is_mount(at).map_err(failed)? => Ok(Done::Already),
        Err(Errno::BUSY) => Err(UnmountError::Busy {
            path: at.path().to_owned(),
            users: Vec::new(),
        }),
        Err(error) => Err(failed(error.into())),
    }
}

fn is_mount(at: &SafePath) -> io::Result<bool> {
    Ok(matches!(at.kind()?, PathKind::Mount(_)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::mount::{MountFlags, mount};

    use super::*;
    use crate::mount::testing::MountScratch;

    fn tmpfs(at: &Path) {
        mount("none", at, "tmpfs", MountFlags::empty(), None).expect("tmpfs");
    }

    #[test]
    fn unmount_removes_the_topmost_mount_and_is_idempotent() {
        let scratch = MountScratch::new();
        let place = scratch.directory("a name with spaces");
        assert_eq!(unmount(&place).expect("nothing"), Done::Already);
        for layer in ["one", "two", "three"] {
            tmpfs(place.path());
            File::create(place.path().join(layer)).expect("created");
        }
        assert_eq!(unmount(&place).expect("unmounted"), Done::Now);
        assert!(place.path().join("two").exists());
        while unmount(&place).expect("unmounted") == Done::Now {}
        assert_eq!(place.kind().expect("looks"), PathKind::Dir);
    }

    #[test]
    fn a_mount_in_use_is_busy() {
        let scratch = MountScratch::new();
        let place = scratch.directory("m");
        tmpfs(place.path());
        let used = File::create(place.path().join("file")).expect("created");
        let error = unmount(&place).expect_err("busy");
        assert!(matches!(error, UnmountError::Busy { .. }), "{error}");
        let process = format!("process {} (", std::process::id());
        assert!(error.to_string().contains(&process), "{error}");
        drop(used);
        assert_eq!(unmount(&place).expect("unmounted"), Done::Now);
    }

    #[test]
    fn a_symlink_to_a_mount_is_not_followed() {
        let scratch = MountScratch::new();
        let mounted = scratch.directory("mounted");
        tmpfs(mounted.path());
        std::os::unix::fs::symlink(mounted.path(), scratch.path().join("link")).expect("linked");
        assert_eq!(
            unmount(&scratch.place("link")).expect("no mount"),
            Done::Already
        );
        assert!(matches!(mounted.kind().expect("looks"), PathKind::Mount(_)));
    }

    #[test]
    fn a_renamed_parent_does_not_matter() {
        let scratch = MountScratch::new();
        scratch.directory("parent/m");
        let place = scratch.place("parent/m");
        tmpfs(place.path());
        std::fs::rename(scratch.path().join("parent"), scratch.path().join("moved"))
            .expect("renamed");
        assert_eq!(unmount(&place).expect("unmounted"), Done::Now);
    }
}
