//! Fixtures of the mount tests: a mount namespace, a directory and loop devices of their
//! own.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use rustix::mount::UnmountFlags;

use super::{
    path::{Roots, SafePath},
    table,
};
use crate::kernel::mounts::private_namespace;

/// A directory that is the only allowed root, in a mount namespace that ends
/// with the test's thread.
pub struct MountScratch {
    roots: Roots,
    directory: tempfile::TempDir,
}

impl MountScratch {
    pub fn new() -> Self {
        private_namespace();
        let directory = tempfile::tempdir().expect("a directory");
        let roots = Roots::new(&[directory.path().to_owned()]).expect("roots");
        Self { roots, directory }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn place(&self, below: &str) -> SafePath {
        let path = self.path().join(below);
        let path = path.to_str().expect("utf-8");
        self.roots.resolve(path).expect("a place")
    }

    /// Makes a directory, and resolves its path.
    pub fn directory(&self, below: &str) -> SafePath {
        std::fs::create_dir_all(self.path().join(below)).expect("created");
        self.place(below)
    }
}

impl Drop for MountScratch {
    fn drop(&mut self) {
        // A mount that a test left would prevent the removal of its directory.
        let path = self.path().canonicalize().expect("there");
        for entry in table::list().expect("listed").iter().rev() {
            if entry.mount_point.starts_with(&path) {
                let _ = rustix::mount::unmount(&entry.mount_point, UnmountFlags::DETACH);
            }
        }
    }
}

/// A loop device over a sparse image of 320 MiB, XFS's least.
pub struct TestLoop {
    pub node: PathBuf,
}

impl TestLoop {
    /// Attaches a device with the file system that `mkfs` makes (a program and its
    /// options), or a blank one if `mkfs` is empty.
    pub fn new(scratch: &MountScratch, mkfs: &[&str], losetup: &[&str]) -> Self {
        let image = tempfile::NamedTempFile::new_in(scratch.path()).expect("an image");
        image.as_file().set_len(320 << 20).expect("sparse");
        // The loop device keeps the image; its name may be removed.
        Self::attach(image.path(), mkfs, losetup)
    }

    /// Attaches a device over this image, which may back other loop devices, too.
    pub fn over(image: &Path, mkfs: &[&str]) -> Self {
        Self::attach(image, mkfs, &[])
    }

    fn attach(image: &Path, mkfs: &[&str], losetup: &[&str]) -> Self {
        if let Some((program, options)) = mkfs.split_first() {
            output(Command::new(program).args(options).arg("-q").arg(image));
        }
        let attach = ["--find", "--show"];
        let node = output(
            Command::new("losetup")
                .args(attach)
                .args(losetup)
                .arg(image),
        );
        Self {
            node: node.trim().into(),
        }
    }
}

impl Drop for TestLoop {
    fn drop(&mut self) {
        // The kernel defers the detach while a failed test's mount still exists.
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.node)
            .output();
    }
}

fn output(command: &mut Command) -> String {
    let output = command.output().expect("installed");
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).expect("utf-8")
}
