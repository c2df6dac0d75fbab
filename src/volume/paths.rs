//! The paths of all volumes of this node, by which a call finds those above and below its own.

use std::{
    collections::BTreeMap,
    ops::Bound::{Excluded, Unbounded},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The paths at which this node has volumes, and how many each has. They are ordered by
/// component, so those below a path follow it, and a look takes hardly longer with a
/// thousand volumes than with one.
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
    pub fn touch(&self, path: &Path) -> bool {
        let paths = self.lock();
        let next = paths.range::<Path, _>((Excluded(path), Unbounded)).next();
        next.is_some_and(|(next, _)| next.starts_with(path))
            || path.ancestors().any(|above| paths.contains_key(above))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
