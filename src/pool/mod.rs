//! Pools: directories of raw image files.

pub mod claim;
pub mod handle;
