//! Buffers for O_DIRECT reads.

/// The strictest alignment of O_DIRECT for addresses, offsets and lengths, bytes.
const ALIGN: usize = 4096;

/// Memory for one region, aligned within a vector that is up to [`ALIGN`] bytes larger.
#[derive(Debug)]
pub(super) struct Buffer {
    /// Zeros up to the aligned start, and capacity from there on.
    memory: Vec<u8>,
    /// Bytes to read: the region's, aligned up. Where the device ends within them, the
    /// read is short.
    wanted: usize,
    /// Bytes filled so far.
    pub(super) filled: usize,
}

impl Buffer {
    pub(super) fn new(len: usize) -> Self {
        let wanted = len.next_multiple_of(ALIGN);
        let mut memory: Vec<u8> = Vec::with_capacity(wanted + ALIGN);
        let start = memory.as_ptr().align_offset(ALIGN);
        memory.resize(start, 0);
        Self {
            memory,
            wanted,
            filled: 0,
        }
    }

    /// The part still to fill. A read longer than the kernel's limit is split.
    pub(super) fn rest(&mut self) -> (*mut u8, u32) {
        let rest = &mut self.memory.spare_capacity_mut()[self.filled..self.wanted];
        let len = u32::try_from(rest.len()).unwrap_or(1 << 30);
        (rest.as_mut_ptr().cast(), len)
    }

    /// The first `len` bytes, all of which were filled.
    pub(super) fn into_data(mut self, len: usize) -> Vec<u8> {
        let start = self.memory.len();
        assert!(len <= self.filled, "answered before it was filled");
        // SAFETY: the kernel wrote the first `filled` bytes of the spare capacity.
        unsafe { self.memory.set_len(start + len) };
        self.memory.drain(..start);
        self.memory
    }
}
