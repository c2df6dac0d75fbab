//! A volume's life by the system calls that it cannot do without, for benches to compare.

use std::{
    fs::{self, File},
    io::Read as _,
    os::{fd::OwnedFd, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rustix::{
    fs::CWD,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
        fsconfig_create, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree, unmount,
    },
};

mod export;
mod image_file;

pub use export::BareExport;
pub use image_file::BareImageFile;

/// A block device that comes and goes by the calls that this takes.
pub trait BareDevice: Send + Sync {
    /// Returns its node.
    fn attach(&self) -> PathBuf;

    fn detach(&self, node: &Path);
}

/// What is on a device when its volume is staged.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum BareContent {
    Ext4,
    /// Nothing: it is to become an ext4.
    Blank,
    /// What a pod has written to the device itself.
    Raw,
}

/// A volume on such a device.
pub struct BareVolume {
    device: Box<dyn BareDevice>,
    content: BareContent,
    staging: PathBuf,
    target: PathBuf,
}

impl BareVolume {
    /// Writes the content to the device, and makes the mount point below `dir`.
    pub fn new(dir: &Path, name: &str, device: Box<dyn BareDevice>, content: BareContent) -> Self {
        let at = |kind: &str| dir.join(format!("{name}-bare-{kind}"));
        let volume = Self {
            device,
            content,
            staging: at("staging"),
            target: at("target"),
        };
        if content == BareContent::Ext4 {
            let node = volume.device.attach();
            mkfs(&node);
            volume.device.detach(&node);
        }
        fs::create_dir_all(&volume.staging).expect("a mount point");
        volume
    }

    /// Attaches; except where it is raw, reads the superblock, formats what is blank, mounts.
    pub fn stage(&self) -> PathBuf {
        let node = self.device.attach();
        if self.content == BareContent::Raw {
            return node;
        }
        let mut device = File::options()
            .read(true)
            .custom_flags(libc::O_EXCL)
            .open(&node)
            .expect("the device");
        let mut superblock = [0; 4096];
        device.read_exact(&mut superblock).expect("a superblock");
        drop(device);
        if self.content == BareContent::Blank {
            mkfs(&node);
        }

        let context = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC).expect("a context");
        fsconfig_set_string(&context, "source", &node).expect("the source");
        fsconfig_set_string(&context, "errors", "remount-ro").expect("an option");
        fsconfig_create(&context).expect("a superblock");
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes);
        appear(&mount.expect("a mount"), &self.staging);
        node
    }

    pub fn publish(&self, node: &Path) {
        let is_raw = self.content == BareContent::Raw;
        let from = if is_raw { node } else { &self.staging };
        let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let mount = open_tree(CWD, from, clone).expect("a clone");
        if is_raw {
            File::create(&self.target).expect("a file");
        } else {
            fs::create_dir(&self.target).expect("a directory");
        }
        appear(&mount, &self.target);
    }

    pub fn unpublish(&self) {
        unmount(&self.target, UnmountFlags::NOFOLLOW).expect("a mount");
        match self.content {
            BareContent::Raw => fs::remove_file(&self.target).expect("a file"),
            _ => fs::remove_dir(&self.target).expect("a directory"),
        }
    }

    pub fn unstage(&self, node: &Path) {
        if self.content != BareContent::Raw {
            unmount(&self.staging, UnmountFlags::NOFOLLOW).expect("a mount");
        }
        self.device.detach(node);
    }

    /// Stages and publishes.
    pub fn up(&self) -> PathBuf {
        let node = self.stage();
        self.publish(&node);
        node
    }

    /// Unpublishes and unstages.
    pub fn down(&self, node: &Path) {
        self.unpublish();
        self.unstage(node);
    }
}

/// As the agent does it where all blocks read as zeros.
fn mkfs(node: &Path) {
    const ZEROS: &str =
        "nodiscard,lazy_itable_init=1,lazy_journal_init=1,assume_storage_prezeroed=1";
    let node = node.to_str().expect("UTF-8");
    crate::run(&["mkfs.ext4", "-q", "-F", "-m0", "-E", ZEROS, node]);
}

fn appear(mount: &OwnedFd, at: &Path) {
    let from_descriptor = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(mount, "", CWD, at, from_descriptor).expect("a mount point");
}
