//! The system calls, ioctls and their numbers that rustix lacks.
//!
//! With `ring` and `ceph::client` the only unsafe code; of this module's the controller uses
//! only leases, a clock, the page cache, project quotas, writeback and watched sockets.

use std::{fmt, fs, io, str::FromStr};

use serde::{Deserialize, Serialize};

#[cfg(feature = "node")]
pub mod block;
pub mod busy;
#[cfg(any(feature = "node", feature = "cli"))]
pub mod capabilities;
#[cfg(feature = "controller")]
pub mod clock;
pub mod core_dumps;
pub mod descriptors;
pub mod exec;
#[cfg(feature = "node")]
pub mod fscrypt;
#[cfg(feature = "node")]
pub mod growth;
#[cfg(feature = "node")]
pub mod heap;
#[cfg(feature = "node")]
pub mod keys;
#[cfg(any(feature = "node", feature = "controller"))]
pub mod lease;
#[cfg(feature = "node")]
pub mod loopctl;
#[cfg(feature = "node")]
pub mod mounts;
#[cfg(feature = "node")]
pub mod nbd;
pub mod net_namespace;
#[cfg(feature = "controller")]
pub mod page_cache;
#[cfg(feature = "holder")]
pub mod pidfd;
#[cfg(feature = "node")]
pub mod privileges;
#[cfg(feature = "controller")]
pub mod project;
#[cfg(feature = "node")]
pub mod sysfs;
#[cfg(feature = "node")]
pub mod trim;
#[cfg(feature = "node")]
pub mod uevents;
#[cfg(feature = "cli")]
pub mod uring_setup;
pub mod watched;
#[cfg(feature = "controller")]
pub mod writeback;

/// The file with the kernel's boot id.
pub(crate) const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The running kernel's boot id (random(4)).
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

/// A block device's number, as in `st_rdev`, `st_dev` and sysfs' `dev`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Dev {
    /// The driver's number.
    pub major: u32,
    /// The device's number within the driver.
    pub minor: u32,
}

impl Dev {
    /// Decodes a `dev_t` of stat(2).
    pub fn from_raw(raw: u64) -> Self {
        Self {
            major: rustix::fs::major(raw),
            minor: rustix::fs::minor(raw),
        }
    }

    /// Encodes it as a `dev_t`.
    pub fn to_raw(self) -> u64 {
        rustix::fs::makedev(self.major, self.minor)
    }
}

impl fmt::Display for Dev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// The text is not `major:minor`.
///
/// Remedy: write it as `ls -l DEVICE` shows it: 7:0.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a device number of the form major:minor")]
pub struct BadDev(String);

impl FromStr for Dev {
    type Err = BadDev;

    fn from_str(text: &str) -> Result<Self, BadDev> {
        let bad = || BadDev(text.to_owned());
        let (major, minor) = text.trim().split_once(':').ok_or_else(bad)?;
        Ok(Self {
            major: major.parse().map_err(|_| bad())?,
            minor: minor.parse().map_err(|_| bad())?,
        })
    }
}
