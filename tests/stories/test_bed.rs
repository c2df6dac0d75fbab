//! What other tests stand on.

use std::{thread, time::Duration};

use crate::harness::TestCluster;

#[test]
fn a_ceph_cluster_of_ones_own_is_started_stopped_and_gone() {
    let Some(cluster) = TestCluster::own() else {
        return;
    };
    let pool = cluster.fresh_pool();
    let image = format!("{pool}/image");
    cluster.rbd(&["create", "--size", "1G", &image]);
    cluster.stop_osd();
    cluster.start_osd();
    assert!(cluster.rbd(&["info", &image]).contains("size 1 GiB"));
    let dir = cluster.dir().to_owned();
    drop(cluster);
    while dir.exists() {
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_ceph_cluster_is_the_same_for_all_who_share_it() {
    let (Some(one), Some(other)) = (TestCluster::shared(), TestCluster::shared()) else {
        return;
    };
    assert_eq!((&one.fsid, &one.key), (&other.fsid, &other.key));
}
