//! What this kernel's driver can do.

use std::{fs, io};

use crate::ceph::client::rbd::Features;

/// The features of images that the driver has
/// (Documentation/ABI/testing/sysfs-bus-rbd, `supported_features`).
pub fn supported() -> io::Result<Features> {
    let text = fs::read_to_string("/sys/bus/rbd/supported_features")?;
    let digits = text.trim().trim_start_matches("0x");
    let bits = u64::from_str_radix(digits, 16).map_err(io::Error::other)?;
    Ok(Features(bits))
}
