//! NBD devices, whoever attached them.

pub mod netlink;
mod reserved_index;

pub use reserved_index::ReservedIndex;
