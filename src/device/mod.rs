//! From a volume's source to a block device and back.
//!
//! The verbs of [`crate::volume`] know a [`Source`] (what the volume context
//! names) and a [`Device`] (what the kernel made of it); which backend does the
//! work is decided here and nowhere above. Everything but [`Source::parse`] may
//! hang with the device and runs on a lane.

mod backend;
mod error;
pub mod holders;
mod image;
pub mod lock;
pub mod loopdev;
pub mod nbd;
pub mod ready;
mod source;
pub mod sysfs;

#[cfg(test)]
pub(crate) mod scratch;

pub use backend::{Ailment, Backends, Behind, Device, How};
pub use error::DeviceError;
pub use image::set_read_only;
pub use source::{Source, SourceError};
