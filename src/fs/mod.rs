//! File systems on devices: what is there, making, checking and growing them.

pub mod fsck;
pub mod grow;
pub mod mkfs;
pub mod probe;
