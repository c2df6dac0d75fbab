//! Readiness of descriptors, on a small ring of its own.
//!
//! tokio-uring has no operation for it, so the runtime thread has a second ring, the
//! *poller*. tokio's epoll watches its descriptor, and a task takes the completions. No
//! operation on this ring needs a kernel worker or a device: a poll sleeps on a wait
//! queue.
//!
//! A table keeps each operation, and the descriptor that it polls, until the kernel's
//! last completion for it. When a future is dropped, its operation is cancelled, and its
//! entry is kept until then, so that the kernel never uses a descriptor's number after it
//! was closed and reused.
//!
//! [`Events`] is a multishot poll (io_uring_enter(2), IORING_POLL_ADD_MULTI): it reports
//! edges, so its owner reads until EAGAIN after each. The kernel may end a multishot at
//! any time, as it does when completions overflow; the next call of [`Events::next`] then
//! arms it again, and arming reports the present state, so no edge is lost.

use std::{
    cell::RefCell,
    collections::HashMap,
    future::poll_fn,
    io, mem,
    os::fd::{AsFd, AsRawFd, RawFd},
    rc::Rc,
    task::{Context, Poll, Waker},
};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::event::PollFlags;
use tokio::io::{Interest, unix::AsyncFd};

use super::{Operations, POLLS, WATCHES};

/// Entries of the submission ring; each entry is submitted at once.
const ENTRIES: u32 = 64;

/// The id of cancellations, whose completions are ignored. Operations count from 1.
const CANCEL: u64 = 0;

thread_local! {
    static POLLER: RefCell<Option<Rc<Poller>>> = const { RefCell::new(None) };
}

struct Poller {
    inner: RefCell<PollerInner>,
    ring: RawFd,
}

struct PollerInner {
    ring: IoUring,
    ops: HashMap<u64, Op>,
    last: u64,
    /// Operations to drop after the borrow ends: a descriptor's Drop may run any code, also
    /// the poller's.
    spent: Vec<Op>,
}

struct Op {
    fd: Box<dyn AsFd>,
    events: PollFlags,
    multishot: bool,
    /// The unread result: events, or an error.
    seen: Option<io::Result<u32>>,
    /// More completions will come.
    in_kernel: bool,
    /// The future was dropped; the last completion removes the entry.
    abandoned: bool,
    waker: Option<Waker>,
}

/// Keeps this thread's poller until it is dropped, at the runtime's end.
pub(super) struct Installed(());

/// Makes this thread's poller and the task that serves it.
pub(super) fn install() -> io::Result<Installed> {
    let ring = IoUring::builder().dontfork().build(ENTRIES)?;
    let poller = Rc::new(Poller {
        ring: ring.as_raw_fd(),
        inner: RefCell::new(PollerInner {
            ring,
            ops: HashMap::new(),
            last: CANCEL,
            spent: Vec::new(),
        }),
    });
    let watched = Ring(Rc::clone(&poller));
    // SAFETY: the descriptor is always that of the ring in `poller`, which
    // `watched` keeps open as long as it is registered.
    let ready = unsafe { AsyncFd::register_with_interest(watched, Interest::READABLE) }?;
    tokio::task::spawn_local(serve(ready));
    POLLER.set(Some(poller));
    Ok(Installed(()))
}

impl Drop for Installed {
    fn drop(&mut self) {
        POLLER.set(None);
    }
}

/// The poller as tokio watches it.
struct Ring(Rc<Poller>);

impl AsRawFd for Ring {
    fn as_raw_fd(&self) -> RawFd {
        self.0.ring
    }
}

async fn serve(ready: AsyncFd<Ring>) {
    // Fails only while the runtime is being dropped.
    while let Ok(mut guard) = ready.readable().await {
        guard.get_inner().0.with(PollerInner::drain);
        guard.clear_ready();
    }
}

impl Poller {
    /// This thread's poller.
    fn current() -> Rc<Self> {
        POLLER
            .with_borrow(Clone::clone)
            .expect("polls and children belong inside ring::start")
    }

    fn with<T>(&self, change: impl FnOnce(&mut PollerInner) -> T) -> T {
        let mut inner = self.inner.borrow_mut();
        let changed = change(&mut inner);
        let spent = mem::take(&mut inner.spent);
        drop(inner);
        drop(spent);
        changed
    }
}

impl PollerInner {
    /// Delivers every completion to its operation.
    fn drain(&mut self) {
        loop {
            let mut completions = self.ring.completion();
            completions.sync();
            for completion in completions {
                complete(&mut self.ops, &mut self.spent, &completion);
            }
            if !self.ring.submission().cq_overflow() {
                return;
            }
            // The kernel keeps the completions that did not fit (IORING_FEAT_NODROP), and
            // delivers them at the next entry into it. If this entry fails, that of the
            // next operation delivers them.
            if self.ring.submit().is_err() {
                return;
            }
        }
    }

    /// Submits operation `id`.
    fn arm(&mut self, id: u64) -> io::Result<()> {
        let Some(op) = self.ops.get_mut(&id) else {
            return Ok(());
        };
        op.in_kernel = true;
        let entry = op.entry().user_data(id);
        let count = op.count();
        self.submit(&entry)?;
        count.submitted();
        Ok(())
    }

    fn submit(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: `ops` keeps the descriptor that the entry refers to until its last
        // completion, and no entry refers to memory.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.enter()?;
        }
        self.enter()
    }

    fn enter(&mut self) -> io::Result<()> {
        loop {
            match self.ring.submit() {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Linux before 5.19 accepts no submission while completions overflow.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => self.drain(),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Delivers `completion` to its operation.
fn complete(ops: &mut HashMap<u64, Op>, spent: &mut Vec<Op>, completion: &cqueue::Entry) {
    let id = completion.user_data();
    let Some(op) = ops.get_mut(&id) else {
        return; // CANCEL
    };
    op.in_kernel = cqueue::more(completion.flags());
    if !op.in_kernel {
        op.count().ended();
    }
    if op.abandoned {
        if !op.in_kernel {
            spent.extend(ops.remove(&id));
        }
        return;
    }
    op.seen = Some(match (completion.result(), op.seen.take()) {
        (error @ i32::MIN..0, _) => Err(io::Error::from_raw_os_error(-error)),
        (events, Some(Ok(before))) => Ok(before | events.unsigned_abs()),
        (events, _) => Ok(events.unsigned_abs()),
    });
    if let Some(waker) = op.waker.take() {
        waker.wake();
    }
}

impl Op {
    fn count(&self) -> &'static Operations {
        if self.multishot { &WATCHES } else { &POLLS }
    }

    fn entry(&self) -> squeue::Entry {
        let fd = types::Fd(self.fd.as_fd().as_raw_fd());
        opcode::PollAdd::new(fd, u32::from(self.events.bits()))
            .multi(self.multishot)
            .build()
    }
}

/// A future's operation; dropping this cancels it.
struct PendingOperation {
    poller: Rc<Poller>,
    id: u64,
}

impl PendingOperation {
    fn new(fd: impl AsFd + 'static, events: PollFlags, multishot: bool) -> io::Result<Self> {
        let poller = Poller::current();
        let id = poller.with(|inner| {
            inner.last += 1;
            let op = Op {
                fd: Box::new(fd),
                events,
                multishot,
                seen: None,
                in_kernel: false,
                abandoned: false,
                waker: None,
            };
            inner.ops.insert(inner.last, op);
            inner.last
        });
        let waiting = Self { poller, id };
        waiting.poller.with(|inner| inner.arm(id))?;
        Ok(waiting)
    }

    /// The events, or the error, since the last call. Arms the operation again if the kernel
    /// has ended it without a result.
    fn poll(&self, context: &Context<'_>) -> Poll<io::Result<u32>> {
        self.poller.with(|inner| {
            let Some(op) = inner.ops.get_mut(&self.id) else {
                unreachable!("an operation stays while it is waited for");
            };
            if let Some(seen) = op.seen.take() {
                return Poll::Ready(seen);
            }
            op.waker = Some(context.waker().clone());
            if !op.in_kernel
                && let Err(error) = inner.arm(self.id)
            {
                return Poll::Ready(Err(error));
            }
            Poll::Pending
        })
    }

    async fn next(&self) -> io::Result<u32> {
        poll_fn(|context| self.poll(context)).await
    }
}

impl Drop for PendingOperation {
    fn drop(&mut self) {
        self.poller.with(|inner| {
            let Some(op) = inner.ops.get_mut(&self.id) else {
                return;
            };
            if op.in_kernel {
                op.abandoned = true;
                op.waker = None;
                let cancel = opcode::AsyncCancel::new(self.id).build().user_data(CANCEL);
                // If the kernel has no memory for the cancellation, the entry is kept until
                // the descriptor is ready.
                let _ = inner.submit(&cancel);
            } else {
                inner.spent.extend(inner.ops.remove(&self.id));
            }
        });
    }
}

/// A stream of a descriptor's readiness events, edge-triggered, without end.
#[must_use]
pub struct Events(PendingOperation);

/// Watches `fd` for `events` and, always, for `ERR` and `HUP`.
///
/// `fd` is kept open until the kernel has ended the poll, a moment after the
/// [`Events`] is dropped.
pub fn watch(fd: impl AsFd + 'static, events: PollFlags) -> io::Result<Events> {
    PendingOperation::new(fd, events, true).map(Events)
}

impl Events {
    /// Waits for events since the last call, and returns them.
    ///
    /// These are edges: read until EAGAIN before the next call. Dropping the future loses no
    /// event.
    pub async fn next(&mut self) -> io::Result<PollFlags> {
        self.0.next().await.map(flags)
    }
}

/// Waits until `fd` is readable, at its end, or has an error.
pub async fn readable(fd: impl AsFd + 'static) -> io::Result<PollFlags> {
    let once = PendingOperation::new(fd, PollFlags::IN, false)?;
    once.next().await.map(flags)
}

/// The events of poll(2), the lower 16 bits of a completion's 32.
fn flags(events: u32) -> PollFlags {
    PollFlags::from_bits_retain(u16::try_from(events & u32::from(u16::MAX)).unwrap_or_default())
}

#[cfg(test)]
mod tests;
