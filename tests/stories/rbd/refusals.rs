//! Images that cannot be mapped are refused with an error that names the remedy, and
//! nothing is left behind.

use testkit::{
    Ceph, KINDS, Machine, Mode, Node, NodeSetup, Supervisor, Volume, ceph_story, rbds_of, refused,
    refused_by_monitor,
};
use tonic::Code::{FailedPrecondition, InvalidArgument, NotFound, Unauthenticated, Unavailable};

use super::{
    lifecycle, outages,
    rbd_nbd::{nbds, served},
};

fn with_secret(volume: &Volume, name: &str, value: &str) -> Volume {
    let mut other = volume.clone();
    other.secrets.insert(name.to_owned(), value.to_owned());
    other
}

#[test]
fn wrong_credentials_are_unauthenticated() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume("ext4");
        // The administrator's key is valid, but not this user's.
        for (name, value) in [("userKey", &*ceph.cluster.admin_key), ("userID", "nobody")] {
            let other = with_secret(&volume, name, value);
            let answer = refused_by_monitor(async || node.stage(&other).await).await;
            refused(answer, Unauthenticated, &["userKey"]);
        }
        let broken = with_secret(&volume, "userKey", "not/base64!");
        refused(node.stage(&broken).await, Unauthenticated, &["userKey"]);
        for name in ["userID", "userKey"] {
            let mut lacking = volume.clone();
            lacking.secrets.remove(name);
            refused(node.stage(&lacking).await, Unauthenticated, &[name]);
        }
        assert!(rbds_of(sandbox.dir()).is_empty());
        lifecycle(&node, &volume).await;
        node.assert_clean().await;
    });
}

#[test]
fn missing_clusters_pools_and_images_are_named() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let image = ceph.over("no-such-image", "ext4");
        refused(node.stage(&image).await, NotFound, &["no-such-image"]);
        let pool = ceph.over_in("no-such-pool", "image", "ext4");
        refused(node.stage(&pool).await, NotFound, &["no-such-pool"]);
        let namespace = ceph.volume("ext4").with("radosNamespace", "no-such-space");
        refused(node.stage(&namespace).await, NotFound, &["no-such-space"]);
        let cluster = ceph.volume("ext4").with("clusterID", "elsewhere");
        refused(
            node.stage(&cluster).await,
            InvalidArgument,
            &["elsewhere", "config.json"],
        );
        node.assert_clean().await;
    });
}

#[test]
fn the_secondary_of_a_mirror_is_not_staged() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let pool = ceph.cluster.fresh_pool();
        let volume = ceph.over_in(&pool, "image", "ext4");
        let path = format!("{pool}/image");
        ceph.cluster.rbd(&["create", "-s", "64M", &path]);
        let mirror = |args: &[&str]| ceph.cluster.rbd(&[&["mirror"], args].concat());
        mirror(&["pool", "enable", &pool, "image"]);
        mirror(&["image", "enable", &path, "snapshot"]);
        mirror(&["image", "demote", &path]);
        for mode in [Mode::SingleNodeWriter, Mode::MultiNodeReaderOnly] {
            let staged = node.stage(&volume.clone().mode(mode)).await;
            refused(staged, FailedPrecondition, &["secondary", "promote"]);
            assert!(rbds_of(sandbox.dir()).is_empty());
        }
        mirror(&["image", "promote", &path]);
        lifecycle(&node, &volume).await;
        node.assert_clean().await;
    });
}

#[test]
fn rbd_nbd_fails_with_the_errors_of_krbd() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        // The agent itself connects to the cluster before a map, or rbd-nbd alone does.
        for (machine, node_id) in [
            (Machine::Host, "node-a"),
            (Machine::WithoutLibrbd, "node-b"),
        ] {
            let setup = NodeSetup {
                node_id,
                machine,
                ..ceph.setup(sandbox)
            };
            let socket = supervisor.socket().display().to_string();
            let node = Node::start_with(sandbox, setup.arg("--holder").arg(&socket)).await;
            let volume = served(ceph.volume("ext4"));
            for (name, value) in [("userKey", &*ceph.cluster.admin_key), ("userID", "nobody")] {
                let other = with_secret(&volume, name, value);
                let answer = refused_by_monitor(async || node.stage(&other).await).await;
                refused(answer, Unauthenticated, &["userKey"]);
            }
            let image = served(ceph.over("no-such-image", "ext4"));
            refused(node.stage(&image).await, NotFound, &["no-such-image"]);
            let pool = served(ceph.over_in("no-such-pool", "image", "ext4"));
            refused(node.stage(&pool).await, NotFound, &["no-such-pool"]);
            let namespace = volume.clone().with("radosNamespace", "no-such-space");
            refused(node.stage(&namespace).await, NotFound, &["no-such-space"]);
            let away = served(outages::of_monitors(ceph, &["127.0.0.1:1".to_owned()]));
            refused(node.stage(&away).await, Unavailable, &[]);
            for volume in [&volume, &image, &pool, &away] {
                assert!(nbds(volume).is_empty());
                assert!(supervisor.status(volume).await.is_none());
            }
            lifecycle(&node, &volume).await;
            node.assert_clean().await;
        }
    });
}

#[test]
fn an_invalid_attribute_is_named_by_its_key() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume("ext4");
        for (key, value) in [
            ("mapOptions", "secret=AQ=="),
            ("mapOptions", "krbd:name=admin"),
            ("mapOptions", "a b"),
            ("mapOptions", "tcmu:x"),
            ("imageFeatures", "levitation"),
            ("mounter", "fuse"),
            ("staticVolume", "perhaps"),
            ("pool", ""),
        ] {
            let wrong = volume.clone().with(key, value);
            refused(node.stage(&wrong).await, InvalidArgument, &[key]);
        }
        // A well-formed option that the driver does not have.
        let unknown = volume.clone().with("mapOptions", "no_such_option=1");
        refused(
            node.stage(&unknown).await,
            FailedPrecondition,
            &["map options"],
        );
        lifecycle(&node, &volume).await;
        node.assert_clean().await;
    });
}

#[test]
fn features_that_the_driver_lacks_are_named() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let (kind, bytes) = KINDS[0];
        let journaling = ["--image-feature", "layering,exclusive-lock,journaling"];
        // By the class, or by the image alone.
        let made = ceph.volume_of(kind, bytes, &journaling);
        for volume in [made.clone(), made.with("imageFeatures", "journaling")] {
            refused(
                node.stage(&volume).await,
                FailedPrecondition,
                &["journaling"],
            );
        }
        let known = [
            "--image-feature",
            "layering,exclusive-lock,object-map,fast-diff",
        ];
        let volume = ceph.volume_of(kind, bytes, &known);
        lifecycle(&node, &volume.with("imageFeatures", known[1])).await;
        node.assert_clean().await;
    });
}

#[test]
fn a_node_without_clusters_names_the_flag() {
    ceph_story(async |sandbox, ceph| {
        let node = Node::start_with(sandbox, NodeSetup::new(sandbox)).await;
        let volume = ceph.volume("ext4");
        refused(
            node.stage(&volume).await,
            FailedPrecondition,
            &["--ceph-config"],
        );
        node.assert_clean().await;
    });
}

#[test]
fn an_image_with_content_is_not_formatted() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume("ext4");
        let as_xfs = described_as(&volume, ceph, "xfs");
        lifecycle(&node, &volume).await;
        refused(node.stage(&as_xfs).await, FailedPrecondition, &["ext4"]);
        // Neither is a blank one that is read-only.
        let reader = ceph.volume("ext4").mode(Mode::MultiNodeReaderOnly);
        refused(node.stage(&reader).await, FailedPrecondition, &[]);
        lifecycle(&node, &volume).await;
        node.assert_clean().await;
    });
}

/// The same image as a volume of another kind.
fn described_as(volume: &Volume, ceph: &Ceph, kind: &str) -> Volume {
    ceph.over(&volume.context["imageName"], kind)
}
