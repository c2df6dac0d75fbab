//! A node without Ceph's libraries: krbd needs none.

use testkit::{MIB, Machine, Node, ceph_story, mappings_of, rbds_of, refused};
use tonic::Code::{FailedPrecondition, Unavailable};

use super::{encrypted, lifecycle};

#[test]
fn plain_volumes_need_no_librbd() {
    ceph_story(async |sandbox, ceph| {
        let mut setup = ceph.setup(sandbox);
        setup.machine = Machine::WithoutLibrbd;
        let node = Node::start_with(sandbox, setup).await;
        for kind in ["ext4", "block"] {
            lifecycle(&node, &ceph.volume(kind)).await;
        }
        lifecycle(&node, &encrypted::volume(ceph, "ext4")).await;

        // The agent cannot list the openers.
        let volume = ceph.volume("ext4");
        let other = ceph.open_elsewhere(&volume);
        lifecycle(&node, &volume).await;
        drop(other);

        // The volume's context has the features, which the agent cannot read from the
        // cluster.
        let features = "exclusive-lock,journaling";
        let journaled = ceph.volume_of("ext4", 64 * MIB, &["--image-feature", features]);
        let journaled_volume = journaled.with("imageFeatures", features);
        refused(
            node.stage(&journaled_volume).await,
            FailedPrecondition,
            &["journaling"],
        );

        assert!(rbds_of(sandbox.dir()).is_empty());
        assert!(mappings_of(sandbox.dir()).is_empty());
        node.assert_clean().await;
    });
}

#[test]
fn volumes_that_need_librbd_are_refused_without_it() {
    ceph_story(async |sandbox, ceph| {
        let mut setup = encrypted::setup(sandbox, ceph);
        setup.machine = Machine::WithoutLibrbd;
        let node = Node::start_with(sandbox, setup).await;
        let sealed = encrypted::sealed(ceph, encrypted::volume(ceph, "ext4"));
        refused(node.stage(&sealed).await, FailedPrecondition, &["librbd1"]);
        let plain = ceph.volume("ext4");
        node.stage(&plain).await.unwrap();
        let mut fenced = node.stage_request(&plain);
        fenced.publish_context = [("fencing".to_owned(), "true".to_owned())].into();
        refused(node.send_stage(fenced).await, Unavailable, &["librados2"]);
        node.unstage(&plain).await.unwrap();
        assert!(rbds_of(sandbox.dir()).is_empty());
        node.assert_clean().await;
    });
}
