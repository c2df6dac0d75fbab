//! `reattach`: passes the key of a volume whose rbd-nbd daemon could not be restarted.

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
continue; but if one ends, I/O of the volume waits until uring-csi-holder has the key
again: by a stage of the volume, or by this command.

Example:
  uringctl reattach data-1 --secrets /etc/ceph-secret")]
pub struct Reattach {
    /// Volume, by name or id
    volume: String,
}

/// A volume that is served.
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

    /// By its id alone neither agent is needed, which may be away as well.
    async fn volume_id(&self, context: &Context) -> Result<String, CliError> {
        let doing = "list what rbd-nbd serves";
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
        format!("{} is served by rbd-nbd as {}", self.volume_id, self.device)
    }
}
