//! A loop device over a file of its own, for the tests of this crate.

use std::{fs::File, path::Path};

use tempfile::NamedTempFile;

use super::loopdev::{self, Attached, FileId, LoopDevice, LoopOptions};

/// Detached and deleted when dropped.
pub struct Scratch {
    /// The image.
    pub image: NamedTempFile,
    /// The device over it.
    pub device: LoopDevice,
}

impl Scratch {
    /// A writable device of `bytes` zeros.
    pub fn new(bytes: u64) -> Self {
        Self::over(Self::image(bytes))
    }

    /// A file of `bytes` zeros, in memory.
    pub fn image(bytes: u64) -> NamedTempFile {
        let image = NamedTempFile::new_in("/dev/shm").unwrap();
        image.as_file().set_len(bytes).unwrap();
        image
    }

    /// A writable device over an image.
    pub fn over(image: NamedTempFile) -> Self {
        let device = loopdev::attach(image.as_file(), &options(image.path())).unwrap();
        Self { image, device }
    }

    /// The image's identity.
    pub fn id(&self) -> FileId {
        FileId::of(self.image.as_file()).unwrap()
    }

    /// The devices over the image.
    pub fn found(&self) -> Vec<Attached> {
        loopdev::find(self.id(), self.image.path()).unwrap()
    }

    /// The device, open for reading and writing.
    pub fn open(&self) -> File {
        File::options()
            .read(true)
            .write(true)
            .open(&self.device.node)
            .unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A test that failed half-way may have left it busy; it says so itself.
        let _ = loopdev::detach(&self.device, self.id());
    }
}

/// A writable device with the kernel's defaults.
pub fn options(name: &Path) -> LoopOptions<'_> {
    LoopOptions {
        read_only: false,
        direct_io: false,
        sector_size: 0,
        name,
    }
}
