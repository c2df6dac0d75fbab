//! `park`, `unpark`: the volumes that files ask for, before a machine's shutdown.

use std::time::Instant;

use clap::Args;
use serde::Serialize;

use super::{answer::Answer, context::Context, error::CliError, wanted::LOOK_EVERY};
use crate::proto::admin::{ParkVolumesRequest, WantedVolume};

/// Unmounts and detaches all volumes that files ask for, until the machine's next boot
#[derive(Args, Debug)]
#[command(after_help = "\
For the shutdown of a machine, while the network and the agents still run; the unit
uring-csi-volumes.service does it. Waits until all are gone. Exit code 6: not within
--timeout; the message names a volume and what keeps it. The files stay.

Example:
  uringctl park --timeout 60s")]
pub struct Park {}

/// Lets files ask for volumes again
#[derive(Args, Debug)]
#[command(after_help = "\
Example:
  uringctl unpark")]
pub struct Unpark {}

/// Whether the volumes are parked.
#[derive(Debug, Serialize)]
pub struct ParkAnswer {
    parked: bool,
}

impl Answer for ParkAnswer {
    fn text(&self) -> String {
        let text = if self.parked {
            "parked: every volume is unmounted and detached"
        } else {
            "files ask for volumes again"
        };
        text.to_owned()
    }
}

impl Park {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<ParkAnswer, CliError> {
        let until = Instant::now() + context.node_socket.timeout;
        loop {
            // An agent that starts does not answer for a while.
            let left = match context.parked_volumes().await {
                Err(error) if error.is_uncertain() => Err(error),
                left => Ok(left?.into_iter().next()),
            };
            let is_late = Instant::now() + LOOK_EVERY > until;
            match left {
                Ok(None) => return Ok(ParkAnswer { parked: true }),
                Err(error) if is_late => return Err(error),
                Ok(Some(volume)) if is_late => {
                    return Err(CliError::NotYet {
                        name: volume.name,
                        state: "gone",
                        missing: format!("it is {}: {}", volume.state, volume.detail),
                    });
                }
                _ => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }
}

impl Unpark {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<ParkAnswer, CliError> {
        context.park_volumes(false).await?;
        Ok(ParkAnswer { parked: false })
    }
}

impl Context {
    /// Parks the volumes, also again; those that are still to go.
    async fn parked_volumes(&self) -> Result<Vec<WantedVolume>, CliError> {
        self.park_volumes(true).await?;
        Ok(self.list_wanted().await?.volumes)
    }

    async fn park_volumes(&self, parked: bool) -> Result<(), CliError> {
        let request = ParkVolumesRequest { parked };
        self.admin("park the volumes", request, async |mut client, request| {
            client.park_volumes(request).await
        })
        .await
        .map(drop)
    }
}
