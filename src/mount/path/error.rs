//! Errors of paths.

use std::{io, path::PathBuf};

use rustix::io::Errno;

use crate::Kind;

/// Why a path cannot be resolved, made or removed.
#[derive(Debug, thiserror::Error)]
pub enum PathError {
    /// The path is relative, or has a NUL byte.
    ///
    /// Remedy: pass the path from the root on: /PATH.
    #[error("path {0:?} is not an absolute path")]
    NotAbsolute(String),
    /// The path has a component `..`.
    #[error("path {0:?} contains \"..\"; pass it resolved")]
    DotDot(String),
    /// The path is not below a root, or is a root itself.
    #[error("path {path:?} is not below {}; allow its directory with --allow-path", list(.roots))]
    Outside { path: PathBuf, roots: Vec<PathBuf> },
    /// The path, or a name in it, is longer than the kernel allows.
    ///
    /// Remedy: pass a shorter path: 4095 bytes, 255 in each name.
    #[error("path {path:?} is longer than paths and the names in them can be")]
    TooLong { path: PathBuf },
    /// Its parent directory is missing; kubelet makes it.
    ///
    /// Remedy: create it (`mkdir -p`); kubelet makes it by itself.
    #[error("the parent directory of {path:?} does not exist")]
    MissingParent { path: PathBuf },
    /// One of its directories is a symlink.
    ///
    /// Remedy: pass the path that `realpath PATH` prints.
    #[error("path {path:?} leads through a symlink below an allowed root, which is never followed")]
    Symlink { path: PathBuf },
    /// Another kind of file is there.
    #[error("{path:?} is {found}, expected {wanted}; remove it")]
    WrongKind {
        path: PathBuf,
        found: &'static str,
        wanted: &'static str,
    },
    /// The directory or file holds data, and is kept.
    #[error("{path:?} is not empty and is kept; inspect it, then remove it by hand")]
    NotEmpty { path: PathBuf },
    /// The path is a mount point.
    #[error("{path:?} is a mount point and is kept; unmount it first")]
    Mounted { path: PathBuf },
    /// Any other failure of a system call.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the call is repeated.
    #[error("cannot {doing} {path:?}")]
    Io {
        path: PathBuf,
        doing: &'static str,
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

    /// Classifies a failure of a system call on `path`.
    pub(super) fn new(path: PathBuf, doing: &'static str, source: io::Error) -> Self {
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
