//! Loop devices: image files, and kubelet's locks, behind block devices.
//!
//! **Attach.** `LOOP_CTL_GET_FREE` names a free device and `LOOP_CONFIGURE`
//! takes it; if another process takes it first, the next number is tried.
//!
//! **Detach.** `LOOP_CLR_FD` succeeds although others have the device open, and takes
//! effect when the last of them closes it. A file system on it may be mounted in another
//! mount namespace. So the device is claimed first (`O_EXCL`, which fails under a mounted
//! file system, device mapper or md), its file is checked on that descriptor, and it
//! counts as detached only when its status says so.
//!
//! All of this may block for as long as the device does: call it on a lane.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    sync::LazyLock,
};

use rustix::{
    fs::{Mode, OFlags, Stat},
    io::Errno,
};
use serde::{Deserialize, Serialize};

use crate::{
    Detached, Kind, crash_point,
    kernel::{Dev, block, busy::retry_while_busy, loopctl, sysfs},
};

mod behind;
mod locks;
mod reserved;

pub use behind::file_system_behind;
pub use locks::{DescriptorLock, lock_over, locks_on, unlock};

/// Of the driver's devices (`linux/major.h`).
const LOOP_MAJOR: u32 = 7;

/// How many free devices others may take before an attach gives up.
const TRIES: u32 = 128;

/// A file, whatever its name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileId {
    /// `st_dev`.
    pub dev: u64,
    /// `st_ino`.
    pub ino: u64,
}

impl FileId {
    /// The id of an open file.
    pub fn of(file: &File) -> io::Result<Self> {
        Ok(Self::from(&rustix::fs::fstat(file)?))
    }
}

impl From<&Stat> for FileId {
    fn from(stat: &Stat) -> Self {
        Self {
            dev: stat.st_dev,
            ino: stat.st_ino,
        }
    }
}

/// A loop device, configured or not.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LoopDevice {
    /// The `7` of `loop7`.
    pub number: u32,
    /// Its device number.
    pub dev: Dev,
    /// `/dev/loop7`.
    pub node: PathBuf,
    /// The sequence number that it has for as long as the same file is behind it,
    /// where the kernel has such numbers ([`block::diskseq`]).
    pub diskseq: Option<u64>,
}

impl LoopDevice {
    /// Whether no file was attached or detached since. False where the kernel cannot tell.
    fn is_attached_as_before(&self) -> bool {
        self.diskseq.is_some() && sysfs::diskseq(self.dev).is_ok_and(|now| now == self.diskseq)
    }

    fn open(&self, flags: OFlags) -> io::Result<OwnedFd> {
        block::open(&self.node, self.dev, flags)
    }
}

/// How an image is put behind a loop device.
#[derive(Clone, Copy, Debug)]
pub struct LoopOptions<'a> {
    /// The device refuses writes.
    pub read_only: bool,
    /// Bypass the page cache of the image's file system, if that supports it.
    pub direct_io: bool,
    /// Bytes of a logical sector: 512, 1024, 2048 or 4096; 0 is the kernel's
    /// choice.
    pub sector_size: u32,
    /// The name that `losetup -l` shows.
    pub name: &'a Path,
}

/// A loop device and what it backs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachedLoop {
    pub device: LoopDevice,
    /// It refuses writes.
    pub read_only: bool,
    /// It bypasses the page cache.
    pub direct_io: bool,
    /// It detaches when its last opener closes it: nothing new may be built on it.
    pub detaching: bool,
    /// Bytes of the file before the device's start.
    pub offset: u64,
    /// Bytes of the file that it shows; 0 is all of them.
    pub size_limit: u64,
}

/// Why a loop device could not be attached, changed or detached.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// No loop driver.
    ///
    /// Remedy: `modprobe loop` on this node.
    #[error("cannot open /dev/loop-control; load the kernel module \"loop\" on this node")]
    Control(#[source] io::Error),
    /// The kernel offered no free device.
    ///
    /// Remedy: detach unused loop devices (`losetup --list`, `losetup -d`); in a container mount
    /// the host's /dev.
    #[error("cannot get a free loop device")]
    Free(#[source] io::Error),
    /// Others took every free device first.
    ///
    /// Remedy: nothing: the call is repeated; find the program that attaches so many (`losetup
    /// --list`).
    #[error("{TRIES} free loop devices in turn were taken by others before {image} got one")]
    NoneFree {
        /// The image's name.
        image: PathBuf,
    },
    /// A writable device was asked for over an image that can't be written.
    ///
    /// Remedy: make the image writable (`ls -l`, `lsattr`), or its file system (`mount -o
    /// remount,rw`).
    #[error("{image} was opened read-only and cannot back a writable device")]
    ReadOnlyImage {
        /// The image's name.
        image: PathBuf,
    },
    /// The kernel refused the image.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the image must be a file on a local or
    /// network disk.
    #[error("cannot put {image} behind {node}")]
    Attach {
        /// The image's name.
        image: PathBuf,
        /// The loop device.
        node: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A file system, device mapper, md or a process holds the device.
    ///
    /// Remedy: `uringctl volumes`, or `lsof DEVICE`, shows who has it open; end that.
    #[error("{node} is in use; it stays attached until its user lets go")]
    Busy {
        /// The loop device.
        node: PathBuf,
    },
    /// Anything else that went wrong with the device.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the call is repeated.
    #[error("cannot {what} {node}")]
    Device {
        /// The loop device.
        node: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl LoopError {
    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::NoneFree { .. } => Kind::Exhausted,
            _ => Kind::Transient,
        }
    }
}

fn device_error(device: &LoopDevice, what: &'static str) -> impl FnOnce(io::Error) -> LoopError {
    let node = device.node.clone();
    move |source| LoopError::Device { node, what, source }
}

/// Puts an image behind a free loop device. Returns its descriptor, too: for direct I/O, and
/// while it is open no other opener has the device exclusively.
pub fn attach(image: &File, options: &LoopOptions<'_>) -> Result<(LoopDevice, OwnedFd), LoopError> {
    let name = || options.name.to_owned();
    let mut flags = 0;
    if options.read_only {
        flags |= loopctl::READ_ONLY;
    }
    if options.direct_io {
        flags |= loopctl::DIRECT_IO;
    }
    let config = loopctl::LoopSettings {
        sector_size: options.sector_size,
        flags,
        name: options.name.as_os_str().as_bytes(),
    };
    let control = loopctl::control().map_err(LoopError::Control)?;
    let mut least = 0;
    for _ in 0..TRIES {
        let number = reserved::Reserved::take(control, least).map_err(LoopError::Free)?;
        match configure(number.get(), image, &config) {
            Ok(None) => return Err(LoopError::ReadOnlyImage { image: name() }),
            Ok(Some(attached)) => {
                crash_point();
                return Ok(attached);
            }
            Err(e) if block::is_busy(&e) || is(&e, Errno::NXIO) => least = number.get() + 1,
            Err(source) => {
                return Err(LoopError::Attach {
                    image: name(),
                    node: node_of(number.get()),
                    source,
                });
            }
        }
    }
    Err(LoopError::NoneFree { image: name() })
}

/// Puts an image behind the loop device of that number. None if the device was to be
/// writable, and the image is not.
fn configure(
    number: u32,
    image: &File,
    config: &loopctl::LoopSettings<'_>,
) -> io::Result<Option<(LoopDevice, OwnedFd)>> {
    let node = node_of(number);
    let access = match config.flags & loopctl::READ_ONLY {
        0 => OFlags::RDWR,
        _ => OFlags::RDONLY,
    };
    let flags = access | OFlags::EXCL | OFlags::DIRECT | OFlags::CLOEXEC;
    let file = once_made(|| Ok(rustix::fs::open(&node, flags, Mode::empty())?))?;
    let dev = Dev::from_raw(rustix::fs::fstat(&file)?.st_rdev);
    loopctl::configure(&file, image.as_fd(), config)?;
    let look = || {
        if !is_minor(number, dev) {
            refuse_other_number(number, &loopctl::status(&file)?)?;
        }
        let writable = config.flags & loopctl::READ_ONLY == 0;
        if writable && block::is_read_only(&file)? {
            // By its image, which cannot be written, or by the mark of a read-only publish.
            if loopctl::status(&file)?.flags & loopctl::READ_ONLY != 0 {
                return Ok(None);
            }
            block::set_read_only(&file, false)?;
        }
        Ok(Some(LoopDevice {
            number,
            dev,
            node,
            // While it is open, no other image gets its number.
            diskseq: block::diskseq(&file)?,
        }))
    };
    let looked: io::Result<_> = look();
    if !matches!(looked, Ok(Some(_))) {
        // The reason for the failure is what the caller must learn.
        let _ = loopctl::clear(&file);
    }
    Ok(looked?.map(|device| (device, file)))
}

/// Whether the device's number shows that it is the loop device of that number: so it does
/// unless the driver numbers partitions, too (`max_part`). The driver has the parameter for as
/// long as this process has its control device open.
fn is_minor(number: u32, dev: Dev) -> bool {
    static WITHOUT_PARTITIONS: LazyLock<bool> = LazyLock::new(|| {
        sysfs::attribute("/sys/module/loop/parameters/max_part").is_ok_and(|it| it.trim() == "0")
    });
    (dev.major, dev.minor) == (LOOP_MAJOR, number) && *WITHOUT_PARTITIONS
}

/// The device knows its number, whatever its node is called.
fn refuse_other_number(number: u32, status: &loopctl::LoopStatus) -> io::Result<()> {
    if status.number == number {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        format!(
            "{} is the node of loop{}",
            node_of(number).display(),
            status.number
        ),
    ))
}

/// Waits for what the kernel may be making for another process: a device has its
/// number for a moment before sysfs and `/dev` have the device.
fn once_made<T>(attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    retry_while_busy(
        attempt,
        |found| matches!(found, Err(e) if e.kind() == io::ErrorKind::NotFound),
    )
}

/// The loop devices that back a file, which has the name that `image` ends in.
///
/// Queries only devices over files of that name: the file system of the backing file
/// answers for a device's status, and may hang, and an open device defers its detach.
pub fn find(id: FileId, image: &Path) -> io::Result<Vec<AttachedLoop>> {
    find_among(sysfs::numbers("loop")?, id, image)
}

/// As [`find`], of the loop device of that node alone.
pub fn find_at(node: &Path, id: FileId, image: &Path) -> io::Result<Option<AttachedLoop>> {
    let number = number_of(node).filter(|number| node_of(*number) == node);
    Ok(find_among(number, id, image)?.pop())
}

fn find_among(
    numbers: impl IntoIterator<Item = u32>,
    id: FileId,
    image: &Path,
) -> io::Result<Vec<AttachedLoop>> {
    let found = configured(
        numbers,
        |backing| backing.file_name() == image.file_name(),
        |status| is_over(status, id),
        |_| false,
    )?;
    Ok(found
        .into_iter()
        .map(|(device, status)| AttachedLoop {
            device,
            read_only: status.flags & loopctl::READ_ONLY != 0,
            direct_io: status.flags & loopctl::DIRECT_IO != 0,
            detaching: status.flags & loopctl::AUTOCLEAR != 0,
            offset: status.offset,
            size_limit: status.size_limit,
        })
        .collect())
}

/// Detaches the file `id` from a loop device; fails if the device is in use. A device that
/// `was_raw` may have the mark of a read-only publish (BLKROSET), which belongs to its number
/// and outlives the image: that is cleared.
pub fn detach(device: &LoopDevice, id: FileId, was_raw: bool) -> Result<Detached, LoopError> {
    release(device, was_raw, |status| is_over(status, id))
}

/// Writes what was written to a loop device through to its file's storage, if the file `id`
/// is behind it. Neither the last close of the device nor a detach does that: the data may
/// be in the page cache that this node has of the file.
pub fn write_back(device: &LoopDevice, id: FileId) -> Result<(), LoopError> {
    if !is_configured(device.number) {
        return Ok(());
    }
    // The detach finds the same, and knows what it means.
    let Ok(file) = device.open(OFlags::RDONLY) else {
        return Ok(());
    };
    let may_be_cached = match loopctl::status(&file) {
        Ok(status) => {
            let direct = status.flags & (loopctl::READ_ONLY | loopctl::DIRECT_IO) != 0;
            is_over(&status, id) && !direct
        }
        // As in the detach: its file's file system has failed.
        Err(_) => device.is_attached_as_before(),
    };
    if !may_be_cached {
        return Ok(());
    }
    // The driver answers the flush by an fsync of the file.
    let written = rustix::fs::fsync(&file).map_err(io::Error::from);
    written.map_err(device_error(device, "write back the data of"))
}

/// Makes a loop device as large as its file is now; returns its size in bytes.
pub fn resize(device: &LoopDevice) -> Result<u64, LoopError> {
    let resized = device.open(OFlags::RDONLY).and_then(|file| {
        loopctl::set_capacity(&file)?;
        block::size_bytes(&file)
    });
    resized.map_err(device_error(device, "resize"))
}

fn release(
    device: &LoopDevice,
    was_raw: bool,
    ours: impl Fn(&loopctl::LoopStatus) -> bool,
) -> Result<Detached, LoopError> {
    let failed = |source| device_error(device, "detach")(source);
    let still_ours = || match status_of(device.number) {
        Ok(status) => Ok(status.is_some_and(|(_, status)| ours(&status))),
        Err(_) if device.is_attached_as_before() => Ok(true),
        Err(error) => Err(failed(error)),
    };
    // What was just unmounted may be kept for a moment by a child's copy of a descriptor.
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    let open = || Ok(rustix::fs::open(&device.node, flags, Mode::empty())?);
    let is_busy = |opened: &io::Result<_>| opened.as_ref().is_err_and(block::is_busy);
    let file = match retry_while_busy(open, is_busy) {
        Ok(file) => file,
        Err(e) if is_detached(&e) || !is_configured(device.number) => {
            return Ok(Detached::Already);
        }
        // It may have another file by now, and be busy with that.
        Err(e) if block::is_busy(&e) && still_ours()? => {
            return Err(LoopError::Busy {
                node: device.node.clone(),
            });
        }
        Err(e) if block::is_busy(&e) => return Ok(Detached::Already),
        Err(e) => return Err(failed(e)),
    };
    match loopctl::status(&file) {
        Ok(status) => {
            refuse_other_number(device.number, &status).map_err(failed)?;
            if !ours(&status) {
                return Ok(Detached::Already);
            }
            let refuses_writes = status.flags & loopctl::READ_ONLY != 0;
            if was_raw && !refuses_writes && block::is_read_only(&file).map_err(failed)? {
                block::set_read_only(&file, false).map_err(failed)?;
            }
        }
        Err(e) if is_detached(&e) && !is_configured(device.number) => {
            return Ok(Detached::Already);
        }
        // The kernel looks at the file for it, and a file system that has failed answers
        // nothing. It can be repaired only once no device is over its files.
        Err(_) if device.is_attached_as_before() => {}
        Err(e) => return Err(failed(e)),
    }
    match loopctl::clear(&file) {
        Ok(()) => {}
        Err(e) if is_detached(&e) => return Ok(Detached::Already),
        Err(e) => return Err(failed(e)),
    }
    drop(file);
    if still_ours()? {
        Ok(Detached::Deferred)
    } else {
        Ok(Detached::Now)
    }
}

/// The configured loop devices of these numbers whose backing path may be meant and whose
/// status then pleases, in their order. The others are not opened, and one whose
/// status cannot be read is passed over where `is_foreign` says so of the error.
fn configured(
    numbers: impl IntoIterator<Item = u32>,
    may_be_meant: impl Fn(&Path) -> bool,
    pleases: impl Fn(&loopctl::LoopStatus) -> bool,
    is_foreign: impl Fn(&io::Error) -> bool,
) -> io::Result<Vec<(LoopDevice, loopctl::LoopStatus)>> {
    let mut found = Vec::new();
    for number in numbers {
        if !backing_path(number).is_ok_and(|path| may_be_meant(&path)) {
            continue;
        }
        match status_of(number) {
            Ok(Some((device, status))) if pleases(&status) => found.push((device, status)),
            Ok(_) => {}
            Err(error) if is_foreign(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// A loop device and what it backs; none where it backs nothing.
fn status_of(number: u32) -> io::Result<Option<(LoopDevice, loopctl::LoopStatus)>> {
    // Not even opened where sysfs knows better: an opener delays a detach.
    if !is_configured(number) {
        return Ok(None);
    }
    let look = || {
        let node = rustix::fs::open(
            node_of(number),
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let device = LoopDevice {
            number,
            dev: Dev::from_raw(rustix::fs::fstat(&node)?.st_rdev),
            node: node_of(number),
            diskseq: block::diskseq(&node)?,
        };
        Ok((device, loopctl::status(&node)?))
    };
    match look() {
        Ok(found) => {
            refuse_other_number(number, &found.1)?;
            Ok(Some(found))
        }
        Err(e) if is_detached(&e) || !is_configured(number) => Ok(None),
        Err(e) => Err(e),
    }
}

/// The configured loop devices, each with the file behind it as the kernel names it.
/// Opens none of them.
pub fn backing_files() -> io::Result<Vec<(Dev, PathBuf)>> {
    let mut found = Vec::new();
    for number in sysfs::numbers("loop")? {
        // It may be detached meanwhile.
        let dev = sysfs::dev_of(&format!("loop{number}"));
        let file = dev.and_then(|dev| Ok((dev, sysfs::backing_file(dev)?)));
        found.extend(file.ok());
    }
    Ok(found)
}

/// The path of the file behind a loop device, as this mount namespace shows it; also of a
/// deleted file.
fn backing_path(number: u32) -> io::Result<PathBuf> {
    let path = sysfs::attribute(format!("/sys/block/loop{number}/loop/backing_file"))?;
    let path = path.trim_end_matches('\n');
    Ok(path.strip_suffix(sysfs::DELETED).unwrap_or(path).into())
}

/// The `7` of `/dev/loop7`.
pub fn number_of(node: &Path) -> Option<u32> {
    sysfs::number_in(node.file_name()?.to_str()?, "loop")
}

fn node_of(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/loop{number}"))
}

/// sysfs shows a loop device's particulars while it is configured only.
fn is_configured(number: u32) -> bool {
    Path::new(&format!("/sys/block/loop{number}/loop")).exists()
}

pub(super) fn is_over(status: &loopctl::LoopStatus, id: FileId) -> bool {
    status.device == id.dev && status.inode == id.ino
}

/// The device backs nothing, or is about to, or was removed. A missing node is
/// no such sign: the device may be there all the same.
fn is_detached(e: &io::Error) -> bool {
    is(e, Errno::NXIO) || is(e, Errno::NODEV)
}

fn is(e: &io::Error, errno: Errno) -> bool {
    e.raw_os_error() == Some(errno.raw_os_error())
}

#[cfg(test)]
mod tests;
