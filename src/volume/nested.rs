//! Refusing volume paths that contain each other.
//!
//! Where a target is the staging path itself, its unpublish would unmount what all
//! targets are bound to. Where one path is below another, directories would be made
//! and removed in the volume that is mounted there, or the one mount would hide the
//! other. Paths are compared as text; no disk is read.

use std::{iter, path::Path};

use super::{
    context::Context,
    error::Cause,
    paths::is_below,
    places::{STAGING, TARGET},
    spec::Use,
};

/// The use of a volume's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathOf {
    /// Its stage, which mounts it there.
    Staging,
    /// The stage of a raw volume, which mounts nothing there.
    RawStaging,
    /// A publish.
    Target,
}

impl PathOf {
    pub fn staging(usage: &Use) -> Self {
        match usage {
            Use::Mount { .. } => Self::Staging,
            Use::Block => Self::RawStaging,
        }
    }

    /// Whether two may not have one path. Where both mount something, the mount at the path
    /// tells, and whether it is another volume's.
    fn excludes(self, other: Self) -> bool {
        self != other || self == Self::RawStaging
    }

    fn field(self) -> &'static str {
        match self {
            Self::Staging | Self::RawStaging => STAGING,
            Self::Target => TARGET,
        }
    }

    fn done(self) -> &'static str {
        match self {
            Self::Staging | Self::RawStaging => "staged",
            Self::Target => "published",
        }
    }
}

impl Context<'_> {
    /// Refuses a path of the volume that is above or below another one of any volume of
    /// this node, or that one has for something else.
    ///
    /// A path that the volume has already is never refused: a mount below it is removed
    /// by a call of its own, or with the pod that mounted it.
    pub fn refuse_nested(self, path: &Path, of: PathOf) -> Result<(), Cause> {
        let is_had = self.volume.held().as_ref().is_some_and(|held| match of {
            PathOf::Staging | PathOf::RawStaging => held.record.staging_path == path,
            PathOf::Target => held.targets.contains_key(path),
        });
        if is_had || !self.node.paths.touch(path) {
            return Ok(());
        }
        for other in self.node.volumes().values() {
            let held = other.held();
            let Some(held) = held.as_ref() else {
                continue;
            };
            let of_staging = PathOf::staging(&held.record.usage);
            let staging = (of_staging, &held.record.staging_path);
            let targets = held.targets.keys().map(|target| (PathOf::Target, target));
            let paths = iter::once(staging).chain(targets);
            for (taken_for, taken) in paths {
                let is_both = path == taken && of.excludes(taken_for);
                if is_both || is_below(path, taken) || is_below(taken, path) {
                    return Err(Cause::Invalid {
                        field: of.field(),
                        why: format!(
                            "{} is, or is above or below, {}, where volume {} is {}; pass another",
                            path.display(),
                            taken.display(),
                            other.id,
                            taken_for.done()
                        ),
                    });
                }
            }
        }
        Ok(())
    }
}
