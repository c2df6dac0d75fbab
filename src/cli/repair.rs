//! `format` and `release`: decisions that only an operator may make, each with
//! `--confirm`.

use clap::Args;
use serde::Serialize;

use super::{answer::Answer, context::Context, error::CliError};
use crate::{
    Done,
    pool::{
        PoolSpec, Scope,
        claim::{self, ClaimError},
    },
    proto::admin::FormatVolumeRequest,
};

/// Formats a volume that is not blank, and destroys its data
#[derive(Args, Debug)]
#[command(after_help = "\
A stage formats blank volumes only, and refuses all others; this command formats those,
too. The volume must not be staged, and no process may have its device open.

Example:
  uringctl format data-1 --fs ext4 --confirm data-1")]
pub struct Format {
    /// Volume, by name or id
    volume: String,
    /// New file system
    #[arg(long, value_name = "TYPE", value_parser = ["ext4", "xfs", "btrfs"])]
    fs: String,
    /// VOLUME again, to confirm that its data may be destroyed
    #[arg(long, value_name = "VOLUME")]
    confirm: Option<String>,
}

/// The result of `format`.
#[derive(Debug, Serialize)]
pub struct Formatted {
    volume_id: String,
    fs: String,
    /// The previous content, as far as the probe recognised it.
    was: String,
}

impl Format {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<Formatted, CliError> {
        let wanted = &self.volume;
        if self.confirm.as_ref() != Some(wanted) {
            return Err(CliError::Unconfirmed {
                what: format!("formatting {wanted} destroys all its data"),
                with: wanted.clone(),
            });
        }
        let volume = context.volume(wanted).await?;
        let request = FormatVolumeRequest {
            volume_id: volume.volume_id.clone(),
            volume_context: volume.volume_context,
            fs_type: self.fs.clone(),
            confirm: volume.volume_id.clone(),
            secrets: context.secrets.to_wire(),
        };
        let work = context.admin(
            format!("format {wanted}"),
            request,
            async |mut client, request| client.format_volume(request).await,
        );
        let answer = context
            .showing(&format!("formatting {wanted}"), &volume.volume_id, work)
            .await?;
        Ok(Formatted {
            volume_id: volume.volume_id,
            fs: self.fs,
            was: answer.was,
        })
    }
}

impl Answer for Formatted {
    fn text(&self) -> String {
        let was = match self.was.as_str() {
            "" => String::new(),
            was => format!(" (was: {was})"),
        };
        format!("{} is {} now{was}", self.volume_id, self.fs)
    }
}

/// Removes a dead node's claims on a pool's images
#[derive(Args, Debug)]
#[command(after_help = "\
A node claims each image that it attaches, so that no second node writes to it. A node
that is down for good releases no claim; this command removes its claims from the pool's
directory. If that node is alive, two nodes then write to one file system and destroy
it: be sure that it is off.

Examples:
  uringctl release --pool shared=/srv/pool --node worker-3
  uringctl release --pool shared=/srv/pool --node worker-3 --confirm worker-3")]
pub struct Release {
    /// The pool and its directory on this machine
    #[arg(long, value_name = "NAME=DIR")]
    pool: PoolSpec,
    /// Id of the dead node
    #[arg(long)]
    node: String,
    /// Only this image; default: all images that the node claims
    image: Option<String>,
    /// NODE again, to confirm that it is off and stays off
    #[arg(long, value_name = "NODE")]
    confirm: Option<String>,
}

/// The images that `release` freed.
#[derive(Debug, Serialize)]
pub struct Released {
    node: String,
    released: Vec<String>,
}

impl Release {
    /// Runs the command, without either agent.
    pub fn run(self) -> Result<Released, CliError> {
        let pool = self.pool.or(Scope::Shared);
        // A mistyped directory must not look like a pool without claims.
        drop(pool.open_dir().map_err(ClaimError::from)?);
        let mut images = claim::claimed_by(&pool, &self.node)?;
        if let Some(only) = &self.image {
            images.retain(|image| image == only);
        }
        if self.confirm.as_ref() != Some(&self.node) && !images.is_empty() {
            let list = images.join(", ");
            return Err(CliError::Unconfirmed {
                what: format!("{} claims {list} in pool {:?}", self.node, pool.name),
                with: self.node,
            });
        }
        let mut released = Vec::new();
        for image in images {
            match claim::release(&pool, &image, &self.node)? {
                Done::Now => released.push(image),
                Done::Already => {}
            }
        }
        Ok(Released {
            node: self.node,
            released,
        })
    }
}

impl Answer for Released {
    fn text(&self) -> String {
        if self.released.is_empty() {
            return format!("{} claims no image of that pool", self.node);
        }
        let lines: Vec<String> = self
            .released
            .iter()
            .map(|image| format!("{image} is free"))
            .collect();
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;
    use crate::pool::{Pool, claim::Sharing};

    #[test]
    fn release_removes_only_the_dead_nodes_claims_once_confirmed() {
        let dir = tempfile::tempdir().unwrap();
        let spec: PoolSpec = format!("shared={}", dir.path().display()).parse().unwrap();
        let pool = spec.clone().or(Scope::Shared);
        for (image, node) in [("a", "dead"), ("b", "dead"), ("c", "alive")] {
            claimed(&pool, image, node);
        }
        let release = |image: Option<&str>, confirm: Option<&str>| Release {
            pool: spec.clone(),
            node: "dead".to_owned(),
            image: image.map(str::to_owned),
            confirm: confirm.map(str::to_owned),
        };
        let error = release(None, None).run().unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("--confirm dead"), "{error}");
        assert!(release(None, Some("alive")).run().is_err());

        let one = release(Some("a"), Some("dead")).run().unwrap();
        assert_eq!(one.released, ["a"]);
        let rest = release(None, Some("dead")).run().unwrap();
        assert_eq!(rest.released, ["b"]);
        assert!(release(None, None).run().unwrap().released.is_empty());
        let left = claim::owners(&pool, "c").unwrap();
        assert_eq!(left[0].node_id, "alive");
    }

    fn claimed(pool: &Pool, image: &str, node: &str) {
        let mine = claim::Claim {
            node_id: node.to_owned(),
            boot_id: "boot".to_owned(),
            volume_id: String::new(),
            access: Sharing::Exclusive,
            read_only: false,
        };
        assert_eq!(claim::claim(pool, image, &mine).unwrap(), Done::Now);
        assert_eq!(claim::owners(pool, image).unwrap(), slice::from_ref(&mine));
    }
}
