//! Other options for a mounted file system: fspick(2), fsconfig(2).

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
};

use rustix::{
    io::Errno,
    mount::{
        FsPickFlags, MountAttrFlags, fsconfig_reconfigure, fsconfig_set_flag, fsconfig_set_string,
        fspick,
    },
};

use super::{
    attach::{MountError, log, log_or_errno},
    options::{FsOption, MountOptions},
    table,
};
use crate::kernel::mounts::mount_setattr;

/// What XFS can change. It accepts every other option, and ignores it.
const XFS_CHANGES: &[&str] = &[
    "async",
    "dirsync",
    "inode32",
    "inode64",
    "lazytime",
    "mand",
    "nolazytime",
    "nomand",
    "sync",
];

/// A change of a mounted file system.
#[derive(Clone, Copy, Debug)]
pub struct Reconfigure<'a> {
    /// The file system's type, as in `/proc/filesystems`.
    pub fs_type: &'a str,
    /// All options that the superblock then has.
    pub options: &'a MountOptions,
    /// Those to set for that.
    pub set: &'a [FsOption],
    /// Whether superblock and mount become read-only, or stay so.
    pub read_only: bool,
}

/// Sets options of the superblock that is mounted at `at`, while it is in use. A refusal
/// changes none of them. Writes the device, and can hang with it.
pub fn reconfigure(
    mount: BorrowedFd<'_>,
    at: &Path,
    change: &Reconfigure<'_>,
) -> Result<(), MountError> {
    let failed = |doing| {
        move |source: io::Error| MountError::Io {
            doing,
            path: at.to_owned(),
            kernel_says: String::new(),
            source,
        }
    };
    let refused = |why: String| MountError::Fixed {
        path: at.to_owned(),
        why,
    };
    let is_xfs = change.fs_type == "xfs";
    let is_ignored = |option: &&FsOption| is_xfs && !XFS_CHANGES.contains(&&*option.key);
    if let Some(option) = change.set.iter().find(is_ignored) {
        return Err(refused(format!("XFS ignores {option}")));
    }
    let shown = table::super_options(mount).map_err(failed("read the mount options of"))?;
    if !change.read_only && shown.split(',').any(|word| word == "ro") {
        // The kernel might make it writable.
        return Err(refused("it became read-only by an error".to_owned()));
    }
    let flags = FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH;
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    let context = fspick(mount, "", flags)
        .map_err(|errno| failed("open the mount context of")(errno.into()))?;
    let says = |errno| log_or_errno(errno, &log(context.as_fd()));
    // XFS resets what is not named, as inode32.
    let kept = change.options.fs_options().filter(|_| is_xfs);
    for option in kept.chain(change.set) {
        let result = match &option.value {
            Some(value) => fsconfig_set_string(&context, &option.key, value),
            None => fsconfig_set_flag(&context, &option.key),
        };
        result.map_err(|errno| refused(format!("{option}: {}", says(errno))))?;
    }
    if change.read_only {
        fsconfig_set_flag(&context, "ro").map_err(|errno| refused(says(errno)))?;
    }
    fsconfig_reconfigure(&context).map_err(|errno| match errno {
        Errno::BUSY if change.read_only => MountError::OpenForWriting {
            path: at.to_owned(),
        },
        Errno::INVAL | Errno::OPNOTSUPP | Errno::ROFS | Errno::ACCESS | Errno::PERM => {
            refused(says(errno))
        }
        errno => failed("remount")(errno.into()),
    })?;
    if change.read_only {
        let attribute = MountAttrFlags::MOUNT_ATTR_RDONLY;
        mount_setattr(mount, attribute, MountAttrFlags::empty())
            .map_err(failed("make read-only"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::mount::{
        attach::{NewMount, mount},
        testing::{MountScratch, TestLoop},
        unmount::unmount,
    };

    fn parsed(words: &str) -> MountOptions {
        MountOptions::parse(&[words]).expect("options")
    }

    #[test]
    fn a_mounted_file_system_gets_other_options_or_says_which_it_keeps() {
        let scratch = MountScratch::new();
        let place = scratch.directory("m");
        for (fs_type, mkfs, taken, kept) in [
            ("ext4", "mkfs.ext4", "sync,commit=20", "data=journal"),
            ("xfs", "mkfs.xfs", "sync", "largeio"),
            ("btrfs", "mkfs.btrfs", "sync,commit=20", "nosuch"),
        ] {
            let device = TestLoop::new(&scratch, &[mkfs], &[]);
            let new = NewMount {
                fs_type,
                source: &device.node,
                options: &parsed(""),
                extra: &[],
                read_only: false,
            };
            let _ = mount(&new, &place).expect(fs_type);
            let root = place.open().expect("opens");
            let change = |words: &str, read_only| {
                let set: Vec<_> = parsed(words).fs_options().cloned().collect();
                let change = Reconfigure {
                    fs_type,
                    options: &parsed(words),
                    set: &set,
                    read_only,
                };
                reconfigure(root.as_fd(), place.path(), &change)
            };
            let has = |words: &str| {
                let shown = table::super_options(root.as_fd()).expect("there");
                let shown = parsed(&shown);
                parsed(words).fs_options().all(|option| shown.has(option))
            };
            for _ in 0..2 {
                change(taken, false).expect(taken);
                assert!(has(taken), "{fs_type}");
            }
            change("async", false).expect("off");
            assert!(!has("sync"), "{fs_type}");
            let error = change(kept, false).expect_err(kept);
            let is_it = matches!(&error, MountError::Fixed { .. });
            assert!(is_it && !has(kept), "{fs_type}: {error}");

            let file = fs::File::create(place.path().join("file")).expect("writable");
            let error = change("", true).expect_err("it is written");
            assert!(
                matches!(error, MountError::OpenForWriting { .. }),
                "{error}"
            );
            drop(file);
            change("", true).expect("read-only");
            let error = change("sync", false).expect_err("it is read-only");
            assert!(matches!(error, MountError::Fixed { .. }), "{error}");
            let error = fs::write(place.path().join("file"), "").expect_err("read-only");
            assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem);
            drop(root);
            let _ = unmount(&place).expect("no descriptor is left");
        }
    }
}
