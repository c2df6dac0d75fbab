//! The openers that keep a block device busy.
//!
//! Looked for only after the kernel refused with `EBUSY`, for the text of the answer,
//! since it reads files of every process. An opener is one of these:
//!
//! * a mount, also in another mount namespace (a container that was started
//!   while the volume was mounted keeps a copy);
//! * a file system without any mount to be seen, which an open file keeps alive
//!   after a lazy unmount;
//! * another block device on top (device mapper, md, bcache, a loop device);
//! * a process that has it open.
//!
//! The list may be incomplete: processes end meanwhile, and some cannot be read.

use std::{
    collections::HashSet,
    ffi::OsString,
    fmt, fs,
    path::{Path, PathBuf},
};

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

use super::loopdev;
use crate::{
    kernel::{Dev, sysfs},
    mount::{
        table,
        users::{OpenerProcess, names},
    },
};

/// Something that keeps a block device busy; its text is a clause about the
/// device ("it").
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Opener {
    /// A mount of its file system.
    Mount {
        /// The file system's type.
        fs_type: String,
        /// Where, seen from the process's root directory.
        mount_point: PathBuf,
        /// One process of that mount namespace.
        process: OpenerProcess,
    },
    /// A file system that no process has mounted.
    FileSystem { fs_type: &'static str },
    /// A block device on top of it.
    Device {
        /// The kernel's name.
        name: String,
    },
    /// A loop device over its node.
    Loop {
        /// The loop device's node.
        node: PathBuf,
        /// The node that it was put over.
        over: PathBuf,
    },
    /// A process that has it open.
    Process(OpenerProcess),
    /// A process that has a file or directory of its file system open.
    User(OpenerProcess),
}

impl fmt::Display for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mount {
                fs_type,
                mount_point,
                process,
            } => write!(
                f,
                "its {fs_type} is mounted at {} in the mount namespace of {process}",
                mount_point.display()
            ),
            Self::FileSystem { fs_type } => write!(
                f,
                "its {fs_type} is still alive though no process has it mounted, after a lazy \
                 unmount with files open or in a mount namespace of a thread"
            ),
            Self::Device { name } => write!(f, "the block device {name} is built on it"),
            Self::Loop { node, over } => {
                write!(f, "{} is attached over {}", node.display(), over.display())
            }
            Self::Process(process) => write!(f, "{process} has it open"),
            Self::User(process) => write!(f, "{process} has a file or directory of it open"),
        }
    }
}

/// The openers of the device that can be found, the most likely first.
pub fn openers(dev: Dev) -> Vec<Opener> {
    let processes = OpenerProcess::all();
    let name = sysfs::name_of(dev).unwrap_or_default();
    let mut openers = mounts(dev, &processes);
    if openers.is_empty() {
        openers.extend(file_system(&name).map(|fs_type| Opener::FileSystem { fs_type }));
    }
    openers.extend(
        names(&format!("/sys/dev/block/{dev}/holders")).map(|name| Opener::Device { name }),
    );
    let locks = loopdev::locks_on(dev, &[]).unwrap_or_default();
    openers.extend(locks.into_iter().map(|lock| Opener::Loop {
        node: lock.device.node,
        over: lock.backing_path,
    }));
    openers.extend(
        processes
            .into_iter()
            .filter(|process| has_open(process, dev))
            .map(Opener::Process),
    );
    openers
}

/// One sentence about all of them.
pub fn describe(openers: &[Opener]) -> String {
    if openers.is_empty() {
        return "no opener was found".to_owned();
    }
    let clauses: Vec<_> = openers.iter().map(Opener::to_string).collect();
    clauses.join("; ")
}

fn mounts(dev: Dev, processes: &[OpenerProcess]) -> Vec<Opener> {
    // btrfs shows an anonymous device; there the source's path is compared.
    let node = sysfs::node_of(dev).map(OsString::from).unwrap_or_default();
    let mut namespaces = HashSet::new();
    let mut mounts = HashSet::new();
    let mut found = Vec::new();
    for process in processes {
        // If the name of the namespace cannot be read, the ids of its mounts, which are
        // unique in the system, show which were seen before.
        if let Ok(namespace) = fs::read_link(format!("/proc/{}/ns/mnt", process.pid))
            && !namespaces.insert(namespace)
        {
            continue;
        }
        let table = table::of_process(process.pid).unwrap_or_default();
        let of_device = table
            .into_iter()
            .filter(|mount| mount.dev == dev || (mount.dev.major == 0 && mount.source == node));
        for mount in of_device {
            if mounts.insert(mount.id) {
                found.push(Opener::Mount {
                    fs_type: mount.fs_type,
                    mount_point: mount.mount_point,
                    process: process.clone(),
                });
            }
        }
    }
    found
}

/// The file system that has a directory in sysfs for as long as it lives.
fn file_system(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        return None;
    }
    let by_name = ["ext4", "xfs"].into_iter().map(|fs_type| {
        let directory = Path::new("/sys/fs").join(fs_type).join(name);
        (fs_type, directory)
    });
    let by_uuid = names("/sys/fs/btrfs").map(|uuid| {
        let directory = Path::new("/sys/fs/btrfs").join(uuid);
        ("btrfs", directory.join("devices").join(name))
    });
    by_name
        .chain(by_uuid)
        .find(|(_, directory)| directory.exists())
        .map(|(fs_type, _)| fs_type)
}

fn has_open(process: &OpenerProcess, dev: Dev) -> bool {
    process.open_files().any(|link| {
        // Without a question to the server of a file that is on a network.
        let stat = statx(CWD, link, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
        stat.is_ok_and(|stat| {
            let number = Dev {
                major: stat.stx_rdev_major,
                minor: stat.stx_rdev_minor,
            };
            FileType::from_raw_mode(stat.stx_mode.into()).is_block_device() && number == dev
        })
    })
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        os::fd::AsFd as _,
        process::{Child, Command, Stdio},
    };

    use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

    use super::*;
    use crate::{
        device::{loopdev::LoopError, scratch::Scratch},
        kernel::mounts::private_namespace,
    };

    fn formatted(mkfs: &str) -> Scratch {
        let image = Scratch::image(320 << 20);
        let made = Command::new(mkfs).arg("-q").arg(image.path()).output();
        assert!(made.unwrap().status.success());
        Scratch::over(image)
    }

    /// A shell that mounts a device in a namespace of its own and waits for the
    /// end of its input.
    fn mounted_elsewhere(scratch: &Scratch) -> Child {
        let mount = format!(
            "mount {} /mnt && echo ready && read end",
            scratch.device.node.display()
        );
        let mut child = Command::new("unshare")
            .args(["--mount", "sh", "-c", &mount])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "ready\n");
        child
    }

    #[test]
    fn a_mount_in_another_namespace_is_found_and_keeps_the_device() {
        for (mkfs, fs) in [("mkfs.ext4", "ext4"), ("mkfs.btrfs", "btrfs")] {
            let scratch = formatted(mkfs);
            let mut child = mounted_elsewhere(&scratch);
            let found = openers(scratch.device.dev);
            let refused = loopdev::detach(&scratch.device, scratch.id(), false);
            drop(child.stdin.take());
            child.wait().unwrap();
            assert!(
                matches!(refused, Err(LoopError::Busy { .. })),
                "{refused:?}"
            );
            let text = describe(&found);
            assert!(
                text.contains(&format!("its {fs} is mounted at /mnt"))
                    && text.contains(&format!("process {} (", child.id())),
                "{text}"
            );
        }
    }

    #[test]
    fn a_file_system_without_a_mount_is_found() {
        for (mkfs, fs) in [
            ("mkfs.ext4", "ext4"),
            ("mkfs.xfs", "xfs"),
            ("mkfs.btrfs", "btrfs"),
        ] {
            private_namespace();
            let scratch = formatted(mkfs);
            let directory = tempfile::tempdir().unwrap();
            let (node, at) = (&scratch.device.node, directory.path());
            mount(node, at, fs, MountFlags::empty(), None).unwrap();
            let file = fs::File::create(at.join("file")).unwrap();
            unmount(at, UnmountFlags::DETACH).unwrap();
            let found = openers(scratch.device.dev);
            drop(file);
            assert!(
                found.contains(&Opener::FileSystem { fs_type: fs }),
                "{found:?}"
            );
        }
    }

    #[test]
    fn openers_and_locks_are_found() {
        let scratch = Scratch::new(1 << 20);
        let dev = scratch.device.dev;
        let ours = || {
            openers(dev).into_iter().any(|holder| {
                matches!(holder, Opener::Process(process) if process.pid == std::process::id())
            })
        };
        let opener = scratch.open();
        assert!(ours());
        drop(opener);

        let node = &scratch.device.node;
        let device = loopdev::lock_over(dev, node, scratch.open().as_fd()).unwrap();
        let lock = loopdev::locks_on(dev, &[]).unwrap().remove(0);
        assert_eq!(lock.device, device);
        let expected = Opener::Loop {
            node: lock.device.node.clone(),
            over: scratch.device.node.clone(),
        };
        assert!(openers(dev).contains(&expected));
        let _ = loopdev::unlock(&lock, dev).unwrap();
    }

    #[test]
    fn an_empty_list_of_openers_is_described() {
        assert_eq!(describe(&[]), "no opener was found");
    }
}
