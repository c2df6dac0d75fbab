//! Concurrent reads of one device, by one system call where the device answers.
//!
//! A read of a dead device may never complete, and cannot be cancelled. So the caller is a
//! lane, which the reads may block, and each call has a ring of its own: a ring's kernel
//! workers belong to the thread that submits, so reads that hang use up the workers of no
//! other device. A ring is kept for the next call once all its reads have ended.
//!
//! Reads are O_DIRECT (open(2)): the page cache of a device that was just attached may
//! still have pages of the previous source, and filling it wastes memory.

use std::{
    io, mem,
    os::fd::{AsRawFd, BorrowedFd},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use io_uring::{IoUring, cqueue, opcode, types};

mod buffer;

use buffer::Buffer;

use super::READS;

/// Entries of a ring: reads of one device at once.
const ENTRIES: u32 = 16;

/// Rings that are kept while no device is read.
const KEPT: usize = 16;

/// A range of a device to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Bytes from the device's start, a multiple of 4096.
    pub offset: u64,
    /// Bytes to read; a multiple of 4096 unless the device ends within it.
    pub len: usize,
}

/// The content of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Bytes from the device's start.
    pub offset: u64,
    /// The bytes.
    pub data: Vec<u8>,
}

/// Why a device could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// An I/O error of the device or its connection.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the device, or the server behind it, fails.
    #[error("the read of {len} bytes at byte {offset} failed")]
    Read {
        /// Bytes from the device's start.
        offset: u64,
        /// Bytes that were still to be read.
        len: usize,
        source: io::Error,
    },
    /// The device is shorter than the regions.
    ///
    /// Remedy: compare the device (`blockdev --getsize64`) with its image or export.
    #[error("the device ends at byte {end}, before the bytes to read: has it shrunk?")]
    Short {
        /// Its end, in bytes.
        end: u64,
    },
    /// The kernel made no ring, or took no read.
    ///
    /// Remedy: `uringctl doctor` says what is missing.
    #[error("the kernel refuses to read through io_uring")]
    Ring(#[source] io::Error),
}

/// The rings for reads of devices. Clones share them.
#[derive(Clone, Default)]
pub struct Prober {
    idle: Arc<Mutex<Vec<IoUring>>>,
}

impl std::fmt::Debug for Prober {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prober").finish_non_exhaustive()
    }
}

impl Prober {
    /// Reads `regions` of the device `fd`, opened with O_DIRECT, concurrently. Returns the
    /// blocks in the order of the regions.
    ///
    /// Call it on a lane: for a device that hangs it never returns.
    pub fn read(&self, fd: BorrowedFd<'_>, regions: &[Region]) -> Result<Vec<Block>, ProbeError> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = idle().pop();
        let new = || IoUring::builder().dontfork().build(ENTRIES);
        let mut ring = kept.map_or_else(new, Ok).map_err(ProbeError::Ring)?;
        let read = Reads::new(&mut ring, fd, regions).run();
        let mut idle = idle();
        if idle.len() < KEPT {
            idle.push(ring);
        }
        drop(idle);
        let blocks = regions.iter().zip(read?).map(|(region, buffer)| Block {
            offset: region.offset,
            data: buffer.into_data(region.len),
        });
        Ok(blocks.collect())
    }
}

/// The reads of one call.
struct Reads<'a> {
    ring: &'a mut IoUring,
    fd: BorrowedFd<'a>,
    regions: &'a [Region],
    /// One for each region.
    buffers: Vec<Buffer>,
    /// The regions to read, or to read on, by their index, the last first.
    pending: Vec<usize>,
    /// Reads in the kernel, or in the submission ring.
    in_flight: u32,
}

impl<'a> Reads<'a> {
    fn new(ring: &'a mut IoUring, fd: BorrowedFd<'a>, regions: &'a [Region]) -> Self {
        let buffers = regions.iter().map(|region| Buffer::new(region.len));
        Self {
            ring,
            fd,
            regions,
            buffers: buffers.collect(),
            pending: (0..regions.len()).rev().collect(),
            in_flight: 0,
        }
    }

    /// Reads all regions, and returns when no read is left in the kernel.
    fn run(mut self) -> Result<Vec<Buffer>, ProbeError> {
        let mut outcome = Ok(());
        loop {
            if outcome.is_err() {
                self.pending.clear();
            }
            self.fill();
            if self.in_flight == 0 {
                return outcome.map(|()| mem::take(&mut self.buffers));
            }
            let all = self.in_flight as usize;
            if let Err(error) = self.ring.submit_and_wait(all)
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::warn!(%error, "cannot submit reads to the ring; retrying");
                #[expect(
                    clippy::disallowed_methods,
                    reason = "the kernel refuses: no event tells when it accepts more"
                )]
                thread::park_timeout(Duration::from_millis(10));
            }
            while let Some(ended) = self.next_ended() {
                self.in_flight -= 1;
                READS.ended();
                let index = usize::try_from(ended.user_data()).unwrap_or(usize::MAX);
                outcome = outcome.and(self.complete(index, ended.result()));
            }
        }
    }

    /// Puts pending reads into the submission ring while it has room.
    fn fill(&mut self) {
        while self.in_flight < ENTRIES
            && let Some(index) = self.pending.pop()
        {
            let buffer = &mut self.buffers[index];
            let offset = self.regions[index].offset + buffer.filled as u64;
            let (at, len) = buffer.rest();
            let entry = opcode::Read::new(types::Fd(self.fd.as_raw_fd()), at, len)
                .offset(offset)
                .build()
                .user_data(index as u64);
            // SAFETY: the descriptor outlives the reads, and so does the buffer: `run` ends
            // when all reads have, and a panic in it leaks the buffers.
            let pushed = unsafe { self.ring.submission().push(&entry) };
            pushed.expect("as many entries as reads at once");
            self.in_flight += 1;
            READS.submitted();
        }
    }

    fn next_ended(&mut self) -> Option<cqueue::Entry> {
        self.ring.completion().next()
    }

    /// Handles the end of a region's read: the bytes read, or a negative errno.
    fn complete(&mut self, index: usize, result: i32) -> Result<(), ProbeError> {
        let (region, buffer) = (self.regions[index], &mut self.buffers[index]);
        let before = buffer.filled;
        buffer.filled += usize::try_from(result).unwrap_or(0);
        let offset = region.offset + buffer.filled as u64;
        if result < 0 {
            let source = io::Error::from_raw_os_error(-result);
            if source.kind() != io::ErrorKind::Interrupted {
                return Err(ProbeError::Read {
                    offset,
                    len: region.len - before,
                    source,
                });
            }
            self.pending.push(index);
        } else if buffer.filled < region.len {
            if result == 0 || !buffer.filled.is_multiple_of(512) {
                // The end of the device.
                return Err(ProbeError::Short { end: offset });
            }
            self.pending.push(index);
        }
        Ok(())
    }
}

impl Drop for Reads<'_> {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            // After a panic the kernel may still write to these.
            mem::forget(mem::take(&mut self.buffers));
        }
    }
}

#[cfg(test)]
mod tests;
