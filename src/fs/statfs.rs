//! Which file systems answer statfs(2) from memory.
//!
//! What holds for all is that statfs reads counters of the mounted superblock.
//! Exceptions, by the kernel's source:
//!
//! - XFS waited for the inodes that were being freed (`xfs_inodegc_flush` in
//!   `xfs_fs_statfs`), which writes to the device, in Linux 5.15 to 5.18; since 5.19
//!   it only has that begun (`xfs_inodegc_push`).
//! - With project quotas ext4 and XFS answer for the project of a directory that
//!   hands its project on, and may read its limits from the device
//!   (`ext4_statfs_project`, `xfs_qm_statvfs`). Both take a mount option.
//!
//! ext4 (`ext4_statfs`) and btrfs (`btrfs_statfs`) otherwise take no lock that is
//! held during I/O.

use std::sync::LazyLock;

use super::FsType;
use crate::mount::options::{FsOption, MountOptions};

/// Since when XFS' statfs waits for nobody.
const XFS_WAITS_BEFORE: (u32, u32) = (5, 19);

/// Whether statfs of a file system that is mounted with these options may wait for
/// its device. `None`: it is not known how it was mounted.
pub fn may_wait(fs: FsType, options: Option<&MountOptions>) -> bool {
    static KERNEL: LazyLock<(u32, u32)> = LazyLock::new(|| {
        let release = rustix::system::uname();
        release.release().to_str().map_or((0, 0), version)
    });
    may_wait_on(*KERNEL, fs, options)
}

fn may_wait_on(kernel: (u32, u32), fs: FsType, options: Option<&MountOptions>) -> bool {
    let is_quota = |option: &FsOption| {
        let key = &option.key;
        key.contains("quota") || key.starts_with("pqno")
    };
    let has_quotas = options.is_none_or(|options| options.fs_options().any(is_quota));
    match fs {
        FsType::Ext4 => has_quotas,
        FsType::Xfs => has_quotas || kernel < XFS_WAITS_BEFORE,
        FsType::Btrfs => false,
    }
}

/// Major and minor number of a kernel's release; zeros where it tells none.
fn version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next()?.parse().ok();
    next().zip(next()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_wait_is_known_by_kernel_and_options() {
        let options = |words: &str| MountOptions::parse(&[words]).unwrap();
        let plain = options("noatime,discard");
        let [old, new] = ["5.15.0-91-generic", "6.18.44-fc"].map(version);
        assert_eq!((old, new), ((5, 15), (6, 18)));
        for (kernel, fs, waits) in [
            (old, FsType::Ext4, false),
            (old, FsType::Xfs, true),
            (new, FsType::Xfs, false),
            (new, FsType::Ext4, false),
            (version("unknown"), FsType::Xfs, true),
        ] {
            assert_eq!(
                may_wait_on(kernel, fs, Some(&plain)),
                waits,
                "{kernel:?} {fs}"
            );
            assert!(may_wait_on(kernel, fs, None), "{kernel:?} {fs}");
            for quota in ["prjquota", "pquota", "pqnoenforce", "usrjquota=a.user"] {
                assert!(may_wait_on(kernel, fs, Some(&options(quota))), "{quota}");
            }
        }
        assert!(!may_wait_on(old, FsType::Btrfs, None));
    }
}
