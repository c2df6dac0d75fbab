//! `reattach`: gives the supervisor the key that it needs to restart a volume's daemon.

use clap::Args;
use serde::Serialize;

use super::{answer::Answer, context::Context, error::CliError};
use crate::{
    ceph::client::Credentials,
    proto::holder::{Held, ListRequest, ReattachRequest},
};

/// Restarts the rbd-nbd daemon of a volume with the key in --secrets
#[derive(Args, Debug)]
#[command(after_help = "\
A restarted uring-csi-holder knows its volumes, but not their keys. Its rbd-nbd daemons
continue; but if one ends, I/O of the volume waits until a stage of the volume, or this
command, brings the key.

Example:
  uringctl reattach data-1 --secrets /etc/ceph-secret")]
pub struct Reattach {
    /// Volume, by name or id
    volume: String,
}

/// A volume, and the device by which rbd-nbd serves it.
#[derive(Debug, Serialize)]
pub struct Reattached {
    volume_id: String,
    device: String,
}

impl Reattach {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<Reattached, CliError> {
        let credentials = Credentials::from_secrets(&context.secrets)?;
        let volume_id = self.volume_id(context).await?;
        let request = ReattachRequest {
            volume_id: volume_id.clone(),
            user: credentials.user,
            key: credentials.key.reveal().to_owned(),
        };
        let doing = format!("reattach {}", self.volume);
        let answer = context
            .holder(doing, request, async |mut client, request| {
                client.reattach(request).await
            })
            .await?;
        Ok(Reattached {
            volume_id,
            device: answer.node,
        })
    }

    /// An id is looked up at the supervisor alone: both agents may be away.
    async fn volume_id(&self, context: &Context) -> Result<String, CliError> {
        let doing = "list the volumes of rbd-nbd";
        let listed = context
            .holder(doing, ListRequest {}, async |mut client, request| {
                client.list(request).await
            })
            .await?;
        let is_id = |held: &Held| held.volume_id == self.volume;
        if listed.volumes.iter().any(is_id) {
            return Ok(self.volume.clone());
        }
        context.volume_id(&self.volume).await
    }
}

impl Answer for Reattached {
    fn text(&self) -> String {
        format!("rbd-nbd serves {} as {}", self.volume_id, self.device)
    }
}
