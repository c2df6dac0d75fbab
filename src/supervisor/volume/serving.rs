//! Starting, ending and replacing a volume's daemon.

use std::time::{Duration, Instant};

use rustix::process::Pid;
use tokio::time::{sleep, timeout};

use super::{
    LONGEST_PAUSE, LOOK_EVERY, OpenGuard, PAUSE, ServedVolume, open::lock_out_udevd,
    start_args::StartArgs,
};
use crate::{
    crash_point,
    kernel::{nbd::NbdDevice, sysfs},
    observe::metrics,
    supervisor::{
        Spec, SupervisorError,
        child::dead_clients,
        daemon::{Daemon, EndOutcome, StartOutcome},
        error::failed,
        spec::Verb,
    },
};

/// The deadline until a daemon serves. It looks for monitors half as long.
const START_WITHIN: Duration = Duration::from_secs(60);
/// The milliseconds after which the kernel looks at a request that is not answered, and the
/// longest time to set them. It looks within another second.
const REQUEST_TIMEOUT: u64 = 500;
const SET_WITHIN: Duration = Duration::from_secs(2);
/// The deadline until a daemon that was found serves or ends.
const SETTLE_WITHIN: Duration = Duration::from_secs(20);

impl ServedVolume {
    /// Ensures that the device has a daemon, whose output this supervisor reads as far as
    /// it has a key, and its image's size.
    pub(super) async fn ensure_served(
        &mut self,
        device: &NbdDevice,
    ) -> Result<(), SupervisorError> {
        let served = match &self.daemon {
            None => self.attach(device, "ended").await,
            Some(daemon) if daemon.is_unheard() => match self.candidates.newest() {
                Some(_) => self.adopt(device).await,
                None => Ok(()),
            },
            Some(daemon) if !daemon.serves() => {
                Err(self.stuck(daemon, "neither serves the device nor ends"))
            }
            Some(_) if self.is_behind => self.take_size(device).await,
            Some(_) => Ok(()),
        };
        self.report(served)
    }

    /// Ends the daemon and starts another in its place.
    pub(super) async fn replace(&mut self, device: &NbdDevice) -> Result<(), SupervisorError> {
        let replaced = match self.end_under_udev_lock(device).await {
            Ok(()) => self.attach(device, "grown").await,
            Err(error) => Err(error),
        };
        self.report(replaced)
    }

    fn report(&mut self, outcome: Result<(), SupervisorError>) -> Result<(), SupervisorError> {
        match &outcome {
            Ok(()) => self.mark_healthy(),
            Err(error) => self.mark_unhealthy(error),
        }
        outcome
    }

    /// Whether a daemon serves the device, or there is no device.
    pub(super) fn mark_healthy(&mut self) {
        if self.trouble.take().is_some() {
            tracing::info!(volume = self.id, "volume recovered");
        }
        (self.retry, self.pause, self.udev_lock) = (None, PAUSE, None);
    }

    pub(super) fn mark_unhealthy(&mut self, error: &SupervisorError) {
        let what = if self.daemon.is_none() {
            "no rbd-nbd serves the device, so its I/O waits"
        } else {
            "rbd-nbd runs, but the volume is unhealthy"
        };
        let text = crate::error_chain(error);
        tracing::error!(volume = self.id, error = text, what);
        self.trouble = Some(format!("{what}: {text}"));
        if matches!(error, SupervisorError::NoKey(_)) {
            // Nothing changes before a call brings a key.
            return;
        }
        let serves = |daemon: &Daemon| daemon.serves() || daemon.is_unheard();
        if self.daemon.as_ref().is_some_and(serves) {
            // Else udevd would wait for the device.
            self.udev_lock = None;
        }
        self.retry = Some(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }

    /// Starts a daemon for a device that has none, for the `reason` in the metrics.
    async fn attach(
        &mut self,
        device: &NbdDevice,
        reason: &'static str,
    ) -> Result<(), SupervisorError> {
        self.take_udev_lock(device);
        let node = device.block.node.to_string_lossy();
        let started = self.start(&Verb::Attach(&node)).await;
        metrics::daemon_restart(reason, started.is_ok());
        started
    }

    /// Replaces a daemon that an earlier supervisor started and whose log this one cannot
    /// read: it would miss that the image was resized. The first step proves the key
    /// while the old daemon serves.
    async fn adopt(&mut self, device: &NbdDevice) -> Result<(), SupervisorError> {
        self.take_size(device).await?;
        self.end_under_udev_lock(device).await?;
        self.attach(device, "adopted").await
    }

    /// Locks the device against udevd, as soon as it is open.
    fn take_udev_lock(&mut self, device: &NbdDevice) -> &mut OpenGuard {
        let Self {
            open_guard,
            udev_lock,
            ..
        } = self;
        udev_lock.get_or_insert_with(|| {
            let open = open_guard.as_mut().and_then(OpenGuard::file);
            if open.is_none() {
                // It may still be opening, and would be in the way.
                *open_guard = None;
            }
            let device = device.block.clone();
            OpenGuard::begin(&self.shared.lanes, &self.id, move || {
                lock_out_udevd(&device, open)
            })
        })
    }

    /// Starts the volume's daemon: by the newest arguments, else by those that worked.
    pub(super) async fn start(&mut self, verb: &Verb<'_>) -> Result<(), SupervisorError> {
        let args = self.args()?;
        let Err(error) = self.start_by(args, verb).await else {
            return Ok(());
        };
        match self.candidates.after_failure(&error) {
            Some(other) if self.daemon.is_none() => {
                let error = crate::error_chain(&error);
                tracing::warn!(
                    volume = self.id,
                    error,
                    "starting rbd-nbd by the arguments that worked before"
                );
                self.start_by(other, verb).await
            }
            _ => Err(error),
        }
    }

    async fn start_by(&mut self, args: StartArgs, verb: &Verb<'_>) -> Result<(), SupervisorError> {
        self.blocklist_dead_clients(&args);
        self.begins(&args).await?;
        let started = self.start_registered(&args, verb).await;
        if started.is_err() && self.daemon.is_none() {
            self.has_ended(&args).await;
        }
        started
    }

    async fn start_registered(
        &mut self,
        args: &StartArgs,
        verb: &Verb<'_>,
    ) -> Result<(), SupervisorError> {
        let mut daemon = self.begin(args, verb, None)?;
        match daemon.ready(&args.spec, START_WITHIN).await {
            StartOutcome::Ready => {
                crash_point();
                let registered = self.serves(args, &daemon).await;
                self.daemon = Some(daemon);
                if let Err(error) = registered {
                    return Err(self.kill(verb, error).await);
                }
                self.shorten_request_timeout(args).await;
                // The attach has given the device the image's size.
                (self.resized, self.is_behind) = (0, false);
                self.dead_clients.forget();
                self.worked(args.clone());
                Ok(())
            }
            StartOutcome::Ended(error) => Err(error),
            StartOutcome::Late => {
                let stuck = self.stuck(&daemon, "did not begin to serve in time");
                // If it does not end, it may still come to serve, so no other may start.
                self.daemon = Some(daemon);
                drop(self.end().await);
                Err(stuck)
            }
        }
    }

    /// Blocklists the clients of dead daemons, while the next one starts. If that fails, the
    /// image's lock stays with them until the cluster notices that they are dead.
    fn blocklist_dead_clients(&mut self, args: &StartArgs) {
        let all = &self.shared.blocklist_rounds;
        let Some(round) = self.dead_clients.round(all, Instant::now()) else {
            return;
        };
        let (args, volume) = (args.clone(), self.id.clone());
        // The lane logs the outcome; nothing waits for it.
        drop(self.shared.lanes.run(&self.id, "blocklist", move || {
            match dead_clients::blocklist(&args.spec, &args.key, round.ids.clone()) {
                Ok(true) => tracing::info!(
                    volume,
                    "blocklisted the client of the rbd-nbd that has ended, so that the next one gets the image's lock"
                ),
                Ok(false) => {}
                Err(error) => tracing::warn!(
                    volume,
                    error = crate::error_chain(&error),
                    "cannot blocklist the client of the rbd-nbd that has ended: if it had the image's lock, I/O waits for 30 seconds"
                ),
            }
            drop(round);
        }));
    }

    /// Ends a daemon that must not serve, for the reason `why`, before it writes more. If
    /// the daemon has just made the device, which has no data yet, the device is
    /// disconnected first. Returns the error to report: that of the undo if it failed, else
    /// `why`.
    async fn kill(&mut self, verb: &Verb<'_>, why: SupervisorError) -> SupervisorError {
        let undone = match verb {
            Verb::Map(_) => self.undo().await,
            Verb::Attach(_) => Ok(()),
        };
        if let Some(daemon) = &self.daemon {
            if !daemon.kill().await {
                return self.stuck(daemon, "does not end, not even when it is killed");
            }
            self.dead_clients.add(daemon.clients());
            self.daemon = None;
        }
        undone.err().unwrap_or(why)
    }

    /// Has the kernel look soon at requests that are not answered, unless the volume says
    /// when. Those that a daemon took with it when it died are sent to its successor only
    /// when the kernel looks at them; by itself it does so after 30 seconds. Each attach sets
    /// that time again.
    async fn shorten_request_timeout(&self, args: &StartArgs) {
        if args.spec.options.has_io_timeout() {
            return;
        }
        let Ok(Some(device)) = self.device() else {
            return;
        };
        let volume = self.id.clone();
        let set = self.shared.lanes.run(&self.id, "request timeout", move || {
            if let Err(error) = sysfs::set_request_timeout(device.block.dev, REQUEST_TIMEOUT) {
                tracing::warn!(
                    volume,
                    %error,
                    "cannot set the device's io_timeout: if rbd-nbd dies under I/O, that waits for 30 seconds"
                );
            }
        });
        // After the death of a daemon the kernel waits for the requests in flight.
        let _ = timeout(SET_WITHIN, set).await;
    }

    fn args(&self) -> Result<StartArgs, SupervisorError> {
        let args = self.candidates.newest().cloned();
        args.ok_or_else(|| SupervisorError::NoKey(self.id.clone()))
    }

    fn worked(&mut self, args: StartArgs) {
        if let Err(error) = self.record(&args.spec) {
            let error = crate::error_chain(&error);
            tracing::error!(
                volume = self.id,
                error,
                "cannot record the volume for the next supervisor"
            );
        }
        self.candidates.mark_proven(args);
    }

    /// Records it for the next supervisor.
    pub(super) fn record(&mut self, spec: &Spec) -> Result<(), SupervisorError> {
        if self.candidates.recorded.as_ref() != Some(spec) {
            let kept = self.shared.records.keep(spec);
            kept.map_err(failed("keep a record of", &self.id))?;
            self.candidates.recorded = Some(spec.clone());
        }
        Ok(())
    }

    fn begin(
        &self,
        args: &StartArgs,
        verb: &Verb<'_>,
        unseen: Option<Pid>,
    ) -> Result<Daemon, SupervisorError> {
        let program = &self.shared.program;
        Daemon::start(program, &args.spec, verb, &args.key, unseen)
    }

    fn stuck(&self, daemon: &Daemon, how: &'static str) -> SupervisorError {
        SupervisorError::Stuck {
            image: self.image(),
            pid: daemon.pid(),
            how,
        }
    }

    /// Gives the device its image's size, while its daemon serves.
    ///
    /// rbd-nbd refuses to attach while it sees another process that serves the device. That
    /// refusal protects the data elsewhere; here the supervisor hides the other process.
    pub(super) async fn take_size(&mut self, device: &NbdDevice) -> Result<(), SupervisorError> {
        let args = self.args()?;
        let Err(error) = self.take_size_by(args, device).await else {
            return Ok(());
        };
        match self.candidates.after_failure(&error) {
            Some(other) => self.take_size_by(other, device).await,
            None => Err(error),
        }
    }

    async fn take_size_by(
        &mut self,
        args: StartArgs,
        device: &NbdDevice,
    ) -> Result<(), SupervisorError> {
        let node = device.block.node.to_string_lossy();
        let unseen = self
            .daemon
            .as_ref()
            .map(Daemon::pid)
            .and_then(Pid::from_raw);
        self.is_published(&args).await?;
        let mut beside = self.begin(&args, &Verb::Attach(&node), unseen)?;
        let started = beside.ready(&args.spec, START_WITHIN).await;
        let ended = beside.end().await != EndOutcome::RunsOn;
        match started {
            StartOutcome::Ready if ended => {
                self.is_behind = false;
                self.shorten_request_timeout(&args).await;
                self.worked(args.clone());
                Ok(())
            }
            StartOutcome::Ended(error) => Err(error),
            _ => Err(self.stuck(&beside, "did not give the device its size")),
        }
    }

    /// Ends the daemon, so that another can take its place. A daemon that ends while udevd
    /// reads the device cannot close it, and so not end.
    async fn end_under_udev_lock(&mut self, device: &NbdDevice) -> Result<(), SupervisorError> {
        self.take_udev_lock(device).is_open(&device.block).await?;
        self.end().await
    }

    pub(super) async fn end(&mut self) -> Result<(), SupervisorError> {
        if let Some(daemon) = &self.daemon {
            match daemon.end().await {
                EndOutcome::Asked => {}
                EndOutcome::Killed => self.dead_clients.add(daemon.clients()),
                EndOutcome::RunsOn => {
                    return Err(self.stuck(daemon, "does not end, not even when it is killed"));
                }
            }
            self.daemon = None;
        }
        Ok(())
    }

    /// Waits for the end of a daemon that has no device, or for its device.
    pub(super) async fn await_daemon(&mut self) -> Result<(), SupervisorError> {
        let Some(daemon) = &self.daemon else {
            return Ok(());
        };
        let device = async {
            while !matches!(self.device(), Ok(Some(_))) {
                sleep(LOOK_EVERY).await;
            }
        };
        tokio::select! {
            () = daemon.ended() => self.daemon = None,
            () = device => {}
            () = sleep(SETTLE_WITHIN) => {
                return Err(self.stuck(daemon, "neither serves a device nor ends"));
            }
        }
        Ok(())
    }
}
