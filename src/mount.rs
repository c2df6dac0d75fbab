//! Mounts, by the descriptor-based mount API.
//!
//! A [`path::SafePath`] is a path at which something may be mounted: a name in a
//! directory that was reached below an allowed root without following a symlink. All
//! changes go through that directory's descriptor, so no rename or symlink between
//! the check and the change leads elsewhere. [`PathKind`] is what stands there, and
//! [`Mounted`] describes a mount.
//!
//! Everything here blocks, and belongs on a volume's lane. [`attach`], [`unmount`] and
//! [`ownership`] can hang on the volume's device; the rest on the disk that holds the
//! directories of the path.

pub(crate) mod attach;
pub mod bind;
pub mod options;
pub(crate) mod ownership;
pub mod path;
pub mod table;
pub mod unmount;

mod path_kind;

#[cfg(test)]
pub(crate) mod testing;

pub(crate) use path_kind::{MountId, Mounted, PathKind};
