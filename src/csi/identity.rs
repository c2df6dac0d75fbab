//! The Identity service: the plugin's name, version, capabilities and readiness.

use std::{str::FromStr, sync::Arc};

use tonic::{Request, Response, Status};

use crate::{
    observe::Readiness,
    proto::csi::{
        GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest,
        GetPluginInfoResponse, PluginCapability, ProbeRequest, ProbeResponse, Topology,
        identity_server,
        plugin_capability::{self, service, volume_expansion},
    },
};

/// The default of `--driver-name`.
pub const DEFAULT_DRIVER_NAME: &str = "block.uring-csi.dev";

/// The key of the topology segment that names a node. Only that node reaches the volumes
/// of its local pools.
pub fn topology_key(driver_name: &str) -> String {
    format!("topology.{driver_name}/node")
}

/// The topology of a node: the segment of its id, and the operator's segments.
pub fn topology(driver_name: &str, node_id: &str, segments: &[Segment]) -> Topology {
    let own = (topology_key(driver_name), node_id.to_owned());
    let others = segments.iter().map(|Segment { key, value }| {
        let key = format!("topology.{driver_name}/{key}");
        (key, value.clone())
    });
    Topology {
        segments: std::iter::once(own).chain(others).collect(),
    }
}

/// `KEY=VALUE`: a part of the cluster to which the node belongs, such as `zone=a`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    key: String,
    value: String,
}

impl FromStr for Segment {
    type Err = String;

    /// Both must be labels as Kubernetes defines them: at most 63 bytes of letters,
    /// digits, `-`, `_` and `.`, with a letter or digit at both ends.
    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').ok_or("it is KEY=VALUE")?;
        for part in [key, value] {
            let inside = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
            let ends = edge(part.chars().next()) && edge(part.chars().last());
            if !(ends && part.chars().all(inside) && part.len() <= 63) {
                return Err(format!("{part:?} is no label"));
            }
        }
        if key.eq_ignore_ascii_case("node") {
            return Err("`node` is the node's id already".to_owned());
        }
        let (key, value) = (key.to_owned(), value.to_owned());
        Ok(Self { key, value })
    }
}

/// Refuses a repeated key.
pub fn once_each(segments: &[Segment]) -> Result<(), String> {
    let mut seen = std::collections::HashSet::new();
    let twice = |one: &&Segment| !seen.insert(one.key.to_ascii_lowercase());
    match segments.iter().find(twice) {
        Some(one) => Err(format!("topology segment {} is given twice", one.key)),
        None => Ok(()),
    }
}

/// The service of one agent.
#[derive(Clone, Debug)]
pub struct Identity {
    driver_name: Arc<str>,
    readiness: Readiness,
    /// More services than all agents have.
    others: Vec<service::Type>,
}

impl Identity {
    /// `driver_name` must have passed [`super::validate::driver_name`].
    /// `readiness`: whether the plugin can serve any volume; a transient condition, such
    /// as a pool that is not mounted yet, does not clear it.
    pub fn new(driver_name: &str, readiness: Readiness) -> Self {
        Self {
            driver_name: driver_name.into(),
            readiness,
            others: Vec::new(),
        }
    }

    /// Announces the GroupController service.
    #[cfg(feature = "controller")]
    pub fn announce_groups(&mut self) {
        self.others.push(service::Type::GroupControllerService);
    }

    /// Announces the SnapshotMetadata service.
    #[cfg(feature = "controller")]
    pub fn announce_metadata(&mut self) {
        self.others.push(service::Type::SnapshotMetadataService);
    }
}

fn service(kind: service::Type) -> PluginCapability {
    PluginCapability {
        r#type: Some(plugin_capability::Type::Service(
            plugin_capability::Service {
                r#type: kind.into(),
            },
        )),
    }
}

fn expansion(kind: volume_expansion::Type) -> PluginCapability {
    PluginCapability {
        r#type: Some(plugin_capability::Type::VolumeExpansion(
            plugin_capability::VolumeExpansion {
                r#type: kind.into(),
            },
        )),
    }
}

#[tonic::async_trait]
impl identity_server::Identity for Identity {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: self.driver_name.to_string(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: [].into(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let mut capabilities = vec![
            service(service::Type::ControllerService),
            service(service::Type::VolumeAccessibilityConstraints),
            expansion(volume_expansion::Type::Online),
        ];
        capabilities.extend(self.others.iter().copied().map(service));
        Ok(Response::new(GetPluginCapabilitiesResponse {
            capabilities,
        }))
    }

    /// A plugin that is not ready answers `ready=false`, not an error.
    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse {
            ready: Some(self.readiness.reason().is_none()),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topology_segments_are_validated_and_reported() {
        let given: Vec<Segment> = ["zone=a", "rack=r_1.x"]
            .map(|one| one.parse().unwrap())
            .into();
        once_each(&given).unwrap();
        let here = topology("x.dev", "n", &given).segments;
        let expected = [
            ("topology.x.dev/node", "n"),
            ("topology.x.dev/zone", "a"),
            ("topology.x.dev/rack", "r_1.x"),
        ];
        assert_eq!(
            here,
            expected.map(|(k, v)| (k.to_owned(), v.to_owned())).into()
        );
        let long = format!("zone={}", "a".repeat(64));
        for bad in [
            "", "zone", "zone=", "=a", "a/b=c", "zone=-a", "Node=n", "zone=ä", &long,
        ] {
            assert!(bad.parse::<Segment>().is_err(), "{bad}");
        }
        let twice: Vec<Segment> = ["zone=a", "Zone=b"].map(|one| one.parse().unwrap()).into();
        assert!(once_each(&twice).unwrap_err().contains("Zone"));
    }
}
