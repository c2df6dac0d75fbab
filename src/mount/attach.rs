//! A new mount of a device: fsopen(2), fsconfig(2), fsmount(2), move_mount(2).
//!
//! The mount exists, with all its attributes, before it appears at its path. The errors
//! name each rejected option, because options are set one by one, and the file system
//! writes its reason to the context's own log. A bad superblock or an I/O error gives an
//! errno only; its message is in the kernel's log.
//!
//! **A device that is mounted already** shares its superblock with the new mount,
//! and the kernel then silently ignores the new options. So if the device was in
//! exclusive use before, [`mount`] keeps the new mount only if the requested options are
//! in force.
//!
//! Every such mount is `nosuid` and `nodev`.
//!
//! No descriptor outlives the call: an open one would keep the mount busy.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FileType, Mode, OFlags, open, stat},
    io::{Errno, read},
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create,
        fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount,
    },
};

use super::{
    Mounted, PathKind,
    options::MountOptions,
    path::SafePath,
    table,
    unmount::{UnmountError, unmount},
};
use crate::{Kind, kernel::busy::retry_while_busy};

/// The parameters of a mount.
#[derive(Clone, Copy, Debug)]
pub struct NewMount<'a> {
    /// The file system's type, as in `/proc/filesystems`.
    pub fs_type: &'a str,
    /// The block device's node, or the directory of a server.
    pub source: &'a Path,
    /// The options of the request.
    pub options: &'a MountOptions,
    /// Superblock options that the driver adds, `key` or `key=value`.
    pub extra: &'a [&'a str],
    /// Makes both the superblock and the mount read-only, whatever the options say.
    pub read_only: bool,
}

/// Why nothing was mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel lacks the file system.
    ///
    /// Remedy: `modprobe FS_TYPE` on this node.
    #[error("the kernel has no file system {fs_type:?} (needed for {device:?}); load its module")]
    Unsupported { fs_type: String, device: PathBuf },
    /// The file system rejects an option or its value.
    #[error("{device:?} rejects mount option {option:?}: {kernel_says}; correct it")]
    BadOption {
        option: String,
        device: PathBuf,
        kernel_says: String,
    },
    /// The device is in exclusive use, is mounted elsewhere with the other read-only setting,
    /// or is mounted by another node, as its MMP block shows.
    ///
    /// Remedy: find the other user (`lsof DEVICE`, `uringctl volumes` on each node), and end it.
    #[error(
        "device {device:?} is in use, or mounted elsewhere with a different read-only setting, or \
         its ext4 has the feature mmp and another node has it mounted"
    )]
    Busy { device: PathBuf },
    /// The device is mounted elsewhere, and its superblock keeps the options of that mount.
    #[error(
        "device {device:?} is mounted elsewhere without the option {missing:?}; unmount it there, \
         or request the same options"
    )]
    OtherOptions { device: PathBuf, missing: String },
    /// The device is mounted elsewhere without an option, and the new mount could not be removed.
    ///
    /// Remedy: unmount the path by hand (`umount PATH`) once nothing uses it.
    #[error("{path:?} is mounted with other options than requested, and cannot be unmounted")]
    UndoFailed {
        path: PathBuf,
        #[source]
        source: UnmountError,
    },
    /// The device has a copy of a mounted btrfs, and the kernel mounts each UUID once. Linux
    /// 6.7 and later give the second a temporary UUID while it is mounted (`temp_fsid`).
    #[error(
        "device {device:?} is a copy of a btrfs that is mounted here, and Linux before 6.7 mounts \
         only one of them; unmount the other, or use the copy on another node"
    )]
    DuplicateUuid { device: PathBuf },
    /// A writable mount, or the replay of a journal, of a read-only device.
    #[error(
        "device {device:?} is write-protected; mount it read-only, and writable once before \
         that if its journal is to be replayed"
    )]
    WriteProtected { device: PathBuf },
    /// The device holds another file system or a damaged one, or (on kernels before 6.8) an
    /// option is unknown.
    #[error(
        "{device:?} holds no {fs_type} that can be mounted with these options: {kernel_says}; \
         the kernel log says what is wrong with it: correct the options, repair the file \
         system while nothing uses it, or restore the volume"
    )]
    BadSuperblock {
        fs_type: String,
        device: PathBuf,
        kernel_says: String,
    },
    /// No address of the server accepts a connection.
    ///
    /// Remedy: repair the server or the network: `rpcinfo -t SERVER nfs`, or a connection to port
    /// 2049.
    #[error("the server of {remote} does not answer")]
    NoServer {
        /// The directory of the server.
        remote: String,
        source: io::Error,
    },
    /// The server or the kernel's client refuses the directory.
    #[error(
        "cannot mount {remote}{}; export it to this node, and correct server, share, subDir and \
         the mount options", in_parentheses(.kernel_says)
    )]
    Remote {
        /// The directory of the server.
        remote: String,
        kernel_says: String,
        source: io::Error,
    },
    /// The kernel keeps the options of a mounted file system.
    ///
    /// Remedy: unstage the volume on this node first; the next stage sets its options.
    #[error("the file system at {path:?} keeps its options while it is mounted: {why}")]
    Fixed { path: PathBuf, why: String },
    /// A file system that is to become read-only is written.
    #[error(
        "the file system at {path:?} cannot become read-only while files on it are open for \
         writing; close them"
    )]
    OpenForWriting { path: PathBuf },
    /// A directory cannot be mounted on a file, nor a file on a directory.
    ///
    /// Remedy: remove what is at the path, or publish elsewhere; block volumes take a file, file
    /// systems a directory.
    #[error("cannot mount {what} on {path:?}, which is {found}")]
    WrongTarget {
        path: PathBuf,
        found: &'static str,
        what: &'static str,
    },
    /// Any other failure of a system call.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the call is repeated.
    #[error("cannot {doing} {path:?}{}", in_parentheses(.kernel_says))]
    Io {
        doing: &'static str,
        path: PathBuf,
        kernel_says: String,
        #[source]
        source: io::Error,
    },
}

impl MountError {
    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::BadOption { .. } => Kind::Invalid,
            Self::Busy { .. } | Self::OpenForWriting { .. } => Kind::InUse,
            Self::OtherOptions { .. }
            | Self::DuplicateUuid { .. }
            | Self::WriteProtected { .. }
            | Self::BadSuperblock { .. }
            | Self::Fixed { .. }
            | Self::Unsupported { .. } => Kind::Precondition,
            Self::Remote { source, .. } => match source.raw_os_error() {
                Some(
                    libc::EACCES
                    | libc::EPERM
                    | libc::ENOENT
                    | libc::EINVAL
                    | libc::EPROTONOSUPPORT
                    | libc::ENOTDIR,
                ) => Kind::Precondition,
                _ => Kind::Transient,
            },
            Self::NoServer { .. }
            | Self::UndoFailed { .. }
            | Self::WrongTarget { .. }
            | Self::Io { .. } => Kind::Transient,
        }
    }

    /// Whether the server lacks the requested version of its protocol.
    pub fn is_other_version(&self) -> bool {
        matches!(self, Self::Remote { source, .. } if source.raw_os_error() == Some(libc::EPROTONOSUPPORT))
    }
}

/// Mounts `new` at `at`, on top of any mount there. Reads and writes the device, and
/// can hang with it.
pub fn mount(new: &NewMount<'_>, at: &SafePath) -> Result<Mounted, MountError> {
    let made = Made::new(new)?;
    let looked = PathKind::of(made.mount.as_fd());
    let looked = looked.map_err(failed("look at the new mount for", at))?;
    let PathKind::Mount(mounted) = looked else {
        unreachable!(
            "a detached mount is the root of one, not {}",
            looked.describe()
        );
    };
    made.move_to(mounted.directory, at)?;
    Ok(mounted)
}

/// [`mount`] of a file system whose root is always a directory, and is not looked at.
pub fn mount_directory(new: &NewMount<'_>, at: &SafePath) -> Result<(), MountError> {
    Made::new(new)?.move_to(true, at)
}

/// A mount that is at no path yet.
struct Made<'a> {
    new: &'a NewMount<'a>,
    mount: OwnedFd,
    /// Its device was mounted already.
    shared: bool,
}

impl<'a> Made<'a> {
    fn new(new: &'a NewMount<'a>) -> Result<Self, MountError> {
        // The superblock of a device that is mounted already has all options if none is asked for.
        let shared = new.options.fs_options().len() > 0 && is_in_exclusive_use(new.source);
        let is_busy = |made: &Result<_, MountError>| matches!(made, Err(MountError::Busy { .. }));
        let mount = retry_while_busy(|| create(new), is_busy)?;
        Ok(Self { new, mount, shared })
    }

    /// Moves it to `at`. `directory`: whether its root is one.
    fn move_to(self, directory: bool, at: &SafePath) -> Result<(), MountError> {
        let Self { new, mount, shared } = self;
        move_to(&mount, directory, at)?;
        drop(mount);
        if shared && let Some(missing) = not_in_force(new.options, at)? {
            let path = at.path().to_owned();
            let _ = unmount(at).map_err(|source| MountError::UndoFailed { path, source })?;
            let device = new.source.to_owned();
            return Err(MountError::OtherOptions { device, missing });
        }
        Ok(())
    }
}

/// Moves a detached mount, of a directory or of a file, to `at`, on top of any mount there.
pub(super) fn move_to(mount: &OwnedFd, directory: bool, at: &SafePath) -> Result<(), MountError> {
    if !directory {
        // The kernel would mount it on a symlink, too.
        refuse_other_kind(directory, at)?;
    }
    // Without MOVE_MOUNT_T_SYMLINKS it follows no symlink at the name.
    let from = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    let moved = move_mount(mount, "", at.parent(), at.name(), from);
    moved.or_else(|error| {
        refuse_other_kind(directory, at)?;
        Err(failed("mount on", at)(error.into()))
    })
}

/// Refuses a target that is neither a directory nor a file as the mount is.
fn refuse_other_kind(directory: bool, at: &SafePath) -> Result<(), MountError> {
    let found = at.kind().map_err(failed("look at", at))?;
    let fits = match found {
        PathKind::Dir => directory,
        PathKind::File => !directory,
        PathKind::Mount(below) => below.directory == directory,
        // The kernel says so.
        PathKind::Absent => true,
        PathKind::Block(_) | PathKind::Other(_) => false,
    };
    if fits {
        return Ok(());
    }
    Err(MountError::WrongTarget {
        path: at.path().to_owned(),
        found: found.describe(),
        what: if directory { "a directory" } else { "a file" },
    })
}

/// A failure at a mount point.
pub(super) fn failed(doing: &'static str, at: &SafePath) -> impl FnOnce(io::Error) -> MountError {
    let path = at.path().to_owned();
    move |source| MountError::Io {
        doing,
        path,
        kernel_says: String::new(),
        source,
    }
}

/// Makes a detached mount.
fn create(new: &NewMount<'_>) -> Result<OwnedFd, MountError> {
    let device = || new.source.to_owned();
    let failed = |doing| {
        move |error: Errno| MountError::Io {
            doing,
            path: device(),
            kernel_says: String::new(),
            source: error.into(),
        }
    };
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    let context = match fsopen(new.fs_type, FsOpenFlags::FSOPEN_CLOEXEC) {
        Ok(context) => context,
        Err(Errno::NODEV) => {
            return Err(MountError::Unsupported {
                fs_type: new.fs_type.to_owned(),
                device: device(),
            });
        }
        Err(error) => return Err(failed("open a mount context for")(error)),
    };
    fsconfig_set_string(&context, "source", new.source).map_err(failed("set the source"))?;
    for option in new.options.fs_options() {
        set(&context, new, &option.key, option.value.as_deref())?;
    }
    for option in new.extra {
        match option.split_once('=') {
            Some((key, value)) => set(&context, new, key, Some(value))?,
            None => set(&context, new, option, None)?,
        }
    }
    // Pods see only bind mounts of this mount: here no file needs setuid or device nodes,
    // whatever the options allow on targets.
    let mut attributes = new.options.attributes().set
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    if new.read_only {
        attributes |= MountAttrFlags::MOUNT_ATTR_RDONLY;
    }
    if attributes.contains(MountAttrFlags::MOUNT_ATTR_RDONLY) {
        set(&context, new, "ro", None)?;
    }
    fsconfig_create(&context).map_err(|error| not_created(error, &log(context.as_fd()), new))?;
    let cloexec = FsMountFlags::FSMOUNT_CLOEXEC;
    fsmount(&context, cloexec, attributes).map_err(failed("make a mount of"))
}

/// Sets one option of the superblock.
fn set(
    context: &OwnedFd,
    new: &NewMount<'_>,
    key: &str,
    value: Option<&str>,
) -> Result<(), MountError> {
    let result = match value {
        Some(value) => fsconfig_set_string(context, key, value),
        None => fsconfig_set_flag(context, key),
    };
    result.map_err(|error| MountError::BadOption {
        option: value.map_or_else(|| key.to_owned(), |value| format!("{key}={value}")),
        device: new.source.to_owned(),
        kernel_says: log_or_errno(error, &log(context.as_fd())),
    })
}

/// Classifies a failure of `FSCONFIG_CMD_CREATE`.
fn not_created(error: Errno, log: &str, new: &NewMount<'_>) -> MountError {
    let device = new.source.to_owned();
    match error {
        error if new.fs_type == "nfs" => MountError::Remote {
            remote: device.to_string_lossy().into_owned(),
            kernel_says: log.to_owned(),
            source: error.into(),
        },
        Errno::BUSY => MountError::Busy { device },
        Errno::EXIST if new.fs_type == "btrfs" => MountError::DuplicateUuid { device },
        Errno::ROFS | Errno::ACCESS => MountError::WriteProtected { device },
        // ext4 and XFS answer UCLEAN for corruption, BADMSG for a wrong checksum.
        Errno::INVAL | Errno::UCLEAN | Errno::BADMSG => MountError::BadSuperblock {
            fs_type: new.fs_type.to_owned(),
            device,
            kernel_says: log_or_errno(error, log),
        },
        error => MountError::Io {
            doing: "mount",
            path: device,
            kernel_says: log.to_owned(),
            source: error.into(),
        },
    }
}

/// Whether the block device is open exclusively, as by a superblock. `false` also where
/// the check fails: then the mount fails, too, with its error.
fn is_in_exclusive_use(device: &Path) -> bool {
    let is_block = stat(device)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice);
    let exclusive = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    let open_exclusive = || open(device, exclusive, Mode::empty()).err();
    is_block
        && retry_while_busy(open_exclusive, |error| *error == Some(Errno::BUSY))
            == Some(Errno::BUSY)
}

/// The first requested superblock option that is not in force.
fn not_in_force(requested: &MountOptions, at: &SafePath) -> Result<Option<String>, MountError> {
    let shown = at.open().and_then(|it| table::super_options(it.as_fd()));
    let shown = shown.map_err(failed("read the mount options of", at))?;
    // If the kernel's text cannot be parsed, no requested option counts as in force.
    let shown = MountOptions::parse(&[shown]).unwrap_or_default();
    let mut missing = requested.fs_options().filter(|option| !shown.has(option));
    Ok(missing.next().map(ToString::to_string))
}

/// The messages in the context's log, fsopen(2): each begins with its severity and a
/// space.
pub(super) fn log(context: BorrowedFd<'_>) -> String {
    let mut messages = Vec::new();
    let mut buffer = [0u8; 4096];
    while let Ok(length @ 1..) = read(context, &mut buffer) {
        let message = String::from_utf8_lossy(&buffer[..length]);
        let message = message.trim_end();
        messages.push(
            message
                .split_once(' ')
                .map_or(message, |(_, text)| text)
                .to_owned(),
        );
    }
    messages.join("; ")
}

pub(super) fn log_or_errno(error: Errno, log: &str) -> String {
    if log.is_empty() {
        io::Error::from(error).to_string()
    } else {
        log.to_owned()
    }
}

fn in_parentheses(kernel: &str) -> String {
    if kernel.is_empty() {
        String::new()
    } else {
        format!(" ({kernel})")
    }
}

#[cfg(test)]
mod tests;
