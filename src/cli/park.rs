//! `park`, `unpark`: the volumes that files ask for, before a machine's shutdown.

use std::time::Instant;

use clap::Args;
use serde::Serialize;

use super::{answer::Answer, context::Context, error::CliError, wanted::LOOK_EVERY};
use crate::proto::admin::ParkVolumesRequest;

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
  uringctl unpark && uringctl wait data")]
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
        context.park_volumes(true).await?;
        loop {
            let left = context.list_wanted().await?.volumes.into_iter().next();
            let Some(volume) = left else {
                return Ok(ParkAnswer { parked: true });
            };
            if Instant::now() + LOOK_EVERY > until {
                return Err(CliError::NotYet {
                    name: volume.name,
                    state: "gone",
                    missing: format!("it is {}: {}", volume.state, volume.detail),
                });
            }
            tokio::time::sleep(LOOK_EVERY).await;
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
    async fn park_volumes(&self, parked: bool) -> Result<(), CliError> {
        let request = ParkVolumesRequest { parked };
        self.admin("park the volumes", request, async |mut client, request| {
            client.park_volumes(request).await
        })
        .await
        .map(drop)
    }
}
