//! The Node service: requests parsed into [`crate::volume`]'s calls.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tonic::Status;

use super::{
    identity::Segment,
    validate::{self, clean},
};
use crate::{
    capability::{AccessMode, AccessType, Capability},
    device::{Fencing, Source},
    proto::csi::{
        NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetVolumeHealthRequest,
        NodeGetVolumeHealthResponse, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse,
        NodePublishVolumeRequest, NodePublishVolumeResponse, NodeStageVolumeRequest,
        NodeStageVolumeResponse, NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse,
        NodeUnstageVolumeRequest, NodeUnstageVolumeResponse, VolumeHealth, VolumeHealthErrorType,
        VolumeUsage, volume_health::VolumeHealthEntry, volume_usage::Unit,
    },
    volume::{
        Cause, Config, Node, NodeHandle, Outcome, Severity, Space, Statistics, Usage,
        spec::{Call, Expand, Parsed, Publish, Request, RootAccess, Stage},
    },
};

mod inline;
mod service;

pub use service::METHODS;
#[cfg(test)]
mod tests;

/// The service of one node.
#[derive(Clone, Debug)]
pub struct NodeService {
    node: NodeHandle,
    config: Config,
    /// The node's topology segments.
    segments: Vec<Segment>,
}

impl NodeService {
    pub fn new(node: NodeHandle, config: Config, segments: Vec<Segment>) -> Self {
        Self {
            node,
            config,
            segments,
        }
    }

    async fn submit(
        &self,
        volume_id: &str,
        request: impl Into<Request>,
        timeout: Duration,
    ) -> Result<Outcome, Status> {
        let (id, request) = (volume_id.to_owned(), request.into());
        let submit = move |node: Arc<Node>| node.submit(id, request, timeout);
        let outcome = self.node.run(submit).await.ok_or_else(shutting_down)?;
        outcome.map_err(|error| Status::from(&*error))
    }

    /// Runs a call that does not wait for devices.
    async fn ask<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&Node) -> Result<T, Cause> + Send + 'static,
    ) -> Result<T, Status> {
        let answer = self.node.run(move |node| async move { ask(&node) }).await;
        let answer = answer.ok_or_else(shutting_down)?;
        answer.map_err(|error| Status::from(&error))
    }

    fn parse(
        &self,
        capability: &Capability,
        context: &HashMap<String, String>,
    ) -> Result<Parsed, Status> {
        Parsed::new(capability, context, self.config.volume_mount_group)
            .map_err(|e| Status::from(&e))
    }

    async fn stage(
        &self,
        request: NodeStageVolumeRequest,
        timeout: Duration,
    ) -> Result<NodeStageVolumeResponse, Status> {
        validate::id("volume_id", &request.volume_id)?;
        validate::path("staging_target_path", &request.staging_target_path)?;
        validate::map("volume_context", &request.volume_context)?;
        validate::map("publish_context", &request.publish_context)?;
        validate::secrets(&request.secrets)?;
        let capability =
            validate::capability("volume_capability", request.volume_capability.as_ref())?;
        refuse_unsafe(&capability, &request.volume_context)?;
        let parsed = self.parse(&capability, &request.volume_context)?;
        let source = Source::parse(&request.volume_context, &request.volume_id)
            .map_err(|error| Status::from(&Cause::from(error)))?;
        let stage = Stage {
            name: request
                .volume_context
                .get("name")
                .cloned()
                .unwrap_or_default(),
            source,
            staging_path: clean(&request.staging_target_path),
            usage: parsed.usage,
            read_only: parsed.read_only,
            mode: parsed.mode,
            mkfs_options: parsed.mkfs_options,
            group: parsed.group,
            root: RootAccess::default(),
            inline: None,
            fencing: Fencing::parse(&request.publish_context),
        };
        let stage = Request {
            call: Call::Stage(stage),
            secrets: request.secrets.into(),
        };
        self.submit(&request.volume_id, stage, timeout).await?;
        Ok(NodeStageVolumeResponse {})
    }

    async fn unstage(
        &self,
        request: NodeUnstageVolumeRequest,
        timeout: Duration,
    ) -> Result<NodeUnstageVolumeResponse, Status> {
        validate::id("volume_id", &request.volume_id)?;
        validate::path("staging_target_path", &request.staging_target_path)?;
        let call = Call::Unstage(clean(&request.staging_target_path));
        self.submit(&request.volume_id, call, timeout).await?;
        Ok(NodeUnstageVolumeResponse {})
    }

    async fn publish(
        &self,
        request: NodePublishVolumeRequest,
        timeout: Duration,
    ) -> Result<NodePublishVolumeResponse, Status> {
        validate::id("volume_id", &request.volume_id)?;
        validate::path("target_path", &request.target_path)?;
        validate::map("volume_context", &request.volume_context)?;
        validate::map("publish_context", &request.publish_context)?;
        validate::secrets(&request.secrets)?;
        let capability =
            validate::capability("volume_capability", request.volume_capability.as_ref())?;
        refuse_unsafe(&capability, &request.volume_context)?;
        let ephemeral = request
            .volume_context
            .get("csi.storage.k8s.io/ephemeral")
            .is_some_and(|value| value == "true");
        if ephemeral {
            inline::refuse_unlisted(&request.volume_context)?;
        }
        let parsed = self.parse(&capability, &request.volume_context)?;
        let call = if ephemeral {
            Call::Inline(self.inline(&request, &capability, parsed).await?)
        } else {
            if request.staging_target_path.is_empty() {
                return Err(Status::failed_precondition(
                    "staging_target_path: is required, volumes of this driver are staged first",
                ));
            }
            validate::path("staging_target_path", &request.staging_target_path)?;
            Call::Publish(Publish {
                staging_path: clean(&request.staging_target_path),
                target_path: clean(&request.target_path),
                usage: parsed.usage,
                read_only: parsed.read_only || request.readonly,
                mode: parsed.mode,
                group: parsed.group,
                remount: false,
                lock: false,
                encrypted: Source::encrypted_directory_of(&request.volume_context),
            })
        };
        self.submit(&request.volume_id, call, timeout).await?;
        Ok(NodePublishVolumeResponse {})
    }

    async fn unpublish(
        &self,
        request: NodeUnpublishVolumeRequest,
        timeout: Duration,
    ) -> Result<NodeUnpublishVolumeResponse, Status> {
        validate::id("volume_id", &request.volume_id)?;
        validate::path("target_path", &request.target_path)?;
        let call = Call::Unpublish(clean(&request.target_path));
        self.submit(&request.volume_id, call, timeout).await?;
        Ok(NodeUnpublishVolumeResponse {})
    }

    async fn expand(
        &self,
        request: NodeExpandVolumeRequest,
        timeout: Duration,
    ) -> Result<NodeExpandVolumeResponse, Status> {
        validate::id("volume_id", &request.volume_id)?;
        validate::path("volume_path", &request.volume_path)?;
        validate::optional_path("staging_target_path", &request.staging_target_path)?;
        let is_block = match &request.volume_capability {
            None => None,
            capability => {
                let asked = validate::capability("volume_capability", capability.as_ref())?;
                Some(asked.access == AccessType::Block)
            }
        };
        let range = request.capacity_range.unwrap_or_default();
        let expand = Expand {
            volume_path: clean(&request.volume_path),
            staging_path: clean(&request.staging_target_path),
            required: bytes("capacity_range.required_bytes", range.required_bytes)?,
            limit: bytes("capacity_range.limit_bytes", range.limit_bytes)?,
            is_block,
        };
        match self
            .submit(&request.volume_id, Call::Expand(expand), timeout)
            .await?
        {
            Outcome::Size(size) => Ok(NodeExpandVolumeResponse {
                capacity_bytes: size.try_into().unwrap_or(i64::MAX),
            }),
            other => Err(Status::internal(format!("growth ended in {other:?}"))),
        }
    }

    async fn stats(
        &self,
        request: NodeGetVolumeStatsRequest,
        timeout: Duration,
    ) -> Result<(NodeGetVolumeStatsResponse, Option<Duration>), Status> {
        validate::id("volume_id", &request.volume_id)?;
        validate::path("volume_path", &request.volume_path)?;
        let path = clean(&request.volume_path);
        let answer = self.node.stats(request.volume_id, path, timeout).await;
        let answer = answer.ok_or_else(shutting_down)?;
        let Statistics { usage, age } = answer.map_err(|error| Status::from(&*error))?;
        let answer = NodeGetVolumeStatsResponse {
            usage: match usage {
                Usage::Block(total) => vec![VolumeUsage {
                    total: clamp(total),
                    unit: Unit::Bytes.into(),
                    ..Default::default()
                }],
                Usage::Mounted { bytes, inodes } => std::iter::once((bytes, Unit::Bytes))
                    .chain(inodes.map(|inodes| (inodes, Unit::Inodes)))
                    .map(|(space, unit)| volume_usage(space, unit))
                    .collect(),
            },
        };
        Ok((answer, age))
    }

    async fn health(
        &self,
        request: NodeGetVolumeHealthRequest,
        timeout: Duration,
    ) -> Result<NodeGetVolumeHealthResponse, Status> {
        validate::id("volume_id", &request.volume_id)?;
        let volume_id = request.volume_id.clone();
        let ask = move |node: Arc<Node>| node.health(volume_id, timeout);
        let found = self.node.run(ask).await.ok_or_else(shutting_down)?;
        let found = found.map_err(|error| Status::from(&error))?;
        Ok(NodeGetVolumeHealthResponse {
            volume_health: Some(VolumeHealth {
                volume_id: request.volume_id,
                health_statuses: found
                    .into_iter()
                    .map(|condition| VolumeHealthEntry {
                        status: match condition.severity {
                            Severity::Degraded => VolumeHealthErrorType::Degraded,
                            Severity::Inaccessible => VolumeHealthErrorType::Inaccessible,
                            Severity::DataLoss => VolumeHealthErrorType::DataLoss,
                        }
                        .into(),
                        reason: condition.reason.as_str().to_owned(),
                        message: condition.message,
                    })
                    .collect(),
            }),
        })
    }
}

fn shutting_down() -> Status {
    Status::unavailable("the node agent is shutting down")
}

/// Several nodes that mount one ext4, xfs or btrfs for writing destroy it.
fn refuse_unsafe(capability: &Capability, context: &HashMap<String, String>) -> Result<(), Status> {
    if Source::remote_file_system(context).is_some() {
        return Ok(());
    }
    if capability.mode.multi_node_writer() && capability.access != AccessType::Block {
        let mode = match capability.mode {
            AccessMode::MultiNodeSingleWriter => "MULTI_NODE_SINGLE_WRITER",
            _ => "MULTI_NODE_MULTI_WRITER",
        };
        return Err(validate::invalid(
            "volume_capability",
            format!(
                "only raw block volumes support {mode}: several nodes that write to one file system destroy it"
            ),
        ));
    }
    Ok(())
}

fn bytes(field: &str, value: i64) -> Result<u64, Status> {
    u64::try_from(value).map_err(|_| validate::invalid(field, format!("{value} is negative")))
}

fn clamp(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn volume_usage(space: Space, unit: Unit) -> VolumeUsage {
    VolumeUsage {
        available: clamp(space.available),
        total: clamp(space.total),
        used: clamp(space.used),
        unit: unit.into(),
    }
}
