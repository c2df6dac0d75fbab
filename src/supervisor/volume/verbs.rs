//! The commands of a volume: map, reattach, grow, unmap.

use std::{
    pin::pin,
    time::{Duration, Instant},
};

use tokio::time::{sleep, timeout};

use super::{
    LOOK_EVERY, OpenGuard, ServedVolume, due, ended,
    open::{claim, disconnect},
    start_args::StartArgs,
};
use crate::{
    Done,
    kernel::nbd::{Claimed, NbdDevice, ReservedIndex},
    secret::Secret,
    supervisor::{Spec, SupervisorError, daemon::Daemon, error::failed, spec::Verb},
};

/// The longest time to choose a device, again if another process takes it meanwhile.
const CHOOSE_WITHIN: Duration = Duration::from_secs(20);
/// The report of a flush that takes long.
const UNWRITTEN: &str = "the device is not disconnected before its data is written";
/// When a flush or a disconnect is reported that has not ended.
const LATE_AFTER: Duration = Duration::from_millis(if cfg!(test) { 300 } else { 10_000 });
/// How long a daemon that resizes its device itself may take to do so, before another is
/// started for it.
const FOLLOWS_WITHIN: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 1 });
/// The longest time until a device is detached after its daemon.
const GONE_WITHIN: Duration = Duration::from_secs(20);

impl ServedVolume {
    /// Maps the image, or finds it mapped, with a daemon afterwards.
    pub(super) async fn map(
        &mut self,
        spec: Spec,
        key: Secret,
    ) -> Result<(NbdDevice, Done), SupervisorError> {
        spec.check()?;
        self.look().await?;
        let mut device = self.device()?;
        if device.is_none() {
            // A supervisor that was killed was starting or ending it.
            self.await_daemon().await?;
            device = self.device()?;
        }
        match device {
            Some(device) => Ok((self.serve(device, spec, key).await?, Done::Already)),
            None => Ok((self.make(spec, key).await?, Done::Now)),
        }
    }

    async fn make(&mut self, spec: Spec, key: Secret) -> Result<NbdDevice, SupervisorError> {
        // First, so that a daemon is never without a record.
        self.record(&spec)?;
        // Their ids are of the former device's cluster.
        self.dead_clients.forget();
        self.candidates.forget_keys();
        self.candidates.receive(StartArgs { spec, key });
        let deadline = Instant::now() + CHOOSE_WITHIN;
        let mut chosen = Vec::new();
        loop {
            let choice = self
                .shared
                .lanes
                .run(&self.id, "choose", ReservedIndex::without_zeroes);
            let choice = timeout(CHOOSE_WITHIN, choice).await;
            let choice = choice.unwrap_or_else(|late| Err(late.into()));
            let choice = choice.map_err(failed("choose a device for", &self.id))?;
            let node = format!("/dev/nbd{}", choice.get());
            chosen.push(choice);
            match self.start(&Verb::Map(&node)).await {
                Err(SupervisorError::Taken { .. }) if Instant::now() < deadline => {}
                started => break started?,
            }
            sleep(LOOK_EVERY).await;
        }
        self.mark_healthy();
        let device = self.device()?;
        device.ok_or_else(|| SupervisorError::Failed {
            image: self.image(),
            message: "it logged that it serves a device, but the kernel has none for this volume"
                .to_owned(),
        })
    }

    /// Makes sure that the device has this image and a daemon. One that has a daemon
    /// already is success, even without a key.
    async fn serve(
        &mut self,
        device: NbdDevice,
        spec: Spec,
        key: Secret,
    ) -> Result<NbdDevice, SupervisorError> {
        let otherwise = |how: String| SupervisorError::Otherwise {
            volume_id: self.id.clone(),
            node: device.block.node.display().to_string(),
            how,
        };
        let known = self
            .candidates
            .spec()
            .map(Spec::name)
            .or_else(|| Some(self.found.clone()?.image));
        if let Some(image) = known.filter(|image| *image != spec.name()) {
            return Err(otherwise(format!(
                "over image {image}, not {}",
                spec.name()
            )));
        }
        if let Some(known) = self
            .candidates
            .spec()
            .filter(|known| known.is_of_another_cluster_than(&spec))
        {
            return Err(SupervisorError::Elsewhere {
                volume_id: self.id.clone(),
                node: device.block.node.display().to_string(),
                known: known.image.cluster_id.clone(),
                given: spec.image.cluster_id,
            });
        }
        // A raw volume that is published read-only is marked so (BLKROSET), however it is mapped.
        let recorded = self.candidates.recorded.as_ref().map(|spec| spec.read_only);
        let found = self.found.as_ref().map(|server| server.read_only);
        let is_read_only = recorded.or(found).unwrap_or(device.read_only);
        if is_read_only != spec.read_only {
            let how = if is_read_only {
                "read-only"
            } else {
                "writable"
            };
            return Err(otherwise(how.to_owned()));
        }
        // Of the arguments that worked, only whether nodes are fenced may have changed.
        let mut known = self.candidates.recorded.clone().unwrap_or(spec.clone());
        known.fencing.clone_from(&spec.fencing);
        self.record(&known)?;
        self.candidates.receive(StartArgs { spec, key });
        match self.ensure_served(&device).await {
            Err(error) if self.daemon.is_none() => Err(error),
            served => self.ensure_registered(served).await.map(|()| device),
        }
    }

    /// Takes the key of a mapped volume, and restarts its daemon.
    pub(super) async fn reattach(
        &mut self,
        user: Option<String>,
        key: Secret,
    ) -> Result<NbdDevice, SupervisorError> {
        self.look().await?;
        let (Some(device), Some(mut spec)) = (self.device()?, self.candidates.spec().cloned())
        else {
            return Err(SupervisorError::Unknown(self.id.clone()));
        };
        if let Some(user) = user {
            spec.user = user;
            spec.check()?;
        }
        self.serve(device, spec, key).await
    }

    /// Grows the device to its image's size, if it has fewer bytes.
    pub(super) async fn grow(&mut self, bytes: u64) -> Result<u64, SupervisorError> {
        let device = self.device()?;
        let device = device.ok_or_else(|| SupervisorError::Unknown(self.id.clone()))?;
        let size = |volume: &Self| match volume.device()? {
            Some(device) => {
                let failed = failed("read the size of", device.block.node.display());
                device.size_bytes().map_err(failed)
            }
            None => Ok(0),
        };
        let had = size(self)?;
        if had >= bytes {
            return Ok(had);
        }
        self.ensure_served(&device).await?;
        if self.daemon.as_ref().is_some_and(Daemon::resizes_its_device) {
            let follows = async {
                while size(self)? < bytes {
                    sleep(LOOK_EVERY).await;
                }
                Ok::<_, SupervisorError>(())
            };
            if let Ok(followed) = timeout(FOLLOWS_WITHIN, follows).await {
                followed?;
            }
        }
        if size(self)? < bytes {
            self.take_size(&device).await?;
            self.replace(&device).await?;
        }
        let now = size(self)?;
        if now < bytes {
            return Err(SupervisorError::Small {
                image: self.image(),
                node: device.block.node,
                bytes: now,
                wanted: bytes,
            });
        }
        Ok(now)
    }

    /// Unmaps it.
    pub(super) async fn unmap(&mut self) -> Result<Done, SupervisorError> {
        self.look().await?;
        let device = self.device()?;
        let claimed = match &device {
            Some(device) => self.claim(device).await?,
            None => None,
        };
        self.take_down(device, claimed).await
    }

    /// Unmaps it where it has no data yet. So this waits for no daemon, and starts none.
    pub(super) async fn undo(&mut self) -> Result<(), SupervisorError> {
        let device = self.device()?;
        let claimed = match &device {
            Some(device) => self.on_lane(device, false).await?,
            None => None,
        };
        self.take_down(device, claimed).await.map(drop)
    }

    async fn take_down(
        &mut self,
        device: Option<NbdDevice>,
        claimed: Option<Claimed>,
    ) -> Result<Done, SupervisorError> {
        let done = match device {
            None => Done::Already,
            Some(device) => {
                if let Some(claimed) = claimed {
                    self.disconnect(&device, claimed).await?;
                }
                Done::Now
            }
        };
        // An open device would stay.
        self.open_guard = None;
        self.mark_healthy();
        if let Some(daemon) = &self.daemon
            && daemon.is_ending().await
        {
            self.daemon = None;
        }
        // A supervisor that was killed may have started another daemon beside it.
        loop {
            self.end().await?;
            self.look().await?;
            if self.daemon.is_none() {
                break;
            }
        }
        let detached = async {
            while self.device()?.is_some() {
                sleep(LOOK_EVERY).await;
            }
            Ok::<_, SupervisorError>(())
        };
        if let Ok(detached) = timeout(GONE_WITHIN, detached).await {
            detached?;
        } else {
            // Another opener, such as udevd, keeps it a moment longer.
            tracing::warn!(
                volume = self.id,
                "the kernel has not removed the device yet: another process has it open"
            );
        }
        self.candidates.forget_keys();
        Ok(done)
    }

    /// Claims the device, and has its data written. That waits for the daemon, and for the
    /// cluster behind it, so a daemon that ends meanwhile is replaced.
    async fn claim(&mut self, device: &NbdDevice) -> Result<Option<Claimed>, SupervisorError> {
        let mut claimed = pin!(self.on_lane(device, self.daemon.is_some()));
        let mut late = pin!(sleep(LATE_AFTER));
        let mut is_late = false;
        let claimed = loop {
            tokio::select! {
                biased;
                claimed = &mut claimed => break claimed,
                () = ended(self.daemon.as_ref()) => self.daemon_ended().await,
                () = due(self.retry), if is_late => self.ensure_daemon().await,
                () = &mut late, if !is_late => is_late = true,
            }
            if is_late && self.trouble.is_none() {
                self.trouble = Some(UNWRITTEN.to_owned());
            }
            self.tell(Some(device));
        };
        self.trouble = self.trouble.take().filter(|why| why != UNWRITTEN);
        claimed
    }

    /// [`claim`], on a lane.
    fn on_lane(
        &self,
        device: &NbdDevice,
        flush: bool,
    ) -> impl Future<Output = Result<Option<Claimed>, SupervisorError>> + Send + use<> {
        let (block, cookie) = (device.block.clone(), self.id.clone());
        let claim = move || claim(&block, &cookie, flush);
        self.shared.lanes.run(&self.id, "flush", claim)
    }

    async fn disconnect(
        &mut self,
        device: &NbdDevice,
        claimed: Claimed,
    ) -> Result<(), SupervisorError> {
        let block = device.block.clone();
        let is_served = self.daemon.is_some();
        let opened = self.open_guard.as_mut().and_then(OpenGuard::file);
        let lanes = &self.shared.lanes;
        let mut down = pin!(lanes.run(&self.id, "disconnect", move || {
            disconnect(claimed, &block, is_served, opened.as_deref())
        }));
        if let Ok(ended) = timeout(LATE_AFTER, &mut down).await {
            return ended;
        }
        let why = "the kernel has not disconnected the device yet".to_owned();
        let before = self.trouble.replace(why);
        self.tell(Some(device));
        // No other command may begin meanwhile, and no daemon: it would lose the device when
        // this ends.
        let ended = down.await;
        self.trouble = before;
        ended
    }
}
