//! The whole lifecycle of volumes without faults.

use std::{fs, path::Path};

use futures_util::future::join_all;
use serde_json::json;
use testkit::{
    Ceph, Content, KINDS, Mode, Node, Volume, ceph_story, hex, rbds_of, rbds_over, run, sha256,
};

use super::{assert_nothing_staged, devices_over, lifecycle, write_or_check};
use crate::block::read_only_for_a_while;

#[test]
fn lifecycle_of_every_kind() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for (kind, _) in KINDS {
            lifecycle(&node, &ceph.volume(kind)).await;
            lifecycle(&node, &ceph.static_volume(kind)).await;
        }
        node.assert_clean().await;
    });
}

/// The volume is mounted below its staging path, for any name of kubelet's directory.
#[test]
fn a_volume_staged_behind_a_symlink_has_stats() {
    ceph_story(async |sandbox, ceph| {
        let mut setup = ceph.setup(sandbox);
        setup.symlinked = true;
        let node = Node::start_with(sandbox, setup).await;
        for kind in ["ext4", "block"] {
            let volume = ceph.volume(kind);
            let target = node.up(&volume, "pod").await;
            for path in [&target, &node.staging(&volume)] {
                assert!(!node.stats(&volume, path).await.unwrap().is_empty());
            }
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn sixteen_volumes_at_once() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        at_once(&node, &sixteen(ceph)).await;
        assert!(rbds_of(sandbox.dir()).is_empty());
        node.assert_clean().await;
    });
}

pub fn sixteen(ceph: &Ceph) -> Vec<Volume> {
    (0..16)
        .map(|number| ceph.volume(["ext4", "ext4", "ext4", "block"][number % 4]))
        .collect()
}

/// Two full lives of each, all at the same time.
pub async fn at_once(node: &Node, volumes: &[Volume]) {
    for round in 0..2 {
        // No call is repeated: the first answer must be the right one.
        let targets = join_all(volumes.iter().map(|volume| node.up(volume, "pod"))).await;
        for (volume, target) in volumes.iter().zip(&targets) {
            assert_eq!(devices_over(volume).len(), 1);
            write_or_check(volume, target, &Content::new(&volume.handle), round == 0);
        }
        join_all(volumes.iter().map(|volume| node.down(volume, "pod"))).await;
    }
}

#[test]
fn a_repeat_changes_nothing_and_an_image_is_one_volumes() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for kind in ["ext4", "block"] {
            let volume = ceph.volume(kind);
            for _ in 0..3 {
                node.up(&volume, "pod").await;
                assert_eq!(rbds_over(&volume).len(), 1);
            }
            // A repeat with another secret is the same volume.
            let mut other = volume.clone();
            other
                .secrets
                .insert("userKey".to_owned(), "another".to_owned());
            node.stage(&other).await.unwrap();
            let mut alias = ceph.over(&volume.context["imageName"], kind);
            alias.secrets.clone_from(&volume.secrets);
            let refused = node.stage(&alias).await.unwrap_err();
            assert!(refused.message().contains(&volume.handle), "{refused:?}");
            for _ in 0..2 {
                node.down(&volume, "pod").await;
            }
            assert!(rbds_over(&volume).is_empty());
        }
        node.assert_clean().await;
    });
}

#[test]
fn read_only_volumes_are_read_and_not_written() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for kind in ["ext4", "xfs", "block"] {
            read_and_not_written(&node, &ceph.volume(kind)).await;
        }
        read_only_for_a_while(&node, &ceph.volume("block")).await;
        node.assert_clean().await;
    });
}

pub async fn read_and_not_written(node: &Node, writer: &Volume) {
    let content = Content::new(&writer.handle);
    write_or_check(writer, &node.up(writer, "pod").await, &content, true);
    node.down(writer, "pod").await;
    for mode in [Mode::SingleNodeReaderOnly, Mode::MultiNodeReaderOnly] {
        let reader = writer.clone().mode(mode);
        let target = node.up(&reader, "pod").await;
        write_or_check(&reader, &target, &content, false);
        let device = devices_over(&reader).pop().unwrap();
        let flag = run(&["blockdev", "--getro", device.to_str().unwrap()]);
        assert_eq!(flag.trim(), "1", "{reader:?}");
        let written = if reader.is_block() {
            content.write_at(&target, 0)
        } else {
            fs::write(target.join("other"), "x")
        };
        written.unwrap_err();
        node.down(&reader, "pod").await;
    }
}

#[test]
fn clones_have_what_their_source_had_and_keep_their_own() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for kind in ["ext4", "xfs", "block"] {
            cloned(&node, ceph, kind, |volume| volume).await;
        }
        node.assert_clean().await;
    });
}

/// Clones of a volume in use, and of one of them.
pub async fn cloned(node: &Node, ceph: &Ceph, kind: &str, how: impl Fn(Volume) -> Volume) {
    let source = how(ceph.volume(kind));
    let clone_of = |volume| how(ceph.clone_of(volume, kind));
    let content = Content::new(kind);
    let target = node.up(&source, "pod").await;
    write_or_check(&source, &target, &content, true);
    if kind != "block" {
        run(&["sync", "-f", target.to_str().unwrap()]);
    }
    // Taken in use: as after a crash.
    let [clone, of_clone] = [(); 2].map(|()| clone_of(&source));
    let sum = sum_of(&source, &target);
    for clone in [&clone, &of_clone] {
        let target = node.up(clone, "pod").await;
        assert_eq!(sum_of(clone, &target), sum);
        write_or_check(clone, &target, &Content::new(&clone.handle), true);
    }
    assert_eq!(sum_of(&source, &target), sum);
    for volume in [&clone, &of_clone, &source] {
        node.down(volume, "pod").await;
    }
    // A clone of a clone, with the data written to it.
    let again = clone_of(&clone);
    let target = node.up(&again, "pod").await;
    write_or_check(&again, &target, &Content::new(&clone.handle), false);
    node.down(&again, "pod").await;
}

/// The checksum of the volume's first content.
fn sum_of(volume: &Volume, target: &Path) -> String {
    if volume.is_block() {
        sha256(target).unwrap()
    } else {
        sha256(&target.join("file")).unwrap()
    }
}

#[test]
fn images_in_namespaces_and_with_data_pools() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let data = ceph.cluster.fresh_pool();
        let (kind, bytes) = KINDS[0];
        let apart = ceph.volume_of(kind, bytes, &["--data-pool", &data]);
        lifecycle(&node, &apart.with("dataPool", &data)).await;

        // As the cluster's configuration says; the volume's context may repeat it.
        let pool = ceph.cluster.fresh_pool();
        ceph.cluster
            .rbd(&["namespace", "create", &format!("{pool}/tenant")]);
        let mut entry = ceph.entry();
        entry["rbd"] = json!({"radosNamespace": "tenant"});
        ceph.configure(&[entry]);
        for kind in ["ext4", "block"] {
            let name = ceph.image_name();
            let volume = ceph.over_in(&pool, &name, kind);
            let spec = format!("{pool}/tenant/{name}");
            let create = ["create", "-s", "64M", "--image-feature", "layering", &spec];
            ceph.cluster.rbd(&create);
            lifecycle(&node, &volume).await;
            lifecycle(&node, &volume.with("radosNamespace", "tenant")).await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn map_options_reach_the_driver() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let mut entry = ceph.entry();
        entry["monitors"] = json!([&ceph.cluster.monitors[..], &ceph.cluster.monitors_v2].concat());
        ceph.configure(&[entry]);
        for (options, config) in [
            (
                "krbd:queue_depth=64,notrim;nbd:try-netlink",
                "queue_depth=64,notrim",
            ),
            ("ms_mode=prefer-crc,noshare", "ms_mode=prefer-crc"),
        ] {
            let volume = ceph.volume("ext4").with("mapOptions", options);
            node.up(&volume, "pod").await;
            assert!(
                config_of(&volume).contains(config),
                "{}",
                config_of(&volume)
            );
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn reads_go_to_the_nearest_replica_where_configured() {
    ceph_story(async |sandbox, ceph| {
        let labels = sandbox.dir().join("labels");
        fs::write(&labels, "kubernetes.io/hostname=\"test.a\"\nzone=\"a\"\n").unwrap();
        let setup = ceph
            .setup(sandbox)
            .arg(&format!("--node-labels={}", labels.display()))
            .arg("--crush-location-labels=kubernetes.io/hostname,zone");
        let node = Node::start_with(sandbox, setup).await;
        let [plain, near] = [(); 2].map(|()| ceph.volume("ext4"));
        lifecycle(&node, &plain).await;
        let mut entry = ceph.entry();
        entry["readAffinity"] = json!({"enabled": true, "crushLocationLabels": []});
        ceph.configure(&[entry]);
        node.up(&near, "pod").await;
        let config = config_of(&near);
        assert!(config.contains("read_from_replica=localize"), "{config}");
        assert!(
            config.contains("crush_location=host:test-a|zone:a"),
            "{config}"
        );
        node.down(&near, "pod").await;
        node.assert_clean().await;
    });
}

/// The driver's options in the map of a volume's image.
pub fn config_of(volume: &Volume) -> String {
    let device = rbds_over(volume).pop().expect("a mapped image");
    let id = device.to_str().unwrap().trim_start_matches("/dev/rbd");
    fs::read_to_string(format!("/sys/bus/rbd/devices/{id}/config_info")).unwrap()
}

#[test]
fn a_migrated_volume_is_named_by_its_handle() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let made = ceph.volume("ext4");
        let uuid = uuid::Uuid::new_v4();
        let name = format!("kubernetes-dynamic-pvc-{uuid}");
        let pool = &ceph.cluster.pool;
        let [from, to] = [&made.context["imageName"], &name].map(|name| format!("{pool}/{name}"));
        ceph.cluster.rbd(&["rename", &from, &to]);
        let hex = hex(pool.as_bytes());
        let mut volume = made.clone();
        volume.handle = format!("mig_mons-{}_image-{uuid}_{hex}", ceph.cluster_id);
        volume.context.remove("imageName");
        volume.context.extend(
            [
                ("migration", "true"),
                ("clusterID", &*ceph.cluster_id),
                ("imageName", &*name),
            ]
            .map(|(key, value)| (key.to_owned(), value.to_owned())),
        );
        lifecycle(&node, &volume).await;
        assert_nothing_staged(&node, &volume);
        ceph.cluster.rbd(&["rm", "--no-progress", &to]);
        node.assert_clean().await;
    });
}
