//! Waiting until a block device is ready, by the kernel's uevents.
//!
//! The kernel announces devices by uevents, on netlink and in sysfs (kernel
//! document admin-guide/abi, sysfs-uevent; netlink(7), NETLINK_KOBJECT_UEVENT).
//! This listens to the kernel and not to udevd, which need not run in the agent's
//! network namespace. An event only says that something changed: a waiter looks into
//! sysfs, first and then after each event of its device. So an early or a superfluous
//! event does no harm; and if events are lost, because they came faster than they were
//! read (ENOBUFS), every waiter looks again.
//!
//! Most devices are ready, or gone, at the first look, and the events of a busy node are
//! many. So the socket is read only while there are waiters; what it holds by then is read
//! first.
//!
//! The runtime thread listens; any thread may wait. sysfs and devtmpfs are memory, and
//! nothing here opens a device.

use std::{
    convert::Infallible,
    io,
    path::PathBuf,
    rc::Rc,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::{event::PollFlags, io::Errno, net::sockopt};
use tokio::{sync::Notify, task::AbortHandle};

use super::{Device, Source};
use crate::{kernel::sysfs, ring::poll};

/// Bytes of events that the socket holds, of some two thousand events (the kernel doubles
/// the number). More are lost.
const BACKLOG: usize = 1 << 20;

/// Events to read before other tasks of the runtime thread have a turn.
const AT_ONCE: usize = 64;

/// How often reading may fail before the next event is waited for.
const FAILURES: u32 = 16;

/// The kernel's uevents of block devices. Dropping it ends the listening.
pub struct Uevents {
    waiters: Arc<Waiters>,
    listener: AbortHandle,
}

#[derive(Default)]
struct Waiters {
    list: Mutex<WaiterList>,
    /// There is a new one.
    more: Notify,
}

#[derive(Default)]
struct WaiterList {
    waiters: Vec<Arc<Waiter>>,
    /// Why it has ended, if it has.
    ended: Option<(io::ErrorKind, String)>,
}

struct Waiter {
    sysname: String,
    look: Notify,
}

impl Uevents {
    /// Starts to listen.
    pub fn start() -> io::Result<Self> {
        let builder = udev::MonitorBuilder::new_kernel()?.match_subsystem("block")?;
        // The first takes CAP_NET_ADMIN, the second is bounded by rmem_max.
        sockopt::set_socket_recv_buffer_size_force(&builder, BACKLOG)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(&builder, BACKLOG))?;
        let socket = Rc::new(builder.listen()?);
        let waiters = Arc::new(Waiters::default());
        let listener = tokio::task::spawn_local(listen(socket, Arc::clone(&waiters)));
        Ok(Self {
            waiters,
            listener: listener.abort_handle(),
        })
    }

    /// Whether it still listens. Once it has ended, only a restart of the agent
    /// helps.
    pub fn is_alive(&self) -> bool {
        !self.listener.is_finished()
    }

    /// Calls `check` until it succeeds: at once, and after each event of the device that
    /// sysfs calls `sysname`, e.g. `loop7`.
    ///
    /// Without an event it waits for ever: the caller sets the deadline.
    pub async fn wait<T>(
        &self,
        sysname: &str,
        mut check: impl FnMut() -> io::Result<Option<T>>,
    ) -> io::Result<T> {
        if let Some(found) = check()? {
            return Ok(found);
        }
        // Listed before the next look, so that no event falls between.
        let listed = Registration::new(&self.waiters, sysname);
        loop {
            if let Some(found) = check()? {
                return Ok(found);
            }
            if let Some((kind, why)) = &self.waiters.lock().ended {
                return Err(io::Error::new(*kind, why.clone()));
            }
            listed.waiter.look.notified().await;
        }
    }
}

impl Drop for Uevents {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

/// A waiter on the list, as long as it lives.
struct Registration<'a> {
    waiters: &'a Waiters,
    waiter: Arc<Waiter>,
}

impl<'a> Registration<'a> {
    fn new(waiters: &'a Waiters, sysname: &str) -> Self {
        let waiter = Arc::new(Waiter {
            sysname: sysname.to_owned(),
            look: Notify::new(),
        });
        waiters.lock().waiters.push(Arc::clone(&waiter));
        waiters.more.notify_one();
        Self { waiters, waiter }
    }
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        let mut list = self.waiters.lock();
        list.waiters
            .retain(|waiter| !Arc::ptr_eq(waiter, &self.waiter));
    }
}

impl Waiters {
    /// No code that can panic runs under this lock.
    fn lock(&self) -> MutexGuard<'_, WaiterList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn are_none(&self) -> bool {
        self.lock().waiters.is_empty()
    }

    /// Wakes the waiters for `sysname`, or all. A waiter that is not waiting at the moment
    /// sees the wake later.
    fn wake(&self, sysname: Option<&std::ffi::OsStr>) {
        for waiter in &self.lock().waiters {
            if sysname.is_none_or(|sysname| sysname == waiter.sysname.as_str()) {
                waiter.look.notify_one();
            }
        }
    }
}

async fn listen(socket: Rc<udev::MonitorSocket>, waiters: Arc<Waiters>) {
    let Err(error) = wake_waiters(&socket, &waiters).await;
    tracing::error!(%error, "no more events of block devices: restart the agent");
    let why = format!("events of block devices have ended: {error}");
    waiters.lock().ended = Some((error.kind(), why));
    waiters.wake(None);
}

/// Wakes waiters by the socket's events, until it fails.
async fn wake_waiters(
    socket: &Rc<udev::MonitorSocket>,
    waiters: &Waiters,
) -> io::Result<Infallible> {
    loop {
        while waiters.are_none() {
            waiters.more.notified().await;
        }
        let mut ready = poll::watch(Rc::clone(socket), PollFlags::IN)?;
        while !waiters.are_none() {
            if ready.next().await?.contains(PollFlags::ERR) {
                waiters.wake(None);
            }
            while take_events(socket, waiters) {
                tokio::task::yield_now().await;
            }
        }
    }
}

/// Reads events that the socket holds. Whether there may be more.
fn take_events(socket: &udev::MonitorSocket, waiters: &Waiters) -> bool {
    let mut failures = 0;
    for _ in 0..AT_ONCE {
        if let Some(event) = socket.iter().next() {
            waiters.wake(Some(event.sysname()));
            continue;
        }
        // libudev says why in errno (udev_monitor_receive_device(3)).
        match Errno::from_io_error(&io::Error::last_os_error()) {
            Some(Errno::AGAIN) => return false,
            Some(Errno::INTR) => {}
            why => {
                tracing::warn!(
                    ?why,
                    "events of block devices were lost: all waiters look again"
                );
                waiters.wake(None);
            }
        }
        failures += 1;
        if failures == FAILURES {
            return false;
        }
    }
    true
}

/// Why a wait is given up.
const ANOTHER: &str = "somebody else has detached it meanwhile; stage the volume again";

/// A block device that is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Its node, which is that device's.
    pub node: PathBuf,
    /// Its size.
    pub bytes: u64,
}

/// Waits until the device has the source behind it, a size and a node.
pub async fn ready(uevents: &Uevents, source: &Source, device: &Device) -> io::Result<Ready> {
    let check = || look(source, device);
    uevents.wait(&sysfs::name_of(device.dev)?, check).await
}

/// The device, if it has the source behind it, a size and a node.
pub fn look(source: &Source, device: &Device) -> io::Result<Option<Ready>> {
    let dev = device.dev;
    if !source.is_still(device) {
        // A loop device has its file from the start: this is another file.
        return match device.diskseq {
            Some(_) if !device.still_matches() => Err(io::Error::other(ANOTHER)),
            _ => Ok(None),
        };
    }
    let found = sysfs::size_bytes(dev).and_then(|bytes| {
        let node = sysfs::present_node_of(dev)?;
        Ok((bytes > 0).then_some(Ready { node, bytes }))
    });
    none_if_missing(found)
}

/// Waits until the device has released its source, as it does when its last opener closes
/// it. Its number may go to another source at once.
pub async fn gone(uevents: &Uevents, source: &Source, device: &Device) -> io::Result<()> {
    let check = || Ok((!source.is_still(device)).then_some(()));
    uevents.wait(&sysfs::name_of(device.dev)?, check).await
}

/// Whether a later look may succeed.
fn none_if_missing<T>(found: io::Result<Option<T>>) -> io::Result<Option<T>> {
    match found {
        Err(error) if sysfs::is_missing(&error) => Ok(None),
        found => found,
    }
}

#[cfg(test)]
mod tests;
