//! Paths of requests, and where they lead.
//!
//! The directories that a path leads through are kubelet's, on the root disk as a rule,
//! and that may hang, as any disk. So nothing here is for the runtime thread: a verb
//! takes a copy of [`Places`] to the volume's lane, and there what it opens is used and
//! closed.

use std::path::{Path, PathBuf};

use super::error::Cause;
use crate::mount::path::{PathError, Roots, SafePath};

/// The request's field of a staging path.
pub const STAGING: &str = "staging_target_path";
/// The request's field of a target path.
pub const TARGET: &str = "target_path";

/// The directories below which volumes are staged and published.
#[derive(Clone, Debug)]
pub struct Places(Roots);

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

    fn place(&self, path: &Path) -> Result<SafePath, PathError> {
        self.0.resolve(&path.to_string_lossy())
    }

    /// The path in one spelling to compare by ([`Roots::spelled`]). Never blocks.
    pub fn spelled(&self, path: &Path) -> PathBuf {
        self.0.spelled(path)
    }

    /// Whether the path is below one of the directories. Never blocks.
    pub fn has(&self, path: &Path) -> bool {
        self.0.has(path)
    }
}

/// What is wrong with a staging path, or with what is there.
pub fn at_staging(source: PathError) -> Cause {
    Cause::Path {
        field: STAGING,
        source,
    }
}

/// What is wrong with a target path, or with what is there.
pub fn at_target(source: PathError) -> Cause {
    Cause::Path {
        field: TARGET,
        source,
    }
}

/// A path whose parent is gone, or that no file system can have, has nothing mounted on it.
pub fn absent_is_none(place: Result<SafePath, Cause>) -> Result<Option<SafePath>, Cause> {
    match place {
        Ok(place) => Ok(Some(place)),
        Err(Cause::Path {
            source: PathError::MissingParent { .. } | PathError::TooLong { .. },
            ..
        }) => Ok(None),
        Err(error) => Err(error),
    }
}
