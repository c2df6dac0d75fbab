//! From a volume's source to a block device and back; of a source that has none, its mount.
//!
//! The verbs of [`crate::volume`] know a [`Source`], which the volume context names, and a
//! [`Device`] of the kernel; this module alone chooses the backend. Everything but
//! [`Source::parse`] may hang with the device and runs on a lane.

mod backend;
mod blank;
mod ceph;
mod checks;
mod context;
pub mod descriptor_lock;
mod dispatch;
mod error;
mod exports;
#[cfg(feature = "cli")]
mod foreign_device;
mod format_markers;
mod held_open;
mod images;
mod in_use;
mod loop_attach;
pub mod loopdev;
pub mod luks;
pub mod nbd;
mod nfs;
mod no_device;
pub mod openers;
mod pending_releases;
pub mod read_only_mark;
pub mod ready;
mod source;

#[cfg(test)]
pub(crate) mod scratch;

pub use backend::{
    AttachOptions, Attachment, Backing, Condition, Device, Fencing, FormatMarker, Owner, Purpose,
};
pub use blank::blank;
pub use ceph::{CephImages, CrushLocation, STAGE_FILE, StorageClient, ThisNode};
pub use checks::Check;
pub use context::{SourceError, set_by_kubernetes};
pub use dispatch::Backends;
pub use error::DeviceError;
pub use exports::Exports;
#[cfg(feature = "cli")]
pub use foreign_device::{DeviceServer, ForeignDevice};
pub use format_markers::NodeFormatMarkers;
pub use held_open::HeldOpen;
pub use images::{ImageFiles, ImageSource};
pub use nfs::is_nfs as is_remote;
pub use pending_releases::PendingReleases;
pub use source::{Source, StageFile};
