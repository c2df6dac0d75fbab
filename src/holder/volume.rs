//! One volume: its device, its daemon, and whatever is done with them, one thing
//! after the other.
//!
//! ```text
//!  map      no device: rbd-nbd map          device without daemon: rbd-nbd attach
//!  death    attach, again and again, for as long as the device is there
//!  grow     attach beside the daemon (that sets the size) · end both · attach
//!  unmap    claim (O_EXCL) · DISCONNECT · the daemon ends by itself, or is ended
//! ```
//!
//! **Growth.** The driver is told a size with the socket of whoever attaches, and
//! it takes one only while nothing is under way, so it waits for what is under way:
//! for ever, where only the new socket could serve that. So a size is changed
//! while a daemon serves; the one that changes it ends at once, for its socket was
//! not needed. The daemon that serves may not have heard yet how large its image
//! is, and answers what lies beyond without an error and without data; one that
//! begins now knows.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::{
    sync::{mpsc, oneshot},
    time::sleep_until,
};

use super::{HolderError, Spec, daemon::Daemon, devices::Device, error::failed, keeper::Shared};
use crate::{Done, secret::Secret};

mod serving;
mod verbs;

/// How often a device that comes or goes is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// The time between two tries to bring a daemon back; it doubles.
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// What a volume is asked to do.
#[derive(Debug)]
pub enum Command {
    /// [`Volume::map`].
    Map(Box<Spec>, Secret, Reply<(Device, Done)>),
    /// [`Volume::reattach`].
    Reattach(Option<String>, Secret, Reply<Device>),
    /// [`Volume::grow`].
    Grow(u64, Reply<u64>),
    /// [`Volume::unmap`].
    Unmap(Reply<Done>),
}

/// Who waits for the answer, if anybody does.
pub type Reply<T> = oneshot::Sender<Result<T, HolderError>>;

/// What is told of a volume at any time.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// The image, where it is known.
    pub image: Option<String>,
    /// The device's node.
    pub node: Option<String>,
    /// The daemon's process id.
    pub pid: Option<i32>,
    /// The key is there.
    pub has_key: bool,
    /// What is wrong.
    pub trouble: Option<String>,
}

/// A volume, in the hands of its task.
#[derive(Debug)]
pub struct Volume {
    id: String,
    shared: Arc<Shared>,
    status: Arc<Mutex<Status>>,
    spec: Option<Spec>,
    key: Option<Secret>,
    daemon: Option<Daemon>,
    /// The image by the command line of a daemon that others began.
    found: Option<String>,
    /// How often the daemon has complained of the image's size.
    resized: usize,
    /// When a daemon is to be tried again, and how long after that.
    retry: Option<(Instant, Duration)>,
    trouble: Option<String>,
}

impl Volume {
    /// A volume of which there may be a device and a daemon.
    pub fn new(
        id: &str,
        shared: Arc<Shared>,
        status: Arc<Mutex<Status>>,
        spec: Option<Spec>,
    ) -> Self {
        let mut volume = Self {
            id: id.to_owned(),
            shared,
            status,
            spec,
            key: None,
            daemon: None,
            found: None,
            resized: 0,
            retry: None,
            trouble: None,
        };
        volume.look();
        volume.tell(None);
        volume
    }

    /// Serves commands, and sees to the daemon between them, until there is
    /// nothing left of the volume.
    pub async fn live(mut self, mut commands: mpsc::UnboundedReceiver<Command>) {
        loop {
            tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => self.obey(command).await,
                    None => return,
                },
                () = ended(self.daemon.as_ref()) => self.lost().await,
                known = resized(self.daemon.as_ref(), self.resized) => {
                    self.resized = known;
                    self.follow().await;
                }
                () = due(self.retry) => self.retry().await,
            }
            let device = self.device().ok().flatten();
            self.tell(device.as_ref());
            if device.is_none() && self.daemon.is_none() && self.shared.forget(&self.id, &commands)
            {
                return;
            }
        }
    }

    async fn obey(&mut self, command: Command) {
        // Whoever asked may have gone; what was done stays done.
        match command {
            Command::Map(spec, key, reply) => drop(reply.send(self.map(*spec, key).await)),
            Command::Reattach(user, key, reply) => drop(reply.send(self.reattach(user, key).await)),
            Command::Grow(bytes, reply) => drop(reply.send(self.grow(bytes).await)),
            Command::Unmap(reply) => drop(reply.send(self.unmap().await)),
        }
    }

    /// The daemon has ended by itself.
    async fn lost(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            tracing::warn!(volume = self.id, pid = daemon.pid(), "rbd-nbd has ended");
        }
        self.retry = Some((Instant::now(), PAUSE));
        self.retry().await;
    }

    /// Tries to bring the daemon back.
    async fn retry(&mut self) {
        let Some((_, pause)) = self.retry.take() else {
            return;
        };
        self.look();
        let error = match self.device() {
            Err(error) => error,
            // Somebody took the device down, which ended the daemon.
            Ok(None) => return,
            Ok(Some(_)) if self.daemon.is_some() => return,
            Ok(Some(device)) => match self.attach(&device).await {
                Ok(()) => {
                    tracing::info!(volume = self.id, node = %device.node.display(), "served again");
                    return;
                }
                Err(error) => error,
            },
        };
        let error = crate::chain(&error);
        tracing::error!(volume = self.id, error, "nothing serves the device");
        self.trouble = Some(format!(
            "nothing serves the device, so its I/O waits: {error}"
        ));
        // Nothing changes before somebody brings a key.
        if self.key.is_some() {
            self.retry = Some((Instant::now() + pause, (pause * 2).min(LONGEST_PAUSE)));
        }
    }

    /// The image has another size; the daemon knows.
    async fn follow(&mut self) {
        let followed = match self.device() {
            Ok(Some(device)) => self.take_size(&device).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = followed {
            tracing::error!(
                volume = self.id,
                error = crate::chain(&error),
                "the device did not follow its image's size"
            );
        }
    }

    /// Looks for a daemon that others began.
    fn look(&mut self) {
        if self.daemon.is_some() {
            return;
        }
        match Daemon::find(&self.id) {
            Ok(Some((daemon, server))) => {
                tracing::info!(
                    volume = self.id,
                    pid = daemon.pid(),
                    image = server.image,
                    "rbd-nbd is running"
                );
                self.daemon = Some(daemon);
                self.found = Some(server.image);
                self.resized = 0;
            }
            Ok(None) => {}
            Err(error) => tracing::error!(%error, "cannot look for processes"),
        }
    }

    fn keep(&mut self, spec: Spec, key: Secret) -> Result<(), HolderError> {
        let records = &self.shared.records;
        if self.spec.as_ref() != Some(&spec) {
            records
                .keep(&spec)
                .map_err(failed("keep a record of", &self.id))?;
        }
        self.spec = Some(spec);
        self.key = Some(key);
        Ok(())
    }

    fn device(&self) -> Result<Option<Device>, HolderError> {
        Device::of(&self.id).map_err(failed("find the device of", &self.id))
    }

    fn image(&self) -> String {
        self.spec
            .as_ref()
            .map_or_else(|| self.id.clone(), |spec| spec.image.to_string())
    }

    fn tell(&self, device: Option<&Device>) {
        let doubt = match (&self.key, &self.daemon) {
            (None, Some(_)) => Some(
                "the holder was started anew and has no key: if rbd-nbd ends it cannot be brought back before the next stage or uringctl reattach brings the key",
            ),
            (None, None) => Some(
                "nothing serves the device, so its I/O waits, and the holder has no key: stage the volume again, or use uringctl reattach",
            ),
            _ => None,
        };
        let status = Status {
            image: self.spec.as_ref().map(Spec::name).or(self.found.clone()),
            node: device.map(|device| device.node.display().to_string()),
            pid: self.daemon.as_ref().map(Daemon::pid),
            has_key: self.key.is_some(),
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

async fn due(retry: Option<(Instant, Duration)>) {
    match retry {
        Some((at, _)) => sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
