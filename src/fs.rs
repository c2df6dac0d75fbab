//! File systems on devices: probing, making, checking and growing them.
//!
//! This module reads superblocks and grows file systems itself. Each file system's own
//! tools make and repair it; the module has their command lines and interprets their
//! results.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

#[cfg(feature = "node")]
pub(crate) mod fsck;
#[cfg(feature = "node")]
pub(crate) mod fscrypt;
#[cfg(feature = "node")]
pub(crate) mod grow;
// The controller refuses the mkfs options that the node would refuse.
pub(crate) mod mkfs;
#[cfg(feature = "node")]
pub mod probe;
#[cfg(feature = "node")]
pub(crate) mod trim;

/// The file systems that the driver makes and mounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FsType {
    /// ext4, and the ext2 and ext3 that ext4's driver mounts.
    Ext4,
    Xfs,
    /// btrfs on one device.
    Btrfs,
}

impl FsType {
    /// All supported file systems.
    pub const ALL: [Self; 3] = [Self::Ext4, Self::Xfs, Self::Btrfs];

    /// The name for `mount -t`, as in `/proc/filesystems`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    /// The smallest device that its mkfs takes.
    pub const fn least_bytes(self) -> u64 {
        const MIB: u64 = 1 << 20;
        match self {
            Self::Ext4 => MIB,
            // mkfs.xfs refuses less than 300 MiB, mkfs.btrfs less than 109 MiB.
            Self::Xfs => 300 * MIB,
            Self::Btrfs => 110 * MIB,
        }
    }
}

impl fmt::Display for FsType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The name of a file system that the driver does not support.
#[derive(Debug, thiserror::Error)]
#[error("file system {0:?} is not supported; choose ext4, xfs or btrfs")]
pub struct UnsupportedFs(String);

impl FromStr for FsType {
    type Err = UnsupportedFs;

    fn from_str(name: &str) -> Result<Self, UnsupportedFs> {
        Self::ALL
            .into_iter()
            .find(|fs| fs.as_str() == name)
            .ok_or_else(|| UnsupportedFs(name.to_owned()))
    }
}

/// A program and its arguments, for [`crate::ring::child`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    /// The program's name, looked up in `PATH`.
    pub program: &'static str,
    /// The arguments, without the program's own name.
    pub args: Vec<String>,
}

impl fmt::Display for CommandLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.program)?;
        self.args.iter().try_for_each(|arg| write!(f, " {arg}"))
    }
}

/// Whether mkfs or fsck refused a device before writing, for a transient reason: the
/// device is in use, or mkfs.btrfs, which examines all mounted loop devices, found one
/// that was being detached. No exit code shows this, only each program's own message.
#[cfg(feature = "node")]
pub fn reports_busy(output: &str) -> bool {
    // The messages of mke2fs and e2fsck; of mkfs.xfs and mkfs.btrfs, by strerror(3).
    let messages = [
        "apparently in use by the system",
        " is in use.",
        "Device or resource busy",
        "cannot check mount status of",
    ];
    messages.iter().any(|message| output.contains(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for fs in FsType::ALL {
            assert_eq!(fs.as_str().parse::<FsType>().unwrap(), fs);
            assert_eq!(serde_json::to_value(fs).unwrap(), fs.as_str());
        }
        let error = "ntfs".parse::<FsType>().unwrap_err().to_string();
        for fs in FsType::ALL {
            assert!(error.contains(fs.as_str()));
        }
    }
}
