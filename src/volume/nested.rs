//! Refusing volume paths that contain each other.
//!
//! Where a target is the staging path itself, its unpublish would unmount what all
//! targets are bound to. Where one path is below another, directories would be made
//! and removed in the volume that is mounted there, or the one mount would hide the
//! other. Paths are compared as text; no disk is read.

use std::{
    collections::BTreeMap,
    iter,
    ops::Bound::{Excluded, Unbounded},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{
    context::Context,
    error::Cause,
    places::{STAGING, TARGET},
    spec::Use,
};

/// The paths at which this node has volumes, and how many each has. Those below a path
/// follow it, so a look takes hardly longer with a thousand volumes than with one.
#[derive(Debug, Default)]
pub(super) struct Paths(Mutex<BTreeMap<PathBuf, usize>>);

impl Paths {
    /// Adds a volume's path. A volume that is only formatted has an empty one, which counts
    /// for nothing.
    pub fn add(&self, path: &Path) {
        if !path.as_os_str().is_empty() {
            *self.lock().entry(path.to_owned()).or_default() += 1;
        }
    }

    /// Removes a path that was added.
    pub fn remove(&self, path: &Path) {
        let mut paths = self.lock();
        if let Some(volumes) = paths.get_mut(path) {
            *volumes -= 1;
            if *volumes == 0 {
                paths.remove(path);
            }
        }
    }

    /// Whether a volume has the path, or one above or below it.
    fn touch(&self, path: &Path) -> bool {
        let paths = self.lock();
        let next = paths.range::<Path, _>((Excluded(path), Unbounded)).next();
        next.is_some_and(|(next, _)| next.starts_with(path))
            || path.ancestors().any(|above| paths.contains_key(above))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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

/// A volume that is only formatted has an empty path, which nothing is below.
pub(super) fn is_below(path: &Path, above: &Path) -> bool {
    let [path, above] = [path, above].map(|path| path.as_os_str().as_bytes());
    let rest = path.strip_prefix(above).filter(|_| !above.is_empty());
    rest.is_some_and(|rest| rest.starts_with(b"/"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn below_means_by_path_component() {
        let below = |path, above| is_below(Path::new(path), Path::new(above));
        assert!(below("/a/b", "/a") && below("/a/b/c", "/a"));
        assert!(!below("/a", "/a") && !below("/ab", "/a") && !below("/a", "/a/b"));
        assert!(!below("/a", ""));
    }

    proptest! {
        #[test]
        fn any_path_below_another_starts_with_its_components(path in "(/[ab]{1,2}){1,4}", above in "(/[ab]{1,2}){1,3}") {
            let [path, above] = [&path, &above].map(Path::new);
            prop_assert_eq!(is_below(path, above), path != above && path.starts_with(above));
        }

        #[test]
        fn a_path_touches_those_above_and_below_until_they_are_removed(
            taken in proptest::collection::vec("(/[ab-]{1,2}){1,3}", 0..6),
            path in "(/[ab-]{1,2}){1,3}",
        ) {
            let paths = Paths::default();
            let path = Path::new(&path);
            for taken in &taken {
                paths.add(Path::new(taken));
            }
            paths.add(Path::new(""));
            for removed in 0..=taken.len() {
                let touches = |taken: &String| {
                    let taken = Path::new(taken);
                    taken == path || is_below(taken, path) || is_below(path, taken)
                };
                prop_assert_eq!(paths.touch(path), taken[removed..].iter().any(touches));
                if let Some(taken) = taken.get(removed) {
                    paths.remove(Path::new(taken));
                }
            }
            prop_assert!(paths.lock().is_empty());
        }
    }
}
