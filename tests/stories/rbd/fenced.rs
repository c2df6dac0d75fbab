//! A lost node that keeps its volume attached: its writes do not reach the image any more,
//! and the node works again once it is back. krbd belongs to the machine, so the second node
//! uses rbd-nbd, without krbd's devices; so does krbd's client, so each story has a cluster
//! of its own.

mod rbd_nbd;

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::Path,
};

use testkit::{
    Ceph, Content, Controller, ControllerSetup, KINDS, MIB, Machine, Node, NodeSetup, Sandbox,
    Supervisor, Volume, claim, eventually, own_cluster_story, provisioned, rbds_over, refused, run,
};
use tonic::Code::Unavailable;

struct Fencing<'a> {
    ceph: &'a Ceph,
    pool: String,
    controller: Controller,
    node: Node,
}

impl<'a> Fencing<'a> {
    async fn new(sandbox: &Sandbox, ceph: &'a Ceph) -> Self {
        let mut setup = ControllerSetup::new(sandbox);
        setup.pools.clear();
        let config = ceph.config().display().to_string();
        let args = ["--ceph-config", &config, "--fence-after", "1"];
        setup.args = args.map(str::to_owned).to_vec();
        setup.secrets = ceph.secrets();
        Self {
            ceph,
            pool: ceph.cluster.fresh_pool(),
            controller: Controller::start_with(sandbox, setup).await,
            node: ceph.node(sandbox).await,
        }
    }

    async fn volume(&self, name: &str, kind: &str) -> Volume {
        let requested = match kind {
            "block" => Volume::block(name),
            kind => Volume::filesystem(name, kind),
        };
        let known = KINDS.iter().find(|(known, _)| *known == kind);
        let bytes = known.expect("a kind").1;
        let mut request = claim(name, &self.pool, &requested.capability, bytes);
        let parameters = [
            ("clusterID", self.ceph.cluster_id.clone()),
            ("imageFeatures", "layering".to_owned()),
            ("volumeNamePrefix", self.ceph.prefix()),
        ];
        let own = parameters.map(|(key, value)| (key.to_owned(), value));
        request.parameters.extend(own);
        let made = self.controller.create(request).await.unwrap();
        let mut volume = provisioned(&made, &requested.capability);
        volume.secrets.clone_from(&self.controller.secrets);
        volume
    }

    /// Publishes a volume to a node, and stages it there.
    async fn up(&self, node: &Node, id: &str, volume: &Volume) -> std::path::PathBuf {
        let publish_context = self.controller.publish(volume, id).await.unwrap();
        std::fs::create_dir_all(node.staging(volume)).unwrap();
        let mut stage = node.stage_request(volume);
        stage.publish_context = publish_context;
        node.send_stage(stage).await.unwrap();
        node.publish(volume, "pod").await.unwrap();
        node.target(volume, "pod")
    }

    /// Runs `rados` on a volume's entry, `csi.volume.<uuid>`.
    fn rados(&self, volume: &Volume, what: &[&str]) -> String {
        let uuid = &volume.handle[volume.handle.len() - 36..];
        let entry = format!("csi.volume.{uuid}");
        let (what, args) = what.split_first().unwrap();
        let cluster = &self.ceph.cluster;
        cluster.rados(&self.pool, &[&[what, &*entry], args].concat())
    }

    /// The registration of the node.
    fn entry(&self, sandbox: &Sandbox, volume: &Volume) -> serde_json::Value {
        let file = sandbox.dir().join("entered").display().to_string();
        self.rados(volume, &["getomapval", "uring-csi.node.node-a", &file]);
        serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap()
    }

    fn blocklist(&self) -> String {
        self.ceph.cluster.ceph(&["osd", "blocklist", "ls"])
    }
}

/// Past every cache, as a database does.
fn direct(path: &Path) -> File {
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(libc::O_DSYNC);
    options.open(path).unwrap()
}

fn client_of(device: &Path) -> String {
    let name = device.file_name().unwrap().to_str().unwrap();
    let id = name.strip_prefix("rbd").unwrap();
    let file = format!("/sys/bus/rbd/devices/{id}/client_addr");
    std::fs::read_to_string(file).unwrap().trim().to_owned()
}

#[test]
fn writes_of_a_lost_node_do_not_reach_the_image() {
    own_cluster_story(async |sandbox, ceph| {
        for node in ["node-a", "node-b"] {
            sandbox.kubelet(node);
        }
        let it = Fencing::new(sandbox, ceph).await;
        let supervisor = Supervisor::start(sandbox).await;
        let setup = NodeSetup {
            node_id: "node-b",
            machine: Machine::OtherHost,
            ..ceph.setup(sandbox)
        };
        let socket = supervisor.socket().display().to_string();
        let other = Node::start_with(sandbox, setup.arg("--holder").arg(&socket)).await;
        let volume = it.volume("v", "block").await;
        let [before, after] = ["before", "after"].map(Content::new);
        let target = it.up(&it.node, "node-a", &volume).await;
        before.write_at(&target, 0).unwrap();
        let pod = direct(&target);
        let client = client_of(&rbds_over(&volume)[0]);

        it.node.kill9().await;
        it.controller.unpublish(&volume, "node-a").await.unwrap();
        assert!(it.blocklist().contains(&client));
        it.controller.wait_for_log("fencing a node's client").await;
        let late = pod
            .write_all_at(&[7; 4096], 0)
            .and_then(|()| pod.sync_all());
        late.unwrap_err();
        let elsewhere = volume.clone().with("mounter", "rbd-nbd");
        let there = it.up(&other, "node-b", &elsewhere).await;
        before.assert_at(&there, 0);
        after.write_at(&there, MIB).unwrap();
        pod.write_all_at(&[7; 4096], MIB)
            .and_then(|()| pod.sync_all())
            .unwrap_err();
        drop(pod);
        other.down(&elsewhere, "pod").await;
        it.controller.unpublish(&volume, "node-b").await.unwrap();

        // The node is back, and was not rebooted.
        it.node.restart().await;
        it.node.down(&volume, "pod").await;
        let target = it.up(&it.node, "node-a", &volume).await;
        before.assert_at(&target, 0);
        after.assert_at(&target, MIB);
        assert_ne!(client_of(&rbds_over(&volume)[0]), client);
        it.node.down(&volume, "pod").await;
        it.controller.unpublish(&volume, "node-a").await.unwrap();
        assert!(!it.blocklist().contains(&client), "the node is back");
        it.controller.delete(&volume.handle).await.unwrap();
        it.node.assert_clean().await;
        other.assert_clean().await;
    });
}

#[test]
fn a_republished_volume_is_registered_again() {
    const KEY: &str = "uring-csi.node.node-a";
    own_cluster_story(async |sandbox, ceph| {
        let it = Fencing::new(sandbox, ceph).await;
        let volume = it.volume("v", "block").await;
        it.up(&it.node, "node-a", &volume).await;
        let client = client_of(&rbds_over(&volume)[0]);
        let is_entered = || it.entry(sandbox, &volume)["address"] == *client;
        assert!(is_entered());
        // The node was cut off, so that the image had no watcher when it was unpublished;
        // the mount stayed.
        it.rados(&volume, &["rmomapkey", KEY]);
        let staged = it.node.stage(&volume).await;
        staged.expect("without fencing it is as it was");
        let mut stage = it.node.stage_request(&volume);
        stage.publish_context = [("fencing".to_owned(), "true".to_owned())].into();
        refused(it.node.send_stage(stage).await, Unavailable, &["v"]);
        it.up(&it.node, "node-a", &volume).await;
        assert!(is_entered());

        it.node.kill9().await;
        it.controller.unpublish(&volume, "node-a").await.unwrap();
        assert!(it.blocklist().contains(&client));
        it.node.restart().await;
        it.node.down(&volume, "pod").await;
        it.node.assert_clean().await;
    });
}

#[test]
fn a_node_stages_while_a_fenced_client_still_has_devices() {
    own_cluster_story(async |sandbox, ceph| {
        let it = Fencing::new(sandbox, ceph).await;
        let [lost, beside] = [
            it.volume("lost", "block").await,
            it.volume("beside", "block").await,
        ];
        for volume in [&lost, &beside] {
            it.up(&it.node, "node-a", volume).await;
        }
        let client = client_of(&rbds_over(&lost)[0]);
        assert_eq!(client_of(&rbds_over(&beside)[0]), client);
        it.controller.unpublish(&lost, "node-a").await.unwrap();
        it.node.down(&lost, "pod").await;

        let content = Content::new("again");
        let target = it.up(&it.node, "node-a", &lost).await;
        content.write_at(&target, 0).unwrap();
        content.assert_at(&target, 0);
        let own = client_of(&rbds_over(&lost)[0]);
        assert_ne!(own, client);
        // A graceful unpublish fences no node, and the fence stays while the client's
        // devices exist.
        it.node.down(&lost, "pod").await;
        it.controller.unpublish(&lost, "node-a").await.unwrap();
        assert!(it.blocklist().contains(&client));
        assert!(!it.blocklist().contains(&own));
        it.node.down(&beside, "pod").await;
        it.up(&it.node, "node-a", &lost).await;
        let lifted = async || {
            it.controller.publish(&lost, "node-a").await.unwrap();
            (!it.blocklist().contains(&client)).then_some(())
        };
        eventually("the fence is lifted", lifted).await;
        it.node.down(&lost, "pod").await;
        it.node.assert_clean().await;
    });
}

#[test]
fn file_systems_of_a_fenced_client_are_unstaged_and_staged_again() {
    own_cluster_story(async |sandbox, ceph| {
        let it = Fencing::new(sandbox, ceph).await;
        let mut volumes = Vec::new();
        for kind in ["ext4", "xfs", "btrfs"] {
            let volume = it.volume(kind, kind).await;
            let target = it.up(&it.node, "node-a", &volume).await;
            let content = Content::new(kind);
            content.write(&target.join("kept"));
            run(&["sync", "-f", target.to_str().unwrap()]);
            // The cache must not write this before the fence, and cannot after it.
            std::fs::write(target.join("late"), vec![7; 1 << 20]).unwrap();
            volumes.push((volume, content));
        }
        it.controller
            .unpublish(&volumes[0].0, "node-a")
            .await
            .unwrap();
        for (volume, _) in &volumes {
            it.node.down(volume, "pod").await;
            it.controller.unpublish(volume, "node-a").await.unwrap();
        }
        for (volume, content) in &volumes {
            let target = it.up(&it.node, "node-a", volume).await;
            content.assert_in(&target.join("kept"));
            it.node.down(volume, "pod").await;
        }
        it.node.assert_clean().await;
    });
}
