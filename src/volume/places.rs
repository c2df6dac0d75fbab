//! Resolving the paths of requests.
//!
//! A path leads through kubelet's directories. They are on the root disk as a rule, which
//! may hang as any disk. So only lanes resolve paths: a verb takes a copy of
//! [`Places`] to the volume's lane, opens what it needs there and closes it there. Only
//! statistics use [`Places::open_cached`] elsewhere, which never waits.

use std::path::{Path, PathBuf};

use rustix::fd::OwnedFd;

use super::error::Cause;
use crate::mount::path::{PathError, Roots, SafePath};

/// The request's field of a staging path.
pub(super) const STAGING: &str = "staging_target_path";
/// The request's field of a target path.
pub(super) const TARGET: &str = "target_path";

/// The directories below which volumes are staged and published.
#[derive(Clone, Debug)]
pub(super) struct Places(Roots);

impl Places {
    /// Below these.
    pub fn new(roots: Roots) -> Self {
        Self(roots)
    }

    /// Where a volume is staged.
    pub fn staging(&self, path: &Path) -> Result<SafePath, Cause> {
        self.place(path).map_err(at_staging)
    }

    /// Where a volume is published.
    pub fn target(&self, path: &Path) -> Result<SafePath, Cause> {
        self.place(path).map_err(at_target)
    }

    /// What is where a volume is staged; `None` where nothing is.
    pub fn open_staging(&self, path: &Path) -> Result<Option<OwnedFd>, Cause> {
        self.0.open(path).map_err(at_staging)
    }

    /// What is at the path, if the kernel gets there without waiting for a disk.
    pub fn open_cached(&self, path: &Path) -> Option<OwnedFd> {
        self.0.open_cached(path)
    }

    fn place(&self, path: &Path) -> Result<SafePath, PathError> {
        self.0.resolve(&path.to_string_lossy())
    }

    /// The canonical path, for comparisons ([`Roots::canonical`]). Never blocks.
    pub fn canonical(&self, path: &Path) -> PathBuf {
        self.0.canonical(path)
    }

    /// Whether nobody but the orchestrator and this agent mounts there
    /// ([`Roots::is_for_volumes`]). Never blocks.
    pub fn is_for_volumes(&self, path: &Path) -> bool {
        self.0.is_for_volumes(path)
    }

    /// Whether the path is below one of the directories. Never blocks.
    pub fn has(&self, path: &Path) -> bool {
        self.0.has(path)
    }
}

/// Whether the path has a directory of this name in it, in which kubelet keeps
/// mounts of its own.
pub(super) fn is_kubelets(path: &Path, directory: &str) -> bool {
    path.iter().any(|part| part == directory)
}

/// An error at the staging path.
pub(super) fn at_staging(source: PathError) -> Cause {
    Cause::Path {
        field: STAGING,
        source,
    }
}

/// An error at the target path.
pub(super) fn at_target(source: PathError) -> Cause {
    Cause::Path {
        field: TARGET,
        source,
    }
}

/// A path whose parent is gone, or that is too long, has no mount: no error, but `None`.
pub(super) fn absent_is_none(place: Result<SafePath, Cause>) -> Result<Option<SafePath>, Cause> {
    match place {
        Ok(place) => Ok(Some(place)),
        Err(Cause::Path {
            source: PathError::MissingParent { .. } | PathError::TooLong { .. },
            ..
        }) => Ok(None),
        Err(error) => Err(error),
    }
}
