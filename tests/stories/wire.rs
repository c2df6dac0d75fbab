//! The sockets: identity and capabilities, start and end of service.

use std::{collections::BTreeSet, fs, os::unix::fs::PermissionsExt as _};

use futures_util::StreamExt as _;
use testkit::{Agent, Controller, Node, NodeSetup, eventually, loops_over, story};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};
use uring_csi::proto::csi::{
    ControllerGetCapabilitiesRequest, GetPluginCapabilitiesRequest, GetPluginInfoRequest,
    NodeGetCapabilitiesRequest, NodeGetInfoRequest,
    controller_service_capability::{self, rpc::Type as ControllerRpc},
    identity_client::IdentityClient,
    node_service_capability::{self, rpc::Type as NodeRpc},
    plugin_capability::{self, service::Type as Service},
};

/// The services that an agent's reflection lists.
async fn services(agent: &Agent) -> BTreeSet<String> {
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let answer = ServerReflectionClient::new(agent.channel())
        .server_reflection_info(tokio_stream::once(request))
        .await
        .expect("reflection")
        .into_inner()
        .next()
        .await
        .expect("an answer")
        .expect("services");
    match answer.message_response {
        Some(MessageResponse::ListServicesResponse(list)) => list
            .service
            .into_iter()
            .map(|service| service.name)
            .collect(),
        other => panic!("{other:?}"),
    }
}

/// The node's announced capabilities.
async fn capabilities(node: &Node) -> Vec<NodeRpc> {
    let can = node
        .client()
        .node_get_capabilities(NodeGetCapabilitiesRequest {})
        .await
        .unwrap()
        .into_inner();
    can.capabilities
        .into_iter()
        .filter_map(|capability| match capability.r#type? {
            node_service_capability::Type::Rpc(rpc) => Some(rpc.r#type()),
        })
        .collect()
}

#[test]
fn optional_capabilities_are_announced_on_request() {
    story(async |sandbox| {
        let optional = [NodeRpc::VolumeMountGroup, NodeRpc::GetVolumeHealth];
        let plain = Node::start(sandbox).await;
        let can = capabilities(&plain).await;
        assert!(!optional.iter().any(|one| can.contains(one)), "{can:?}");
        plain.terminate();
        plain.wait_for_exit().await;
        let setup = NodeSetup::new(sandbox)
            .arg("--volume-mount-group")
            .arg("--alpha-capabilities");
        let node = Node::start_with(sandbox, setup).await;
        let can = capabilities(&node).await;
        assert!(optional.iter().all(|one| can.contains(one)), "{can:?}");
    });
}

#[test]
fn the_node_reports_its_identity_and_capabilities() {
    story(async |sandbox| {
        // As the downward API writes it.
        let labels = sandbox.dir().join("labels");
        let text = "app=\"agent\"\ntopology.kubernetes.io/region=\"b\"\n";
        std::fs::write(&labels, text).unwrap();
        let setup = NodeSetup::new(sandbox)
            .arg("--topology=zone=a")
            .arg(&format!("--node-labels={}", labels.display()))
            .arg("--domain-labels=topology.kubernetes.io/region");
        let node = Node::start_with(sandbox, setup).await;
        let info = IdentityClient::new(node.channel())
            .get_plugin_info(GetPluginInfoRequest {})
            .await
            .unwrap()
            .into_inner();
        assert_eq!(info.name, "block.uring-csi.dev");
        assert_eq!(info.vendor_version, env!("CARGO_PKG_VERSION"));

        let can = capabilities(&node).await;
        for expected in [
            NodeRpc::StageUnstageVolume,
            NodeRpc::GetVolumeStats,
            // Also without CAP_SYS_RESOURCE, for which ext4's growth alone is refused:
            // kubelet starts no pod whose claim has grown on a node that does not announce it.
            NodeRpc::ExpandVolume,
            NodeRpc::SingleNodeMultiWriter,
        ] {
            assert!(can.contains(&expected), "{expected:?} is not in {can:?}");
        }

        let info = node
            .client()
            .node_get_info(NodeGetInfoRequest {})
            .await
            .unwrap()
            .into_inner();
        assert_eq!(info.node_id, "node-a");
        let here = info.accessible_topology.expect("a topology").segments;
        assert_eq!(here["topology.block.uring-csi.dev/node"], "node-a");
        assert_eq!(here["topology.block.uring-csi.dev/zone"], "a");
        assert_eq!(here["topology.block.uring-csi.dev/region"], "b");

        let services = services(&node).await;
        for expected in ["csi.v1.Identity", "csi.v1.Node", "uring_csi.v1.NodeAdmin"] {
            assert!(services.contains(expected), "{expected}: {services:?}");
        }
        node.assert_clean().await;
    });
}

#[test]
fn the_controller_reports_its_identity_and_capabilities() {
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        let can = IdentityClient::new(controller.channel())
            .get_plugin_capabilities(GetPluginCapabilitiesRequest {})
            .await
            .unwrap()
            .into_inner();
        let services_of: Vec<_> = can
            .capabilities
            .iter()
            .filter_map(|capability| match capability.r#type.as_ref()? {
                plugin_capability::Type::Service(service) => Some(service.r#type()),
                plugin_capability::Type::VolumeExpansion(_) => None,
            })
            .collect();
        assert!(services_of.contains(&Service::ControllerService));
        assert!(services_of.contains(&Service::VolumeAccessibilityConstraints));

        let can = controller
            .client()
            .controller_get_capabilities(ControllerGetCapabilitiesRequest {})
            .await
            .unwrap()
            .into_inner();
        let can: Vec<_> = can
            .capabilities
            .into_iter()
            .filter_map(|capability| match capability.r#type? {
                controller_service_capability::Type::Rpc(rpc) => Some(rpc.r#type()),
            })
            .collect();
        for expected in [
            ControllerRpc::CreateDeleteVolume,
            ControllerRpc::ListVolumes,
            ControllerRpc::GetCapacity,
            ControllerRpc::CreateDeleteSnapshot,
            ControllerRpc::ListSnapshots,
            ControllerRpc::CloneVolume,
            ControllerRpc::ExpandVolume,
            ControllerRpc::SingleNodeMultiWriter,
        ] {
            assert!(can.contains(&expected), "{expected:?} is not in {can:?}");
        }
        let services = services(&controller).await;
        for expected in ["csi.v1.Identity", "csi.v1.Controller"] {
            assert!(services.contains(expected), "{expected}: {services:?}");
        }
    });
}

#[test]
fn the_socket_has_one_owner() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let mode = fs::metadata(node.socket()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        // A second agent on the same socket exits with an error.
        let second = Node::prepare(sandbox, NodeSetup::new(sandbox));
        second.spawn();
        assert!(!second.wait_for_exit().await.success());
        assert!(second.log().contains("live process"), "{}", second.log());
        assert_eq!(node.probe().await, Some(true));

        // A killed one leaves its socket behind; the next replaces it.
        node.kill9().await;
        assert!(node.socket().exists());
        node.restart().await;
        node.assert_clean().await;
    });
}

#[test]
fn an_endpoint_that_is_no_unix_socket_is_refused() {
    story(async |sandbox| {
        let kubelet = sandbox.kubelet("node-a");
        for (program, endpoint) in [
            ("uring-csi-node", "tcp://127.0.0.1:1"),
            ("uring-csi-controller", "csi.sock"),
        ] {
            let kubelet = format!("--kubelet-dir={}", kubelet.display());
            let pool = format!("--pool=main={},shared", sandbox.pool("main").display());
            let path = testkit::program(program).display().to_string();
            let mut command = vec![path.as_str(), "--endpoint", endpoint, &pool];
            if program.ends_with("node") {
                command.extend(["--node-id=n", &kubelet]);
            }
            let said = testkit::run_err(&command).unwrap_err();
            assert!(said.contains("unix:///path/to/socket"), "{said}");
        }
    });
}

#[test]
fn sigterm_finishes_running_calls_and_accepts_no_new_ones() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("last", "ext4");
        let (staged, ()) = tokio::join!(node.stage(&volume), async {
            eventually("the stage is under way", async || {
                (!loops_over(&sandbox.image(&volume)).is_empty()).then_some(())
            })
            .await;
            node.terminate();
        });
        staged.expect("what runs is finished");
        assert!(node.wait_for_exit().await.success());
        assert!(!node.socket().exists(), "nothing new can come in");

        // The volume stays staged: pods outlive their node's agent.
        assert_eq!(loops_over(&sandbox.image(&volume)).len(), 1);
        node.restart().await;
        node.stage(&volume).await.expect("staged already");
        node.unstage(&volume).await.expect("unstaged");
        node.assert_clean().await;
    });
}
