//! Pools: directories of raw image files, for the node agent and the controller.
//!
//! ```text
//! POOL/<uuid>.img            a volume; only complete images have such names
//! POOL/inline-<id>.img       an inline ephemeral volume, made by the node
//! POOL/<anything else>       images of static volumes, never touched here
//! POOL/.uring-csi/           all other files, so that a server of the directory
//!                            (`nbdkit file dir=POOL`) exports images only
//!     claims/IMAGE/*.json    which node has the image attached: [`claim`]
//!     claims/.spare-*/       for deletes while the file system is full: [`spares`]
//!     names/ volumes/        the controller's catalogue: `provision::catalogue`
//!     snapnames/ snapshots/  the same for snapshots, with their images
//!     mkfs/IMAGE             a mkfs of the image is in progress: [`format_marker`]
//!     scope                  `local` or `shared`, set at the first use of the pool:
//!                            [`Pool::initialize`]
//!     spare/                 files for the same
//!     tmp/                   work in progress, locked by its writer: [`draft`]
//! ```
//!
//! A pool is `shared` (every node and the controller mount the same directory, or
//! only the controller does and an NBD server exports its images to the nodes) or
//! `local` (each node has its own, and a controller runs on each node).
//! The file system of a pool needs hard links and flock(2); NFS has both.
//!
//! Everything here blocks and belongs on a lane thread.

use std::{
    fmt,
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat, StatxAttributes, StatxFlags, fcntl_setfl,
    fstat, openat2, statx,
};

use crate::{Done, Kind, size::exact};

pub mod claim;
pub mod draft;
mod file_stamp;
pub mod format_marker;
pub mod growth;
pub mod handle;
mod inspect;
mod room;
mod scope;
mod spares;
mod spec;

pub use room::{Room, RoomPromise};
pub use spec::{PoolSpec, Pools};

/// The nodes on which a pool's directory is mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// On one node only; volumes stay on that node.
    Local,
    /// On every node and on the controller, or exported to every node.
    Shared,
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => "local",
            Self::Shared => "shared",
        })
    }
}

/// Why a pool or an image in it cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A malformed `--pool`.
    #[error("pool {text:?}: {why}; write NAME=DIR[,local|,shared][,mounted]")]
    BadSpec {
        /// The value of the option.
        text: String,
        /// The reason.
        why: &'static str,
    },
    /// Two pools have one name.
    ///
    /// Remedy: give each --pool a name of its own.
    #[error("pool {0:?} is given twice")]
    Twice(String),
    /// No such pool is configured.
    #[error("there is no pool {name:?} here, only {known}; check the `pool` parameter and --pool")]
    Unknown {
        name: String,
        /// The configured pools.
        known: String,
    },
    /// The request names no pool and several are configured.
    ///
    /// Remedy: add the parameter `pool` to the class, or `--pool` to the command.
    #[error("name a pool by the parameter `pool`: {known}")]
    Unnamed {
        /// The configured pools.
        known: String,
    },
    /// The pool's directory cannot be opened.
    ///
    /// Remedy: mount the pool's file system (`mount DIRECTORY`), on the host in Kubernetes; check
    /// its owner and mode (`ls -ld`).
    #[error("pool {pool:?}: its directory {} cannot be opened; is it mounted?", dir.display())]
    NotReady {
        pool: String,
        dir: PathBuf,
        source: io::Error,
    },
    /// The pool has the option `mounted`, and its directory is no mount point.
    ///
    /// Remedy: mount the pool's file system (`mount DIRECTORY`), on the host in Kubernetes.
    #[error("pool {pool:?}: nothing is mounted at its directory {}, as its option `mounted` demands", dir.display())]
    NotMounted { pool: String, dir: PathBuf },
    /// The pool's directory exists, without the scope of a pool that was used.
    ///
    /// Remedy: mount the pool's file system (`mount DIRECTORY`), on the host in Kubernetes.
    #[error("pool {pool:?}: no volume was ever made or attached in its directory {}; is it mounted?", dir.display())]
    Uninitialized { pool: String, dir: PathBuf },
    /// The pool was set up with another scope.
    #[error(
        "pool {pool:?} in {} is a {found} pool, but this agent is configured for a {given} one and \
         would ignore claims of others; write --pool {pool}={},{found} (while no agent uses the \
         pool, removing .uring-csi/scope in it lets the next one set the scope again)",
        dir.display(), dir.display()
    )]
    OtherScope {
        pool: String,
        dir: PathBuf,
        /// The configured scope.
        given: Scope,
        /// The scope in the pool.
        found: Scope,
    },
    /// Not a valid name of an image.
    ///
    /// Remedy: name a file in the pool, without directories.
    #[error("image {image:?} in pool {pool:?}: {why}")]
    BadName {
        pool: String,
        image: String,
        /// The reason.
        why: &'static str,
    },
    /// The image does not exist.
    ///
    /// Remedy: `uringctl list` shows the volumes that exist; restore the image from a backup, or
    /// delete the volume.
    #[error("there is no image {image:?} in pool {pool:?}")]
    NoImage { pool: String, image: String },
    /// An inline volume is larger than the available space.
    #[error(
        "pool {pool:?} has {} available beyond the sizes of its volumes, and this \
         inline volume needs {}; free space, or request less (volumeAttributes.size)",
        exact(*available), exact(*bytes)
    )]
    NoRoom {
        pool: String,
        bytes: u64,
        available: u64,
    },
    /// An image would grow by more than the available space.
    #[error(
        "pool {pool:?} has {} available beyond the sizes of its volumes, and \
         image {image:?} would grow by {}; free space, or request less",
        exact(*available), exact(*more)
    )]
    NoRoomToGrow {
        pool: String,
        image: String,
        /// Bytes to grow by.
        more: u64,
        available: u64,
    },
    /// Inline volumes need a local pool.
    #[error(
        "inline volumes are made in local pools, and pool {pool:?} is shared; \
         name a local one (volumeAttributes.pool)"
    )]
    NotLocal { pool: String },
    /// Any other failure of a system call.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); `df DIRECTORY` shows whether the file system
    /// is full.
    #[error("pool {pool:?}: cannot {step} {}", path.display())]
    Io {
        pool: String,
        /// The step that failed, a verb phrase before the path.
        step: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl PoolError {
    /// What the caller on a node may do about it: a missing pool may be mounted later, a
    /// wrong name stays wrong.
    pub fn kind(&self) -> Kind {
        match self {
            Self::BadSpec { .. }
            | Self::Twice(_)
            | Self::Unknown { .. }
            | Self::Unnamed { .. }
            | Self::NotLocal { .. }
            | Self::BadName { .. } => Kind::Invalid,
            Self::NoRoom { .. } => Kind::Exhausted,
            Self::NoImage { .. } => Kind::NotFound,
            // Kubelet mounts a volume that cannot grow as large as it is.
            Self::OtherScope { .. } | Self::NoRoomToGrow { .. } => Kind::Precondition,
            Self::NotReady { .. }
            | Self::NotMounted { .. }
            | Self::Uninitialized { .. }
            | Self::Io { .. } => Kind::Transient,
        }
    }
}

/// A directory of image files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Its name: letters, digits, `-` and `_`, at most 63 bytes.
    pub name: String,
    /// Its directory, an absolute path.
    pub dir: PathBuf,
    /// The nodes on which it is mounted.
    pub scope: Scope,
    /// Whether its directory has to be a mount point.
    pub mounted: bool,
}

impl Pool {
    /// Opens an image of this pool, a regular file directly in its directory.
    ///
    /// The name is resolved by openat2(2) beneath the directory and through no
    /// symbolic link, so that a volume context cannot reach any other file.
    pub fn open_image(&self, image: &str, writable: bool) -> Result<File, PoolError> {
        let dir = self.open_dir()?;
        Ok(self.open_image_in(dir.as_fd(), image, writable)?.0)
    }

    /// [`Pool::open_image`] in the pool's directory, which is open, and the image's metadata.
    pub fn open_image_in(
        &self,
        dir: BorrowedFd<'_>,
        image: &str,
        writable: bool,
    ) -> Result<(File, Stat), PoolError> {
        self.check_name(image)?;
        let access = if writable {
            OFlags::RDWR
        } else {
            OFlags::RDONLY
        };
        let opened = openat2(
            dir,
            image,
            // NONBLOCK: the open of a FIFO of that name would wait for its other end.
            access | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY,
            Mode::empty(),
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
        );
        let no_regular_file = || self.bad_name(image, "it is not a regular file");
        let file = match opened {
            Ok(file) => file,
            Err(rustix::io::Errno::NOENT) => {
                return Err(PoolError::NoImage {
                    pool: self.name.clone(),
                    image: image.to_owned(),
                });
            }
            Err(rustix::io::Errno::LOOP | rustix::io::Errno::ISDIR | rustix::io::Errno::NXIO) => {
                return Err(no_regular_file());
            }
            Err(errno) => return Err(self.io("open", &self.image_path(image), errno)),
        };
        let checked = fstat(&file).and_then(|stat| {
            // The only flag that was set and that this can change.
            fcntl_setfl(&file, OFlags::empty())?;
            Ok(stat)
        });
        match checked {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_file() => Ok((file.into(), stat)),
            Ok(_) => Err(no_regular_file()),
            Err(errno) => Err(self.io("look at", &self.image_path(image), errno)),
        }
    }

    /// The path of an image, for messages and for names that the driver chose. A name from a
    /// request goes to [`Pool::open_image`].
    pub fn image_path(&self, image: &str) -> PathBuf {
        self.dir.join(image)
    }

    /// A directory below `.uring-csi/`, made if missing.
    pub fn meta_dir(&self, area: &str) -> Result<PathBuf, PoolError> {
        // Never make the pool itself: with a missing mount, volumes would land on the file
        // system beneath.
        self.open_dir()?;
        let path = self.meta_path(area);
        std::fs::create_dir_all(&path).map_err(|e| self.io("make directory", &path, e))?;
        Ok(path)
    }

    /// The path of [`Pool::meta_dir`].
    pub fn meta_path(&self, area: &str) -> PathBuf {
        self.dir.join(META).join(area)
    }

    /// Makes the sparse image, of `bytes`, of an inline ephemeral volume, and returns its
    /// name. It grows an existing smaller image, which a crash left before it had its size.
    ///
    /// Fails where the pool has no room, by the controller's rule, unless the image has its size
    /// and was written to: then it was counted when it was made. It makes the image before
    /// it counts the room, so that two processes that make images at once count each other's,
    /// and together never exceed the pool. A growth counts the room first, so a lock excludes
    /// growth within this process meanwhile.
    pub fn create_inline(&self, id: &str, bytes: u64) -> Result<(String, Done), PoolError> {
        let image = inline_image(id);
        self.check_name(&image)?;
        self.initialize()?;
        let path = self.image_path(&image);
        let no_regular_file = || self.bad_name(&image, "it is not a regular file");
        let _room = self.lock_room();
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&path)
            .map_err(|error| match error.raw_os_error() {
                Some(libc::ELOOP | libc::ENXIO | libc::EISDIR) => no_regular_file(),
                _ => self.io("make", &path, error),
            })?;
        let found = file.metadata().map_err(|e| self.io("look at", &path, e))?;
        if !found.is_file() {
            return Err(no_regular_file());
        }
        let was_whole = found.len() >= bytes;
        // A new file may have blocks too: those of ZFS, or of an extended attribute on ext4.
        let is_counted = was_whole && found.blocks() > 0;
        let done = if was_whole {
            Done::Already
        } else {
            file.set_len(bytes)
                .map_err(|e| self.io("set the size of", &path, e))?;
            self.mark_grown();
            Done::Now
        };
        if is_counted {
            return Ok((image, done));
        }
        let room = self.room()?;
        if room.promised > room.free {
            if was_whole || found.len() == 0 {
                let _ = self.delete_inline(id)?;
            } else {
                // It may have data, and nobody has written beyond its old end.
                let shrunk = file.set_len(found.len());
                shrunk.map_err(|e| self.io("restore the size of", &path, e))?;
            }
            return Err(PoolError::NoRoom {
                pool: self.name.clone(),
                bytes,
                available: room
                    .free
                    .saturating_sub(room.promised.saturating_sub(bytes)),
            });
        }
        Ok((image, done))
    }

    /// Deletes the image of an inline ephemeral volume. Fails while the pool is not mounted:
    /// a success would leave the image in the pool for ever.
    pub fn delete_inline(&self, id: &str) -> Result<Done, PoolError> {
        let image = inline_image(id);
        self.check_name(&image)?;
        self.check_mounted()?;
        let path = self.image_path(&image);
        match std::fs::remove_file(&path) {
            Ok(()) => Ok(Done::Now),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Done::Already),
            Err(e) => Err(self.io("delete", &path, e)),
        }
    }

    /// Fails ([`PoolError::Uninitialized`], [`PoolError::NotReady`]) where the pool is not
    /// mounted: there a missing file proves nothing.
    pub fn check_mounted(&self) -> Result<(), PoolError> {
        if self.is_initialized()? {
            return Ok(());
        }
        Err(self.uninitialized())
    }

    /// Opens the pool's directory.
    pub fn open_dir(&self) -> Result<OwnedFd, PoolError> {
        let opened = rustix::fs::open(
            &self.dir,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        let dir = opened.map_err(|errno| PoolError::NotReady {
            pool: self.name.clone(),
            dir: self.dir.clone(),
            source: errno.into(),
        })?;
        if self.mounted {
            let looked = statx(&dir, "", AtFlags::EMPTY_PATH, StatxFlags::empty());
            let looked = looked.map_err(|errno| self.io("look at", &self.dir, errno))?;
            if !looked.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
                return Err(PoolError::NotMounted {
                    pool: self.name.clone(),
                    dir: self.dir.clone(),
                });
            }
        }
        Ok(dir)
    }

    /// Bytes and inodes of the pool's file system.
    pub fn statvfs(&self) -> Result<rustix::fs::StatVfs, PoolError> {
        rustix::fs::fstatvfs(self.open_dir()?.as_fd())
            .map_err(|errno| self.io("read the free space of", &self.dir, errno))
    }

    fn check_name(&self, image: &str) -> Result<(), PoolError> {
        let why = if image.is_empty() {
            "the name is empty"
        } else if image.len() > 255 {
            "the name is longer than 255 bytes"
        } else if image.starts_with('.') {
            "a name that begins with a dot is no image"
        } else if image.contains('/') {
            "it must be the name of a file directly in the pool's directory"
        } else if image.contains(char::is_control) {
            "the name holds a control character"
        } else {
            return Ok(());
        };
        Err(self.bad_name(image, why))
    }

    fn bad_name(&self, image: &str, why: &'static str) -> PoolError {
        PoolError::BadName {
            pool: self.name.clone(),
            image: image.to_owned(),
            why,
        }
    }

    pub(crate) fn io(
        &self,
        step: &'static str,
        path: &Path,
        source: impl Into<io::Error>,
    ) -> PoolError {
        PoolError::Io {
            pool: self.name.clone(),
            step,
            path: path.to_owned(),
            source: source.into(),
        }
    }
}

/// The name of an inline volume's image.
pub fn inline_image(id: &str) -> String {
    format!("inline-{id}.img")
}

const META: &str = ".uring-csi";

#[cfg(test)]
mod tests;
