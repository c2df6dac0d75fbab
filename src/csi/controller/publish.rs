//! ControllerPublishVolume and ControllerUnpublishVolume: nodes attach volumes by
//! themselves, so these act only where a backend fences nodes that do not detach.

use std::time::Duration;

use tonic::Status;

use super::{super::validate, Controller};
use crate::{proto::csi as wire, provision::PublishRequest};

impl Controller {
    pub(super) async fn publish(
        &self,
        request: wire::ControllerPublishVolumeRequest,
    ) -> Result<wire::ControllerPublishVolumeResponse, Status> {
        self.publishes()?;
        validate::id("volume_id", &request.volume_id)?;
        validate::node_id("node_id", &request.node_id)?;
        let capability =
            validate::capability("volume_capability", request.volume_capability.as_ref())?;
        validate::map("volume_context", &request.volume_context)?;
        validate::secrets(&request.secrets)?;
        let new = PublishRequest {
            handle: request.volume_id,
            node: request.node_id,
            mode: capability.mode,
            read_only: request.readonly,
            context: request.volume_context,
            secrets: request.secrets.into(),
        };
        let context = self.stores.publish_volume(new).await?;
        Ok(wire::ControllerPublishVolumeResponse {
            publish_context: context.into_iter().collect(),
        })
    }

    pub(super) async fn unpublish(
        &self,
        request: wire::ControllerUnpublishVolumeRequest,
        within: Duration,
    ) -> Result<wire::ControllerUnpublishVolumeResponse, Status> {
        self.publishes()?;
        validate::id("volume_id", &request.volume_id)?;
        validate::secrets(&request.secrets)?;
        let (handle, node) = (request.volume_id, request.node_id);
        let secrets = request.secrets.into();
        let stores = &self.stores;
        stores
            .unpublish_volume(handle, node, within, secrets)
            .await?;
        Ok(wire::ControllerUnpublishVolumeResponse {})
    }

    fn publishes(&self) -> Result<(), Status> {
        if self.stores.abilities().publishes {
            return Ok(());
        }
        Err(Status::unimplemented(
            "PUBLISH_UNPUBLISH_VOLUME is announced where nodes are fenced: --fence-after",
        ))
    }
}
