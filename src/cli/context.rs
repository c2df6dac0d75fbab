//! The sockets of the agents, and calls to them.

use std::{env, path::PathBuf, time::Duration};

use tonic::{Request, Response, Status, transport::Channel};

use super::error::{Agent, CliError};
use crate::{
    csi::call::TRACE_PARENT,
    endpoint::Endpoint,
    proto::{
        admin::{
            GetAgentInfoRequest, GetAgentInfoResponse, HeldVolume, ListHeldVolumesRequest,
            controller_admin_client::ControllerAdminClient, node_admin_client::NodeAdminClient,
            orphan_admin_client::OrphanAdminClient,
        },
        csi::{
            controller_client::ControllerClient, group_controller_client::GroupControllerClient,
            identity_client::IdentityClient, node_client::NodeClient,
        },
        holder::holder_client::HolderClient,
    },
    secret::Secrets,
};

/// An agent's socket with a client for each of its services. The first call
/// connects.
pub struct Socket {
    agent: Agent,
    /// Where it is.
    pub endpoint: Endpoint,
    channel: Channel,
    /// Of each call.
    pub timeout: Duration,
}

impl Socket {
    /// Calls carry `timeout` as `grpc-timeout`.
    pub fn new(agent: Agent, endpoint: Endpoint, timeout: Duration) -> Self {
        Self {
            agent,
            channel: endpoint.channel(),
            endpoint,
            timeout,
        }
    }

    /// Makes one call. `doing` completes "cannot …" in its error.
    pub async fn call<Q, A>(
        &self,
        doing: impl Into<String>,
        message: Q,
        call: impl AsyncFnOnce(Channel, Request<Q>) -> Result<Response<A>, Status>,
    ) -> Result<A, CliError> {
        let mut request = Request::new(message);
        request.set_timeout(self.timeout);
        if let Some(parent) = env::var("TRACEPARENT").ok().and_then(|it| it.parse().ok()) {
            request.metadata_mut().insert(TRACE_PARENT, parent);
        }
        // Boxed: the generated clients' futures are kilobytes large, and every
        // command would hold several.
        match Box::pin(call(self.channel.clone(), request)).await {
            Ok(answer) => Ok(answer.into_inner()),
            Err(status) => Err(CliError::of_call(
                doing.into(),
                self.agent,
                &self.endpoint,
                status,
            )),
        }
    }
}

/// Implements a call of one service as a method: `context.node(doing, message,
/// async |mut client, request| client.node_stage_volume(request).await)`.
macro_rules! service {
    ($(#[$doc:meta])* $name:ident, $socket:ident, $client:ident) => {
        $(#[$doc])*
        pub async fn $name<Q, A>(
            &self,
            doing: impl Into<String>,
            message: Q,
            call: impl AsyncFnOnce($client<Channel>, Request<Q>) -> Result<Response<A>, Status>,
        ) -> Result<A, CliError> {
            self.$socket
                .call(doing, message, async |channel, request| {
                    call($client::new(channel), request).await
                })
                .await
        }
    };
}

/// The node's and the controller's sockets, and the terminal.
pub struct Context {
    /// uring-csi-node.
    pub node_socket: Socket,
    /// uring-csi-controller.
    pub controller_socket: Socket,
    /// uring-csi-holder.
    pub holder_socket: Socket,
    /// Whether stderr is a terminal, on which a call shows what it waits for.
    pub shows_progress: bool,
    /// The secrets of calls.
    pub secrets: Secrets,
    /// Their directory.
    pub secrets_dir: Option<PathBuf>,
}

impl Context {
    service! {
        /// A call of CSI's Node service.
        node, node_socket, NodeClient
    }
    service! {
        /// A call of the node agent's own service.
        admin, node_socket, NodeAdminClient
    }
    service! {
        /// A call of CSI's Controller service.
        controller, controller_socket, ControllerClient
    }
    service! {
        /// A call of CSI's GroupController service.
        group_controller, controller_socket, GroupControllerClient
    }
    service! {
        /// A call of the controller's own service.
        controller_admin, controller_socket, ControllerAdminClient
    }
    service! {
        /// A call about orphans to the controller.
        orphan_admin, controller_socket, OrphanAdminClient
    }
    service! {
        /// A call of the supervisor of the rbd-nbd daemons.
        holder, holder_socket, HolderClient
    }
    service! {
        /// A call of the node's Identity service.
        node_identity, node_socket, IdentityClient
    }
    service! {
        /// A call of the controller's Identity service.
        controller_identity, controller_socket, IdentityClient
    }

    /// All volumes of the node.
    pub async fn held(&self) -> Result<Vec<HeldVolume>, CliError> {
        let answer = self
            .admin(
                "list the node's volumes",
                ListHeldVolumesRequest {},
                async |mut client, request| client.list_held_volumes(request).await,
            )
            .await?;
        Ok(answer.volumes)
    }

    /// The node agent's readiness, directories and pools.
    pub async fn agent_info(&self) -> Result<GetAgentInfoResponse, CliError> {
        self.admin(
            "ask the node for its id",
            GetAgentInfoRequest {},
            async |mut client, request| client.get_agent_info(request).await,
        )
        .await
    }
}
