//! Mounts, by the descriptor-based mount API.
//!
//! A [`path::SafePath`] is a path at which the driver may mount a volume: a name in a
//! directory that was reached below an allowed root without following a symlink. All
//! changes use that directory's descriptor, so no rename or symlink between the check
//! and the change redirects them. [`PathKind`] is the kind of file at the path, and
//! [`Mounted`] describes a mount.
//!
//! Everything here blocks, and belongs on a volume's lane. [`attach`], [`unmount`] and
//! [`ownership`] can hang with the volume's device; the rest can hang with the disk that
//! holds the directories of the path.

pub(crate) mod attach;
pub mod bind;
pub mod options;
pub(crate) mod ownership;
pub mod path;
pub mod reconfigure;
pub mod table;
pub mod unmount;
pub mod users;

mod path_kind;

#[cfg(test)]
pub(crate) mod testing;

pub(crate) use path_kind::{MountId, Mounted, PathKind};
