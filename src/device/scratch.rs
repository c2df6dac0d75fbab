//! A loop device over a file of its own, for the tests of this crate.

use std::{fs::File, path::Path};

use tempfile::NamedTempFile;

use super::{
    Backing, Device, Source,
    loopdev::{self, AttachedLoop, FileId, LoopDevice, LoopOptions},
};
use crate::kernel::loopctl;

/// Detached and deleted when dropped.
pub struct Scratch {
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
        let (device, _) = loopdev::attach(image.as_file(), &options(image.path())).unwrap();
        Self { image, device }
    }

    /// The image's identity.
    pub fn id(&self) -> FileId {
        FileId::of(self.image.as_file()).unwrap()
    }

    /// The device, as that of a volume.
    pub fn as_volume_s(&self) -> Device {
        Device {
            dev: self.device.dev,
            node: self.device.node.clone(),
            backing: Backing::Image(self.id()),
            read_only: false,
            diskseq: self.device.diskseq,
            encrypted: None,
        }
    }

    /// The image, as that of a volume.
    pub fn source(&self) -> Source {
        let name = self.image.path().file_name().unwrap().to_str().unwrap();
        Source::image("p", name)
    }

    /// The devices over the image.
    pub fn found(&self) -> Vec<AttachedLoop> {
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
        // A mount may have it open: of a namespace whose last process has just ended, or
        // of a test that failed. Unlike `loopdev::detach` this does not check: the kernel
        // detaches it when the last opener closes it.
        let id = self.id();
        if let Ok(node) = File::open(&self.device.node)
            && loopctl::status(&node).is_ok_and(|status| loopdev::is_over(&status, id))
        {
            let _ = loopctl::clear(&node);
        }
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
