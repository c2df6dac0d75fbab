//! What tests of mounts stand on: a mount namespace and a directory of one's own.

use std::path::Path;

use super::path::{Place, Roots};
use crate::kernel::mounts::private_namespace;

/// A directory that is the only allowed root, in a mount namespace that ends
/// with the test's thread.
pub struct Scratch {
    roots: Roots,
    directory: tempfile::TempDir,
}

impl Scratch {
    pub fn new() -> Self {
        private_namespace();
        let directory = tempfile::tempdir().expect("a directory");
        let roots = Roots::new(&[directory.path().to_owned()]).expect("roots");
        Self { roots, directory }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn place(&self, below: &str) -> Place {
        let path = self.path().join(below);
        let path = path.to_str().expect("utf-8");
        self.roots.place(path).expect("a place")
    }

    /// A place with a new directory.
    pub fn directory(&self, below: &str) -> Place {
        std::fs::create_dir_all(self.path().join(below)).expect("created");
        self.place(below)
    }
}
