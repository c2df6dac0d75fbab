//! Reads of devices, many at once, none waiting for another.
//!
//! A read of a dead device may never complete, and cannot be cancelled. So
//! probes have a thread and a ring of their own, apart from the runtime's, and no
//! read is ever tried on that thread: each is a kernel worker's, which hands it to
//! the driver and is free again, or waits where the driver makes it wait. Reads
//! that hang occupy a place in the ring, and some of them a worker. Of 4096 places
//! dead devices get one each once 128 are taken; more than that wait their turn.
//!
//! The ring thread owns all buffers until the kernel has done with them. A
//! caller, a lane thread, blocks until every read that was begun for it has
//! ended, so its descriptor stays open as long as the kernel may look at it, and
//! no read of ours keeps the device busy once [`Prober::read`] returns.
//!
//! Reads are O_DIRECT (open(2)): the page cache of a device that was just mapped
//! may tell of its predecessor, and filling it costs memory for nothing.

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

/// A device could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The device, or the way to it, failed.
    #[error("the read of {len} bytes at byte {offset} failed")]
    Read {
        /// Where, bytes from the device's start.
        offset: u64,
        /// How many bytes were still asked for.
        len: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// The device has no such bytes.
    #[error("the device ends at byte {end}, before what is to be read: has it shrunk?")]
    Short {
        /// Where it ends, bytes.
        end: u64,
    },
    /// The ring thread panicked.
    #[error("the thread that reads devices has ended: restart the agent")]
    Ended,
}

/// A handle on the ring thread; clones share it, and it ends with the last.
#[derive(Clone, Debug)]
pub struct Prober {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Some until the last handle is dropped.
    requests: Option<Sender<Request>>,
    bell: Arc<OwnedFd>,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Request {
    fd: RawFd,
    regions: Vec<Region>,
    reply: Sender<Result<Vec<Buffer>, ProbeError>>,
}

impl Prober {
    /// Starts the thread.
    pub fn start() -> io::Result<Self> {
        let (give, requests) = unbounded();
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let (ready, started) = bounded(1);
        let heard = Arc::clone(&bell);
        let thread = thread::Builder::new()
            .name("probe".to_owned())
            .spawn(move || match Engine::new(requests, heard) {
                Ok(engine) => {
                    let _ = ready.send(Ok(()));
                    engine.run();
                }
                Err(error) => drop(ready.send(Err(error))),
            })?;
        started
            .recv()
            .unwrap_or_else(|_| Err(io::Error::other("the probe thread did not start")))?;
        let shared = Arc::new(Shared {
            requests: Some(give),
            bell,
            thread,
        });
        Ok(Self { shared })
    }

    /// Whether the thread still runs. Once it has ended, only a restart of the
    /// agent helps.
    pub fn is_alive(&self) -> bool {
        !self.shared.thread.is_finished()
    }

    /// Reads `regions` of the device that `fd` is, opened with O_DIRECT, all at
    /// once; blocks until they are there. The blocks come in the regions' order.
    ///
    /// On a lane only: for a device that does not answer this never returns.
    pub fn read(&self, fd: BorrowedFd<'_>, regions: &[Region]) -> Result<Vec<Block>, ProbeError> {
        let (reply, answer) = bounded(1);
        let request = Request {
            fd: fd.as_raw_fd(),
            regions: regions.to_vec(),
            reply,
        };
        let requests = self.shared.requests.as_ref().ok_or(ProbeError::Ended)?;
        requests.send(request).map_err(|_| ProbeError::Ended)?;
        self.shared.ring();
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

impl Shared {
    /// Wakes the ring thread. The write fails only where the bell has rung
    /// 2^64 - 2 times unheard (eventfd(2)).
    fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.requests = None;
        self.ring();
    }
}

#[cfg(test)]
mod tests;
