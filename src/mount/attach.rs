//! A new mount of a device: fsopen(2), fsconfig(2), fsmount(2), move_mount(2).
//!
//! The mount exists, with all its attributes, before it appears at its place, and
//! each refused option is known by name: the file system writes its reason to the
//! context's own log. A bad superblock or an I/O error is told by errno alone,
//! with the words in the kernel's log.
//!
//! **A device that is mounted already** shares its superblock with the new mount,
//! and the kernel then passes over the new options in silence. Where the device
//! was claimed before we came, the new mount is kept only if the options that
//! were asked for are shown to be in force.
//!
//! Every such mount is `nosuid` and `nodev`.
//!
//! No descriptor outlives the call: an open one of the mount would make it busy.

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
use crate::{Kind, kernel::busy::outwait};

/// What to mount.
#[derive(Clone, Copy, Debug)]
pub struct NewMount<'a> {
    /// The file system's type, as in `/proc/filesystems`.
    pub fs_type: &'a str,
    /// The block device's node.
    pub source: &'a Path,
    /// What the user asked for.
    pub options: &'a MountOptions,
    /// Superblock options that we add, `key` or `key=value`.
    pub extra: &'a [&'a str],
    /// Whether both the superblock and the mount are to be read-only, whatever
    /// the options say.
    pub read_only: bool,
}

/// Why nothing was mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// No such file system in this kernel.
    #[error("the kernel has no file system {fs_type:?} (needed for {device:?}); load its module")]
    Unsupported {
        /// The type that was asked for.
        fs_type: String,
        /// The device.
        device: PathBuf,
    },
    /// The file system does not know an option, or not this value of it.
    #[error("mount option {option:?} was refused for {device:?}: {kernel_says}; correct it")]
    BadOption {
        /// The option.
        option: String,
        /// The device.
        device: PathBuf,
        /// The file system's own words.
        kernel_says: String,
    },
    /// Claimed by something else, mounted elsewhere the other way (read-only or
    /// read-write), or, by its MMP block, mounted by another node.
    #[error(
        "device {device:?} is in use, or mounted elsewhere with a different read-only setting, or \
         its ext4 has the feature mmp and another node has it mounted"
    )]
    Busy {
        /// The device.
        device: PathBuf,
    },
    /// Mounted elsewhere, and its superblock keeps the options that it has.
    #[error(
        "device {device:?} is mounted elsewhere without the option {missing:?}; unmount it there, \
         or ask for the same options"
    )]
    OtherOptions {
        /// The device.
        device: PathBuf,
        /// The first option that is not in force.
        missing: String,
    },
    /// [`MountError::OtherOptions`], and the new mount could not be removed.
    #[error("{path:?} was mounted with other options than asked for, and stays so")]
    UndoFailed {
        /// The place.
        path: PathBuf,
        /// Why it stays.
        #[source]
        source: UnmountError,
    },
    /// A copy of a Btrfs that is mounted, on a kernel that takes each UUID once. From
    /// Linux 6.7 on it gives the second another, for as long as that is mounted
    /// (`temp_fsid`).
    #[error(
        "device {device:?} is a copy of a Btrfs that is mounted here, and Linux mounts both at \
         once from version 6.7 on; unmount the other, or use the copy on another node"
    )]
    DuplicateUuid {
        /// The device.
        device: PathBuf,
    },
    /// A device that can't be written was to be mounted writable, or has a journal
    /// to replay.
    #[error(
        "device {device:?} is write-protected; mount it read-only, and writable once before \
         that if its journal is to be replayed"
    )]
    WriteProtected {
        /// The device.
        device: PathBuf,
    },
    /// Not this file system, or a damaged one, or (kernels before 6.8) an option
    /// that it does not take.
    #[error(
        "{device:?} holds no {fs_type} that can be mounted with these options: {kernel_says}; \
         the kernel log says what is wrong with it: correct the options, repair the file \
         system while nothing uses it, or restore the volume"
    )]
    BadSuperblock {
        /// The type that was asked for.
        fs_type: String,
        /// The device.
        device: PathBuf,
        /// The file system's own words, or the errno's.
        kernel_says: String,
    },
    /// Nothing can be mounted on what is at the place.
    #[error("cannot mount {what} on {path:?}, which is {found}")]
    WrongTarget {
        /// The place.
        path: PathBuf,
        /// What is there.
        found: &'static str,
        /// What was to be mounted.
        what: &'static str,
    },
    /// The system's own refusal.
    #[error("cannot {doing} {path:?}{}", says(.kernel_says))]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The device or place.
        path: PathBuf,
        /// The file system's own words, or empty.
        kernel_says: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl MountError {
    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::BadOption { .. } => Kind::Invalid,
            Self::Busy { .. } => Kind::InUse,
            Self::OtherOptions { .. }
            | Self::DuplicateUuid { .. }
            | Self::WriteProtected { .. }
            | Self::BadSuperblock { .. }
            | Self::Unsupported { .. } => Kind::Precondition,
            Self::UndoFailed { .. } | Self::WrongTarget { .. } | Self::Io { .. } => Kind::Transient,
        }
    }
}

/// Mounts `new` on top of what is at the place. Reads and writes the device: this
/// can hang with it.
pub fn mount(new: &NewMount<'_>, at: &SafePath) -> Result<Mounted, MountError> {
    let shared = is_claimed(new.source);
    let is_busy = |made: &Result<_, MountError>| matches!(made, Err(MountError::Busy { .. }));
    let mounted = put(&outwait(|| create(new), is_busy)?, at)?;
    if shared && let Some(missing) = not_in_force(new.options, at)? {
        let path = at.path().to_owned();
        let _ = unmount(at).map_err(|source| MountError::UndoFailed { path, source })?;
        let device = new.source.to_owned();
        return Err(MountError::OtherOptions { device, missing });
    }
    Ok(mounted)
}

/// Puts a detached mount on top of what is at the place.
pub(super) fn put(mount: &OwnedFd, at: &SafePath) -> Result<Mounted, MountError> {
    let failed = |doing| {
        move |source: io::Error| MountError::Io {
            doing,
            path: at.path().to_owned(),
            kernel_says: String::new(),
            source,
        }
    };
    let mounted = match PathKind::of(mount.as_fd()).map_err(failed("look at the new mount for"))? {
        PathKind::Mount(mounted) => mounted,
        found => unreachable!(
            "a detached mount is the root of one, not {}",
            found.describe()
        ),
    };
    let target = at.open().map_err(failed("open"))?;
    let found = PathKind::of(target.as_fd()).map_err(failed("look at"))?;
    let fits = match found {
        PathKind::Dir => mounted.directory,
        PathKind::File => !mounted.directory,
        PathKind::Mount(below) => below.directory == mounted.directory,
        PathKind::Absent | PathKind::Block(_) | PathKind::Other(_) => false,
    };
    if !fits {
        return Err(MountError::WrongTarget {
            path: at.path().to_owned(),
            found: found.describe(),
            what: if mounted.directory {
                "a directory"
            } else {
                "a file"
            },
        });
    }
    let empty = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(mount, "", &target, "", empty).map_err(|error| failed("mount on")(error.into()))?;
    Ok(mounted)
}

/// Makes the mount, not yet at any place.
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
    fsconfig_set_string(&context, "source", new.source).map_err(failed("name the source"))?;
    for option in new.options.fs_options() {
        set(&context, new, &option.key, option.value.as_deref())?;
    }
    for option in new.extra {
        match option.split_once('=') {
            Some((key, value)) => set(&context, new, key, Some(value))?,
            None => set(&context, new, option, None)?,
        }
    }
    // No pod sees this mount, only binds of it: nothing on it is to be run or opened as
    // a device here, whatever the options say of targets.
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
        kernel_says: words(error, &log(context.as_fd())),
    })
}

/// What the failure to make a superblock means.
fn not_created(error: Errno, log: &str, new: &NewMount<'_>) -> MountError {
    let device = new.source.to_owned();
    match error {
        Errno::BUSY => MountError::Busy { device },
        Errno::EXIST if new.fs_type == "btrfs" => MountError::DuplicateUuid { device },
        Errno::ROFS | Errno::ACCESS => MountError::WriteProtected { device },
        // UCLEAN is what ext4 and XFS call corrupted, BADMSG a wrong checksum.
        Errno::INVAL | Errno::UCLEAN | Errno::BADMSG => MountError::BadSuperblock {
            fs_type: new.fs_type.to_owned(),
            device,
            kernel_says: words(error, log),
        },
        error => MountError::Io {
            doing: "mount",
            path: device,
            kernel_says: log.to_owned(),
            source: error.into(),
        },
    }
}

/// Whether something holds the block device exclusively, as a superblock does.
/// Should we not be able to tell, the mount itself will fail and say why.
fn is_claimed(device: &Path) -> bool {
    let is_block = stat(device)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice);
    let exclusive = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    let claim = || open(device, exclusive, Mode::empty()).err();
    is_block && outwait(claim, |error| *error == Some(Errno::BUSY)) == Some(Errno::BUSY)
}

/// The first superblock option that is not in force at the place.
fn not_in_force(asked: &MountOptions, at: &SafePath) -> Result<Option<String>, MountError> {
    let failed = |source| MountError::Io {
        doing: "read the mount options of",
        path: at.path().to_owned(),
        kernel_says: String::new(),
        source,
    };
    if asked.fs_options().len() == 0 {
        return Ok(None);
    }
    let shown = table::super_options(at.open().map_err(failed)?.as_fd()).map_err(failed)?;
    // What can't be parsed is no option that was asked for.
    let shown = MountOptions::parse(&[shown]).unwrap_or_default();
    let mut missing = asked.fs_options().filter(|option| !shown.has(option));
    Ok(missing.next().map(ToString::to_string))
}

/// The messages that the file system left in the context, fsopen(2): each begins
/// with its severity and a space.
fn log(context: BorrowedFd<'_>) -> String {
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

fn words(error: Errno, log: &str) -> String {
    if log.is_empty() {
        io::Error::from(error).to_string()
    } else {
        log.to_owned()
    }
}

fn says(kernel: &str) -> String {
    if kernel.is_empty() {
        String::new()
    } else {
        format!(" ({kernel})")
    }
}

#[cfg(test)]
mod tests;
