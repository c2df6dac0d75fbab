//! The paths at which volumes are being mounted or unmounted.
//!
//! A call looks at its path before it mounts there or unmounts. Two volumes'
//! calls for one path, each of which looks before the other acts, would mount one over
//! the other. So a path belongs to one volume while its call runs.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{error::Cause, paths::is_below};

/// The paths of the calls under way.
#[derive(Debug, Default)]
pub(super) struct Occupied(Mutex<HashMap<PathBuf, Occupant>>);

/// The volume that occupies a path.
#[derive(Debug)]
struct Occupant {
    volume: String,
    /// How many of the volume's calls use the path.
    calls: usize,
}

/// Keeps a path for a volume until this is dropped.
#[derive(Debug)]
pub(super) struct Occupation<'a> {
    all: &'a Occupied,
    path: &'a Path,
}

impl Occupied {
    /// Nothing can panic under this lock.
    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, Occupant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a path for a volume, unless it, or one above or below it, belongs to another.
    pub fn occupy<'a>(&'a self, path: &'a Path, volume: &str) -> Result<Occupation<'a>, Cause> {
        let mut paths = self.lock();
        let mut others = paths.iter().filter(|(_, it)| it.volume != volume);
        if let Some((other, occupant)) =
            others.find(|(other, _)| is_below(other, path) || is_below(path, other))
        {
            return Err(Cause::Occupied {
                path: other.clone(),
                other: occupant.volume.clone(),
            });
        }
        let occupant = paths.entry(path.to_owned()).or_insert_with(|| Occupant {
            volume: volume.to_owned(),
            calls: 0,
        });
        if occupant.volume != volume {
            return Err(Cause::Occupied {
                path: path.to_owned(),
                other: occupant.volume.clone(),
            });
        }
        occupant.calls += 1;
        Ok(Occupation { all: self, path })
    }
}

impl Drop for Occupation<'_> {
    fn drop(&mut self) {
        let mut paths = self.all.lock();
        if let Some(occupant) = paths.get_mut(self.path) {
            occupant.calls -= 1;
            if occupant.calls == 0 {
                paths.remove(self.path);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_one_volume_s_until_its_last_call_ends() {
        let occupied = Occupied::default();
        let path = Path::new("/p");
        let first = occupied.occupy(path, "a").unwrap();
        let second = occupied.occupy(path, "a").unwrap();
        let _elsewhere = occupied.occupy(Path::new("/q"), "b").unwrap();
        drop(first);
        let refused = occupied.occupy(path, "b").unwrap_err().to_string();
        assert!(
            refused.contains("volume a") && refused.contains("/p"),
            "{refused}"
        );
        let below = occupied.occupy(Path::new("/p/c"), "b").unwrap_err();
        assert!(below.to_string().contains("volume a"), "{below}");
        drop(second);
        drop(occupied.occupy(path, "b").unwrap());
        assert_eq!(occupied.lock().len(), 1);
    }
}
