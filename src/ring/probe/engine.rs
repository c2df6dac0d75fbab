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
use io_uring::{IoUring, opcode, squeue, types};

use super::{ProbeError, Region, Request, buffer::Buffer};

/// Entries of the submission ring: what one entry into the kernel takes.
const BATCH: u32 = 256;

/// Reads in the kernel at once, stuck ones included: the completion ring's
/// size, so that none overflows it.
pub(super) const READS: u32 = 4096;

/// Reads in the kernel at once for one request.
const ABREAST: usize = 16;

/// With so many reads in the kernel, a request has one there at a time: devices
/// that do not answer hold one place each, and leave the rest to the others.
const CROWDED: usize = 128;

/// Kernel workers at once. Each read takes one, for as long as the driver does
/// not take the request: a dead NBD connection keeps it until the driver gives
/// up. The kernel makes workers as reads need them and ends those that are idle.
/// Its own limit, four for each processor, would let as few dead devices hold up
/// the others (io_uring_register(2), IORING_REGISTER_IOWQ_MAX_WORKERS; Linux 5.15).
const WORKERS: u32 = READS;

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
    /// Requests under way.
    active: HashMap<u64, Active>,
    /// Those that may begin a read, in turn.
    ready: VecDeque<u64>,
    /// Reads that are in the kernel, or in the submission ring.
    flying: HashMap<u64, Read>,
    last: u64,
}

struct Active {
    fd: RawFd,
    reply: Sender<Result<Vec<Buffer>, ProbeError>>,
    /// One for each region, in order; none before its read has ended.
    buffers: Vec<Option<Buffer>>,
    /// Reads that have not begun, or are to be continued.
    pending: VecDeque<Read>,
    /// Reads in the kernel.
    flying: usize,
    /// It is in [`Engine::ready`].
    queued: bool,
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
            ready: VecDeque::new(),
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
        let pending = reads.map(|(index, region)| Read {
            request: id,
            index,
            region: *region,
            buffer: None,
        });
        let active = Active {
            fd: request.fd,
            reply: request.reply,
            buffers: request.regions.iter().map(|_| None).collect(),
            pending: pending.collect(),
            flying: 0,
            queued: false,
            failed: None,
        };
        self.active.insert(id, active);
        self.go_on(id);
    }

    /// Begins reads as long as there is room, of each request one in turn.
    fn begin(&mut self) {
        // One completion is the bell's.
        while self.flying.len() + 1 < READS as usize {
            if self.ring.submission().is_full() && self.ring.submit().is_err() {
                return;
            }
            let Some(id) = self.ready.pop_front() else {
                return;
            };
            self.begin_one(id);
        }
    }

    /// Puts one read of a request, or what is left of it, into the submission
    /// ring, if it may have one more there.
    fn begin_one(&mut self, id: u64) {
        let crowded = self.flying.len() >= CROWDED;
        let most = if crowded { 1 } else { ABREAST };
        let Some(active) = self.active.get_mut(&id) else {
            return;
        };
        active.queued = false;
        // One that has reads in the kernel has its turn again when one ends.
        if active.flying >= most {
            return;
        }
        let Some(mut read) = active.pending.pop_front() else {
            return;
        };
        let buffer = (read.buffer).get_or_insert_with(|| Buffer::new(read.region.len));
        let (at, len) = buffer.rest();
        let offset = read.region.offset + buffer.filled as u64;
        self.last += 1;
        // Never tried on this thread: what the driver sleeps for, this thread and
        // with it all other devices would sleep for, too. Since Linux 6.6 a batch
        // of reads is handed to a dead NBD connection so, and a read to a FUSE file
        // was seen to be.
        let entry = opcode::Read::new(types::Fd(active.fd), at, len)
            .offset(offset)
            .build()
            .flags(squeue::Flags::ASYNC)
            .user_data(self.last);
        // SAFETY: the buffer is in `flying` until the read has ended, and is
        // leaked where the engine ends before; the caller that lent the
        // descriptor waits for the answer.
        if unsafe { self.ring.submission().push(&entry) }.is_ok() {
            active.flying += 1;
            self.flying.insert(self.last, read);
        } else {
            active.pending.push_front(read);
        }
        self.go_on(id);
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
        let id = read.request;
        let (Some(active), Some(buffer)) = (self.active.get_mut(&id), read.buffer.as_mut()) else {
            return;
        };
        active.flying -= 1;
        let before = buffer.filled;
        buffer.filled += usize::try_from(result).unwrap_or(0);
        let offset = read.region.offset + buffer.filled as u64;
        let wanted = read.region.len;
        if result < 0 {
            let source = io::Error::from_raw_os_error(-result);
            if source.kind() == io::ErrorKind::Interrupted {
                active.pending.push_front(read);
            } else {
                active.failed.get_or_insert(ProbeError::Read {
                    offset,
                    len: wanted - before,
                    source,
                });
            }
        } else if buffer.filled >= wanted {
            active.buffers[read.index] = read.buffer;
        } else if result > 0 && buffer.filled.is_multiple_of(512) {
            active.pending.push_front(read);
        } else {
            // Nothing, or an end within a sector.
            active
                .failed
                .get_or_insert(ProbeError::Short { end: offset });
        }
        self.go_on(id);
    }

    /// Lets request `id` begin its next reads, or answers it once it has none left
    /// and none in the kernel. One that has failed begins no more.
    fn go_on(&mut self, id: u64) {
        let Some(active) = self.active.get_mut(&id) else {
            return;
        };
        if active.failed.is_some() {
            active.pending.clear();
        }
        if !active.pending.is_empty() {
            if !mem::replace(&mut active.queued, true) {
                self.ready.push_back(id);
            }
        } else if active.flying == 0
            && let Some(active) = self.active.remove(&id)
        {
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
