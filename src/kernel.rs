//! What rustix lacks: system calls, ioctls, and the numbers they take.
//!
//! The only unsafe code outside the ring. Of the controller's, only leases.

use std::{fmt, fs, io, str::FromStr};

use serde::{Deserialize, Serialize};

#[cfg(feature = "node")]
pub mod block;
pub mod busy;
pub mod descriptors;
pub mod exec;
#[cfg(feature = "node")]
pub mod growth;
#[cfg(feature = "node")]
pub mod keys;
#[cfg(feature = "controller")]
pub mod lease;
#[cfg(feature = "node")]
pub mod loopctl;
#[cfg(feature = "node")]
pub mod mounts;
#[cfg(feature = "node")]
pub mod nbd;
#[cfg(feature = "holder")]
pub mod pidfd;
#[cfg(feature = "node")]
pub mod privileges;
#[cfg(feature = "node")]
pub mod sysfs;

/// Where the kernel shows its boot id.
pub(crate) const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The running kernel's boot id (random(4)).
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

/// A block device's number, as `st_rdev`, `st_dev` and sysfs' `dev` have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Dev {
    /// The driver's number.
    pub major: u32,
    /// The device's number within the driver.
    pub minor: u32,
}

impl Dev {
    /// From a `dev_t` as stat(2) gives it.
    pub fn from_raw(raw: u64) -> Self {
        Self {
            major: rustix::fs::major(raw),
            minor: rustix::fs::minor(raw),
        }
    }

    /// As a `dev_t`.
    pub fn to_raw(self) -> u64 {
        rustix::fs::makedev(self.major, self.minor)
    }
}

impl fmt::Display for Dev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// The text was not `major:minor`.
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
