//! The isolated environment of a story.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use rustix::{
    mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount},
    thread::{UnshareFlags, unshare_unsafe},
};
use tempfile::TempDir;

use super::{MIB, Volume, leaks, run, run_err, skip_test};

/// A mount namespace of this thread alone, with a tmpfs that holds everything a
/// story makes: pools, kubelets' directories, sockets, records, logs.
pub struct Sandbox {
    dir: TempDir,
}

impl Sandbox {
    /// Leaves the machine's mount namespace for good: call it on a thread that
    /// ends with the story.
    pub fn new() -> Self {
        // SAFETY: no descriptor table is unshared; the namespace alone is.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.expect("tests need root");
        mount_change(
            "/",
            MountPropagationFlags::REC | MountPropagationFlags::PRIVATE,
        )
        .expect("/ made private");
        // Short, since a socket's path has 108 bytes at most.
        let dir = TempDir::with_prefix_in("ucsi-", "/tmp").expect("a directory");
        tmpfs(dir.path());
        let sandbox = Self { dir };
        sandbox.pool("main");
        sandbox
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The directory of a pool, on tmpfs (which has no reflink), made if missing.
    pub fn pool(&self, name: &str) -> PathBuf {
        let pool = self.dir().join("pools").join(name);
        fs::create_dir_all(&pool).expect("a pool's directory");
        pool
    }

    /// A pool on an xfs of its own, which has reflink.
    pub fn reflink_pool(&self, name: &str) -> PathBuf {
        let pool = self.pool(name);
        let image = self.dir().join(format!("{name}.xfs"));
        fs::File::create(&image)
            .and_then(|file| file.set_len(2048 * MIB))
            .expect("an image");
        run(&["mkfs.xfs", "-q", "-m", "reflink=1", path(&image)]);
        run(&["mount", "-o", "loop", path(&image), path(&pool)]);
        pool
    }

    /// A file system that enforces the quotas of projects, mounted at that directory of the
    /// sandbox; none where this kernel cannot do that.
    pub fn quota_share(&self, name: &str, fs_type: &str) -> Option<PathBuf> {
        let (share, image) = (
            self.dir().join(name),
            self.dir().join(format!("{name}.img")),
        );
        fs::create_dir_all(&share).expect("a directory");
        fs::File::create(&image)
            .and_then(|file| file.set_len(512 * MIB))
            .expect("an image");
        let make: &[&str] = match fs_type {
            "xfs" => &["mkfs.xfs", "-q"],
            _ => &[
                "mkfs.ext4",
                "-q",
                "-O",
                "quota,project",
                "-E",
                "quotatype=prjquota",
            ],
        };
        run(&[make, &[path(&image)]].concat());
        let mounted = ["mount", "-o", "loop,prjquota", path(&image), path(&share)];
        if let Err(said) = run_err(&mounted) {
            skip_test(&format!(
                "this kernel has no project quotas of {fs_type}: {said}"
            ));
            return None;
        }
        Some(share)
    }

    /// A kubelet's directory: a shared mount, as propagation to pods needs it.
    pub fn kubelet(&self, node: &str) -> PathBuf {
        let kubelet = self.dir().join(format!("kubelet-{node}"));
        if !kubelet.exists() {
            fs::create_dir_all(&kubelet).expect("a kubelet's directory");
            tmpfs(&kubelet);
            mount_change(&kubelet, MountPropagationFlags::SHARED).expect("a shared mount");
        }
        kubelet
    }

    /// A blank image in pool `main` and the static volume over it.
    pub fn volume(&self, name: &str, fs_type: &str) -> Volume {
        let bytes = match fs_type {
            "xfs" => 320 * MIB,
            "btrfs" => 160 * MIB,
            _ => 64 * MIB,
        };
        self.volume_in("main", name, fs_type, bytes)
    }

    /// A blank image of `bytes` in `pool` and the static volume over it; for
    /// `fs_type` "block", a raw one.
    pub fn volume_in(&self, pool: &str, name: &str, fs_type: &str, bytes: u64) -> Volume {
        let image = self.pool(pool).join(format!("{name}.img"));
        fs::File::create(image)
            .and_then(|file| file.set_len(bytes))
            .expect("an image");
        self.known_volume_in(pool, name, fs_type)
    }

    /// The static volume over an image that is there.
    pub fn known_volume_in(&self, pool: &str, name: &str, fs_type: &str) -> Volume {
        let volume = if fs_type == "block" {
            Volume::block(name)
        } else {
            Volume::filesystem(name, fs_type)
        };
        volume.over(pool, &format!("{name}.img"))
    }

    /// The image under a volume.
    pub fn image(&self, volume: &Volume) -> PathBuf {
        self.pool(&volume.context["pool"])
            .join(&volume.context["image"])
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // Before they are unmounted: then their numbers are still theirs, and the kernel
        // detaches each with its mount. Later ones may lie over earlier ones.
        for device in leaks::loops_below(self.dir()).iter().rev() {
            let _ = run_err(&["losetup", "-d", device]);
        }
        for mounted in leaks::mounts_below(self.dir()).iter().rev() {
            let _ = unmount(mounted.as_path(), UnmountFlags::DETACH);
        }
        let _ = unmount(self.dir(), UnmountFlags::DETACH);
    }
}

fn tmpfs(at: &Path) {
    mount("tmpfs", at, "tmpfs", MountFlags::empty(), None).expect("a tmpfs");
    fs::set_permissions(at, fs::Permissions::from_mode(0o755)).expect("a mode");
}

/// As text: every path of a sandbox is UTF-8.
fn path(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}
