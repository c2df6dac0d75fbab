//! One volume: its device, its daemon, and all changes to them, one after the other.
//!
//! ```text
//!  map      no device: rbd-nbd map          device without daemon: rbd-nbd attach
//!  death    attach, again and again, for as long as the device is there
//!  grow     wait for a daemon that resizes its device; else attach beside it (that sets the
//!           size) · end both · attach
//!  unmap    claim (O_EXCL) · DISCONNECT · the daemon ends by itself, or is ended
//! ```
//!
//! **One way to restart.** A device may lose its daemon by the end of the daemon, by a
//! call, or by the end of a supervisor. In each case [`ServedVolume::ensure_served`] starts
//! one, and reports and retries a failure. Meanwhile a lock keeps udevd off the device:
//! udevd would wait for the device, and every process that waits for udevd would, too.
//!
//! **Growth.** Since release 17 rbd-nbd notices that its image is resized, and resizes its
//! device. Earlier ones try, without the device's cookie, and the driver refuses. There the
//! supervisor resizes it. The driver takes a size together with the socket of an attach, and
//! only while no request is in flight. It waits for those in flight: for ever, if only the new
//! socket could serve them. So the size is changed while a daemon serves; the process
//! that changes it ends at once, since its socket is not needed. The daemon that serves
//! may not know the image's new size, and answers requests beyond the old one without an
//! error and without data, so the supervisor replaces it by a daemon of the new size.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::{
    sync::mpsc,
    time::{sleep_until, timeout},
};

use super::{
    Spec, SupervisorError,
    child::registration::Lineage,
    daemon::Daemon,
    error::failed,
    processes::DaemonProcess,
    shared::{Shared, Status, VolumeCommand},
};
use crate::kernel::nbd::NbdDevice;

mod dead_clients;
mod open;
mod registration;
mod serving;
mod start_args;
mod verbs;

use dead_clients::DeadClients;
use open::{OpenGuard, lock_out_udevd_of, open_shared};
use start_args::StartCandidates;

/// The time between two checks for a device that appears or disappears.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// The time between two attempts to restart a daemon; it doubles.
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// The longest time until a device is closed that no daemon serves.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// A volume, as its task has it.
#[derive(Debug)]
pub struct ServedVolume {
    id: String,
    shared: Arc<Shared>,
    status: Arc<Mutex<Status>>,
    /// The arguments and the key by which its daemons are started.
    candidates: StartCandidates,
    daemon: Option<Daemon>,
    dead_clients: DeadClients,
    /// Since when this node has the volume, where the controller fences.
    lineage: Lineage,
    /// A daemon that another process started.
    found: Option<DaemonProcess>,
    /// How often the daemon has logged that the image has another size than the device.
    resized: usize,
    /// Whether the image was resized, and the device does not have its size yet.
    is_behind: bool,
    /// When to restart the daemon again.
    retry: Option<Instant>,
    /// The time after the next failure.
    pause: Duration,
    trouble: Option<String>,
    /// The device, open while a daemon serves it. If the daemon were the last to close it
    /// at its exit, the close would wait for reads in flight, and these for the daemon's
    /// socket, which it closes after that.
    open_guard: Option<OpenGuard>,
    /// The lock that keeps udevd off the device while no daemon serves it, also between two
    /// attempts to start one.
    udev_lock: Option<OpenGuard>,
}

impl ServedVolume {
    /// A volume that may have a device and a daemon.
    pub fn new(
        id: &str,
        shared: Arc<Shared>,
        status: Arc<Mutex<Status>>,
        spec: Option<Spec>,
    ) -> Self {
        Self {
            id: id.to_owned(),
            shared,
            status,
            candidates: StartCandidates::of_record(spec),
            daemon: None,
            dead_clients: DeadClients::new(),
            lineage: Lineage::broken(),
            found: None,
            resized: 0,
            is_behind: false,
            retry: None,
            pause: PAUSE,
            trouble: None,
            open_guard: None,
            udev_lock: None,
        }
    }

    /// The volume as its next task has it after a panic: with its keys. It looks for the
    /// daemon, which runs on.
    pub fn after_panic(self) -> Self {
        let (candidates, dead_clients) = (self.candidates, self.dead_clients);
        Self {
            candidates,
            dead_clients,
            ..Self::new(&self.id, self.shared, self.status, None)
        }
    }

    /// Handles commands, and restarts the daemon between them, until the volume has
    /// neither.
    pub async fn live(&mut self, commands: &mut mpsc::UnboundedReceiver<VolumeCommand>) {
        self.ensure_daemon().await;
        loop {
            let device = self.device().ok().flatten();
            self.tell(device.as_ref());
            self.hold(device.as_ref());
            if device.is_none()
                && self.daemon.is_none()
                && self.retry.is_none()
                && self.shared.forget(&self.id, commands)
            {
                return;
            }
            tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => self.handle_command(command).await,
                    None => return,
                },
                () = ended(self.daemon.as_ref()) => self.daemon_ended().await,
                known = resized(self.daemon.as_ref(), self.resized) => {
                    (self.resized, self.is_behind) = (known, true);
                    self.ensure_daemon().await;
                }
                () = due(self.retry) => self.ensure_daemon().await,
            }
        }
    }

    /// Opens the device once a daemon serves it, and closes it once this or another process
    /// has disconnected it: an open device would stay.
    fn hold(&mut self, device: Option<&NbdDevice>) {
        match (device.cloned(), &self.daemon) {
            (Some(device), Some(_)) => {
                let open = || {
                    OpenGuard::begin(&self.shared.lanes, &self.id, move || {
                        open_shared(&device.block)
                    })
                };
                self.open_guard.get_or_insert_with(open);
            }
            (Some(_), None) => {}
            (None, _) => self.open_guard = None,
        }
    }

    /// Handles one command. One that has begun is finished even if its caller has gone;
    /// one whose caller has gone before is dropped.
    async fn handle_command(&mut self, command: VolumeCommand) {
        match command {
            VolumeCommand::Map(spec, key, reply) if !reply.is_closed() => {
                let mapped = self.anew(async |volume| volume.map(*spec, key).await);
                drop(reply.send(mapped.await));
            }
            VolumeCommand::Reattach(user, key, reply) if !reply.is_closed() => {
                let attached = self.anew(async |volume| volume.reattach(user, key).await);
                drop(reply.send(attached.await));
            }
            VolumeCommand::Grow(bytes, reply) if !reply.is_closed() => {
                drop(reply.send(self.grow(bytes).await));
            }
            VolumeCommand::Unmap(reply) if !reply.is_closed() => {
                drop(reply.send(self.unmap().await));
            }
            #[cfg(test)]
            VolumeCommand::Panic(reply) => panic!("as {reply:?} asks"),
            _ => {}
        }
    }

    /// The daemon has ended by itself.
    async fn daemon_ended(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            tracing::warn!(volume = self.id, pid = daemon.pid(), "rbd-nbd has ended");
            self.dead_clients.add(daemon.clients());
        }
        // Starting another may take a while.
        let device = self.device().ok().flatten();
        if device.is_some() {
            let why = "nothing serves the device, so its I/O waits: rbd-nbd has ended, and another is starting";
            self.trouble = Some(why.to_owned());
        }
        self.tell(device.as_ref());
        self.ensure_daemon().await;
    }

    /// Ensures that the device has a daemon, if there is a device.
    async fn ensure_daemon(&mut self) {
        self.retry = None;
        let looked = match self.look().await {
            Ok(()) => self.device(),
            Err(error) => Err(error),
        };
        match looked {
            // `ensure_served` reports its failure itself.
            Ok(Some(device)) => drop(self.ensure_served(&device).await),
            // Another process disconnected it, which ended the daemon.
            Ok(None) => self.mark_healthy(),
            Err(error) => self.mark_unhealthy(&error),
        }
    }

    /// Looks for a daemon that another process started, and for a disconnect by another
    /// process.
    async fn look(&mut self) -> Result<(), SupervisorError> {
        if self.daemon.is_some() {
            return Ok(());
        }
        self.reopen().await;
        let found = Daemon::find(&self.shared.lanes, &self.id).await;
        let found = found.map_err(failed("look for processes of", &self.id))?;
        if let Some((daemon, server)) = found {
            tracing::info!(
                volume = self.id,
                pid = daemon.pid(),
                image = server.image,
                "rbd-nbd is running"
            );
            self.daemon = Some(daemon);
            self.found = Some(server);
            (self.resized, self.is_behind) = (0, false);
        }
        Ok(())
    }

    /// Closes the device for a moment, if it is locked: while it is open, the kernel shows
    /// it even if another process has disconnected it.
    async fn reopen(&mut self) {
        let Ok(Some(NbdDevice { block, .. })) = self.device() else {
            return;
        };
        if self.udev_lock.as_mut().and_then(OpenGuard::file).is_none() {
            return;
        }
        let guards = [self.udev_lock.take(), self.open_guard.take()];
        let files = guards.map(|guard| guard.and_then(OpenGuard::into_file));
        let (device, cookie) = (block.clone(), self.id.clone());
        let mut lock = OpenGuard::begin(&self.shared.lanes, &self.id, move || {
            drop(files);
            lock_out_udevd_of(&device, &cookie)
        });
        // The close takes longer if it writes what programs have written: a daemon has to
        // serve that.
        let locked = timeout(CLOSED_WITHIN, lock.is_open(&block)).await;
        self.udev_lock = (!matches!(locked, Ok(Err(_)))).then_some(lock);
    }

    fn device(&self) -> Result<Option<NbdDevice>, SupervisorError> {
        NbdDevice::attached_as(&self.id).map_err(failed("find the device of", &self.id))
    }

    fn image(&self) -> String {
        let spec = self.candidates.spec();
        spec.map_or_else(|| self.id.clone(), |spec| spec.image.to_string())
    }

    fn tell(&self, device: Option<&NbdDevice>) {
        let has_key = self.candidates.newest().is_some();
        let doubt = (!has_key && self.daemon.is_some()).then_some(
            "uring-csi-holder has restarted and has no key: if rbd-nbd ends, nothing restarts it before the next stage or uringctl reattach brings the key",
        );
        let image = self.candidates.spec().map(Spec::name);
        let status = Status {
            image: image.or_else(|| Some(self.found.clone()?.image)),
            node: device.map(|device| device.block.node.display().to_string()),
            pid: self.daemon.as_ref().map(Daemon::pid),
            has_key,
            trouble: self.trouble.clone().or(doubt.map(str::to_owned)),
        };
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }
}

async fn ended(daemon: Option<&Daemon>) {
    match daemon {
        Some(daemon) => daemon.ended().await,
        None => std::future::pending().await,
    }
}

async fn resized(daemon: Option<&Daemon>, known: usize) -> usize {
    match daemon {
        Some(daemon) => daemon.resized(known).await,
        None => std::future::pending().await,
    }
}

async fn due(retry: Option<Instant>) {
    match retry {
        Some(at) => sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
