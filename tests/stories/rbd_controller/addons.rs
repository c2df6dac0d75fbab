//! csi-addons' calls on images and on the cluster.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
};

use testkit::{
    Controller, MIB, Node, NodeSetup, Sandbox, TestCluster, refused, run, run_err, story,
};
use tonic::{
    Code::{InvalidArgument, NotFound, Unimplemented},
    Status,
};
use uring_csi::proto::addons::{
    fence::{
        Cidr, FenceClusterNetworkRequest, GetFenceClientsRequest, ListClusterFenceRequest,
        UnfenceClusterNetworkRequest, fence_controller_client::FenceControllerClient,
    },
    identity::capability::{Type, network_fence, reclaim_space},
    reclaimspace::{
        ControllerReclaimSpaceRequest,
        reclaim_space_controller_client::ReclaimSpaceControllerClient,
    },
};

use super::{CEPH, Ceph};
use crate::addons::Addons;

pub async fn controller_with_addons(sandbox: &Sandbox, ceph: &Ceph) -> (Controller, Addons) {
    let addons = Addons::new(sandbox);
    let mut setup = ceph.setup(sandbox);
    setup.args.extend(addons.args());
    (Controller::start_with(sandbox, setup).await, addons)
}

async fn reclaim(addons: &Addons, controller: &Controller, handle: &str) -> Result<(), Status> {
    let message = ControllerReclaimSpaceRequest {
        volume_id: handle.to_owned(),
        secrets: controller.secrets.clone(),
        ..Default::default()
    };
    let mut client = ReclaimSpaceControllerClient::new(addons.channel());
    client.controller_reclaim_space(message).await.map(drop)
}

impl Ceph {
    /// The objects of an image's data.
    fn data_objects(&self, image: &str) -> Vec<String> {
        let info = self.info(&format!("{}/{image}", self.pool));
        let prefix = info["block_name_prefix"].as_str().expect("a prefix");
        let all = self.rados(&["ls"]);
        let its = all.lines().filter(|name| name.starts_with(prefix));
        its.map(str::to_owned).collect()
    }

    /// Fills objects of an image with zeros.
    fn zero_objects(&self, sandbox: &Sandbox, image: &str, count: usize) {
        let zeros = sandbox.dir().join("zeros");
        fs::write(&zeros, vec![0; 4 << 20]).expect("a file");
        for object in self.data_objects(image).iter().take(count) {
            self.rados(&["put", object, zeros.to_str().expect("a path")]);
        }
    }

    /// The host part of the address that this machine's clients have in the cluster.
    fn host_of_clients(&self) -> String {
        let spec = format!("{}/used", self.pool);
        self.cluster.rbd(&["create", "--size", "1M", &spec]);
        let user = self.user_of("used");
        let status = self.cluster.rbd(&["status", "--format", "json", &spec]);
        drop(user);
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        let address = status["watchers"][0]["address"].as_str();
        let host = address.and_then(|address| address.split(':').next());
        host.expect("a watcher").to_owned()
    }
}

#[test]
fn an_unused_image_is_sparsified() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let (controller, addons) = controller_with_addons(sandbox, &ceph).await;
        let announced = addons.capabilities().await;
        assert!(announced.iter().any(|one| matches!(one,
            Type::ReclaimSpace(it) if it.r#type() == reclaim_space::Type::Offline)));
        let made = controller.create(ceph.claim("v", 64 * MIB)).await.unwrap();
        let image = made.volume_context["imageName"].clone();
        let spec = format!("{}/{image}", ceph.pool);
        ceph.cluster.rbd(&[
            "bench",
            "--io-type",
            "write",
            "--io-size",
            "4M",
            "--io-threads",
            "1",
            "--io-total",
            "32M",
            "--io-pattern",
            "seq",
            &spec,
        ]);
        assert_eq!(ceph.data_objects(&image).len(), 8);
        ceph.zero_objects(sandbox, &image, 6);
        let user = ceph.user_of(&image);
        reclaim(&addons, &controller, &made.volume_id)
            .await
            .unwrap();
        assert_eq!(ceph.data_objects(&image).len(), 8, "a client has it open");
        drop(user);
        reclaim(&addons, &controller, &made.volume_id)
            .await
            .unwrap();
        assert_eq!(ceph.data_objects(&image).len(), 2);
        reclaim(&addons, &controller, &made.volume_id)
            .await
            .unwrap();

        controller.delete(&made.volume_id).await.unwrap();
        let gone = reclaim(&addons, &controller, &made.volume_id).await;
        refused(gone, NotFound, &[]);
        let nameless = reclaim(&addons, &controller, "").await;
        refused(nameless, InvalidArgument, &["volume_id"]);
    });
}

#[test]
fn a_fenced_network_cannot_write() {
    story(async |sandbox| {
        let Some(cluster) = TestCluster::own() else {
            return;
        };
        let ceph = Ceph::over(sandbox, cluster);
        let (_controller, addons) = controller_with_addons(sandbox, &ceph).await;
        let announced = addons.capabilities().await;
        assert!(announced.iter().any(|one| matches!(one,
            Type::NetworkFence(it) if it.r#type() == network_fence::Type::NetworkFence)));
        let parameters = HashMap::from([("clusterID".to_owned(), CEPH.to_owned())]);
        let client = || FenceControllerClient::new(addons.channel());
        let fence = |cidrs: &[&str]| FenceClusterNetworkRequest {
            parameters: parameters.clone(),
            secrets: ceph.secrets(),
            cidrs: cidrs
                .iter()
                .map(|one| Cidr {
                    cidr: (*one).to_owned(),
                })
                .collect(),
        };
        let bad = client().fence_cluster_network(fence(&[])).await;
        refused(bad, InvalidArgument, &["cidrs"]);
        let bad = client()
            .fence_cluster_network(fence(&["10.0.0.0/24", "x"]))
            .await;
        refused(bad, InvalidArgument, &["cidrs[1].cidr"]);
        let mut nowhere = fence(&["10.0.0.0/24"]);
        nowhere.parameters.clear();
        let bad = client().fence_cluster_network(nowhere).await;
        refused(bad, InvalidArgument, &["parameters.clusterID"]);
        let listed = async || {
            let message = ListClusterFenceRequest {
                parameters: parameters.clone(),
                secrets: ceph.secrets(),
            };
            let answer = client().list_cluster_fence(message).await.unwrap();
            let cidrs = answer.into_inner().cidrs.into_iter();
            cidrs.map(|one| one.cidr).collect::<BTreeSet<_>>()
        };
        assert!(listed().await.is_empty());

        // The address of this machine's clients, and so of this one.
        let host = ceph.host_of_clients();
        let networks = [format!("{host}/32"), "203.0.113.0/24".to_owned()];
        let networks: Vec<_> = networks.iter().map(String::as_str).collect();
        for _ in 0..2 {
            client()
                .fence_cluster_network(fence(&networks))
                .await
                .unwrap();
        }
        assert!(listed().await.iter().eq(&networks));
        let conf = ceph.cluster.dir().join("ceph.conf");
        let write = ["timeout", "60", "rados", "-c", conf.to_str().unwrap()];
        let write = [&write[..], &["--pool", &ceph.pool, "create", "other"]].concat();
        let refused_by = run_err(&write).unwrap_err();
        assert!(refused_by.contains("shutdown"), "{refused_by}");
        let unfence = || {
            let FenceClusterNetworkRequest {
                parameters,
                secrets,
                cidrs,
            } = fence(&networks);
            UnfenceClusterNetworkRequest {
                parameters,
                secrets,
                cidrs,
            }
        };
        for _ in 0..2 {
            client().unfence_cluster_network(unfence()).await.unwrap();
        }
        assert!(listed().await.is_empty());
        run(&write);
        let clients = client()
            .get_fence_clients(GetFenceClientsRequest::default())
            .await;
        refused(clients, Unimplemented, &["node"]);
    });
}

#[test]
fn a_node_names_the_client_by_which_it_would_be_fenced() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let addons = Addons::new(sandbox);
        let mut setup = NodeSetup::new(sandbox);
        setup.args.extend(addons.args());
        setup.args.push("--ceph-config".to_owned());
        setup.args.push(ceph.config.display().to_string());
        let _node = Node::start_with(sandbox, setup).await;
        let announced = addons.capabilities().await;
        assert!(announced.iter().any(|one| matches!(one,
            Type::NetworkFence(it) if it.r#type() == network_fence::Type::GetClientsToFence)));
        let ask = async |parameters: &[(&str, &str)]| {
            let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
            let message = GetFenceClientsRequest {
                parameters: parameters.iter().map(own).collect(),
                secrets: ceph.secrets(),
            };
            let mut client = FenceControllerClient::new(addons.channel());
            client.get_fence_clients(message).await
        };
        refused(ask(&[]).await, InvalidArgument, &["parameters.clusterID"]);
        refused(
            ask(&[("clusterID", "none")]).await,
            InvalidArgument,
            &["none"],
        );
        let found = ask(&[("clusterID", CEPH)]).await.unwrap().into_inner();
        let cidr = format!("{}/32", ceph.host_of_clients());
        assert_eq!(found.clients[0].addresses[0].cidr, cidr);
        assert_eq!(found.clients[0].id, ceph.cluster.fsid);
    });
}
