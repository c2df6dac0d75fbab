//! A controller that fences nodes, whose clients are processes with librbd here; for krbd's
//! client see `rbd::fenced`.

use std::time::Duration;

use testkit::{
    Controller, MIB, Mode, Rng, Sandbox, Volume, eventually, provisioned, refused, story,
};
use tonic::Code::{FailedPrecondition, InvalidArgument, NotFound, Unavailable, Unimplemented};
use uring_csi::proto::csi::ControllerPublishVolumeRequest;

use super::{Ceph, Rpc, capabilities};
use crate::metrics::Scrape;

/// A controller that fences after a second, with these further arguments, and a volume.
async fn fencing(sandbox: &Sandbox, ceph: &Ceph, args: Vec<String>) -> (Controller, Volume) {
    let mut setup = ceph.setup(sandbox);
    setup.args.push("--fence-after=1".to_owned());
    setup.args.extend(args);
    let controller = Controller::start_with(sandbox, setup).await;
    let made = controller.create(ceph.claim("v", 64 * MIB)).await.unwrap();
    let volume = provisioned(&made, &Volume::block("any").capability);
    (controller, volume)
}

impl Ceph {
    /// The address of the one client that has a volume's image open.
    fn watcher(&self, volume: &Volume) -> String {
        let image = format!("{}/{}", self.pool, volume.context["imageName"]);
        let status = self.cluster.rbd(&["status", "--format", "json", &image]);
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        let address = status["watchers"][0]["address"].as_str();
        address.expect("a watcher").to_owned()
    }

    /// Registers this client for a node.
    fn enter_client(&self, volume: &Volume, node: &str, address: &str) {
        let uuid = &volume.handle[volume.handle.len() - 36..];
        let client = serde_json::json!({
            "address": address, "boot_id": "boot", "through": "own-krbd",
        });
        let [object, key] = [
            format!("csi.volume.{uuid}"),
            format!("uring-csi.node.{node}"),
        ];
        self.rados(&["setomapval", &object, &key, &client.to_string()]);
    }

    fn is_blocklisted(&self, address: &str) -> bool {
        self.cluster
            .ceph(&["osd", "blocklist", "ls"])
            .contains(address)
    }
}

#[test]
fn fencing_is_off_by_default() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let controller = Controller::start_with(sandbox, ceph.setup(sandbox)).await;
        let can = capabilities(&controller).await;
        assert!(!can.contains(&Rpc::PublishUnpublishVolume), "{can:?}");
        let made = controller.create(ceph.claim("v", 64 * MIB)).await.unwrap();
        let volume = provisioned(&made, &Volume::block("any").capability);
        let not = controller.publish(&volume, "node-a").await;
        refused(not, Unimplemented, &["--fence-after"]);
        let _user = ceph.user_of(&volume.context["imageName"]);
        let not = controller.unpublish(&volume, "node-a").await;
        refused(not, Unimplemented, &["--fence-after"]);
    });
}

#[test]
fn only_registered_clients_are_fenced() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let scrape = Scrape::new();
        let (controller, volume) = fencing(sandbox, &ceph, vec![scrape.arg()]).await;
        let can = capabilities(&controller).await;
        assert!(can.contains(&Rpc::PublishUnpublishVolume), "{can:?}");
        let message = ControllerPublishVolumeRequest {
            volume_id: volume.handle.clone(),
            node_id: "node-a".to_owned(),
            ..Default::default()
        };
        let bare = controller.client().controller_publish_volume(message).await;
        refused(bare, InvalidArgument, &["volume_capability"]);
        let absent = Volume {
            handle: format!("{}{:012}", &volume.handle[..volume.handle.len() - 12], 0),
            ..volume.clone()
        };
        refused(controller.publish(&absent, "node-a").await, NotFound, &[]);
        controller.unpublish(&absent, "node-a").await.unwrap();
        // A static volume's handle names no pool.
        let fixed = Volume {
            handle: "image".to_owned(),
            ..volume.clone()
        };
        assert!(
            controller
                .publish(&fixed, "node-a")
                .await
                .unwrap()
                .is_empty()
        );
        controller.unpublish(&fixed, "node-a").await.unwrap();
        let many = volume.clone().mode(Mode::MultiNodeMultiWriter);
        assert!(
            controller
                .publish(&many, "node-a")
                .await
                .unwrap()
                .is_empty()
        );

        let context = controller.publish(&volume, "node-a").await.unwrap();
        assert_eq!(context["fencing"], "true");
        let user = ceph.user_of(&volume.context["imageName"]);
        let address = ceph.watcher(&volume);
        let unknown = controller.unpublish(&volume, "node-a").await;
        refused(unknown, FailedPrecondition, &["node-a", &address]);
        assert!(!ceph.is_blocklisted(&address));
        let fences = "uring_csi_ceph_fences_total";
        assert_eq!(scrape.value(fences), Some(0.0));
        ceph.enter_client(&volume, "node-a", &address);
        controller.unpublish(&volume, "node-a").await.unwrap();
        assert!(ceph.is_blocklisted(&address));
        assert_eq!(scrape.value(fences), Some(1.0));
        controller.wait_for_log("fencing a node's client").await;
        controller.delete(&volume.handle).await.unwrap();
        drop(user);
    });
}

#[test]
fn a_volume_is_published_to_known_nodes_alone() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let file = sandbox.dir().join("nodes");
        std::fs::write(&file, "node-a\n\n node-b \n").unwrap();
        let args = vec![format!("--known-nodes={}", file.display())];
        let (controller, volume) = fencing(sandbox, &ceph, args).await;
        let publish = async |node: &str| controller.publish(&volume, node).await;
        for absent in ["node", "node-c"] {
            refused(publish(absent).await, NotFound, &["--known-nodes"]);
            controller.unpublish(&volume, absent).await.unwrap();
        }
        publish("node-b").await.unwrap();
        // A node that left is unpublished like any other.
        std::fs::write(&file, "node-c\n").unwrap();
        refused(publish("node-b").await, NotFound, &["node-b"]);
        controller.unpublish(&volume, "node-b").await.unwrap();
        publish("node-c").await.unwrap();
        std::fs::remove_file(&file).unwrap();
        refused(publish("node-c").await, Unavailable, &["--known-nodes"]);
    });
}

#[test]
fn an_interrupted_fence_is_finished() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let (controller, volume) = fencing(sandbox, &ceph, Vec::new()).await;
        let mut rng = Rng::new();
        for _ in 0..3 {
            controller.publish(&volume, "node-a").await.unwrap();
            let user = ceph.user_of(&volume.context["imageName"]);
            let address = ceph.watcher(&volume);
            ceph.enter_client(&volume, "node-a", &address);
            let unpublish = async || controller.unpublish(&volume, "node-a").await;
            let soon = Duration::from_millis(rng.below(1500) as u64);
            let _ = tokio::time::timeout(soon, unpublish()).await;
            controller.kill9().await;
            controller.start().await;
            eventually("unpublished", async || unpublish().await.ok()).await;
            assert!(ceph.is_blocklisted(&address));
            drop(user);
        }
    });
}
