//! The ring thread: requests in, reads out, answers when the last has ended.

use std::{
    collections::{HashMap, VecDeque},
    io, mem,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::Arc,
    thread,
    time::Duration,
};

use crossbeam::channel::{Receiver, Sender, TryRecvError};
use io_uring::{IoUring, opcode, types};

use super::{ProbeError, Region, Request, buffer::Buffer};

/// Entries of the submission ring: what one entry into the kernel takes.
const BATCH: u32 = 256;

/// Reads in the kernel at once, stuck ones included: the completion ring's
/// size, so that none overflows it.
pub(super) const READS: u32 = 4096;

/// Kernel workers that may wait in a device's queue at once. The default, four
/// for each processor, would let as few stuck devices hold up the others
/// (io_uring_register(2), IORING_REGISTER_IOWQ_MAX_WORKERS; Linux 5.15).
const WORKERS: u32 = 512;

/// The completion of the bell's read; reads of devices count from 1.
const BELL: u64 = 0;

/// All that the ring thread owns.
pub(super) struct Engine {
    ring: IoUring,
    requests: Receiver<Request>,
    bell: Arc<OwnedFd>,
    /// Where the kernel puts the bell's count.
    rung: Box<[u8; 8]>,
    listening: bool,
    /// Requests under way, and the reads of them that have not begun.
    active: HashMap<u64, Active>,
    backlog: VecDeque<Read>,
    /// Reads that are in the kernel, or in the submission ring.
    flying: HashMap<u64, Read>,
    last: u64,
}

struct Active {
    fd: RawFd,
    reply: Sender<Result<Vec<Buffer>, ProbeError>>,
    /// One for each region, in order; none before its read has ended.
    buffers: Vec<Option<Buffer>>,
    /// Reads that have not ended.
    open: usize,
    failed: Option<ProbeError>,
}

struct Read {
    request: u64,
    index: usize,
    region: Region,
    /// Made when the read begins.
    buffer: Option<Buffer>,
}

impl Engine {
    pub(super) fn new(requests: Receiver<Request>, bell: Arc<OwnedFd>) -> io::Result<Self> {
        let ring = IoUring::builder()
            .dontfork()
            .setup_cqsize(READS)
            .build(BATCH)?;
        if let Err(error) = ring
            .submitter()
            .register_iowq_max_workers(&mut [WORKERS, 0])
        {
            tracing::debug!(%error, "the probe ring keeps the kernel's number of workers");
        }
        Ok(Self {
            ring,
            requests,
            bell,
            rung: Box::default(),
            listening: false,
            active: HashMap::new(),
            backlog: VecDeque::new(),
            flying: HashMap::new(),
            last: BELL,
        })
    }

    /// Serves until the last handle is gone.
    pub(super) fn run(mut self) {
        loop {
            self.listen();
            loop {
                match self.requests.try_recv() {
                    Ok(request) => self.accept(request),
                    Err(TryRecvError::Empty) => break,
                    // Every caller holds a handle, so nothing is under way.
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            self.begin();
            // It sleeps only where a new request wakes it.
            let enough = usize::from(self.listening);
            if let Err(error) = self.ring.submit_and_wait(enough)
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::warn!(%error, "the probe ring takes nothing; trying again");
                thread::park_timeout(Duration::from_millis(10));
            }
            let ended: Vec<_> = (self.ring.completion())
                .map(|entry| (entry.user_data(), entry.result()))
                .collect();
            for (id, result) in ended {
                self.end(id, result);
            }
        }
    }

    /// Listens for the bell, so that a new request wakes the thread.
    fn listen(&mut self) {
        if self.listening {
            return;
        }
        let entry = opcode::Read::new(types::Fd(self.bell.as_raw_fd()), self.rung.as_mut_ptr(), 8)
            .build()
            .user_data(BELL);
        // SAFETY: bell and buffer are the engine's, which leaks the buffer.
        self.listening = unsafe { self.ring.submission().push(&entry) }.is_ok();
    }

    fn accept(&mut self, request: Request) {
        self.last += 1;
        let id = self.last;
        let reads = request.regions.iter().enumerate();
        self.backlog.extend(reads.map(|(index, region)| Read {
            request: id,
            index,
            region: *region,
            buffer: None,
        }));
        let count = request.regions.len();
        let active = Active {
            fd: request.fd,
            reply: request.reply,
            buffers: (0..count).map(|_| None).collect(),
            open: count,
            failed: None,
        };
        self.active.insert(id, active);
        self.answer(id);
    }

    /// Takes reads from the backlog as long as there is room.
    fn begin(&mut self) {
        // One completion is the bell's.
        while self.flying.len() + 1 < READS as usize {
            if self.ring.submission().is_full() && self.ring.submit().is_err() {
                return;
            }
            let Some(read) = self.backlog.pop_front() else {
                return;
            };
            self.submit(read);
        }
    }

    /// Puts one read, or what is left of it, into the submission ring.
    fn submit(&mut self, mut read: Read) {
        let Some(active) = self.active.get_mut(&read.request) else {
            return;
        };
        if active.failed.is_some() {
            active.open -= 1;
            return self.answer(read.request);
        }
        let buffer = (read.buffer).get_or_insert_with(|| Buffer::new(read.region.len));
        let (at, len) = buffer.rest();
        let offset = read.region.offset + buffer.filled as u64;
        self.last += 1;
        let entry = opcode::Read::new(types::Fd(active.fd), at, len)
            .offset(offset)
            .build()
            .user_data(self.last);
        // SAFETY: the buffer is in `flying` until the read has ended, and is
        // leaked where the engine ends before; the caller that lent the
        // descriptor waits for the answer.
        if unsafe { self.ring.submission().push(&entry) }.is_ok() {
            self.flying.insert(self.last, read);
        } else {
            self.backlog.push_front(read);
        }
    }

    /// Takes a completion: the bytes read, or an error number below zero.
    fn end(&mut self, id: u64, result: i32) {
        if id == BELL {
            self.listening = false;
            return;
        }
        let Some(mut read) = self.flying.remove(&id) else {
            return;
        };
        let (Some(active), Some(buffer)) =
            (self.active.get_mut(&read.request), read.buffer.as_mut())
        else {
            return;
        };
        let before = buffer.filled;
        buffer.filled += usize::try_from(result).unwrap_or(0);
        let offset = read.region.offset + buffer.filled as u64;
        let wanted = read.region.len;
        if result < 0 {
            let source = io::Error::from_raw_os_error(-result);
            if source.kind() == io::ErrorKind::Interrupted {
                return self.backlog.push_front(read);
            }
            active.failed.get_or_insert(ProbeError::Read {
                offset,
                len: wanted - before,
                source,
            });
        } else if buffer.filled >= wanted {
            active.buffers[read.index] = read.buffer;
        } else if result > 0 && buffer.filled.is_multiple_of(512) {
            return self.backlog.push_front(read);
        } else {
            // Nothing, or an end within a sector.
            active
                .failed
                .get_or_insert(ProbeError::Short { end: offset });
        }
        active.open -= 1;
        self.answer(read.request);
    }

    /// Answers request `id` once none of its reads is open.
    fn answer(&mut self, id: u64) {
        if self.active.get(&id).is_none_or(|active| active.open > 0) {
            return;
        }
        if let Some(active) = self.active.remove(&id) {
            let answer = match active.failed {
                Some(error) => Err(error),
                None => Ok(active.buffers.into_iter().flatten().collect()),
            };
            // The caller waits for it, unless its thread was killed.
            let _ = active.reply.send(answer);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // After a panic the kernel may still write into these.
        mem::forget(mem::take(&mut self.flying));
        mem::forget(mem::take(&mut self.rung));
    }
}
