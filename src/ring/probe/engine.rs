//! The ring thread: takes requests, submits reads, and answers a request when its last
//! read has ended.

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

use super::{ProbeError, ProbeRead, Region, buffer::Buffer};

/// Entries of the submission ring: the most reads that one system call submits.
const BATCH: u32 = 256;

/// Reads in the kernel at once, stuck ones included: the completion ring's
/// size, so that none overflows it.
pub(super) const READS: u32 = 4096;

/// Reads in the kernel at once for one request.
const PER_REQUEST: usize = 16;

/// From this many reads in the kernel on, each request has one read at a time: a device
/// that hangs occupies one slot, and leaves the rest to the others.
const CROWDED: usize = 128;

/// Kernel workers at once. Each read occupies one until the driver accepts the request:
/// a dead NBD connection keeps it until the driver gives up. The kernel starts workers
/// as reads need them and ends idle ones. With its default limit, four for each processor,
/// as many dead devices would block the others (io_uring_register(2),
/// IORING_REGISTER_IOWQ_MAX_WORKERS; Linux 5.15).
const WORKERS: u32 = READS;

/// The id of the wakeup's read; reads of devices count from 1.
const WAKEUP: u64 = 0;

/// The state of the ring thread.
pub(super) struct Engine {
    ring: IoUring,
    requests: Receiver<ProbeRead>,
    wakeup: Arc<OwnedFd>,
    /// The buffer of the wakeup's read.
    wakeups: Box<[u8; 8]>,
    listening: bool,
    /// Requests in progress.
    active: HashMap<u64, Active>,
    /// The requests that may submit a read, in turn.
    ready: VecDeque<u64>,
    /// Reads in the kernel, or in the submission ring.
    in_flight: HashMap<u64, Read>,
    last: u64,
}

struct Active {
    fd: RawFd,
    reply: Sender<Result<Vec<Buffer>, ProbeError>>,
    /// One for each region, in order; `None` until its read has ended.
    buffers: Vec<Option<Buffer>>,
    /// Reads to submit, or to continue.
    pending: VecDeque<Read>,
    /// Reads in the kernel.
    in_flight: usize,
    /// Whether it is in [`Engine::ready`].
    queued: bool,
    failed: Option<ProbeError>,
}

struct Read {
    request: u64,
    index: usize,
    region: Region,
    /// Allocated when the read is submitted.
    buffer: Option<Buffer>,
}

impl Engine {
    pub(super) fn new(requests: Receiver<ProbeRead>, wakeup: Arc<OwnedFd>) -> io::Result<Self> {
        let ring = IoUring::builder()
            .dontfork()
            .setup_cqsize(READS)
            .build(BATCH)?;
        if let Err(error) = ring
            .submitter()
            .register_iowq_max_workers(&mut [WORKERS, 0])
        {
            tracing::debug!(%error, "cannot raise the probe ring's number of workers");
        }
        Ok(Self {
            ring,
            requests,
            wakeup,
            wakeups: Box::default(),
            listening: false,
            active: HashMap::new(),
            ready: VecDeque::new(),
            in_flight: HashMap::new(),
            last: WAKEUP,
        })
    }

    /// Serves until the last handle is dropped.
    pub(super) fn run(mut self) {
        loop {
            self.listen();
            loop {
                match self.requests.try_recv() {
                    Ok(request) => self.accept(request),
                    Err(TryRecvError::Empty) => break,
                    // Every caller holds a handle, so no request is in progress.
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            self.submit_reads();
            // Sleeps only if a new request would wake it.
            let enough = usize::from(self.listening);
            if let Err(error) = self.ring.submit_and_wait(enough)
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::warn!(%error, "cannot submit to the probe ring; retrying");
                #[expect(
                    clippy::disallowed_methods,
                    reason = "the kernel refuses: no event tells when it accepts more"
                )]
                thread::park_timeout(Duration::from_millis(10));
            }
            let ended: Vec<_> = (self.ring.completion())
                .map(|entry| (entry.user_data(), entry.result()))
                .collect();
            for (id, result) in ended {
                self.complete(id, result);
            }
        }
    }

    /// Reads the wakeup, so that a new request wakes the thread.
    fn listen(&mut self) {
        if self.listening {
            return;
        }
        let entry = opcode::Read::new(
            types::Fd(self.wakeup.as_raw_fd()),
            self.wakeups.as_mut_ptr(),
            8,
        )
        .build()
        .user_data(WAKEUP);
        // SAFETY: the engine owns the eventfd and the buffer, which it leaks.
        self.listening = unsafe { self.ring.submission().push(&entry) }.is_ok();
    }

    fn accept(&mut self, request: ProbeRead) {
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
            in_flight: 0,
            queued: false,
            failed: None,
        };
        self.active.insert(id, active);
        self.advance(id);
    }

    /// Submits reads while there are slots, one of each request in turn.
    fn submit_reads(&mut self) {
        // One slot is for the wakeup.
        while self.in_flight.len() + 1 < READS as usize {
            if self.ring.submission().is_full() && self.ring.submit().is_err() {
                return;
            }
            let Some(id) = self.ready.pop_front() else {
                return;
            };
            self.submit_one(id);
        }
    }

    /// Submits one read of a request, or the rest of it, unless the request has its share.
    fn submit_one(&mut self, id: u64) {
        let crowded = self.in_flight.len() >= CROWDED;
        let most = if crowded { 1 } else { PER_REQUEST };
        let Some(active) = self.active.get_mut(&id) else {
            return;
        };
        active.queued = false;
        // Its next read is submitted when one of these ends.
        if active.in_flight >= most {
            return;
        }
        let Some(mut read) = active.pending.pop_front() else {
            return;
        };
        let buffer = (read.buffer).get_or_insert_with(|| Buffer::new(read.region.len));
        let (at, len) = buffer.rest();
        let offset = read.region.offset + buffer.filled as u64;
        self.last += 1;
        // The read is never issued on this thread: if the driver slept, this thread, and
        // with it the reads of all other devices, would wait. Linux 6.6 and later were seen
        // to do so with a batch of reads of a dead NBD connection, and with a read of a
        // FUSE file.
        let entry = opcode::Read::new(types::Fd(active.fd), at, len)
            .offset(offset)
            .build()
            .flags(squeue::Flags::ASYNC)
            .user_data(self.last);
        // SAFETY: `in_flight` keeps the buffer until the read has ended, and leaks it
        // if the engine ends before; the owner of the descriptor waits for the answer.
        if unsafe { self.ring.submission().push(&entry) }.is_ok() {
            active.in_flight += 1;
            self.in_flight.insert(self.last, read);
        } else {
            active.pending.push_front(read);
        }
        self.advance(id);
    }

    /// Handles a completion: the bytes read, or a negative errno.
    fn complete(&mut self, id: u64, result: i32) {
        if id == WAKEUP {
            self.listening = false;
            return;
        }
        let Some(mut read) = self.in_flight.remove(&id) else {
            return;
        };
        let id = read.request;
        let (Some(active), Some(buffer)) = (self.active.get_mut(&id), read.buffer.as_mut()) else {
            return;
        };
        active.in_flight -= 1;
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
            // The end of the device.
            active
                .failed
                .get_or_insert(ProbeError::Short { end: offset });
        }
        self.advance(id);
    }

    /// Queues request `id` for its next reads, or answers it once all have ended. A failed
    /// one submits no more.
    fn advance(&mut self, id: u64) {
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
        } else if active.in_flight == 0
            && let Some(active) = self.active.remove(&id)
        {
            let answer = match active.failed {
                Some(error) => Err(error),
                None => Ok(active.buffers.into_iter().flatten().collect()),
            };
            // Fails only if the caller's thread was killed.
            let _ = active.reply.send(answer);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // After a panic the kernel may still write to these.
        mem::forget(mem::take(&mut self.in_flight));
        mem::forget(mem::take(&mut self.wakeups));
    }
}
