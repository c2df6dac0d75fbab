//! The ioctls of loop devices, from `linux/loop.h` and loop(4).

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    sync::OnceLock,
};

use rustix::ioctl::{Getter, Ioctl, IoctlOutput, NoArg, Opcode, Setter, ioctl};

const LOOP_CLR_FD: Opcode = 0x4C01;
const LOOP_GET_STATUS64: Opcode = 0x4C05;
const LOOP_SET_CAPACITY: Opcode = 0x4C07;
const LOOP_CONFIGURE: Opcode = 0x4C0A;
const LOOP_CTL_ADD: Opcode = 0x4C80;
const LOOP_CTL_GET_FREE: Opcode = 0x4C82;

/// The device refuses writes (`LO_FLAGS_READ_ONLY`).
pub const READ_ONLY: u32 = 1;
/// The kernel detaches the device when its last opener closes it
/// (`LO_FLAGS_AUTOCLEAR`). The kernel sets the flag on a device whose detach was requested
/// while others had it open.
pub const AUTOCLEAR: u32 = 4;
/// Reads and writes bypass the page cache of the backing file
/// (`LO_FLAGS_DIRECT_IO`).
pub const DIRECT_IO: u32 = 16;

/// Bytes of a name, its terminating zero included (`LO_NAME_SIZE`).
const NAME_SIZE: usize = 64;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; NAME_SIZE],
    crypt_name: [u8; NAME_SIZE],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo64>() == 232 && size_of::<LoopConfig>() == 304);

/// The configuration of a loop device, as `LOOP_GET_STATUS64` reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopStatus {
    /// `st_dev` of the backing file.
    pub device: u64,
    /// `st_ino` of the backing file.
    pub inode: u64,
    /// `st_rdev` of the backing file, if that is a block device.
    pub rdevice: u64,
    /// Offset of the device's start in the file, bytes.
    pub offset: u64,
    /// Bytes of the file that belong to the device; 0 means all.
    pub size_limit: u64,
    /// The device's own number, the 7 of `loop7`.
    pub number: u32,
    /// [`READ_ONLY`], [`AUTOCLEAR`], [`DIRECT_IO`] and others.
    pub flags: u32,
}

/// The configuration of a new loop device.
#[derive(Clone, Copy, Debug)]
pub struct LoopSettings<'a> {
    /// Bytes of a logical sector; with 0 the kernel chooses.
    pub sector_size: u32,
    /// [`READ_ONLY`] and [`DIRECT_IO`]. If the file's file system does not support direct
    /// I/O, the kernel ignores [`DIRECT_IO`].
    pub flags: u32,
    /// The name of the backing file for `losetup -l` on a kernel without sysfs; cut to
    /// 63 bytes.
    pub name: &'a [u8],
}

/// An ioctl whose answer is its return value.
struct Returning<const OPCODE: Opcode>(usize);

// SAFETY: the argument is a number, which the kernel does not dereference.
unsafe impl<const OPCODE: Opcode> Ioctl for Returning<OPCODE> {
    type Output = u32;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        OPCODE
    }

    fn as_ptr(&mut self) -> *mut libc::c_void {
        std::ptr::without_provenance_mut(self.0)
    }

    unsafe fn output_from_ptr(
        out: IoctlOutput,
        _: *mut libc::c_void,
    ) -> rustix::io::Result<Self::Output> {
        // A failure was returned as an error, so the number is not negative.
        Ok(out.unsigned_abs())
    }
}

/// `/dev/loop-control`, which stays open from the first success on.
pub fn control() -> io::Result<&'static File> {
    static CONTROL: OnceLock<File> = OnceLock::new();
    if let Some(control) = CONTROL.get() {
        return Ok(control);
    }
    let mut options = File::options();
    let control = options.read(true).write(true).open("/dev/loop-control")?;
    Ok(CONTROL.get_or_init(|| control))
}

/// The number of the first loop device without a backing file; the kernel makes a device
/// if there is none. Another process may attach it before the caller does.
pub fn get_free(control: impl AsFd) -> io::Result<u32> {
    // SAFETY: LOOP_CTL_GET_FREE ignores its argument.
    Ok(unsafe { ioctl(control, Returning::<LOOP_CTL_GET_FREE>(0)) }?)
}

/// Makes the loop device of that number; `AlreadyExists` if it exists.
pub fn add(control: impl AsFd, number: u32) -> io::Result<()> {
    // SAFETY: LOOP_CTL_ADD takes a number.
    unsafe { ioctl(control, Returning::<LOOP_CTL_ADD>(number as usize)) }?;
    Ok(())
}

/// Removes the loop device of that number, which must not be open.
#[cfg(test)]
pub fn remove(control: impl AsFd, number: u32) -> io::Result<()> {
    const LOOP_CTL_REMOVE: Opcode = 0x4C81;
    // SAFETY: LOOP_CTL_REMOVE takes a number.
    unsafe { ioctl(control, Returning::<LOOP_CTL_REMOVE>(number as usize)) }?;
    Ok(())
}

/// Attaches `backing` to a loop device in one step (`LOOP_CONFIGURE`, Linux 5.8).
/// `EBUSY`: the device has a backing file already, or another process has it open
/// exclusively.
pub fn configure(
    device: impl AsFd,
    backing: BorrowedFd<'_>,
    config: &LoopSettings<'_>,
) -> io::Result<()> {
    let mut file_name = [0; NAME_SIZE];
    let len = config.name.len().min(NAME_SIZE - 1);
    file_name[..len].copy_from_slice(&config.name[..len]);
    let config = LoopConfig {
        fd: backing.as_raw_fd().unsigned_abs(),
        block_size: config.sector_size,
        info: LoopInfo64 {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: 0,
            size_limit: 0,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags: config.flags,
            file_name,
            crypt_name: [0; NAME_SIZE],
            encrypt_key: [0; 32],
            init: [0; 2],
        },
        reserved: [0; 8],
    };
    // SAFETY: LOOP_CONFIGURE reads one struct loop_config; the descriptor in
    // it is open for as long as the borrow lives.
    unsafe { ioctl(device, Setter::<LOOP_CONFIGURE, _>::new(config)) }?;
    Ok(())
}

/// The device's configuration; `ENXIO` without a backing file.
pub fn status(device: impl AsFd) -> io::Result<LoopStatus> {
    // SAFETY: LOOP_GET_STATUS64 fills one struct loop_info64, of which every
    // bit pattern is valid.
    let info = unsafe { ioctl(device, Getter::<LOOP_GET_STATUS64, LoopInfo64>::new()) }?;
    Ok(LoopStatus {
        device: info.device,
        inode: info.inode,
        rdevice: info.rdevice,
        offset: info.offset,
        size_limit: info.size_limit,
        number: info.number,
        flags: info.flags,
    })
}

/// Requests that the device is detached from its file (`LOOP_CLR_FD`). Success does not
/// prove that it is: the kernel detaches it when the last descriptor of the device, this
/// one included, is closed.
pub fn clear(device: impl AsFd) -> io::Result<()> {
    // SAFETY: LOOP_CLR_FD takes no argument.
    unsafe { ioctl(device, NoArg::<LOOP_CLR_FD>::new()) }?;
    Ok(())
}

/// Sets the device's size to its file's current size (`LOOP_SET_CAPACITY`).
pub fn set_capacity(device: impl AsFd) -> io::Result<()> {
    // SAFETY: LOOP_SET_CAPACITY takes no argument.
    unsafe { ioctl(device, NoArg::<LOOP_SET_CAPACITY>::new()) }?;
    Ok(())
}
