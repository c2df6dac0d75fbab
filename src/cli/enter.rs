//! `enter`: enters the PersistentVolumes of another site in this site's journal.

use std::{
    collections::HashMap,
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use clap::Args;
use serde::{Deserialize, Serialize};

use super::{
    answer::{Answer, table},
    context::Context,
    error::CliError,
};
use crate::{
    ceph::csi_format::handle::CephVolumeHandle,
    proto::{admin::EnterVolumeRequest, csi::GetPluginInfoRequest},
};

/// Enters mirrored Ceph volumes in the journal of the cluster that they are copied to
#[derive(Args, Debug)]
#[command(after_help = "\
rbd-mirror copies a volume's image to another cluster, but not its entry in the journal,
without which this driver does not find the image there. This command writes it, from the
volume's PersistentVolume. FILE is what `kubectl get pv -o json` prints at either site, of
one or of all; volumes of other drivers, and those without a journal, are passed over. Run
it at the site to fail over to. It may be repeated; of a complete entry it changes
the image's id alone, if rbd-mirror has copied the image anew. Volumes of which the cluster
has no image are listed (exit code 1).

Example:
  kubectl get pv -o json >volumes.json
  uringctl enter volumes.json")]
pub struct Enter {
    /// PersistentVolumes as JSON; - is the standard input
    #[arg(value_name = "FILE")]
    volumes: PathBuf,
}

/// What became of each volume.
#[derive(Debug, Serialize)]
pub struct Entered {
    volumes: Vec<EnteredVolume>,
}

/// A volume as printed.
#[derive(Debug, Serialize)]
struct EnteredVolume {
    name: String,
    volume_id: String,
    /// `false`: it was there.
    entered: bool,
    /// Why it could not be entered.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<String>,
}

/// What `kubectl get pv -o json` prints.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Listed {
    Several { items: Vec<PersistentVolume> },
    One(PersistentVolume),
}

#[derive(Debug, Deserialize)]
struct PersistentVolume {
    metadata: Metadata,
    spec: VolumeSpec,
}

#[derive(Debug, Deserialize)]
struct Metadata {
    name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct VolumeSpec {
    csi: Option<CsiSource>,
    claim_ref: Option<ClaimRef>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CsiSource {
    driver: String,
    volume_handle: String,
    #[serde(default)]
    volume_attributes: HashMap<String, String>,
}

#[derive(Debug, Deserialize)]
struct ClaimRef {
    namespace: String,
}

impl Enter {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<Entered, CliError> {
        let listed = read(&self.volumes)?;
        let driver = context
            .controller_identity(
                "ask the controller for the driver's name",
                GetPluginInfoRequest {},
                async |mut client, request| client.get_plugin_info(request).await,
            )
            .await?
            .name;
        let mut volumes = Vec::new();
        for request in requests(listed, &driver) {
            let (name, volume_id) = (request.name.clone(), request.volume_id.clone());
            let request = EnterVolumeRequest {
                secrets: context.secrets.to_wire(),
                ..request
            };
            let answer = context
                .controller_admin(format!("enter {name}"), request, async |mut client, it| {
                    client.enter_volume(it).await
                })
                .await;
            let (entered, failed) = match answer {
                Ok(answer) => (answer.entered, None),
                Err(error @ CliError::Unreachable { .. }) => return Err(error),
                Err(error) => (false, Some(crate::error_chain(&error))),
            };
            volumes.push(EnteredVolume {
                name,
                volume_id,
                entered,
                failed,
            });
        }
        Ok(Entered { volumes })
    }
}

fn read(path: &Path) -> Result<Listed, CliError> {
    let text = if path == Path::new("-") {
        let mut text = String::new();
        io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        fs::read_to_string(path)
    };
    let text = text.map_err(|source| CliError::Io {
        doing: "read",
        path: path.to_owned(),
        source,
    })?;
    serde_json::from_str(&text).map_err(|error| CliError::BadFile {
        path: path.to_owned(),
        why: format!("it is not what `kubectl get pv -o json` prints: {error}"),
    })
}

/// Those of the driver's volumes that a controller made in a Ceph cluster, and so entered in
/// its journal: no static volume, nor one of Kubernetes' own RBD plugin.
fn requests(listed: Listed, driver: &str) -> Vec<EnterVolumeRequest> {
    let all = match listed {
        Listed::Several { items } => items,
        Listed::One(volume) => vec![volume],
    };
    let request = |volume: PersistentVolume| {
        let csi = volume.spec.csi.filter(|csi| csi.driver == driver)?;
        let is_static = csi.volume_attributes.get("staticVolume");
        let is_in_cluster = csi.volume_attributes.contains_key("clusterID");
        let parsed = csi.volume_handle.parse();
        let is_migrated = matches!(parsed, Ok(CephVolumeHandle::Migrated(_)));
        if is_static.is_some_and(|text| text == "true") || is_migrated || !is_in_cluster {
            return None;
        }
        Some(EnterVolumeRequest {
            volume_id: csi.volume_handle,
            name: volume.metadata.name,
            owner: volume
                .spec
                .claim_ref
                .map(|claim| claim.namespace)
                .unwrap_or_default(),
            volume_context: csi.volume_attributes,
            secrets: HashMap::new(),
        })
    };
    all.into_iter().filter_map(request).collect()
}

impl Answer for Entered {
    fn text(&self) -> String {
        let rows = self.volumes.iter().map(|volume| {
            let what = match (&volume.failed, volume.entered) {
                (Some(why), _) => why.clone(),
                (None, true) => "entered".to_owned(),
                (None, false) => "was there".to_owned(),
            };
            [volume.name.clone(), volume.volume_id.clone(), what]
        });
        let none = "no PersistentVolume is of this driver and in a Ceph cluster's journal";
        table(["NAME", "VOLUME", "RESULT"], rows, none)
    }

    fn require_success(self) -> Result<(), CliError> {
        let failed = self.volumes.into_iter().filter(|it| it.failed.is_some());
        let names: Vec<_> = failed.map(|volume| volume.name).collect();
        if names.is_empty() {
            return Ok(());
        }
        Err(CliError::NotEntered(names))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const MIGRATED: &str = "mig_mons-7982de6a23b77bce50b1ba9f2e879cce_image-e0b45b52-7e09-47d3-8f1b-806995fa4412_706f6f6c";

    #[test]
    fn only_volumes_that_the_driver_made_are_entered() {
        let volume = |name: &str, source: serde_json::Value| json!({"metadata": {"name": name, "uid": "x"}, "spec": source});
        let with_handle = |handle: &str, driver: &str, context: serde_json::Value| {
            json!({"csi": {"driver": driver, "volumeHandle": handle, "volumeAttributes": context},
                "claimRef": {"namespace": "shop", "name": "data"}})
        };
        let csi = |driver: &str, context| with_handle("0001-x", driver, context);
        let ceph = json!({"clusterID": "ceph", "pool": "rbd"});
        let own = volume("pvc-1", csi("own", ceph.clone()));
        let items = json!([
            own,
            volume("pvc-2", csi("other", ceph.clone())),
            volume(
                "pvc-3",
                csi("own", json!({"clusterID": "ceph", "staticVolume": "true"}))
            ),
            volume("pvc-4", json!({"hostPath": {"path": "/"}})),
            volume("pvc-5", csi("own", json!({"pool": "local"}))),
            volume("pvc-6", csi("own", json!({"server": "nfs", "share": "/"}))),
            volume("pvc-7", with_handle(MIGRATED, "own", ceph)),
        ]);
        let all = json!({"apiVersion": "v1", "kind": "List", "items": items});
        for listed in [own.clone(), all] {
            let found = requests(serde_json::from_value(listed).unwrap(), "own");
            let [found] = found.as_slice() else {
                panic!("{found:?}")
            };
            assert_eq!(
                (
                    &*found.name,
                    &*found.owner,
                    &*found.volume_id,
                    &*found.volume_context["pool"]
                ),
                ("pvc-1", "shop", "0001-x", "rbd")
            );
        }
    }
}
