//! Mounts, by the mount API of descriptors.

pub mod attach;
pub mod bind;
pub mod options;
pub mod path;
pub mod table;
pub mod unmount;
