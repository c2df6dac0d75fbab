//! Mounts, by the mount API of descriptors.
//!
//! A [`path::SafePath`] is where something may be mounted: a name in a directory
//! that was reached below an allowed root without a symlink. All changes go
//! through that directory's descriptor, so that no rename or symlink between the
//! check and the change leads elsewhere. What is there is a [`PathKind`]; where it is
//! a mount, [`Mounted`] says of what.
//!
//! Everything here blocks, and belongs on a volume's lane. [`attach`], [`unmount`] and
//! [`ownership`] can hang on the volume's device; the rest on the disk that the
//! directories are on, which a path leads through.

pub mod attach;
pub mod bind;
pub mod options;
pub mod ownership;
pub mod path;
pub mod table;
pub mod unmount;

mod path_kind;

#[cfg(test)]
pub(crate) mod testing;

pub use path_kind::{MountId, Mounted, PathKind};
