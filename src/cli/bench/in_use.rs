//! Whether something else on this node has a volume: then no run may use it, because its
//! NodeUnstageVolume would take the volume away from its pods.
//!
//! CSI has no call that tells. So each source that may know is asked: kubelet's files, the
//! mount tables of this process and of the driver's, and uring-csi's own list.

use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use serde::Deserialize;
use tonic::Code;

use super::{mounts::mount_points, place::KUBELET_DIR};
use crate::{
    cli::{context::Context, error::CliError},
    digest,
};

/// What is known of this node's volumes, taken once.
pub struct Used {
    /// Handle, and the file or path that names it.
    by_kubelet: Vec<(String, PathBuf)>,
    by_driver: Vec<(String, String)>,
    mounts: Vec<PathBuf>,
}

impl Used {
    /// Asks all sources. `own` is the directory of a run, whose mounts do not count.
    pub async fn look(
        context: &Context,
        kubelet_dir: &Path,
        driver_pid: Option<i32>,
        own: Option<&Path>,
    ) -> Result<Self, CliError> {
        let by_driver = match context.held().await {
            Ok(held) => held,
            // Another driver, which has no such service.
            Err(CliError::Refused { status, .. }) if status.code() == Code::Unimplemented => {
                Vec::new()
            }
            Err(error) => return Err(error),
        };
        let is_own = |path: &Path| own.is_some_and(|own| path.starts_with(own));
        let by_driver = by_driver.into_iter().flat_map(|held| {
            let targets = held.targets.into_iter().map(|target| target.path);
            let paths: Vec<_> = targets.chain([held.staging_path]).collect();
            let elsewhere = paths.into_iter().filter(|path| !is_own(Path::new(path)));
            let handle = held.volume_id;
            elsewhere.map(move |path| (handle.clone(), path))
        });
        let mut mounts = Vec::new();
        let processes = [
            Some("self".to_owned()),
            driver_pid.map(|pid| pid.to_string()),
        ];
        for process in processes.into_iter().flatten() {
            let points = mount_points(&process).map_err(|source| CliError::Io {
                doing: "read",
                path: format!("/proc/{process}/mountinfo").into(),
                source,
            })?;
            mounts.extend(points.into_iter().filter(|point| !is_own(point)));
        }
        let mut by_kubelet = kubelets_volumes(kubelet_dir)?;
        // A run may have another directory than kubelet.
        by_kubelet.extend(kubelets_volumes(Path::new(KUBELET_DIR))?);
        Ok(Self {
            by_kubelet,
            by_driver: by_driver.collect(),
            mounts,
        })
    }

    /// Where the volume is in use.
    pub fn place_of(&self, handle: &str) -> Option<String> {
        if let Some((_, file)) = self.by_kubelet.iter().find(|(of, _)| of == handle) {
            return Some(format!("used by kubelet ({})", file.display()));
        }
        if let Some((_, path)) = self.by_driver.iter().find(|(of, _)| of == handle) {
            return Some(match path.as_str() {
                "" => "held by the driver, which is at work on it".to_owned(),
                path => format!("held at {path}"),
            });
        }
        // Kubelet names a staging path by the handle's hash, other callers by the handle.
        let hash = digest::sha256_hex(handle);
        let named = |path: &&PathBuf| {
            let mut names = path.iter();
            names.any(|name| name == handle || name == hash.as_str())
        };
        let mount = self.mounts.iter().find(named)?;
        Some(format!("mounted at {}", mount.display()))
    }
}

/// Kubelet's `vol_data.json` (pkg/volume/csi).
#[derive(Deserialize)]
struct VolumeData {
    #[serde(default, rename = "volumeHandle")]
    handle: String,
}

/// Where kubelet keeps these files: beside what it staged, raw volumes elsewhere, and
/// beside what it published. `*` is any one name.
const VOLUME_DATA: [&str; 3] = [
    "plugins/kubernetes.io/csi/*/*/vol_data.json",
    "plugins/kubernetes.io/csi/volumeDevices/*/data/vol_data.json",
    "pods/*/volumes/kubernetes.io~csi/*/vol_data.json",
];

/// The volumes of every CSI driver that kubelet has staged or published, or is about to.
fn kubelets_volumes(kubelet_dir: &Path) -> Result<Vec<(String, PathBuf)>, CliError> {
    let mut found = Vec::new();
    for pattern in VOLUME_DATA {
        let files = matching(kubelet_dir, pattern).map_err(|source| CliError::Io {
            doing: "list kubelet's volumes in",
            path: kubelet_dir.to_owned(),
            source,
        })?;
        for file in files {
            // One that cannot be read may be that of any volume.
            let data = fs::read_to_string(&file).and_then(|text| {
                serde_json::from_str::<VolumeData>(&text).map_err(io::Error::from)
            });
            match data {
                Ok(data) => found.push((data.handle, file)),
                Err(gone) if is_absent(&gone) => {}
                Err(source) => {
                    return Err(CliError::Io {
                        doing: "find out whether the volumes are in use: cannot read",
                        path: file,
                        source,
                    });
                }
            }
        }
    }
    Ok(found)
}

/// The paths below `dir` that `pattern` stands for; the last name need not exist.
fn matching(dir: &Path, pattern: &str) -> io::Result<Vec<PathBuf>> {
    let mut paths = vec![dir.to_owned()];
    for name in pattern.split('/') {
        let mut next = Vec::new();
        for path in paths {
            if name != "*" {
                next.push(path.join(name));
                continue;
            }
            match fs::read_dir(&path) {
                Ok(entries) => {
                    for entry in entries {
                        next.push(entry?.path());
                    }
                }
                Err(absent) if is_absent(&absent) => {}
                Err(error) => return Err(error),
            }
        }
        paths = next;
    }
    Ok(paths)
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(dir: &Path, path: &str, text: &str) {
        let path = dir.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn kubelets_volumes_are_found_in_each_of_its_places() {
        let dir = tempfile::tempdir().unwrap();
        let csi = "plugins/kubernetes.io/csi";
        let files = [
            (format!("{csi}/a.driver/0f/vol_data.json"), "staged"),
            (
                format!("{csi}/volumeDevices/pv-1/data/vol_data.json"),
                "raw",
            ),
            (
                "pods/7/volumes/kubernetes.io~csi/pv-2/vol_data.json".to_owned(),
                "published",
            ),
        ];
        for (path, handle) in &files {
            put(
                dir.path(),
                path,
                &format!(r#"{{"volumeHandle":"{handle}","x":"y"}}"#),
            );
        }
        put(
            dir.path(),
            &format!("{csi}/a.driver/note"),
            "a file, no directory",
        );
        let found = kubelets_volumes(dir.path()).unwrap();
        let expected = files.map(|(path, handle)| (handle.to_owned(), dir.path().join(path)));
        assert_eq!(found, expected);

        put(dir.path(), &format!("{csi}/a.driver/ff/vol_data.json"), "{");
        let error = kubelets_volumes(dir.path()).unwrap_err();
        assert!(error.to_string().contains("vol_data.json"), "{error}");
    }

    #[test]
    fn a_volume_is_found_by_the_names_of_mounts() {
        let used = |mount: String| Used {
            by_kubelet: Vec::new(),
            by_driver: Vec::new(),
            mounts: vec![mount.into()],
        };
        let hash = digest::sha256_hex("data-1");
        for mount in ["/x/data-1".to_owned(), format!("/x/{hash}/globalmount")] {
            let place = used(mount.clone()).place_of("data-1").unwrap();
            assert!(place.contains(&mount), "{place}");
        }
        assert_eq!(used("/x/data-12".to_owned()).place_of("data-1"), None);
    }

    #[test]
    fn an_absent_kubelet_uses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        assert!(
            kubelets_volumes(&dir.path().join("none"))
                .unwrap()
                .is_empty()
        );
    }
}
