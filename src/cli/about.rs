//! `info` and `capabilities`: who answers at the sockets, and what it can do.

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

/// Shows who answers at both sockets, and whether the node is ready
#[derive(Args, Debug)]
#[command(after_help = "\
An agent that can't be reached is shown as such; the exit code is 6 only when
neither can.

Example:
  uringctl info")]
pub struct Info {}

/// Who answers.
#[derive(Debug, Serialize)]
pub struct InfoAnswer {
    node: Option<NodeAnswer>,
    controller: Option<PluginAnswer>,
    /// Why the agent that is missing above is.
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
    /// Nothing: it is ready.
    not_ready_because: Option<String>,
    /// 0: not limited.
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
            "ask the node who it is",
            GetPluginInfoRequest {},
            async |mut client, request| client.get_plugin_info(request).await,
        )
        .await?;
    let info = context
        .node(
            "ask the node who it is",
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
            "ask the controller who it is",
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

/// Lists what the node and the controller announce
#[derive(Args, Debug)]
#[command(after_help = "\
Example:
  uringctl capabilities")]
pub struct Capabilities {}

/// What is announced: by CSI's names, sorted.
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
                "ask the node what it can do",
                NodeGetCapabilitiesRequest {},
                async |mut client, request| client.node_get_capabilities(request).await,
            )
            .await;
        let controller = context
            .controller(
                "ask the controller what it can do",
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
