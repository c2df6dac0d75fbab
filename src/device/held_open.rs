//! A device that is kept open from its probe until it is mounted.
//!
//! mkfs, fsck and mount take a path, and the kernel gives a detached device's number to
//! another image. An open descriptor prevents that: a loop device defers its detach, an NBD
//! device keeps its configuration, and krbd refuses to unmap. If another program forces
//! the detach, the disk behind the descriptor and the disk with that number differ in
//! their sequence numbers, which are compared before each step.
//!
//! It is open for reading, without `O_EXCL`, and so in the way of neither mkfs nor
//! fsck. Opening, looking and closing may block: all on the volume's lane.

use std::{fs::File, io, os::fd::BorrowedFd};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

use super::{
    Backing, Device, DeviceError, Source, error,
    loopdev::{self, FileId},
};
use crate::kernel::{block, loopctl, sysfs};

/// A device that no other source gets the number of.
#[derive(Debug)]
pub struct HeldOpen {
    file: File,
    source: Source,
    device: Device,
    diskseq: Option<u64>,
}

impl HeldOpen {
    /// Opens the device, and makes sure that the source is behind it. `attached`: the
    /// descriptor by which it was attached just now. While that is open, the sequence number
    /// suffices: [`Self::check`] sees whether a detach was requested meanwhile.
    pub fn new(
        source: &Source,
        device: &Device,
        attached: Option<BorrowedFd<'_>>,
    ) -> Result<Self, DeviceError> {
        let opened = match device.diskseq {
            // It is compared: two disks never have the same.
            Some(_) => rustix::fs::open(
                &device.node,
                OFlags::RDONLY | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .map_err(io::Error::from),
            None => block::open(&device.node, device.dev, OFlags::RDONLY),
        };
        let file = opened.map_err(error::io("open the device"))?;
        let diskseq = block::diskseq(&file).map_err(error::io(LOOK))?;
        let held = Self {
            file: file.into(),
            source: source.clone(),
            device: device.clone(),
            diskseq,
        };
        let is_attached = attached.is_some() && diskseq.is_some() && diskseq == device.diskseq;
        if !is_attached {
            held.checked(held.is_over_source())?;
        }
        Ok(held)
    }

    /// Ensures that the device is still the one that was opened, and stays it.
    pub fn check(&self) -> Result<(), DeviceError> {
        self.checked(self.is_it())
    }

    fn checked(&self, is_it: io::Result<bool>) -> Result<(), DeviceError> {
        if is_it.map_err(error::io(LOOK))? {
            return Ok(());
        }
        Err(DeviceError::Changed {
            device: self.device.node.clone(),
        })
    }

    fn is_it(&self) -> io::Result<bool> {
        let is_same = match &self.device.backing {
            // A loop device that is open is attached to no other file.
            Backing::Image(_) => true,
            _ => block::diskseq(&self.file)? == self.diskseq,
        };
        Ok(is_same && self.is_over_source()?)
    }

    fn is_over_source(&self) -> io::Result<bool> {
        match &self.device.backing {
            Backing::Image(id) => self.is_over_image(*id),
            // A device mapper's number does not depend on its lower device, which stays while
            // the mapping is open.
            _ => Ok(sysfs::diskseq(self.device.dev)? == self.diskseq
                && self.source.is_still(&self.device)),
        }
    }

    /// The kernel removes no loop device that is open (LOOP_CTL_REMOVE), so the descriptor
    /// is of the disk with that number. One with a deferred detach goes when its last
    /// opener closes it, and must not be mounted.
    fn is_over_image(&self, id: FileId) -> io::Result<bool> {
        let same_attach = self.device.diskseq.is_none() || self.device.diskseq == self.diskseq;
        let status = match loopctl::status(&self.file) {
            Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => {
                return Ok(false);
            }
            status => status?,
        };
        Ok(same_attach && loopdev::is_over(&status, id) && status.flags & loopctl::AUTOCLEAR == 0)
    }
}

const LOOK: &str = "look at the device";

#[cfg(test)]
mod tests {
    use std::{os::fd::AsFd as _, process::Command};

    use super::*;
    use crate::device::scratch::Scratch;

    /// As an operator who does not know the device's owner.
    fn losetup(args: &[&str]) {
        let _ = Command::new("losetup").args(args).output().unwrap();
    }

    #[test]
    fn a_device_that_is_held_open_keeps_its_number_and_a_detach_is_noticed() {
        let scratch = Scratch::new(1 << 20);
        let (source, device) = (scratch.source(), scratch.as_volume_s());
        let held = HeldOpen::new(&source, &device, None).unwrap();
        held.check().unwrap();
        losetup(&["--detach", device.node.to_str().unwrap()]);
        let detached = held.check();
        assert!(
            matches!(detached, Err(DeviceError::Changed { .. })),
            "{detached:?}"
        );
        assert_eq!(
            scratch.found().len(),
            1,
            "it stays for as long as it is held"
        );
        drop(held);
        while source.is_still(&device) {
            std::thread::yield_now();
        }
        assert!(HeldOpen::new(&source, &device, None).is_err());
    }

    /// Between its attach and its first use.
    #[test]
    fn the_detach_of_a_device_that_was_attached_just_now_is_noticed() {
        let scratch = Scratch::new(1 << 20);
        let (source, device) = (scratch.source(), scratch.as_volume_s());
        let attached = scratch.open();
        losetup(&["--detach", device.node.to_str().unwrap()]);
        let held = HeldOpen::new(&source, &device, Some(attached.as_fd()));
        if device.diskseq.is_none() {
            // Before Linux 5.15 no number tells the device from its next image's.
            return assert!(held.is_err(), "{held:?}");
        }
        let held = held.unwrap();
        assert!(matches!(held.check(), Err(DeviceError::Changed { .. })));
        let of_another = Device {
            diskseq: device.diskseq.map(|seq| seq + 1),
            ..device
        };
        let refused = HeldOpen::new(&source, &of_another, Some(attached.as_fd()));
        assert!(refused.is_err(), "{refused:?}");
    }

    #[test]
    fn an_image_of_the_same_name_is_another() {
        let scratch = Scratch::new(1 << 20);
        let (source, device) = (scratch.source(), scratch.as_volume_s());
        assert!(source.is_still(&device) && device.still_matches());
        let node = device.node.to_str().unwrap();
        losetup(&["--detach", node]);
        // udevd, which looks at new devices, may put the detach off.
        while source.is_still(&device) {
            std::thread::yield_now();
        }
        let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
        let other = elsewhere
            .path()
            .join(scratch.image.path().file_name().unwrap());
        File::create_new(&other).unwrap().set_len(1 << 20).unwrap();
        // Another process may have attached the device first: then it is theirs.
        losetup(&[node, other.to_str().unwrap()]);
        let found = (
            source.is_still(&device),
            HeldOpen::new(&source, &device, None),
        );
        if sysfs::backing_file(device.dev).is_ok_and(|file| file == other) {
            losetup(&["--detach", node]);
        }
        assert!(!found.0 && found.1.is_err(), "{found:?}");
    }
}
