//! Registers the Ceph client that serves the volume, for a controller that fences
//! ([`crate::supervisor::child::registration`]). Without one, nothing here runs.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::{ServedVolume, start_args::StartArgs};
use crate::supervisor::{
    SupervisorError,
    child::registration::{self, Lineage, RegistrationStep},
    daemon::Daemon,
    processes::process,
};

/// Between two looks for a daemon among the image's watchers.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// How long it may take to be there; when it serves, it is. With the start before, the
/// last look, and a kill, that is less than
/// [`STARTS_WITHIN`](crate::ceph::fencing::STARTS_WITHIN).
const THERE_WITHIN: Duration = Duration::from_secs(5);

impl ServedVolume {
    /// Runs a command of a stage or an operator under a new lineage: the volume is published
    /// to this node now, and earlier registrations do not matter.
    pub(super) async fn anew<T>(
        &mut self,
        what: impl AsyncFnOnce(&mut Self) -> Result<T, SupervisorError>,
    ) -> Result<T, SupervisorError> {
        let before = std::mem::replace(&mut self.lineage, Lineage::new());
        let done = what(self).await;
        if self.lineage.is_new {
            // It may be registered all the same.
            let or = Some(self.lineage.since);
            self.lineage = Lineage { or, ..before };
        }
        done
    }

    /// Registers that a daemon is starting, if the volume is published to this node.
    pub(super) async fn begins(&mut self, args: &StartArgs) -> Result<(), SupervisorError> {
        self.register(args, RegistrationStep::Begins)
            .await
            .map(drop)
    }

    /// Checks that the volume is published to this node.
    pub(super) async fn is_published(&mut self, args: &StartArgs) -> Result<(), SupervisorError> {
        self.register(args, RegistrationStep::Looks).await.map(drop)
    }

    /// Registers that the daemon has ended. If that fails, an unpublish waits longer than
    /// it needs to.
    pub(super) async fn has_ended(&mut self, args: &StartArgs) {
        if let Err(error) = self.register(args, RegistrationStep::Ended).await {
            let error = crate::error_chain(&error);
            tracing::debug!(
                volume = self.id,
                error,
                "cannot register that the daemon ended: it stays registered as starting"
            );
        }
    }

    /// Registers the client of the daemon, which serves.
    pub(super) async fn serves(
        &mut self,
        args: &StartArgs,
        daemon: &Daemon,
    ) -> Result<(), SupervisorError> {
        if args.spec.fencing.is_none() {
            return Ok(());
        }
        let since = Instant::now();
        let process = process(daemon.pid());
        // A look is never abandoned: it would register a daemon that was killed
        // meanwhile, while the next one is starting.
        while !self
            .register(args, RegistrationStep::Serves(daemon.clients(), process))
            .await?
        {
            if since.elapsed() > THERE_WITHIN {
                return Err(SupervisorError::NotRegistered {
                    image: args.spec.image.to_string(),
                    message: format!(
                        "process {} is not among the image's watchers; if the cluster fenced it, unstage the volume first",
                        daemon.pid()
                    ),
                });
            }
            sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }

    /// Registers the daemon that serves, where none was started for this call;
    /// `served` is the result of [`ServedVolume::ensure_served`].
    pub(super) async fn ensure_registered(
        &mut self,
        served: Result<(), SupervisorError>,
    ) -> Result<(), SupervisorError> {
        let newest = self.candidates.newest().cloned();
        let fenced = newest.filter(|args| args.spec.fencing.is_some());
        let Some(args) = fenced.filter(|_| self.lineage.is_new) else {
            return Ok(());
        };
        served?;
        let Some(daemon) = self.daemon.take() else {
            return Ok(());
        };
        let registered = self.serves(&args, &daemon).await;
        self.daemon = Some(daemon);
        registered
    }

    async fn register(
        &mut self,
        args: &StartArgs,
        step: RegistrationStep,
    ) -> Result<bool, SupervisorError> {
        let Some(fencing) = args.spec.fencing.clone() else {
            return Ok(true);
        };
        let (args, lineage) = (args.clone(), self.lineage);
        let registers = !matches!(step, RegistrationStep::Looks);
        let register =
            move || registration::register(&args.spec, &fencing, &args.key, lineage, step);
        let registered = self
            .shared
            .lanes
            .run(&self.id, "register", register)
            .await?;
        if registered && registers {
            // The next one follows it.
            self.lineage.is_new = false;
        }
        Ok(registered)
    }
}
