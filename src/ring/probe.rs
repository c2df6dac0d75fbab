//! Concurrent reads of devices, none of which waits for another.
//!
//! A read of a dead device may never complete, and cannot be cancelled. So probes have a
//! thread and a ring of their own, apart from the runtime's, and no read is issued on that
//! thread: a kernel worker submits each to the driver, and is free again unless the driver
//! blocks it. A read that hangs occupies a slot of the ring, and perhaps a worker. Once 128
//! of the 4096 slots are in use, a dead device gets one slot at a time; its further reads
//! are queued.
//!
//! The ring thread owns each buffer until its read has ended. A caller, a lane thread,
//! blocks until all its reads have ended, so its descriptor stays open as long as the
//! kernel may use it, and no read keeps the device busy once [`Prober::read`] returns.
//!
//! Reads are O_DIRECT (open(2)): the page cache of a device that was just attached may
//! still have pages of the previous source, and filling it wastes memory.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::Arc,
    thread::{self, JoinHandle},
};

use crossbeam::channel::{Sender, bounded, unbounded};
use rustix::event::{EventfdFlags, eventfd};

mod buffer;
mod engine;

use buffer::Buffer;
use engine::Engine;

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
    #[error("the read of {len} bytes at byte {offset} failed")]
    Read {
        /// Bytes from the device's start.
        offset: u64,
        /// Bytes that were still to be read.
        len: usize,
        source: io::Error,
    },
    /// The device is shorter than the regions.
    #[error("the device ends at byte {end}, before the bytes to read: has it shrunk?")]
    Short {
        /// Its end, in bytes.
        end: u64,
    },
    /// The ring thread panicked.
    #[error("the thread that reads devices has ended: restart the agent")]
    Ended,
}

/// A handle on the ring thread; clones share it, and it ends with the last.
#[derive(Clone, Debug)]
pub struct Prober {
    thread: Arc<RingThread>,
}

#[derive(Debug)]
struct RingThread {
    /// `Some` until the last handle is dropped.
    requests: Option<Sender<ProbeRead>>,
    /// An eventfd that the ring thread reads.
    wakeup: Arc<OwnedFd>,
    handle: JoinHandle<()>,
}

#[derive(Debug)]
struct ProbeRead {
    fd: RawFd,
    regions: Vec<Region>,
    reply: Sender<Result<Vec<Buffer>, ProbeError>>,
}

impl Prober {
    /// Starts the thread.
    pub fn start() -> io::Result<Self> {
        let (give, requests) = unbounded();
        let wakeup = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let (ready, started) = bounded(1);
        let awaited = Arc::clone(&wakeup);
        let handle = thread::Builder::new()
            .name("probe".to_owned())
            .spawn(move || match Engine::new(requests, awaited) {
                Ok(engine) => {
                    let _ = ready.send(Ok(()));
                    engine.run();
                }
                Err(error) => drop(ready.send(Err(error))),
            })?;
        started
            .recv()
            .unwrap_or_else(|_| Err(io::Error::other("the probe thread did not start")))?;
        let thread = Arc::new(RingThread {
            requests: Some(give),
            wakeup,
            handle,
        });
        Ok(Self { thread })
    }

    /// Whether the thread still runs. Once it has ended, only a restart of the
    /// agent helps.
    pub fn is_alive(&self) -> bool {
        !self.thread.handle.is_finished()
    }

    /// Reads `regions` of the device `fd`, opened with O_DIRECT, concurrently. Returns the
    /// blocks in the order of the regions.
    ///
    /// Call it on a lane: for a device that hangs it never returns.
    pub fn read(&self, fd: BorrowedFd<'_>, regions: &[Region]) -> Result<Vec<Block>, ProbeError> {
        let (reply, answer) = bounded(1);
        let request = ProbeRead {
            fd: fd.as_raw_fd(),
            regions: regions.to_vec(),
            reply,
        };
        let requests = self.thread.requests.as_ref().ok_or(ProbeError::Ended)?;
        requests.send(request).map_err(|_| ProbeError::Ended)?;
        self.thread.wake();
        let buffers = answer.recv().map_err(|_| ProbeError::Ended)??;
        Ok(regions
            .iter()
            .zip(buffers)
            .map(|(region, buffer)| Block {
                offset: region.offset,
                data: buffer.into_data(region.len),
            })
            .collect())
    }
}

impl RingThread {
    /// Wakes the ring thread. The write fails only after 2^64 - 2 unread ones
    /// (eventfd(2)).
    fn wake(&self) {
        let _ = rustix::io::write(&self.wakeup, &1_u64.to_ne_bytes());
    }
}

impl Drop for RingThread {
    fn drop(&mut self) {
        self.requests = None;
        self.wake();
    }
}

#[cfg(test)]
mod tests;
