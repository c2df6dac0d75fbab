//! The directory of a run: below kubelet's, where drivers may mount, and fresh. A run
//! uses no path outside of it, and removes only what it made, one empty directory after
//! another.

use std::{
    fs::{self, DirBuilder, File},
    io::{self, ErrorKind},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::mounts::mounted_below;
use crate::{
    cli::{
        args::{AccessArgs, NewVolumeArgs},
        attach::failed,
        error::CliError,
    },
    size::Size,
};

/// The first part of the names of everything that a run makes.
pub const PREFIX: &str = "uringctl-bench-";

/// Kubelet's directory, unless it is told another.
pub const KUBELET_DIR: &str = "/var/lib/kubelet";

/// Drivers have this directory of kubelet's mounted with propagation; kubelet itself
/// looks there only for names that it knows.
const PARENT: &str = "plugins/kubernetes.io/csi";

/// The file in a run's directory that says what the run uses.
const RECORD: &str = "run.json";

/// The record while it is written.
const DRAFT: &str = "run.new";

/// What a run uses, for `bench clean`, should uringctl be killed.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub struct Record {
    pub node_endpoint: String,
    pub controller_endpoint: String,
    /// Their paths are those of their numbers.
    pub volumes: Vec<RecordedVolume>,
    /// How those with a name are created.
    pub creation: Creation,
}

/// How a run creates volumes.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Creation {
    pub size: Size,
    pub usage: AccessArgs,
    pub origin: NewVolumeArgs,
}

#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub struct RecordedVolume {
    /// Empty until the controller has answered.
    pub handle: String,
    /// The name of one that the run creates.
    pub created_as: Option<String>,
}

/// The paths of one volume.
#[derive(Debug)]
pub struct VolumePaths {
    dir: PathBuf,
    pub staging: PathBuf,
    pub target: PathBuf,
}

/// What is known of the run that made a directory.
pub enum FoundRun {
    UnderWay,
    /// Its process was killed before it did anything.
    Unused(Place),
    /// Its process was killed.
    Killed(Place, Box<Record>),
}

/// A run's directory.
pub struct Place {
    path: PathBuf,
    /// Its parents that were missing, the outermost first.
    parents: Vec<PathBuf>,
    /// Locked while a process uses the directory.
    _lock: File,
}

impl Place {
    /// Makes it.
    pub fn make(kubelet_dir: &Path, name: &str) -> Result<Self, CliError> {
        let mut parents = Vec::new();
        let mut path = kubelet_dir.to_owned();
        for part in PARENT.split('/') {
            path.push(part);
            match make_dir(&path) {
                Ok(()) => parents.push(path.clone()),
                Err(there) if there.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed("make", &path)(error)),
            }
        }
        path.push(name);
        make_dir(&path).map_err(failed("make", &path))?;
        let lock = lock(&path).map_err(failed("lock", &path))?;
        Ok(Self {
            path,
            parents,
            _lock: lock,
        })
    }

    /// The directories of runs, those under way included.
    pub fn list(kubelet_dir: &Path) -> io::Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(kubelet_dir.join(PARENT))? {
            let entry = entry?;
            let is_named = entry.file_name().to_string_lossy().starts_with(PREFIX);
            if is_named && entry.file_type()?.is_dir() {
                found.push(entry.path());
            }
        }
        found.sort();
        Ok(found)
    }

    /// The directory of a run, and its record, if its process was killed.
    pub fn take_over(path: &Path) -> Result<FoundRun, CliError> {
        let lock = match lock(path) {
            Err(busy) if busy.kind() == ErrorKind::WouldBlock => return Ok(FoundRun::UnderWay),
            locked => locked.map_err(failed("lock", path))?,
        };
        let place = Self {
            path: path.to_owned(),
            parents: Vec::new(),
            _lock: lock,
        };
        let file = path.join(RECORD);
        let record = match fs::read_to_string(&file) {
            // It is written before anything is done.
            Err(none) if none.kind() == ErrorKind::NotFound => return Ok(FoundRun::Unused(place)),
            record => record.map_err(failed("read", &file))?,
        };
        let record = serde_json::from_str(&record).map_err(|error| CliError::BadFile {
            path: file,
            why: error.to_string(),
        })?;
        Ok(FoundRun::Killed(place, Box::new(record)))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The paths of the volume of that number.
    pub fn paths(&self, number: usize) -> VolumePaths {
        let dir = self.path.join(number.to_string());
        VolumePaths {
            staging: dir.join("globalmount"),
            target: dir.join("mount"),
            dir,
        }
    }

    /// Writes down what the run uses, before it does.
    pub fn record(&self, record: &Record) -> Result<(), CliError> {
        let path = self.path.join(RECORD);
        let fresh = self.path.join(DRAFT);
        serde_json::to_vec_pretty(record)
            .map_err(io::Error::from)
            .and_then(|text| fs::write(&fresh, text))
            .and_then(|()| fs::rename(&fresh, &path))
            .map_err(failed("write", &path))
    }

    /// Removes the directory of a run that has left nothing in it; the error is a
    /// sentence.
    pub fn remove(&self) -> Result<(), String> {
        let mounts = mounted_below(&self.path).unwrap_or_default();
        if let Some(mount) = mounts.first() {
            return Err(format!("a mount at {}", mount.display()));
        }
        // The record stays with what it is about.
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        let is_own =
            |entry: &fs::DirEntry| [RECORD, DRAFT].iter().any(|own| entry.file_name() == *own);
        let mut others = entries.filter(|entry| !is_own(entry));
        if let Some(other) = others.next() {
            return Err(other.path().display().to_string());
        }
        // Without the record nothing was done.
        for file in [DRAFT, RECORD] {
            remove(|| fs::remove_file(self.path.join(file)), &self.path)?;
        }
        remove(|| fs::remove_dir(&self.path), &self.path)?;
        for parent in self.parents.iter().rev() {
            // Others may use it by now.
            let _ = fs::remove_dir(parent);
        }
        Ok(())
    }
}

impl VolumePaths {
    /// Makes the staging directory, as CSI requires of the caller, and thereby the
    /// target's parent; a driver may have removed it.
    pub fn make(&self) -> io::Result<()> {
        for dir in [&self.dir, &self.staging] {
            match make_dir(dir) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether something is mounted at the staging path or below it.
    pub fn is_staging_mounted(&self) -> bool {
        mounted_below(&self.staging).is_ok_and(|mounts| !mounts.is_empty())
    }

    /// Removes the directories after the volume was unstaged; the error is a sentence. The
    /// kernel refuses to remove a mount point.
    pub fn remove(&self) -> Result<(), String> {
        // The driver should have removed the target, but some leave it.
        let target = fs::symlink_metadata(&self.target);
        let is_empty_file = target.is_ok_and(|found| found.is_file() && found.len() == 0);
        if is_empty_file {
            remove(|| fs::remove_file(&self.target), &self.target)?;
        }
        for dir in [&self.target, &self.staging, &self.dir] {
            remove(|| fs::remove_dir(dir), dir)?;
        }
        Ok(())
    }
}

/// A run's directory is locked while its process lives.
fn lock(dir: &Path) -> io::Result<File> {
    let dir = File::open(dir)?;
    flock(&dir, FlockOperation::NonBlockingLockExclusive)?;
    Ok(dir)
}

fn make_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o750).create(path)
}

fn remove(how: impl FnOnce() -> io::Result<()>, path: &Path) -> Result<(), String> {
    match how() {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(format!("{} ({error})", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record {
            node_endpoint: "unix:///x.sock".to_owned(),
            controller_endpoint: "unix:///y.sock".to_owned(),
            volumes: Vec::new(),
            creation: Creation {
                size: "64Mi".parse().unwrap(),
                usage: AccessArgs {
                    fs: Some("xfs".to_owned()),
                    ..AccessArgs::default()
                },
                origin: NewVolumeArgs {
                    parameters: vec![("key".to_owned(), "value".to_owned())],
                    ..NewVolumeArgs::default()
                },
            },
        }
    }

    #[test]
    fn a_run_leaves_kubelets_directory_as_it_was() {
        let kubelet = tempfile::tempdir().unwrap();
        fs::create_dir(kubelet.path().join("plugins")).unwrap();
        let place = Place::make(kubelet.path(), "run").unwrap();
        place.record(&record()).unwrap();
        let paths = place.paths(3);
        for _ in 0..2 {
            paths.make().unwrap();
        }
        // As a driver that does not remove its target.
        fs::write(&paths.target, "").unwrap();
        assert!(!paths.is_staging_mounted());
        paths.remove().unwrap();
        place.remove().unwrap();
        let left = fs::read_dir(kubelet.path().join("plugins")).unwrap();
        assert_eq!(left.count(), 0);
    }

    #[test]
    fn what_another_put_there_stays_and_is_named() {
        let kubelet = tempfile::tempdir().unwrap();
        let place = Place::make(kubelet.path(), "run").unwrap();
        let paths = place.paths(0);
        paths.make().unwrap();
        let file = paths.staging.join("file");
        fs::write(&file, "precious").unwrap();
        let left = paths.remove().unwrap_err();
        assert!(left.contains("/run/0/globalmount"), "{left}");
        place.record(&record()).unwrap();
        assert!(place.remove().unwrap_err().ends_with("/run/0"));
        assert!(place.path().join(RECORD).exists());
        fs::write(&paths.target, "precious").unwrap();
        assert!(paths.remove().is_err());
        assert!(file.exists() && paths.target.exists());
    }

    #[test]
    fn a_killed_run_is_taken_over_and_a_live_one_is_not() {
        let kubelet = tempfile::tempdir().unwrap();
        let name = format!("{PREFIX}1");
        let place = Place::make(kubelet.path(), &name).unwrap();
        place.record(&record()).unwrap();
        fs::create_dir(kubelet.path().join(PARENT).join("a.driver")).unwrap();
        let path = place.path().to_owned();
        assert_eq!(Place::list(kubelet.path()).unwrap(), [&*path]);
        let found = Place::take_over(&path).unwrap();
        assert!(matches!(found, FoundRun::UnderWay));
        drop(place);
        let FoundRun::Killed(place, found) = Place::take_over(&path).unwrap() else {
            panic!("it has a record");
        };
        assert_eq!(*found, record());
        place.remove().unwrap();
        assert!(Place::list(kubelet.path()).unwrap().is_empty());
    }

    #[test]
    fn a_run_that_was_killed_before_its_record_leaves_only_its_directory() {
        let kubelet = tempfile::tempdir().unwrap();
        for draft in [None, Some("half a rec")] {
            let place = Place::make(kubelet.path(), &format!("{PREFIX}1")).unwrap();
            let path = place.path().to_owned();
            if let Some(draft) = draft {
                fs::write(path.join(DRAFT), draft).unwrap();
            }
            drop(place);
            let FoundRun::Unused(place) = Place::take_over(&path).unwrap() else {
                panic!("it has no record");
            };
            place.remove().unwrap();
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_run_s_directory_is_fresh() {
        let kubelet = tempfile::tempdir().unwrap();
        let _first = Place::make(kubelet.path(), "run").unwrap();
        assert!(Place::make(kubelet.path(), "run").is_err());
        assert!(Place::make(&kubelet.path().join("none"), "run").is_err());
    }
}
