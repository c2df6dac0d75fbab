//! `info` and `capabilities`: the agents behind the sockets, and their capabilities.

use clap::Args;
use serde::Serialize;

use super::{
    answer::{Answer, fields, table},
    context::Context,
    error::CliError,
};
use crate::proto::csi::{
    ControllerGetCapabilitiesRequest, GetPluginInfoRequest, GetPluginInfoResponse,
    NodeGetCapabilitiesRequest, NodeGetInfoRequest,
    controller_service_capability::{self, rpc::Type as ControllerType},
    node_service_capability::{self, rpc::Type as NodeType},
};

/// Shows the agents behind both sockets, and whether the node is ready
#[derive(Args, Debug)]
#[command(after_help = "\
An agent that cannot be reached is listed as unreachable; the exit code is 8 only if
neither can be reached.

Example:
  uringctl info")]
pub struct Info {}

/// The agents that answer.
#[derive(Debug, Serialize)]
pub struct InfoAnswer {
    node: Option<NodeAnswer>,
    controller: Option<PluginAnswer>,
    /// For each agent that is missing above, the error.
    unreachable: Vec<String>,
}

#[derive(Debug, Serialize)]
struct PluginAnswer {
    driver_name: String,
    version: String,
}

#[derive(Debug, Serialize)]
struct NodeAnswer {
    #[serde(flatten)]
    plugin: PluginAnswer,
    node_id: String,
    /// Null where it is ready.
    not_ready_because: Option<String>,
    /// 0 where there is no limit.
    max_volumes: i64,
    topology: Vec<String>,
    staging_dir: String,
    pools: Vec<String>,
}

impl PluginAnswer {
    fn new(info: GetPluginInfoResponse) -> Self {
        Self {
            driver_name: info.name,
            version: info.vendor_version,
        }
    }

    fn fields(&self) -> [(&'static str, String); 2] {
        [
            ("driver", self.driver_name.clone()),
            ("version", self.version.clone()),
        ]
    }
}

impl Info {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<InfoAnswer, CliError> {
        let (node, controller) = match (node(context).await, controller(context).await) {
            (Err(error), Err(_)) => return Err(error),
            found => found,
        };
        let errors = [node.as_ref().err(), controller.as_ref().err()];
        let unreachable = errors.into_iter().flatten().map(ToString::to_string);
        Ok(InfoAnswer {
            unreachable: unreachable.collect(),
            node: node.ok(),
            controller: controller.ok(),
        })
    }
}

async fn node(context: &Context) -> Result<NodeAnswer, CliError> {
    let plugin = context
        .node_identity(
            "ask the node for its id",
            GetPluginInfoRequest {},
            async |mut client, request| client.get_plugin_info(request).await,
        )
        .await?;
    let info = context
        .node(
            "ask the node for its id",
            NodeGetInfoRequest {},
            async |mut client, request| client.node_get_info(request).await,
        )
        .await?;
    let agent = context.agent_info().await?;
    let segments = info.accessible_topology.unwrap_or_default().segments;
    Ok(NodeAnswer {
        plugin: PluginAnswer::new(plugin),
        node_id: info.node_id,
        not_ready_because: Some(agent.not_ready_because).filter(|why| !why.is_empty()),
        max_volumes: info.max_volumes_per_node,
        topology: segments.iter().map(|(k, v)| format!("{k}={v}")).collect(),
        staging_dir: agent.staging_dir,
        pools: agent.pools,
    })
}

async fn controller(context: &Context) -> Result<PluginAnswer, CliError> {
    let plugin = context
        .controller_identity(
            "ask the controller for its version",
            GetPluginInfoRequest {},
            async |mut client, request| client.get_plugin_info(request).await,
        )
        .await?;
    Ok(PluginAnswer::new(plugin))
}

impl Answer for InfoAnswer {
    fn text(&self) -> String {
        let mut parts = Vec::new();
        if let Some(node) = &self.node {
            let mut lines = node.plugin.fields().to_vec();
            let max = match node.max_volumes {
                0 => "not limited".to_owned(),
                max => max.to_string(),
            };
            let ready = match &node.not_ready_because {
                None => "yes".to_owned(),
                Some(why) => format!("no: {why}"),
            };
            lines.extend([
                ("ready", ready),
                ("node id", node.node_id.clone()),
                ("volumes at most", max),
                ("topology", node.topology.join(" ")),
                ("staging directory", node.staging_dir.clone()),
                ("pools", node.pools.join(" ")),
            ]);
            parts.push(format!("NODE\n{}", fields(&lines)));
        }
        if let Some(controller) = &self.controller {
            parts.push(format!("CONTROLLER\n{}", fields(&controller.fields())));
        }
        parts.extend(self.unreachable.iter().cloned());
        parts.join("\n\n")
    }
}

/// Lists the capabilities that the node and the controller announce
#[derive(Args, Debug)]
#[command(after_help = "\
Example:
  uringctl capabilities")]
pub struct Capabilities {}

/// The announced capabilities, by CSI's names, sorted.
#[derive(Debug, Serialize)]
pub struct CapabilitiesAnswer {
    node: Option<Vec<String>>,
    controller: Option<Vec<String>>,
}

impl Capabilities {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<CapabilitiesAnswer, CliError> {
        let node = context
            .node(
                "ask the node for its capabilities",
                NodeGetCapabilitiesRequest {},
                async |mut client, request| client.node_get_capabilities(request).await,
            )
            .await;
        let controller = context
            .controller(
                "ask the controller for its capabilities",
                ControllerGetCapabilitiesRequest {},
                async |mut client, request| client.controller_get_capabilities(request).await,
            )
            .await;
        let (node, controller) = match (node, controller) {
            (Err(error), Err(_)) => return Err(error),
            found => found,
        };
        let node = node.ok().map(|answer| {
            let kinds = answer.capabilities.into_iter().map(|capability| {
                let Some(node_service_capability::Type::Rpc(rpc)) = capability.r#type else {
                    return NodeType::Unknown;
                };
                rpc.r#type()
            });
            sorted(kinds.map(|kind| kind.as_str_name()))
        });
        let controller = controller.ok().map(|answer| {
            let kinds = answer.capabilities.into_iter().map(|capability| {
                let Some(controller_service_capability::Type::Rpc(rpc)) = capability.r#type else {
                    return ControllerType::Unknown;
                };
                rpc.r#type()
            });
            sorted(kinds.map(|kind| kind.as_str_name()))
        });
        Ok(CapabilitiesAnswer { node, controller })
    }
}

fn sorted(names: impl Iterator<Item = &'static str>) -> Vec<String> {
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort_unstable();
    names
}

impl Answer for CapabilitiesAnswer {
    fn text(&self) -> String {
        let of = |agent: &'static str, names: &Option<Vec<String>>| {
            let names = names.clone().unwrap_or_default();
            names.into_iter().map(move |name| [agent.to_owned(), name])
        };
        let rows = of("node", &self.node).chain(of("controller", &self.controller));
        table(["AGENT", "CAPABILITY"], rows, "nothing is announced")
    }
}
