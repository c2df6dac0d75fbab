//! Ceph, for node and controller.
//!
//! ```text
//!  csi_format   ceph-csi's configuration, handles, journal, sealed passphrases
//!  kms          where the passphrases of encrypted volumes are kept
//!  client       connections to clusters; objects and images, by librados, librbd
//!  krbd         images as block devices of the kernel's own driver
//!  fencing      the clients that have a volume, and blocklisting them
//! ```
//!
//! All of it blocks while a cluster is slow, so it runs on lanes.

pub mod client;
pub mod csi_format;
pub mod fencing;
mod inspect;
pub mod kms;
#[cfg(feature = "node")]
pub mod krbd;

pub use inspect::inspect;

#[cfg(test)]
pub(crate) mod testing;
