//! What a device holds, told from its superblocks.

/// A piece of a device to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Bytes from the device's start, a multiple of 4096.
    pub offset: u64,
    /// Bytes to read; a multiple of 4096 unless the device ends within it.
    pub len: usize,
}

/// A piece of a device as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Bytes from the device's start.
    pub offset: u64,
    /// What is there.
    pub data: Vec<u8>,
}
