//! A volume whose handle names a cluster that it is not in any more.

use tonic::Code::NotFound;

use super::whole_life;
use crate::harness::{Ceph, ceph_story, refused, spec_of};

#[test]
fn an_image_is_followed_to_the_cluster_that_stands_in() {
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
        let node = crate::harness::Node::start_with(sandbox, node).await;

        let mut volume = ceph.over(&ceph.image_name(), "ext4");
        let create = ["create", "-s", "64M", "--image-feature", "layering"];
        other
            .cluster
            .rbd(&[&create[..], &[&spec_of(&volume)]].concat());
        refused(node.stage(&volume).await, NotFound, &[]);
        std::fs::write(&file, mapping.to_string()).unwrap();
        // The clusters of tests have users of one name and each its own keys.
        volume.secrets = other.secrets();
        whole_life(&node, &volume).await;
        ceph.configure(&[other.entry()]);
        whole_life(&node, &volume).await;
        node.assert_clean().await;
    });
}
