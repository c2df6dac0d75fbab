//! Volumes that grow while a pod uses them.

use testkit::{Content, KINDS, MIB, ceph_story, grow_published, refused, spec_of};
use tonic::Code::FailedPrecondition;

#[test]
fn volumes_grow_in_use() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for (kind, small) in KINDS {
            let volume = ceph.volume(kind);
            node.up(&volume, "pod").await;
            let grow = |bytes| ceph.resize(&volume, bytes);
            grow_published(&node, &volume, small, "was not grown", grow).await;
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn an_image_grown_while_unstaged_is_used_whole() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for kind in ["ext4", "xfs"] {
            let volume = ceph.volume(kind);
            let content = Content::new(kind);
            let target = node.up(&volume, "pod").await;
            content.write(&target.join("file"));
            let small = node.stats(&volume, &target).await.unwrap()[0].total;
            node.down(&volume, "pod").await;
            let bytes = KINDS.iter().find(|(known, _)| *known == kind).unwrap().1;
            ceph.resize(&volume, 2 * bytes);
            // A clone into a larger image is the same.
            for volume in [&ceph.clone_of(&volume, kind), &volume] {
                let target = node.up(volume, "pod").await;
                let total = node.stats(volume, &target).await.unwrap()[0].total;
                assert!(total > small + small / 2, "{kind}: {total}");
                content.assert_in(&target.join("file"));
                node.down(volume, "pod").await;
            }
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_volume_grows_after_a_restart() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let (kind, small) = KINDS[1];
        let volume = ceph.volume(kind);
        let target = node.up(&volume, "pod").await;
        node.kill9().await;
        ceph.resize(&volume, 2 * small);
        node.restart().await;
        let size = node.expand(&volume, &target, 2 * small).await.unwrap();
        assert_eq!(size.unsigned_abs(), 2 * small);
        Content::new("grown").write(&target.join("file"));
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_shrunk_image_is_refused() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume_of("ext4", 128 * MIB, &[]);
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;
        let spec = spec_of(&volume);
        let shrink = [
            "resize",
            "--no-progress",
            "--allow-shrink",
            "-s",
            "64M",
            &spec,
        ];
        ceph.cluster.rbd(&shrink);
        refused(node.stage(&volume).await, FailedPrecondition, &["ext4"]);
        node.assert_clean().await;
    });
}
