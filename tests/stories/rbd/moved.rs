//! A volume that failed over to another cluster than its handle names, and a cluster whose
//! monitor moved to another address.

use testkit::{
    Ceph, Content, MovedMonitors, Node, Sandbox, Supervisor, TestCluster, Volume, ceph_story,
    cluster_of_three_story, own_cluster_story, rbds_over, refused, spec_of,
};
use tonic::Code::NotFound;

use super::{
    lifecycle,
    rbd_nbd::{nbds, node_with, served},
    write_or_check,
};

#[test]
fn an_image_is_found_in_the_cluster_it_failed_over_to() {
    ceph_story(async |sandbox, ceph| {
        let other = Ceph::another(sandbox);
        let pool = |ceph: &Ceph| ceph.pool_id(&ceph.cluster.pool).to_string();
        let mapping = serde_json::json!([{
            "clusterIDMapping": {&ceph.cluster_id: &other.cluster_id},
            "RBDPoolIDMapping": [{pool(ceph): pool(&other)}],
        }]);
        let file = sandbox.dir().join("cluster-mapping.json");
        let supervisor = Supervisor::start(sandbox).await;
        let socket = supervisor.socket().display().to_string();
        let setup = ceph.setup(sandbox).arg("--holder").arg(&socket);
        let setup = setup.arg("--cluster-mapping");
        let setup = setup.arg(file.to_str().expect("UTF-8"));
        let node = Node::start_with(sandbox, setup).await;

        let mut volume = ceph.over(&ceph.image_name(), "ext4");
        let create = ["create", "-s", "64M", "--image-feature", "layering"];
        other
            .cluster
            .rbd(&[&create[..], &[&spec_of(&volume)]].concat());
        refused(node.stage(&volume).await, NotFound, &[]);
        std::fs::write(&file, mapping.to_string()).unwrap();
        // The test clusters have users of equal names, with keys of their own.
        volume.secrets = other.secrets();
        lifecycle(&node, &volume).await;
        publish_fenced(&other, &volume);
        for volume in [volume.clone(), served(volume.clone())] {
            let known = [ceph.entry(), other.entry()];
            let content = Content::new("moved");
            let target = node.up(&volume, "pod").await;
            write_or_check(&volume, &target, &content, true);
            stage_again(&node, &volume).await.unwrap();
            // The next supervisor needs the key again.
            supervisor.kill9().await;
            supervisor.restart().await;
            stage_again(&node, &volume).await.unwrap();
            let status = supervisor.status(&volume).await;
            assert!(status.is_none_or(|status| status.has_key));
            // Without the cluster that it is mapped in.
            ceph.configure(&[ceph.entry()]);
            stage_again(&node, &volume).await.unwrap_err();
            ceph.configure(&known);
            stage_again(&node, &volume).await.unwrap();
            assert_eq!(rbds_over(&volume).len() + nbds(&volume).len(), 1);
            write_or_check(&volume, &target, &content, false);
            node.down(&volume, "pod").await;
        }
        ceph.configure(&[other.entry()]);
        lifecycle(&node, &volume).await;
        node.assert_clean().await;
    });
}

#[test]
fn a_staged_volume_of_rbd_nbd_is_staged_again_after_its_cluster_was_renamed() {
    ceph_story(async |sandbox, ceph| {
        let file = sandbox.dir().join("cluster-mapping.json");
        let supervisor = Supervisor::start(sandbox).await;
        let socket = supervisor.socket().display().to_string();
        let setup = ceph.setup(sandbox).arg("--holder").arg(&socket);
        let setup = setup.arg("--cluster-mapping");
        let setup = setup.arg(file.to_str().expect("UTF-8"));
        let node = Node::start_with(sandbox, setup).await;

        let volume = served(ceph.volume("ext4"));
        publish_fenced(ceph, &volume);
        node.up(&volume, "pod").await;
        let pool_id = ceph.pool_id(&ceph.cluster.pool).to_string();
        let renamed = format!("{}-renamed", ceph.cluster_id);
        let mapping = serde_json::json!([{
            "clusterIDMapping": {&ceph.cluster_id: &renamed},
            "RBDPoolIDMapping": [{&pool_id: &pool_id}],
        }]);
        std::fs::write(&file, mapping.to_string()).unwrap();
        let mut entry = ceph.entry();
        entry["clusterID"] = serde_json::json!(renamed);
        ceph.configure(&[entry]);
        stage_again(&node, &volume).await.unwrap();
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

/// Enters the node in the volume's journal, as a controller that fences does.
fn publish_fenced(ceph: &Ceph, volume: &Volume) {
    let entry = format!("csi.volume.{}", &volume.handle[volume.handle.len() - 36..]);
    let args = ["setomapval", &entry, "uring-csi.node.node-a", "{}"];
    ceph.cluster.rados(&ceph.cluster.pool, &args);
}

/// Stages a staged volume, as a controller that fences has it: each time the node registers
/// its client.
async fn stage_again(node: &Node, volume: &Volume) -> Result<(), tonic::Status> {
    let mut stage = node.stage_request(volume);
    let fencing = ("fencing".to_owned(), "on".to_owned());
    stage.publish_context.extend([fencing]);
    node.send_stage(stage).await
}

#[test]
fn a_monitor_may_move_under_volumes_of_krbd_and_rbd_nbd() {
    own_cluster_story(async |sandbox, ceph| {
        monitors_move(sandbox, ceph, TestCluster::move_monitor).await;
    });
}

#[test]
#[ignore = "ten daemons: make test-matrix"]
fn all_of_three_monitors_may_be_replaced_under_volumes_of_krbd_and_rbd_nbd() {
    cluster_of_three_story(async |sandbox, ceph| {
        monitors_move(sandbox, ceph, TestCluster::replace_monitors).await;
    });
}

async fn monitors_move(
    sandbox: &Sandbox,
    ceph: &Ceph,
    move_them: impl FnOnce(&TestCluster) -> MovedMonitors,
) {
    let supervisor = Supervisor::start(sandbox).await;
    let node = node_with(sandbox, ceph, &supervisor).await;
    let volumes = [ceph.volume("ext4"), served(ceph.volume("ext4"))];
    for volume in &volumes {
        let target = node.up(volume, "pod").await;
        write_or_check(volume, &target, &Content::new("before"), true);
    }
    // A device keeps the monitors that ceph-csi mapped it by.
    let theirs = ceph.volume("ext4");
    ceph.stage_as_ceph_csi(&node, &theirs);
    let moved = move_them(&ceph.cluster);
    // From now on only the new monitors know the OSD's address.
    drop(ceph.stop());
    for volume in &volumes {
        let target = node.target(volume, "pod");
        write_or_check(volume, &target, &Content::new("after"), true);
    }
    // Later maps find it by the configuration.
    let mut entry = ceph.entry();
    entry["monitors"] = serde_json::json!(moved.monitors);
    ceph.configure(&[entry]);
    node.kill9().await;
    node.restart().await;
    lifecycle(&node, &theirs).await;
    for volume in &volumes {
        node.down(volume, "pod").await;
        let target = node.up(volume, "pod").await;
        write_or_check(volume, &target, &Content::new("after"), false);
        node.down(volume, "pod").await;
    }
    node.assert_clean().await;
}
