//! A volume's life by the system calls that it cannot do without, for benches to compare.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    mem,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::CWD,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
        fsconfig_create, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree, unmount,
    },
};

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

/// An ext4 in an image file.
pub struct BareVolume {
    image: PathBuf,
    staging: PathBuf,
    target: PathBuf,
}

impl BareVolume {
    /// Makes the image of `bytes`, formats it, and makes the mount point below `dir`.
    pub fn new(dir: &Path, name: &str, bytes: u64) -> Self {
        let at = |kind: &str| dir.join(format!("{name}-bare-{kind}"));
        let volume = Self {
            image: at("image"),
            staging: at("staging"),
            target: at("target"),
        };
        let image = File::create(&volume.image).expect("an image");
        image.set_len(bytes).expect("its size");
        let image = volume.image.to_str().expect("UTF-8");
        crate::run(&["mkfs.ext4", "-q", "-F", "-m0", image]);
        fs::create_dir(&volume.staging).expect("a mount point");
        volume
    }

    /// Attaches, reads the superblock, mounts.
    pub fn stage(&self) -> PathBuf {
        let node = self.attach();
        let mut device = File::options()
            .read(true)
            .custom_flags(libc::O_EXCL)
            .open(&node)
            .expect("the device");
        let mut superblock = [0; 4096];
        device.read_exact(&mut superblock).expect("a superblock");
        drop(device);

        let context = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC).expect("a context");
        fsconfig_set_string(&context, "source", &node).expect("the source");
        fsconfig_set_string(&context, "errors", "remount-ro").expect("an option");
        fsconfig_create(&context).expect("a superblock");
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes);
        appear(&mount.expect("a mount"), &self.staging);
        node
    }

    pub fn publish(&self) {
        let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let mount = open_tree(CWD, &self.staging, clone).expect("a clone");
        fs::create_dir(&self.target).expect("a directory");
        appear(&mount, &self.target);
    }

    pub fn unpublish(&self) {
        unmount(&self.target, UnmountFlags::NOFOLLOW).expect("a mount");
        fs::remove_dir(&self.target).expect("a directory");
    }

    pub fn unstage(&self, node: &Path) {
        unmount(&self.staging, UnmountFlags::NOFOLLOW).expect("a mount");
        let device = File::open(node).expect("the device");
        ioctl(&device, LOOP_CLR_FD, 0).expect("detached");
    }

    /// A whole life.
    pub fn live(&self) {
        let node = self.stage();
        self.publish();
        self.unpublish();
        self.unstage(&node);
    }

    fn attach(&self) -> PathBuf {
        let open = |path: &Path| File::options().read(true).write(true).open(path);
        let image = open(&self.image).expect("the image");
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
}

fn appear(mount: &OwnedFd, at: &Path) {
    let from_descriptor = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(mount, "", CWD, at, from_descriptor).expect("a mount point");
}

fn ioctl(file: &File, request: libc::c_ulong, argument: usize) -> io::Result<libc::c_int> {
    // SAFETY: the requests take nothing, or the address of a structure that lives.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, argument) } {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}
