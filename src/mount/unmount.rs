//! unmount.
