//! The devices' links to their servers, and how they are kept.
//!
//! A connection dies with its server, or because a request got no answer. The
//! kernel announces it (`NBD_CMD_LINK_DEAD`, multicast) and lets requests wait
//! for the dead-connection timeout. Meanwhile [`keep`] shakes hands anew and
//! offers fresh sockets (`RECONFIGURE`), again and again until one is taken or
//! the volume is unstaged.
//!
//! Our own descriptors of the sockets tell which are dead, and shut them down
//! where a device grows. They go with the agent: after a restart it can't be
//! told how a device's connections are. So each device is offered a full set
//! once; a healthy one drops it.

use std::{
    collections::HashMap,
    io,
    rc::Rc,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rustix::event::PollFlags;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use super::{
    Behind, Connection, NbdDevice, NbdError, Options, Shape, at, attach, claim, client, failed,
    find, index_of, is_behind,
    netlink::{Driver, Listener},
    open,
};
use crate::{
    Done, chain,
    device::{loopdev::Detached, sysfs},
    lane::Lanes,
    nbd::Export,
    ring::{self, poll, timer},
};

/// Between the attempts to reach a server that is away: at first, and at most.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The kernel announces a dead connection a moment before it is shut down.
const SECOND_LOOK: Duration = Duration::from_millis(100);

/// A device and its server.
#[derive(Debug)]
pub struct Link {
    pub(super) behind: Behind,
    pub(super) device: NbdDevice,
    pub(super) index: u32,
    pub(super) options: Options,
    /// How many connections the device has, dead or alive.
    pub(super) connections: usize,
    /// Those of them that this agent made. Whoever changes the device's
    /// sockets holds this; never while a server is waited for.
    pub(super) held: Mutex<Held>,
    pub(super) away: Mutex<Option<Away>>,
    mending: AtomicBool,
    /// Another connection died while the link was being mended.
    again: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct Held {
    pub(super) connections: Vec<Connection>,
    /// The device was taken down: no socket may be offered any more.
    closed: bool,
}

/// A server that cannot be reached.
#[derive(Clone, Debug)]
pub struct Away {
    /// Since when.
    pub since: Instant,
    /// For how long requests wait before they fail.
    pub patience: Duration,
    /// What happened at the last attempt.
    pub why: String,
}

/// What an attempt to mend a link came to.
enum Mended {
    /// The device has fresh connections.
    Now,
    /// It needed none.
    Already,
    /// There is no such device any more.
    Gone,
}

enum Event {
    Listening(Listener),
    Check(Arc<Link>),
}

/// The links of all attached exports. Clones share them.
#[derive(Clone, Debug)]
pub struct Links(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    links: Mutex<HashMap<u32, Arc<Link>>>,
    listening: Mutex<bool>,
    tell: UnboundedSender<Event>,
    events: Mutex<Option<UnboundedReceiver<Event>>>,
}

impl Default for Links {
    fn default() -> Self {
        let (tell, events) = mpsc::unbounded_channel();
        Self(Arc::new(Shared {
            links: Mutex::default(),
            listening: Mutex::default(),
            tell,
            events: Mutex::new(Some(events)),
        }))
    }
}

/// Nothing that these guard is left half-changed by a panic.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Links {
    /// Attaches the export, or finds it attached as it should be.
    pub fn attach(
        &self,
        behind: &Behind,
        read_only: bool,
        options: &Options,
    ) -> Result<(NbdDevice, Done), NbdError> {
        let export = &behind.export;
        let listed = || failed("/sys/block".as_ref(), "look for the export in");
        let driver = Driver::open().map_err(NbdError::NoDriver)?;
        self.listen(&driver).map_err(NbdError::NoDriver)?;
        let found = find(|found| found.export == *export).map_err(listed())?;
        if let Some((device, behind)) = found {
            if device.read_only != read_only {
                return Err(NbdError::AttachedOtherwise {
                    export: export.clone(),
                    node: device.node,
                    how: if device.read_only {
                        "read-only"
                    } else {
                        "writable"
                    },
                });
            }
            self.take_up(&behind, &device, options)?;
            return Ok((device, Done::Already));
        }
        let (device, connections) = attach(&driver, behind, read_only, options)?;
        let held = Held {
            connections,
            closed: false,
        };
        self.insert(behind, &device, options, held)?;
        Ok((device, Done::Now))
    }

    /// Keeps the link of a device that an earlier agent attached.
    pub fn take_up(
        &self,
        behind: &Behind,
        device: &NbdDevice,
        options: &Options,
    ) -> Result<(), NbdError> {
        let known = self.of(&behind.export);
        if known.is_some_and(|link| link.device.dev == device.dev) {
            return Ok(());
        }
        let link = self.insert(behind, device, options, Held::default())?;
        // Nobody listens any more where this fails: the agent is going down.
        let _ = self.0.tell.send(Event::Check(link));
        Ok(())
    }

    /// Detaches the export.
    pub fn detach(&self, export: &Export, device: &NbdDevice) -> Result<Detached, NbdError> {
        let Some(claimed) = claim(export, device)? else {
            self.forget(export);
            return Ok(Detached::Already);
        };
        let node = &device.node;
        let index = index_of(device.dev).map_err(failed(node, "find"))?;
        let driver = Driver::open().map_err(NbdError::NoDriver)?;
        let link = self.of(export);
        let down = || driver.disconnect(index).map_err(failed(node, "detach"));
        match &link {
            // A socket that were offered after it is down would bring it back
            // to life.
            Some(link) => {
                let mut held = lock(&link.held);
                down()?;
                held.closed = true;
                held.connections.clear();
            }
            None => down()?,
        }
        self.forget(export);
        drop(claimed);
        if is_behind(device.dev, export) {
            Ok(Detached::Deferred)
        } else {
            Ok(Detached::Now)
        }
    }

    fn forget(&self, export: &Export) {
        lock(&self.0.links).retain(|_, link| link.behind.export != *export);
    }

    /// Since when, and why, the export's server cannot be reached.
    pub fn away(&self, export: &Export) -> Option<Away> {
        self.of(export).and_then(|link| lock(&link.away).clone())
    }

    pub(super) fn of(&self, export: &Export) -> Option<Arc<Link>> {
        let links = lock(&self.0.links);
        links
            .values()
            .find(|link| link.behind.export == *export)
            .cloned()
    }

    fn insert(
        &self,
        behind: &Behind,
        device: &NbdDevice,
        options: &Options,
        held: Held,
    ) -> Result<Arc<Link>, NbdError> {
        let node = &device.node;
        let index = index_of(device.dev).map_err(failed(node, "find"))?;
        let connections = sysfs::queues(device.dev).map_err(failed(node, "find"))?;
        let link = Arc::new(Link {
            behind: behind.clone(),
            device: device.clone(),
            index,
            options: *options,
            connections,
            held: Mutex::new(held),
            away: Mutex::default(),
            mending: AtomicBool::default(),
            again: AtomicBool::default(),
        });
        lock(&self.0.links).insert(index, Arc::clone(&link));
        Ok(link)
    }

    /// Makes sure that dead connections are heard of. Before a device is made,
    /// so that none is missed.
    fn listen(&self, driver: &Driver) -> io::Result<()> {
        let mut listening = lock(&self.0.listening);
        if !*listening {
            let _ = self.0.tell.send(Event::Listening(driver.listen()?));
            *listening = true;
        }
        Ok(())
    }
}

impl Link {
    /// One attempt to give the device live connections in place of dead ones.
    fn mend(&self, links: &Links) -> Result<Mended, NbdError> {
        let node = &self.device.node;
        let missing = {
            let mut held = lock(&self.held);
            if held.closed || !is_behind(self.device.dev, &self.behind.export) {
                return Ok(Mended::Gone);
            }
            held.connections.retain(Connection::is_alive);
            self.connections - held.connections.len().min(self.connections)
        };
        if missing == 0 {
            return Ok(Mended::Already);
        }
        let driver = Driver::open().map_err(NbdError::NoDriver)?;
        links.listen(&driver).map_err(NbdError::NoDriver)?;
        let fresh = self.open(missing)?;
        let mut held = lock(&self.held);
        if held.closed {
            return Ok(Mended::Gone);
        }
        self.offer(&driver, &fresh)
            .map_err(failed(node, "give fresh connections to"))?;
        held.connections
            .extend(fresh.into_iter().filter(Connection::is_taken));
        Ok(Mended::Now)
    }

    /// Fresh connections to the export, which is what it was, or larger.
    pub(super) fn open(&self, count: usize) -> Result<Vec<Connection>, NbdError> {
        let node = &self.device.node;
        let had = sysfs::size_bytes(self.device.dev).map_err(failed(node, "read the size of"))?;
        let mut fresh = Vec::with_capacity(count);
        for _ in 0..count {
            let (connection, info) = open(&self.behind.export)?;
            let shape = Shape::of(&self.behind.export, &info, self.device.read_only)?;
            self.not_smaller(had, shape.bytes)?;
            fresh.push(connection);
        }
        Ok(fresh)
    }

    pub(super) fn not_smaller(&self, had: u64, has: u64) -> Result<(), NbdError> {
        if has >= had {
            return Ok(());
        }
        Err(NbdError::Shrunk {
            export: self.behind.export.clone(),
            node: self.device.node.clone(),
            had,
            has,
        })
    }

    pub(super) fn offer(&self, driver: &Driver, fresh: &[Connection]) -> io::Result<()> {
        let sockets: Vec<_> = fresh.iter().map(std::os::fd::AsFd::as_fd).collect();
        driver.offer(self.index, &self.behind.identifier(), &sockets)
    }

    /// What the server says of the export now.
    pub(super) fn look(&self) -> Result<Shape, NbdError> {
        let info = client::look(&self.behind.export).map_err(at(&self.behind.export))?;
        Shape::of(&self.behind.export, &info, self.device.read_only)
    }
}

/// Keeps all links, for ever. Runs on the runtime thread; what may block goes
/// to lanes.
pub async fn keep(links: Links, lanes: Lanes) {
    let Some(mut events) = lock(&links.0.events).take() else {
        return;
    };
    while let Some(event) = events.recv().await {
        match event {
            Event::Check(link) => check(&links, &link, &lanes),
            Event::Listening(listener) => {
                ring::spawn(hear(links.clone(), lanes.clone(), listener));
            }
        }
    }
}

/// Takes the kernel's announcements of dead connections.
async fn hear(links: Links, lanes: Lanes, listener: Listener) {
    let listener = Rc::new(listener);
    let mut ready = match poll::watch(Rc::clone(&listener), PollFlags::IN) {
        Ok(ready) => ready,
        Err(error) => return deaf(&links, &error),
    };
    loop {
        if let Err(error) = ready.next().await {
            return deaf(&links, &error);
        }
        loop {
            match listener.take() {
                Ok(index) => {
                    let link = lock(&links.0.links).get(&index).cloned();
                    if let Some(link) = link {
                        check(&links, &link, &lanes);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::warn!(%error, "announcements of dead NBD connections were lost: all are looked at");
                    let all: Vec<_> = lock(&links.0.links).values().cloned().collect();
                    for link in all {
                        check(&links, &link, &lanes);
                    }
                    break;
                }
            }
        }
    }
}

/// The next attach listens anew.
fn deaf(links: &Links, error: &io::Error) {
    tracing::error!(%error, "dead NBD connections are not heard of");
    *lock(&links.0.listening) = false;
}

/// Begins to mend a link, unless that is under way.
fn check(links: &Links, link: &Arc<Link>, lanes: &Lanes) {
    link.again.store(true, Relaxed);
    if !link.mending.swap(true, Relaxed) {
        ring::spawn(mend(links.clone(), Arc::clone(link), lanes.clone()));
    }
}

async fn mend(links: Links, link: Arc<Link>, lanes: Lanes) {
    let mut wait = FIRST_WAIT;
    let mut looked_twice = false;
    let node = link.device.node.display();
    loop {
        link.again.store(false, Relaxed);
        let attempt = {
            let (links, link) = (links.clone(), Arc::clone(&link));
            let export = link.behind.export.to_string();
            lanes.run(&export, "reconnect", move || link.mend(&links))
        };
        match attempt.await {
            Ok(Mended::Gone) => break,
            Ok(Mended::Already) if !looked_twice => {
                looked_twice = true;
                timer::sleep(SECOND_LOOK).await;
                continue;
            }
            Ok(done) => {
                let away = lock(&link.away).take();
                if let Some(away) = away {
                    tracing::info!(device = %node, export = %link.behind.export, seconds = away.since.elapsed().as_secs(), "the server is back");
                } else if let Mended::Now = done {
                    tracing::info!(device = %node, export = %link.behind.export, "connections renewed");
                }
                if !link.again.load(Relaxed) {
                    break;
                }
                (wait, looked_twice) = (FIRST_WAIT, false);
                continue;
            }
            Err(error) => tell_away(&link, &error),
        }
        timer::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
    // No await between the last look at `again` and here: nothing is missed.
    link.mending.store(false, Relaxed);
}

fn tell_away(link: &Link, error: &NbdError) {
    let why = chain(error);
    let mut away = lock(&link.away);
    if let Some(away) = &mut *away {
        away.why = why;
        return;
    }
    tracing::warn!(device = %link.device.node.display(), error = why, seconds = link.options.dead_seconds, "a server is away; requests wait for it, then fail");
    *away = Some(Away {
        since: Instant::now(),
        patience: Duration::from_secs(link.options.dead_seconds.into()),
        why,
    });
}
