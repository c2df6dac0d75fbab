//! Image files on loop devices.

use std::{
    fs::File,
    io, mem,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
};

use super::BareDevice;

const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_CLR_FD: libc::c_ulong = 0x4C01;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;

/// `struct loop_config` (linux/loop.h).
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    /// `struct loop_info64` up to `lo_flags`.
    info: [u32; 13],
    flags: u32,
    rest: [u64; 30],
}

const _: () = assert!(size_of::<LoopConfig>() == 304);
const LO_FLAGS_DIRECT_IO: u32 = 16;

pub struct BareImageFile(PathBuf);

impl BareImageFile {
    /// Makes the image of `bytes`.
    pub fn new(path: PathBuf, bytes: u64) -> Self {
        let image = File::create(&path).expect("an image");
        image.set_len(bytes).expect("its size");
        Self(path)
    }
}

impl BareDevice for BareImageFile {
    fn attach(&self) -> PathBuf {
        let open = |path: &Path| File::options().read(true).write(true).open(path);
        let image = open(&self.0).expect("the image");
        let control = open(Path::new("/dev/loop-control")).expect("loop devices");
        loop {
            let number = ioctl(&control, LOOP_CTL_GET_FREE, 0).expect("a number");
            let node = PathBuf::from(format!("/dev/loop{number}"));
            // SAFETY: all of its fields are integers.
            let mut config: LoopConfig = unsafe { mem::zeroed() };
            config.fd = image.as_raw_fd().unsigned_abs();
            config.flags = LO_FLAGS_DIRECT_IO;
            let argument = (&raw const config).addr();
            let configured =
                open(&node).and_then(|device| ioctl(&device, LOOP_CONFIGURE, argument));
            match configured {
                Ok(_) => return node,
                // Another process was faster, or its device is not in /dev yet.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => panic!("{}: {error}", node.display()),
            }
        }
    }

    fn detach(&self, node: &Path) {
        let device = File::open(node).expect("the device");
        ioctl(&device, LOOP_CLR_FD, 0).expect("detached");
    }
}

fn ioctl(file: &File, request: libc::c_ulong, argument: usize) -> io::Result<libc::c_int> {
    // SAFETY: the requests take nothing, or the address of a structure that lives.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, argument) } {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}
