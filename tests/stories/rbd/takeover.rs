//! Volumes pass from ceph-csi's node plugin to this driver and back while they are in use:
//! each unstages what the other has staged, and neither needs the other's records.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command};

use serde_json::Value;
use testkit::{
    Ceph, Content, MIB, Node, STAGE_FILE, Volume, ceph_csi_stage_file, ceph_story, eventually,
    program, publish_as_ceph_csi, rbds_of, rbds_over, refused, run, unmap_by_rbd,
    unstage_as_ceph_csi,
};
use tonic::Code::Unavailable;

use super::{assert_nothing_staged, encrypted, write_or_check};

fn volumes(ceph: &Ceph) -> [Volume; 5] {
    [
        ceph.volume("ext4"),
        ceph.volume("xfs"),
        ceph.volume("block"),
        ceph.static_volume("ext4"),
        encrypted::volume(ceph, "ext4"),
    ]
}

#[test]
fn volumes_staged_by_ceph_csi_are_used_and_unstaged() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for repeats in [false, true] {
            for volume in volumes(ceph) {
                let content = Content::new(&volume.handle);
                ceph.stage_as_ceph_csi(&node, &volume);
                let target = publish_as_ceph_csi(&node, &volume, "pod");
                write_or_check(&volume, &target, &content, true);
                // This driver replaces ceph-csi, or the reverse.
                node.kill9().await;
                assert_eq!(state_of(&volume, &node.kubelet), "recovers");
                node.restart().await;
                if repeats {
                    // As kubelet does after its own restart.
                    node.up(&volume, "pod").await;
                }
                assert_eq!(rbds_over(&volume).len(), 1);
                assert!(!node.stats(&volume, &target).await.unwrap().is_empty());
                node.publish(&volume, "another").await.unwrap();
                write_or_check(&volume, &node.target(&volume, "another"), &content, false);
                node.unpublish(&volume, "another").await.unwrap();
                grown(&node, ceph, &volume).await;
                node.down(&volume, "pod").await;
                assert_nothing_staged(&node, &volume);
                assert!(rbds_over(&volume).is_empty());
                // It was the same volume all the time.
                let target = node.up(&volume, "pod").await;
                write_or_check(&volume, &target, &content, false);
                node.down(&volume, "pod").await;
            }
        }
        node.assert_clean().await;
    });
}

/// What `uringctl takeover` says of the volume.
fn state_of(volume: &Volume, kubelet: &Path) -> String {
    let mut uringctl = Command::new(program("uringctl"));
    uringctl.args(["takeover", "--dry-run", "--json", "--kubelet-dir"]);
    let output = uringctl.arg(kubelet).output().expect("uringctl");
    let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let mut volumes = answer["volumes"].as_array().expect("volumes").iter();
    let its = volumes.find(|found| found["volume_id"] == *volume.handle);
    its.expect("the volume")["state"]
        .as_str()
        .expect("a state")
        .to_owned()
}

async fn grown(node: &Node, ceph: &Ceph, volume: &Volume) {
    let target = node.target(volume, "pod");
    let total = async || {
        node.stats(volume, &target).await.unwrap()[0]
            .total
            .unsigned_abs()
    };
    let before = total().await;
    let larger = if volume.fs_type() == "xfs" { 416 } else { 160 } * MIB;
    ceph.resize(volume, larger);
    node.expand(volume, &target, larger).await.unwrap();
    let after = total().await;
    assert!(after > before + 48 * MIB, "{before}, then {after}");
}

#[test]
fn ceph_csi_unstages_volumes_of_this_driver() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for volume in volumes(ceph) {
            let content = Content::new(&volume.handle);
            let target = node.up(&volume, "pod").await;
            write_or_check(&volume, &target, &content, true);
            assert_staged_as_ceph_csi_does(&node, &volume);
            unstaged_by_ceph_csi(&node, &volume, &target).await;
            let target = node.up(&volume, "pod").await;
            write_or_check(&volume, &target, &content, false);
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

/// ceph-csi unpublishes and unstages the volume of an agent that was killed. The agent
/// restarts, with records of a volume that is no longer staged.
pub async fn unstaged_by_ceph_csi(node: &Node, volume: &Volume, target: &Path) {
    node.kill9().await;
    run(&["umount", target.to_str().unwrap()]);
    if volume.is_block() {
        fs::remove_file(target).unwrap();
    } else {
        fs::remove_dir(target).unwrap();
    }
    unstage_as_ceph_csi(node, volume);
    assert_nothing_staged(node, volume);
    node.restart().await;
    node.down(volume, "pod").await;
}

/// Letter for letter, and mode for mode.
fn assert_staged_as_ceph_csi_does(node: &Node, volume: &Volume) {
    let staging = node.staging(volume);
    let file = staging.join(STAGE_FILE);
    let text = fs::read_to_string(&file).unwrap();
    assert_eq!(text, ceph_csi_stage_file(volume));
    assert_eq!(
        fs::metadata(&file).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let mut names: Vec<_> = fs::read_dir(&staging)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let mut expected = [&*volume.handle, STAGE_FILE];
    expected.sort_unstable();
    assert_eq!(names, expected);
    let point = staging.join(&volume.handle);
    run(&["mountpoint", "-q", point.to_str().unwrap()]);
}

#[test]
fn the_stage_file_has_all_that_ceph_csi_reads() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume("ext4").with("unmapOptions", "krbd:force");
        node.stage(&volume).await.unwrap();
        let text = fs::read(node.staging(&volume).join(STAGE_FILE)).unwrap();
        let stash: Value = serde_json::from_slice(&text).unwrap();
        // As Go's map options are after ceph-csi has taken krbd's part of them.
        assert_eq!(stash["unmapOptions"], "force");
        node.unstage(&volume).await.unwrap();

        // A namespace that only the cluster's configuration has: `rbd unmap` gets
        // it as an argument.
        ceph.cluster.rbd(&[
            "namespace",
            "create",
            &format!("{}/{}", ceph.cluster.pool, ceph.cluster_id),
        ]);
        let mut entry = ceph.entry();
        entry["rbd"] = serde_json::json!({"radosNamespace": ceph.cluster_id});
        ceph.configure(&[entry]);
        let name = ceph.image_name();
        let spec = format!("{}/{}/{name}", ceph.cluster.pool, ceph.cluster_id);
        let create = ["create", "-s", "64M", "--image-feature", "layering", &spec];
        ceph.cluster.rbd(&create);
        let volume = ceph.over(&name, "ext4");
        node.stage(&volume).await.unwrap();
        let text = fs::read_to_string(node.staging(&volume).join(STAGE_FILE)).unwrap();
        let known = volume.clone().with("radosNamespace", &ceph.cluster_id);
        assert_eq!(text, ceph_csi_stage_file(&known));
        node.kill9().await;
        unstage_as_ceph_csi(&node, &volume);
        node.restart().await;
        node.unstage(&volume).await.unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn a_stage_that_ceph_csi_began_is_finished() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for kind in ["ext4", "block"] {
            // Killed after the stage file was written; killed after the map.
            for maps in [false, true] {
                for ends in [false, true] {
                    let volume = ceph.volume(kind);
                    let staging = node.staging(&volume);
                    fs::create_dir_all(&staging).unwrap();
                    fs::write(staging.join(STAGE_FILE), ceph_csi_stage_file(&volume)).unwrap();
                    if maps {
                        ceph.map_by_rbd(&volume, "noudev");
                    }
                    if ends {
                        let target = node.up(&volume, "pod").await;
                        assert_eq!(rbds_over(&volume).len(), 1);
                        write_or_check(&volume, &target, &Content::new(kind), true);
                        node.unpublish(&volume, "pod").await.unwrap();
                    }
                    node.unstage(&volume).await.unwrap();
                    assert_nothing_staged(&node, &volume);
                    assert!(rbds_of(sandbox.dir()).is_empty(), "{kind} {maps} {ends}");
                }
            }
        }
        node.assert_clean().await;
    });
}

/// ceph-csi writes the file in place.
#[test]
fn a_damaged_stage_file_binds_nothing_but_a_mapped_image() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume("ext4");
        let staging = node.staging(&volume);
        for maps in [false, true] {
            fs::create_dir_all(staging.join(&volume.handle)).unwrap();
            let whole = ceph_csi_stage_file(&volume);
            fs::write(staging.join(STAGE_FILE), &whole[..whole.len() / 2]).unwrap();
            if maps {
                let device = ceph.map_by_rbd(&volume, "noudev");
                let unstaged = node.unstage(&volume).await;
                refused(unstaged, Unavailable, &["stage file"]);
                unmap_by_rbd(&device);
            }
            // Other stories may have mapped images.
            eventually("unstaged", async || node.unstage(&volume).await.ok()).await;
            assert_nothing_staged(&node, &volume);
        }
        node.assert_clean().await;
    });
}

#[test]
fn the_emulated_ceph_csi_stages_as_this_driver_does() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for volume in volumes(ceph) {
            for round in 0..2 {
                ceph.stage_as_ceph_csi(&node, &volume);
                let target = publish_as_ceph_csi(&node, &volume, "pod");
                write_or_check(&volume, &target, &Content::new(&volume.handle), round == 0);
                assert_staged_as_ceph_csi_does(&node, &volume);
                run(&["umount", target.to_str().unwrap()]);
                unstage_as_ceph_csi(&node, &volume);
                assert_nothing_staged(&node, &volume);
            }
        }
    });
}
