//! Several nodes: topology of local volumes, and exclusive use of shared ones.

use testkit::{
    Content, Controller, ControllerSetup, MIB, Node, NodeSetup, Sandbox, Volume, claim, eventually,
    files_below, loops_over, on_node, provisioned, refused, run, story,
};
use tonic::Code::{FailedPrecondition, ResourceExhausted, Unimplemented};
use uring_csi::proto::csi::{
    CreateVolumeRequest, NodeGetInfoRequest, NodeStageVolumeRequest,
    node_client::NodeClient,
    volume_capability::access_mode::Mode::{MultiNodeReaderOnly, SingleNodeReaderOnly},
};

/// A node with a local pool of its own and one that all share.
fn setup(sandbox: &Sandbox, node_id: &'static str) -> NodeSetup {
    for node in ["node-a", "node-b"] {
        sandbox.kubelet(node);
    }
    NodeSetup {
        node_id,
        pools: vec![
            format!("disk={},local", sandbox.pool(node_id).display()),
            format!("main={},shared", sandbox.pool("main").display()),
        ],
        ..NodeSetup::new(sandbox)
    }
}

/// The controller that runs beside a node's agent, for its local pool.
fn beside(sandbox: &Sandbox, name: &'static str, node_id: &str) -> ControllerSetup {
    ControllerSetup {
        name,
        pools: vec![format!("disk={},local", sandbox.pool(node_id).display())],
        args: vec!["--node-id".to_owned(), node_id.to_owned()],
        ..ControllerSetup::new(sandbox)
    }
}

#[test]
fn a_shared_image_is_on_one_node_at_a_time() {
    story(async |sandbox| {
        let a = Node::start_with(sandbox, setup(sandbox, "node-a")).await;
        let b = Node::start_with(sandbox, setup(sandbox, "node-b")).await;
        let controller = Controller::start(sandbox).await;
        let capability = Volume::filesystem("any", "ext4").capability;
        let made = controller
            .create(claim("shared", "main", &capability, 64 * MIB))
            .await
            .unwrap();
        assert!(made.accessible_topology.is_empty(), "every node reaches it");
        let volume = provisioned(&made, &capability);
        let content = Content::new("travels");
        content.write(&a.up(&volume, "pod").await.join("file"));

        refused(b.stage(&volume).await, FailedPrecondition, &["node-a"]);
        assert_eq!(loops_over(&sandbox.image(&volume)).len(), 1);
        refused(
            controller.delete(&volume.handle).await,
            FailedPrecondition,
            &["node-a"],
        );
        assert!(sandbox.image(&volume).exists());

        a.down(&volume, "pod").await;
        content.assert_in(&b.up(&volume, "pod").await.join("file"));
        refused(a.stage(&volume).await, FailedPrecondition, &["node-b"]);
        // A node that dies keeps its volumes until its successor releases them.
        b.kill9().await;
        refused(a.stage(&volume).await, FailedPrecondition, &["node-b"]);
        b.restart().await;
        b.down(&volume, "pod").await;

        controller.delete(&volume.handle).await.unwrap();
        controller.delete(&volume.handle).await.unwrap();
        assert!(!sandbox.image(&volume).exists());
        a.assert_clean().await;
    });
}

#[test]
fn a_refused_stage_keeps_the_claim_of_an_attached_image() {
    story(async |sandbox| {
        let a = Node::start_with(sandbox, setup(sandbox, "node-a")).await;
        let b = Node::start_with(sandbox, setup(sandbox, "node-b")).await;
        let volume = sandbox.volume("shared", "ext4");
        a.up(&volume, "pod").await;
        a.restart_without_records().await;

        let mut reader = volume.clone();
        reader.capability.access_mode.as_mut().unwrap().mode = SingleNodeReaderOnly.into();
        let mut renamed = volume.clone();
        renamed.handle = "another-handle".to_owned();
        let mut readers = renamed.clone();
        readers.capability.access_mode.as_mut().unwrap().mode = MultiNodeReaderOnly.into();
        for (other, word) in [
            (&reader, "writable"),
            (&renamed, "volume shared"),
            (&readers, "volume shared"),
        ] {
            let words = ["/dev/loop", word];
            refused(a.stage(other).await, FailedPrecondition, &words);
            refused(b.stage(&volume).await, FailedPrecondition, &["node-a"]);
        }
        a.down(&volume, "pod").await;
        b.up(&volume, "pod").await;
        b.down(&volume, "pod").await;
        a.assert_clean().await;
    });
}

#[test]
fn a_shared_pool_is_never_used_as_a_local_one() {
    story(async |sandbox| {
        let a = Node::start_with(sandbox, setup(sandbox, "node-a")).await;
        // The default of the node agent is local.
        let careless = NodeSetup {
            pools: vec![format!("main={}", sandbox.pool("main").display())],
            ..setup(sandbox, "node-b")
        };
        let b = Node::start_with(sandbox, careless).await;
        let controller = Controller::start(sandbox).await;
        let capability = Volume::filesystem("any", "ext4").capability;
        let request = claim("shared", "main", &capability, 64 * MIB);
        let made = controller.create(request).await.unwrap();
        let volume = provisioned(&made, &capability);
        a.up(&volume, "pod").await;
        let flag = format!("main={},shared", sandbox.pool("main").display());
        refused(b.stage(&volume).await, FailedPrecondition, &[&flag]);
        a.down(&volume, "pod").await;
        refused(b.stage(&volume).await, FailedPrecondition, &[&flag]);
        controller.delete(&volume.handle).await.unwrap();
        a.assert_clean().await;
    });
}

#[test]
fn a_local_volume_stays_on_its_node() {
    story(async |sandbox| {
        let a = Node::start_with(sandbox, setup(sandbox, "node-a")).await;
        let b = Node::start_with(sandbox, setup(sandbox, "node-b")).await;
        let controller_a =
            Controller::start_with(sandbox, beside(sandbox, "controller-a", "node-a")).await;
        let controller_b =
            Controller::start_with(sandbox, beside(sandbox, "controller-b", "node-b")).await;
        let capability = Volume::filesystem("any", "xfs").capability;
        let request = CreateVolumeRequest {
            accessibility_requirements: Some(on_node("node-a")),
            ..claim("local", "disk", &capability, 320 * MIB)
        };
        refused(
            controller_b.create(request.clone()).await,
            ResourceExhausted,
            &["node-a"],
        );
        let made = controller_a.create(request).await.unwrap();
        let info = a
            .client()
            .node_get_info(NodeGetInfoRequest {})
            .await
            .unwrap()
            .into_inner();
        // External-provisioner calls the controller beside the node.
        let mut beside = NodeClient::new(controller_a.channel());
        let answer = beside.node_get_info(NodeGetInfoRequest {}).await.unwrap();
        assert_eq!(answer.into_inner(), info);
        let stage = beside.node_stage_volume(NodeStageVolumeRequest::default());
        refused(stage.await, Unimplemented, &["node agent"]);
        assert_eq!(
            made.accessible_topology,
            Vec::from_iter(info.accessible_topology)
        );
        let volume = provisioned(&made, &capability);
        let target = a.up(&volume, "pod").await;
        Content::new("local").write(&target.join("file"));
        assert!(b.stage(&volume).await.is_err(), "it is on another node");

        // Growth: the controller leaves it to the node that has the image.
        let (bytes, node_has_a_part) = controller_a
            .expand(&volume.handle, 640 * MIB)
            .await
            .unwrap();
        assert_eq!(
            (u64::try_from(bytes).unwrap(), node_has_a_part),
            (640 * MIB, true)
        );
        let bytes = a.expand(&volume, &target, 640 * MIB).await.unwrap();
        assert_eq!(u64::try_from(bytes).unwrap(), 640 * MIB);

        refused(
            controller_a.delete(&volume.handle).await,
            FailedPrecondition,
            &["node-a"],
        );
        a.down(&volume, "pod").await;
        let (local, rest) = volume.handle.split_once(".disk.").expect("a handle");
        assert!(local.starts_with("vol.local-"), "{local}");
        let alias = format!("vol.shared.disk.{rest}");
        let words = [&alias, "which is local"];
        refused(
            controller_a.delete(&alias).await,
            FailedPrecondition,
            &words,
        );
        let grown = controller_a.expand(&alias, 640 * MIB).await;
        refused(grown, FailedPrecondition, &words);
        // The other node's controller does not know it; this one deletes it.
        eventually("deleted", async || {
            controller_a.delete(&volume.handle).await.ok()
        })
        .await;
        a.assert_clean().await;
    });
}

#[test]
fn a_run_directory_has_one_agent() {
    story(async |sandbox| {
        let a = Node::start_with(sandbox, setup(sandbox, "node-a")).await;
        let volume = sandbox.volume("v", "ext4");
        let target = a.up(&volume, "pod").await;

        let run_dir = sandbox.dir().join("run-node-b");
        std::os::unix::fs::symlink(&a.run_dir, run_dir).unwrap();
        let b = Node::prepare(sandbox, setup(sandbox, "node-b"));
        b.spawn();
        assert!(!b.wait_for_exit().await.success());
        for words in [format!("pid {}", a.pid()), "--run-dir".to_owned()] {
            assert!(b.log().contains(&words), "{words}: {}", b.log());
        }
        assert!(
            !b.log().contains("recovered from its record"),
            "{}",
            b.log()
        );
        a.stats(&volume, &target).await.unwrap();
        a.down(&volume, "pod").await;
        a.assert_clean().await;

        a.kill9().await;
        b.restart().await;
    });
}

#[test]
fn a_claim_is_removed_once_its_pool_is_back() {
    story(async |sandbox| {
        let (real, pool) = (sandbox.pool("real"), sandbox.pool("away"));
        let [real, pool] = [&real, &pool].map(|path| path.to_str().unwrap());
        let mut setup = NodeSetup::new(sandbox);
        setup.pools.push(format!("away={pool},shared"));
        let node = Node::start_with(sandbox, setup).await;
        for lives in 1..=2 {
            run(&["mount", "--bind", real, pool]);
            let volume = sandbox.volume_in("away", "v", "ext4", 64 * MIB);
            node.up(&volume, "pod").await;
            let claims = sandbox.pool("real").join(".uring-csi/claims");
            assert_eq!(files_below(&claims).len(), 1);
            // The attached images keep it alive.
            run(&["umount", "--lazy", pool]);
            node.down(&volume, "pod").await;
            if lives == 2 {
                node.kill9().await;
                node.restart().await;
            }
            assert_eq!(files_below(&claims).len(), 1);
            run(&["mount", "--bind", real, pool]);
            eventually("the claim is given back", async || {
                files_below(&claims).is_empty().then_some(())
            })
            .await;
            run(&["umount", "--lazy", pool]);
        }
        node.assert_clean().await;
    });
}
