//! What can be wrong with a path.

use std::{io, path::PathBuf};

use rustix::io::Errno;

use crate::Kind;

/// Why a path is no place, or a place could not be made or removed.
#[derive(Debug, thiserror::Error)]
pub enum PathError {
    /// Not from the root directory, or with a NUL byte.
    #[error("path {0:?} is not an absolute path")]
    NotAbsolute(String),
    /// With a `..`.
    #[error("path {0:?} contains \"..\"; pass it resolved")]
    DotDot(String),
    /// Not strictly below a root.
    #[error("path {path:?} is not below {}; allow its directory with --allow-path", list(.roots))]
    Outside {
        /// The path as it was given.
        path: PathBuf,
        /// The roots as they were configured.
        roots: Vec<PathBuf>,
    },
    /// Longer than paths, or names of files, can be.
    #[error("path {path:?} is longer than paths and the names in them can be")]
    TooLong {
        /// The path, or the place.
        path: PathBuf,
    },
    /// A directory above the place is not there; kubelet makes them.
    #[error("the parent directory of {path:?} does not exist")]
    MissingParent {
        /// The place.
        path: PathBuf,
    },
    /// A symlink where a directory of kubelet's is expected.
    #[error("path {path:?} leads through a symlink below an allowed root, which is never followed")]
    Symlink {
        /// The place.
        path: PathBuf,
    },
    /// Something else is in the way.
    #[error("{path:?} is {found}, expected {wanted}; remove it")]
    WrongKind {
        /// The place.
        path: PathBuf,
        /// What is there.
        found: &'static str,
        /// What should be.
        wanted: &'static str,
    },
    /// What is there holds data, and is kept.
    #[error("{path:?} is not empty and is kept; look at what is in it, then remove it by hand")]
    NotEmpty {
        /// The place.
        path: PathBuf,
    },
    /// Something is mounted there.
    #[error("{path:?} is a mount point and is kept; unmount it first")]
    Mounted {
        /// The place.
        path: PathBuf,
    },
    /// The system's own refusal.
    #[error("cannot {doing} {path:?}")]
    Io {
        /// The place or root.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl PathError {
    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::NotAbsolute(_)
            | Self::DotDot(_)
            | Self::Outside { .. }
            | Self::TooLong { .. }
            | Self::Symlink { .. } => Kind::Invalid,
            Self::MissingParent { .. }
            | Self::WrongKind { .. }
            | Self::NotEmpty { .. }
            | Self::Mounted { .. } => Kind::Precondition,
            Self::Io { .. } => Kind::Transient,
        }
    }

    /// What it means that something at `path` is refused with this error.
    pub(super) fn of(path: PathBuf, doing: &'static str, source: io::Error) -> Self {
        match Errno::from_io_error(&source) {
            Some(Errno::NAMETOOLONG) => Self::TooLong { path },
            _ => Self::Io {
                path,
                doing,
                source,
            },
        }
    }
}

fn list(roots: &[PathBuf]) -> String {
    let roots: Vec<String> = roots
        .iter()
        .map(|root| root.display().to_string())
        .collect();
    roots.join(" or ")
}
