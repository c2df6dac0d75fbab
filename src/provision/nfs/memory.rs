//! What a copy keeps in memory of a tree: pods decide how much there is to keep.

use std::{io, path::Path};

/// The bytes that one copy may keep.
pub const MOST_MEMORY: u64 = 256 << 20;

/// What a map takes for an entry beside the text of its path, at most about.
const ENTRY: u64 = 160;

/// How much a copy may still keep.
#[derive(Clone, Copy, Debug)]
pub struct KeptMemory {
    left: u64,
}

impl KeptMemory {
    /// So many bytes.
    pub fn new(bytes: u64) -> Self {
        Self { left: bytes }
    }

    /// Takes what the entry of a path needs.
    pub fn take(&mut self, path: &Path) -> io::Result<()> {
        let left = self.left.checked_sub(size(path));
        self.left = left.ok_or_else(|| {
            // No repeat would succeed.
            let why = "it has too many hard links or directories with long paths: a copy would \
                       need more memory for them than it may take";
            io::Error::new(io::ErrorKind::InvalidData, why)
        })?;
        Ok(())
    }

    /// Gives back what was taken for that path.
    pub fn give_back(&mut self, path: &Path) {
        self.left += size(path);
    }
}

fn size(path: &Path) -> u64 {
    path.as_os_str().len() as u64 + ENTRY
}
