//! From a volume's source to a block device.

pub mod holders;
pub mod loopdev;
pub mod ready;

#[cfg(test)]
pub(crate) mod scratch;
