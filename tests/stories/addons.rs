//! csi-addons, called on its own socket as its sidecar calls it.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

use testkit::{
    Content, Controller, ControllerSetup, MIB, Node, NodeSetup, Sandbox, Volume,
    crash_at_each_step, eventually, file_systems_to_crash, loops_over, refused, run, story,
};
use tonic::{
    Code::{InvalidArgument, NotFound, Unimplemented},
    Status,
    transport::Channel,
};
use uring_csi::{
    internals::Endpoint,
    proto::addons::{
        identity::{
            GetCapabilitiesRequest, GetIdentityRequest, ProbeRequest,
            capability::{Type, reclaim_space, service},
            identity_client::IdentityClient,
        },
        reclaimspace::{
            NodeReclaimSpaceRequest, NodeReclaimSpaceResponse, StorageConsumption,
            reclaim_space_node_client::ReclaimSpaceNodeClient,
        },
    },
    proto::admin::{ListHeldVolumesRequest, node_admin_client::NodeAdminClient},
};

/// The socket for csi-addons, and a connection to it.
pub struct Addons(Endpoint);

impl Addons {
    pub fn new(sandbox: &Sandbox) -> Self {
        let path = sandbox.dir().join("csi-addons.sock");
        Self(path.display().to_string().parse().expect("a socket"))
    }

    pub fn args(&self) -> [String; 2] {
        ["--csi-addons-endpoint".to_owned(), self.0.to_string()]
    }

    pub fn channel(&self) -> Channel {
        self.0.channel()
    }

    pub async fn capabilities(&self) -> Vec<Type> {
        let mut client = IdentityClient::new(self.channel());
        let answer = client.get_capabilities(GetCapabilitiesRequest {}).await;
        let all = answer.unwrap().into_inner().capabilities;
        all.into_iter().map(|one| one.r#type.unwrap()).collect()
    }

    pub async fn reclaim(
        &self,
        node: &Node,
        volume: &Volume,
    ) -> Result<NodeReclaimSpaceResponse, Status> {
        self.send_reclaim(NodeReclaimSpaceRequest {
            volume_id: volume.handle.clone(),
            staging_target_path: node.staging(volume).display().to_string(),
            volume_capability: Some(volume.capability.clone()),
            ..Default::default()
        })
        .await
    }

    async fn send_reclaim(
        &self,
        message: NodeReclaimSpaceRequest,
    ) -> Result<NodeReclaimSpaceResponse, Status> {
        let mut client = ReclaimSpaceNodeClient::new(self.channel());
        Ok(client.node_reclaim_space(message).await?.into_inner())
    }
}

async fn node_with_addons(sandbox: &Sandbox) -> (Node, Addons) {
    let addons = Addons::new(sandbox);
    let mut setup = NodeSetup::new(sandbox);
    setup.args.extend(addons.args());
    (Node::start_with(sandbox, setup).await, addons)
}

/// Bytes that a file takes on its disk.
fn allocated(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn each_agent_announces_what_it_serves() {
    story(async |sandbox| {
        let (node, addons) = node_with_addons(sandbox).await;
        let mut client = IdentityClient::new(addons.channel());
        let identity = client.get_identity(GetIdentityRequest {}).await.unwrap();
        assert_eq!(identity.into_inner().name, "block.uring-csi.dev");
        let ready = client.probe(ProbeRequest {}).await.unwrap().into_inner();
        assert_eq!(ready.ready, Some(true));
        let socket = fs::metadata(sandbox.dir().join("csi-addons.sock")).unwrap();
        assert_eq!(socket.mode() & 0o777, 0o600);
        let all = addons.capabilities().await;
        let announces = |wanted: fn(&Type) -> bool| all.iter().any(wanted);
        assert!(announces(
            |one| matches!(one, Type::Service(it) if it.r#type() == service::Type::NodeService)
        ));
        assert!(announces(
            |one| matches!(one, Type::ReclaimSpace(it) if it.r#type() == reclaim_space::Type::Online)
        ));

        // Another agent must not take the socket.
        let mut setup = ControllerSetup::new(sandbox);
        setup.args.extend(addons.args());
        let refused = Controller::prepare(sandbox, setup);
        refused.spawn();
        assert!(!refused.wait_for_exit().await.success());
        refused.wait_for_log("csi-addons.sock").await;
        // A killed one's is taken over.
        node.kill9().await;
        refused.start().await;
        let all = addons.capabilities().await;
        assert!(all.iter().any(|one| matches!(one,
            Type::Service(it) if it.r#type() == service::Type::ControllerService)));
        assert!(!all.iter().any(|one| matches!(one,
            Type::ReclaimSpace(it) if it.r#type() == reclaim_space::Type::Online)));
        refused.terminate();
        refused.wait_for_exit().await;
        assert!(!sandbox.dir().join("csi-addons.sock").exists());
    });
}

#[test]
fn ext4_returns_unused_space() {
    returns_unused_space("ext4", 128 * MIB);
}

#[test]
fn xfs_returns_unused_space() {
    returns_unused_space("xfs", 320 * MIB);
}

#[test]
fn btrfs_returns_unused_space() {
    returns_unused_space("btrfs", 320 * MIB);
}

fn returns_unused_space(kind: &'static str, bytes: u64) {
    story(async |sandbox| {
        let (node, addons) = node_with_addons(sandbox).await;
        let volume = sandbox.volume_in("main", "v", kind, bytes);
        let target = node.up(&volume, "pod").await;
        let image = sandbox.image(&volume);
        let content = Content::new("kept");
        content.write(&target.join("kept"));
        fs::write(target.join("large"), vec![7; 64 << 20]).unwrap();
        let sync = || run(&["sync", "-f", target.to_str().unwrap()]);
        sync();
        let full = allocated(&image);
        fs::remove_file(target.join("large")).unwrap();
        sync();
        let both = tokio::join!(
            addons.reclaim(&node, &volume),
            addons.reclaim(&node, &volume)
        );
        both.0.unwrap();
        both.1.unwrap();
        // XFS frees the space of a deleted file, and discards it, in the background.
        let told =
            |usage: Option<StorageConsumption>| u64::try_from(usage.unwrap().usage_bytes).unwrap();
        let before = eventually("the image shrinks", async || {
            let usage = addons.reclaim(&node, &volume).await.unwrap();
            (told(usage.post_usage) + 48 * MIB < full).then(|| told(usage.pre_usage))
        })
        .await;
        assert!(before > 0);
        assert!(allocated(&image) + 48 * MIB < full);
        content.assert_in(&target.join("kept"));
        addons.reclaim(&node, &volume).await.unwrap();
        node.down(&volume, "pod").await;
        refused(addons.reclaim(&node, &volume).await, NotFound, &["staged"]);
        node.assert_clean().await;
    });
}

#[test]
fn only_a_mounted_volume_at_its_own_path_is_trimmed() {
    story(async |sandbox| {
        let (node, addons) = node_with_addons(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let other = sandbox.volume("other", "ext4");
        let raw = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let target = node.up(&volume, "pod").await;
        node.up(&other, "pod").await;
        node.up(&raw, "pod").await;
        let message = || NodeReclaimSpaceRequest {
            volume_id: volume.handle.clone(),
            ..Default::default()
        };
        let send = async |message| addons.send_reclaim(message).await;
        refused(
            send(message()).await,
            InvalidArgument,
            &["staging_target_path"],
        );
        let nameless = NodeReclaimSpaceRequest::default();
        refused(send(nameless).await, InvalidArgument, &["volume_id"]);
        let relative = NodeReclaimSpaceRequest {
            volume_path: "a".to_owned(),
            ..message()
        };
        refused(send(relative).await, InvalidArgument, &["volume_path"]);
        let elsewhere = NodeReclaimSpaceRequest {
            staging_target_path: node.staging(&other).display().to_string(),
            ..message()
        };
        refused(send(elsewhere).await, NotFound, &["not at"]);
        let published = NodeReclaimSpaceRequest {
            volume_path: target.display().to_string(),
            ..message()
        };
        send(published).await.unwrap();
        refused(addons.reclaim(&node, &raw).await, Unimplemented, &["raw"]);
        for volume in [&volume, &other, &raw] {
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

async fn until_it_trims(node: &Node) {
    eventually("a volume is trimmed", async || {
        let mut admin = NodeAdminClient::new(node.channel());
        let listed = admin.list_held_volumes(ListHeldVolumesRequest {}).await;
        let mut volumes = listed.ok()?.into_inner().volumes.into_iter();
        volumes.any(|one| one.step == "trim").then_some(())
    })
    .await;
}

#[test]
fn a_pod_starts_and_ends_while_its_volume_is_trimmed() {
    story(async |sandbox| {
        let (node, addons) = node_with_addons(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        node.up(&volume, "pod").await;
        let held = node.hold("trim", &volume.handle);
        let trims = addons.reclaim(&node, &volume);
        let pods = async {
            until_it_trims(&node).await;
            node.publish(&volume, "second").await.unwrap();
            node.unpublish(&volume, "second").await.unwrap();
            node.unpublish(&volume, "pod").await.unwrap();
            let busy = node.unstage(&volume).await;
            refused(busy, tonic::Code::Aborted, &["NodeReclaimSpace", "trim"]);
            drop(held);
        };
        let (trimmed, ()) = tokio::join!(trims, pods);
        trimmed.unwrap();
        node.unstage(&volume).await.unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn the_agent_may_be_killed_at_each_step_of_a_reclaim() {
    story(async |sandbox| {
        let (node, addons) = node_with_addons(sandbox).await;
        for kind in file_systems_to_crash() {
            let volume = sandbox.volume(kind, kind);
            let content = Content::new(kind);
            content.put(&volume, &node.up(&volume, "pod").await);
            node.down(&volume, "pod").await;
            let up = async || {
                node.stage(&volume).await?;
                node.publish(&volume, "pod").await
            };
            let down = async || {
                node.unpublish(&volume, "pod").await?;
                node.unstage(&volume).await
            };
            let reclaim = async || addons.reclaim(&node, &volume).await.map(drop);
            crash_at_each_step(&node, 12, async |crashing| {
                crashing.complete("up", up, async || {}).await;
                crashing
                    .complete("reclaimed", reclaim, async || {
                        node.retry_until_ok("down", down).await;
                        node.retry_until_ok("up", up).await;
                    })
                    .await;
                content.assert_kept(&volume, &node.target(&volume, "pod"));
                crashing.complete("down", down, async || {}).await;
                assert!(loops_over(&sandbox.image(&volume)).is_empty());
                crashing.stop_crashing().await;
            })
            .await;
        }
        node.assert_clean().await;
    });
}
