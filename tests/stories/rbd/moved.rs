//! A volume that failed over to another cluster than its handle names, and a cluster whose
//! monitor moved to another address.

use testkit::{
    Ceph, Content, MovedMonitors, Sandbox, Supervisor, TestCluster, ceph_story,
    cluster_of_three_story, own_cluster_story, refused, spec_of,
};
use tonic::Code::NotFound;

use super::{
    lifecycle,
    rbd_nbd::{node_with, served},
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
        let setup = ceph.setup(sandbox).arg("--cluster-mapping");
        let node = setup.arg(file.to_str().expect("UTF-8"));
        let node = testkit::Node::start_with(sandbox, node).await;

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
        ceph.configure(&[other.entry()]);
        lifecycle(&node, &volume).await;
        node.assert_clean().await;
    });
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
